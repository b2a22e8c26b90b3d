// Selection, names and dispatch of the Hopper attention forward kernels.
#include "forward_sm90.h"

#include "flare.h"
#include "launch_sm90_table.h"

namespace flare::attention {

namespace {

struct Instance {
    const char* name;
    Sm90Elements elements;
    int32_t head_dim;
    int32_t head_dim_v;
    int32_t (*launch)(const FwdParams&, cudaStream_t);
};

#define FLARE_ATTENTION_SM90(id, elements, d, dv, consumers, block_n, stages, schedule, blocks_per_sm, cluster) k_##id,
enum InstanceId {
#include "forward_sm90_configs.inc"
    kNumInstances
};
#undef FLARE_ATTENTION_SM90

#define FLARE_ATTENTION_SM90(id, elements, d, dv, consumers, block_n, stages, schedule, blocks_per_sm, cluster) \
    {"attention_sm90_" #id, Sm90Elements::elements, d, dv, launch_sm90_##id},
constexpr Instance kInstances[] = {
#include "forward_sm90_configs.inc"
};
#undef FLARE_ATTENTION_SM90

int find_instance(const FwdParams& p) {
    const Sm90Elements elements = p.dtype == DType::kFp8E4m3 ? Sm90Elements::kE4m3 : Sm90Elements::k16Bit;
    if (elements == Sm90Elements::k16Bit && p.head_dim == 64 && p.head_dim_v == 64) {
        const Sm90TileD64 tile = sm90_tile_d64(p).tile;
        return tile == Sm90TileD64::kQuad ? k_d64_quad : tile == Sm90TileD64::kShort ? k_d64_short : k_d64;
    }
    // Two blocks that share their keys save power where many keys follow each other, and lose time at edges.
    const bool plain = p.softcap == 0.0f && p.alibi_slopes == nullptr && !has_device_lengths(p);
    if (elements == Sm90Elements::k16Bit && p.head_dim == 256 && p.head_dim_v == 256 && plain &&
        mean_visible_keys(p) >= 4096 && p.seqlen_q >= 1024 && p.window_left < 0) {
        return k_d256_pair;
    }
    // Tiles of 192 rows read fewer keys and hide the softmax better, but are coarse: under a causal mask, whose orders fit tiles of
    // 128 rows better, they pay later. (Lengths on the device give the longest of the batch, on which a result mustn't depend if it
    // is to be deterministic.)
    const bool causal = p.window_left < 0 && p.window_right >= 0;
    if (elements == Sm90Elements::k16Bit && p.head_dim == 128 && p.head_dim_v == 128 && p.softcap == 0.0f &&
        p.alibi_slopes == nullptr && mean_visible_keys(p) >= (causal ? 2560 : 2048) && p.seqlen_q >= 1024 &&
        (p.deterministic == 0 || !has_device_lengths(p))) {
        return k_d128_long;
    }
    for (int i = 0; i < kNumInstances; ++i) {
        if (kInstances[i].elements == elements && kInstances[i].head_dim == p.head_dim &&
            kInstances[i].head_dim_v == p.head_dim_v) {
            return i;
        }
    }
    return -1;
}

// Strides are multiples of 16 bytes.
bool wide_strides(const Strides& s, int64_t element_bytes) {
    const int64_t elements = 16 / element_bytes;
    return s.batch % elements == 0 && s.row % elements == 0 && s.head % elements == 0;
}

bool aligned(const void* p) {
    return reinterpret_cast<uintptr_t>(p) % 16 == 0;
}

}  // namespace

int32_t select_attention_sm90(const FwdParams& p) {
    if (find_instance(p) < 0) {
        return FLARE_UNSUPPORTED_SHAPE;
    }
    // The running maximum is taken before scaling, which needs a positive scale.
    if (p.block_table != nullptr || !(p.scale > 0.0f)) {
        return FLARE_UNSUPPORTED_FEATURE;
    }
    const int64_t element_bytes = p.dtype == DType::kFp8E4m3 ? 1 : 2;
    if (!wide_strides(p.q_stride, element_bytes) || !wide_strides(p.k_stride, element_bytes) ||
        !wide_strides(p.v_stride, element_bytes) || !wide_strides(p.o_stride, 2) ||
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
