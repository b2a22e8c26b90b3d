// Online softmax over one warpgroup's m64 x N score fragment. A thread owns two rows (r = 0: l/4, r = 1: l/4 + 8).
// Scores stay unscaled; weights are exp2(s * scale_log2 - max * scale_log2), one FFMA and one MUFU each. The row sum
// stays thread-local until finish().
#pragma once

#include "../ptx/math.cuh"
#include "../tile/fragment.cuh"

#include <cmath>
#include <cstdint>

namespace flare::attention {

// kOffset: weights are 2^kOffset times what they are named, to use more of e4m3's range; sums likewise, so outputs are not.
// kSlack: the maximum follows only when it has grown by more than kSlack binary orders; until then weights exceed 1, up to
// 2^kSlack, which the final division undoes. The output then needs rescaling seldom.
// kIntegerMax: scores join the maximum three at a time, as integers, where they can: for Hopper, which has an instruction for it.
template <int kOffset, int kSlackQuarters, bool kIntegerMax>
struct OnlineSoftmax {
    static constexpr float kSlack = 0.25f * kSlackQuarters;
    float row_max[2];
    float row_sum[2];

    __device__ __forceinline__ void reset() {
        row_max[0] = row_max[1] = -INFINITY;
        row_sum[0] = row_sum[1] = 0.0f;
    }

    // Raises the maxima to those of s. alpha is what the accumulated output has to be multiplied with, base what weigh() takes.
    template <int kCount>
    __device__ __forceinline__ void raise(const float (&s)[kCount], float (&alpha)[2], float (&base)[2], float scale_log2) {
        float best[2];
        if constexpr (kIntegerMax) {
            both_highest_of_bits(s, best);
        } else {
#pragma unroll
            for (int r = 0; r < 2; ++r) {
                best[r] = own_highest(s, r);
            }
        }
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            float new_max = tile::quad_max(best[r]);
            if constexpr (kSlackQuarters > 0) {
                // Both -inf: NaN, which compares false.
                new_max = (new_max - row_max[r]) * scale_log2 > kSlack ? new_max : row_max[r];
            }
            base[r] = base_of(new_max, scale_log2);
            alpha[r] = ptx::exp2_approx(row_max[r] * scale_log2 - base[r]);
            base[r] -= kOffset;
            row_max[r] = new_max;
            row_sum[r] *= alpha[r];
        }
    }

    // s becomes the weights; alpha is what the accumulated output has to be multiplied with.
    template <int kCount>
    __device__ __forceinline__ void update(float (&s)[kCount], float (&alpha)[2], float scale_log2) {
        float base[2];
        raise(s, alpha, base, scale_log2);
        weigh<0, kCount>(s, base, scale_log2);
    }

