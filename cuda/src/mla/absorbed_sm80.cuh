// Device side of absorbed_sm80.h: lengths, addresses of latent rows, element conversion.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

#include "../ptx/math.cuh"
#include "../ptx/sync.cuh"
#include "absorbed_sm80.h"

namespace flare::mla {

inline constexpr int kRow656Scales = 512;  // byte offset of the four fp32 scales
inline constexpr int kRow656Rope = 528;    // of the 64 bf16 rope values
inline constexpr float kLn2 = 0.69314718055994530942f;
inline constexpr float kLog2e = 1.44269504088896340736f;

__device__ __forceinline__ int64_t index_at(const void* array, int32_t index_is_64, int64_t i) {
    return index_is_64 ? __ldg(static_cast<const long long*>(array) + i) : __ldg(static_cast<const int*>(array) + i);
}

// The query tokens and keys of one sequence, or with indices of one token. Rows of q and of a pool number below 2^31
// (the API sees to it), so that divisions are of 32 bits.
struct Sequence {
    int32_t batch;
    int32_t first_token;  // 0 but with indices
    int32_t num_tokens;
    int32_t num_keys;  // entries of the index list with indices
    int64_t q_base;    // multiples of the row stride before token 0 when packed
    int64_t k_base;
};

__device__ __forceinline__ int32_t clamp_length(int64_t x, int32_t most) {
    return static_cast<int32_t>(x < 0 ? 0 : x > most ? most : x);
}

__device__ __forceinline__ Sequence load_sequence(const AbsorbedArgs& a, int32_t unit) {
    Sequence s{};
    if (a.indices != nullptr) {
        s.batch = unit / a.seqlen_q;
        s.first_token = unit - s.batch * a.seqlen_q;
        s.num_tokens = 1;
        s.num_keys = a.topk;
        if (a.topk_length != nullptr) {
            const int64_t at = s.batch * a.topk_length_stride_b + s.first_token * a.topk_length_stride_s;
            s.num_keys = clamp_length(index_at(a.topk_length, a.index_is_64, at), a.topk);
        }
        return s;
    }
    s.batch = unit;
    s.num_tokens = a.seqlen_q;
    s.num_keys = a.seqlen_k;
    if (a.cu_seqlens_q != nullptr) {
        s.q_base = index_at(a.cu_seqlens_q, a.index_is_64, unit);
        s.num_tokens = clamp_length(index_at(a.cu_seqlens_q, a.index_is_64, unit + 1) - s.q_base, a.seqlen_q);
    }
    if (a.cu_seqlens_k != nullptr) {
        s.k_base = index_at(a.cu_seqlens_k, a.index_is_64, unit);
        s.num_keys = clamp_length(index_at(a.cu_seqlens_k, a.index_is_64, unit + 1) - s.k_base, a.seqlen_k);
    }
    if (a.seqused_q != nullptr) {
        s.num_tokens = clamp_length(index_at(a.seqused_q, a.index_is_64, unit), s.num_tokens);
    }
    if (a.seqused_k != nullptr) {
        s.num_keys = clamp_length(index_at(a.seqused_k, a.index_is_64, unit), s.num_keys);
    }
    return s;
}

// A value that the compiler takes for a new one each time: addresses derived from it are computed where they are used
// instead of being kept in registers over the whole tile loop. up_project_sm80.cuh spills 0 bytes
// with it and 156 to 296 without (nvcc 13.0).
__device__ __forceinline__ int recomputed(int x) {
    asm volatile("" : "+r"(x));
    return x;
}

__device__ __forceinline__ Sequence uniform_sequence(const Sequence& s) {
    Sequence u{};
    u.batch = ptx::uniform(s.batch);
    u.first_token = ptx::uniform(s.first_token);
    u.num_tokens = ptx::uniform(s.num_tokens);
    u.num_keys = ptx::uniform(s.num_keys);
    u.q_base = s.q_base;
    u.k_base = int64_t{ptx::uniform(static_cast<int32_t>(s.k_base >> 32))} << 32 |
               static_cast<uint32_t>(ptx::uniform(static_cast<int32_t>(s.k_base)));
    return u;
}

// Elements before (token, head 0) in q, q_rope or out.
__device__ __forceinline__ int64_t token_offset(const AbsorbedArgs& a, const Sequence& s, int32_t token, int64_t stride_b,
                                                int64_t stride_s) {
    return a.cu_seqlens_q != nullptr ? (s.q_base + token) * stride_s : s.batch * stride_b + token * stride_s;
}

__device__ __forceinline__ int64_t lse_offset(const AbsorbedArgs& a, const Sequence& s, int32_t token, int32_t head) {
    return (a.cu_seqlens_q != nullptr ? s.q_base : s.batch * a.lse_stride_b) + head * a.lse_stride_h + token;
}

// Page (or sequence) of key j and the row in it; row < 0 = absent.
struct KeyPlace {
    int32_t page;
    int32_t row;

