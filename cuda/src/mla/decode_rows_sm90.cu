// Launcher and instances of decode_rows_sm90.cuh.
#include "decode_rows_sm90.h"

#include <cuda_runtime.h>

#include <algorithm>

#include "absorbed_sm80.h"
#include "decode_rows_sm90.cuh"
#include "flare.h"

namespace flare::mla {
namespace {

struct Plan {
    int num_requests;
    int rows;  // of the longest request
    int tall;  // 16 rows each
    int num_tiles;
    int num_parts;
    size_t q_latent_offset;
    size_t out_latent_offset;
    size_t o_part_offset;
    size_t lse_part_offset;
    size_t bytes;
};

size_t align_up(size_t x) {
    return (x + 255) / 256 * 256;
}

Plan make_plan(const MlaDecodeParams& p) {
    Plan plan;
    const bool sparse = p.indices != nullptr;  // every query token has keys of its own
    plan.num_requests = sparse ? p.batch * p.seqlen_q : p.batch;
    plan.rows = sparse ? p.heads : p.seqlen_q * p.heads;
    plan.tall = plan.rows <= 16 ? 1 : plan.rows <= 32 || p.dtype != DType::kBf16 ? 2 : 4;  // fp16 would spill
    const int tile_rows = 16 * plan.tall;
    plan.num_tiles = std::max(1, (plan.rows + tile_rows - 1) / tile_rows);
    plan.num_parts = std::min(kMaxParts, std::max(1, p.sm_count / plan.num_tiles));
    const int64_t tokens = p.cu_seqlens_q != nullptr ? p.total_q : int64_t{p.batch} * p.seqlen_q;
    const size_t latent = align_up(2 * static_cast<size_t>(tokens) * p.heads * p.d_c);
    // For as many tiles as run at a time, rounded up, so that fewer rows never need more.
    const size_t part_rows = size_t{2} * std::max(p.sm_count, plan.num_tiles) * tile_rows;
    plan.q_latent_offset = align_up(std::max(p.sm_count, plan.num_tiles) * sizeof(uint64_t));  // the meetings lie before
    plan.out_latent_offset = plan.q_latent_offset + (p.w_uk != nullptr ? latent : 0);
    plan.o_part_offset = plan.out_latent_offset + (p.w_uv != nullptr ? latent : 0);
    plan.lse_part_offset = plan.o_part_offset + part_rows * rows::kCols * 2;
    plan.bytes = align_up(plan.lse_part_offset + part_rows * sizeof(float));
    return plan;
}

template <typename T, int kTall>
int32_t launch(const MlaDecodeParams& p, const AbsorbedArgs& a, const Plan& plan, uint8_t* workspace, cudaStream_t stream) {
    RowsArgs args{};
    const bool sparse = p.indices != nullptr;
    args.schedule = make_schedule(p, plan.num_requests, plan.num_parts);
    args.row_map = make_row_map(p);
    args.q = a.q;
    args.q_stride_b = a.q_stride_b;
    args.q_stride_s = a.q_stride_s;
    args.q_stride_h = a.q_stride_h;
    args.q_is_fp16 = p.w_uk != nullptr;
    args.q_rope = a.q_rope;
    args.q_rope_stride_b = a.q_rope_stride_b;
    args.q_rope_stride_s = a.q_rope_stride_s;
    args.q_rope_stride_h = a.q_rope_stride_h;
    args.out = a.out;
    args.out_stride_b = a.out_stride_b;
    args.out_stride_s = a.out_stride_s;
    args.out_stride_h = a.out_stride_h;
    args.lse = p.lse;
    args.lse_stride_b = p.lse_stride_b;
    args.lse_stride_h = p.lse_stride_h;
    args.scale_log2 = a.scale_log2;
    args.causal = !sparse && a.causal != 0;
    args.sink = p.sink;
    args.rows = plan.rows;
    args.num_tiles = plan.num_tiles;
    args.d_c = p.d_c;
    const bool paged = p.block_table != nullptr || sparse;
    args.kv = a.latent;
    args.kv_policy = plan.num_tiles > 1 ? ptx::kL2EvictNormal : keys_policy(p);  // row tiles read the same keys
    args.kv_stride_b = a.latent_stride_b;
    args.kv_stride_s = a.latent_stride_s;
    args.block_table = p.block_table;
    args.block_table_stride_b = p.block_table_stride_b;
    args.indices = p.indices;
    args.indices_stride_b = p.indices_stride_b;
    args.indices_stride_s = p.indices_stride_s;
    args.index_is_64 = p.index_is_64;
    args.page_size = paged ? p.page_size : p.seqlen_k;
    args.by_page = pipe::FastDivisor::make(static_cast<uint32_t>(std::max(1, args.page_size)));
    args.num_pages = paged ? p.num_pages : p.batch;
    args.whole_tiles = !sparse && args.kv_stride_s == rows::kRowBytes && (!paged || p.page_size % rows::kKeys == 0);
    args.meetings = reinterpret_cast<uint64_t*>(workspace);
    args.meeting_tag = next_meeting_tag();
    args.o_part = workspace + plan.o_part_offset;
    args.lse_part = reinterpret_cast<float*>(workspace + plan.lse_part_offset);

    const auto kernel = mla_decode_rows_sm90_kernel<T, kTall>;
    constexpr int kSmemBytes = sizeof(rows::SharedStorage<kTall>);
    if (cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kSmemBytes) != cudaSuccess) {
        return FLARE_ERROR_LAUNCH;
    }
    kernel<<<plan.num_parts * plan.num_tiles, rows::Shape<kTall>::kThreads, kSmemBytes, stream>>>(args);
    return cudaPeekAtLastError() == cudaSuccess ? FLARE_OK : FLARE_ERROR_LAUNCH;
}

template <typename T>
int32_t launch(const MlaDecodeParams& p, const AbsorbedArgs& a, const Plan& plan, uint8_t* workspace, cudaStream_t stream) {
    switch (plan.tall) {
        case 1:
            return launch<T, 1>(p, a, plan, workspace, stream);
        case 2:
            return launch<T, 2>(p, a, plan, workspace, stream);
        default:
            return launch<__nv_bfloat16, 4>(p, a, plan, workspace, stream);
    }
}

}  // namespace

