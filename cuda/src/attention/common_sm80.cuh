// What the portable attention kernels share: arguments, the tile a block works on, where keys lie, score transforms.
//
// Rows of a tile: with `group` = 1 the tokens of one query head; otherwise the tokens times the query heads of one K/V head,
// the head being the fast index, so that few tokens still fill a tile.
#pragma once

#include <cmath>
#include <cstdint>

#include "../pipe/scheduler.cuh"
#include "../ptx/ldst.cuh"
#include "../ptx/math.cuh"
#include "../ptx/sync.cuh"
#include "mask.cuh"
#include "params.h"
#include "plan_sm80.h"

namespace flare::attention {

// Strides of K or V in bytes; batch = page with a block table.
struct KeyLayout {
    int64_t batch_bytes;
    int64_t row_bytes;
    int64_t head_bytes;
};

struct Sm80Args {
    FwdParams params;         // window bounds clamped to kUnbounded
    pipe::FastDivisor num_m;  // tiles are numbered [batch][head][split][m], m from the last to the first
    pipe::FastDivisor splits;
    pipe::FastDivisor heads;                // heads_q / group
    pipe::FastDivisor group;                // query heads that share a tile
    pipe::FastDivisor heads_per_tile_head;  // K/V head of a tile: its head number divided by this
    pipe::FastDivisor page_size;
    KeyLayout k;
    KeyLayout v;
    float unit;  // see ScoreRule: what it is without descales
    float scale_log2;
    int32_t split_keys;
    int32_t rows;        // tokens of the longest sequence: rows of a partial result
    float* partial_out;  // [splits, B, rows, Hq, Dv]; null when not split
    float* partial_lse;  // [splits, B, rows, Hq]
};

__device__ __forceinline__ int64_t read_index(const int32_t* array, int64_t i, int32_t index64) {
    return index64 != 0 ? reinterpret_cast<const int64_t*>(array)[i] : array[i];
}

// The tile of a block: rows [row0, row0 + count) of a sequence's tokens times `group`, against keys [first_key, last_key).
struct Sm80Tile {
    int row0;
    int count;  // rows that exist; <= 0: none, nothing to do
    int head;   // tile head: a query head, or with group > 1 a K/V head
    int kv_head;
    int batch;
    int split;
    int seqlen_q;
    int seqlen_k;
    int64_t q_row;  // of the sequence's first token in packed tensors, else 0
    int64_t k_row;
    int q_batch;  // 0 for packed tensors
    int k_batch;
    int first_key;
    int last_key;           // exclusive; keys from here on are never read
    int num_blocks;         // of kBlockN keys

    template <int kBlockM, int kBlockN>
    static __device__ __forceinline__ Sm80Tile make(const Sm80Args& args, int index) {
        const FwdParams& p = args.params;
        Sm80Tile t;
        const int rest = args.num_m.quotient(index);
        const int num_m = static_cast<int>(args.num_m.divisor);
        const int m = num_m - 1 - (index - rest * num_m);
        const int pair = args.splits.quotient(rest);
        t.split = rest - pair * static_cast<int>(args.splits.divisor);
        t.batch = args.heads.quotient(pair);
        t.head = pair - t.batch * static_cast<int>(args.heads.divisor);
        t.kv_head = args.heads_per_tile_head.quotient(t.head);
        t.seqlen_q = p.seqlen_q;
        t.seqlen_k = p.seqlen_k;
        t.q_batch = t.k_batch = t.batch;
        t.q_row = t.k_row = 0;
        if (p.cu_seqlens_q != nullptr) {
            t.q_batch = 0;
            t.q_row = read_index(p.cu_seqlens_q, t.batch, p.index64);
            t.seqlen_q = static_cast<int>(read_index(p.cu_seqlens_q, t.batch + 1, p.index64) - t.q_row);
        }
        if (p.cu_seqlens_k != nullptr) {
            t.k_batch = 0;
            t.k_row = read_index(p.cu_seqlens_k, t.batch, p.index64);
            t.seqlen_k = static_cast<int>(read_index(p.cu_seqlens_k, t.batch + 1, p.index64) - t.k_row);
        }
        if (p.seqused_q != nullptr) {
            t.seqlen_q = static_cast<int>(read_index(p.seqused_q, t.batch, p.index64));
        }
        if (p.seqused_k != nullptr) {
            t.seqlen_k = static_cast<int>(read_index(p.seqused_k, t.batch, p.index64));
        }
        const int group = static_cast<int>(args.group.divisor);
        t.row0 = m * kBlockM;
        t.count = min(kBlockM, t.seqlen_q * group - t.row0);
        if (t.count <= 0) {
            return t;
        }
        const int off = t.seqlen_k - t.seqlen_q;
        const int first_pos = args.group.quotient(t.row0) + off;
        const int last_pos = args.group.quotient(t.row0 + t.count - 1) + off;
        t.first_key = max(0, first_pos - p.window_left);
        t.last_key = min(t.seqlen_k, last_pos + p.window_right + 1);
        if (args.splits.divisor > 1) {
            t.take_split(args);
        }
        t.num_blocks = t.last_key <= t.first_key ? 0 : (t.last_key - t.first_key + kBlockN - 1) / kBlockN;
        return t;
    }

