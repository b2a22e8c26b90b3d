// Launcher and instances of decode_sm90.cuh.
#include "decode_sm90.h"

#include <cuda_runtime.h>

#include <algorithm>

#include "../tile/tensor_map.h"
#include "decode_combine.cuh"
#include "decode_sm90.cuh"
#include "flare.h"

namespace flare::mla {
namespace {

constexpr float kLog2e = 1.44269504088896340736f;

struct Plan {
    int num_tiles;
    int cluster;
    bool gather;
    int num_parts;
    size_t o_part_offset;
    size_t lse_part_offset;
    size_t bytes;
};

size_t align_up(size_t x, size_t to) {
    return (x + to - 1) / to * to;
}

// Largest power of two up to 64 that divides the page size: the rows of a TMA box.
int box_rows(const MlaDecodeParams& p) {
    if (p.block_table == nullptr) {
        return kBlockKeys;
    }
    return std::min(kBlockKeys, p.page_size & -p.page_size);
}

// The bytes are a function of the multiprocessor count, Sq and H.
Plan make_plan(const MlaDecodeParams& p) {
    Plan plan;
    plan.num_tiles = (p.seqlen_q * p.heads + kTileRows - 1) / kTileRows;
    plan.gather = box_rows(p) < 16;
    plan.cluster = !plan.gather && plan.num_tiles % 2 == 0 ? 2 : 1;
    plan.num_parts = std::min(kMaxParts, std::max(1, p.sm_count / plan.num_tiles));
    const size_t rows = size_t{2} * plan.num_parts * plan.num_tiles * kTileRows;
    plan.o_part_offset = align_up(plan.num_parts * sizeof(Cut), 256);
    plan.lse_part_offset = plan.o_part_offset + rows * decode::kValueCols * sizeof(float);
    plan.bytes = align_up(plan.lse_part_offset + rows * sizeof(float), 256);
    return plan;
}

bool make_maps(const MlaDecodeParams& p, bool packed, int kv_box_rows, CUtensorMap* map_q, CUtensorMap* map_kv,
               CUtensorMap* map_values) {
    const CUtensorMapDataType type =
        p.dtype == DType::kBf16 ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16 : CU_TENSOR_MAP_DATA_TYPE_FLOAT16;
    const int64_t d = p.d_c + p.d_rope;
    const int64_t q_dims[4] = {d, packed ? int64_t{p.heads} * p.seqlen_q : p.heads, packed ? 1 : p.seqlen_q, p.batch};
    // Packed rows: with one query token or one head, the other stride is the row stride.
    const int64_t row_stride = p.heads == 1 ? p.q_stride_s : p.q_stride_h;
    const int64_t q_strides[3] = {2 * (packed ? row_stride : p.q_stride_h), 2 * p.q_stride_s, 2 * p.q_stride_b};
    const uint32_t q_box[4] = {64, packed ? 64u : 1u, 1, 1};
    const bool paged = p.block_table != nullptr;
    const int64_t kv_dims[3] = {d, paged ? p.page_size : p.seqlen_k, paged ? p.num_pages : p.batch};
    const int64_t kv_strides[2] = {2 * p.kv_stride_s, 2 * p.kv_stride_b};
    const uint32_t kv_box[3] = {64, static_cast<uint32_t>(kv_box_rows), 1};
    // Value columns as [chunk][row][64]; chunks beyond d_c are out of bounds and read as zeros.
    const int64_t value_dims[4] = {64, kv_dims[1], p.d_c / 64, kv_dims[2]};
    const int64_t value_strides[3] = {2 * p.kv_stride_s, 128, 2 * p.kv_stride_b};
    const uint32_t value_box[4] = {64, 64, 2, 1};
    return tile::make_tensor_map(map_q, type, 4, p.q, q_dims, q_strides, q_box, tile::Swizzle::k128) &&
           tile::make_tensor_map(map_kv, type, 3, p.kv, kv_dims, kv_strides, kv_box, tile::Swizzle::k128) &&
           tile::make_tensor_map(map_values, type, 4, p.kv, value_dims, value_strides, value_box, tile::Swizzle::k128);
}

template <typename T, int kCluster, bool kGather>
int32_t launch(const MlaDecodeParams& p, const Plan& plan, void* workspace, cudaStream_t stream) {
    DecodeArgs args{};
    args.schedule = {p.seqlens_k, p.index_is_64,  p.batch,
                     p.seqlen_k,  plan.num_parts, p.deterministic != 0 || p.num_splits == 1};
    args.out = p.out;
    args.lse = p.lse;
    args.out_stride_b = p.out_stride_b;
    args.out_stride_s = p.out_stride_s;
    args.out_stride_h = p.out_stride_h;
    args.lse_stride_b = p.lse_stride_b;
    args.lse_stride_h = p.lse_stride_h;
    args.scale_log2 = p.scale * kLog2e;
    args.causal = p.causal != 0 && p.seqlen_q > 1;
    args.seqlen_q = p.seqlen_q;
    args.heads = p.heads;
    args.rows = p.seqlen_q * p.heads;
    args.num_tiles = plan.num_tiles;
    args.d_c = p.d_c;
    args.d_total = p.d_c + p.d_rope;
    const bool paged = p.block_table != nullptr;
    args.block_table = p.block_table;
    args.block_table_stride_b = p.block_table_stride_b;
    args.index_is_64 = p.index_is_64;
    args.page_size = paged ? p.page_size : p.seqlen_k;
    args.num_pages = paged ? p.num_pages : p.batch;
    args.kv_box_rows = plan.gather ? 1 : box_rows(p);
    args.q_rows_packed = p.seqlen_q == 1 || p.heads == 1 || p.q_stride_s == p.heads * p.q_stride_h;
    args.kv = static_cast<const char*>(p.kv);
    args.kv_stride_b = p.kv_stride_b;
    args.kv_stride_s = p.kv_stride_s;
    uint8_t* base = static_cast<uint8_t*>(workspace);
    args.cuts = reinterpret_cast<Cut*>(base);
    args.o_part = reinterpret_cast<float*>(base + plan.o_part_offset);
    args.lse_part = reinterpret_cast<float*>(base + plan.lse_part_offset);

    CUtensorMap map_q;
    CUtensorMap map_kv;
    CUtensorMap map_values;
    if (!make_maps(p, args.q_rows_packed != 0, args.kv_box_rows, &map_q, &map_kv, &map_values)) {
        return FLARE_ERROR_INTERNAL;
    }
    const auto kernel = mla_decode_sm90_kernel<T, kCluster, kGather>;
    constexpr int kSmemBytes = sizeof(decode::SharedStorage);
    if (cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kSmemBytes) != cudaSuccess) {
        return FLARE_ERROR_LAUNCH;
    }
    cudaLaunchAttribute attribute[1];
    attribute[0].id = cudaLaunchAttributeClusterDimension;
    attribute[0].val.clusterDim = {kCluster, 1, 1};
    cudaLaunchConfig_t config{};
    config.gridDim = dim3(plan.num_parts * plan.num_tiles);
    config.blockDim = dim3(decode::kThreads);
    config.dynamicSmemBytes = kSmemBytes;
    config.stream = stream;
    config.attrs = attribute;
    config.numAttrs = 1;
    if (cudaLaunchKernelEx(&config, kernel, args, map_q, map_kv, map_values) != cudaSuccess) {
        return FLARE_ERROR_LAUNCH;
    }
    if (args.schedule.never_split) {
        return FLARE_OK;
    }
    const CombineArgs combine{
        p.out,          p.lse,          p.out_stride_b, p.out_stride_s, p.out_stride_h,
        p.lse_stride_b, p.lse_stride_h, p.heads,        args.rows,      plan.num_tiles * kTileRows,
        p.d_c,          plan.num_parts, args.cuts,      args.o_part,    args.lse_part};
    attribute[0].id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attribute[0].val.programmaticStreamSerializationAllowed = 1;
    config.gridDim = dim3(2 * p.sm_count);
    config.blockDim = dim3(kCombineThreads);
    config.dynamicSmemBytes = 0;
    return cudaLaunchKernelEx(&config, mla_decode_combine_kernel<T>, combine) == cudaSuccess ? FLARE_OK
                                                                                             : FLARE_ERROR_LAUNCH;
}

template <typename T>
int32_t dispatch(const MlaDecodeParams& p, const Plan& plan, void* workspace, cudaStream_t stream) {
    if (plan.gather) {
        return launch<T, 1, true>(p, plan, workspace, stream);
    }
    return plan.cluster == 2 ? launch<T, 2, false>(p, plan, workspace, stream)
                             : launch<T, 1, false>(p, plan, workspace, stream);
}

bool multiple_of_8(int64_t x) {
    return x % 8 == 0;
}

}  // namespace

