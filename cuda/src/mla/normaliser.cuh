// How softmaxes over parts of a row's keys become one, in log2 units: the factor of O, the weights of partial results.
#pragma once

#include <cmath>
#include <cstdint>

#include "../ptx/math.cuh"

namespace flare::mla {

// Factor of O, and lse, of a row with running maximum m and sum; sink = -inf: none.
__device__ __forceinline__ float normaliser_log2(float m, float sum, float sink, float& lse) {
    if (sum == 0.0f || sink == INFINITY) {  // no key, or all weight on the sink
        lse = sink;
        return 0.0f;
    }
    const float top = fmaxf(m, sink);
    const float weight = ptx::exp2_approx(m - top);
    const float total = fmaf(sum, weight, ptx::exp2_approx(sink - top));
    lse = top + ptx::log2_approx(total);
    return weight / total;
}

// The same with lse in natural log.
__device__ __forceinline__ float normaliser(float m, float sum, float sink_log2, float& lse) {
    constexpr float kLn2 = 0.69314718055994530942f;
    const float factor = normaliser_log2(m, sum, sink_log2, lse);
    lse *= kLn2;
    return factor;
}

// For a warp: from lse (log2) of partial results, kPerLane a lane, -inf where there is none, to their weights; lse of the row
// in natural log.
template <int kPerLane>
__device__ __forceinline__ void weigh_partials(float (&x)[kPerLane], float sink_log2, float& lse) {
    float top = sink_log2;
#pragma unroll
    for (int k = 0; k < kPerLane; ++k) {
        top = fmaxf(top, x[k]);
    }
#pragma unroll
    for (int offset = 16; offset > 0; offset /= 2) {
        top = fmaxf(top, __shfl_xor_sync(0xffffffffu, top, offset));
    }
    const float base = top == -INFINITY ? 0.0f : top;
    float sum = 0.0f;
#pragma unroll
    for (int k = 0; k < kPerLane; ++k) {
        x[k] = ptx::exp2_approx(x[k] - base);
        sum += x[k];
    }
#pragma unroll
    for (int offset = 16; offset > 0; offset /= 2) {
        sum += __shfl_xor_sync(0xffffffffu, sum, offset);
    }
    const float factor = normaliser(base, sum, sink_log2, lse);
#pragma unroll
    for (int k = 0; k < kPerLane; ++k) {
        x[k] *= factor;
    }
}

}  // namespace flare::mla
