// Parameters of the attention forward kernels, filled by the API after validation and shared by every kernel.
// Plain data, passed to kernels by value. Symbols as in the papers:
//   s = scale q k^T;  s = softcap tanh(s / softcap);  s -= slope |i + off - j|;  o = softmax(s) v,  off = seqlen_k - seqlen_q.
#pragma once

#include <algorithm>
#include <cstdint>

namespace flare::attention {

enum class DType : int32_t { kBf16 = 0, kFp16 = 1, kFp8E4m3 = 2, kFp32 = 3 };

// Strides in elements; the last dimension is contiguous. With cu_seqlens the batch stride is unused.
struct Strides {
    int64_t batch;
    int64_t row;
    int64_t head;
};

struct FwdParams {
    const void* q;  // [B, Sq, Hq, D]   or [Tq, Hq, D] with cu_seqlens_q
    const void* k;  // [B, Sk, Hk, D]   or [Tk, Hk, D] with cu_seqlens_k, or [pages, page_size, Hk, D] with block_table
    const void* v;  // as k, last dimension Dv
    void* o;        // as q, last dimension Dv, of type out_dtype
    float* lse;     // natural log, [B, Hq, Sq] or [Hq, Tq]; null when not wanted

    Strides q_stride;
    Strides k_stride;  // batch = page stride with block_table
    Strides v_stride;
    Strides o_stride;
    Strides lse_stride;  // row stride 1 is what the packed layouts have

    DType dtype;  // of q, k, v
    DType out_dtype;
    int32_t batch;
    int32_t heads_q;
    int32_t heads_kv;
    int32_t seqlen_q;  // the maximum over the batch when lengths are on the device
    int32_t seqlen_k;
    int32_t head_dim;    // of q and k
    int32_t head_dim_v;  // of v and o
    int64_t total_q;     // rows of packed q (0 when dense)
    int64_t total_k;

    // Key j is visible to row i when i + off - window_left <= j <= i + off + window_right; -1 = no bound on that side.
    // No mask is (-1, -1), causal (-1, 0).
    int32_t window_left;
    int32_t window_right;

    float scale;
    float softcap;              // 0 = off
    const float* alibi_slopes;  // [Hq] or [B, Hq] (alibi_batch_stride); null = off
    int64_t alibi_batch_stride;
    const float* sink;  // [Hq], natural-log units, not scaled; null = off

    // Lengths on the device; null = dense. Of int32, or of int64 with index64, which only the portable kernels take.
    const int32_t* cu_seqlens_q;  // [B + 1]
    const int32_t* cu_seqlens_k;  // [B + 1]
    const int32_t* seqused_q;     // [B]
    const int32_t* seqused_k;     // [B]
    int32_t index64;

    // Paged K and V; null = contiguous.
    const int32_t* block_table;  // [B, max_pages], int64 with index64
    int64_t block_table_stride;
    int32_t page_size;
    int32_t num_pages;

    // fp8 descales, [B, Hk] each with the strides below; null = 1.
    const float* q_descale;
    const float* k_descale;
    const float* v_descale;
    int64_t descale_batch_stride;
    int64_t descale_head_stride;

    int32_t num_splits;     // of the keys: 0 = automatic, n = exactly n
    int32_t deterministic;  // 1: the result of a sequence doesn't depend on what else is in the batch

