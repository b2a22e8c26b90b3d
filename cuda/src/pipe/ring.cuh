// A ring of kStages buffers, each with a full and an empty mbarrier. The producer starts at phase 1 (its first lap does
// not block), consumers at phase 0. Every role advances once for every buffer use.
#pragma once

#include <cstdint>

namespace flare::pipe {

template <int kStages>
struct PipeState {
    uint32_t stage;
    uint32_t phase;

    static __device__ __forceinline__ PipeState producer() { return {0, 1}; }
    static __device__ __forceinline__ PipeState consumer() { return {0, 0}; }

    __device__ __forceinline__ void advance() {
        if (++stage == kStages) {
            stage = 0;
            phase ^= 1;
        }
    }
};

}  // namespace flare::pipe
