// Multi-head latent attention on the CPU: checks of index arrays, plans, parallel loops.
#include <new>

#include "api/status.h"
#include "cpu.h"
#include "index.h"
#include "kernels.h"
#include "thread_pool.h"

namespace flare::cpu {
namespace {

int64_t divide_up(int64_t a, int64_t b) {
    return (a + b - 1) / b;
}

// A packed sequence can't be longer than the tensor, whatever maximum is given.
template <class Params>
int64_t longest_q(const Params& p) {
    return p.cu_seqlens_q != nullptr && p.total_q < p.seqlen_q ? p.total_q : p.seqlen_q;
}

// Row tiles are as tall as they may be: each tile up-projects all of its keys, 2 d_c (d_nope + d_v) operations per key,
// and the taller the tile the more rows share them. 4 MiB of Q and O at most; Q and O stream once per key tile.
MlaPrefillPlan make_plan(const flare_mla_prefill_params& p) {
    constexpr int64_t kTileBytes = 4 << 20;
    constexpr int64_t kTallest = 2048;
    constexpr int64_t kShortest = 256;
    MlaPrefillPlan plan{};
    plan.params = &p;
    int64_t rows = kTileBytes / (4 * (p.d_nope + p.d_rope + p.d_v)) / 64 * 64;
    rows = rows < kTallest ? rows : kTallest;
    // Shorter ones where there would be too few items to share out. Results don't depend on it (query_tile.h).
    const int64_t enough_items = 4 * static_cast<int64_t>(num_threads());
    while (rows / 2 >= kShortest && p.batch * p.heads * divide_up(longest_q(p), rows) < enough_items) {
        rows = rows / 2 / 64 * 64;
    }
    const int64_t needed = divide_up(longest_q(p) > 0 ? longest_q(p) : 1, 64) * 64;
    plan.row_tile = rows < needed ? rows : needed;
    plan.num_tiles = divide_up(longest_q(p), plan.row_tile);
    plan.key_tile = 96;
    return plan;
}

SplitRule split_rule(const flare_mla_decode_params& p) {
    return SplitRule{p.num_splits, p.deterministic != 0, 256, 128};
}

MlaDecodePlan make_plan(const flare_mla_decode_params& p) {
    MlaDecodePlan plan{};
    const bool sparse = p.indices != nullptr;
    const int64_t rows = (sparse ? 1 : longest_q(p)) * p.heads;
    plan.params = &p;
    plan.row_tile = rows < 128 ? divide_up(rows > 0 ? rows : 1, 64) * 64 : 128;
    plan.num_tiles = divide_up(rows, plan.row_tile);
    plan.key_tile = 48;
    const int64_t units = sparse ? p.batch * p.seqlen_q : p.batch;
    plan.partials.splits = split_rule(p).splits(units * plan.num_tiles, rows, sparse ? p.topk : p.seqlen_k);
    plan.partials.rows = longest_q(p);
    return plan;
}

// The pieces of the decode workspace: absorbed queries, latent outputs, partial outputs, partial lse; each only where
// needed.
struct DecodeWorkspace {
    explicit DecodeWorkspace(const MlaDecodePlan& plan) {
        const flare_mla_decode_params& p = *plan.params;
        const int64_t rows = (p.cu_seqlens_q != nullptr ? p.total_q : p.batch * p.seqlen_q) * p.heads;
        const int64_t partial_rows =
            plan.partials.splits > 1 ? plan.partials.splits * p.batch * plan.partials.rows * p.heads : 0;
        q_latent = p.w_uk != nullptr ? float_bytes(rows, p.d_c) : 0;
        out_latent = p.w_uv != nullptr ? float_bytes(rows, p.d_c) : 0;
        partial_out = float_bytes(partial_rows, p.d_c);
        partial_lse = float_bytes(partial_rows, 1);
    }
    uint64_t q_latent;
    uint64_t out_latent;
    uint64_t partial_out;
    uint64_t partial_lse;
};

int32_t check_indices(const flare_mla_prefill_params& p) {
    const int32_t type = p.index_dtype;
    if (const int32_t status = check_lengths(p)) {
        return status;
    }
    for (int64_t b = 0; p.block_table != nullptr && b < p.batch; ++b) {
        if (sequence_span(p.cu_seqlens_q, p.seqused_q, p.seqlen_q, type, b).length == 0) {
            continue;
        }
        if (const int32_t status = check_pages(p.block_table, type, b, p.block_table_stride_b, p.page_size, p.num_pages,
                                               0, read_index(p.seqused_k, type, b))) {
            return status;
        }
    }
    return FLARE_OK;
}

int32_t check_indices(const flare_mla_decode_params& p) {
    const int32_t type = p.index_dtype;
    if (p.cu_seqlens_q != nullptr) {
        if (const int32_t status =
                check_cumulative("cu_seqlens_q", p.cu_seqlens_q, type, p.batch, p.seqlen_q, p.total_q)) {
            return status;
        }
    }
    if (p.indices != nullptr) {
        for (int64_t b = 0; p.topk_length != nullptr && b < p.batch; ++b) {
            for (int64_t s = 0; s < p.seqlen_q; ++s) {
                const int64_t value =
                    read_index(p.topk_length, type, b * p.topk_length_stride_b + s * p.topk_length_stride_s);
                if (value < 0 || value > p.topk) {
                    return fail(FLARE_ERROR_INDEX, "topk_length[%lld][%lld] is %lld, allowed are 0..%lld (topk)",
                                static_cast<long long>(b), static_cast<long long>(s), static_cast<long long>(value),
                                static_cast<long long>(p.topk));
                }
            }
        }
        return FLARE_OK;
    }
    if (p.seqlens_k != nullptr) {
        if (const int32_t status = check_index_range("seqlens_k", p.seqlens_k, type, p.batch, 0, p.seqlen_k)) {
            return status;
        }
    }
    for (int64_t b = 0; p.block_table != nullptr && b < p.batch; ++b) {
        if (sequence_span(p.cu_seqlens_q, nullptr, p.seqlen_q, type, b).length == 0) {
            continue;
        }
        if (const int32_t status = check_pages(p.block_table, type, b, p.block_table_stride_b, p.page_size, p.num_pages,
                                               0, read_index(p.seqlens_k, type, b))) {
            return status;
        }
    }
    return FLARE_OK;
}

RowGrid dense_grid(float* base, const flare_mla_decode_params& p) {
    return RowGrid{reinterpret_cast<char*>(base), FLARE_FP32, 0, 0, p.heads * p.d_c * 4, p.d_c * 4};
}

RowGrid tensor_grid(const void* base, int32_t dtype, const flare_mla_decode_params& p, int64_t stride_b,
                    int64_t stride_s, int64_t stride_h) {
    const int64_t bytes = dtype_bytes(dtype);
    return RowGrid{static_cast<char*>(const_cast<void*>(base)),
                   dtype,
                   p.cu_seqlens_q != nullptr ? 0 : p.seqlen_q,
                   stride_b * bytes,
                   stride_s * bytes,
                   stride_h * bytes};
}

// The token rows in use: all, or what cu_seqlens_q covers.
void set_row_range(const flare_mla_decode_params& p, HeadProductPlan* product) {
    product->row_begin = p.cu_seqlens_q != nullptr ? read_index(p.cu_seqlens_q, p.index_dtype, 0) : 0;
    product->row_end =
        p.cu_seqlens_q != nullptr ? read_index(p.cu_seqlens_q, p.index_dtype, p.batch) : p.batch * p.seqlen_q;
}

// q_latent = q_nope W_uk^T
HeadProductPlan absorb_plan(const flare_mla_decode_params& p, float* q_latent) {
    HeadProductPlan product{};
    product.a = tensor_grid(p.q, p.dtype, p, p.q_stride_b, p.q_stride_s, p.q_stride_h);
    product.c = dense_grid(q_latent, p);
    product.b = p.w_uk;
    product.b_dtype = p.dtype;
    product.b_transposed = p.weight_layout == FLARE_WEIGHT_CD;
    product.b_stride_h = p.w_uk_stride_h;
    product.b_stride_r = p.w_uk_stride_r;
    product.heads = p.heads;
    product.k = p.d_nope;
    product.n = p.d_c;
    set_row_range(p, &product);
    return product;
}

// out = out_latent W_uv
HeadProductPlan unabsorb_plan(const flare_mla_decode_params& p, float* out_latent) {
    HeadProductPlan product{};
    product.a = dense_grid(out_latent, p);
    product.c = tensor_grid(p.out, p.out_dtype, p, p.out_stride_b, p.out_stride_s, p.out_stride_h);
    product.b = p.w_uv;
    product.b_dtype = p.dtype;
    product.b_transposed = p.weight_layout == FLARE_WEIGHT_DC;
    product.b_stride_h = p.w_uv_stride_h;
    product.b_stride_r = p.w_uv_stride_r;
    product.heads = p.heads;
    product.k = p.d_c;
    product.n = p.d_v;
    set_row_range(p, &product);
    return product;
}

void run_product(const HeadProductPlan& product, int32_t num_threads) {
    const Kernels& kernels = active_kernels();
    auto body = [&](int64_t item, void* scratch) { kernels.head_product_item(product, item, scratch); };
    const double work = static_cast<double>(product.heads * product.k * product.n) *
                        static_cast<double>(product.row_end - product.row_begin + 8);
    parallel_for(product.heads * divide_up(product.n, kernels.panel), choose_threads(num_threads, work),
                 kernels.head_product_scratch(product), body);
}

MergePlan merge_of_splits(const MlaDecodePlan& plan) {
    const flare_mla_decode_params& p = *plan.params;
    MergePlan merge{};
    merge.partial_out = reinterpret_cast<const char*>(plan.partials.out);
    merge.partial_lse = plan.partials.lse;
    merge.dtype = FLARE_FP32;
    merge.num_partials = plan.partials.splits;
    merge.out_stride_h = p.d_c;
    merge.out_stride_s = p.heads * p.d_c;
    merge.out_stride_b = plan.partials.rows * merge.out_stride_s;
    merge.out_stride_p = p.batch * merge.out_stride_b;
    merge.lse_stride_h = 1;
    merge.lse_stride_s = p.heads;
    merge.lse_stride_b = plan.partials.rows * p.heads;
    merge.lse_stride_p = p.batch * merge.lse_stride_b;
    merge.batch = p.batch;
    merge.seqlen = plan.partials.rows;
    merge.heads = p.heads;
    merge.head_dim = p.d_c;
    merge.cu_seqlens = p.cu_seqlens_q;
    merge.index_dtype = p.index_dtype;
    merge.sink = p.sink;
    if (plan.out_latent != nullptr) {
        merge.out = reinterpret_cast<char*>(plan.out_latent);
        merge.out_dtype = FLARE_FP32;
        merge.dst_stride_h = merge.out_stride_h;
        merge.dst_stride_s = merge.out_stride_s;
        merge.dst_stride_b = p.seqlen_q * merge.out_stride_s;
    } else {
        merge.out = static_cast<char*>(p.out);
        merge.out_dtype = p.out_dtype;
        merge.dst_stride_h = p.out_stride_h;
        merge.dst_stride_s = p.out_stride_s;
        merge.dst_stride_b = p.out_stride_b;
    }
    merge.lse = p.lse;
    merge.dst_lse_stride_b = p.lse_stride_b;
    merge.dst_lse_stride_h = p.lse_stride_h;
    return merge;
}

}  // namespace

uint64_t mla_prefill_workspace(const flare_mla_prefill_params&) {
    return 0;
}

int32_t mla_prefill(const flare_mla_prefill_params& params) {
    if (const int32_t status = check_indices(params)) {
        return status;
    }
    const MlaPrefillPlan plan = make_plan(params);
    const Kernels& kernels = active_kernels();
    auto body = [&](int64_t item, void* scratch) { kernels.mla_prefill_item(plan, item, scratch); };
    const double rows = params.cu_seqlens_q != nullptr ? static_cast<double>(params.total_q)
                                                       : static_cast<double>(params.batch * params.seqlen_q);
    const double keys = static_cast<double>(params.seqlen_k);
    const double work =
        static_cast<double>(params.heads) *
        (rows * (keys + 16.0) * static_cast<double>(params.d_nope + params.d_rope + params.d_v) +
         static_cast<double>(params.batch) * keys * static_cast<double>(params.d_c * (params.d_nope + params.d_v)));
    try {
        parallel_for(plan.num_tiles * params.batch * params.heads, choose_threads(params.num_threads, work),
                     kernels.mla_prefill_scratch(plan), body);
    } catch (const std::bad_alloc&) {
        return fail(FLARE_ERROR_MEMORY, "mla_prefill: no memory for a thread's scratch");
    }
    return FLARE_OK;
}

uint64_t mla_decode_workspace(const flare_mla_decode_params& params) {
    const DecodeWorkspace sizes(make_plan(params));
    const int64_t rows = split_rule(params).partial_rows(params.batch * longest_q(params) * params.heads,
                                                         params.indices != nullptr ? params.topk : params.seqlen_k);
    return sizes.q_latent + sizes.out_latent + float_bytes(rows, params.d_c) + float_bytes(rows, 1);
}

int32_t mla_decode(const flare_mla_decode_params& params) {
    if (const int32_t status = check_indices(params)) {
        return status;
    }
    MlaDecodePlan plan = make_plan(params);
    const DecodeWorkspace sizes(plan);
    char* next = static_cast<char*>(params.workspace);
    const auto take = [&](uint64_t bytes) {
        float* piece = bytes != 0 ? reinterpret_cast<float*>(next) : nullptr;
        next += bytes;
        return piece;
    };
    float* q_latent = take(sizes.q_latent);
    plan.q_latent = q_latent;
    plan.out_latent = take(sizes.out_latent);
    plan.partials.out = take(sizes.partial_out);
    plan.partials.lse = take(sizes.partial_lse);

    const Kernels& kernels = active_kernels();
    auto body = [&](int64_t item, void* scratch) { kernels.mla_decode_item(plan, item, scratch); };
    const int64_t units = params.indices != nullptr ? params.batch * params.seqlen_q : params.batch;
    const int64_t keys = params.indices != nullptr ? params.topk : params.seqlen_k;
    const double work = static_cast<double>(params.batch * plan.partials.rows) * static_cast<double>(params.heads) *
                        (static_cast<double>(keys) + 16.0) * static_cast<double>(2 * params.d_c + params.d_rope);
    try {
        if (q_latent != nullptr) {
            run_product(absorb_plan(params, q_latent), params.num_threads);
        }
        parallel_for(units * plan.num_tiles * plan.partials.splits, choose_threads(params.num_threads, work),
                     kernels.mla_decode_scratch(plan), body);
        if (plan.partials.splits > 1) {
            run_merge(merge_of_splits(plan), params.num_threads);
        }
        if (plan.out_latent != nullptr) {
            run_product(unabsorb_plan(params, plan.out_latent), params.num_threads);
        }
    } catch (const std::bad_alloc&) {
        return fail(FLARE_ERROR_MEMORY, "mla_decode: no memory for a thread's scratch");
    }
    return FLARE_OK;
}

}  // namespace flare::cpu
