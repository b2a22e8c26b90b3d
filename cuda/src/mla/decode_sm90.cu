// Launcher and instances of decode_sm90.cuh.
#include "decode_sm90.h"

#include <cuda_runtime.h>

#include <algorithm>
#include <cmath>

#include "../tile/tensor_map.h"
#include "decode_cluster_sm90.cuh"
#include "decode_sm90.cuh"
#include "flare.h"

namespace flare::mla {
namespace {

constexpr float kLog2e = 1.44269504088896340736f;
constexpr float kLeastScale = 1e-35f;  // instead of 0: masked scores are -inf before they are scaled

struct Plan {
    int num_requests;
    int rows;  // of the longest request
    int num_tiles;
    int cluster;
    decode::Load load;
    int num_parts;
    size_t o_part_offset;  // the meetings lie before them
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
    const bool sparse = p.indices != nullptr;  // every query token has keys of its own
    plan.num_requests = sparse ? p.batch * p.seqlen_q : p.batch;
    plan.rows = sparse ? p.heads : p.seqlen_q * p.heads;
    plan.num_tiles = std::max(1, (plan.rows + kTileRows - 1) / kTileRows);
    plan.load = sparse || box_rows(p) < 16 ? decode::Load::kGather : decode::Load::kTma;
    plan.cluster = plan.load == decode::Load::kTma && plan.num_tiles % 2 == 0 ? 2 : 1;
    plan.num_parts = std::min(kMaxParts, std::max(1, p.sm_count / plan.num_tiles));
    // For as many tiles as run at a time, rounded up, so that fewer rows never need more.
    const size_t rows = size_t{2} * std::max(p.sm_count, plan.num_tiles) * kTileRows;
    plan.o_part_offset = align_up(std::max(p.sm_count, plan.num_tiles) * sizeof(uint64_t), 256);
    plan.lse_part_offset = plan.o_part_offset + rows * decode::kValueCols * 2;
    plan.bytes = align_up(plan.lse_part_offset + rows * sizeof(float), 256);
    return plan;
}

struct Maps {
    CUtensorMap q;
    CUtensorMap q_rope;
    CUtensorMap kv;      // one chunk of kv_box_rows rows
    CUtensorMap values;  // two chunks of 64 rows
};

CUtensorMapDataType map_type(const MlaDecodeParams& p) {
    return p.dtype == DType::kBf16 ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16 : CU_TENSOR_MAP_DATA_TYPE_FLOAT16;
}

// Row stride of a request's query rows where they are equally spaced, else 0. With one query token or one head, the
// other stride is the row stride.
int64_t packed_row_stride(const MlaDecodeParams& p, int64_t stride_s, int64_t stride_h) {
    if (p.heads == 1) {
        return stride_s;
    }
    return (p.seqlen_q == 1 && p.cu_seqlens_q == nullptr) || stride_s == p.heads * stride_h ? stride_h : 0;
}

bool make_query_map(const MlaDecodeParams& p, bool packed, const void* data, int64_t width, int64_t stride_b, int64_t stride_s, int64_t stride_h, CUtensorMap* map) {
    const int64_t tokens = p.cu_seqlens_q != nullptr ? p.total_q : p.seqlen_q;
    const int64_t batch = p.cu_seqlens_q != nullptr ? 1 : p.batch;
    const int64_t dims[4] = {width, packed ? p.heads * tokens : p.heads, packed ? 1 : tokens, batch};
    const int64_t row_stride = packed ? packed_row_stride(p, stride_s, stride_h) : stride_h;
    const int64_t strides[3] = {2 * row_stride, 2 * stride_s, 2 * stride_b};
    const uint32_t box[4] = {64, packed ? 64u : 1u, 1, 1};
    return tile::make_tensor_map(map, map_type(p), 4, data, dims, strides, box, tile::Swizzle::k128);
}

// Gathered rows need no maps of the cache.
bool make_maps(const MlaDecodeParams& p, bool packed, decode::Load load, int kv_box_rows, Maps* maps) {
    const int64_t d = p.d_c + p.d_rope;
    const bool apart = p.q_rope != nullptr;
    const bool queries =
        make_query_map(p, packed, p.q, apart ? p.d_c : d, p.q_stride_b, p.q_stride_s, p.q_stride_h, &maps->q) &&
        (apart ? make_query_map(p, packed, p.q_rope, p.d_rope, p.q_rope_stride_b, p.q_rope_stride_s, p.q_rope_stride_h,
                                &maps->q_rope)
               : make_query_map(p, packed, p.q, d, p.q_stride_b, p.q_stride_s, p.q_stride_h, &maps->q_rope));
    if (load != decode::Load::kTma) {
        maps->kv = maps->q;
        maps->values = maps->q;
        return queries;
    }
    const bool paged = p.block_table != nullptr;
    // Without a row the maps describe one of q, which no block reaches.
    const int64_t rows = paged ? p.page_size : p.seqlen_k;
    const int64_t pages = paged ? p.num_pages : p.batch;
    const void* kv = rows * pages > 0 ? p.kv : p.q;
    const int64_t kv_dims[3] = {d, std::max<int64_t>(1, rows), std::max<int64_t>(1, pages)};
    const int64_t kv_strides[2] = {2 * p.kv_stride_s, 2 * p.kv_stride_b};
    const uint32_t kv_box[3] = {64, static_cast<uint32_t>(kv_box_rows), 1};
    // Value columns as [chunk][row][64]; chunks beyond d_c are out of bounds and read as zeros.
    const int64_t value_dims[4] = {64, kv_dims[1], p.d_c / 64, kv_dims[2]};
    const int64_t value_strides[3] = {2 * p.kv_stride_s, 128, 2 * p.kv_stride_b};
    const uint32_t value_box[4] = {64, 64, 2, 1};
    // Rows of 1,152 bytes are four and a half times 256. One H200, 128 x 4,096 keys in such boxes, loads alone: 157 us with
    // promotion to 256 bytes, 145 us with 128 or none.
    constexpr CUtensorMapL2promotion kPromotion = CU_TENSOR_MAP_L2_PROMOTION_L2_128B;
    return queries &&
           tile::make_tensor_map(&maps->kv, map_type(p), 3, kv, kv_dims, kv_strides, kv_box, tile::Swizzle::k128, kPromotion) &&
           tile::make_tensor_map(&maps->values, map_type(p), 4, kv, value_dims, value_strides, value_box, tile::Swizzle::k128,
                                 kPromotion);
}

constexpr int64_t kStrideUnit = 8;  // elements: the kernels count cache rows in 16 bytes

template <typename T, int kCluster, decode::Load kLoad>
int32_t launch(const MlaDecodeParams& p, const Plan& plan, void* workspace, cudaStream_t stream) {
    DecodeArgs args{};
    const bool sparse = p.indices != nullptr;
    args.schedule = make_schedule(p, plan.num_requests, plan.num_parts);
    args.row_map = make_row_map(p);
    args.sink = p.sink;
    args.out = p.out;
    args.lse = p.lse;
    args.out_stride_b = p.out_stride_b;
    args.out_stride_s = p.out_stride_s;
    args.out_stride_h = p.out_stride_h;
    args.lse_stride_b = p.lse_stride_b;
    args.lse_stride_h = p.lse_stride_h;
    args.scale_log2 = std::max(std::fabs(p.scale) * kLog2e, kLeastScale);
    args.negate = p.scale < 0.0f;
    args.causal = !sparse && p.causal != 0 && p.seqlen_q > 1;
    args.kv_policy = kCluster > 1           ? ptx::kL2EvictFirst
                     : plan.num_tiles > 1 ? ptx::kL2EvictNormal  // row tiles read the same keys
                                          : keys_policy(p);
    args.rows = plan.rows;
    args.num_tiles = plan.num_tiles;
    args.d_c = p.d_c;
    args.d_total = p.d_c + p.d_rope;
    args.q_rope_column = p.q_rope != nullptr ? 0 : p.d_c;
    const bool paged = p.block_table != nullptr || sparse;
    args.block_table = p.block_table;
    args.block_table_stride_b = p.block_table_stride_b;
    args.index_is_64 = p.index_is_64;
    args.page_size = paged ? p.page_size : p.seqlen_k;
    args.by_page = pipe::FastDivisor::make(static_cast<uint32_t>(std::max(1, args.page_size)));
    args.num_pages = paged ? p.num_pages : p.batch;
    args.kv_box_rows = kLoad == decode::Load::kTma ? box_rows(p) : 1;
    args.q_rows_packed = packed_row_stride(p, p.q_stride_s, p.q_stride_h) != 0 &&
                         (p.q_rope == nullptr || packed_row_stride(p, p.q_rope_stride_s, p.q_rope_stride_h) != 0);
    args.kv = static_cast<const char*>(p.kv);
    args.kv_stride_b = static_cast<uint32_t>(p.kv_stride_b / kStrideUnit);
    args.kv_stride_s = static_cast<uint32_t>(p.kv_stride_s / kStrideUnit);
    args.indices = p.indices;
    args.indices_stride_b = p.indices_stride_b;
    args.indices_stride_s = p.indices_stride_s;
    uint8_t* base = static_cast<uint8_t*>(workspace);
    args.meetings = reinterpret_cast<uint64_t*>(base);
    args.meeting_tag = next_meeting_tag();
    args.o_part = base + plan.o_part_offset;
    args.lse_part = reinterpret_cast<float*>(base + plan.lse_part_offset);

    Maps maps;
    if (!make_maps(p, args.q_rows_packed != 0, kLoad, args.kv_box_rows, &maps)) {
        return FLARE_ERROR_INTERNAL;
    }
    static_assert(kCluster == 1 || kLoad == decode::Load::kTma, "gathered keys aren't shared");
    void (*kernel)(DecodeArgs, CUtensorMap, CUtensorMap, CUtensorMap, CUtensorMap);
    int threads = decode::kThreads;
    int smem_bytes = sizeof(decode::SharedStorage);
    if constexpr (kCluster == 1) {
        kernel = mla_decode_sm90_kernel<T, kLoad>;
    } else {
        kernel = mla_decode_cluster_sm90_kernel<T>;
        threads = decode::cluster::kThreads;
        smem_bytes = sizeof(decode::cluster::Storage);
    }
    if (cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, smem_bytes) != cudaSuccess) {
        return FLARE_ERROR_LAUNCH;
    }
    cudaLaunchAttribute attribute[1];
    attribute[0].id = cudaLaunchAttributeClusterDimension;
    attribute[0].val.clusterDim = {kCluster, 1, 1};
    cudaLaunchConfig_t config{};
    config.gridDim = dim3(plan.num_parts * plan.num_tiles);
    config.blockDim = dim3(threads);
    config.dynamicSmemBytes = smem_bytes;
    config.stream = stream;
    config.attrs = attribute;
    config.numAttrs = 1;
    return cudaLaunchKernelEx(&config, kernel, args, maps.q, maps.q_rope, maps.kv, maps.values) == cudaSuccess
               ? FLARE_OK
               : FLARE_ERROR_LAUNCH;
}

template <typename T>
int32_t dispatch(const MlaDecodeParams& p, const Plan& plan, void* workspace, cudaStream_t stream) {
    if (plan.load == decode::Load::kGather) {
        return launch<T, 1, decode::Load::kGather>(p, plan, workspace, stream);
    }
    return plan.cluster == 2 ? launch<T, 2, decode::Load::kTma>(p, plan, workspace, stream)
                             : launch<T, 1, decode::Load::kTma>(p, plan, workspace, stream);
}

bool multiple_of_8(int64_t x) {
    return x % 8 == 0;
}

}  // namespace

