// MLA on CUDA: validated params -> kernel params -> selection -> launch. Automatic selection takes the Hopper kernel where it
// can run the params; the portable kernels run everything.
#include "host/gpu_common.h"
#include "mla/decode_rows_sm90.h"
#include "mla/decode_sm80.h"
#include "mla/decode_sm90.h"
#include "mla/prefill_sm80.h"
#include "mla/prefill_sm90.h"

namespace flare::gpu {
namespace {

mla::DType mla_dtype(int32_t dtype) {
    switch (dtype) {
        case FLARE_FP32:
            return mla::DType::kFp32;
        case FLARE_FP16:
            return mla::DType::kFp16;
        case FLARE_UINT8:
            return mla::DType::kRow656;
        default:
            return mla::DType::kBf16;
    }
}

int32_t too_large(const char* operation) {
    return fail(FLARE_UNSUPPORTED_SHAPE, "%s: batch * seqlen_q * heads, seqlen_k or num_pages * page_size is over 2^31", operation);
}

// Products of sizes that may be large themselves.
bool rows_fit(int64_t a, int64_t b, int64_t c) {
    return fits_int32({a, b, c}) && fits_int32({a * b}) && fits_int32({a * b * c});
}

int32_t translate(const flare_mla_decode_params& p, const DeviceInfo& info, mla::MlaDecodeParams* out) {
    const bool pool = p.block_table != nullptr || p.indices != nullptr;
    if (!rows_fit(p.batch, p.seqlen_q, p.heads) || !fits_int32({p.seqlen_k, p.topk}) ||
        (pool && !rows_fit(p.num_pages, p.page_size, 1))) {
        return too_large("mla_decode");
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
    d.dtype = mla_dtype(p.dtype);
    d.batch = static_cast<int32_t>(p.batch);
    d.seqlen_q = static_cast<int32_t>(p.seqlen_q);
    d.seqlen_k = static_cast<int32_t>(p.seqlen_k);
    d.heads = static_cast<int32_t>(p.heads);
    d.d_c = static_cast<int32_t>(p.d_c);
    d.d_rope = static_cast<int32_t>(p.d_rope);
    d.scale = p.scale;
    d.causal = p.mask == FLARE_MASK_CAUSAL ? 1 : 0;
    d.index_is_64 = p.index_dtype == FLARE_INT64 ? 1 : 0;
    d.page_size = pool ? static_cast<int32_t>(p.page_size) : 0;
    d.num_pages = pool ? static_cast<int32_t>(p.num_pages) : 0;
    d.num_splits = p.num_splits;
    d.deterministic = p.deterministic;
    d.sm_count = info.sm_count;
    d.out_dtype = mla_dtype(p.out_dtype);
    d.kv_dtype = mla_dtype(p.kv_dtype);
    d.q_rope = p.d_rope > 0 ? p.q_rope : nullptr;
    d.q_rope_stride_b = p.q_rope_stride_b;
    d.q_rope_stride_s = p.q_rope_stride_s;
    d.q_rope_stride_h = p.q_rope_stride_h;
    d.w_uk = p.w_uk;
    d.w_uv = p.w_uv;
    d.w_uk_stride_h = p.w_uk_stride_h;
    d.w_uk_stride_r = p.w_uk_stride_r;
    d.w_uv_stride_h = p.w_uv_stride_h;
    d.w_uv_stride_r = p.w_uv_stride_r;
    d.weight_layout = p.weight_layout == FLARE_WEIGHT_DC ? mla::WeightLayout::kDC : mla::WeightLayout::kCD;
    d.d_nope = static_cast<int32_t>(p.d_nope);
    d.d_v = static_cast<int32_t>(p.d_v);
    d.cu_seqlens_q = p.cu_seqlens_q;
    d.total_q = p.total_q;
    d.indices = p.indices;
    d.sink = p.sink;
    if (p.indices != nullptr) {
        d.causal = 0;
        d.indices_stride_b = p.indices_stride_b;
        d.indices_stride_s = p.indices_stride_s;
        d.topk_length = p.topk_length;
        d.topk_length_stride_b = p.topk_length_stride_b;
        d.topk_length_stride_s = p.topk_length_stride_s;
        d.topk = static_cast<int32_t>(p.topk);
    } else {
        d.seqlens_k = p.seqlens_k;
        d.block_table = p.block_table;
        d.block_table_stride_b = p.block_table_stride_b;
    }
    *out = d;
    return FLARE_OK;
}

int32_t translate(const flare_mla_prefill_params& p, const DeviceInfo& info, mla::MlaPrefillParams* out) {
    const bool paged = p.block_table != nullptr;
    if (!rows_fit(p.batch, p.seqlen_q, p.heads) || !fits_int32({p.seqlen_k}) || (paged && !rows_fit(p.num_pages, p.page_size, 1))) {
        return too_large("mla_prefill");
    }
    mla::MlaPrefillParams d{};
    d.q_nope = p.q_nope;
    d.q_rope = p.d_rope > 0 ? p.q_rope : nullptr;
    d.c_kv = p.c_kv;
    d.k_rope = p.d_rope > 0 ? p.k_rope : nullptr;
    d.w_uk = p.w_uk;
    d.w_uv = p.w_uv;
    d.out = p.out;
    d.lse = p.lse;
    d.q_nope_stride_b = p.q_nope_stride_b;
    d.q_nope_stride_s = p.q_nope_stride_s;
    d.q_nope_stride_h = p.q_nope_stride_h;
    d.q_rope_stride_b = p.q_rope_stride_b;
    d.q_rope_stride_s = p.q_rope_stride_s;
    d.q_rope_stride_h = p.q_rope_stride_h;
    d.c_kv_stride_b = p.c_kv_stride_b;
    d.c_kv_stride_s = p.c_kv_stride_s;
    d.k_rope_stride_b = p.k_rope_stride_b;
    d.k_rope_stride_s = p.k_rope_stride_s;
    d.w_uk_stride_h = p.w_uk_stride_h;
    d.w_uk_stride_r = p.w_uk_stride_r;
    d.w_uv_stride_h = p.w_uv_stride_h;
    d.w_uv_stride_r = p.w_uv_stride_r;
    d.out_stride_b = p.out_stride_b;
    d.out_stride_s = p.out_stride_s;
    d.out_stride_h = p.out_stride_h;
    d.lse_stride_b = p.lse_stride_b;
    d.lse_stride_h = p.lse_stride_h;
    d.dtype = mla_dtype(p.dtype);
    d.out_dtype = mla_dtype(p.out_dtype);
    d.latent_dtype = mla_dtype(p.latent_dtype);
    d.weight_layout = p.weight_layout == FLARE_WEIGHT_DC ? mla::WeightLayout::kDC : mla::WeightLayout::kCD;
    d.batch = static_cast<int32_t>(p.batch);
    d.seqlen_q = static_cast<int32_t>(p.seqlen_q);
    d.seqlen_k = static_cast<int32_t>(p.seqlen_k);
    d.heads = static_cast<int32_t>(p.heads);
    d.d_nope = static_cast<int32_t>(p.d_nope);
    d.d_rope = static_cast<int32_t>(p.d_rope);
    d.d_c = static_cast<int32_t>(p.d_c);
    d.d_v = static_cast<int32_t>(p.d_v);
    d.total_q = p.total_q;
    d.total_k = p.total_k;
    d.scale = p.scale;
    d.causal = p.mask == FLARE_MASK_CAUSAL ? 1 : 0;
    d.cu_seqlens_q = p.cu_seqlens_q;
    d.cu_seqlens_k = p.cu_seqlens_k;
    d.seqused_q = p.seqused_q;
    d.seqused_k = p.seqused_k;
    d.block_table = p.block_table;
    d.block_table_stride_b = p.block_table_stride_b;
    d.index_is_64 = p.index_dtype == FLARE_INT64 ? 1 : 0;
    d.page_size = paged ? static_cast<int32_t>(p.page_size) : 0;
    d.num_pages = paged ? static_cast<int32_t>(p.num_pages) : 0;
    d.deterministic = p.deterministic;
    d.sm_count = info.sm_count;
    d.shared_bytes = info.shared_bytes;
    *out = d;
    return FLARE_OK;
}

// The kernels of one path.
template <typename KernelParams>
struct Path {
    const char* (*name)(const KernelParams&);
    size_t (*workspace)(const KernelParams&);
    int32_t (*launch)(const KernelParams&, void*, size_t, cudaStream_t);
};

constexpr Path<mla::MlaDecodeParams> kDecodeSm80{mla::mla_decode_sm80_kernel_name, mla::mla_decode_sm80_workspace,
                                                 mla::launch_mla_decode_sm80};
constexpr Path<mla::MlaDecodeParams> kDecodeSm90{mla::mla_decode_sm90_kernel_name, mla::mla_decode_sm90_workspace,
                                                 mla::launch_mla_decode_sm90};
constexpr Path<mla::MlaDecodeParams> kDecodeRowsSm90{mla::mla_decode_rows_sm90_kernel_name,
                                                     mla::mla_decode_rows_sm90_workspace, mla::launch_mla_decode_rows_sm90};
constexpr Path<mla::MlaPrefillParams> kPrefillSm80{mla::mla_prefill_sm80_kernel_name, mla::mla_prefill_sm80_workspace,
                                                   mla::launch_mla_prefill_sm80};
constexpr Path<mla::MlaPrefillParams> kPrefillSm90{mla::mla_prefill_sm90_kernel_name, mla::mla_prefill_sm90_workspace,
                                                   mla::launch_mla_prefill_sm90};

template <typename KernelParams>
int32_t select(const char* operation, int32_t kernel, int32_t (*takes)(const KernelParams&), const KernelParams& d,
               const DeviceInfo& info, const Path<KernelParams>& sm80, const Path<KernelParams>& sm90, Path<KernelParams>* path) {
    *path = sm80;
    if (kernel == FLARE_KERNEL_PORTABLE || (kernel == FLARE_KERNEL_AUTO && !info.runs_sm90a)) {
        return FLARE_OK;
    }
    if (const int32_t status = only_sm90(operation, kernel, info)) {
        return status;
    }
    if (takes(d) == FLARE_OK) {
        *path = sm90;
        return FLARE_OK;
    }
    return kernel == FLARE_KERNEL_AUTO
               ? FLARE_OK
               : refused(operation, FLARE_UNSUPPORTED_KERNEL, "see docs/kernels/mla.md for the options, sizes and strides that it takes");
}

int32_t select(int32_t kernel, const mla::MlaDecodeParams& d, const DeviceInfo& info, Path<mla::MlaDecodeParams>* path) {
    const bool rows = mla::select_mla_decode_rows_sm90(d) == FLARE_OK;
    return select("mla_decode", kernel, rows ? mla::select_mla_decode_rows_sm90 : mla::select_mla_decode_sm90, d, info,
                  kDecodeSm80, rows ? kDecodeRowsSm90 : kDecodeSm90, path);
}

int32_t select(int32_t kernel, const mla::MlaPrefillParams& d, const DeviceInfo& info, Path<mla::MlaPrefillParams>* path) {
    return select("mla_prefill", kernel, mla::select_mla_prefill_sm90, d, info, kPrefillSm80, kPrefillSm90, path);
}

// Enters the device, translates, selects, and hands both to `body`.
template <typename KernelParams, typename Params, typename Body>
int32_t selected(const Params& p, Body body) {
    return on_device(p, [&](const DeviceInfo& info) -> int32_t {
        KernelParams kernel_params;
        if (const int32_t status = translate(p, info, &kernel_params)) {
            return status;
        }
        Path<KernelParams> path;
        if (const int32_t status = select(p.kernel, kernel_params, info, &path)) {
            return status;
        }
        return body(kernel_params, path);
    });
}

template <typename KernelParams, typename Params>
int32_t run(const char* operation, const Params& p, std::initializer_list<Named> tensors) {
    return selected<KernelParams>(p, [&](const KernelParams& d, const Path<KernelParams>& path) -> int32_t {
        if (const int32_t status = check_alignments(tensors)) {
            return status;
        }
        if (p.batch == 0 || p.seqlen_q == 0) {
            return FLARE_OK;
        }
        if (const int32_t status = check_workspace(p.workspace, p.workspace_bytes, path.workspace(d))) {
            return status;
        }
        return launched(operation, path.launch(d, p.workspace, p.workspace_bytes, static_cast<cudaStream_t>(p.stream)));
    });
}

template <typename KernelParams, typename Params>
int32_t workspace(const Params& p, uint64_t* bytes) {
    return selected<KernelParams>(p, [&](const KernelParams& d, const Path<KernelParams>& path) -> int32_t {
        *bytes = p.batch == 0 || p.seqlen_q == 0 ? 0 : path.workspace(d);
        return FLARE_OK;
    });
}

template <typename KernelParams, typename Params>
int32_t kernel_name(const Params& p, char* name, uint64_t capacity) {
    return selected<KernelParams>(p, [&](const KernelParams& d, const Path<KernelParams>& path) -> int32_t {
        return copy_name(path.name(d), name, capacity);
    });
}

}  // namespace

int32_t mla_decode(const flare_mla_decode_params& p) {
    return run<mla::MlaDecodeParams>("mla_decode", p,
                                     {{"q", p.q}, {"q_rope", p.q_rope}, {"kv", p.kv}, {"w_uk", p.w_uk}, {"w_uv", p.w_uv}, {"out", p.out}});
}

int32_t mla_decode_workspace(const flare_mla_decode_params& p, uint64_t* bytes) { return workspace<mla::MlaDecodeParams>(p, bytes); }

int32_t mla_decode_kernel_name(const flare_mla_decode_params& p, char* name, uint64_t capacity) {
    return kernel_name<mla::MlaDecodeParams>(p, name, capacity);
}

int32_t mla_prefill(const flare_mla_prefill_params& p) {
    return run<mla::MlaPrefillParams>("mla_prefill", p,
                                      {{"q_nope", p.q_nope},
                                       {"q_rope", p.q_rope},
                                       {"c_kv", p.c_kv},
                                       {"k_rope", p.k_rope},
                                       {"w_uk", p.w_uk},
                                       {"w_uv", p.w_uv},
                                       {"out", p.out}});
}

int32_t mla_prefill_workspace(const flare_mla_prefill_params& p, uint64_t* bytes) { return workspace<mla::MlaPrefillParams>(p, bytes); }

int32_t mla_prefill_kernel_name(const flare_mla_prefill_params& p, char* name, uint64_t capacity) {
    return kernel_name<mla::MlaPrefillParams>(p, name, capacity);
}

}  // namespace flare::gpu
