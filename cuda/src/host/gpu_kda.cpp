// KDA on CUDA: validated params -> kernel params -> selection -> launch.
#include "host/gpu_common.h"
#include "kda/params.h"

namespace flare::gpu {
namespace {

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
        return fail(FLARE_UNSUPPORTED_KERNEL,
                    "kernel: SM90 asked for, but kda_decode has one kernel for all cards; use kernel = 0");
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

int32_t kda_forward(const flare_kda_forward_params& p) {
    return translated<kda::KdaParams>(p, [&](const kda::KdaParams& k) -> int32_t {
        if (const int32_t status = check_alignments({{"q", p.q}, {"k", p.k}, {"v", p.v}, {"g", p.g}, {"out", p.out},
                                                        {"initial_state", p.initial_state}, {"final_state", p.final_state}})) {
            return status;
        }
        if (const int32_t status = check_workspace(p.workspace, p.workspace_bytes, kda::kda_forward_sm90_workspace(k))) {
            return status;
        }
        return check_cuda(static_cast<cudaError_t>(kda::launch_kda_forward_sm90(k, p.workspace, p.workspace_bytes,
                                                                                static_cast<cudaStream_t>(p.stream))),
                          "kda_forward");
    });
}

int32_t kda_forward_workspace(const flare_kda_forward_params& p, uint64_t* bytes) {
    return translated<kda::KdaParams>(p, [&](const kda::KdaParams& k) -> int32_t {
        *bytes = kda::kda_forward_sm90_workspace(k);
        return FLARE_OK;
    });
}

int32_t kda_forward_kernel_name(const flare_kda_forward_params& p, char* name, uint64_t capacity) {
    return translated<kda::KdaParams>(
        p, [&](const kda::KdaParams& k) -> int32_t { return copy_name(kda::kda_forward_sm90_name(k), name, capacity); });
}

int32_t kda_decode(const flare_kda_decode_params& p) {
    return translated<kda::KdaParams>(p, [&](const kda::KdaParams& k) -> int32_t {
        if (const int32_t status = check_alignments(
                {{"q", p.q}, {"k", p.k}, {"v", p.v}, {"g", p.g}, {"out", p.out}, {"state", p.state}})) {
            return status;
        }
        return check_cuda(static_cast<cudaError_t>(kda::launch_kda_decode(k, static_cast<cudaStream_t>(p.stream))),
                          "kda_decode");
    });
}

int32_t kda_decode_workspace(const flare_kda_decode_params& p, uint64_t* bytes) {
    return translated<kda::KdaParams>(p, [&](const kda::KdaParams&) -> int32_t {
        *bytes = 0;
        return FLARE_OK;
    });
}

int32_t kda_decode_kernel_name(const flare_kda_decode_params& p, char* name, uint64_t capacity) {
    return translated<kda::KdaParams>(
        p, [&](const kda::KdaParams& k) -> int32_t { return copy_name(kda::kda_decode_name(k), name, capacity); });
}

}  // namespace flare::gpu
