// The chunk of the portable kernels: 32 tokens of one value head, and the block of operands that prepare leaves for the
// recurrence.
#pragma once

#include "kda/slots.cuh"

#include <type_traits>

namespace flare::kda::sm80 {

// Byte offsets in the operand block of heads with at most kK key channels: [32][kK] tiles as swizzled 128-byte-wide
// chunks, [32][32] tiles as swizzled 64-byte rows. k and q are not normalised here: their norms ride on the norm_*
// vectors, which leaves 16-bit values times a decay near 1 exact. Kr, A and Qd hold k and q times powers of two, ck_j
// and cq_i, that bring |ck k| and |cq q| into [1, 2).
//
// Kr and A are fp16 whatever the dtype of the inputs: of all operands their rounding, and U's, is what the output sees
// when keys are nearly collinear (relative error 1.9e-2 with bf16, 2.9e-3 with fp16, on 256 tokens with keys equal to 1
// % and a memory of 100 tokens).
//
// With fp16 inputs Kr comes in two terms. Its rounding noise orthogonal to a key that repeats is never corrected and
// grows with the root of the memory: with one term 4.4e-3 at 600 tokens (gates of -8 under a bound of -5, one key
// throughout), with two 1.7e-3. bf16 inputs have no use for it: their own roundings are larger.
template <typename T, int kK>
struct ChunkLayout {
    static constexpr int kKrTerms = std::is_same_v<T, __half> ? 2 : 1;
    static_assert(kK == 64 || kK == 128, "whole 128-byte-wide chunks");
    static constexpr uint32_t kTileBytes = kChunk * kK * 2;
    static constexpr uint32_t kOffsetKd = 0;                  // k * exp(G)
    static constexpr uint32_t kOffsetQd = kTileBytes;         // cq q * exp(G)
    static constexpr uint32_t kOffsetKr = 2 * kTileBytes;     // ck k * exp(G_C - G), fp16
    static constexpr uint32_t kOffsetKrLow = 3 * kTileBytes;  // with two terms: what fp16 leaves of Kr, fp16
    // (I + L)^-1, unit lower triangular: its diagonal is exact in 16 bits
    static constexpr uint32_t kOffsetX = (2 + kKrTerms) * kTileBytes;
    static constexpr uint32_t kOffsetA =
        kOffsetX + 2048;  // (cq q) (ck k)^T with decay, lower triangle with diagonal, fp16
    static constexpr uint32_t kOffsetDecay = kOffsetA + 2048;        // exp(G_C), fp32 [kK]
    static constexpr uint32_t kOffsetNormK = kOffsetDecay + 4 * kK;  // 1 / |k_i|, fp32 [32]
    static constexpr uint32_t kOffsetNormU = kOffsetNormK + 128;     // 1 / |ck_i k_i|, fp32 [32]
    static constexpr uint32_t kOffsetNormQ = kOffsetNormU + 128;     // scale / |cq_i q_i|, fp32 [32]
    static constexpr uint32_t kOffsetBeta = kOffsetNormQ + 128;      // fp32 [32]
    static constexpr uint32_t kBlockBytes = kOffsetBeta + 128;
    static_assert(kBlockBytes % 128 == 0, "swizzles count from multiples of 128 bytes");
};

}  // namespace flare::kda::sm80
