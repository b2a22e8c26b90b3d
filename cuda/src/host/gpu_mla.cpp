// MLA on CUDA: validated params -> kernel params -> selection -> launch.
#include "host/gpu_common.h"
#include "mla/decode_sm90.h"

namespace flare::gpu {
namespace {

int32_t translate(const flare_mla_decode_params& p, const DeviceInfo& info, mla::MlaDecodeParams* out) {
    constexpr const char* kName = "mla_decode";
    if (const int32_t status = only_sm90(kName, p.kernel, info)) {
        return status;
    }
    if (p.dtype == FLARE_FP32 || p.out_dtype != p.dtype || p.kv_dtype != p.dtype) {
        return refused(kName, FLARE_UNSUPPORTED_DTYPE, "it takes FP16 or BF16 for q, kv and out alike");
    }
    if (p.indices != nullptr || p.sink != nullptr || p.cu_seqlens_q != nullptr || p.w_uk != nullptr || p.w_uv != nullptr ||
        p.q_rope != nullptr) {
        return refused(kName, FLARE_UNSUPPORTED_FEATURE,
                       "indices, sink, cu_seqlens_q, w_uk, w_uv and a separate q_rope aren't there yet");
    }
    if (!fits_int32({p.batch, p.seqlen_q, p.seqlen_k, p.heads, p.seqlen_q * p.heads, p.page_size, p.num_pages})) {
        return refused(kName, FLARE_UNSUPPORTED_SHAPE, "a size is over 2^31");
    }
    mla::MlaDecodeParams d{};
    d.q = p.q;
    d.kv = p.kv;
    d.out = p.out;
    d.lse = p.lse;
    d.q_stride_b = p.q_stride_b;
    d.q_stride_s = p.q_stride_s;
    d.q_stride_h = p.q_stride_h;
    d.kv_stride_b = p.kv_stride_b;
    d.kv_stride_s = p.kv_stride_s;
    d.out_stride_b = p.out_stride_b;
    d.out_stride_s = p.out_stride_s;
    d.out_stride_h = p.out_stride_h;
    d.lse_stride_b = p.lse_stride_b;
    d.lse_stride_h = p.lse_stride_h;
    d.dtype = p.dtype == FLARE_BF16 ? mla::DType::kBf16 : mla::DType::kFp16;
    d.batch = static_cast<int32_t>(p.batch);
    d.seqlen_q = static_cast<int32_t>(p.seqlen_q);
    d.seqlen_k = static_cast<int32_t>(p.seqlen_k);
    d.heads = static_cast<int32_t>(p.heads);
    d.d_c = static_cast<int32_t>(p.d_c);
    d.d_rope = static_cast<int32_t>(p.d_rope);
    d.scale = p.scale;
    d.causal = p.mask == FLARE_MASK_CAUSAL ? 1 : 0;
    d.seqlens_k = p.seqlens_k;
    d.block_table = p.block_table;
    d.block_table_stride_b = p.block_table_stride_b;
    d.index_is_64 = p.index_dtype == FLARE_INT64 ? 1 : 0;
    d.page_size = static_cast<int32_t>(p.page_size);
    d.num_pages = static_cast<int32_t>(p.num_pages);
    d.num_splits = p.num_splits;
    d.deterministic = p.deterministic;
    d.sm_count = info.sm_count;
    if (const int32_t status = mla::select_mla_decode_sm90(d)) {
        return refused(kName, status, "see docs/kernels/mla.md for the sizes and strides that it takes");
    }
    *out = d;
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

int32_t mla_decode(const flare_mla_decode_params& p) {
    return translated<mla::MlaDecodeParams>(p, [&](const mla::MlaDecodeParams& d) -> int32_t {
        if (const int32_t status = check_alignments({{"q", p.q}, {"kv", p.kv}, {"out", p.out}})) {
            return status;
        }
        if (p.batch == 0 || p.seqlen_q == 0) {
            return FLARE_OK;
        }
        if (const int32_t status = check_workspace(p.workspace, p.workspace_bytes, mla::mla_decode_sm90_workspace(d))) {
            return status;
        }
        return launched("mla_decode", mla::launch_mla_decode_sm90(d, p.workspace, p.workspace_bytes,
                                                                  static_cast<cudaStream_t>(p.stream)));
    });
}

int32_t mla_decode_workspace(const flare_mla_decode_params& p, uint64_t* bytes) {
    return translated<mla::MlaDecodeParams>(p, [&](const mla::MlaDecodeParams& d) -> int32_t {
        *bytes = p.batch == 0 || p.seqlen_q == 0 ? 0 : mla::mla_decode_sm90_workspace(d);
        return FLARE_OK;
    });
}

int32_t mla_decode_kernel_name(const flare_mla_decode_params& p, char* name, uint64_t capacity) {
    return translated<mla::MlaDecodeParams>(p, [&](const mla::MlaDecodeParams& d) -> int32_t {
        return copy_name(mla::mla_decode_sm90_kernel_name(d), name, capacity);
    });
}

int32_t mla_prefill(const flare_mla_prefill_params& p) { return not_yet(p, "mla_prefill"); }
int32_t mla_prefill_workspace(const flare_mla_prefill_params& p, uint64_t*) { return not_yet(p, "mla_prefill"); }
int32_t mla_prefill_kernel_name(const flare_mla_prefill_params& p, char*, uint64_t) { return not_yet(p, "mla_prefill"); }

}  // namespace flare::gpu
