// wgmma: m64 x N x k16 (bf16, fp16), k32 (e4m3) and k8 (tf32) with fp32 accumulators, one instruction per function.
//
//   wgmma_ss<T, N, kTransA, kTransB>(d, desc_a, desc_b, accumulate)    A and B from shared memory
//   wgmma_rs<T, N, kTransB>(d, a, desc_b, accumulate)                  A from registers
//
// kTrans = 0 for a K-major operand, 1 for an MN-major one (16-bit types only). accumulate = 0 ignores the old d.
// T is __nv_bfloat16, __half, __nv_fp8_e4m3 or, with A from registers, float for tf32. Rules: wgmma_fence() before the first wgmma that reads registers other
// instructions wrote; nobody touches d, or a, before the wgmma_wait that covers them; wrap d (and a) in
// fence_registers on both sides so that the compiler does not move uses across.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>

#include <cstdint>
#include <type_traits>

namespace flare::ptx {

__device__ __forceinline__ void wgmma_fence() {
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}

__device__ __forceinline__ void wgmma_commit() {
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}

// At most kPending committed groups still in flight.
template <int kPending>
__device__ __forceinline__ void wgmma_wait() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}

// Empty asm that the compiler cannot move register uses across.
template <int kCount>
__device__ __forceinline__ void fence_registers(float (&r)[kCount]) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
        asm volatile("" : "+f"(r[i])::"memory");
    }
}

template <int kCount>
__device__ __forceinline__ void fence_registers(uint32_t (&r)[kCount]) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
        asm volatile("" : "+r"(r[i])::"memory");
    }
}

template <int N>
struct WgmmaShape;

// X0.. are the operand numbers that follow the N/2 accumulators.
#define FLARE_WGMMA_SS_16BIT(N, TYPE, REGS, ACC, X0, X1, X2, X3, X4)                                            \
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, " X2 ", 0;\n"                                               \
                 "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32." TYPE "." TYPE " " REGS ", " X0 ", " X1       \
                 ", p, 1, 1, " X3 ", " X4 ";\n}"                                                               \
                 : ACC                                                                                         \
                 : "l"(desc_a), "l"(desc_b), "r"(accumulate), "n"(kTransA), "n"(kTransB)                       \
                 : "memory")
#define FLARE_WGMMA_RS_16BIT(N, TYPE, REGS, ACC, X0, X1, X2, X3, X4, X5, X6)                                    \
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, " X5 ", 0;\n"                                               \
                 "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32." TYPE "." TYPE " " REGS ", {" X0 ", " X1 ", " \
                 X2 ", " X3 "}, " X4 ", p, 1, 1, " X6 ";\n}"                                                   \
                 : ACC                                                                                         \
                 : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "l"(desc_b), "r"(accumulate), "n"(kTransB)              \
                 : "memory")
#define FLARE_WGMMA_SHAPE(N, REGS, X0, X1, X2, X3, X4, X5, X6)                                             \
    template <>                                                                                                \
    struct WgmmaShape<N> {                                                                                     \
        template <typename T, int kTransA, int kTransB>                                                        \
        static __device__ __forceinline__ void ss(float (&d)[N / 2], uint64_t desc_a, uint64_t desc_b,         \
                                                  int accumulate) {                                            \
            if constexpr (std::is_same_v<T, __nv_bfloat16>) {                                                  \
                FLARE_WGMMA_SS_16BIT(N, "bf16", REGS, FLARE_WGMMA_ACC_##N, X0, X1, X2, X3, X4);                \
            } else if constexpr (std::is_same_v<T, __half>) {                                                  \
                FLARE_WGMMA_SS_16BIT(N, "f16", REGS, FLARE_WGMMA_ACC_##N, X0, X1, X2, X3, X4);                 \
            } else {                                                                                           \
                static_assert(std::is_same_v<T, __nv_fp8_e4m3> && kTransA == 0 && kTransB == 0,                \
                              "fp8 operands are K-major");                                                     \
                asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, " X2 ", 0;\n"                                   \
                             "wgmma.mma_async.sync.aligned.m64n" #N "k32.f32.e4m3.e4m3 " REGS ", " X0 ", " X1  \
                             ", p, 1, 1;\n}"                                                                   \
                             : FLARE_WGMMA_ACC_##N                                                             \
                             : "l"(desc_a), "l"(desc_b), "r"(accumulate)                                       \
                             : "memory");                                                                      \
            }                                                                                                  \
        }                                                                                                      \
        template <typename T, int kTransB>                                                                     \
        static __device__ __forceinline__ void rs(float (&d)[N / 2], uint32_t a0, uint32_t a1, uint32_t a2,    \
                                                  uint32_t a3, uint64_t desc_b, int accumulate) {              \
            if constexpr (std::is_same_v<T, __nv_bfloat16>) {                                                  \
                FLARE_WGMMA_RS_16BIT(N, "bf16", REGS, FLARE_WGMMA_ACC_##N, X0, X1, X2, X3, X4, X5, X6);        \
            } else if constexpr (std::is_same_v<T, __half>) {                                                  \
                FLARE_WGMMA_RS_16BIT(N, "f16", REGS, FLARE_WGMMA_ACC_##N, X0, X1, X2, X3, X4, X5, X6);         \
            } else if constexpr (std::is_same_v<T, float>) {                                                   \
                static_assert(kTransB == 0, "tf32 operands are K-major");                                      \
                asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, " X5 ", 0;\n"                                   \
                             "wgmma.mma_async.sync.aligned.m64n" #N "k8.f32.tf32.tf32 " REGS ", {" X0 ", " X1  \
                             ", " X2 ", " X3 "}, " X4 ", p, 1, 1;\n}"                                          \
                             : FLARE_WGMMA_ACC_##N                                                             \
                             : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "l"(desc_b), "r"(accumulate)                \
                             : "memory");                                                                      \
            } else {                                                                                           \
                static_assert(std::is_same_v<T, __nv_fp8_e4m3> && kTransB == 0, "fp8 operands are K-major");   \
                asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, " X5 ", 0;\n"                                   \
                             "wgmma.mma_async.sync.aligned.m64n" #N "k32.f32.e4m3.e4m3 " REGS ", {" X0 ", " X1 \
                             ", " X2 ", " X3 "}, " X4 ", p, 1, 1;\n}"                                          \
                             : FLARE_WGMMA_ACC_##N                                                             \
                             : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "l"(desc_b), "r"(accumulate)                \
                             : "memory");                                                                      \
            }                                                                                                  \
        }                                                                                                      \
    };

#include "wgmma_shapes.inc"

#undef FLARE_WGMMA_SHAPE
#undef FLARE_WGMMA_RS_16BIT
#undef FLARE_WGMMA_SS_16BIT

template <typename T, int N, int kTransA = 0, int kTransB = 0>
__device__ __forceinline__ void wgmma_ss(float (&d)[N / 2], uint64_t desc_a, uint64_t desc_b, int accumulate) {
    WgmmaShape<N>::template ss<T, kTransA, kTransB>(d, desc_a, desc_b, accumulate);
}

template <typename T, int N, int kTransB = 0>
__device__ __forceinline__ void wgmma_rs(float (&d)[N / 2], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3,
                                         uint64_t desc_b, int accumulate) {
    WgmmaShape<N>::template rs<T, kTransB>(d, a0, a1, a2, a3, desc_b, accumulate);
}

}  // namespace flare::ptx