int32_t select_mla_decode_sm90(const MlaDecodeParams& p) {
    const bool dtypes =
        (p.dtype == DType::kBf16 || p.dtype == DType::kFp16) && p.out_dtype == p.dtype && p.kv_dtype == p.dtype;
    if (!dtypes) {
        return FLARE_UNSUPPORTED_DTYPE;
    }
    if (p.w_uk != nullptr || p.w_uv != nullptr) {
        return FLARE_UNSUPPORTED_FEATURE;
    }
    const bool shapes =
        p.d_c >= 64 && p.d_c <= 512 && p.d_c % 64 == 0 && p.d_rope >= 0 && p.d_rope <= 64 && p.d_rope % 8 == 0;
    if (!shapes) {
        return FLARE_UNSUPPORTED_SHAPE;
    }
    // TMA takes 16-byte steps; the kernel stores 16 bytes at a time.
    const bool strides = multiple_of_8(p.q_stride_b) && multiple_of_8(p.q_stride_s) && multiple_of_8(p.q_stride_h) &&
                         multiple_of_8(p.out_stride_b) && multiple_of_8(p.out_stride_s) && multiple_of_8(p.out_stride_h) &&
                         p.kv_stride_b % kStrideUnit == 0 && p.kv_stride_s % kStrideUnit == 0;
    const bool rope_strides = p.q_rope == nullptr || (multiple_of_8(p.q_rope_stride_b) && multiple_of_8(p.q_rope_stride_s) &&
                                                      multiple_of_8(p.q_rope_stride_h));
    if (!strides || !rope_strides) {
        return FLARE_UNSUPPORTED_SHAPE;
    }
    // Gathered rows are found by 32 bits of 16-byte units.
    const int64_t pages = p.block_table != nullptr || p.indices != nullptr ? p.num_pages : p.batch;
    if (make_plan(p).load != decode::Load::kTma && p.kv_stride_b / kStrideUnit * pages >= int64_t{1} << 32) {
        return FLARE_UNSUPPORTED_SHAPE;
    }
    return FLARE_OK;
}

const char* mla_decode_sm90_kernel_name(const MlaDecodeParams& p) {
    const Plan plan = make_plan(p);
    const bool sparse = p.indices != nullptr;
    if (plan.load == decode::Load::kGather) {
        return sparse ? "mla_decode_sm90_sparse" : "mla_decode_sm90_gather";
    }
    return plan.cluster == 2 ? "mla_decode_sm90_cluster2" : "mla_decode_sm90";
}

size_t mla_decode_sm90_workspace(const MlaDecodeParams& p) {
    return make_plan(p).bytes;
}

int32_t launch_mla_decode_sm90(const MlaDecodeParams& p, void* workspace, size_t bytes, cudaStream_t stream) {
    if (p.batch == 0 || p.seqlen_q == 0 || (p.cu_seqlens_q != nullptr && p.total_q == 0)) {
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
