// Attention forward and the merge of partial results on the CPU: checks of index arrays, the plan, the parallel loops.
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
int64_t longest_q(const flare_attention_params& p) {
    return p.cu_seqlens_q != nullptr && p.total_q < p.seqlen_q ? p.total_q : p.seqlen_q;
}

SplitRule split_rule(const flare_attention_params& p) {
    return SplitRule{p.num_splits, p.deterministic != 0, 64, 64};
}

// Tiles such that Q and O of a row tile, and K and V of a key tile, stay in a core's second-level cache.
AttentionPlan make_plan(const flare_attention_params& p) {
    AttentionPlan plan{};
    const int64_t width = p.head_dim_qk + p.head_dim_v;
    const int64_t rows = longest_q(p) * (p.heads_q / p.heads_kv);
    const int64_t largest_tile = width <= 512 ? 256 : 128;
    plan.params = &p;
    plan.row_tile = rows < largest_tile ? divide_up(rows > 0 ? rows : 1, 64) * 64 : largest_tile;
    plan.num_tiles = divide_up(rows, plan.row_tile);
    plan.key_tile = width <= 512 ? 96 : 48;
    plan.partials.splits = split_rule(p).splits(p.batch * p.heads_kv * plan.num_tiles, rows, p.seqlen_k);
    plan.partials.rows = longest_q(p);
    return plan;
}

int32_t check_indices(const flare_attention_params& p) {
    const int32_t type = p.index_dtype;
    if (const int32_t status = check_lengths(p)) {
        return status;
    }
    if (p.block_table == nullptr) {
        return FLARE_OK;
    }
    for (int64_t b = 0; b < p.batch; ++b) {
        const int64_t sq = sequence_span(p.cu_seqlens_q, p.seqused_q, p.seqlen_q, type, b).length;
        const int64_t sk = sequence_span(nullptr, p.seqused_k, p.seqlen_k, type, b).length;
        if (sq == 0) {
            continue;
        }
        // Pages left of the first row's window are never looked at: they may have been freed. The last row sees the
        // last key whatever the window (window_right >= 0).
        const int64_t low = p.window_left < 0 || sk - sq < p.window_left ? 0 : sk - sq - p.window_left;
        if (const int32_t status =
                check_pages(p.block_table, type, b, p.block_table_stride_b, p.page_size, p.num_pages, low, sk)) {
            return status;
        }
    }
    return FLARE_OK;
}

MergePlan merge_of_splits(const AttentionPlan& plan) {
    const flare_attention_params& p = *plan.params;
    const Partials& partials = plan.partials;
    MergePlan merge{};
    merge.partial_out = reinterpret_cast<const char*>(partials.out);
    merge.partial_lse = partials.lse;
    merge.dtype = FLARE_FP32;
    merge.num_partials = partials.splits;
    merge.out_stride_h = p.head_dim_v;
    merge.out_stride_s = p.heads_q * p.head_dim_v;
    merge.out_stride_b = partials.rows * merge.out_stride_s;
    merge.out_stride_p = p.batch * merge.out_stride_b;
    merge.lse_stride_h = 1;
    merge.lse_stride_s = p.heads_q;
    merge.lse_stride_b = partials.rows * p.heads_q;
    merge.lse_stride_p = p.batch * merge.lse_stride_b;
    merge.batch = p.batch;
    merge.seqlen = partials.rows;
    merge.heads = p.heads_q;
    merge.head_dim = p.head_dim_v;
    merge.cu_seqlens = p.cu_seqlens_q;
    merge.seqused = p.seqused_q;
    merge.index_dtype = p.index_dtype;
    merge.sink = p.sink;
    merge.out = static_cast<char*>(p.out);
    merge.out_dtype = p.out_dtype;
    merge.dst_stride_b = p.out_stride_b;
    merge.dst_stride_s = p.out_stride_s;
    merge.dst_stride_h = p.out_stride_h;
    merge.lse = p.lse;
    merge.dst_lse_stride_b = p.lse_stride_b;
    merge.dst_lse_stride_h = p.lse_stride_h;
    return merge;
}

}  // namespace

