// Reading index arrays (int32 or int64 by dtype), and the checks of their entries that run on the calling thread before
// anything is written.
#pragma once

#include <cstdint>
#include <utility>
#include <vector>

#include "flare.h"

namespace flare::cpu {

// `static`, as in convert.h: also used by files that are compiled per instruction set.
static inline int64_t read_index(const void* array, int32_t dtype, int64_t i) {
    return dtype == FLARE_INT64 ? static_cast<const int64_t*>(array)[i] : static_cast<const int32_t*>(array)[i];
}

// Rows of sequence b: where they start in a packed tensor (0 when dense), and how many are in use.
struct SequenceSpan {
    int64_t begin;
    int64_t length;
};

// The three ways a length can be given: `used[b]`, else the difference of `cumulative`, else `dense_length`.
static inline SequenceSpan sequence_span(const void* cumulative, const void* used, int64_t dense_length, int32_t dtype,
                                         int64_t b) {
    SequenceSpan span{0, dense_length};
    if (cumulative != nullptr) {
        span.begin = read_index(cumulative, dtype, b);
        span.length = read_index(cumulative, dtype, b + 1) - span.begin;
    }
    if (used != nullptr) {
        span.length = read_index(used, dtype, b);
    }
    return span;
}

// Each returns FLARE_OK, or FLARE_ERROR_INDEX with a text that names argument, entry, value and allowed range.

// [count] values in [low, high].
int32_t check_index_range(const char* name, const void* array, int32_t dtype, int64_t count, int64_t low, int64_t high);

// [batch + 1] offsets: from >= 0, not decreasing, each length <= longest, the last <= total.
int32_t check_cumulative(const char* name, const void* array, int32_t dtype, int64_t batch, int64_t longest,
                         int64_t total);

// [batch] lengths in use, each <= the sequence's own length (cumulative, or else dense_length).
int32_t check_used(const char* name, const void* used, const void* cumulative, int32_t dtype, int64_t batch,
                   int64_t dense_length);

// cu_seqlens_q, cu_seqlens_k, seqused_q and seqused_k of attention or MLA prefill, those that are given.
template <typename Params>
int32_t check_lengths(const Params& p) {
    const int32_t type = p.index_dtype;
    if (p.cu_seqlens_q != nullptr) {
        if (const int32_t status =
                check_cumulative("cu_seqlens_q", p.cu_seqlens_q, type, p.batch, p.seqlen_q, p.total_q)) {
            return status;
        }
    }
    if (p.cu_seqlens_k != nullptr) {
        if (const int32_t status =
                check_cumulative("cu_seqlens_k", p.cu_seqlens_k, type, p.batch, p.seqlen_k, p.total_k)) {
            return status;
        }
    }
    if (p.seqused_q != nullptr) {
        if (const int32_t status = check_used("seqused_q", p.seqused_q, p.cu_seqlens_q, type, p.batch, p.seqlen_q)) {
            return status;
        }
    }
    if (p.seqused_k != nullptr) {
        if (const int32_t status = check_used("seqused_k", p.seqused_k, p.cu_seqlens_k, type, p.batch, p.seqlen_k)) {
            return status;
        }
    }
    return FLARE_OK;
}

// The entries of block table row b that cover keys [first_key, end_key): page numbers in [0, num_pages).
int32_t check_pages(const void* table, int32_t dtype, int64_t b, int64_t stride_b, int64_t page_size, int64_t num_pages,
                    int64_t first_key, int64_t end_key);

// A place to write to and the entry that names it; no place may be named twice (in one call it would be a race). Sorts `places`.
int32_t check_distinct(const char* name, std::vector<std::pair<int64_t, int64_t>>& places);

}  // namespace flare::cpu
