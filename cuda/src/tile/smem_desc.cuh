// wgmma descriptors of tiles in the format of smem_layout.cuh, and the byte steps to walk them.
#pragma once

#include "smem_layout.cuh"

#include <cstdint>

namespace flare::tile {

// K-major operand (contiguous along the reduction): S = Q K^T reads both operands so.
template <Swizzle S>
__host__ __device__ constexpr uint64_t make_desc_k(uint32_t addr) {
    constexpr uint64_t sbo = 8 * span_bytes(S);
    return (uint64_t{(addr & 0x3FFFF) >> 4}) | (uint64_t{1} << 16) | ((sbo >> 4) << 32) | (descriptor_swizzle(S) << 62);
}

// MN-major operand (contiguous along N, rows along the reduction): V in O = P V. `rows` is the tile's row count.
template <Swizzle S>
__host__ __device__ constexpr uint64_t make_desc_mn(uint32_t addr, uint32_t rows) {
    constexpr uint64_t sbo = 8 * span_bytes(S);
    const uint64_t lbo = uint64_t{rows} * span_bytes(S);
    return (uint64_t{(addr & 0x3FFFF) >> 4}) | ((lbo >> 4) << 16) | ((sbo >> 4) << 32) | (descriptor_swizzle(S) << 62);
}

// Bytes from k-step 0 to k-step kk (32 bytes of the reduction each) of a K-major tile.
template <Swizzle S>
__host__ __device__ constexpr uint32_t step_k(int kk, uint32_t rows) {
    constexpr uint32_t per_chunk = span_bytes(S) / 32;
    return (kk % per_chunk) * 32 + (kk / per_chunk) * rows * span_bytes(S);
}

// Bytes from k-step 0 to k-step kk (16 rows each) of an MN-major 16-bit tile.
template <Swizzle S>
__host__ __device__ constexpr uint32_t step_mn(int kk) {
    return kk * 16 * span_bytes(S);
}

// Adds to the address field; the low word never carries because shared addresses stay below 2^18.
__host__ __device__ constexpr uint64_t advance_desc(uint64_t desc, uint32_t bytes) {
    return desc + (bytes >> 4);
}

}  // namespace flare::tile
