// One token of one value head in fp32, for the kernels that walk token by token; and where sequences, states and slots
// lie.
#pragma once

#include "kda/common.cuh"

namespace flare::kda {

__device__ __forceinline__ float load_any(const void* array, int64_t i, DType dtype) {
    return dtype == DType::kFp32   ? static_cast<const float*>(array)[i]
           : dtype == DType::kFp16 ? __half2float(static_cast<const __half*>(array)[i])
                                   : __bfloat162float(static_cast<const __nv_bfloat16*>(array)[i]);
}

// The same in two steps, so that what waits for memory comes late: the bits of an element, and its value. The dtype is
// the same for the whole grid.
__device__ __forceinline__ uint32_t load_raw(const void* array, int64_t i, DType dtype) {
    return dtype == DType::kFp32 ? static_cast<const uint32_t*>(array)[i] : static_cast<const uint16_t*>(array)[i];
}

__device__ __forceinline__ float convert(uint32_t raw, DType dtype) {
    return dtype == DType::kFp32   ? __uint_as_float(raw)
           : dtype == DType::kFp16 ? __half2float(__ushort_as_half(static_cast<unsigned short>(raw)))
                                   : __uint_as_float(raw << 16);
}

// Four neighbours of a 16-bit dtype, at a multiple of four from a 16-byte aligned base.
__device__ __forceinline__ uint2 load_raw4(const void* array, int64_t i) {
    return *reinterpret_cast<const uint2*>(static_cast<const uint16_t*>(array) + i);
}

__device__ __forceinline__ void convert4(float (&x)[4], const uint2& raw, DType dtype) {
    const float2 low = dtype == DType::kFp16 ? unpack2<__half>(raw.x) : unpack2<__nv_bfloat16>(raw.x);
    const float2 high = dtype == DType::kFp16 ? unpack2<__half>(raw.y) : unpack2<__nv_bfloat16>(raw.y);
    x[0] = low.x, x[1] = low.y, x[2] = high.x, x[3] = high.y;
}

__device__ __forceinline__ void store_any(void* array, int64_t i, DType dtype, float x) {
    if (dtype == DType::kFp32) {
        static_cast<float*>(array)[i] = x;
    } else if (dtype == DType::kFp16) {
        static_cast<__half*>(array)[i] = __float2half(x);
    } else {
        static_cast<__nv_bfloat16*>(array)[i] = __float2bfloat16(x);
    }
}

// The tokens of sequence n: rows first .. first + count - 1 of batch row `batch`.
struct TokenSpan {
    int64_t batch;
    int64_t first;
    int64_t count;
};

__device__ __forceinline__ TokenSpan token_span(const KdaParams& p, int64_t n) {
    if (p.cu_seqlens == nullptr) {
        return {n, 0, p.seqlen};
    }
    const int64_t first = load_index(p.cu_seqlens, n, p.index64);
    return {0, first, load_index(p.cu_seqlens, n + 1, p.index64) - first};
}

__device__ __forceinline__ int64_t element_offset(const Strides& s, const TokenSpan& span, int64_t token,
                                                  int64_t head) {
    return span.batch * s.batch + (span.first + token) * s.token + head * s.head;
}

// Rows of the state pools. A sequence without a slot table has its own row.
struct Slots {
    const KdaParams& p;
    int64_t n;

    __device__ __forceinline__ int64_t at(int64_t column) const {
        return p.state_slots != nullptr ? load_index(p.state_slots, n * p.slots_stride_n + column, p.index64) : n;
    }
    __device__ __forceinline__ bool is_padding(int64_t slot) const {
        return p.state_slots != nullptr && slot == p.padding_slot;
    }
    __device__ __forceinline__ bool per_token() const { return p.state_slots != nullptr && p.slots_per_sequence > 1; }
    // The slot that the sequence starts from.
    __device__ __forceinline__ int64_t start() const {
        return at(per_token() && p.num_accepted != nullptr ? load_index(p.num_accepted, n, p.index64) - 1 : 0);
    }
};

// One warp: normalised and scaled q, normalised k and the decay less 1 of a token into shared memory. K <= 32 * kSteps.
// Less 1, because a slow decay rounded to fp32 is off by up to 3e-8, the same in every token where the gate is.
template <int kSteps>
__device__ __forceinline__ void prepare_token(float* smem_q, float* smem_k, float* smem_decay_less_1,
                                              const KdaParams& p, const GateConstants& gate, const TokenSpan& span,
                                              int64_t token, int64_t head, int64_t head_qk, int lane) {
    const int64_t q0 = element_offset(p.q_stride, span, token, head_qk);
    const int64_t k0 = element_offset(p.k_stride, span, token, head_qk);
    const int64_t g0 = element_offset(p.g_stride, span, token, head);
    float q[kSteps], k[kSteps], g[kSteps];
#pragma unroll
    for (int i = 0; i < kSteps; ++i) {
        const int c = lane + 32 * i;
        const bool inside = c < p.head_dim_k;
        q[i] = inside ? load_any(p.q, q0 + c, p.dtype) : 0.0f;
        k[i] = inside ? load_any(p.k, k0 + c, p.dtype) : 0.0f;
        g[i] = inside ? load_any(p.g, g0 + c, p.gate_dtype) : 0.0f;
        if (inside && p.dt_bias != nullptr) {
            g[i] += p.dt_bias[head * p.head_dim_k + c];
        }
    }
    float sum_q = 0.0f;
    float sum_k = 0.0f;
#pragma unroll
    for (int i = 0; i < kSteps; ++i) {
        sum_q = fmaf(q[i], q[i], sum_q);
        sum_k = fmaf(k[i], k[i], sum_k);
    }
#pragma unroll
    for (int step = 16; step > 0; step /= 2) {
        sum_q += __shfl_xor_sync(0xffffffffu, sum_q, step);
        sum_k += __shfl_xor_sync(0xffffffffu, sum_k, step);
    }
    const float norm_q = p.scale * (p.qk_l2norm != 0 ? rsqrtf(sum_q + kNormEpsilon) : 1.0f);
    const float norm_k = p.qk_l2norm != 0 ? rsqrtf(sum_k + kNormEpsilon) : 1.0f;
#pragma unroll
    for (int i = 0; i < kSteps; ++i) {
        const int c = lane + 32 * i;
        smem_q[c] = q[i] * norm_q;
        smem_k[c] = k[i] * norm_k;
        smem_decay_less_1[c] = expm1f(gate_log2(gate, g[i]) * kLn2);
    }
}

// beta of value column `column`.
__device__ __forceinline__ float token_beta(const KdaParams& p, const TokenSpan& span, int64_t token, int64_t head,
                                            int column) {
    const int64_t offset = element_offset(p.beta_stride, span, token, head) + (p.beta_per_channel != 0 ? column : 0);
    return activate_beta(p.beta_activation, load_any(p.beta, offset, p.beta_dtype));
}

}  // namespace flare::kda
