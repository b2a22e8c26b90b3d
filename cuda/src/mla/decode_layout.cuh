// Arguments, constants and shared memory of the Hopper MLA decode kernel (decode_sm90.cuh has the map and the
// protocol).
#pragma once

#include <cstdint>

#include "../pipe/scheduler.cuh"
#include "schedule.cuh"

namespace flare::mla {

struct DecodeArgs {
    ScheduleParams schedule;

    void* out;
    float* lse;
    int64_t out_stride_b, out_stride_s, out_stride_h;
    int64_t lse_stride_b, lse_stride_h;
    float scale_log2;  // above 0
    int32_t negate;    // the scores
    int32_t causal;
    RowMap row_map;
    const float* sink;  // [heads]
    int32_t rows;       // of the longest request
    int32_t num_tiles;  // ceil(rows / 64)
    int32_t d_c;
    int32_t d_total;        // d_c + d_rope
    int32_t q_rope_column;  // of the rope part in its map

    uint64_t kv_policy;  // of L2

    const void* block_table;
    int64_t block_table_stride_b;
    int32_t index_is_64;
    int32_t page_size;      // contiguous: seqlen_k
    pipe::FastDivisor by_page;
    int32_t num_pages;      // contiguous: batch
    int32_t kv_box_rows;    // a power of two that divides page_size and 64; contiguous: 64
    int32_t q_rows_packed;  // 1: the rows of a sequence are equally spaced and a box holds 64 of them
    const char* kv;         // for gathering
    uint32_t kv_stride_b, kv_stride_s;  // in 16 bytes, modulo 2^32: rows lie below that
    const void* indices;               // [batch, tokens, topk], null: dense
    int64_t indices_stride_b, indices_stride_s;

    uint64_t* meetings;    // [num_parts, num_tiles], decode_merge_sm90.cuh
    uint64_t meeting_tag;  // within kMeetingTag
    void* o_part;     // [2 num_parts, num_tiles * 64, 512] in the type of out
    float* lse_part;  // [2 num_parts, num_tiles * 64], log2
};

namespace decode {

// How latents come to shared memory: boxes by TMA, or 16-byte pieces by cp.async where pages are too small for boxes or
// rows are named one by one.
enum class Load { kTma, kGather };

inline constexpr int kChunks = 9;
inline constexpr int kRopeChunk = 8;
inline constexpr uint32_t kChunkBytes = kBlockKeys * 128;
inline constexpr uint32_t kTileBytes = kChunks * kChunkBytes;
inline constexpr int kValueCols = 512;
inline constexpr int kHalfCols = 256;
inline constexpr int kThreads = 384;
inline constexpr int kGroups = 5;  // of chunks with a full barrier each: rope, {0,1}, {2,3}, {4,5}, {6,7}

inline constexpr int kPageIdSlots = 6;
inline constexpr int kMaxBoxGroups = 4;  // boxes of at least 16 rows

// Registers of the loading warpgroup and of the two consumers.
__host__ __device__ constexpr uint32_t loader_regs(Load load) {
    return load == Load::kTma ? 40 : 56;
}
__host__ __device__ constexpr uint32_t consumer_regs(Load load) {
    return load == Load::kTma ? 232 : 224;
}
constexpr bool registers_fit(Load load) {
    return loader_regs(load) + 2 * consumer_regs(load) <= 3 * (65536 / kThreads / 8 * 8);
}
static_assert(registers_fit(Load::kTma) && registers_fit(Load::kGather), "more registers than the launch has");

inline constexpr int kBiasSlots = 4;

// Rescaling of O and of the sums is put off until a row's maximum has grown by this many powers of two; the stale
// maximum only makes P as large as 2^8, which fp16 and bf16 hold with the same relative precision.
inline constexpr float kRescaleThreshold = 8.0f;

struct SharedStorage {
    alignas(1024) uint8_t q[kTileBytes];
    alignas(1024) uint8_t k[2][kTileBytes];
    alignas(1024) uint8_t p[kBlockKeys * 128];
    float row_max[kTileRows];
    float row_sum[2][2][kTileRows];
    uint64_t q_full;
    uint64_t q_empty;
    uint64_t k_full[2][kGroups];
    uint64_t k_empty[2][3];
    uint64_t p_full[2][2];
    Share share;
    union alignas(16) {
        int32_t page_ids[kPageIdSlots][kMaxBoxGroups];  // of the next key blocks, by box group
        float bias[kBiasSlots][kBlockKeys];             // with token indices: 0, or -inf where a row is absent
    };
    Turn turns[2];  // in merging the first and the last request of the share
};
static_assert(sizeof(SharedStorage) <= 232448, "shared memory of a Hopper block");

enum NamedBarrier : uint32_t { kBarrierWarpgroup = 1, kBarrierConsumers = 3 };

// Column of chunk c in q and kv; out of bounds (zero-filled) where d_c < 512 has none.
__device__ __forceinline__ int chunk_column(const DecodeArgs& args, int chunk) {
    if (chunk == kRopeChunk) {
        return args.d_c;
    }
    return 64 * chunk < args.d_c ? 64 * chunk : args.d_total + 64 - args.d_total % 8;
}

}  // namespace decode
}  // namespace flare::mla
