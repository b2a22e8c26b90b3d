// U in fp16, whatever its range: for the recurrences on Hopper.
#pragma once

#include "tile/fragment.cuh"

namespace flare::kda {

// The products with U take it in fp16, three bits more than bf16 has: the sums of U over a long memory show its rounding.
// Where a value column leaves fp16's range in a chunk, it is scaled by a power of two on both sides of the products, so that
// results don't change.
struct ColumnScale {
    bool any;  // of the warp
    float by[2];

    __device__ __forceinline__ explicit ColumnScale(const float (&u)[16]) : by{1.0f, 1.0f} {
        float largest[2];
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            float pair[4];
#pragma unroll
            for (int j = 0; j < 4; ++j) {
                pair[j] = fmaxf(fabsf(u[4 * j + 2 * h]), fabsf(u[4 * j + 2 * h + 1]));
            }
            largest[h] = fmaxf(fmaxf(pair[0], pair[1]), fmaxf(pair[2], pair[3]));
        }
        const auto outside = [](float x) {  // of [2^-12, 2^15], as integers: one comparison
            constexpr uint32_t kSmallest = (127 - 12) << 23, kLargest = (127 + 15) << 23;
            return __float_as_uint(x) - kSmallest > kLargest - kSmallest && x != 0.0f;
        };
        any = __any_sync(0xffffffffu, outside(largest[0]) || outside(largest[1])) != 0;
        if (any) {
#pragma unroll
            for (int h = 0; h < 2; ++h) {
                const float x = tile::quad_max(largest[h]);
                if (outside(x)) {
                    const int exponent = min(max((__float_as_int(x) >> 23) - 127, -100), 100);
                    by[h] = __int_as_float((127 - exponent) << 23);
                }
            }
        }
    }
    template <int kCount>
    __device__ __forceinline__ void apply(float (&x)[kCount]) const {
        if (any) {
#pragma unroll
            for (int i = 0; i < kCount; ++i) {
                x[i] *= by[(i / 2) % 2];
            }
        }
    }
    template <int kCount>
    __device__ __forceinline__ void undo(float (&x)[kCount]) const {
        if (any) {
            const float back[2] = {1.0f / by[0], 1.0f / by[1]};
#pragma unroll
            for (int i = 0; i < kCount; ++i) {
                x[i] *= back[(i / 2) % 2];
            }
        }
    }
};

}  // namespace flare::kda
