// Who holds what in a warpgroup's m64 x N fp32 accumulator: thread t (warp w = t / 32, lane l = t % 32), register i.
// A thread owns two rows; in each group of 8 columns, two adjacent columns of each.
#pragma once

#include <cstdint>

namespace flare::tile {

__host__ __device__ constexpr int acc_row(int thread, int i) {
    return 16 * (thread / 32) + (thread % 32) / 4 + 8 * ((i / 2) % 2);
}

__host__ __device__ constexpr int acc_col(int thread, int i) {
    return 8 * (i / 4) + 2 * (thread % 4) + i % 2;
}

// Four neighbouring lanes share a row.
__device__ __forceinline__ float quad_max(float x) {
    x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, 1));
    return fmaxf(x, __shfl_xor_sync(0xffffffffu, x, 2));
}

__device__ __forceinline__ float quad_sum(float x) {
    x += __shfl_xor_sync(0xffffffffu, x, 1);
    return x + __shfl_xor_sync(0xffffffffu, x, 2);
}

}  // namespace flare::tile
