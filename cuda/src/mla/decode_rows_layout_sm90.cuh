// Arguments, constants and shared memory of the Hopper MLA decode kernel for few query rows (decode_rows_sm90.cuh has the
// schedule).
#pragma once

#include <cstdint>

#include "../pipe/scheduler.cuh"
#include "schedule.cuh"

namespace flare::mla {

struct RowsArgs {
    ScheduleParams schedule;
    RowMap row_map;

    const void* q;  // latent part: of T, or fp16 with q_is_fp16
    const void* q_rope;
    int64_t q_stride_b, q_stride_s, q_stride_h;
    int64_t q_rope_stride_b, q_rope_stride_s, q_rope_stride_h;
    int32_t q_is_fp16;
    void* out;
    float* lse;
    int64_t out_stride_b, out_stride_s, out_stride_h;
    int64_t lse_stride_b, lse_stride_h;
    float scale_log2;
    int32_t causal;
    const float* sink;  // [heads]
    int32_t rows;       // of the longest request
    int32_t num_tiles;  // of rows
    int32_t d_c;

    const char* kv;
    uint64_t kv_policy;  // of L2
    int64_t kv_stride_b, kv_stride_s;  // bytes
    const void* block_table;           // null: contiguous, or indices
    int64_t block_table_stride_b;
    const void* indices;  // [batch, tokens, topk]
    int64_t indices_stride_b, indices_stride_s;
    int32_t index_is_64;
    int32_t page_size;  // contiguous: seqlen_k
    pipe::FastDivisor by_page;
    int32_t num_pages;
    int32_t whole_tiles;  // 32 keys of a tile lie in a row in one page

    uint64_t* meetings;    // [num_parts, num_tiles], decode_merge_sm90.cuh
    uint64_t meeting_tag;  // within kMeetingTag
    void* o_part;     // [2 num_parts, num_tiles * rows of a tile, 512] in T
    float* lse_part;  // the same rows, log2
};

namespace rows {

inline constexpr int kKeys = 32;  // of a tile: a key a lane of the loading warp

inline constexpr int kRowBytes = 656;  // eight rows at one column fall on different banks as they lie
inline constexpr int kScaleAt = 512;
inline constexpr int kRopeAt = 528;
inline constexpr int kTileBytes = kKeys * kRowBytes;
inline constexpr int kLatentSteps = 32;  // of 16 channels
inline constexpr int kRopeSteps = 4;
inline constexpr int kCols = 512;
inline constexpr int kScaleCols = 128;  // that share a scale
inline constexpr int kWarps = 8;  // that compute, up to 32 rows
inline constexpr uint32_t kLoaderRegs = 24;
inline constexpr uint32_t kComputeRegs = 240;
inline constexpr uint32_t kScoreRegs = 136;  // of the three warpgroups that share 64 rows
inline constexpr uint32_t kValueRegs = 176;
inline constexpr int kSliceCols = 128;             // of O, merged between groups at a time
inline constexpr int kWeightPitch = 2 * kKeys + 16;  // of P in bytes: eight rows fall on different banks

// kTall times 16 query rows. A group of warps shares key tiles, each having its part of the channels of S and of the columns of
// O; the groups of a block take the tiles by turns.
template <int kTall>
struct Shape {
    static constexpr int kRows = 16 * kTall;
    static constexpr int kGroupWarps = 2 * kTall;
    static constexpr int kGroups = kWarps / kGroupWarps;
    static constexpr int kWarpCols = kCols / kGroupWarps;
    static constexpr int kScales = kWarpCols / kScaleCols;  // scales of a key that a warp needs
    static constexpr int kComputeWarps = kTall == 4 ? 12 : kWarps;
    static constexpr int kThreads = 128 + 32 * kComputeWarps;
    static constexpr int kStages = kTall == 1 ? 8 : kTall == 2 ? 6 : 5;
    static constexpr int kLoaders = kTall == 2 ? 3 : 4;  // warps
    static constexpr int kTileStep = kTall == 4 ? 2 : 1;  // tiles at a time
};

template <int kTall>
struct SharedStorage {
    using S = Shape<kTall>;
    // Of a tile: partial scores by the row octet they belong to and the warp they come from, then P times the scales of 128
    // columns each.
    struct Exchange {
        float4 scores[S::kGroups][S::kGroupWarps][S::kGroupWarps][2][32];
        uint8_t p[S::kGroups][kCols / kScaleCols][S::kRows][kWeightPitch];
    };

    alignas(128) uint8_t k[S::kStages][kTileBytes];
    alignas(16) uint4 q[kLatentSteps + kRopeSteps][kTall][32];  // A fragments
    union alignas(16) {
        Exchange exchange;
        float o[S::kGroups][S::kRows][kSliceCols];  // at the end of a piece
    };
    float factor[S::kGroups][S::kRows];  // of O for a tile
    float top[S::kGroups][S::kRows];
    float sum[S::kGroups][S::kRows];
    uint32_t present[S::kStages];  // bit j: key j of the tile exists
    uint64_t full[S::kStages];
    uint64_t empty[S::kStages];
    Share share;
    Turn turns[2];  // in merging the first and the last request of the share
};
// 64 rows: wgmma.
template <>
struct SharedStorage<4> {
    using S = Shape<4>;
    alignas(1024) uint8_t q[9][S::kRows * 128];                 // chunks of 64 channels, 128-byte swizzle
    alignas(1024) uint8_t p[kCols / kScaleCols][S::kRows * 128];  // [row][key], times the scales of 128 columns each
    alignas(128) uint8_t k[S::kStages][kTileBytes];
    // Maxima or sums of the scoring warps: [round][warp][lane % 4][8-row group, row % 2].
    alignas(16) float exchange[2][4][4][S::kRows / 4];
    alignas(16) float top[4][S::kRows / 4];
    alignas(16) float factor[S::kRows];   // of O, of a pair of tiles
    int32_t limit[S::kRows];  // keys before it are seen
    float inverse[S::kRows];  // of the sums, at the end of a piece
    uint32_t raised;  // a maximum, by the last pair of tiles
    uint32_t present[S::kStages];
    uint64_t full[S::kStages];
    uint64_t empty[S::kStages];
    uint64_t q_full;
    uint64_t p_full;
    uint64_t p_empty;
    uint64_t inverse_full;
    Share share;
    Turn turns[2];
};
static_assert(sizeof(SharedStorage<4>) <= 232448, "shared memory of a Hopper block");

static_assert(sizeof(SharedStorage<1>) <= 232448 && sizeof(SharedStorage<2>) <= 232448, "shared memory of a Hopper block");

// With 64 rows a row's maximum is raised only when it grew by this many powers of two: P stays below 2^4, times a scale in fp16.
inline constexpr float kRescaleThreshold = 4.0f;
inline constexpr float kLeastMaximum = -1e38f;  // of a row that has seen no key; finite, so that it can be subtracted

enum NamedBarrier : uint32_t { kBarrierCompute = 1, kBarrierGroup = 2, kBarrierMerge = 6 };  // 2 to 5: one for each group

}  // namespace rows
}  // namespace flare::mla
