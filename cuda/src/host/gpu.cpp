// The CUDA backend: validated params -> kernel params -> selection -> launch.
#include "api/gpu.h"

#include <cstdio>
#include <initializer_list>
#include <utility>

#include "api/status.h"
#include "attention/forward_sm90.h"
#include "host/device.h"
#include "kda/params.h"
#include "mla/decode_sm90.h"

namespace flare::gpu {
namespace {

// All kernels load 16 bytes at a time.
int32_t check_alignment(const char* name, const void* data) {
    if (reinterpret_cast<uintptr_t>(data) % 16 != 0) {
        return fail(FLARE_ERROR_ALIGNMENT, "%s: address %p isn't a multiple of 16, which CUDA kernels need", name, data);
    }
    return FLARE_OK;
}

template <typename Names>
int32_t check_alignments(const Names& tensors) {
    for (const auto& [name, data] : tensors) {
        if (const int32_t status = check_alignment(name, data)) {
            return status;
        }
    }
    return FLARE_OK;
}

using Named = std::pair<const char*, const void*>;

int32_t no_kernel(const char* operation) {
    return fail(FLARE_UNSUPPORTED_FEATURE, "%s: there is no CUDA kernel for it yet; use device = -1 (CPU)", operation);
}

// What the Hopper kernels can't do has no other CUDA kernel yet.
int32_t only_sm90(const char* operation, int32_t kernel, const DeviceInfo& info) {
    if (kernel == FLARE_KERNEL_PORTABLE) {
        return fail(FLARE_UNSUPPORTED_KERNEL, "kernel: PORTABLE asked for, but %s has only an sm_90a kernel", operation);
    }
    if (!info.runs_sm90a) {
        return fail(FLARE_UNSUPPORTED_ARCH, "%s has only an sm_90a kernel; device %d has compute capability %d.%d%s", operation,
                    info.ordinal, info.compute_major, info.compute_minor,
                    info.compute_major == 9 && info.compute_minor == 0 ? ", but runs compiled PTX (CUDA_FORCE_PTX_JIT?)" : "");
    }
    return FLARE_OK;
}

bool fits_int32(std::initializer_list<int64_t> sizes) {
    for (const int64_t size : sizes) {
        if (size > INT32_MAX) {
            return false;
        }
    }
    return true;
}

int32_t refused(const char* operation, int32_t status, const char* reason) {
    return fail(status, "%s: the sm_90a kernel can't run this: %s", operation, reason);
}

int32_t copy_name(const char* from, char* name, uint64_t capacity) {
    std::snprintf(name, capacity, "%s", from);
    return FLARE_OK;
}

// --- Attention ---------------------------------------------------------------------------------------------------------------

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
    const bool has_index = p.cu_seqlens_q != nullptr || p.cu_seqlens_k != nullptr || p.seqused_q != nullptr || p.seqused_k != nullptr;
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

// --- MLA decode ----------------------------------------------------------------------------------------------------------------

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
        return refused(kName, FLARE_UNSUPPORTED_FEATURE, "indices, sink, cu_seqlens_q, w_uk, w_uv and a separate q_rope aren't there yet");
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

// --- KDA -------------------------------------------------------------------------------------------------------------------------

kda::DType kda_dtype(int32_t dtype) {
    return dtype == FLARE_FP32 ? kda::DType::kFp32 : dtype == FLARE_FP16 ? kda::DType::kFp16 : kda::DType::kBf16;
}

// What forward and decode share.
template <typename Params>
kda::KdaParams translate_tokens(const Params& p) {
    kda::KdaParams k{};
    k.q = p.q;
    k.k = p.k;
    k.v = p.v;
    k.g = p.g;
    k.beta = p.beta;
    k.a_log = p.a_log;
    k.dt_bias = p.dt_bias;
    k.out = p.out;
    k.q_stride = {p.q_stride_b, p.q_stride_t, p.q_stride_h};
    k.k_stride = {p.k_stride_b, p.k_stride_t, p.k_stride_h};
    k.v_stride = {p.v_stride_b, p.v_stride_t, p.v_stride_h};
    k.g_stride = {p.g_stride_b, p.g_stride_t, p.g_stride_h};
    k.beta_stride = {p.beta_stride_b, p.beta_stride_t, p.beta_stride_h};
    k.out_stride = {p.out_stride_b, p.out_stride_t, p.out_stride_h};
    k.dtype = kda_dtype(p.dtype);
    k.gate_dtype = kda_dtype(p.gate_dtype);
    k.beta_dtype = kda_dtype(p.beta_dtype);
    k.gate = static_cast<kda::Gate>(p.gate);
    k.beta_activation = static_cast<kda::BetaActivation>(p.beta_activation);
    k.qk_l2norm = p.qk_l2norm;
    k.lower_bound = p.lower_bound;
    k.scale = p.scale;
    k.num_sequences = p.num_sequences;
    k.seqlen = p.seqlen;
    k.heads_qk = p.heads_qk;
    k.heads_v = p.heads_v;
    k.head_dim_k = static_cast<int32_t>(p.head_dim_k);
    k.head_dim_v = static_cast<int32_t>(p.head_dim_v);
    k.cu_seqlens = p.cu_seqlens;
    k.index64 = p.index_dtype == FLARE_INT64 ? 1 : 0;
    k.state_layout = p.state_layout == FLARE_STATE_VK ? kda::StateLayout::kVK : kda::StateLayout::kKV;
    return k;
}

int32_t translate(const flare_kda_forward_params& p, const DeviceInfo& info, kda::KdaParams* out) {
    constexpr const char* kName = "kda_forward";
    if (const int32_t status = only_sm90(kName, p.kernel, info)) {
        return status;
    }
    if (p.beta_per_channel != 0) {
        return refused(kName, FLARE_UNSUPPORTED_FEATURE, "beta_per_channel");
    }
    kda::KdaParams k = translate_tokens(p);
    k.initial_state = p.initial_state;
    k.final_state = p.final_state;
    k.initial_stride_n = p.initial_state_stride_n;
    k.initial_stride_h = p.initial_state_stride_h;
    k.final_stride_n = p.final_state_stride_n;
    k.final_stride_h = p.final_state_stride_h;
    k.initial_dtype = kda_dtype(p.initial_state_dtype);
    k.final_dtype = kda_dtype(p.final_state_dtype);
    k.state_slots = p.state_slots;
    k.padding_slot = p.padding_slot;
    k.checkpoints = p.checkpoints;
    k.cu_checkpoints = p.cu_checkpoints;
    k.checkpoint_interval = p.checkpoints != nullptr ? p.checkpoint_interval : 0;
    k.checkpoint_dtype = kda_dtype(p.checkpoint_dtype);
    if (const char* reason = kda::kda_forward_sm90_refusal(k)) {
        return refused(kName, FLARE_UNSUPPORTED_SHAPE, reason);
    }
    *out = k;
    return FLARE_OK;
}

int32_t translate(const flare_kda_decode_params& p, const DeviceInfo&, kda::KdaParams* out) {
    if (p.kernel == FLARE_KERNEL_SM90) {
        return fail(FLARE_UNSUPPORTED_KERNEL, "kernel: SM90 asked for, but kda_decode has one kernel for all cards; use kernel = 0");
    }
    if (p.beta_per_channel != 0) {
        return fail(FLARE_UNSUPPORTED_FEATURE, "kda_decode: there is no CUDA kernel for beta_per_channel yet");
    }
    kda::KdaParams k = translate_tokens(p);
    k.initial_state = p.state;
    k.final_state = p.state_out != nullptr ? p.state_out : p.state;
    k.initial_stride_n = k.final_stride_n = p.state_stride_n;
    k.initial_stride_h = k.final_stride_h = p.state_stride_h;
    k.initial_dtype = k.final_dtype = kda_dtype(p.state_dtype);
    k.state_slots = p.slots;
    k.padding_slot = p.padding_slot;
    k.slots_stride_n = p.slots_stride_n;
    k.slots_per_sequence = p.slots_per_sequence;
    k.num_accepted = p.num_accepted;
    if (const char* reason = kda::kda_decode_refusal(k)) {
        return fail(FLARE_UNSUPPORTED_SHAPE, "kda_decode: the CUDA kernel can't run this: %s", reason);
    }
    *out = k;
    return FLARE_OK;
}

// Enters the device, translates, and hands both to `body`.
template <typename KernelParams, typename Params, typename Body>
int32_t on_device(const Params& p, Body body) {
    const DeviceScope scope(p.device);
    if (scope.status() != FLARE_OK) {
        return scope.status();
    }
    KernelParams kernel_params;
    if (const int32_t status = translate(p, scope.info(), &kernel_params)) {
        return status;
    }
    return body(kernel_params);
}

int32_t launched(const char* operation, int32_t status) {
    if (status == FLARE_OK) {
        return FLARE_OK;
    }
    const cudaError_t error = cudaPeekAtLastError();
    if (error != cudaSuccess) {
        return check_cuda(error, operation);
    }
    return fail(status, "%s: the launch failed: %s", operation, flare_status_string(status));
}

}  // namespace

int32_t attention_forward(const flare_attention_params& p) {
    return on_device<attention::FwdParams>(p, [&](const attention::FwdParams& f) -> int32_t {
        const Named tensors[] = {{"q", p.q}, {"k", p.k}, {"v", p.v}, {"out", p.out}};
        if (const int32_t status = check_alignments(tensors)) {
            return status;
        }
        return launched("attention_forward", attention::launch_attention_sm90(f, static_cast<cudaStream_t>(p.stream)));
    });
}

int32_t attention_workspace(const flare_attention_params& p, uint64_t* bytes) {
    return on_device<attention::FwdParams>(p, [&](const attention::FwdParams&) -> int32_t {
        *bytes = 0;
        return FLARE_OK;
    });
}

int32_t attention_kernel_name(const flare_attention_params& p, char* name, uint64_t capacity) {
    return on_device<attention::FwdParams>(p, [&](const attention::FwdParams& f) -> int32_t {
        return copy_name(attention::attention_sm90_kernel_name(f), name, capacity);
    });
}

int32_t mla_decode(const flare_mla_decode_params& p) {
    return on_device<mla::MlaDecodeParams>(p, [&](const mla::MlaDecodeParams& d) -> int32_t {
        const Named tensors[] = {{"q", p.q}, {"kv", p.kv}, {"out", p.out}};
        if (const int32_t status = check_alignments(tensors)) {
            return status;
        }
        if (p.batch == 0 || p.seqlen_q == 0) {
            return FLARE_OK;
        }
        return launched("mla_decode", mla::launch_mla_decode_sm90(d, p.workspace, p.workspace_bytes, static_cast<cudaStream_t>(p.stream)));
    });
}

int32_t mla_decode_workspace(const flare_mla_decode_params& p, uint64_t* bytes) {
    return on_device<mla::MlaDecodeParams>(p, [&](const mla::MlaDecodeParams& d) -> int32_t {
        *bytes = p.batch == 0 || p.seqlen_q == 0 ? 0 : mla::mla_decode_sm90_workspace(d);
        return FLARE_OK;
    });
}

int32_t mla_decode_kernel_name(const flare_mla_decode_params& p, char* name, uint64_t capacity) {
    return on_device<mla::MlaDecodeParams>(p, [&](const mla::MlaDecodeParams& d) -> int32_t {
        return copy_name(mla::mla_decode_sm90_kernel_name(d), name, capacity);
    });
}

int32_t kda_forward(const flare_kda_forward_params& p) {
    return on_device<kda::KdaParams>(p, [&](const kda::KdaParams& k) -> int32_t {
        const Named tensors[] = {{"q", p.q}, {"k", p.k}, {"v", p.v},
                                 {"g", p.g}, {"out", p.out}, {"initial_state", p.initial_state},
                                 {"final_state", p.final_state}};
        if (const int32_t status = check_alignments(tensors)) {
            return status;
        }
        return check_cuda(static_cast<cudaError_t>(kda::launch_kda_forward_sm90(k, p.workspace, p.workspace_bytes,
                                                                                static_cast<cudaStream_t>(p.stream))),
                          "kda_forward");
    });
}

int32_t kda_forward_workspace(const flare_kda_forward_params& p, uint64_t* bytes) {
    return on_device<kda::KdaParams>(p, [&](const kda::KdaParams& k) -> int32_t {
        *bytes = kda::kda_forward_sm90_workspace(k);
        return FLARE_OK;
    });
}

int32_t kda_forward_kernel_name(const flare_kda_forward_params& p, char* name, uint64_t capacity) {
    return on_device<kda::KdaParams>(
        p, [&](const kda::KdaParams& k) -> int32_t { return copy_name(kda::kda_forward_sm90_name(k), name, capacity); });
}

int32_t kda_decode(const flare_kda_decode_params& p) {
    return on_device<kda::KdaParams>(p, [&](const kda::KdaParams& k) -> int32_t {
        const Named tensors[] = {{"q", p.q}, {"k", p.k}, {"v", p.v}, {"g", p.g}, {"out", p.out}, {"state", p.state}};
        if (const int32_t status = check_alignments(tensors)) {
            return status;
        }
        return check_cuda(static_cast<cudaError_t>(kda::launch_kda_decode(k, static_cast<cudaStream_t>(p.stream))), "kda_decode");
    });
}

int32_t kda_decode_workspace(const flare_kda_decode_params& p, uint64_t* bytes) {
    return on_device<kda::KdaParams>(p, [&](const kda::KdaParams&) -> int32_t {
        *bytes = 0;
        return FLARE_OK;
    });
}

int32_t kda_decode_kernel_name(const flare_kda_decode_params& p, char* name, uint64_t capacity) {
    return on_device<kda::KdaParams>(
        p, [&](const kda::KdaParams& k) -> int32_t { return copy_name(kda::kda_decode_name(k), name, capacity); });
}

// --- Operations without a CUDA kernel: a device that isn't there is still the first thing to say ------------------------------

namespace {

template <typename Params>
int32_t not_yet(const Params& p, const char* operation) {
    const DeviceScope scope(p.device);
    return scope.status() != FLARE_OK ? scope.status() : no_kernel(operation);
}

}  // namespace

int32_t attention_merge(const flare_attention_merge_params& p) { return not_yet(p, "attention_merge"); }
int32_t attention_merge_kernel_name(const flare_attention_merge_params& p, char*, uint64_t) { return not_yet(p, "attention_merge"); }
int32_t mla_prefill(const flare_mla_prefill_params& p) { return not_yet(p, "mla_prefill"); }
int32_t mla_prefill_workspace(const flare_mla_prefill_params& p, uint64_t*) { return not_yet(p, "mla_prefill"); }
int32_t mla_prefill_kernel_name(const flare_mla_prefill_params& p, char*, uint64_t) { return not_yet(p, "mla_prefill"); }
int32_t cast(const flare_cast_params& p) { return not_yet(p, "cast"); }
int32_t cast_kernel_name(const flare_cast_params& p, char*, uint64_t) { return not_yet(p, "cast"); }
int32_t fill(const flare_fill_params& p) { return not_yet(p, "fill"); }
int32_t fill_kernel_name(const flare_fill_params& p, char*, uint64_t) { return not_yet(p, "fill"); }
int32_t cache_append(const flare_cache_append_params& p) { return not_yet(p, "cache_append"); }
int32_t cache_append_kernel_name(const flare_cache_append_params& p, char*, uint64_t) { return not_yet(p, "cache_append"); }

const char* build_text() {
    static const char* const text = [] {
        static char line[64];
        std::snprintf(line, sizeof(line), "CUDA %d.%d (sm_90a, compute_80)", CUDART_VERSION / 1000, CUDART_VERSION % 1000 / 10);
        return line;
    }();
    return text;
}

}  // namespace flare::gpu
