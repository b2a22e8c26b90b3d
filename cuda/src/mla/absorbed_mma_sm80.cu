// Launcher of the portable absorbed kernel: [q W_uk^T], attention, [merge of key splits], [L W_uv]; the parts in brackets only
// where asked for or needed.
#include <cuda_runtime.h>

#include <algorithm>

#include "absorbed_combine_sm80.cuh"
#include "absorbed_mma_sm80.cuh"
#include "flare.h"
#include "head_product_sm80.h"

namespace flare::mla {
namespace {

using absorbed::kKeys;

constexpr int kMinSplitTiles = 8;  // key tiles of an automatic split at least
constexpr int kMaxSplits = 256;    // as the API allows
constexpr int kMaxWaves = 4;       // automatic splits make no more blocks than so many times what the device runs at once
constexpr int kTallRows = 32;

struct Plan {
    int rows_per_tile;
    int64_t units;
    int64_t rows;  // of a unit
    int num_tiles;
    int num_splits;
    size_t q_latent;  // bytes each
    size_t out_latent;
    size_t o_part;
    size_t lse_part;
};

size_t align_up(size_t x) {
    return (x + 255) / 256 * 256;
}

// More splits until the last wave is full enough.
int automatic_splits(int64_t blocks, int64_t slots, int max_splits) {
    const auto efficiency = [&](int splits) {
        const int64_t all = blocks * splits;
        return static_cast<double>(all) / static_cast<double>((all + slots - 1) / slots * slots);
    };
    double best = 0.0;
    for (int s = 1; s <= max_splits && (s == 1 || blocks * s <= kMaxWaves * slots); ++s) {
        best = std::max(best, efficiency(s));
    }
    int splits = 1;
    while (efficiency(splits) < 0.9 * best) {
        ++splits;
    }
    return splits;
}

Plan make_plan(const AbsorbedArgs& a) {
    Plan plan{};
    const bool sparse = a.indices != nullptr;
    plan.units = sparse ? int64_t{a.batch} * a.seqlen_q : a.batch;
    plan.rows = sparse ? a.heads : int64_t{a.seqlen_q} * a.heads;
    plan.rows_per_tile = plan.rows <= 16 ? 16 : kTallRows;
    plan.num_tiles = static_cast<int>((plan.rows + plan.rows_per_tile - 1) / plan.rows_per_tile);
    const int64_t blocks = std::max<int64_t>(1, plan.units * plan.num_tiles);
    const int64_t slots = int64_t{a.sm_count} * (plan.rows_per_tile == 16 ? 2 : 1);
    const int key_tiles = ((sparse ? a.topk : a.seqlen_k) + kKeys - 1) / kKeys;
    const int max_splits = std::min(kMaxSplits, std::max(1, key_tiles / kMinSplitTiles));
    size_t part_rows = 0;
    if (a.num_splits > 0 || a.deterministic != 0) {
        plan.num_splits = std::max(1, a.num_splits);
        part_rows = plan.num_splits > 1 ? plan.units * plan.rows * plan.num_splits : 0;
    } else {
        plan.num_splits = automatic_splits(blocks, slots, max_splits);
        const int64_t most = int64_t{kMaxWaves} * a.sm_count * kTallRows;
        part_rows = max_splits > 1 ? std::min(most, plan.units * plan.rows * max_splits) : 0;
    }
    const int64_t tokens = a.cu_seqlens_q != nullptr ? a.total_q : int64_t{a.batch} * a.seqlen_q;
    const size_t latent = align_up(2 * static_cast<size_t>(tokens) * a.heads * a.d_c);
    plan.q_latent = a.w_uk != nullptr ? latent : 0;
    plan.out_latent = a.w_uv != nullptr ? latent : 0;
    plan.o_part = align_up(part_rows * a.d_c * sizeof(float));
    plan.lse_part = align_up(part_rows * sizeof(float));
    return plan;
}

template <typename T, int kRows, bool kRow656>
int32_t launch(const AbsorbedArgs& a, const AbsorbedTiles& tiles, unsigned grid, cudaStream_t stream) {
    const auto kernel = mla_absorbed_sm80_kernel<T, kRows, kRow656>;
    constexpr int kSmemBytes = sizeof(absorbed::SharedStorage<kRows, kRow656>);
    if (cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kSmemBytes) != cudaSuccess) {
        return FLARE_ERROR_LAUNCH;
    }
    kernel<<<grid, absorbed::kThreads, kSmemBytes, stream>>>(a, tiles);
    return cudaPeekAtLastError() == cudaSuccess ? FLARE_OK : FLARE_ERROR_LAUNCH;
}

template <typename T>
int32_t launch(const AbsorbedArgs& a, const AbsorbedTiles& tiles, int rows_per_tile, unsigned grid, cudaStream_t stream) {
    return rows_per_tile == 16 ? launch<T, 16, false>(a, tiles, grid, stream)
                               : launch<T, kTallRows, false>(a, tiles, grid, stream);
}

int32_t launch_attention(const AbsorbedArgs& a, const AbsorbedTiles& tiles, int rows_per_tile, unsigned grid,
                         cudaStream_t stream) {
    if (a.kv_dtype == DType::kRow656) {
        return rows_per_tile == 16 ? launch<__half, 16, true>(a, tiles, grid, stream)
                                   : launch<__half, kTallRows, true>(a, tiles, grid, stream);
    }
    return a.dtype == DType::kBf16 ? launch<__nv_bfloat16>(a, tiles, rows_per_tile, grid, stream)
                                   : launch<__half>(a, tiles, rows_per_tile, grid, stream);
}

bool multiple_of_8(std::initializer_list<int64_t> sizes) {
    return std::all_of(sizes.begin(), sizes.end(), [](int64_t x) { return x % 8 == 0; });
}

}  // namespace