    // What a loop over blocks needs, into uniform registers: the compiler doesn't know that lengths read from memory are
    // uniform.
    __device__ __forceinline__ void make_uniform() {
        first_key = ptx::uniform(first_key);
        last_key = ptx::uniform(last_key);
        num_blocks = ptx::uniform(num_blocks);
    }

    __device__ __forceinline__ void take_split(const Sm80Args& args) {
        int size = args.split_keys;
        int origin = 0;
        if (size == 0) {
            const int unit = kSplitUnit * static_cast<int>(args.splits.divisor);
            size = (max(0, last_key - first_key) + unit - 1) / unit * kSplitUnit;
            origin = first_key;
        }
        const int64_t begin = origin + int64_t{split} * size;  // beyond int32 when many splits are asked for
        first_key = static_cast<int>(max(int64_t{first_key}, min(begin, int64_t{last_key})));
        last_key = static_cast<int>(min(int64_t{last_key}, begin + size));
    }

    // Row r of the tile (absolute, row0 included): its token and query head.
    __device__ __forceinline__ int token(const Sm80Args& args, int row) const { return args.group.quotient(row); }
    __device__ __forceinline__ int query_head(const Sm80Args& args, int row, int token) const {
        const int group = static_cast<int>(args.group.divisor);
        return head * group + row - token * group;
    }
};

// Where a key lies: in a page, or with page 0 in the sequence itself.
struct KeyPlace {
    int64_t page;
    int within;

    static __device__ __forceinline__ KeyPlace find(const Sm80Args& args, int batch, int key) {
        const FwdParams& p = args.params;
        if (p.block_table == nullptr) {
            return {0, key};
        }
        const int page = args.page_size.quotient(key);
        return {read_index(p.block_table, batch * p.block_table_stride + page, p.index64),
                key - page * static_cast<int>(args.page_size.divisor)};
    }
};

// Rows of K or V of a tile's K/V head.
struct KeySource {
    const KeyLayout& layout;
    const char* base;  // key 0 of the sequence, or of page 0

    static __device__ __forceinline__ KeySource make(const Sm80Args& args, const Sm80Tile& tile, const void* data,
                                                     const KeyLayout& layout) {
        const bool paged = args.params.block_table != nullptr;
        const int64_t first = paged ? 0 : tile.k_batch * layout.batch_bytes + tile.k_row * layout.row_bytes;
        return {layout, static_cast<const char*>(data) + first + tile.kv_head * layout.head_bytes};
    }

    __device__ __forceinline__ const char* row(int key) const { return base + key * layout.row_bytes; }
    __device__ __forceinline__ const char* row(const KeyPlace& place) const {
        return base + place.page * layout.batch_bytes + place.within * layout.row_bytes;
    }
};

// s -> weights: how raw products become scores in units that the online softmax exponentiates.
struct ScoreRule {
    float unit;        // natural score per unit
    float scale_log2;  // unit * log2(e)
    bool softcap;      // whether scores are capped
    float softcap_in;  // score / softcap per raw product
    float prescale;    // raw products are multiplied with it first: 1 where the scale is positive (a maximum survives it)

