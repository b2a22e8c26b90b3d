// The chunk: 32 tokens of one value head, and the block of operands that the prepare kernel leaves for the recurrence.
#pragma once

#include "kda/common.cuh"

namespace flare::kda {

inline constexpr int kChunk = 32;  // tokens
inline constexpr int kDim = 128;   // K and V

// Byte offsets in an operand block, which is the shared-memory image: [32][128] tiles as two swizzled 128-byte-wide
// chunks, [32][32] tiles as swizzled 64-byte rows. k and q are not normalised here: their norms ride on `norm_k` and
// `norm_q`.
inline constexpr uint32_t kOffsetKd = 0;         // k * exp(G)
inline constexpr uint32_t kOffsetQd = 8192;      // q * exp(G)
inline constexpr uint32_t kOffsetKr = 16384;     // k * exp(G_C - G)
inline constexpr uint32_t kOffsetX = 24576;      // (I + L)^-1, unit lower triangular: its diagonal is exact in 16 bits
inline constexpr uint32_t kOffsetA = 26624;      // q k^T with decay, lower triangle with diagonal
inline constexpr uint32_t kOffsetDecay = 28672;  // exp(G_C), fp32 [128]
inline constexpr uint32_t kOffsetNormK = 29184;  // 1 / |k_i|, fp32 [32]
inline constexpr uint32_t kOffsetNormQ = 29312;  // scale / |q_i|, fp32 [32]
inline constexpr uint32_t kOffsetBeta = 29440;   // fp32 [32]
inline constexpr uint32_t kBlockBytes = 29568;

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
