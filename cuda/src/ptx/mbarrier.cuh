// mbarrier: one instruction per function, no policy. Addresses are shared-space (uint32_t).
#pragma once

#include <cstdint>

namespace flare::ptx {

__device__ __forceinline__ uint32_t smem_addr(const void* p) {
    return static_cast<uint32_t>(__cvta_generic_to_shared(p));
}

__device__ __forceinline__ void mbarrier_init(uint32_t bar, uint32_t count) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(bar), "r"(count) : "memory");
}

// After the inits, before the barrier (__syncthreads or cluster) that publishes them.
__device__ __forceinline__ void fence_mbarrier_init() {
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

__device__ __forceinline__ void mbarrier_arrive(uint32_t bar) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(bar) : "memory");
}

// Arrives once and adds `bytes` to the transaction count. Issue it before the copies.
__device__ __forceinline__ void mbarrier_arrive_expect_tx(uint32_t bar, uint32_t bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(bar), "r"(bytes) : "memory");
}

// Arrives on the barrier at the same offset in block `cta_rank` of the cluster.
__device__ __forceinline__ void mbarrier_arrive_remote(uint32_t bar, uint32_t cta_rank) {
    asm volatile(
        "{\n"
        ".reg .b32 remote;\n"
        "mapa.shared::cluster.u32 remote, %0, %1;\n"
        "mbarrier.arrive.release.cluster.shared::cluster.b64 _, [remote];\n"
        "}" ::"r"(bar),
        "r"(cta_rank)
        : "memory");
}

// The same without ordering this thread's ordinary memory accesses (the release costs some 1,500 cycles): enough to hand
// back a buffer that only wgmma has read.
__device__ __forceinline__ void mbarrier_arrive_remote_relaxed(uint32_t bar, uint32_t cta_rank) {
    asm volatile(
        "{\n"
        ".reg .b32 remote;\n"
        "mapa.shared::cluster.u32 remote, %0, %1;\n"
        "mbarrier.arrive.relaxed.cluster.shared::cluster.b64 _, [remote];\n"
        "}" ::"r"(bar),
        "r"(cta_rank)
        : "memory");
}

// True when the phase of this parity has completed. A fresh barrier answers true for parity 1.
__device__ __forceinline__ bool mbarrier_try_wait(uint32_t bar, uint32_t parity) {
    uint32_t done;
    asm volatile(
        "{\n"
        ".reg .pred p;\n"
        "mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\n"
        "selp.u32 %0, 1, 0, p;\n"
        "}"
        : "=r"(done)
        : "r"(bar), "r"(parity)
        : "memory");
    return done != 0;
}

// Blocks until the phase of this parity has completed. With FLARE_TRAP_ON_HANG a lost arrival becomes a trap.
__device__ __forceinline__ void mbarrier_wait(uint32_t bar, uint32_t parity) {
#ifdef FLARE_TRAP_ON_HANG
    for (uint32_t spins = 0; !mbarrier_try_wait(bar, parity); ++spins) {
        if (spins > (1u << 22)) {
            asm volatile("trap;");
        }
    }
#else
    while (!mbarrier_try_wait(bar, parity)) {
    }
#endif
}

// The same for a thread with time to spare. A try returns after some 12 cycles, so a loop of tries alone takes issue slots
// (a seventh of all instructions of an attention kernel) and power from those who compute.
__device__ __forceinline__ void mbarrier_wait_sleeping(uint32_t bar, uint32_t parity) {
    while (!mbarrier_try_wait(bar, parity)) {
        __nanosleep(100);
    }
}

}  // namespace flare::ptx
