// The two operations' params as AbsorbedArgs.
#include "absorbed_sm80.h"

namespace flare::mla {
namespace {

constexpr float kLog2e = 1.44269504088896340736f;

int64_t element_bytes(DType dtype) {
    return dtype == DType::kRow656 ? 1 : dtype == DType::kFp32 ? 4 : 2;
}

// What both structs name alike.
template <typename Params>
AbsorbedArgs common_args(const Params& p) {
    AbsorbedArgs a{};
    a.out = p.out;
    a.lse = p.lse;
    a.out_stride_b = p.out_stride_b;
    a.out_stride_s = p.out_stride_s;
    a.out_stride_h = p.out_stride_h;
    a.lse_stride_b = p.lse_stride_b;
    a.lse_stride_h = p.lse_stride_h;
    a.w_uk = p.w_uk;
    a.w_uv = p.w_uv;
    a.w_uk_stride_h = p.w_uk_stride_h;
    a.w_uk_stride_r = p.w_uk_stride_r;
    a.w_uv_stride_h = p.w_uv_stride_h;
    a.w_uv_stride_r = p.w_uv_stride_r;
    a.weight_layout = p.weight_layout;
    a.dtype = p.dtype;
    a.out_dtype = p.out_dtype;
    a.batch = p.batch;
    a.seqlen_q = p.seqlen_q;
    a.seqlen_k = p.seqlen_k;
    a.heads = p.heads;
    a.d_nope = p.d_nope;
    a.d_rope = p.d_rope;
    a.d_c = p.d_c;
    a.d_v = p.d_v;
    a.scale_log2 = p.scale * kLog2e;
    a.causal = p.causal;
    a.index_is_64 = p.index_is_64;
    a.cu_seqlens_q = p.cu_seqlens_q;
    a.block_table = p.block_table;
    a.block_table_stride_b = p.block_table_stride_b;
    a.page_size = p.page_size;
    a.num_pages = p.num_pages;
    a.total_q = p.total_q;
    a.deterministic = p.deterministic;
    a.sm_count = p.sm_count;
    return a;
}

}  // namespace

AbsorbedArgs absorbed_args(const MlaDecodeParams& p) {
    AbsorbedArgs a = common_args(p);
    a.q = p.q;
    a.q_stride_b = p.q_stride_b;
    a.q_stride_s = p.q_stride_s;
    a.q_stride_h = p.q_stride_h;
    const bool apart = p.q_rope != nullptr || p.w_uk != nullptr;
    a.q_rope = apart ? p.q_rope : static_cast<const char*>(p.q) + p.d_c * element_bytes(p.dtype);
    a.q_rope_stride_b = apart ? p.q_rope_stride_b : p.q_stride_b;
    a.q_rope_stride_s = apart ? p.q_rope_stride_s : p.q_stride_s;
    a.q_rope_stride_h = apart ? p.q_rope_stride_h : p.q_stride_h;
    const int64_t bytes = element_bytes(p.kv_dtype);
    a.kv_dtype = p.kv_dtype;
    a.latent = static_cast<const char*>(p.kv);
    a.rope = a.latent + p.d_c * bytes;
    a.latent_stride_b = a.rope_stride_b = p.kv_stride_b * bytes;
    a.latent_stride_s = a.rope_stride_s = p.kv_stride_s * bytes;
    a.seqused_k = p.seqlens_k;
    a.causal = p.causal != 0 && p.seqlen_q > 1;
    a.indices = p.indices;
    a.indices_stride_b = p.indices_stride_b;
    a.indices_stride_s = p.indices_stride_s;
    a.topk_length = p.topk_length;
    a.topk_length_stride_b = p.topk_length_stride_b;
    a.topk_length_stride_s = p.topk_length_stride_s;
    a.topk = p.topk;
    a.sink = p.sink;
    a.num_splits = p.num_splits;
    return a;
}

AbsorbedArgs absorbed_args(const MlaPrefillParams& p) {
    AbsorbedArgs a = common_args(p);
    a.q = p.q_nope;
    a.q_stride_b = p.q_nope_stride_b;
    a.q_stride_s = p.q_nope_stride_s;
    a.q_stride_h = p.q_nope_stride_h;
    a.q_rope = p.q_rope;
    a.q_rope_stride_b = p.q_rope_stride_b;
    a.q_rope_stride_s = p.q_rope_stride_s;
    a.q_rope_stride_h = p.q_rope_stride_h;
    const int64_t bytes = element_bytes(p.latent_dtype);
    a.kv_dtype = p.latent_dtype;
    a.latent = static_cast<const char*>(p.c_kv);
    a.rope = static_cast<const char*>(p.k_rope);
    a.latent_stride_b = p.c_kv_stride_b * bytes;
    a.latent_stride_s = p.c_kv_stride_s * bytes;
    const bool apart = p.latent_dtype != DType::kRow656;
    a.rope_stride_b = apart ? p.k_rope_stride_b * bytes : 0;
    a.rope_stride_s = apart ? p.k_rope_stride_s * bytes : 0;
    a.cu_seqlens_k = p.cu_seqlens_k;
    a.seqused_q = p.seqused_q;
    a.seqused_k = p.seqused_k;
    return a;
}

}  // namespace flare::mla