    // The same for a single warp's m16 rows, and o with it. A row's maximum is raised, and its output rescaled, only when it
    // has grown by more than a factor of 2^8: weights stay below that, sums and products keep their relative precision, and
    // after the first blocks hardly any warp has to rescale.
    template <int kCount, int kOutputs>
    __device__ __forceinline__ void update_lazily(float (&s)[kCount], float (&o)[kOutputs], float scale_log2) {
        float new_max[2];
        bool grows[2];
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            new_max[r] = highest(s, r);
            grows[r] = (new_max[r] - row_max[r]) * scale_log2 > 8.0f;  // false where both are -inf
        }
        if (__any_sync(0xffffffffu, grows[0] || grows[1])) {
            float alpha[2];
#pragma unroll
            for (int r = 0; r < 2; ++r) {
                alpha[r] = grows[r] ? ptx::exp2_approx((row_max[r] - new_max[r]) * scale_log2) : 1.0f;
                row_max[r] = grows[r] ? new_max[r] : row_max[r];
                row_sum[r] *= alpha[r];
            }
#pragma unroll
            for (int i = 0; i < kOutputs; ++i) {
                o[i] *= alpha[(i / 2) % 2];
            }
        }
        const float base[2] = {base_of(row_max[0], scale_log2), base_of(row_max[1], scale_log2)};
        weigh<0, kCount>(s, base, scale_log2);
    }

    // Of what row r has seen, with s.
    template <int kCount>
    __device__ __forceinline__ float highest(const float (&s)[kCount], int r) const {
        return tile::quad_max(own_highest(s, r));
    }

    // The same of what this thread has of s.
    template <int kCount>
    __device__ __forceinline__ float own_highest(const float (&s)[kCount], int r) const {
        float even = row_max[r];
        float odd = s[2 * r + 1];
        even = fmaxf(even, s[2 * r]);
#pragma unroll
        for (int i = 4; i < kCount; i += 4) {
            even = fmaxf(even, s[i + 2 * r]);
            odd = fmaxf(odd, s[i + 2 * r + 1]);
        }
        return fmaxf(even, odd);
    }

    // And on the bits, with those of a number without a sign: Hopper has a maximum of three integers, not of three floats, at
    // the same rate as one of two. kCount is a multiple of 8.
    template <int kCount>
    static __device__ __forceinline__ int own_highest_of_bits(const float (&s)[kCount], int r, int least) {
        int even = least;
        int odd = least;
#pragma unroll
        for (int i = 2 * r; i + 4 < kCount; i += 8) {
            even = max(max(even, __float_as_int(s[i])), __float_as_int(s[i + 4]));
            odd = max(max(odd, __float_as_int(s[i + 1])), __float_as_int(s[i + 5]));
        }
        return max(even, odd);
    }

    // The same of what row r has seen, where the running maximum has no sign.
    template <int kCount>
    __device__ __forceinline__ float own_highest_of_bits(const float (&s)[kCount], int r) const {
        return __int_as_float(own_highest_of_bits(s, r, __float_as_int(row_max[r])));
    }

    // Of both rows, whatever their signs, with one branch behind: where every bit pattern has a sign, the least one as an
    // unsigned integer is the greatest number. Two warpgroups wait for each other's softmax, so its length counts.
    template <int kCount>
    __device__ __forceinline__ void both_highest_of_bits(const float (&s)[kCount], float (&best)[2]) const {
        static_assert(kCount % 8 == 0, "pairs of two columns of two rows");
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            best[r] = own_highest_of_bits(s, r);
        }
        if (__any_sync(0xffffffffu, (__float_as_int(best[0]) | __float_as_int(best[1])) < 0)) {
#pragma unroll
            for (int r = 0; r < 2; ++r) {
                uint32_t even = __float_as_uint(row_max[r]);
                uint32_t odd = even;
#pragma unroll
                for (int i = 2 * r; i < kCount; i += 8) {
                    even = min(min(even, __float_as_uint(s[i])), __float_as_uint(s[i + 4]));
                    odd = min(min(odd, __float_as_uint(s[i + 1])), __float_as_uint(s[i + 5]));
                }
                best[r] = __float_as_int(best[r]) < 0 ? __uint_as_float(min(even, odd)) : best[r];
            }
        }
    }

    // raise(), and the first kAhead scores weighed, where maxima hardly ever grow: those are weighed with what is subtracted so far
    // while the warp finds out whether any score exceeds its row's maximum by more than kSlack (`slack`, in units of s). Only
    // then is anything raised; nothing waits for maxima that the lanes of a row would share. Returns whether.
    template <int kAhead, int kCount>
    __device__ __forceinline__ bool raise_and_weigh(float (&s)[kCount], float (&alpha)[2], float (&base)[2], float scale_log2,
                                                    float slack) {
        static_assert(kIntegerMax && kSlackQuarters > 0, "maxima that hardly ever grow");
        float ahead[kAhead > 0 ? kAhead : 1];
        const auto weigh_ahead = [&] {
#pragma unroll
            for (int i = 0; i < kAhead; ++i) {
                ahead[i] = ptx::exp2_approx(fmaf(s[i], scale_log2, -base[(i / 2) % 2]));
            }
        };
        int limit[2];
        int best[2];
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            base[r] = base_of(row_max[r], scale_log2) - kOffset;
            limit[r] = __float_as_int(row_max[r] + slack);
        }
        weigh_ahead();
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            best[r] = own_highest_of_bits(s, r, limit[r]);
        }
        // Bits are ordered like numbers where the limit has no sign; the limit of a row that has seen no key is -inf.
        const int exceeded = (best[0] ^ limit[0]) | (best[1] ^ limit[1]) | ((limit[0] | limit[1]) & INT32_MIN);
        const bool grown = __any_sync(0xffffffffu, exceeded != 0);
        if (grown) {
            raise(s, alpha, base, scale_log2);
            weigh_ahead();
        }
