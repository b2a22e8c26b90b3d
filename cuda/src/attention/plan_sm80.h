// What the portable attention path does with given parameters: which kernel, which tiles, how many splits of the keys, how much
// workspace. Pure functions of sizes and options, shared by selection, launch, names and workspace; tested without a GPU.
#pragma once

#include <algorithm>
#include <cstdint>

#include "params.h"

namespace flare::attention {

// Positions, and their sums with a window bound, stay within int32.
inline constexpr int64_t kMaxSeqlenSm80 = int64_t{1} << 28;

enum class Sm80Kernel : int32_t {
    kTile,     // tensor cores, tiles of query rows of one head; exact head dimensions, no option that costs registers
    kGeneral,  // tensor cores, every option: 64 rows (tokens times heads of a group), padded head dimensions, pages, splits
    kDecode,   // tensor cores, at most 16 rows of a group against streamed keys: as fast as memory
    kFma,      // fp32 arithmetic on any type, any head dimension and any stride
};

// Tiles of kTile by head dimensions.
struct Sm80TileShape {
    int32_t head_dim;
    int32_t head_dim_v;
    int32_t block_m;
    int32_t block_n;
    int32_t blocks_per_sm;
    int32_t most_keys;  // that a row may see on average; 0 = any
};

#define FLARE_ATTENTION_SM80(id, d, dv, block_m, block_n, warps, stages, blocks_per_sm, most_keys) \
    {d, dv, block_m, block_n, blocks_per_sm, most_keys},
inline constexpr Sm80TileShape kSm80Tiles[] = {
#include "forward_sm80_configs.inc"
};
#undef FLARE_ATTENTION_SM80
inline constexpr int32_t kNumSm80Tiles = sizeof(kSm80Tiles) / sizeof(kSm80Tiles[0]);

inline constexpr int32_t kGeneralRows = 64;
inline constexpr int32_t kDecodeRows = 16;
inline constexpr int32_t kFmaRows = 64;
inline constexpr int32_t kSplitUnit = 64;             // keys; equal splits are multiples of it
inline constexpr int32_t kDeterministicSplit = 2048;  // keys of a split whose size mustn't depend on the batch
inline constexpr int32_t kMostAutomaticSplits = 128;
inline constexpr int32_t kFewestKeysToSplit = 512;
// Rows of a sequence (tokens times group) that may share tiles and be split over the keys. What mustn't depend on the batch
// can't depend on estimated times either.
inline constexpr int32_t kShortQueryRows = 1024;
inline constexpr int32_t kDeterministicShortQueryRows = 64;

struct Sm80Plan {
    Sm80Kernel kernel;
    int32_t tile;      // index into kSm80Tiles, or -1
    int32_t head_dim;  // padded: of the instance
    int32_t block_m;   // rows of a tile
    int32_t group;     // query heads that share a tile: 1, or all of a K/V head
    int32_t num_m;     // row tiles of the longest sequence
    int32_t num_splits;
    int32_t split_keys;  // fixed size of a split, from key 0 on; 0 = equal parts of what a tile sees
};

inline int64_t longest_q(const FwdParams& p) {
    return p.cu_seqlens_q != nullptr && p.total_q < p.seqlen_q ? p.total_q : p.seqlen_q;
}

// Keys that a tile of few rows can see at most.
inline int64_t visible_span(const FwdParams& p) {
    if (p.window_left < 0 || p.window_right < 0) {
        return p.seqlen_k;
    }
    return std::min<int64_t>(p.seqlen_k, int64_t{p.window_left} + p.window_right + longest_q(p));
}

// Splits and how long they take, in keys of a block.
struct SplitEstimate {
    int32_t splits;
    int64_t keys;
};

// Splits that finish first, when `slots` blocks run at a time, a block costs as much as 128 keys to start, and each split as
// much as 12 to merge. Of the splits measured on one H200 (B = 1 to 128, 4096 to 131072 keys) this takes the best or one within
// 3 %.
inline SplitEstimate best_splits(int64_t tiles, int64_t span, int64_t slots, int64_t most) {
    most = std::min<int64_t>({most, kMostAutomaticSplits, span / (kFewestKeysToSplit / 2)});
    SplitEstimate best{1, INT64_MAX};
    for (int64_t splits = 1; splits <= std::max<int64_t>(1, most); ++splits) {
        const int64_t keys = (span + splits - 1) / splits;
        const int64_t cost = (tiles * splits + slots - 1) / slots * (keys + 128) + 12 * splits;
        if (splits == 1 || cost < best.keys - best.keys / 64) {
            best = {static_cast<int32_t>(splits), cost};
        }
    }
    return best;
}

// Automatic splits store at most this many partial rows.
inline int64_t partial_row_limit(const FwdParams& p) {
    return int64_t{256} * p.sm_count;
}

inline bool has_short_queries(const FwdParams& p) {
    return longest_q(p) * (p.heads_q / p.heads_kv) <=
           (p.deterministic != 0 ? kDeterministicShortQueryRows : kShortQueryRows);
}

inline bool splits_automatically(const FwdParams& p) {
    return p.num_splits == 0 && has_short_queries(p) && visible_span(p) >= kFewestKeysToSplit;
}

// Rows of partial results to make room for. Among short queries never less when a size grows: workspace for a batch serves
// every smaller one, which is split more.
inline int64_t partial_rows(const FwdParams& p) {
    const int64_t rows = int64_t{p.batch} * longest_q(p) * p.heads_q;
    if (p.num_splits > 1) {
        return rows * p.num_splits;
    }
    if (!splits_automatically(p)) {
        return 0;
    }
    if (p.deterministic != 0) {
        return rows * ((p.seqlen_k + kDeterministicSplit - 1) / kDeterministicSplit);
    }
    return std::min(rows * kMostAutomaticSplits, partial_row_limit(p));
}

// Partial outputs [splits, B, Sq, H, Dv], then partial lse [splits, B, Sq, H], fp32.
inline uint64_t sm80_workspace(const FwdParams& p) {
    const auto rounded = [](uint64_t bytes) { return (bytes + 255) / 256 * 256; };
    const uint64_t rows = static_cast<uint64_t>(partial_rows(p));
    return rounded(rows * static_cast<uint64_t>(p.head_dim_v) * 4) + rounded(rows * 4);
}

inline bool aligned_strides(const Strides& s, int64_t multiple) {
    return s.batch % multiple == 0 && s.row % multiple == 0 && s.head % multiple == 0;
}

// Whether 16-byte copies and tensor cores can serve the tensors.
inline bool suits_tensor_cores(const FwdParams& p) {
    const bool type = p.dtype == DType::kBf16 || p.dtype == DType::kFp16;
    const bool dims = p.head_dim % 8 == 0 && p.head_dim_v % 8 == 0 && p.head_dim <= 256 && p.head_dim_v <= 256;
    return type && dims && aligned_strides(p.q_stride, 8) && aligned_strides(p.k_stride, 8) && aligned_strides(p.v_stride, 8) &&
           aligned_strides(p.o_stride, p.out_dtype == DType::kFp32 ? 4 : 8);
}

inline int32_t padded_head_dim(const FwdParams& p) {
    const int32_t widest = std::max(p.head_dim, p.head_dim_v);
    return widest <= 64 ? 64 : widest <= 128 ? 128 : 256;
}

inline int32_t find_sm80_tile(const FwdParams& p) {
    const bool plain = p.out_dtype == p.dtype && p.block_table == nullptr && p.index64 == 0 && p.scale > 0.0f &&
                       p.softcap == 0.0f && p.alibi_slopes == nullptr && p.num_splits <= 1;
    if (!plain) {
        return -1;
    }
    for (int32_t i = 0; i < kNumSm80Tiles; ++i) {
        const Sm80TileShape& tile = kSm80Tiles[i];
        if (tile.head_dim == p.head_dim && tile.head_dim_v == p.head_dim_v &&
            (tile.most_keys == 0 || mean_visible_keys(p) <= tile.most_keys)) {
            return i;
        }
    }
    return -1;
}

inline constexpr int64_t kMergeKeys = 50;  // what the launch of the merge costs

inline int32_t general_blocks_per_sm(int32_t head_dim) {
    return head_dim == 64 ? 4 : head_dim == 128 ? 3 : 2;
}

// Blocks that run at a time.
inline int64_t slots_of(const FwdParams& p, Sm80Kernel kernel, int32_t head_dim) {
    const int32_t per_sm = kernel == Sm80Kernel::kGeneral ? general_blocks_per_sm(head_dim) : head_dim == 256 ? 1 : 2;
    return int64_t{p.sm_count} * per_sm;
}

// Automatic splits of tiles of `block_m` rows that hold all heads of a group.
inline SplitEstimate estimate_splits(const FwdParams& p, Sm80Kernel kernel, int32_t head_dim, int32_t block_m) {
    const int64_t rows = longest_q(p) * (p.heads_q / p.heads_kv);
    const int64_t tiles = (rows + block_m - 1) / block_m * p.batch * p.heads_kv;
    const int64_t total_rows = std::max<int64_t>(1, int64_t{p.batch} * longest_q(p) * p.heads_q);
    const int64_t most = splits_automatically(p) ? partial_row_limit(p) / total_rows : 1;
    return best_splits(tiles, visible_span(p), slots_of(p, kernel, head_dim), most);
}

// The general kernel and the merge of its splits. Softcap and ALiBi are exact here, and slower for it.
inline int64_t estimate_general(const FwdParams& p) {
    const SplitEstimate best = estimate_splits(p, Sm80Kernel::kGeneral, padded_head_dim(p), kGeneralRows);
    const bool transforms = p.softcap > 0.0f || p.alibi_slopes != nullptr;
    return (transforms ? best.keys * 4 / 3 : best.keys) + (best.splits > 1 ? kMergeKeys : 0);
}

// How long other kernels take without splits, in keys of a block of the general kernel (measured on one H200). An SM full of
// tiles of kTile gets 1.45 times as far with its rows, or 1.15 times with one stage, and pads nothing; a block alone on its SM
// takes about half of the time.
inline int64_t estimate_tile(const FwdParams& p, const Sm80TileShape& tile) {
    const int64_t tiles = (longest_q(p) + tile.block_m - 1) / tile.block_m * p.batch * p.heads_q;
    const int64_t slots = int64_t{tile.blocks_per_sm} * p.sm_count;
    const int64_t general_rows = kGeneralRows * general_blocks_per_sm(padded_head_dim(p));
    const int64_t percent = tile.block_m == 128 || tile.head_dim == 64 ? 145 : 115;
    const int64_t work = (tile.block_m * tile.blocks_per_sm) * (p.head_dim + p.head_dim_v) * 50;
    const int64_t keys = (tiles + slots - 1) / slots * (visible_span(p) + 128) * work /
                         (general_rows * padded_head_dim(p) * percent);
    return tiles > p.sm_count ? keys : keys * (tile.blocks_per_sm == 2 ? 60 : 52) / 100;
}

inline int64_t estimate_hopper(const FwdParams& p) {
    const int32_t tile_rows = p.head_dim <= 96 ? 192 : 128;
    const int32_t bits = sm90_joined_heads(p, tile_rows, p.sm_count);
    const int64_t tiles = ((longest_q(p) << bits) + tile_rows - 1) / tile_rows * p.batch * (p.heads_q >> bits);
    const int64_t time = p.head_dim == 64 ? sm90_tile_d64(p).time : (tiles + p.sm_count - 1) / p.sm_count * 100;
    const int32_t padded = padded_head_dim(p);
    const int64_t full = p.head_dim == 96 ? 40 : padded == 64 ? 27 : padded == 128 ? 23 : 30;  // percent, of padded dimensions
    const int64_t keys = visible_span(p) * full * (p.head_dim + p.head_dim_v) / (200 * padded);
    return time * (keys + 70) / 100 + 30;
}

inline Sm80Plan plan_sm80(const FwdParams& p) {
    Sm80Plan plan{};
    plan.tile = -1;
    plan.num_splits = p.num_splits > 0 ? p.num_splits : 1;
    const int32_t heads_per_kv = p.heads_q / p.heads_kv;
    const int64_t rows = longest_q(p) * heads_per_kv;
    const bool short_query = has_short_queries(p);
    const auto prefers_tile = [&](const Sm80TileShape& tile) {
        if (!short_query || p.seqlen_k < kFewestKeysToSplit) {
            return true;
        }
        return p.deterministic == 0 && estimate_tile(p, tile) <= estimate_general(p);
    };
    if (!suits_tensor_cores(p)) {
        plan.kernel = Sm80Kernel::kFma;
        plan.block_m = kFmaRows;
        plan.group = heads_per_kv;
    } else if (rows <= kDecodeRows) {
        plan.kernel = Sm80Kernel::kDecode;
        plan.head_dim = padded_head_dim(p);
        plan.block_m = kDecodeRows;
        plan.group = heads_per_kv;
    } else if (const int32_t tile = find_sm80_tile(p); tile >= 0 && prefers_tile(kSm80Tiles[tile])) {
        plan.kernel = Sm80Kernel::kTile;
        plan.tile = tile;
        plan.head_dim = p.head_dim;
        plan.block_m = kSm80Tiles[tile].block_m;
        plan.group = 1;
    } else {
        plan.kernel = Sm80Kernel::kGeneral;
        plan.head_dim = padded_head_dim(p);
        plan.block_m = kGeneralRows;
        // Rows of one token must not fall apart into tiles that are mostly empty, nor a long query into many short ones.
        plan.group = short_query ? heads_per_kv : 1;
    }
    const int64_t tile_rows = longest_q(p) * plan.group;
    plan.num_m = static_cast<int32_t>((tile_rows + plan.block_m - 1) / plan.block_m);
    if (splits_automatically(p) && plan.kernel != Sm80Kernel::kTile) {
        if (p.deterministic != 0) {
            plan.split_keys = kDeterministicSplit;
            plan.num_splits = (p.seqlen_k + kDeterministicSplit - 1) / kDeterministicSplit;
        } else {
            plan.num_splits = estimate_splits(p, plan.kernel, plan.head_dim, plan.block_m).splits;
        }
    }
    return plan;
}

// Where both can run it: whether this path is faster on Hopper than the kernel made for that. It is for short queries: heads of
// a group share the keys read and the rows of a tile, and splits fill the device.
inline bool sm80_is_faster(const FwdParams& p) {
    const Sm80Plan plan = plan_sm80(p);
    if (plan.kernel != Sm80Kernel::kGeneral) {
        return plan.kernel == Sm80Kernel::kDecode;
    }
    if (p.deterministic != 0 || !splits_automatically(p)) {
        return plan.num_splits > 1;
    }
    return estimate_general(p) < estimate_hopper(p);
}

}  // namespace flare::attention
