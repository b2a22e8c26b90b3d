// mma.sync m16n8k16 (sm_80 and newer). Fragments, g = lane / 4, t = lane % 4:
//   A: a0 (row g, k 2t..), a1 (g+8, 2t..), a2 (g, 2t+8..), a3 (g+8, 2t+8..)    B: b0 (k 2t.., n g), b1 (k 2t+8.., n g)
//   C: c0,c1 (row g, col 2t..), c2,c3 (row g+8, col 2t..)
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <type_traits>

namespace flare::ptx {

// c, a: four adjacent registers of an accumulator and of an operand (indexed at compile time, so that they stay in registers).
template <typename T>
__device__ __forceinline__ void mma_m16n8k16(float* c, const uint32_t* a, uint32_t b0, uint32_t b1) {
    if constexpr (std::is_same_v<T, __nv_bfloat16>) {
        asm volatile(
            "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
            "{%0, %1, %2, %3};"
            : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
    } else {
        static_assert(std::is_same_v<T, __half>, "mma_m16n8k16 takes bf16 or fp16");
        asm volatile(
            "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
            "{%0, %1, %2, %3};"
            : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
    }
}

// fp32 bits rounded to nearest for a tf32 operand: the hardware drops the low 13 bits.
__device__ __forceinline__ uint32_t round_tf32(float x) {
    return __float_as_uint(x) + 0x1000;
}

// The same for any x: the sum above makes a zero of the NaN of all ones. (cvt.rna.tf32 is as good, at a quarter of the rate.)
__device__ __forceinline__ uint32_t convert_tf32(float x) {
    return x == x ? round_tf32(x) : __float_as_uint(x);
}

// m16n8k8, tf32: a0 (row g, k t), a1 (g+8, t), a2 (g, t+4), a3 (g+8, t+4)    b0 (k t, n g), b1 (k t+4, n g)
__device__ __forceinline__ void mma_m16n8k8_tf32(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
    asm volatile(
        "mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

}  // namespace flare::ptx