#pragma unroll
        for (int i = 0; i < kAhead; ++i) {
            s[i] = ahead[i];
            row_sum[(i / 2) % 2] += s[i];
        }
        return grown;
    }

    // What is subtracted. A row that has seen no key keeps -inf; only the subtraction uses 0 in its place.
    static __device__ __forceinline__ float base_of(float max, float scale_log2) {
        return max == -INFINITY ? 0.0f : max * scale_log2;
    }

    // s[kFrom, kTo) become weights and join the sums.
    template <int kFrom, int kTo, int kCount>
    __device__ __forceinline__ void weigh(float (&s)[kCount], const float (&base)[2], float scale_log2) {
#pragma unroll
        for (int i = kFrom; i < kTo; ++i) {
            s[i] = ptx::exp2_approx(fmaf(s[i], scale_log2, -base[(i / 2) % 2]));
            row_sum[(i / 2) % 2] += s[i];
        }
    }

    // unit: natural score per unit of s. Returns the factor of o; lse in natural log. sink (natural units) joins the
    // denominator; pass -inf for none.
    __device__ __forceinline__ float finish(int r, float unit, float sink, float& lse) const {
        constexpr float kUnoffset = 1.0f / (1 << kOffset);
        return kUnoffset * normaliser(row_max[r] * unit, tile::quad_sum(row_sum[r]) * kUnoffset, sink, lse);
    }

    // The same without a sink, in few instructions: for where nothing runs beside them.
    __device__ __forceinline__ float finish_quickly(int r, float unit, float& lse) const {
        constexpr float kUnoffset = 1.0f / (1 << kOffset);
        const float sum = tile::quad_sum(row_sum[r]) * kUnoffset;
        // Without a visible key the sum is 0, or NaN when a NaN was seen: lse is -inf or NaN.
        lse = fmaf(ptx::log2_approx(sum), 0.69314718055994530942f, row_max[r] * unit);
        return kUnoffset * (row_max[r] == -INFINITY ? sum : ptx::rcp_approx(sum));
    }

    // From a row's maximum (natural units) and its sum of exp(score - maximum).
    static __device__ __forceinline__ float normaliser(float max, float sum, float sink, float& lse) {
        const float total_max = fmaxf(max, sink);
        if (total_max == -INFINITY) {  // no visible key: sum is 0, or NaN when a NaN was seen
            lse = sum == 0.0f ? -INFINITY : sum;
            return sum;
        }
        const float weight = ptx::exp2_approx((max - total_max) * 1.4426950408889634f);
        const float over = sink == INFINITY ? INFINITY : sink - total_max;  // all the weight: out = 0
        const float total = sum * weight + ptx::exp2_approx(over * 1.4426950408889634f);
        lse = total_max + logf(total);
        return weight / total;
    }
};

using Softmax = OnlineSoftmax<0, 0, false>;

// Weights to the A operand of the second product, without a shuffle. 16-bit: the accumulator layout is the operand layout.
// e4m3: position 4 t + b of an operand's 16 columns holds key 8 (b / 2) + 2 t + b % 2, which the transposed V repeats.
template <typename T, int kCount>
__device__ __forceinline__ void pack_weights(uint32_t (&p)[kCount * sizeof(T) / 4], const float (&s)[kCount]) {
    if constexpr (sizeof(T) == 1) {
#pragma unroll
        for (int i = 0; i < kCount / 4; ++i) {  // two rows of each 16 keys
            const int at = 8 * (i / 2) + 2 * (i % 2);
            p[i] = ptx::pack4_e4m3(s[at], s[at + 1], s[at + 4], s[at + 5]);
        }
    } else {
#pragma unroll
        for (int i = 0; i < kCount / 2; ++i) {
            p[i] = ptx::pack2<T>(s[2 * i], s[2 * i + 1]);
        }
    }
}

template <int kCount>
__device__ __forceinline__ void rescale(float (&o)[kCount], const float (&alpha)[2]) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
        o[i] *= alpha[(i / 2) % 2];
    }
}

}  // namespace flare::attention
