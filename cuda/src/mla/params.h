// Parameters of the MLA kernels, filled by the API after validation and shared by every kernel. Plain data.
#pragma once

#include <cstdint>

namespace flare::mla {

enum class DType : int32_t { kBf16 = 0, kFp16 = 1 };

// Absorbed form: every query head reads one shared latent row of d_c + d_rope channels as its key and the first d_c
// channels of it as its value. Strides in elements; the last dimension is contiguous.
struct MlaDecodeParams {
    const void* q;   // [B, Sq, H, d_c + d_rope]
    const void* kv;  // [B, Sk, d_c + d_rope], or [num_pages, page_size, d_c + d_rope] with block_table
    void* out;       // [B, Sq, H, d_c]
    float* lse;      // [B, H, Sq] natural log; null when not wanted

    int64_t q_stride_b, q_stride_s, q_stride_h;
    int64_t kv_stride_b, kv_stride_s;  // kv_stride_b: between sequences, or between pages
    int64_t out_stride_b, out_stride_s, out_stride_h;
    int64_t lse_stride_b, lse_stride_h;  // stride 1 along the queries

    DType dtype;  // of q, kv and out
    int32_t batch;
    int32_t seqlen_q;
    int32_t seqlen_k;  // the largest length
    int32_t heads;
    int32_t d_c;
    int32_t d_rope;
    float scale;     // any sign
    int32_t causal;  // key j is visible to query t if j <= t + len - Sq

    // Index arrays on the device: int64 when index_is_64, else int32.
    const void* seqlens_k;    // [B] visible keys of each sequence, its new ones included; null = seqlen_k for all
    const void* block_table;  // [B, >= ceil(seqlen_k / page_size)]; null = contiguous
    int64_t block_table_stride_b;
    int32_t index_is_64;
    int32_t page_size;
    int32_t num_pages;

    int32_t num_splits;     // 0 = automatic, 1 = none
    int32_t deterministic;  // results don't depend on what else is in the batch: no sequence is split
    int32_t sm_count;       // of the device that runs the launch
};

}  // namespace flare::mla
