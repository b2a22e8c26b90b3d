// Launcher and instances of prefill_sm90.cuh.
#include "prefill_sm90.h"

#include <cuda_runtime.h>

#include <algorithm>

#include "../tile/tensor_map.h"
#include "flare.h"
#include "prefill_sm90.cuh"

namespace flare::mla {
namespace {

constexpr float kLog2e = 1.44269504088896340736f;

// [batch][head][row][width] in boxes of 64 columns and `box_rows` rows.
bool make_map(CUtensorMap* map, const MlaPrefillParams& p, const void* data, int64_t width, int64_t rows, int64_t stride_s,
              int64_t heads, int64_t stride_h, int64_t batch, int64_t stride_b, uint32_t box_rows) {
    const CUtensorMapDataType type =
        p.dtype == DType::kBf16 ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16 : CU_TENSOR_MAP_DATA_TYPE_FLOAT16;
    const int64_t dims[4] = {width, std::max<int64_t>(rows, 1), heads, batch};
    const int64_t strides[3] = {2 * stride_s, 2 * stride_h, 2 * stride_b};
    const uint32_t box[4] = {64, box_rows, 1, 1};
    return tile::make_tensor_map(map, type, 4, data, dims, strides, box, tile::Swizzle::k128);
}

bool make_map(CUtensorMap* map, const MlaPrefillParams& p, const void* data, int64_t width, int64_t rows, int64_t stride_s,
              int64_t batch, int64_t stride_b) {
    const CUtensorMapDataType type =
        p.dtype == DType::kBf16 ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16 : CU_TENSOR_MAP_DATA_TYPE_FLOAT16;
    const int64_t dims[3] = {width, std::max<int64_t>(rows, 1), batch};
    const int64_t strides[2] = {2 * stride_s, 2 * stride_b};
    const uint32_t box[3] = {64, 64, 1};
    return tile::make_tensor_map(map, type, 3, data, dims, strides, box, tile::Swizzle::k128);
}

template <typename T, bool kWeightRowsLatent>
int32_t launch(const MlaPrefillParams& p, cudaStream_t stream) {
    using namespace prefill;
    PrefillArgs args{};
    const bool packed_q = p.cu_seqlens_q != nullptr;
    const bool packed_k = p.cu_seqlens_k != nullptr;
    const int64_t rows_q = packed_q ? p.total_q : p.seqlen_q;
    const bool paged = p.block_table != nullptr;
    const int64_t rows_k = paged ? p.page_size : packed_k ? p.total_k : p.seqlen_k;
    const int64_t batch_q = packed_q ? 1 : p.batch;
    const int64_t batch_k = paged ? std::max(1, p.num_pages) : packed_k ? 1 : p.batch;
    // Without a rope part both rope maps stand for the other part, read out of bounds; without keys no block is read.
    const bool rope = p.d_rope > 0;
    const bool keys = rows_k > 0 && (!paged || p.num_pages > 0);
    const void* latents = keys ? p.c_kv : p.w_uk;
    const void* rope_keys = keys && rope ? p.k_rope : latents;
    args.rope_column = rope ? 0 : 1024;
    const bool mapped =
        make_map(&args.map_q_nope, p, p.q_nope, p.d_nope, rows_q, p.q_nope_stride_s, p.heads, p.q_nope_stride_h, batch_q,
                 p.q_nope_stride_b, kBlockRows) &&
        make_map(&args.map_q_rope, p, rope ? p.q_rope : p.q_nope, rope ? p.d_rope : p.d_nope, rows_q,
                 rope ? p.q_rope_stride_s : p.q_nope_stride_s, p.heads, rope ? p.q_rope_stride_h : p.q_nope_stride_h,
                 batch_q, rope ? p.q_rope_stride_b : p.q_nope_stride_b, kBlockRows) &&
        make_map(&args.map_latent, p, latents, p.d_c, rows_k, p.c_kv_stride_s, batch_k, p.c_kv_stride_b) &&
        make_map(&args.map_k_rope, p, rope_keys, rope ? p.d_rope : p.d_c, rows_k, rope ? p.k_rope_stride_s : p.c_kv_stride_s,
                 batch_k, rope ? p.k_rope_stride_b : p.c_kv_stride_b) &&
        make_map(&args.map_w_uk, p, p.w_uk, kWeightRowsLatent ? p.d_nope : p.d_c, kWeightRowsLatent ? p.d_c : p.d_nope,
                 p.w_uk_stride_r, p.heads, p.w_uk_stride_h) &&
        make_map(&args.map_w_uv, p, p.w_uv, kWeightRowsLatent ? p.d_v : p.d_c, kWeightRowsLatent ? p.d_c : p.d_v,
                 p.w_uv_stride_r, p.heads, p.w_uv_stride_h);
    if (!mapped) {
        return FLARE_ERROR_LAUNCH;
    }
    args.schedule = pipe::TileSchedule::make((p.seqlen_q + kClusterRows - 1) / kClusterRows, p.batch, p.heads,
                                             p.batch * p.heads, false);
    args.out = p.out;
    args.lse = p.lse;
    args.out_stride_b = p.out_stride_b;
    args.out_stride_s = p.out_stride_s;
    args.out_stride_h = p.out_stride_h;
    args.lse_stride_b = p.lse_stride_b;
    args.lse_stride_h = p.lse_stride_h;
    args.scale = p.scale;
    args.scale_log2 = p.scale * kLog2e;
    args.causal = p.causal;
    args.seqlen_q = p.seqlen_q;
    args.seqlen_k = p.seqlen_k;
    args.d_v = p.d_v;
    args.cu_seqlens_q = p.cu_seqlens_q;
    args.cu_seqlens_k = p.cu_seqlens_k;
    args.seqused_q = p.seqused_q;
    args.seqused_k = p.seqused_k;
    args.block_table = p.block_table;
    args.block_table_stride_b = p.block_table_stride_b;
    args.by_page = pipe::FastDivisor::make(static_cast<uint32_t>(std::max(1, p.page_size)));
    args.index_is_64 = p.index_is_64;

    const auto kernel = mla_prefill_sm90_up_project_kernel<T, kWeightRowsLatent>;
    constexpr int kSmemBytes = sizeof(SharedStorage);
    if (cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kSmemBytes) != cudaSuccess) {
        return FLARE_ERROR_LAUNCH;
    }
    cudaLaunchAttribute attribute[1];
    attribute[0].id = cudaLaunchAttributeClusterDimension;
    attribute[0].val.clusterDim = {kCluster, 1, 1};
    cudaLaunchConfig_t config{};
    config.blockDim = dim3(kThreads);
    config.dynamicSmemBytes = kSmemBytes;
    config.stream = stream;
    config.attrs = attribute;
    config.numAttrs = 1;
    config.gridDim = dim3(kCluster);
    int clusters = 0;  // that the device holds at a time: not all of its multiprocessors can join one
    if (cudaOccupancyMaxActiveClusters(&clusters, kernel, &config) != cudaSuccess || clusters < 1) {
        return FLARE_ERROR_LAUNCH;
    }
    config.gridDim = dim3(static_cast<unsigned>(kCluster * std::min(clusters, args.schedule.num_tiles)));
    return cudaLaunchKernelEx(&config, kernel, args) == cudaSuccess ? FLARE_OK : FLARE_ERROR_LAUNCH;
}

template <typename T>
int32_t dispatch(const MlaPrefillParams& p, cudaStream_t stream) {
    return p.weight_layout == WeightLayout::kDC ? launch<T, false>(p, stream) : launch<T, true>(p, stream);
}

bool multiples_of_8(std::initializer_list<int64_t> values) {
    return std::all_of(values.begin(), values.end(), [](int64_t x) { return x % 8 == 0; });
}

}  // namespace