// q W_uk^T into the workspace, as fp16: scores are formed from it.
int32_t launch_absorb(const AbsorbedArgs& a, void* q_latent, cudaStream_t stream) {
    HeadProduct p{};
    p.a = a.q;
    p.a_stride_b = a.q_stride_b;
    p.a_stride_s = a.q_stride_s;
    p.a_stride_h = a.q_stride_h;
    p.b = a.w_uk;
    p.b_stride_h = a.w_uk_stride_h;
    p.b_stride_r = a.w_uk_stride_r;
    p.b_is_nk = a.weight_layout == WeightLayout::kCD;
    p.c = q_latent;
    p.c_stride_h = a.d_c;
    p.c_stride_s = int64_t{a.heads} * a.d_c;
    p.c_stride_b = a.seqlen_q * p.c_stride_s;
    p.dtype = a.dtype;
    p.c_dtype = DType::kFp16;
    p.heads = a.heads;
    p.k = a.d_nope;
    p.n = a.d_c;
    p.batch = a.batch;
    p.seqlen_q = a.seqlen_q;
    p.index_is_64 = a.index_is_64;
    p.cu_seqlens_q = a.cu_seqlens_q;
    p.seqused_q = a.seqused_q;
    p.total_q = a.total_q;
    return launch_head_product_sm80(p, stream);
}

// out = L W_uv.
int32_t launch_unabsorb(const AbsorbedArgs& a, const void* out_latent, cudaStream_t stream) {
    HeadProduct p{};
    p.a = out_latent;
    p.a_stride_h = a.d_c;
    p.a_stride_s = int64_t{a.heads} * a.d_c;
    p.a_stride_b = a.seqlen_q * p.a_stride_s;
    p.b = a.w_uv;
    p.b_stride_h = a.w_uv_stride_h;
    p.b_stride_r = a.w_uv_stride_r;
    p.b_is_nk = a.weight_layout == WeightLayout::kDC;
    p.c = a.out;
    p.c_stride_b = a.out_stride_b;
    p.c_stride_s = a.out_stride_s;
    p.c_stride_h = a.out_stride_h;
    p.dtype = a.dtype;
    p.c_dtype = a.out_dtype;
    p.heads = a.heads;
    p.k = a.d_c;
    p.n = a.d_v;
    p.batch = a.batch;
    p.seqlen_q = a.seqlen_q;
    p.index_is_64 = a.index_is_64;
    p.cu_seqlens_q = a.cu_seqlens_q;
    p.seqused_q = a.seqused_q;
    p.total_q = a.total_q;
    return launch_head_product_sm80(p, stream);
}

