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
    k.beta_per_channel = p.beta_per_channel;
    k.deterministic = p.deterministic;
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

kda::KdaParams translate(const flare_kda_forward_params& p) {
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
    k.slots_stride_n = 1;
    k.slots_per_sequence = 1;
    k.checkpoints = p.checkpoints;
    k.cu_checkpoints = p.cu_checkpoints;
    k.checkpoint_interval = p.checkpoints != nullptr ? p.checkpoint_interval : 0;
    k.checkpoint_dtype = kda_dtype(p.checkpoint_dtype);
    return k;
}

kda::KdaParams translate(const flare_kda_decode_params& p) {
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
    return k;
}

// The kernels of either operation, best first. The recurrent one takes everything that a grid holds.
enum class Path { kSm90, kSm80, kRecurrent };

struct Selected {
    kda::KdaParams params;
    Path path;
    DeviceInfo device;
};

int32_t select_recurrent(const char* operation, const kda::KdaParams& k) {
    const char* reason = kda::kda_recurrent_sm80_refusal(k);
    return reason == nullptr ? FLARE_OK
                             : fail(FLARE_UNSUPPORTED_SHAPE, "%s: no kernel can run this: %s", operation, reason);
}

int32_t select(const flare_kda_forward_params& p, const DeviceInfo& info, Selected* s) {
    constexpr const char* kName = "kda_forward";
    s->params = translate(p);
    s->device = info;
    if (p.kernel == FLARE_KERNEL_SM90) {
        if (const int32_t status = only_sm90(kName, p.kernel, info)) {
            return status;
        }
    }
    if (p.kernel != FLARE_KERNEL_PORTABLE && info.runs_sm90a) {
        const char* reason = p.beta_per_channel != 0 ? "beta_per_channel" : kda::kda_forward_sm90_refusal(s->params);
        if (reason == nullptr) {
            s->path = Path::kSm90;
            return FLARE_OK;
        }
        if (p.kernel == FLARE_KERNEL_SM90) {
            return refused(kName, FLARE_UNSUPPORTED_KERNEL, reason);
        }
    }
    if (kda::kda_forward_sm80_refusal(s->params) == nullptr) {
        s->path = Path::kSm80;
        return FLARE_OK;
    }
    s->path = Path::kRecurrent;
    return select_recurrent(kName, s->params);
}

int32_t select(const flare_kda_decode_params& p, const DeviceInfo& info, Selected* s) {
    if (p.kernel == FLARE_KERNEL_SM90) {
        return fail(FLARE_UNSUPPORTED_KERNEL,
                    "kernel: SM90 asked for, but kda_decode has the same kernels for all cards; use kernel = 0");
    }
    s->params = translate(p);
    s->device = info;
    if (kda::kda_decode_sm80_refusal(s->params) == nullptr) {
        s->path = Path::kSm80;
        return FLARE_OK;
    }
    s->path = Path::kRecurrent;
    return select_recurrent("kda_decode", s->params);
}

// Enters the device, selects, and hands what was selected to `body`.
template <typename Params, typename Body>
int32_t selected(const Params& p, Body body) {
    return on_device(p, [&](const DeviceInfo& info) -> int32_t {
        Selected s;
        if (const int32_t status = select(p, info, &s)) {
            return status;
        }
        return body(s);
    });
}

uint64_t forward_workspace(const Selected& s) {
    return s.path == Path::kSm90   ? kda::kda_forward_sm90_workspace(s.params)
           : s.path == Path::kSm80 ? kda::kda_forward_sm80_workspace(s.params)
                                   : 0;
}

const char* forward_name(const Selected& s) {
    return s.path == Path::kSm90   ? kda::kda_forward_sm90_name(s.params)
           : s.path == Path::kSm80 ? kda::kda_forward_sm80_name(s.params)
                                   : "kda_forward_sm80_recurrent";
}

int32_t launch_forward(const Selected& s, const flare_kda_forward_params& p) {
    const cudaStream_t stream = static_cast<cudaStream_t>(p.stream);
    switch (s.path) {
        case Path::kSm90:
            return kda::launch_kda_forward_sm90(s.params, p.workspace, p.workspace_bytes, stream);
        case Path::kSm80:
            return kda::launch_kda_forward_sm80(s.params, s.device.sm_count, p.workspace, stream);
        default:
            return kda::launch_kda_recurrent_sm80(s.params, stream);
    }
}

}  // namespace

int32_t kda_forward(const flare_kda_forward_params& p) {
    return selected(p, [&](const Selected& s) -> int32_t {
        if (const int32_t status = check_alignments({{"q", p.q},
                                                     {"k", p.k},
                                                     {"v", p.v},
                                                     {"g", p.g},
                                                     {"dt_bias", p.dt_bias},
                                                     {"out", p.out},
                                                     {"initial_state", p.initial_state},
                                                     {"final_state", p.final_state}})) {
            return status;
        }
        if (const int32_t status = check_workspace(p.workspace, p.workspace_bytes, forward_workspace(s))) {
            return status;
        }
        return check_cuda(static_cast<cudaError_t>(launch_forward(s, p)), "kda_forward");
    });
}

int32_t kda_forward_workspace(const flare_kda_forward_params& p, uint64_t* bytes) {
    return selected(p, [&](const Selected& s) -> int32_t {
        *bytes = forward_workspace(s);
        return FLARE_OK;
    });
}

int32_t kda_forward_kernel_name(const flare_kda_forward_params& p, char* name, uint64_t capacity) {
    return selected(p, [&](const Selected& s) { return copy_name(forward_name(s), name, capacity); });
}

int32_t kda_decode(const flare_kda_decode_params& p) {
    return selected(p, [&](const Selected& s) -> int32_t {
        if (const int32_t status = check_alignments({{"q", p.q},
                                                     {"k", p.k},
                                                     {"v", p.v},
                                                     {"g", p.g},
                                                     {"dt_bias", p.dt_bias},
                                                     {"out", p.out},
                                                     {"state", p.state},
                                                     {"state_out", p.state_out}})) {
            return status;
        }
        const cudaStream_t stream = static_cast<cudaStream_t>(p.stream);
        const int32_t error = s.path == Path::kSm80 ? kda::launch_kda_decode_sm80(s.params, stream)
                                                    : kda::launch_kda_recurrent_sm80(s.params, stream);
        return check_cuda(static_cast<cudaError_t>(error), "kda_decode");
    });
}

int32_t kda_decode_workspace(const flare_kda_decode_params& p, uint64_t* bytes) {
    return selected(p, [&](const Selected&) -> int32_t {
        *bytes = 0;
        return FLARE_OK;
    });
}

int32_t kda_decode_kernel_name(const flare_kda_decode_params& p, char* name, uint64_t capacity) {
    return selected(p, [&](const Selected& s) {
        return copy_name(s.path == Path::kSm80 ? kda::kda_decode_sm80_name(s.params) : "kda_decode_sm80_recurrent",
                         name, capacity);
    });
}

}  // namespace flare::gpu
