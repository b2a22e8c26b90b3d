// flare_cache_append on the CPU: rotary, conversion or quantisation, and the write into the paged cache.
#include <cmath>
#include <cstring>
#include <new>

#include "api/status.h"
#include "convert.h"
#include "cpu.h"
#include "index.h"
#include "kernels.h"
#include "thread_pool.h"

namespace flare::cpu {
namespace {

// One row of `width` channels in fp32, turned and written.
class Appender {
  public:
    Appender(const flare_cache_append_params& params, const Kernels& kernels, float* buffer)
        : p_(params), kernels_(kernels), buffer_(buffer) {}

    void append(int64_t token) {
        const int64_t slot = read_index(p_.slots, p_.index_dtype, token);
        if (slot < 0) {
            return;
        }
        const int64_t page = slot / p_.page_size;
        const int64_t offset = slot % p_.page_size;
        const int64_t k_row = page * p_.k_cache_stride_b + offset * p_.k_cache_stride_s;
        const bool has_v = p_.v != nullptr && p_.head_dim_v > 0;
        if (p_.layout == FLARE_CACHE_LATENT) {
            append_latent(token, k_row, has_v);
            return;
        }
        const int64_t v_row = page * p_.v_cache_stride_b + offset * p_.v_cache_stride_s;
        for (int64_t head = 0; head < p_.heads; ++head) {
            load(p_.k, token * p_.k_stride_t + head * p_.k_stride_h, p_.head_dim_k, buffer_);
            rotate(token, buffer_);
            store(p_.k_cache, k_row + head * p_.k_cache_stride_h, p_.head_dim_k, p_.k_descale, head);
            if (has_v) {
                load(p_.v, token * p_.v_stride_t + head * p_.v_stride_h, p_.head_dim_v, buffer_);
                store(p_.v_cache, v_row + head * p_.v_cache_stride_h, p_.head_dim_v, p_.v_descale, head);
            }
        }
    }

  private:
    void append_latent(int64_t token, int64_t row, bool has_rope) {
        load(p_.k, token * p_.k_stride_t, p_.head_dim_k, buffer_);
        float* rope = buffer_ + p_.head_dim_k;
        if (has_rope) {
            load(p_.v, token * p_.v_stride_t, p_.head_dim_v, rope);
            rotate(token, rope);
        }
        if (p_.cache_dtype != FLARE_UINT8) {
            store(p_.k_cache, row, p_.head_dim_k + p_.head_dim_v, nullptr, 0);
            return;
        }
        // 512 e4m3 values in groups of 128, 4 fp32 scales, 64 bf16 values.
        unsigned char* out = static_cast<unsigned char*>(p_.k_cache) + row;
        for (int group = 0; group < 4; ++group) {
            const float* values = buffer_ + group * 128;
            float largest = 0.0f;
            for (int i = 0; i < 128; ++i) {
                const float magnitude = std::fabs(values[i]);
                largest = magnitude > largest ? magnitude : largest;
            }
            const float scale = group_scale(largest);
            for (int i = 0; i < 128; ++i) {
                out[group * 128 + i] = float_to_e4m3(values[i] / scale);
            }
            std::memcpy(out + 512 + group * 4, &scale, sizeof(scale));
        }
        kernels_.store_row(rope, FLARE_BF16, 64, out + 528);
    }

    // 2^ceil(log2(max(amax / 448, 1e-4))), from the bits: exact where log2 would round.
    static float group_scale(float largest) {
        const float wanted = largest / 448.0f > 1e-4f ? largest / 448.0f : 1e-4f;
        if (wanted > bits_float(0x7f000000u)) {  // 2^127: the largest power there is
            return bits_float(0x7f000000u);
        }
        const uint32_t bits = float_bits(wanted);
        return bits_float((bits + 0x7fffffu) & 0x7f800000u);
    }

    void load(const void* src, int64_t offset, int64_t n, float* dst) const {
        kernels_.load_row(static_cast<const char*>(src) + offset * dtype_bytes(p_.dtype), p_.dtype, n, dst);
    }

    void store(void* dst, int64_t offset, int64_t n, const float* descale, int64_t head) {
        if (descale != nullptr) {
            for (int64_t i = 0; i < n; ++i) {
                buffer_[i] /= descale[head];
            }
        }
        kernels_.store_row(buffer_, p_.cache_dtype, n, static_cast<char*>(dst) + offset * dtype_bytes(p_.cache_dtype));
    }

    void rotate(int64_t token, float* values) const {
        if (p_.rotary_cos == nullptr) {
            return;
        }
        const int64_t half = p_.rotary_dim / 2;
        const int64_t position = read_index(p_.positions, p_.index_dtype, token);
        const float* cosines = p_.rotary_cos + position * half;
        const float* sines = p_.rotary_sin + position * half;
        const bool interleaved = p_.rotary_interleaved != 0;
        for (int64_t i = 0; i < half; ++i) {
            float* first = values + (interleaved ? 2 * i : i);
            float* second = values + (interleaved ? 2 * i + 1 : i + half);
            const float x = *first;
            const float y = *second;
            *first = x * cosines[i] - y * sines[i];
            *second = y * cosines[i] + x * sines[i];
        }
    }

    const flare_cache_append_params& p_;
    const Kernels& kernels_;
    float* buffer_;
};

}  // namespace

int32_t cache_append(const flare_cache_append_params& params) {
    const int64_t num_slots = params.num_pages * params.page_size;
    std::vector<std::pair<int64_t, int64_t>> places;
    for (int64_t token = 0; token < params.num_tokens; ++token) {
        const int64_t slot = read_index(params.slots, params.index_dtype, token);
        if (slot >= num_slots) {
            return fail(FLARE_ERROR_INDEX,
                        "slots[%lld] is %lld, allowed are 0..%lld (num_pages * page_size - 1), or negative to skip",
                        static_cast<long long>(token), static_cast<long long>(slot),
                        static_cast<long long>(num_slots - 1));
        }
        if (slot < 0) {
            continue;
        }
        places.emplace_back(slot, token);
        if (params.rotary_cos == nullptr) {
            continue;
        }
        const int64_t position = read_index(params.positions, params.index_dtype, token);
        if (position < 0 || position >= params.max_position) {
            return fail(FLARE_ERROR_INDEX, "positions[%lld] is %lld, allowed are 0..%lld (max_position - 1)",
                        static_cast<long long>(token), static_cast<long long>(position),
                        static_cast<long long>(params.max_position - 1));
        }
    }
    if (const int32_t status = check_distinct("slots", places)) {
        return status;
    }
    const Kernels& kernels = active_kernels();
    auto body = [&](int64_t item, void* scratch) {
        Appender appender(params, kernels, static_cast<float*>(scratch));
        const int64_t end = (item + 1) * kTokensPerItem;
        for (int64_t token = item * kTokensPerItem; token < (end < params.num_tokens ? end : params.num_tokens);
             ++token) {
            appender.append(token);
        }
    };
    const double work = 8.0 * static_cast<double>(params.num_tokens * params.heads) *
                        static_cast<double>(params.head_dim_k + params.head_dim_v);
    try {
        parallel_for((params.num_tokens + kTokensPerItem - 1) / kTokensPerItem,
                     choose_threads(params.num_threads, work),
                     static_cast<size_t>(params.head_dim_k + params.head_dim_v) * sizeof(float), body);
    } catch (const std::bad_alloc&) {
        return fail(FLARE_ERROR_MEMORY, "cache_append: no memory for a thread's scratch");
    }
    return FLARE_OK;
}

}  // namespace flare::cpu