bool absorbed_mma_takes(const AbsorbedArgs& a) {
    if ((a.dtype != DType::kBf16 && a.dtype != DType::kFp16) || a.d_c > absorbed::kLatentCols || a.d_rope > 64) {
        return false;
    }
    const bool sizes = multiple_of_8({a.d_c, a.d_rope, a.w_uk != nullptr ? a.d_nope : 0, a.w_uv != nullptr ? a.d_v : 0});
    const bool strides =
        multiple_of_8({a.q_stride_b, a.q_stride_s, a.q_stride_h, a.q_rope_stride_b, a.q_rope_stride_s, a.q_rope_stride_h,
                       a.out_stride_b, a.out_stride_s, a.out_stride_h}) &&
        multiple_of_8({a.latent_stride_b / 2, a.latent_stride_s / 2, a.rope_stride_b / 2, a.rope_stride_s / 2}) &&
        (a.w_uk == nullptr || multiple_of_8({a.w_uk_stride_h, a.w_uk_stride_r})) &&
        (a.w_uv == nullptr || multiple_of_8({a.w_uv_stride_h, a.w_uv_stride_r}));
    return sizes && strides;
}

const char* absorbed_mma_kernel_name(const AbsorbedArgs& a, bool prefill) {
    const Plan plan = make_plan(a);
    const bool few = plan.rows_per_tile == 16;
    if (prefill) {
        return few ? "mla_prefill_sm80_absorbed_r16" : "mla_prefill_sm80_absorbed_r32";
    }
    return few ? "mla_decode_sm80_r16" : "mla_decode_sm80_r32";
}

size_t absorbed_mma_workspace(const AbsorbedArgs& a) {
    const Plan plan = make_plan(a);
    return plan.q_latent + plan.out_latent + plan.o_part + plan.lse_part;
}

int32_t launch_absorbed_mma(const AbsorbedArgs& args, void* workspace, size_t bytes, cudaStream_t stream) {
    if (args.batch == 0 || args.seqlen_q == 0) {
        return FLARE_OK;
    }
    AbsorbedArgs a = args;
    const Plan plan = make_plan(a);
    const int64_t grid = plan.units * plan.num_tiles * plan.num_splits;
    if (grid > INT32_MAX) {
        return FLARE_UNSUPPORTED_SHAPE;
    }
    if (bytes < plan.q_latent + plan.out_latent + plan.o_part + plan.lse_part) {
        return FLARE_ERROR_WORKSPACE;
    }
    uint8_t* next = static_cast<uint8_t*>(workspace);
    const auto take = [&](size_t size) {
        uint8_t* const piece = next;
        next += size;
        return piece;
    };
    void* const q_latent = take(plan.q_latent);
    void* const out_latent = take(plan.out_latent);
    AbsorbedTiles tiles{};
    tiles.o_part = reinterpret_cast<float*>(take(plan.o_part));
    tiles.lse_part = reinterpret_cast<float*>(take(plan.lse_part));
    tiles.num_splits = plan.num_splits;
    tiles.num_tiles = plan.num_tiles;
    tiles.rows_padded = static_cast<int32_t>(plan.rows);
    tiles.units = static_cast<int32_t>(plan.units);
    tiles.out = a.out;
    tiles.out_dtype = a.out_dtype;
    tiles.out_stride_b = a.out_stride_b;
    tiles.out_stride_s = a.out_stride_s;
    tiles.out_stride_h = a.out_stride_h;
    tiles.q_dtype = tiles.q_rope_dtype = a.dtype;
    if (a.w_uk != nullptr) {
        tiles.q_dtype = DType::kFp16;
        if (const int32_t status = launch_absorb(a, q_latent, stream)) {
            return status;
        }
        a.q = q_latent;
        a.q_stride_h = a.d_c;
        a.q_stride_s = int64_t{a.heads} * a.d_c;
        a.q_stride_b = a.seqlen_q * a.q_stride_s;
    }
    if (a.w_uv != nullptr) {
        tiles.out = out_latent;
        tiles.out_dtype = a.dtype;
        tiles.out_stride_h = a.d_c;
        tiles.out_stride_s = int64_t{a.heads} * a.d_c;
        tiles.out_stride_b = a.seqlen_q * tiles.out_stride_s;
    }
    if (const int32_t status = launch_attention(a, tiles, plan.rows_per_tile, static_cast<unsigned>(grid), stream)) {
        return status;
    }
    if (plan.num_splits > 1) {
        const int64_t rows = plan.units * plan.rows;  // below 2^31: the API sees to it
        mla_absorbed_combine_kernel<<<static_cast<unsigned>(rows), absorbed::kCombineThreads, 0, stream>>>(a, tiles);
        if (cudaPeekAtLastError() != cudaSuccess) {
            return FLARE_ERROR_LAUNCH;
        }
    }
    return a.w_uv != nullptr ? launch_unabsorb(a, out_latent, stream) : FLARE_OK;
}

}  // namespace flare::mla
