// What the KDA kernels share: index arrays, dtype conversion, gate and beta activations.
#pragma once

#include "kda/params.h"
#include "ptx/math.cuh"

#include <cuda_bf16.h>
#include <cuda_fp16.h>

namespace flare::kda {

inline constexpr float kLog2e = 1.4426950408889634f;
inline constexpr float kLn2 = 0.6931471805599453f;
inline constexpr float kNormEpsilon = 1e-6f;  // added to the sum of squares

__device__ __forceinline__ int64_t load_index(const void* array, int64_t i, bool index64) {
    return index64 ? static_cast<const int64_t*>(array)[i] : static_cast<const int32_t*>(array)[i];
}

// Two packed 16-bit values, lower half first.
template <typename T>
__device__ __forceinline__ float2 unpack2(uint32_t u) {
    if constexpr (sizeof(T) == 2 && std::is_same_v<T, __nv_bfloat16>) {
        return {__uint_as_float(u << 16), __uint_as_float(u & 0xffff0000u)};
    } else {
        return __half22float2(*reinterpret_cast<const __half2*>(&u));
    }
}

template <typename T>
__device__ __forceinline__ void unpack8(float (&x)[8], const uint4& u) {
    const uint32_t words[4] = {u.x, u.y, u.z, u.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        const float2 pair = unpack2<T>(words[i]);
        x[2 * i] = pair.x;
        x[2 * i + 1] = pair.y;
    }
}

// One element of an array whose dtype is T, or fp32 where is_fp32.
template <typename T>
__device__ __forceinline__ float load_scalar(const void* array, int64_t i, bool is_fp32) {
    return is_fp32 ? static_cast<const float*>(array)[i] : static_cast<float>(static_cast<const T*>(array)[i]);
}

__device__ __forceinline__ float load_state(const void* state, int64_t i, bool is_bf16) {
    return is_bf16 ? __bfloat162float(static_cast<const __nv_bfloat16*>(state)[i])
                   : static_cast<const float*>(state)[i];
}

__device__ __forceinline__ void store_state(void* state, int64_t i, bool is_bf16, float x) {
    if (is_bf16) {
        static_cast<__nv_bfloat16*>(state)[i] = __float2bfloat16(x);
    } else {
        static_cast<float*>(state)[i] = x;
    }
}

// What a gate needs besides its input: decay = exp(gate) from y = g + dt_bias and a = exp(a_log) (1 without a_log).
struct GateConstants {
    Gate gate;
    float a_log2e;      // a * log2(e)
    float bound_log2e;  // lower_bound * log2(e)
};

__device__ __forceinline__ GateConstants gate_constants(const KdaParams& p, int64_t head) {
    const float a = p.a_log != nullptr ? expf(p.a_log[head]) : 1.0f;
    return {p.gate, a * kLog2e, p.lower_bound * kLog2e};
}

// log2(decay), <= 0, from y = g + dt_bias.
__device__ __forceinline__ float bounded_gate_log2(const GateConstants& c, float y) {
    // The sigmoid by ex2 and rcp: tanh.approx would cost one operation less, but its absolute error swamps small gates.
    return c.bound_log2e * ptx::rcp_approx(1.0f + ptx::exp2_approx(-c.a_log2e * y));
}

__device__ __forceinline__ float softplus_gate_log2(const GateConstants& c, float y) {
    const float z = ptx::exp2_approx(-fabsf(y) * kLog2e);
    // ln(1 + z): lg2.approx has a fixed absolute error near 1, so small z take the series.
    const float log1p_z = z < 0.03f ? z * (1.0f - z * (0.5f - z * (1.0f / 3.0f))) : kLn2 * ptx::log2_approx(1.0f + z);
    return -c.a_log2e * (fmaxf(y, 0.0f) + log1p_z);
}

__device__ __forceinline__ float gate_log2(const GateConstants& c, float y) {
    return c.gate == Gate::kBounded    ? bounded_gate_log2(c, y)
           : c.gate == Gate::kSoftplus ? softplus_gate_log2(c, y)
                                       : y * kLog2e;
}

// 2^x for x <= 0. Close to 1 the first-order series is exact to fp32, where a bias of ex2.approx would add up over 10^5
// tokens.
__device__ __forceinline__ float decay_from_log2(float x) {
    const float power = ptx::exp2_approx(x);
    const float series = fmaf(x, kLn2, 1.0f);
    float decay;
    // Both sides computed, then chosen: as an expression it becomes a divergent branch per element.
    asm("{\n.reg .pred p;\nsetp.gt.f32 p, %1, 0fB97BA882;\nselp.f32 %0, %2, %3, p;\n}"  // -2.4e-4
        : "=f"(decay)
        : "f"(x), "f"(series), "f"(power));
    return decay;
}

__device__ __forceinline__ float activate_beta(BetaActivation activation, float x) {
    if (activation == BetaActivation::kRaw) {
        return x;
    }
    const float s = __fdividef(1.0f, 1.0f + ptx::exp2_approx(-x * kLog2e));
    return activation == BetaActivation::kSigmoid2 ? 2.0f * s : s;
}

// What a recurrence on Hopper is run for: output and state; or, without an output, the state from zeros, or the map from the
// state before: without values, on the identity (segments_common_sm90.cuh).
enum class RecurrenceWork { kOutput, kEnd, kMap };

}  // namespace flare::kda
