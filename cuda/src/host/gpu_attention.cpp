// Attention on CUDA: validated params -> kernel params -> selection -> launch.
#include "host/gpu_common.h"
#include "attention/forward_sm80.h"
#include "attention/forward_sm90.h"
#include "attention/merge_sm80.h"

namespace flare::gpu {
namespace {

constexpr const char* kForward = "attention_forward";

attention::DType dtype_of(int32_t dtype) {
    switch (dtype) {
        case FLARE_BF16:
            return attention::DType::kBf16;
        case FLARE_FP16:
            return attention::DType::kFp16;
        case FLARE_FP8_E4M3:
            return attention::DType::kFp8E4m3;
        default:
            return attention::DType::kFp32;
    }
}

struct Forward {
    attention::FwdParams params;
    bool sm90;  // the Hopper kernel runs it, else a portable one
};

int32_t translate(const flare_attention_params& p, const DeviceInfo& info, attention::FwdParams* out) {
    if (!fits_int32({p.batch, p.seqlen_q, p.seqlen_k, p.heads_q, p.batch * p.heads_q, p.page_size, p.num_pages})) {
        return fail(FLARE_UNSUPPORTED_SHAPE, "%s: a size is over 2^31, more than the CUDA kernels take", kForward);
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
    f.dtype = dtype_of(p.dtype);
    f.out_dtype = dtype_of(p.out_dtype);
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
    f.index64 = p.index_dtype == FLARE_INT64 ? 1 : 0;
    f.block_table = static_cast<const int32_t*>(p.block_table);
    f.block_table_stride = p.block_table_stride_b;
    f.page_size = static_cast<int32_t>(p.page_size);
    f.num_pages = static_cast<int32_t>(p.num_pages);
    f.num_splits = p.num_splits;
    f.deterministic = p.deterministic;
    f.q_descale = p.q_descale;
    f.k_descale = p.k_descale;
    f.v_descale = p.v_descale;
    f.descale_batch_stride = p.descale_stride_b;
    f.descale_head_stride = p.descale_stride_h;
    f.sm_count = info.sm_count;
    *out = f;
    return FLARE_OK;
}

// Why the Hopper kernel can't run it, and the status that says so; FLARE_OK if it can.
int32_t sm90_refusal(const flare_attention_params& p, const attention::FwdParams& f, const char** reason) {
    const int32_t natural_out = p.dtype == FLARE_FP8_E4M3 ? FLARE_BF16 : p.dtype;
    const bool has_index =
        p.cu_seqlens_q != nullptr || p.cu_seqlens_k != nullptr || p.seqused_q != nullptr || p.seqused_k != nullptr;
    if (p.dtype == FLARE_FP32) {
        *reason = "dtype is FP32; it takes FP16 and BF16";
        return FLARE_UNSUPPORTED_DTYPE;
    }
    if (p.out_dtype != natural_out) {
        *reason = "out_dtype differs from dtype";
        return FLARE_UNSUPPORTED_DTYPE;
    }
    if (has_index && p.index_dtype != FLARE_INT32) {
        *reason = "index_dtype is INT64; it takes INT32";
        return FLARE_UNSUPPORTED_DTYPE;
    }
    if (p.block_table != nullptr) {
        *reason = "K and V are paged";
        return FLARE_UNSUPPORTED_FEATURE;
    }
    if (p.num_splits > 1) {
        *reason = "num_splits > 1";
        return FLARE_UNSUPPORTED_FEATURE;
    }
    *reason = "see docs/kernels/attention.md for the head dims, strides and options that it takes";
    return attention::select_attention_sm90(f);
}

int32_t choose(const flare_attention_params& p, const DeviceInfo& info, Forward* out) {
    if (const int32_t status = translate(p, info, &out->params)) {
        return status;
    }
    if (p.kernel == FLARE_KERNEL_SM90) {
        if (const int32_t status = only_sm90(kForward, p.kernel, info)) {
            return status;
        }
    }
    if (p.kernel != FLARE_KERNEL_PORTABLE && info.runs_sm90a) {
        const char* reason = nullptr;
        const int32_t status = sm90_refusal(p, out->params, &reason);
        if (p.kernel == FLARE_KERNEL_SM90 && status != FLARE_OK) {
            return refused(kForward, status, reason);
        }
        out->sm90 = status == FLARE_OK && (p.kernel == FLARE_KERNEL_SM90 || !attention::sm80_is_faster(out->params));
        if (out->sm90) {
            return FLARE_OK;
        }
    }
    out->sm90 = false;
    if (const int32_t status = attention::select_attention_sm80(out->params)) {
        return fail(status,
                    "%s: seqlen_q, seqlen_k or their number of tiles is more than the portable kernels take (2^28 positions)",
                    kForward);
    }
    return FLARE_OK;
}

template <typename Body>
int32_t chosen(const flare_attention_params& p, Body body) {
    return on_device(p, [&](const DeviceInfo& info) -> int32_t {
        Forward forward{};
        if (const int32_t status = choose(p, info, &forward)) {
            return status;
        }
        return body(forward);
    });
}

}  // namespace

int32_t attention_forward(const flare_attention_params& p) {
    return chosen(p, [&](const Forward& forward) -> int32_t {
        if (const int32_t status = check_alignments({{"q", p.q}, {"k", p.k}, {"v", p.v}, {"out", p.out}})) {
            return status;
        }
        const auto stream = static_cast<cudaStream_t>(p.stream);
        if (forward.sm90) {
            return launched(kForward, attention::launch_attention_sm90(forward.params, stream));
        }
        if (const int32_t status = check_workspace(p.workspace, p.workspace_bytes, attention::sm80_workspace(forward.params))) {
            return status;
        }
        return launched(kForward, attention::launch_attention_sm80(forward.params, p.workspace, stream));
    });
}

int32_t attention_workspace(const flare_attention_params& p, uint64_t* bytes) {
    return chosen(p, [&](const Forward& forward) -> int32_t {
        *bytes = forward.sm90 ? 0 : attention::sm80_workspace(forward.params);
        return FLARE_OK;
    });
}

int32_t attention_kernel_name(const flare_attention_params& p, char* name, uint64_t capacity) {
    return chosen(p, [&](const Forward& forward) -> int32_t {
        return copy_name(forward.sm90 ? attention::attention_sm90_kernel_name(forward.params)
                                      : attention::attention_sm80_kernel_name(forward.params),
                         name, capacity);
    });
}

// --- Merge -------------------------------------------------------------------------------------------------------------------

namespace {

constexpr const char* kMerge = "attention_merge";

int32_t refuse_sm90_merge(const flare_attention_merge_params& p) {
    return p.kernel == FLARE_KERNEL_SM90
               ? fail(FLARE_UNSUPPORTED_KERNEL, "kernel: SM90 asked for, but %s has one kernel for all cards; use kernel = 0",
                      kMerge)
               : FLARE_OK;
}

}  // namespace

int32_t attention_merge(const flare_attention_merge_params& p) {
    return on_device(p, [&](const DeviceInfo&) -> int32_t {
        if (const int32_t status = refuse_sm90_merge(p)) {
            return status;
        }
        attention::MergeParams m{};
        m.partial_out = p.partial_out;
        m.partial_lse = p.partial_lse;
        m.partial_out_stride_p = p.partial_out_stride_p;
        m.partial_lse_stride_p = p.partial_lse_stride_p;
        m.partial_out_stride = {p.partial_out_stride_b, p.partial_out_stride_s, p.partial_out_stride_h};
        m.partial_lse_stride = {p.partial_lse_stride_b, 1, p.partial_lse_stride_h};
        m.dtype = dtype_of(p.dtype);
        m.out = p.out;
        m.lse = p.lse;
        m.out_stride = {p.out_stride_b, p.out_stride_s, p.out_stride_h};
        m.lse_stride = {p.lse_stride_b, 1, p.lse_stride_h};
        m.out_dtype = dtype_of(p.out_dtype);
        m.num_partials = p.num_partials;
        m.batch = p.batch;
        m.seqlen = p.seqlen;
        m.heads = p.heads;
        m.head_dim = p.head_dim;
        return check_cuda(attention::launch_merge_sm80(m, static_cast<cudaStream_t>(p.stream)), kMerge);
    });
}

int32_t attention_merge_kernel_name(const flare_attention_merge_params& p, char* name, uint64_t capacity) {
    return on_device(p, [&](const DeviceInfo&) -> int32_t {
        const int32_t status = refuse_sm90_merge(p);
        return status != FLARE_OK ? status : copy_name("attention_sm80_merge", name, capacity);
    });
}

}  // namespace flare::gpu
