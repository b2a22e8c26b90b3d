// What the operations' planning code (attention.cpp, mla.cpp, ...) and the per-instruction-set kernels agree on: plain
// plans, and one table of functions for each instruction set. A kernel function computes one item of a plan, that is
// the body of a parallel_for; scratch sizes come from the same code that carves the scratch.
#pragma once

#include <cstddef>
#include <cstdint>

#include "flare.h"
#include "kda_task.h"

namespace flare::cpu {

// Partial results of key splits: out [splits][batch][rows][heads][d] fp32, normalised; lse
// [splits][batch][rows][heads].
struct Partials {
    int64_t splits;  // 1: not split, nothing stored here
    int64_t rows;    // of the longest sequence
    float* out;
    float* lse;
};

struct AttentionPlan {
    const flare_attention_params* params;
    int64_t row_tile;   // query rows (tokens times heads of the group) of one item; a multiple of 64
    int64_t num_tiles;  // items of the longest sequence, for one K/V head
    int64_t key_tile;
    Partials partials;
};

struct MlaPrefillPlan {
    const flare_mla_prefill_params* params;
    int64_t row_tile;
    int64_t num_tiles;
    int64_t key_tile;
};

struct MlaDecodePlan {
    const flare_mla_decode_params* params;
    int64_t row_tile;
    int64_t num_tiles;  // per sequence; sparse: per query token
    int64_t key_tile;
    Partials partials;
    const float* q_latent;  // with w_uk: [rows][heads][d_c], the absorbed queries
    float* out_latent;      // with w_uv: [rows][heads][d_c], before W_uv
};

// Rows of a [B, S, H, D] or [total, H, D] tensor, strides in bytes.
struct RowGrid {
    char* base;
    int32_t dtype;
    int64_t seqlen;  // rows of one sequence
    int64_t stride_b, stride_s, stride_h;
};

// c[row, h, 0..n) = a[row, h, 0..k) B[h], for the rows [row_begin, row_end). B[h] is k x n; its stored rows are k, or n
// when transposed. An item is one head and one panel of columns.
struct HeadProductPlan {
    RowGrid a;
    RowGrid c;
    const void* b;
    int32_t b_dtype;
    bool b_transposed;
    int64_t b_stride_h, b_stride_r;  // elements
    int64_t heads, k, n;
    int64_t row_begin, row_end;
};

struct MergePlan {
    const char* partial_out;
    const float* partial_lse;
    int32_t dtype;  // of partial_out
    int64_t num_partials;
    int64_t out_stride_p, out_stride_b, out_stride_s, out_stride_h;  // elements
    int64_t lse_stride_p, lse_stride_b, lse_stride_s, lse_stride_h;
    int64_t batch, seqlen, heads, head_dim;
    // Sequences that are packed or partly used; all may be nullptr.
    const void* cu_seqlens;
    const void* seqused;
    int32_t index_dtype;
    const float* sink;
    char* out;
    int32_t out_dtype;
    int64_t dst_stride_b, dst_stride_s, dst_stride_h;
    float* lse;  // or nullptr
    int64_t dst_lse_stride_b, dst_lse_stride_h;
};

// Rows of tokens that one item of a merge or of an append covers.
constexpr int64_t kTokensPerItem = 16;

struct Kernels {
    int64_t panel;  // columns of one item of a head product

    size_t (*attention_scratch)(const AttentionPlan& plan);
    void (*attention_item)(const AttentionPlan& plan, int64_t item, void* scratch);

    size_t (*mla_prefill_scratch)(const MlaPrefillPlan& plan);
    void (*mla_prefill_item)(const MlaPrefillPlan& plan, int64_t item, void* scratch);

    size_t (*mla_decode_scratch)(const MlaDecodePlan& plan);
    void (*mla_decode_item)(const MlaDecodePlan& plan, int64_t item, void* scratch);

    size_t (*head_product_scratch)(const HeadProductPlan& plan);
    void (*head_product_item)(const HeadProductPlan& plan, int64_t item, void* scratch);

    size_t (*merge_scratch)(const MergePlan& plan);
    void (*merge_item)(const MergePlan& plan, int64_t item, void* scratch);

    int64_t kda_panel;  // value columns that a KDA item can't divide
    size_t (*kda_scratch)(int64_t head_dim_k, int64_t panels);
    void (*kda_forward_item)(const KdaTask& task, void* scratch);
    void (*kda_decode_item)(const KdaTask& task, void* scratch);

    // dst[i * dst_stride] = convert(src[i * src_stride] * scale), i in [0, count).
    void (*cast_line)(const void* src, int32_t src_dtype, int64_t src_stride, void* dst, int32_t dst_dtype,
                      int64_t dst_stride, int64_t count, float scale);

    // dst[0, n) = convert(src[0, n)).
    void (*load_row)(const void* src, int32_t dtype, int64_t n, float* dst);
    void (*store_row)(const float* src, int32_t dtype, int64_t n, void* dst);
};

namespace generic {
const Kernels& kernels();
}
namespace avx2 {
const Kernels& kernels();
}
namespace avx512 {
const Kernels& kernels();
}

// The table for active_isa().
const Kernels& active_kernels();

// When and how far the keys of a row tile are split over threads.
struct SplitRule {
    int32_t requested;     // num_splits: 0 = automatic
    bool deterministic;    // automatic means none then
    int64_t largest_rows;  // automatic: sequences with more query rows than this aren't split; their tiles keep threads
                           // busy
    int64_t tile_rows;     // rows of a tile in such a sequence

    // Depends on sizes only, never on the thread count. `items` is row tiles, `rows` those of one sequence.
    int64_t splits(int64_t items, int64_t rows, int64_t max_keys) const;

    // Partial rows to make room for, given maxima: splits() times the rows, or more, so that it never falls when a size
    // grows.
    int64_t partial_rows(int64_t total_rows, int64_t max_keys) const;
};

// Runs all items of a merge. Throws std::bad_alloc.
void run_merge(const MergePlan& plan, int32_t num_threads);

// Bytes of rows * width floats, rounded up to 256; UINT64_MAX / 8, more than anybody can give, where that would
// overflow.
uint64_t float_bytes(int64_t rows, int64_t width);

// Threads for a job of about this many multiply-adds: 1 if it isn't worth waking the pool.
int choose_threads(int32_t requested, double multiply_adds);

}  // namespace flare::cpu
