// Attention on CUDA: validated params -> kernel params -> selection -> launch.
#include "host/gpu_common.h"
#include "attention/forward_sm90.h"

namespace flare::gpu {
namespace {

int32_t translate(const flare_attention_params& p, const DeviceInfo& info, attention::FwdParams* out) {
    constexpr const char* kName = "attention_forward";
    if (const int32_t status = only_sm90(kName, p.kernel, info)) {
        return status;
    }
    if (p.dtype == FLARE_FP32) {
        return refused(kName, FLARE_UNSUPPORTED_DTYPE, "dtype is FP32; it takes FP16 and BF16");
    }
    const int32_t natural_out = p.dtype == FLARE_FP8_E4M3 ? FLARE_BF16 : p.dtype;
    if (p.out_dtype != natural_out) {
        return refused(kName, FLARE_UNSUPPORTED_DTYPE, "out_dtype differs from dtype");
    }
    const bool has_index =
        p.cu_seqlens_q != nullptr || p.cu_seqlens_k != nullptr || p.seqused_q != nullptr || p.seqused_k != nullptr;
    if (has_index && p.index_dtype != FLARE_INT32) {
        return refused(kName, FLARE_UNSUPPORTED_DTYPE, "index_dtype is INT64; it takes INT32");
    }
    if (p.block_table != nullptr) {
        return refused(kName, FLARE_UNSUPPORTED_FEATURE, "K and V are paged");
    }
    if (p.num_splits > 1) {
        return refused(kName, FLARE_UNSUPPORTED_FEATURE, "num_splits > 1");
    }
    if (!fits_int32({p.batch, p.seqlen_q, p.seqlen_k, p.heads_q, p.batch * p.heads_q})) {
        return refused(kName, FLARE_UNSUPPORTED_SHAPE, "a size is over 2^31");
    }
    attention::FwdParams f{};
    f.q = p.q;
    f.k = p.k;
    f.v = p.v;
    f.o = p.out;
    f.lse = p.lse;
    f.q_stride = {p.q_stride_b, p.q_stride_s, p.q_stride_h};
    f.k_stride = {p.k_stride_b, p.k_stride_s, p.k_stride_h};
    f.v_stride = {p.v_stride_b, p.v_stride_s, p.v_stride_h};
    f.o_stride = {p.out_stride_b, p.out_stride_s, p.out_stride_h};
    f.lse_stride = {p.lse_stride_b, 1, p.lse_stride_h};
    f.dtype = p.dtype == FLARE_BF16   ? attention::DType::kBf16
              : p.dtype == FLARE_FP16 ? attention::DType::kFp16
                                      : attention::DType::kFp8E4m3;
    f.batch = static_cast<int32_t>(p.batch);
    f.heads_q = static_cast<int32_t>(p.heads_q);
    f.heads_kv = static_cast<int32_t>(p.heads_kv);
    f.seqlen_q = static_cast<int32_t>(p.seqlen_q);
    f.seqlen_k = static_cast<int32_t>(p.seqlen_k);
    f.head_dim = static_cast<int32_t>(p.head_dim_qk);
    f.head_dim_v = static_cast<int32_t>(p.head_dim_v);
    f.total_q = p.cu_seqlens_q != nullptr ? p.total_q : 0;
    f.total_k = p.cu_seqlens_k != nullptr ? p.total_k : 0;
    f.window_left = static_cast<int32_t>(p.window_left);
    f.window_right = static_cast<int32_t>(p.window_right < INT32_MAX ? p.window_right : -1);
    f.scale = p.scale;
    f.softcap = p.softcap;
    f.alibi_slopes = p.alibi_slopes;
    f.alibi_batch_stride = p.alibi_stride_b;
    f.sink = p.sink;
    f.cu_seqlens_q = static_cast<const int32_t*>(p.cu_seqlens_q);
    f.cu_seqlens_k = static_cast<const int32_t*>(p.cu_seqlens_k);
    f.seqused_q = static_cast<const int32_t*>(p.seqused_q);
    f.seqused_k = static_cast<const int32_t*>(p.seqused_k);
    f.q_descale = p.q_descale;
    f.k_descale = p.k_descale;
    f.v_descale = p.v_descale;
    f.descale_batch_stride = p.descale_stride_b;
    f.descale_head_stride = p.descale_stride_h;
    f.sm_count = info.sm_count;
    if (const int32_t status = attention::select_attention_sm90(f)) {
        return refused(kName, status, "see docs/kernels/attention.md for the head dims, strides and options that it takes");
    }
    *out = f;
    return FLARE_OK;
}

// Enters the device, translates, and hands the kernel's params to `body`.
template <typename KernelParams, typename Params, typename Body>
int32_t translated(const Params& p, Body body) {
    return on_device(p, [&](const DeviceInfo& info) -> int32_t {
        KernelParams kernel_params;
        if (const int32_t status = translate(p, info, &kernel_params)) {
            return status;
        }
        return body(kernel_params);
    });
}

}  // namespace

int32_t attention_forward(const flare_attention_params& p) {
    return translated<attention::FwdParams>(p, [&](const attention::FwdParams& f) -> int32_t {
        if (const int32_t status = check_alignments({{"q", p.q}, {"k", p.k}, {"v", p.v}, {"out", p.out}})) {
            return status;
        }
        return launched("attention_forward", attention::launch_attention_sm90(f, static_cast<cudaStream_t>(p.stream)));
    });
}

int32_t attention_workspace(const flare_attention_params& p, uint64_t* bytes) {
    return translated<attention::FwdParams>(p, [&](const attention::FwdParams&) -> int32_t {
        *bytes = 0;
        return FLARE_OK;
    });
}

int32_t attention_kernel_name(const flare_attention_params& p, char* name, uint64_t capacity) {
    return translated<attention::FwdParams>(p, [&](const attention::FwdParams& f) -> int32_t {
        return copy_name(attention::attention_sm90_kernel_name(f), name, capacity);
    });
}

int32_t attention_merge(const flare_attention_merge_params& p) { return not_yet(p, "attention_merge"); }
int32_t attention_merge_kernel_name(const flare_attention_merge_params& p, char*, uint64_t) {
    return not_yet(p, "attention_merge");
}

}  // namespace flare::gpu