int32_t select_mla_decode_sm90(const MlaDecodeParams& p) {
    const bool dtypes = (p.dtype == DType::kBf16 || p.dtype == DType::kFp16) && p.out_dtype == p.dtype && p.kv_dtype == p.dtype;
    if (!dtypes) {
        return FLARE_UNSUPPORTED_DTYPE;
    }
    if (p.indices != nullptr || p.sink != nullptr || p.cu_seqlens_q != nullptr || p.w_uk != nullptr || p.w_uv != nullptr ||
        p.q_rope != nullptr) {
        return FLARE_UNSUPPORTED_FEATURE;
    }
    const bool shapes =
        p.d_c >= 64 && p.d_c <= 512 && p.d_c % 64 == 0 && p.d_rope >= 0 && p.d_rope <= 64 && p.d_rope % 8 == 0;
    if (!shapes) {
        return FLARE_UNSUPPORTED_SHAPE;
    }
    // TMA takes 16-byte steps; the kernel stores 16 bytes at a time.
    const bool strides = multiple_of_8(p.q_stride_b) && multiple_of_8(p.q_stride_s) && multiple_of_8(p.q_stride_h) &&
                         multiple_of_8(p.kv_stride_b) && multiple_of_8(p.kv_stride_s) &&
                         multiple_of_8(p.out_stride_b) && multiple_of_8(p.out_stride_s) &&
                         multiple_of_8(p.out_stride_h);
    if (!strides) {
        return FLARE_UNSUPPORTED_SHAPE;
    }
    if (make_plan(p).gather && p.kv_stride_b * p.num_pages >= int64_t{1} << 35) {  // row offsets of 32 bits in 16 bytes
        return FLARE_UNSUPPORTED_SHAPE;
    }
    if (p.num_splits > 1) {
        return FLARE_UNSUPPORTED_FEATURE;
    }
    return FLARE_OK;
}

const char* mla_decode_sm90_kernel_name(const MlaDecodeParams& p) {
    const Plan plan = make_plan(p);
    return plan.gather ? "mla_decode_sm90_gather" : plan.cluster == 2 ? "mla_decode_sm90_cluster2" : "mla_decode_sm90";
}

size_t mla_decode_sm90_workspace(const MlaDecodeParams& p) {
    return make_plan(p).bytes;
}

int32_t launch_mla_decode_sm90(const MlaDecodeParams& p, void* workspace, size_t bytes, cudaStream_t stream) {
    if (p.batch == 0 || p.seqlen_q == 0) {
        return FLARE_OK;
    }
    const Plan plan = make_plan(p);
    if (bytes < plan.bytes) {
        return FLARE_ERROR_WORKSPACE;
    }
    return p.dtype == DType::kBf16 ? dispatch<__nv_bfloat16>(p, plan, workspace, stream)
                                   : dispatch<__half>(p, plan, workspace, stream);
}

}  // namespace flare::mla
