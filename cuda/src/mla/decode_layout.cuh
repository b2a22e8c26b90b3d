// Arguments, constants and shared memory of the Hopper MLA decode kernel (decode_sm90.cuh has the map and the
// protocol).
#pragma once

#include <cstdint>

#include "schedule.cuh"

namespace flare::mla {

struct DecodeArgs {
    ScheduleParams schedule;

    void* out;
    float* lse;
    int64_t out_stride_b, out_stride_s, out_stride_h;
    int64_t lse_stride_b, lse_stride_h;
    float scale_log2;
    int32_t causal;
    int32_t seqlen_q;
    int32_t heads;
    int32_t rows;       // seqlen_q * heads
    int32_t num_tiles;  // ceil(rows / 64)
    int32_t d_c;
    int32_t d_total;  // d_c + d_rope

    const void* block_table;
    int64_t block_table_stride_b;
    int32_t index_is_64;
    int32_t page_size;      // contiguous: seqlen_k
    int32_t num_pages;      // contiguous: batch
    int32_t kv_box_rows;    // a power of two that divides page_size and 64; contiguous: 64
    int32_t q_rows_packed;  // 1: the rows of a sequence are equally spaced and a box holds 64 of them
    const char* kv;         // for gathering
    int64_t kv_stride_b, kv_stride_s;

    Cut* cuts;        // [num_parts]
    float* o_part;    // [2 num_parts, num_tiles * 64, 512]
    float* lse_part;  // [2 num_parts, num_tiles * 64], log2
};

namespace decode {

inline constexpr int kChunks = 9;
inline constexpr int kRopeChunk = 8;
inline constexpr uint32_t kChunkBytes = kBlockKeys * 128;
inline constexpr uint32_t kTileBytes = kChunks * kChunkBytes;
inline constexpr int kValueCols = 512;
inline constexpr int kHalfCols = 256;
inline constexpr int kThreads = 384;
inline constexpr int kGroups = 5;  // of chunks with a full barrier each: rope, {0,1}, {2,3}, {4,5}, {6,7}

inline constexpr int kPageIdSlots = 6;

inline constexpr uint32_t kProducerRegs = 40;
inline constexpr uint32_t kConsumerRegs = 232;
inline constexpr uint32_t kGatherRegs = 56;
inline constexpr uint32_t kGatherConsumerRegs = 224;
static_assert(kGatherRegs + 2 * kGatherConsumerRegs <= 3 * (65536 / kThreads / 8 * 8),
              "more registers than the launch has");
static_assert(kProducerRegs + 2 * kConsumerRegs <= 3 * (65536 / kThreads / 8 * 8),
              "more registers than the launch has");

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
    uint64_t p_full[2];
    Share share;
    int32_t page_ids[kPageIdSlots][kBlockKeys];  // of the next key blocks, by box group
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