    __device__ __forceinline__ bool present() const { return row >= 0; }
    // Offset from the base of the latents or ropes whose strides are given.
    __device__ __forceinline__ int64_t offset(const Sequence& s, int64_t stride_b, int64_t stride_s) const {
        return page * stride_b + (s.k_base + row) * stride_s;
    }
};

__device__ __forceinline__ KeyPlace key_place(const AbsorbedArgs& a, const Sequence& s, int32_t j) {
    if (a.indices != nullptr) {
        const int64_t at = s.batch * a.indices_stride_b + s.first_token * a.indices_stride_s + j;
        const int64_t index = index_at(a.indices, a.index_is_64, at);
        if (index < 0 || index >= int64_t{a.num_pages} * a.page_size) {
            return {0, -1};
        }
        const int32_t row = static_cast<int32_t>(index);
        const int32_t page = row / a.page_size;
        return {page, row - page * a.page_size};
    }
    if (a.block_table != nullptr) {
        const int32_t page = j / a.page_size;
        const int64_t at = s.batch * a.block_table_stride_b + page;
        return {static_cast<int32_t>(index_at(a.block_table, a.index_is_64, at)), j - page * a.page_size};
    }
    return {a.cu_seqlens_k != nullptr ? 0 : s.batch, j};
}

// Keys that a token sees: [0, limit).
__device__ __forceinline__ int32_t key_limit(const AbsorbedArgs& a, const Sequence& s, int32_t token) {
    const int32_t limit = a.causal ? token + s.num_keys - s.num_tokens + 1 : s.num_keys;
    return a.indices != nullptr ? s.num_keys : max(0, limit);
}

// e4m3 shifted into fp16 is the value / 256, denormals included; 0x7f is its only NaN.
__device__ __forceinline__ float e4m3_to_float(uint32_t byte) {
    const uint32_t bits = (byte & 0x80u) << 8 | (byte & 0x7fu) << 7;
    const float x = __half2float(__ushort_as_half(static_cast<unsigned short>(bits))) * 256.0f;
    return (byte & 0x7fu) == 0x7fu ? __int_as_float(0x7fc00000) : x;
}

__device__ __forceinline__ float load_element(const void* base, DType dtype, int64_t i) {
    switch (dtype) {
        case DType::kBf16:
            return __bfloat162float(static_cast<const __nv_bfloat16*>(base)[i]);
        case DType::kFp16:
            return __half2float(static_cast<const __half*>(base)[i]);
        default:
            return static_cast<const float*>(base)[i];
    }
}

__device__ __forceinline__ void store_element(void* base, DType dtype, int64_t i, float x) {
    switch (dtype) {
        case DType::kBf16:
            static_cast<__nv_bfloat16*>(base)[i] = __float2bfloat16(x);
            return;
        case DType::kFp16:
            static_cast<__half*>(base)[i] = __float2half(x);
            return;
        default:
            static_cast<float*>(base)[i] = x;
    }
}

// Two adjacent elements at an even place.
template <typename T>
__device__ __forceinline__ void store_pair(void* base, int64_t at, float x, float y) {
    *reinterpret_cast<uint32_t*>(static_cast<T*>(base) + at) = ptx::pack2<T>(x, y);
}

__device__ __forceinline__ void store_pair(void* base, DType dtype, int64_t at, float x, float y) {
    if (dtype == DType::kBf16) {
        store_pair<__nv_bfloat16>(base, at, x, y);
    } else if (dtype == DType::kFp16) {
        store_pair<__half>(base, at, x, y);
    } else {
        *reinterpret_cast<float2*>(static_cast<float*>(base) + at) = make_float2(x, y);
    }
}

}  // namespace flare::mla
