// Selection, names and dispatch of the portable attention forward kernels.
#include "forward_sm80.h"

#include "common_sm80.cuh"
#include "flare.h"
#include "launch_sm80_table.h"
#include "merge_sm80.h"

namespace flare::attention {

namespace {

struct Instance {
    const char* name;
    Sm80Launch* launch;
};

#define FLARE_ATTENTION_SM80(id, d, dv, block_m, block_n, warps, stages, blocks_per_sm, most_keys) \
    {"attention_sm80_" #id "_" #block_m "x" #block_n, launch_sm80_##id},
constexpr Instance kTiles[] = {
#include "forward_sm80_configs.inc"
};
#undef FLARE_ATTENTION_SM80

Instance find_instance(const Sm80Plan& plan) {
    const int width = plan.head_dim == 64 ? 0 : plan.head_dim == 128 ? 1 : 2;
    switch (plan.kernel) {
        case Sm80Kernel::kTile:
            return kTiles[plan.tile];
        case Sm80Kernel::kGeneral: {
            constexpr Instance kGeneral[] = {{"attention_sm80_general_d64", launch_sm80_general_d64},
                                             {"attention_sm80_general_d128", launch_sm80_general_d128},
                                             {"attention_sm80_general_d256", launch_sm80_general_d256}};
            return kGeneral[width];
        }
        case Sm80Kernel::kDecode: {
            constexpr const char* kNames[] = {"attention_sm80_decode_d64", "attention_sm80_decode_d128",
                                              "attention_sm80_decode_d256"};
            return {kNames[width], launch_sm80_decode};
        }
        default:
            return {"attention_sm80_fma", launch_sm80_fma};
    }
}

int32_t clamp_window(int32_t bound) {
    return bound < 0 || bound > kUnbounded ? kUnbounded : bound;
}

int32_t bytes_of(DType dtype) {
    return dtype == DType::kFp32 ? 4 : dtype == DType::kFp8E4m3 ? 1 : 2;
}

int64_t num_tiles(const FwdParams& p, const Sm80Plan& plan) {
    return int64_t{plan.num_m} * plan.num_splits * (p.heads_q / plan.group) * p.batch;
}

KeyLayout layout_of(const Strides& stride, int32_t bytes) {
    return {stride.batch * bytes, stride.row * bytes, stride.head * bytes};
}

pipe::FastDivisor divisor(int64_t n) {
    return pipe::FastDivisor::make(static_cast<uint32_t>(n));
}

Sm80Args make_args(const FwdParams& p, const Sm80Plan& plan, void* workspace) {
    const int32_t heads_per_kv = p.heads_q / p.heads_kv;
    Sm80Args args{};
    args.params = p;
    args.params.window_left = clamp_window(p.window_left);
    args.params.window_right = clamp_window(p.window_right);
    args.num_m = divisor(plan.num_m);
    args.splits = divisor(plan.num_splits);
    args.heads = divisor(p.heads_q / plan.group);
    args.group = divisor(plan.group);
    args.heads_per_tile_head = divisor(plan.group > 1 ? 1 : heads_per_kv);
    args.page_size = divisor(p.block_table != nullptr ? p.page_size : 1);
    args.k = layout_of(p.k_stride, bytes_of(p.dtype));
    args.v = layout_of(p.v_stride, bytes_of(p.dtype));
    args.unit = p.softcap > 0.0f ? p.softcap : p.scale;
    args.scale_log2 = args.unit * 1.4426950408889634f;
    args.split_keys = plan.split_keys;
    args.rows = static_cast<int32_t>(longest_q(p));
    if (plan.num_splits > 1) {
        const int64_t rows = int64_t{plan.num_splits} * p.batch * args.rows * p.heads_q;
        const int64_t out_bytes = (rows * p.head_dim_v * 4 + 255) / 256 * 256;
        args.partial_out = static_cast<float*>(workspace);
        args.partial_lse = reinterpret_cast<float*>(static_cast<char*>(workspace) + out_bytes);
    }
    return args;
}

MergeParams merge_of_splits(const Sm80Args& args, const Sm80Plan& plan) {
    const FwdParams& p = args.params;
    MergeParams merge{};
    merge.partial_out = args.partial_out;
    merge.partial_lse = args.partial_lse;
    merge.partial_lse_stride = {int64_t{args.rows} * p.heads_q, p.heads_q, 1};
    merge.partial_lse_stride_p = p.batch * merge.partial_lse_stride.batch;
    merge.partial_out_stride = {merge.partial_lse_stride.batch * p.head_dim_v, int64_t{p.heads_q} * p.head_dim_v, p.head_dim_v};
    merge.partial_out_stride_p = merge.partial_lse_stride_p * p.head_dim_v;
    merge.dtype = DType::kFp32;
    merge.out = p.o;
    merge.lse = p.lse;
    merge.out_stride = p.o_stride;
    merge.lse_stride = p.lse_stride;
    merge.out_dtype = p.out_dtype;
    merge.num_partials = plan.num_splits;
    merge.batch = p.batch;
    merge.seqlen = args.rows;
    merge.heads = p.heads_q;
    merge.head_dim = p.head_dim_v;
    merge.sink = p.sink;
    merge.cu_seqlens = p.cu_seqlens_q;
    merge.seqused = p.seqused_q;
    merge.index64 = p.index64;
    return merge;
}

}  // namespace

int32_t select_attention_sm80(const FwdParams& p) {
    if (p.seqlen_q >= kMaxSeqlenSm80 || p.seqlen_k >= kMaxSeqlenSm80 ||
        longest_q(p) * (p.heads_q / p.heads_kv) >= int64_t{1} << 30) {
        return FLARE_UNSUPPORTED_SHAPE;
    }
    const Sm80Plan plan = plan_sm80(p);
    return num_tiles(p, plan) >= int64_t{1} << 31 ? FLARE_UNSUPPORTED_SHAPE : FLARE_OK;
}

const char* attention_sm80_kernel_name(const FwdParams& p) {
    return find_instance(plan_sm80(p)).name;
}

int32_t launch_attention_sm80(const FwdParams& p, void* workspace, cudaStream_t stream) {
    const Sm80Plan plan = plan_sm80(p);
    const int64_t tiles = num_tiles(p, plan);
    if (tiles == 0) {
        return FLARE_OK;
    }
    const Sm80Args args = make_args(p, plan, workspace);
    if (find_instance(plan).launch(args, tiles, stream) != cudaSuccess) {
        return FLARE_ERROR_LAUNCH;
    }
    if (plan.num_splits > 1 && launch_merge_sm80(merge_of_splits(args, plan), stream) != cudaSuccess) {
        return FLARE_ERROR_LAUNCH;
    }
    return FLARE_OK;
}

}  // namespace flare::attention
