// The shared-memory tile format: a [rows][D] tile is stored as chunks [D / span][rows][span], span = 128 bytes for
// Swizzle::k128, each chunk row one span long, chunk bases 1024-byte aligned. One TMA box {span, rows} writes one chunk;
// a 5-D box {span, rows, D / span} writes the tile.
#pragma once

#include <cstdint>

namespace flare::tile {

// The TMA enumeration and the wgmma descriptor field number these differently: convert, never cast.
enum class Swizzle { kNone, k32, k64, k128 };

__host__ __device__ constexpr uint32_t span_bytes(Swizzle s) {
    return s == Swizzle::k128 ? 128 : s == Swizzle::k64 ? 64 : s == Swizzle::k32 ? 32 : 16;
}

// Value of bits 62-63 of a wgmma descriptor.
__host__ __device__ constexpr uint64_t descriptor_swizzle(Swizzle s) {
    return s == Swizzle::k128 ? 1 : s == Swizzle::k64 ? 2 : s == Swizzle::k32 ? 3 : 0;
}

// Hardware XORs absolute shared address bits: 16-byte index ^= bits 7.. (as many bits as the span has 16-byte pieces).
template <Swizzle S>
__host__ __device__ constexpr uint32_t swizzle(uint32_t addr) {
    constexpr uint32_t mask = span_bytes(S) / 16 - 1;
    return addr ^ (((addr >> 7) & mask) << 4);
}

// Swizzled address of the 16-byte piece that holds byte `col_bytes` of row `row` in a tile of `rows` rows.
template <Swizzle S>
__host__ __device__ constexpr uint32_t tile_addr(uint32_t base, uint32_t rows, uint32_t row, uint32_t col_bytes) {
    constexpr uint32_t span = span_bytes(S);
    return swizzle<S>(base + (col_bytes / span) * rows * span + row * span + col_bytes % span);
}

}  // namespace flare::tile
