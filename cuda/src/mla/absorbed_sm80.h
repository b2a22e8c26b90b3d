// What the portable MLA kernels in absorbed form take: decode, and prefill where few query rows share a key. Keys are
// [latent | rope] rows whose two parts may lie apart; values are the latent parts.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>

#include "params.h"

namespace flare::mla {

struct AbsorbedArgs {
    // [B, Sq, H, d_c] or with w_uk [B, Sq, H, d_nope]; elements of dtype
    const void* q;
    const void* q_rope;  // [B, Sq, H, d_rope]
    int64_t q_stride_b, q_stride_s, q_stride_h;
    int64_t q_rope_stride_b, q_rope_stride_s, q_rope_stride_h;
    const char* latent;  // strides in bytes
    const char* rope;    // unused with kRow656
    int64_t latent_stride_b, latent_stride_s;
    int64_t rope_stride_b, rope_stride_s;
    void* out;
    float* lse;
    int64_t out_stride_b, out_stride_s, out_stride_h;
    int64_t lse_stride_b, lse_stride_h;
    const void* w_uk;  // null = q is absorbed already
    const void* w_uv;  // null = out is the latent output
    int64_t w_uk_stride_h, w_uk_stride_r;
    int64_t w_uv_stride_h, w_uv_stride_r;
    WeightLayout weight_layout;
    DType dtype;
    DType kv_dtype;
    DType out_dtype;
    int32_t batch;
    int32_t seqlen_q;
    int32_t seqlen_k;
    int32_t heads;
    int32_t d_nope;  // with w_uk
    int32_t d_rope;
    int32_t d_c;
    int32_t d_v;  // with w_uv
    float scale_log2;
    int32_t causal;
    int32_t index_is_64;
    const void* cu_seqlens_q;
    const void* cu_seqlens_k;
    const void* seqused_q;
    const void* seqused_k;
    const void* block_table;
    int64_t block_table_stride_b;
    int32_t page_size;
    int32_t num_pages;
    const void* indices;
    int64_t indices_stride_b, indices_stride_s;
    const void* topk_length;
    int64_t topk_length_stride_b, topk_length_stride_s;
    int32_t topk;
    const float* sink;

    // Host only.
    int64_t total_q;  // rows of packed q
    int32_t num_splits;
    int32_t deterministic;
    int32_t sm_count;
};

AbsorbedArgs absorbed_args(const MlaDecodeParams& params);
AbsorbedArgs absorbed_args(const MlaPrefillParams& params);

// FP16 and BF16 on tensor cores: d_c and d_rope multiples of 8 up to 512 and 64, 16-byte strides. Pure.
bool absorbed_mma_takes(const AbsorbedArgs& args);
const char* absorbed_mma_kernel_name(const AbsorbedArgs& args, bool prefill);
size_t absorbed_mma_workspace(const AbsorbedArgs& args);
int32_t launch_absorbed_mma(const AbsorbedArgs& args, void* workspace, size_t bytes, cudaStream_t stream);

// q W_uk^T as fp16, whatever the inputs are, and out = L W_uv with L of dtype; both latents [token][head][d_c].
int32_t launch_absorb(const AbsorbedArgs& args, void* q_latent, cudaStream_t stream);
int32_t launch_unabsorb(const AbsorbedArgs& args, const void* out_latent, cudaStream_t stream);

// Up-projecting prefill where a key serves enough rows of its head. Pure; needs no workspace.
bool up_project_takes(const AbsorbedArgs& args, int shared_bytes);
int32_t launch_up_project(const AbsorbedArgs& args, cudaStream_t stream);

// Everything, one block a query row, fp32 arithmetic; needs no workspace.
int32_t launch_absorbed_plain(const AbsorbedArgs& args, cudaStream_t stream);

}  // namespace flare::mla
