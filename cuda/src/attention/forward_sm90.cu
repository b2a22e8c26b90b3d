// Selection, names and dispatch of the Hopper attention forward kernels.
#include "forward_sm90.h"

#include <algorithm>

#include "flare.h"
#include "launch_sm90_table.h"

namespace flare::attention {

namespace {

struct Instance {
    const char* name;
    int32_t head_dim;
    int32_t head_dim_v;
    int32_t (*launch)(const FwdParams&, cudaStream_t);
};

#define FLARE_ATTENTION_SM90(id, d, dv, consumers, block_n, stages, schedule) k_##id,
enum InstanceId {
#include "forward_sm90_configs.inc"
    kNumInstances
};
#undef FLARE_ATTENTION_SM90

#define FLARE_ATTENTION_SM90(id, d, dv, consumers, block_n, stages, schedule) \
    {"attention_sm90_" #id, d, dv, launch_sm90_##id},
constexpr Instance kInstances[] = {
#include "forward_sm90_configs.inc"
};
#undef FLARE_ATTENTION_SM90

// About: of a row that no end of the sequence cuts short, half of the keys on a side without a bound.
int64_t mean_visible_keys(const FwdParams& p) {
    const int64_t all = p.seqlen_k;
    if (p.window_left < 0 && p.window_right < 0) {
        return all;
    }
    const int64_t left = p.window_left < 0 ? all / 2 : p.window_left;
    const int64_t right = p.window_right < 0 ? all / 2 : p.window_right;
    return std::min(all, left + right + 1);
}

int find_instance(const FwdParams& p) {
    // Wide key blocks pay where few of a tile's blocks are cut by a mask.
    if (p.head_dim == 128 && p.head_dim_v == 128 && mean_visible_keys(p) >= 2048) {
        return k_d128_wide;
    }
    for (int i = 0; i < kNumInstances; ++i) {
        if (kInstances[i].head_dim == p.head_dim && kInstances[i].head_dim_v == p.head_dim_v) {
            return i;
        }
    }
    return -1;
}

bool tma_stride(const Strides& s) {
    return s.batch % 8 == 0 && s.row % 8 == 0 && s.head % 8 == 0;
}

bool aligned(const void* p) {
    return reinterpret_cast<uintptr_t>(p) % 16 == 0;
}

}  // namespace

int32_t select_attention_sm90(const FwdParams& p) {
    if (p.dtype != DType::kBf16 && p.dtype != DType::kFp16) {
        return FLARE_UNSUPPORTED_DTYPE;
    }
    if (find_instance(p) < 0) {
        return FLARE_UNSUPPORTED_SHAPE;
    }
    // The running maximum is taken before scaling, which needs a positive scale.
    if (p.block_table != nullptr || !(p.scale > 0.0f)) {
        return FLARE_UNSUPPORTED_FEATURE;
    }
    if (!tma_stride(p.q_stride) || !tma_stride(p.k_stride) || !tma_stride(p.v_stride) || !tma_stride(p.o_stride) ||
        !aligned(p.q) || !aligned(p.k) || !aligned(p.v) || !aligned(p.o)) {
        return FLARE_UNSUPPORTED_SHAPE;
    }
    const int64_t tiles = (int64_t{p.seqlen_q} + 63) / 64 * p.batch * p.heads_q;
    if (p.seqlen_q >= kMaxSeqlen || p.seqlen_k >= kMaxSeqlen || tiles >= int64_t{1} << 30) {
        return FLARE_UNSUPPORTED_SHAPE;
    }
    return FLARE_OK;
}

const char* attention_sm90_kernel_name(const FwdParams& p) {
    return kInstances[find_instance(p)].name;
}

int32_t launch_attention_sm90(const FwdParams& p, cudaStream_t stream) {
    return kInstances[find_instance(p)].launch(p, stream);
}

}  // namespace flare::attention
