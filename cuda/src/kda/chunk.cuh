// The chunk: 32 tokens of one value head, and the block of operands that the prepare kernel leaves for the recurrence.
#pragma once

#include "kda/slots.cuh"

namespace flare::kda {

inline constexpr int kDim = 128;  // K and V

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

}  // namespace flare::kda
