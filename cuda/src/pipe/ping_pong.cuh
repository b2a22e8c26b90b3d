// Turn-taking of consumer warpgroups at the tensor cores: one named barrier per warpgroup, 256 participants (its owner
// waits, its predecessor arrives). Warpgroup 0's barrier is primed once per kernel; the last hand-over of one tile is
// the prime of the next, so all warpgroups must take the same number of turns.
#pragma once

#include "../ptx/sync.cuh"

namespace flare::pipe {

template <int kWarpgroups, int kFirstBarrier>
struct PingPong {
    uint32_t own;
    uint32_t next;

    static __device__ __forceinline__ PingPong make(uint32_t warpgroup) {
        return {kFirstBarrier + warpgroup, kFirstBarrier + (warpgroup + 1 == kWarpgroups ? 0 : warpgroup + 1)};
    }

    // Called by the last warpgroup only.
    __device__ __forceinline__ void prime() const { ptx::named_barrier_arrive(next, 256); }
    __device__ __forceinline__ void wait_turn() const { ptx::named_barrier_sync(own, 256); }
    __device__ __forceinline__ void pass_turn() const { ptx::named_barrier_arrive(next, 256); }
};

}  // namespace flare::pipe