int32_t select_mla_decode_rows_sm90(const MlaDecodeParams& p) {
    if (p.kv_dtype != DType::kRow656 || (p.w_uv == nullptr && p.out_dtype != p.dtype)) {
        return FLARE_UNSUPPORTED_DTYPE;
    }
    // Bulk copies take 16-byte steps.
    const bool strides = p.kv_stride_b % 16 == 0 && p.kv_stride_s % 16 == 0;
    return strides && absorbed_mma_takes(absorbed_args(p)) ? FLARE_OK : FLARE_UNSUPPORTED_SHAPE;
}

const char* mla_decode_rows_sm90_kernel_name(const MlaDecodeParams& p) {
    const int tall = make_plan(p).tall;
    return tall == 1   ? "mla_decode_sm90_row656_r16"
           : tall == 2 ? "mla_decode_sm90_row656_r32"
                       : "mla_decode_sm90_row656_r64";
}

size_t mla_decode_rows_sm90_workspace(const MlaDecodeParams& p) {
    return make_plan(p).bytes;
}

int32_t launch_mla_decode_rows_sm90(const MlaDecodeParams& p, void* workspace, size_t bytes, cudaStream_t stream) {
    if (p.batch == 0 || p.seqlen_q == 0 || (p.cu_seqlens_q != nullptr && p.total_q == 0)) {
        return FLARE_OK;
    }
    const Plan plan = make_plan(p);
    if (bytes < plan.bytes) {
        return FLARE_ERROR_WORKSPACE;
    }
    uint8_t* const base = static_cast<uint8_t*>(workspace);
    AbsorbedArgs a = absorbed_args(p);
    const AbsorbedArgs outer = a;
    if (p.w_uk != nullptr) {
        void* const q_latent = base + plan.q_latent_offset;
        if (const int32_t status = launch_absorb(outer, q_latent, stream)) {
            return status;
        }
        a.q = q_latent;
        a.q_stride_h = a.d_c;
        a.q_stride_s = int64_t{a.heads} * a.d_c;
        a.q_stride_b = a.seqlen_q * a.q_stride_s;
    }
    if (p.w_uv != nullptr) {
        a.out = base + plan.out_latent_offset;
        a.out_stride_h = a.d_c;
        a.out_stride_s = int64_t{a.heads} * a.d_c;
        a.out_stride_b = a.seqlen_q * a.out_stride_s;
    }
    const int32_t status = p.dtype == DType::kBf16 ? launch<__nv_bfloat16>(p, a, plan, base, stream)
                                                   : launch<__half>(p, a, plan, base, stream);
    if (status != FLARE_OK || p.w_uv == nullptr) {
        return status;
    }
    return launch_unabsorb(outer, a.out, stream);
}

}  // namespace flare::mla