    int32_t sm_count;  // of the device that runs the launch
};

inline bool has_device_lengths(const FwdParams& p) {
    return p.cu_seqlens_q != nullptr || p.cu_seqlens_k != nullptr || p.seqused_q != nullptr || p.seqused_k != nullptr;
}

// About: of a row that no end of the sequence cuts short, half of the keys on a side without a bound.
inline int64_t mean_visible_keys(const FwdParams& p) {
    const int64_t all = p.seqlen_k;
    if (p.window_left < 0 && p.window_right < 0) {
        return all;
    }
    const int64_t left = p.window_left < 0 ? all / 2 : p.window_left;
    const int64_t right = p.window_right < 0 ? all / 2 : p.window_right;
    return std::min(all, left + right + 1);
}

// Log2 of the query heads that a tile of the Hopper kernel joins: all of a group, where that saves a round of tiles of `rows`
// rows, of which `workers` run at a time, else one. Tiles hold whole tokens and one ALiBi slope. (Long queries fill their tiles
// anyway. Where key blocks begin depends on a tile's tokens, and so do the last bits.)
inline int32_t sm90_joined_heads(const FwdParams& p, int32_t rows, int32_t workers) {
    const int64_t group = p.heads_kv > 0 ? p.heads_q / p.heads_kv : 0;
    if (group < 2 || group > 64 || (group & (group - 1)) != 0 || p.alibi_slopes != nullptr || p.seqlen_q > 4 * rows ||
        p.deterministic != 0) {
        return 0;
    }
    const auto rounds = [&](int64_t tile_rows, int64_t heads) {
        const int64_t tiles = (tile_rows + rows - 1) / rows * heads * p.batch;
        return (tiles + workers - 1) / workers;
    };
    if (rounds(p.seqlen_q * group, p.heads_kv) >= rounds(p.seqlen_q, p.heads_q)) {
        return 0;
    }
    int32_t bits = 0;
    while ((1 << bits) < group) {
        ++bits;
    }
    return bits;
}

// Tiles of the Hopper kernel for D = 64.
enum class Sm90TileD64 : int32_t {
    kLong,   // 192 rows
    kQuad,   // 256 rows, small key blocks
    kShort,  // 64 rows, three blocks an SM
};

struct Sm90ChoiceD64 {
    Sm90TileD64 tile;
    int64_t time;  // in hundredths of what one tile of 192 rows takes, which gets an SM for itself
};

// Of few rows, the tiles that take least, by times of one H200 (8 to 512 heads of 32 to 448 rows): three tiles of 64 rows on one
// SM take about as long as one of 192, one or two of them little less. Of more, small key blocks where tiles are short and edges
// much of them: four warpgroups without turns share their loads, and each works on the blocks that it sees; where their tiles
// are too few for the GPU, small ones, several an SM, are more. (Only long tiles are built for more than plain parameters, and
// to join heads. What mustn't depend on the batch can't depend on the number of tiles.)
inline Sm90ChoiceD64 sm90_tile_d64(const FwdParams& p) {
    const auto tiles_of_an_sm = [&](int64_t rows, int32_t head_bits) {
        const int64_t tiles = ((int64_t{p.seqlen_q} << head_bits) + rows - 1) / rows * p.batch * (p.heads_q >> head_bits);
        return (tiles + p.sm_count - 1) / p.sm_count;
    };
    const int64_t keys = mean_visible_keys(p);
    const bool masked = p.window_left >= 0 || p.window_right >= 0;
    const bool few_keys = keys <= (masked ? 2560 : 1024);
    const int64_t small = tiles_of_an_sm(64, 0);
    const int32_t bits = sm90_joined_heads(p, 192, p.sm_count);
    const Sm90ChoiceD64 longest{Sm90TileD64::kLong, 100 * tiles_of_an_sm(192, bits)};
    const Sm90ChoiceD64 quad{Sm90TileD64::kQuad, (few_keys ? 125 : 143) * tiles_of_an_sm(256, 0)};
    const Sm90ChoiceD64 shortest{Sm90TileD64::kShort, small / 3 * 112 + (small % 3 == 0 ? 0 : small % 3 == 1 ? 85 : 95)};
    if (p.softcap != 0.0f || p.alibi_slopes != nullptr || has_device_lengths(p)) {
        return longest;
    }
    if (p.deterministic != 0) {
        return p.seqlen_q <= 64 || (masked && keys <= 640) ? shortest : longest;
    }
    if (p.seqlen_q <= 4 * 192) {
        const Sm90ChoiceD64 other = quad.time < shortest.time ? quad : shortest;
        return other.time < (bits > 0 ? longest.time * 9 / 10 : longest.time) ? other : longest;  // joined heads read less
    }
    const bool enough = (int64_t{p.seqlen_q} + 255) / 256 * p.batch * p.heads_q >= 3 * int64_t{p.sm_count};
    return few_keys && enough ? quad : masked && keys <= 640 ? shortest : longest;
}

}  // namespace flare::attention
