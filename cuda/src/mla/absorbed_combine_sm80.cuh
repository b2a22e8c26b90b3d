// Merges the partial results of a row's key splits: out = sum_s w_s O_s, w_s = 2^(lse_s - lse), lse = log2 sum_s 2^lse_s; the
// sink joins the sum. One block a row, four columns a thread.
#pragma once

#include "absorbed_mma_sm80.cuh"
#include "normaliser.cuh"

namespace flare::mla {
namespace absorbed {

inline constexpr int kCombineThreads = 128;
inline constexpr int kCombineSplits = 256;
static_assert(4 * kCombineThreads >= kLatentCols);

}  // namespace absorbed

__global__ void __launch_bounds__(absorbed::kCombineThreads)
    mla_absorbed_combine_kernel(const AbsorbedArgs a, const AbsorbedTiles tiles) {
    using namespace absorbed;
    __shared__ float weights[kCombineSplits];
    const int tid = static_cast<int>(threadIdx.x);
    const int lane = tid % 32;
    const int unit = static_cast<int>(blockIdx.x) / tiles.rows_padded;
    const int row = static_cast<int>(blockIdx.x) - unit * tiles.rows_padded;
    const Sequence s = load_sequence(a, unit);
    const int token = row / a.heads;
    const int head = row - token * a.heads;
    if (token >= s.num_tokens) {
        return;
    }
    const int64_t step = int64_t{tiles.units} * tiles.rows_padded;  // between splits
    const int64_t first = blockIdx.x;
    if (tid < 32) {
        constexpr int kPerLane = kCombineSplits / 32;
        float x[kPerLane];
#pragma unroll
        for (int k = 0; k < kPerLane; ++k) {
            const int split = lane + 32 * k;
            x[k] = split < tiles.num_splits ? tiles.lse_part[split * step + first] : -INFINITY;
        }
        float lse;
        weigh_partials(x, a.sink != nullptr ? a.sink[head] * kLog2e : -INFINITY, lse);
#pragma unroll
        for (int k = 0; k < kPerLane; ++k) {
            weights[lane + 32 * k] = x[k];
        }
        if (lane == 0 && a.lse != nullptr) {
            a.lse[lse_offset(a, s, s.first_token + token, head)] = lse;
        }
    }
    __syncthreads();
    const int column = 4 * tid;
    if (column >= a.d_c) {
        return;
    }
    float4 acc = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
#pragma unroll 4
    for (int split = 0; split < tiles.num_splits; ++split) {
        const float w = weights[split];
        const float4 x = *reinterpret_cast<const float4*>(tiles.o_part + (split * step + first) * a.d_c + column);
        acc.x = fmaf(w, x.x, acc.x);
        acc.y = fmaf(w, x.y, acc.y);
        acc.z = fmaf(w, x.z, acc.z);
        acc.w = fmaf(w, x.w, acc.w);
    }
    const int64_t at =
        token_offset(a, s, s.first_token + token, tiles.out_stride_b, tiles.out_stride_s) + head * tiles.out_stride_h + column;
    store_pair(tiles.out, tiles.out_dtype, at, acc.x, acc.y);
    store_pair(tiles.out, tiles.out_dtype, at + 2, acc.z, acc.w);
}

}  // namespace flare::mla