    static __device__ __forceinline__ ScoreRule make(const Sm80Args& args, const Sm80Tile& tile) {
        const FwdParams& p = args.params;
        float scale = p.scale;
        const int64_t at = tile.batch * p.descale_batch_stride + tile.kv_head * p.descale_head_stride;
        scale *= p.q_descale != nullptr ? p.q_descale[at] : 1.0f;
        scale *= p.k_descale != nullptr ? p.k_descale[at] : 1.0f;
        ScoreRule rule;
        rule.softcap = p.softcap > 0.0f;
        rule.softcap_in = p.softcap > 0.0f ? scale / p.softcap : 0.0f;
        rule.prescale = p.softcap > 0.0f || scale > 0.0f ? 1.0f : scale;
        rule.unit = p.softcap > 0.0f ? p.softcap : scale > 0.0f ? scale : 1.0f;
        rule.scale_log2 = rule.unit * 1.4426950408889634f;
        return rule;
    }

    __device__ __forceinline__ float value_descale(const Sm80Args& args, const Sm80Tile& tile) const {
        const FwdParams& p = args.params;
        return p.v_descale == nullptr ? 1.0f
                                      : p.v_descale[tile.batch * p.descale_batch_stride + tile.kv_head * p.descale_head_stride];
    }
};

// tanh by exponential: exact to fp32 rounding of its argument, where the hardware's tanh has 11 bits.
__device__ __forceinline__ float tanh_exp(float x) {
    return 1.0f - 2.0f / (1.0f + __expf(2.0f * x));
}

__device__ __forceinline__ float alibi_slope(const FwdParams& p, int batch, int query_head) {
    return p.alibi_slopes == nullptr ? 0.0f : p.alibi_slopes[batch * p.alibi_batch_stride + query_head];
}

// Where the output of a row goes: out and lse, or the partial results of a split. Offsets in elements.
struct OutputRow {
    int64_t out;
    int64_t lse;

    static __device__ __forceinline__ OutputRow make(const Sm80Args& args, const Sm80Tile& tile, int token, int query_head) {
        const FwdParams& p = args.params;
        OutputRow row;
        if (args.partial_out != nullptr) {
            row.lse = ((int64_t{tile.split} * p.batch + tile.batch) * args.rows + token) * p.heads_q + query_head;
            row.out = row.lse * p.head_dim_v;
        } else {
            row.out = tile.q_batch * p.o_stride.batch + (tile.q_row + token) * p.o_stride.row + query_head * p.o_stride.head;
            row.lse =
                tile.q_batch * p.lse_stride.batch + (tile.q_row + token) * p.lse_stride.row + query_head * p.lse_stride.head;
        }
        return row;
    }
};

__device__ __forceinline__ void store_1(void* out, DType dtype, int64_t at, float x) {
    if (dtype == DType::kFp32) {
        static_cast<float*>(out)[at] = x;
    } else if (dtype == DType::kBf16) {
        static_cast<__nv_bfloat16*>(out)[at] = __float2bfloat16_rn(x);
    } else {
        static_cast<__half*>(out)[at] = __float2half_rn(x);
    }
}

// Four values to out[at ...], at a multiple of 4.
__device__ __forceinline__ void store_4(void* out, DType dtype, int64_t at, float4 x) {
    if (dtype == DType::kFp32) {
        *reinterpret_cast<float4*>(static_cast<float*>(out) + at) = x;
        return;
    }
    const bool bf16 = dtype == DType::kBf16;
    *reinterpret_cast<uint2*>(static_cast<uint16_t*>(out) + at) =
        make_uint2(bf16 ? ptx::pack2<__nv_bfloat16>(x.x, x.y) : ptx::pack2<__half>(x.x, x.y),
                   bf16 ? ptx::pack2<__nv_bfloat16>(x.z, x.w) : ptx::pack2<__half>(x.z, x.w));
}

}  // namespace flare::attention
