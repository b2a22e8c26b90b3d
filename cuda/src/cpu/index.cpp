#include "index.h"

#include <algorithm>

#include "api/status.h"

namespace flare::cpu {
namespace {

int32_t out_of_range(const char* name, int64_t entry, int64_t value, int64_t low, int64_t high) {
    return fail(FLARE_ERROR_INDEX, "%s[%lld] is %lld, allowed are %lld..%lld", name, static_cast<long long>(entry),
                static_cast<long long>(value), static_cast<long long>(low), static_cast<long long>(high));
}

}  // namespace

int32_t check_index_range(const char* name, const void* array, int32_t dtype, int64_t count, int64_t low,
                          int64_t high) {
    for (int64_t i = 0; i < count; ++i) {
        const int64_t value = read_index(array, dtype, i);
        if (value < low || value > high) {
            return out_of_range(name, i, value, low, high);
        }
    }
    return FLARE_OK;
}

int32_t check_cumulative(const char* name, const void* array, int32_t dtype, int64_t batch, int64_t longest,
                         int64_t total) {
    int64_t previous = 0;
    for (int64_t i = 0; i <= batch; ++i) {
        const int64_t value = read_index(array, dtype, i);
        if (value < previous || value > total) {
            return out_of_range(name, i, value, previous, total);
        }
        if (i > 0 && value - previous > longest) {
            return fail(FLARE_ERROR_INDEX,
                        "%s[%lld] is %lld, which makes sequence %lld %lld long; the longest allowed is %lld", name,
                        static_cast<long long>(i), static_cast<long long>(value), static_cast<long long>(i - 1),
                        static_cast<long long>(value - previous), static_cast<long long>(longest));
        }
        previous = value;
    }
    return FLARE_OK;
}

int32_t check_used(const char* name, const void* used, const void* cumulative, int32_t dtype, int64_t batch,
                   int64_t dense_length) {
    for (int64_t b = 0; b < batch; ++b) {
        const int64_t limit = sequence_span(cumulative, nullptr, dense_length, dtype, b).length;
        const int64_t value = read_index(used, dtype, b);
        if (value < 0 || value > limit) {
            return out_of_range(name, b, value, 0, limit);
        }
    }
    return FLARE_OK;
}

int32_t check_pages(const void* table, int32_t dtype, int64_t b, int64_t stride_b, int64_t page_size, int64_t num_pages,
                    int64_t first_key, int64_t end_key) {
    if (first_key >= end_key) {
        return FLARE_OK;
    }
    for (int64_t i = first_key / page_size; i <= (end_key - 1) / page_size; ++i) {
        const int64_t page = read_index(table, dtype, b * stride_b + i);
        if (page < 0 || page >= num_pages) {
            return fail(FLARE_ERROR_INDEX, "block_table[%lld][%lld] is %lld, allowed are 0..%lld (num_pages - 1)",
                        static_cast<long long>(b), static_cast<long long>(i), static_cast<long long>(page),
                        static_cast<long long>(num_pages - 1));
        }
    }
    return FLARE_OK;
}

int32_t check_distinct(const char* name, std::vector<std::pair<int64_t, int64_t>>& places) {
    std::sort(places.begin(), places.end());
    for (size_t i = 1; i < places.size(); ++i) {
        if (places[i].first == places[i - 1].first) {
            return fail(FLARE_ERROR_INDEX, "%s[%lld] and %s[%lld] are both %lld; each place can be written once in a call", name,
                        static_cast<long long>(places[i - 1].second), name, static_cast<long long>(places[i].second),
                        static_cast<long long>(places[i].first));
        }
    }
    return FLARE_OK;
}

}  // namespace flare::cpu
