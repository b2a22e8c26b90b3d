// Fences, named and cluster barriers, election, register reallocation, dependent launch: one instruction per function.
#pragma once

#include <cstdint>

namespace flare::ptx {

// In every thread that wrote shared memory by ordinary stores, after the writes and before the barrier that
// hands them to wgmma or TMA.
__device__ __forceinline__ void fence_proxy_async_smem() {
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

__device__ __forceinline__ void fence_proxy_async_global() {
    asm volatile("fence.proxy.async.global;" ::: "memory");
}

// Named barriers 0..15 (0 is __syncthreads); `threads` counts all participants, a multiple of 32.
__device__ __forceinline__ void named_barrier_sync(uint32_t id, uint32_t threads) {
    asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

// Meets like named_barrier_sync; true for all if it is for one.
__device__ __forceinline__ bool named_barrier_or(uint32_t id, uint32_t threads, bool value) {
    uint32_t any;
    asm volatile(
        "{\n"
        ".reg .pred p, q;\n"
        "setp.ne.u32 p, %3, 0;\n"
        "bar.red.or.pred q, %1, %2, p;\n"
        "selp.u32 %0, 1, 0, q;\n"
        "}"
        : "=r"(any)
        : "r"(id), "r"(threads), "r"(static_cast<uint32_t>(value))
        : "memory");
    return any != 0;
}

__device__ __forceinline__ void named_barrier_arrive(uint32_t id, uint32_t threads) {
    asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

__device__ __forceinline__ void cluster_arrive() {
    asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
}

__device__ __forceinline__ void cluster_wait() {
    asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
}

__device__ __forceinline__ uint32_t cluster_cta_rank() {
    uint32_t rank;
    asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    return rank;
}

// Read anew, where keeping them in registers costs more.
__device__ __forceinline__ uint32_t block_idx() {
    uint32_t index;
    asm volatile("mov.u32 %0, %%ctaid.x;" : "=r"(index));
    return index;
}

__device__ __forceinline__ uint32_t thread_idx() {
    uint32_t index;
    asm volatile("mov.u32 %0, %%tid.x;" : "=r"(index));
    return index;
}

// True in one lane of a converged warp.
__device__ __forceinline__ bool elect_one() {
    uint32_t elected;
    asm volatile(
        "{\n"
        ".reg .pred p;\n"
        "elect.sync _|p, 0xffffffff;\n"
        "selp.u32 %0, 1, 0, p;\n"
        "}"
        : "=r"(elected)::"memory");
    return elected != 0;
}

// Executed by all warps of a warpgroup; kRegs a multiple of 8 in 24..256. Honoured only under
// __launch_bounds__(threads, 1); the sum over warpgroups must not exceed what the block was launched with.
template <uint32_t kRegs>
__device__ __forceinline__ void setmaxnreg_inc() {
    static_assert(kRegs % 8 == 0 && kRegs >= 24 && kRegs <= 256, "setmaxnreg takes a multiple of 8 in 24..256");
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegs));
}

template <uint32_t kRegs>
__device__ __forceinline__ void setmaxnreg_dec() {
    static_assert(kRegs % 8 == 0 && kRegs >= 24 && kRegs <= 256, "setmaxnreg takes a multiple of 8 in 24..256");
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegs));
}

// A flag in device memory between blocks: what was written before the release is seen after the acquire that reads it. For
// bulk copies fence_proxy_async_global stands between them and the flag on both sides.
__device__ __forceinline__ void st_release_gpu(uint32_t* flag, uint32_t value) {
    asm volatile("st.release.gpu.global.u32 [%0], %1;" ::"l"(flag), "r"(value) : "memory");
}

__device__ __forceinline__ uint32_t ld_acquire_gpu(const uint32_t* flag) {
    uint32_t value;
    asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(value) : "l"(flag) : "memory");
    return value;
}

// Programmatic dependent launch: waits until the primary kernel has completed and flushed its writes.
__device__ __forceinline__ void griddepcontrol_wait() {
    asm volatile("griddepcontrol.wait;" ::: "memory");
}

__device__ __forceinline__ void griddepcontrol_launch_dependents() {
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
}

// Warp-uniform warp index: the shuffle tells the compiler that it is uniform, so descriptors stay in uniform registers.
__device__ __forceinline__ uint32_t uniform_warp_idx() {
    return __shfl_sync(0xffffffffu, threadIdx.x / 32, 0);
}

// A value that is the same in all lanes, in a uniform register: redux writes one, so that branches on the value are known
// not to diverge and descriptors built from it need no R2UR. The compiler does not conclude that by itself across loops.
__device__ __forceinline__ int32_t uniform(int32_t x) {
    int32_t y;
    asm volatile("redux.sync.max.s32 %0, %1, 0xffffffff;" : "=r"(y) : "r"(x));
    return y;
}

}  // namespace flare::ptx