int32_t select_mla_prefill_sm90(const MlaPrefillParams& p) {
    if ((p.dtype != DType::kBf16 && p.dtype != DType::kFp16) || p.out_dtype != p.dtype || p.latent_dtype != p.dtype) {
        return FLARE_UNSUPPORTED_DTYPE;
    }
    if (p.d_nope > 128 || p.d_v > 128 || p.d_rope > 64 || p.d_c > 512 || !multiples_of_8({p.d_nope, p.d_v, p.d_rope, p.d_c})) {
        return FLARE_UNSUPPORTED_SHAPE;
    }
    // TMA takes 16-byte steps; the kernel stores 16 bytes at a time.
    if (!multiples_of_8({p.q_nope_stride_b, p.q_nope_stride_s, p.q_nope_stride_h, p.c_kv_stride_b, p.c_kv_stride_s,
                         p.w_uk_stride_h, p.w_uk_stride_r, p.w_uv_stride_h, p.w_uv_stride_r, p.out_stride_b,
                         p.out_stride_s, p.out_stride_h})) {
        return FLARE_UNSUPPORTED_SHAPE;
    }
    if (p.d_rope > 0 && !multiples_of_8({p.q_rope_stride_b, p.q_rope_stride_s, p.q_rope_stride_h, p.k_rope_stride_b,
                                         p.k_rope_stride_s})) {
        return FLARE_UNSUPPORTED_SHAPE;
    }
    const int64_t tiles =
        int64_t{p.batch} * p.heads * ((int64_t{p.seqlen_q} + prefill::kClusterRows - 1) / prefill::kClusterRows);
    if (tiles >= int64_t{1} << 31 || int64_t{p.seqlen_q} + p.seqlen_k >= int64_t{1} << 31) {
        return FLARE_UNSUPPORTED_SHAPE;
    }
    if (!(p.scale > 0.0f)) {
        return FLARE_UNSUPPORTED_FEATURE;
    }
    if (p.block_table != nullptr && p.page_size % prefill::kKeys != 0) {  // a box of 64 keys lies in one page
        return FLARE_UNSUPPORTED_SHAPE;
    }
    return FLARE_OK;
}

const char* mla_prefill_sm90_kernel_name(const MlaPrefillParams&) {
    return "mla_prefill_sm90_up_project_cluster4";
}

size_t mla_prefill_sm90_workspace(const MlaPrefillParams&) {
    return 0;
}

int32_t launch_mla_prefill_sm90(const MlaPrefillParams& p, void*, size_t, cudaStream_t stream) {
    if (p.batch == 0 || p.seqlen_q == 0 || (p.cu_seqlens_q != nullptr && p.total_q == 0)) {
        return FLARE_OK;
    }
    return p.dtype == DType::kBf16 ? dispatch<__nv_bfloat16>(p, stream) : dispatch<__half>(p, stream);
}

}  // namespace flare::mla
