// Which keys a tile of rows sees: the range of key blocks, which of them need a mask, and the mask itself.
// Bottom-right aligned: row i stands at key position i + off, off = seqlen_k - seqlen_q. Key blocks may start at any key:
// block n covers keys [first_key + n * kBlockN, ...), so a window never costs an extra block for alignment.
#pragma once

#include <cmath>
#include <cstdint>

namespace flare::attention {

// Bounds are clamped on the host to kUnbounded, so that sums of a position and a bound stay within int32.
inline constexpr int32_t kUnbounded = 1 << 29;

struct KeyRange {
    int first_key;
    int num_blocks;
    // For the rows that mask_edges was called with:
    int right_masked_from;  // blocks n >= this need the right mask (window_right, seqlen_k)
    int left_masked_until;  // blocks n < this need the left mask

    template <int kBlockN>
    static __device__ __forceinline__ KeyRange make(int m0, int m1, int seqlen_q, int seqlen_k, int left, int right) {
        const int off = seqlen_k - seqlen_q;
        KeyRange range;
        range.first_key = max(0, m0 + off - left);
        const int last_key = min(seqlen_k, m1 + off + right);  // exclusive; m1 - 1 + off + right is the last row's last
        // Rows that see nothing get one block beyond the end, all masked: every tile has a block, no role needs a special
        // path, and what lands there is zeros (TMA beyond the map; the scrubber within it).
        const bool nothing = last_key <= range.first_key;
        range.first_key = nothing ? max(1, seqlen_k) : range.first_key;
        range.num_blocks = nothing ? 1 : (last_key - range.first_key + kBlockN - 1) / kBlockN;
        return range;
    }

    // Which blocks need a mask for rows [m0, m1) of the tile's: a warpgroup's own rows need fewer than the tile's.
    template <int kBlockN>
    __device__ __forceinline__ void mask_edges(int m0, int m1, int seqlen_q, int seqlen_k, int left, int right) {
        const int off = seqlen_k - seqlen_q;
        const int full_end = min(seqlen_k, m0 + off + right + 1);  // exclusive end of what the first row sees
        right_masked_from = max(0, full_end - first_key) / kBlockN;
        const int full_begin = m1 - 1 + off - left;  // first key of the last row
        left_masked_until = max(0, full_begin - first_key + kBlockN - 1) / kBlockN;
    }

    // Blocks [begin, end) are those that any of rows [m0, m1), some of the tile's, sees; one block if they see none.
    template <int kBlockN>
    __device__ __forceinline__ void own_blocks(int m0, int m1, int seqlen_q, int seqlen_k, int left, int right, int& begin,
                                               int& end) const {
        const int off = seqlen_k - seqlen_q;
        const int last_key = min(seqlen_k, m1 + off + right);  // exclusive
        end = min(num_blocks, max(1, (last_key - first_key + kBlockN - 1) / kBlockN));
        begin = min(end - 1, max(0, m0 + off - left - first_key) / kBlockN);
    }
};

// Keys [lo, hi] of one row relative to the block; col0 = this thread's first column (2 * (lane % 4)) is already in them.
template <int kCount>
__device__ __forceinline__ void mask_right(float (&s)[kCount], const int (&hi)[2]) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
        if (8 * (i / 4) + i % 2 > hi[(i / 2) % 2]) {
            s[i] = -INFINITY;
        }
    }
}

template <int kCount>
__device__ __forceinline__ void mask_left(float (&s)[kCount], const int (&lo)[2]) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
        if (8 * (i / 4) + i % 2 < lo[(i / 2) % 2]) {
            s[i] = -INFINITY;
        }
    }
}

// The same by bits, for fewer instructions: bit j stands for the j-th of a row's columns in a thread, 8 * (j / 2) + j % 2.
// Columns up to `last`:
__device__ __forceinline__ uint32_t columns_until(int last) {
    const int count = 2 * (last >> 3) + min(last & 7, 1) + 1;
    return count >= 32 ? 0xffffffffu : (1u << max(count, 0)) - 1;
}

template <int kCount>
__device__ __forceinline__ void mask_columns(float (&s)[kCount], const uint32_t (&seen)[2]) {
    static_assert(kCount <= 64, "a bit a column");
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
        if ((seen[(i / 2) % 2] >> (2 * (i / 4) + i % 2) & 1) == 0) {
            s[i] = -INFINITY;
        }
    }
}

}  // namespace flare::attention