void run_merge(const MergePlan& plan, int32_t num_threads) {
    const Kernels& kernels = active_kernels();
    auto body = [&](int64_t item, void* scratch) { kernels.merge_item(plan, item, scratch); };
    const double work = static_cast<double>(plan.num_partials) * static_cast<double>(plan.batch * plan.seqlen) *
                        static_cast<double>(plan.heads * plan.head_dim);
    parallel_for(plan.batch * divide_up(plan.seqlen, kTokensPerItem), choose_threads(num_threads, work),
                 kernels.merge_scratch(plan), body);
}

// Partial outputs, then partial lse.
uint64_t attention_workspace(const flare_attention_params& p) {
    const int64_t rows = split_rule(p).partial_rows(p.batch * longest_q(p) * p.heads_q, p.seqlen_k);
    return float_bytes(rows, p.head_dim_v) + float_bytes(rows, 1);
}

int32_t attention_forward(const flare_attention_params& params) {
    if (const int32_t status = check_indices(params)) {
        return status;
    }
    AttentionPlan plan = make_plan(params);
    const bool split = plan.partials.splits > 1;
    if (split) {
        char* workspace = static_cast<char*>(params.workspace);
        plan.partials.out = reinterpret_cast<float*>(workspace);
        plan.partials.lse = reinterpret_cast<float*>(
            workspace +
            float_bytes(plan.partials.splits * params.batch * plan.partials.rows * params.heads_q, params.head_dim_v));
    }
    const Kernels& kernels = active_kernels();
    auto body = [&](int64_t item, void* scratch) { kernels.attention_item(plan, item, scratch); };
    const double work = static_cast<double>(params.batch * plan.partials.rows) * static_cast<double>(params.heads_q) *
                        (static_cast<double>(params.seqlen_k) + 16.0) *
                        static_cast<double>(params.head_dim_qk + params.head_dim_v);
    try {
        parallel_for(plan.num_tiles * params.batch * params.heads_kv * plan.partials.splits,
                     choose_threads(params.num_threads, work), kernels.attention_scratch(plan), body);
        if (split) {
            run_merge(merge_of_splits(plan), params.num_threads);
        }
    } catch (const std::bad_alloc&) {
        return fail(FLARE_ERROR_MEMORY, "attention_forward: no memory for a thread's scratch");
    }
    return FLARE_OK;
}

int32_t attention_merge(const flare_attention_merge_params& p) {
    MergePlan plan{};
    plan.partial_out = static_cast<const char*>(p.partial_out);
    plan.partial_lse = p.partial_lse;
    plan.dtype = p.dtype;
    plan.num_partials = p.num_partials;
    plan.out_stride_p = p.partial_out_stride_p;
    plan.out_stride_b = p.partial_out_stride_b;
    plan.out_stride_s = p.partial_out_stride_s;
    plan.out_stride_h = p.partial_out_stride_h;
    plan.lse_stride_p = p.partial_lse_stride_p;
    plan.lse_stride_b = p.partial_lse_stride_b;
    plan.lse_stride_s = 1;
    plan.lse_stride_h = p.partial_lse_stride_h;
    plan.batch = p.batch;
    plan.seqlen = p.seqlen;
    plan.heads = p.heads;
    plan.head_dim = p.head_dim;
    plan.out = static_cast<char*>(p.out);
    plan.out_dtype = p.out_dtype;
    plan.dst_stride_b = p.out_stride_b;
    plan.dst_stride_s = p.out_stride_s;
    plan.dst_stride_h = p.out_stride_h;
    plan.lse = p.lse;
    plan.dst_lse_stride_b = p.lse_stride_b;
    plan.dst_lse_stride_h = p.lse_stride_h;
    try {
        run_merge(plan, p.num_threads);
    } catch (const std::bad_alloc&) {
        return fail(FLARE_ERROR_MEMORY, "attention_merge: no memory for a thread's scratch");
    }
    return FLARE_OK;
}

}  // namespace flare::cpu
