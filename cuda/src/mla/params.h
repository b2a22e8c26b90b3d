// Parameters of the MLA kernels, filled by the API after validation and shared by every kernel: one struct an operation.
// Plain data. Strides in elements unless said otherwise; the last dimension is contiguous.
#pragma once

#include <cstdint>

namespace flare::mla {

enum class DType : int32_t { kBf16 = 0, kFp16 = 1, kFp32 = 2, kRow656 = 3 };  // kRow656: 656-byte latent rows

enum class WeightLayout : int32_t {
    kCD = 0,  // w_uk [H, d_c, d_nope], w_uv [H, d_c, d_v]
    kDC = 1,  // w_uk [H, d_nope, d_c], w_uv [H, d_v, d_c]
};

// Absorbed form: every query head reads one shared latent row of d_c + d_rope channels as its key and the first d_c
// channels of it as its value.
struct MlaDecodeParams {
    const void*
        q;  // [B, Sq, H, d_c + d_rope]; [.., d_c] with q_rope; [.., d_nope] with w_uk. [total_q, H, .] with cu_seqlens_q
    const void* kv;  // [B, Sk, d_c + d_rope], or [num_pages, page_size, d_c + d_rope] with block_table or indices
    void* out;       // [B, Sq, H, d_c]; [.., d_v] with w_uv
    float* lse;      // [B, H, Sq] natural log, [H, total_q] with cu_seqlens_q; null when not wanted

    int64_t q_stride_b, q_stride_s, q_stride_h;
    int64_t kv_stride_b, kv_stride_s;  // kv_stride_b: between sequences, or between pages; bytes with kRow656
    int64_t out_stride_b, out_stride_s, out_stride_h;
    int64_t lse_stride_b, lse_stride_h;  // stride 1 along the queries

    DType dtype;  // of q, q_rope, w_uk, w_uv
    int32_t batch;
    int32_t seqlen_q;  // the largest count with cu_seqlens_q
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

    int32_t num_splits;     // 0 = automatic, 1 = none, n = exactly n
    int32_t deterministic;  // results don't depend on what else is in the batch: no sequence is split
    int32_t sm_count;       // of the device that runs the launch

    DType out_dtype;
    DType kv_dtype;      // dtype or kRow656
    const void* q_rope;  // [B, Sq, H, d_rope]; null = q carries it in its last d_rope channels
    int64_t q_rope_stride_b, q_rope_stride_s, q_rope_stride_h;

    const void* w_uk;  // null = q is absorbed already
    const void* w_uv;  // null = out is the latent output
    int64_t w_uk_stride_h, w_uk_stride_r;
    int64_t w_uv_stride_h, w_uv_stride_r;
    WeightLayout weight_layout;
    int32_t d_nope;  // with w_uk
    int32_t d_v;     // with w_uv

    const void* cu_seqlens_q;  // [B + 1]; null = Sq tokens each
    int64_t total_q;

    // Sparse: token s of sequence b attends to rows indices[b][s][0 .. topk_length[b][s]) of the pool, row i in page
    // i / page_size; negative or too large = absent. Without block_table, seqlens_k, causal, cu_seqlens_q.
    const void* indices;
    int64_t indices_stride_b, indices_stride_s;
    const void* topk_length;  // null = topk
    int64_t topk_length_stride_b, topk_length_stride_s;
    int32_t topk;

    const float* sink;  // [H], natural-log units, joins the denominator and lse; null = none
};

// Up-projecting form: K = c_kv W_uk[h] and V = c_kv W_uv[h] for each head.
struct MlaPrefillParams {
    const void* q_nope;  // [B, Sq, H, d_nope], or [total_q, H, d_nope] with cu_seqlens_q
    const void* q_rope;  // [B, Sq, H, d_rope]; null with d_rope = 0
    const void* c_kv;    // [B, Sk, d_c], [total_k, d_c] with cu_seqlens_k, [num_pages, page_size, d_c] with block_table
    const void* k_rope;  // alike, d_rope wide; null with d_rope = 0 and with kRow656
    const void* w_uk;
    const void* w_uv;
    void* out;   // [B, Sq, H, d_v]
    float* lse;  // [B, H, Sq] or [H, total_q]; null when not wanted

    int64_t q_nope_stride_b, q_nope_stride_s, q_nope_stride_h;
    int64_t q_rope_stride_b, q_rope_stride_s, q_rope_stride_h;
    int64_t c_kv_stride_b, c_kv_stride_s;  // bytes with kRow656
    int64_t k_rope_stride_b, k_rope_stride_s;
    int64_t w_uk_stride_h, w_uk_stride_r;
    int64_t w_uv_stride_h, w_uv_stride_r;
    int64_t out_stride_b, out_stride_s, out_stride_h;
    int64_t lse_stride_b, lse_stride_h;

    DType dtype;
    DType out_dtype;
    DType latent_dtype;  // dtype or kRow656
    WeightLayout weight_layout;
    int32_t batch;
    int32_t seqlen_q;  // largest counts where lengths are on the device
    int32_t seqlen_k;
    int32_t heads;
    int32_t d_nope;
    int32_t d_rope;
    int32_t d_c;
    int32_t d_v;
    int64_t total_q;
    int64_t total_k;
    float scale;
    int32_t causal;

    const void* cu_seqlens_q;  // [B + 1] each, null = dense
    const void* cu_seqlens_k;
    const void* seqused_q;  // [B] each, null = the whole sequence
    const void* seqused_k;
    const void* block_table;
    int64_t block_table_stride_b;
    int32_t index_is_64;
    int32_t page_size;
    int32_t num_pages;

    int32_t deterministic;
    int32_t sm_count;
    int32_t shared_bytes;  // that a block may have on the device
};

}  // namespace flare::mla
