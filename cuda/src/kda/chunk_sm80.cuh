// The chunk of the portable kernels: 32 tokens of one value head, and the block of operands that prepare leaves for the
// recurrence.
#pragma once

#include "kda/slots.cuh"

#include <type_traits>

namespace flare::kda::sm80 {

// Byte offsets in the operand block of heads with at most kK key channels: [32][kK] tiles as swizzled 128-byte-wide
// chunks, [32][32] tiles as swizzled rows. k and q are not normalised here: their norms ride on the norm_* vectors, which
// leaves 16-bit values times a decay near 1 exact. Kr, A and Qd hold k and q times powers of two, ck_j and cq_i, that
// bring |ck k| and |cq q| into [1, 2).
//
// Kr and A are fp16 whatever the dtype of the inputs, and X is tf32: of all operands their rounding, and U's, is what the
// output sees when keys are nearly collinear (docs/kernels/kda.md). X's columns are in the order in which an accumulator
// becomes a tf32 A operand: of every eight 0, 2, 4, 6, 1, 3, 5, 7.
//
// With fp16 inputs Kr, X and A come in two terms. Kr's rounding noise orthogonal to a key that repeats is never
// corrected and grows with the root of the memory. With bf16 inputs chunks in which a key repeats one before it have Kr's
// second term apart from the operand blocks, behind all of them in the workspace, and behind all of those two bytes per chunk
// that aren't both 0 then.
template <typename T, int kK>
struct ChunkLayout {
    static constexpr int kTerms = std::is_same_v<T, __half> ? 2 : 1;  // of Kr, X and A
    static_assert(kK == 64 || kK == 128, "whole 128-byte-wide chunks");
    static constexpr uint32_t kTileBytes = kChunk * kK * 2;
    static constexpr uint32_t kSquareBytes = kChunk * kChunk * 2;
    static constexpr uint32_t kOffsetKd = 0;                       // k * exp(G)
    static constexpr uint32_t kOffsetQd = kTileBytes;              // cq q * exp(G)
    static constexpr uint32_t kOffsetKr = 2 * kTileBytes;          // ck k * exp(G_C - G), fp16; its terms
    static constexpr uint32_t kOffsetX = (2 + kTerms) * kTileBytes;  // diag(1 / |ck k|) (I + L)^-1 diag(beta), tf32
    // (cq q) (ck k)^T with decay, lower triangle with diagonal, fp16; its terms
    static constexpr uint32_t kOffsetA = kOffsetX + kTerms * 2 * kSquareBytes;
    static constexpr uint32_t kOffsetDecay = kOffsetA + kTerms * kSquareBytes;  // exp(G_C), fp32 [kK]
    static constexpr uint32_t kOffsetNormK = kOffsetDecay + 4 * kK;             // 1 / |k_i|, fp32 [32]
    static constexpr uint32_t kOffsetNormQ = kOffsetNormK + 128;                // scale / |cq_i q_i|, fp32 [32]
    static constexpr uint32_t kBlockBytes = kOffsetNormQ + 128;
    static_assert(kBlockBytes % 128 == 0, "swizzles count from multiples of 128 bytes");
    static constexpr bool kMayRepeat = kTerms == 1;
    static constexpr uint32_t kWorkspaceBytes = kBlockBytes + (kMayRepeat ? kTileBytes + 2 : 0);  // of a chunk
};

// Where the second term of Kr lies, and the bytes that tell whether there is one, of the chunk with operand block `index`.
template <typename Layout, typename Byte>
__device__ __forceinline__ Byte* repeat_tile(const KdaParams& p, Byte* workspace, int64_t index) {
    return workspace + num_slots(p) * p.heads_v * Layout::kBlockBytes + index * Layout::kTileBytes;
}
template <typename Layout, typename Byte>
__device__ __forceinline__ Byte* repeat_flags(const KdaParams& p, Byte* workspace, int64_t index) {
    return workspace + num_slots(p) * p.heads_v * (Layout::kBlockBytes + Layout::kTileBytes) + 2 * index;
}

__device__ __forceinline__ uint32_t has_second_term(const uint8_t* flags) {
    return __ldg(reinterpret_cast<const uint16_t*>(flags));
}

// Whether any of `chunks` chunks from the one of these flags on has a second term. For whole warps.
__device__ __forceinline__ bool any_repeats(const uint8_t* flags, int64_t chunks) {
    constexpr int kInFlight = 8;
    uint32_t any = 0;
    for (int64_t i = threadIdx.x % 32; i < chunks; i += 32 * kInFlight) {
#pragma unroll
        for (int j = 0; j < kInFlight; ++j) {
            any |= i + 32 * j < chunks ? has_second_term(flags + 2 * (i + 32 * j)) : 0;
        }
    }
    return __any_sync(0xffffffffu, any != 0) != 0;
}

}  // namespace flare::kda::sm80
