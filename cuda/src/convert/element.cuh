// Elements of any float dtype to fp32 and back, bit for bit as the CPU backend does it: to nearest even; a NaN keeps
// its sign and becomes quiet (the conversion instructions would make it positive); e4m3 saturates at +-448.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

#include "flare.h"

namespace flare::convert {

__device__ __forceinline__ bool is_nan(float x) {
    return (__float_as_uint(x) & 0x7fffffffu) > 0x7f800000u;
}
__device__ __forceinline__ float quiet(float x) {
    return __uint_as_float(__float_as_uint(x) | 0x400000u);
}

// A product or quotient would lose the sign of a NaN.
__device__ __forceinline__ float multiply(float x, float factor) {
    return is_nan(x) ? quiet(x) : __fmul_rn(x, factor);
}
__device__ __forceinline__ float divide(float x, float divisor) {
    return is_nan(x) ? quiet(x) : __fdiv_rn(x, divisor);
}

__device__ __forceinline__ float fp16_to_float(uint32_t bits) {
    const uint32_t magnitude = bits & 0x7fffu;
    if (magnitude > 0x7c00u) {
        return __uint_as_float((bits & 0x8000u) << 16 | 0x7fc00000u | (magnitude & 0x3ffu) << 13);
    }
    return __half2float(__ushort_as_half(static_cast<unsigned short>(bits)));
}

__device__ __forceinline__ float e4m3_to_float(uint32_t bits) {
    const uint32_t sign = (bits & 0x80u) << 24;
    const uint32_t magnitude = bits & 0x7fu;
    if (magnitude == 0x7fu) {
        return __uint_as_float(sign | 0x7fc00000u);
    }
    return __uint_as_float(__float_as_uint(__uint_as_float(magnitude << 20) * 0x1p120f) | sign);  // exact
}

__device__ __forceinline__ uint32_t float_to_fp16(float x) {
    const uint32_t bits = __float_as_uint(x);
    if (is_nan(x)) {
        return (bits >> 16 & 0x8000u) | 0x7e00u | (bits >> 13 & 0x3ffu);
    }
    return __half_as_ushort(__float2half_rn(x));
}

__device__ __forceinline__ uint32_t float_to_bf16(float x) {
    return is_nan(x) ? __float_as_uint(x) >> 16 | 0x40u : __bfloat16_as_ushort(__float2bfloat16_rn(x));
}

__device__ __forceinline__ uint32_t float_to_e4m3(float x) {
    const uint32_t bits = __float_as_uint(x);
    const uint32_t sign = bits >> 24 & 0x80u;
    const uint32_t magnitude = bits & 0x7fffffffu;
    if (magnitude < 0x3c800000u) {  // below 2^-6: subnormal result, ulp 2^-9, which adding 2^14 aligns
        return sign | (__float_as_uint(__uint_as_float(magnitude) + 16384.0f) - 0x46800000u);
    }
    const uint32_t rounded = (magnitude + 0x7ffffu + (magnitude >> 20 & 1u) - 0x3c000000u) >> 20;
    return sign | (is_nan(x) ? 0x7fu : min(rounded, 0x7eu));
}

__host__ __device__ constexpr int element_bytes(int32_t dtype) {
    return dtype == FLARE_FP32 ? 4 : dtype == FLARE_FP16 || dtype == FLARE_BF16 ? 2 : 1;
}

// kCount neighbouring elements from element `at` on. kCount > 1: 2, 4 or 8 of them, aligned to their size (to 16 bytes
// at most). The dtype is the same for the whole grid, so the switch does not diverge.
template <int kCount>
__device__ __forceinline__ void load_elements(float (&x)[kCount], const void* src, int32_t dtype, int64_t at) {
    if constexpr (kCount == 1) {
        x[0] = dtype == FLARE_FP32   ? static_cast<const float*>(src)[at]
               : dtype == FLARE_FP16 ? fp16_to_float(static_cast<const uint16_t*>(src)[at])
               : dtype == FLARE_BF16
                   ? __uint_as_float(static_cast<uint32_t>(static_cast<const uint16_t*>(src)[at]) << 16)
                   : e4m3_to_float(static_cast<const uint8_t*>(src)[at]);
    } else if (dtype == FLARE_FP32) {
        const float4* from = reinterpret_cast<const float4*>(static_cast<const float*>(src) + at);
#pragma unroll
        for (int i = 0; i < kCount / 4; ++i) {
            const float4 four = from[i];
            x[4 * i] = four.x, x[4 * i + 1] = four.y, x[4 * i + 2] = four.z, x[4 * i + 3] = four.w;
        }
    } else if (dtype == FLARE_FP8_E4M3) {
        uint32_t words[kCount / 4];
        const uint32_t* from = reinterpret_cast<const uint32_t*>(static_cast<const uint8_t*>(src) + at);
        if constexpr (kCount == 8) {
            const uint2 both = *reinterpret_cast<const uint2*>(from);
            words[0] = both.x, words[1] = both.y;
        } else {
            words[0] = *from;
        }
#pragma unroll
        for (int i = 0; i < kCount; ++i) {
            x[i] = e4m3_to_float(words[i / 4] >> (8 * (i % 4)) & 0xffu);
        }
    } else {
        uint32_t words[kCount / 2];
        const uint16_t* from = static_cast<const uint16_t*>(src) + at;
        if constexpr (kCount == 8) {
            const uint4 all = *reinterpret_cast<const uint4*>(from);
            words[0] = all.x, words[1] = all.y, words[2] = all.z, words[3] = all.w;
        } else {
            const uint2 both = *reinterpret_cast<const uint2*>(from);
            words[0] = both.x, words[1] = both.y;
        }
#pragma unroll
        for (int i = 0; i < kCount; ++i) {
            const uint32_t half = words[i / 2] >> (16 * (i % 2)) & 0xffffu;
            x[i] = dtype == FLARE_FP16 ? fp16_to_float(half) : __uint_as_float(half << 16);
        }
    }
}

template <int kCount>
__device__ __forceinline__ void store_elements(const float (&x)[kCount], void* dst, int32_t dtype, int64_t at) {
    if constexpr (kCount == 1) {
        if (dtype == FLARE_FP32) {
            static_cast<float*>(dst)[at] = is_nan(x[0]) ? quiet(x[0]) : x[0];
        } else if (dtype == FLARE_FP8_E4M3) {
            static_cast<uint8_t*>(dst)[at] = static_cast<uint8_t>(float_to_e4m3(x[0]));
        } else {
            static_cast<uint16_t*>(dst)[at] =
                static_cast<uint16_t>(dtype == FLARE_FP16 ? float_to_fp16(x[0]) : float_to_bf16(x[0]));
        }
    } else if (dtype == FLARE_FP32) {
        float4* to = reinterpret_cast<float4*>(static_cast<float*>(dst) + at);
#pragma unroll
        for (int i = 0; i < kCount / 4; ++i) {
            to[i] = {x[4 * i], x[4 * i + 1], x[4 * i + 2], x[4 * i + 3]};
        }
    } else if (dtype == FLARE_FP8_E4M3) {
        uint32_t words[kCount / 4] = {};
#pragma unroll
        for (int i = 0; i < kCount; ++i) {
            words[i / 4] |= float_to_e4m3(x[i]) << (8 * (i % 4));
        }
        uint8_t* to = static_cast<uint8_t*>(dst) + at;
        if constexpr (kCount == 8) {
            *reinterpret_cast<uint2*>(to) = {words[0], words[1]};
        } else {
            *reinterpret_cast<uint32_t*>(to) = words[0];
        }
    } else {
        uint32_t words[kCount / 2] = {};
#pragma unroll
        for (int i = 0; i < kCount; ++i) {
            words[i / 2] |= (dtype == FLARE_FP16 ? float_to_fp16(x[i]) : float_to_bf16(x[i])) << (16 * (i % 2));
        }
        uint16_t* to = static_cast<uint16_t*>(dst) + at;
        if constexpr (kCount == 8) {
            *reinterpret_cast<uint4*>(to) = {words[0], words[1], words[2], words[3]};
        } else {
            *reinterpret_cast<uint2*>(to) = {words[0], words[1]};
        }
    }
}

}  // namespace flare::convert
