// Chunks of 32 tokens and the slots of their operand blocks in the workspace, for the portable and the Hopper kernels.
#pragma once

#include "kda/common.cuh"

namespace flare::kda {

inline constexpr int kChunk = 32;  // tokens

// Slots: chunk c of sequence n has slot first_slot(n) + c. With cu_seqlens the first slot is floor(cu[n] / 32) + n,
// which needs no scan and leaves at most N slots unused.
__host__ __device__ inline int64_t chunks_of(int64_t tokens) {
    return (tokens + kChunk - 1) / kChunk;
}

__host__ __device__ inline int64_t num_slots(const KdaParams& p) {
    return p.cu_seqlens != nullptr ? p.seqlen / kChunk + p.num_sequences : p.num_sequences * chunks_of(p.seqlen);
}

struct Sequence {
    int64_t first_token;  // row on the token axis
    int64_t tokens;
    int64_t batch;  // index for the batch stride: 0 when packed
    int64_t first_slot;
};

__device__ __forceinline__ Sequence locate_sequence(const KdaParams& p, int64_t n) {
    if (p.cu_seqlens == nullptr) {
        return {0, p.seqlen, n, n * chunks_of(p.seqlen)};
    }
    const int64_t first = load_index(p.cu_seqlens, n, p.index64);
    const int64_t last = load_index(p.cu_seqlens, n + 1, p.index64);
    return {first, last - first, 0, first / kChunk + n};
}

// The sequence that owns `slot` (its chunk there may be past the end: an unused slot).
__device__ __forceinline__ int64_t sequence_of_slot(const KdaParams& p, int64_t slot) {
    if (p.cu_seqlens == nullptr) {
        return slot / chunks_of(p.seqlen);
    }
    int64_t low = 0;
    int64_t high = p.num_sequences;  // first_slot(low) <= slot < first_slot(high)
    while (high - low > 1) {
        const int64_t middle = (low + high) / 2;
        if (load_index(p.cu_seqlens, middle, p.index64) / kChunk + middle <= slot) {
            low = middle;
        } else {
            high = middle;
        }
    }
    return low;
}

}  // namespace flare::kda
