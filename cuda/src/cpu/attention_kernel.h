// Attention forward, one item: a tile of query rows of one K/V head against all (or one split) of its keys.
#pragma once

#include "kernels.h"
#include "query_tile.h"

namespace flare::cpu::FLARE_CPU_NAMESPACE {

// The pieces of keys [low, high) that split `split` of `splits` covers, in whole key tiles.
FLARE_INLINE void take_split(int64_t split, int64_t splits, int64_t key_tile, int64_t* low, int64_t* high) {
    if (splits == 1 || *low >= *high) {
        return;
    }
    const int64_t first_tile = *low / key_tile;
    const int64_t num_tiles = (*high + key_tile - 1) / key_tile - first_tile;
    const int64_t per_split = (num_tiles + splits - 1) / splits;
    const int64_t begin = (first_tile + split * per_split) * key_tile;
    *low = max64(*low, begin);
    *high = min64(*high, begin + per_split * key_tile);
}

struct AttentionScratch {
    AttentionScratch(Carver& carver, const AttentionPlan& plan)
        : d_qk(plan.params->head_dim_qk),
          d_v(plan.params->head_dim_v),
          queries(carver, plan.row_tile, d_qk, d_v, plan.key_tile),
          k(carver.take<float>(plan.key_tile * round_up(d_qk, kLanes))),
          v(carver.take<float>(plan.key_tile * round_up(d_v, kLanes))),
          v_clean(carver.take<float>(plan.key_tile * round_up(d_v, kLanes))),
          is_nonfinite(carver.take<uint8_t>(plan.key_tile)) {}

    int64_t d_qk;
    int64_t d_v;
    QueryTile queries;
    float* k;        // [key_tile][d_qk rounded up]
    float* v;        // [key_tile][d_v rounded up]
    float* v_clean;  // only touched where v holds NaN or infinities
    uint8_t* is_nonfinite;
};

inline size_t attention_scratch(const AttentionPlan& plan) {
    Carver carver(nullptr);
    AttentionScratch scratch(carver, plan);
    return carver.used();
}

inline float descale(const float* values, const flare_attention_params& p, int64_t b, int64_t kv_head) {
    return values == nullptr ? 1.0f : values[b * p.descale_stride_b + kv_head * p.descale_stride_h];
}

inline void attention_item(const AttentionPlan& plan, int64_t item, void* scratch_memory) {
    const flare_attention_params& p = *plan.params;
    const int64_t splits = plan.partials.splits;
    const int64_t group = p.heads_q / p.heads_kv;
    // Longest first: with a causal mask the last tiles see the most keys. The heads of one key range follow each other:
    // where heads are interleaved they share pages.
    const int64_t kv_head = item % p.heads_kv;
    const int64_t split = item / p.heads_kv % splits;
    const int64_t b = item / p.heads_kv / splits % p.batch;
    const int64_t tile = plan.num_tiles - 1 - item / p.heads_kv / splits / p.batch;

    const SequenceSpan q_span = sequence_span(p.cu_seqlens_q, p.seqused_q, p.seqlen_q, p.index_dtype, b);
    const SequenceSpan k_span = sequence_span(p.cu_seqlens_k, p.seqused_k, p.seqlen_k, p.index_dtype, b);
    const int64_t row0 = tile * plan.row_tile;
    const int64_t rows = min64(plan.row_tile, q_span.length * group - row0);
    if (rows <= 0) {
        return;
    }
    Carver carver(scratch_memory);
    AttentionScratch scratch(carver, plan);
    QueryTile& queries = scratch.queries;

    const int64_t bytes = element_bytes(p.dtype);
    const bool packed_q = p.cu_seqlens_q != nullptr;
    const char* q_base =
        static_cast<const char*>(p.q) + (packed_q ? q_span.begin * p.q_stride_s : b * p.q_stride_b) * bytes;
    const float score_scale = p.scale * descale(p.q_descale, p, b, kv_head) * descale(p.k_descale, p, b, kv_head);
    queries.set_queries(rows, score_scale < 0.0f, [&](int64_t row, float* dst) {
        const int64_t token = (row0 + row) / group;
        const int64_t head = kv_head * group + (row0 + row) % group;
        load_row(q_base + (token * p.q_stride_s + head * p.q_stride_h) * bytes, p.dtype, scratch.d_qk, dst);
    });

    const float magnitude = score_scale < 0.0f ? -score_scale : score_scale;
    ScoreRule rule{};
    rule.scale_log2 = magnitude * kLog2E;
    rule.softcap_log2 = p.softcap * kLog2E;
    rule.softcap_scale = p.softcap > 0.0f ? magnitude / p.softcap : 0.0f;
    rule.has_alibi = p.alibi_slopes != nullptr;

    const int64_t offset = k_span.length - q_span.length;
    int64_t low = INT64_MAX;
    int64_t high = 0;
    for (int64_t row = 0; row < rows; ++row) {
        const int64_t position = (row0 + row) / group + offset;
        const int64_t head = kv_head * group + (row0 + row) % group;
        const int64_t row_low = p.window_left < 0 ? 0 : max64(0, position - p.window_left);
        const int64_t row_high =
            p.window_right < 0 ? k_span.length : min64(k_span.length, position + p.window_right + 1);
        const float slope = rule.has_alibi ? p.alibi_slopes[b * p.alibi_stride_b + head] : 0.0f;
        queries.set_row(row, row_low, row_high, position, slope);
        if (row_low < row_high) {
            low = min64(low, row_low);
            high = max64(high, row_high);
        }
    }
    take_split(split, splits, plan.key_tile, &low, &high);

    const bool paged = p.block_table != nullptr;
    const int64_t k_begin = paged ? 0 : (p.cu_seqlens_k != nullptr ? k_span.begin * p.k_stride_s : b * p.k_stride_b);
    const int64_t v_begin = paged ? 0 : (p.cu_seqlens_k != nullptr ? k_span.begin * p.v_stride_s : b * p.v_stride_b);
    const RowSource k_rows{static_cast<const char*>(p.k) + (k_begin + kv_head * p.k_stride_h) * bytes,
                           p.k_stride_s * bytes,
                           p.block_table,
                           b * p.block_table_stride_b,
                           p.index_dtype,
                           p.k_stride_b * bytes,
                           p.page_size};
    const RowSource v_rows{static_cast<const char*>(p.v) + (v_begin + kv_head * p.v_stride_h) * bytes,
                           p.v_stride_s * bytes,
                           p.block_table,
                           b * p.block_table_stride_b,
                           p.index_dtype,
                           p.v_stride_b * bytes,
                           p.page_size};
    // Tiles lie at multiples of key_tile whatever the first visible key is: see query_tile.h on bits.
    for (int64_t tile_begin = low / plan.key_tile * plan.key_tile; tile_begin < high; tile_begin += plan.key_tile) {
        const int64_t first = max64(tile_begin, low);
        KeyTile keys{};
        keys.first = first;
        keys.count = min64(tile_begin + plan.key_tile, high) - first;
        keys.k = scratch.k;
        keys.k_stride = round_up(scratch.d_qk, kLanes);
        keys.v = scratch.v;
        keys.v_stride = round_up(scratch.d_v, kLanes);
        load_rows(k_rows, p.dtype, first, keys.count, scratch.d_qk, scratch.k, keys.k_stride);
        load_rows(v_rows, p.dtype, first, keys.count, scratch.d_v, scratch.v, keys.v_stride);
        mark_nonfinite(keys, scratch.d_v, scratch.v_clean, scratch.is_nonfinite);
        queries.update(keys, rule);
    }

    const bool packed_out = packed_q;
    char* out_base = static_cast<char*>(p.out) +
                     (packed_out ? q_span.begin * p.out_stride_s : b * p.out_stride_b) * element_bytes(p.out_dtype);
    float* lse_base = p.lse == nullptr ? nullptr : p.lse + (packed_out ? q_span.begin : b * p.lse_stride_b);
    const int64_t first_partial = b * plan.partials.rows;
    queries.finish(
        descale(p.v_descale, p, b, kv_head),
        [&](int64_t row) {
            const int64_t head = kv_head * group + (row0 + row) % group;
            return p.sink != nullptr && splits == 1 ? p.sink[head] : -kInfinity;
        },
        [&](int64_t row, const float* values, float lse) {
            const int64_t token = (row0 + row) / group;
            const int64_t head = kv_head * group + (row0 + row) % group;
            if (splits > 1) {
                const int64_t slot = (split * p.batch * plan.partials.rows + first_partial + token) * p.heads_q + head;
                store_row(values, FLARE_FP32, scratch.d_v, plan.partials.out + slot * scratch.d_v);
                plan.partials.lse[slot] = lse;
                return;
            }
            store_row(values, p.out_dtype, scratch.d_v,
                      out_base + (token * p.out_stride_s + head * p.out_stride_h) * element_bytes(p.out_dtype));
            if (lse_base != nullptr) {
                lse_base[head * p.lse_stride_h + token] = lse;
            }
        });
}

// ---- merge of partial results ---------------------------------------------------------------------------------------

inline size_t merge_scratch(const MergePlan& plan) {
    Carver carver(nullptr);
    carver.take<float>(2 * round_up(plan.head_dim, kLanes));
    return carver.used();
}

// One item: kTokensPerItem tokens of one sequence, all heads.
inline void merge_item(const MergePlan& plan, int64_t item, void* scratch_memory) {
    Carver carver(scratch_memory);
    float* sum = carver.take<float>(2 * round_up(plan.head_dim, kLanes));
    float* part = sum + round_up(plan.head_dim, kLanes);
    const int64_t items_per_sequence = (plan.seqlen + kTokensPerItem - 1) / kTokensPerItem;
    const int64_t b = item / items_per_sequence;
    const int64_t first = item % items_per_sequence * kTokensPerItem;
    const SequenceSpan span = sequence_span(plan.cu_seqlens, plan.seqused, plan.seqlen, plan.index_dtype, b);
    const bool packed = plan.cu_seqlens != nullptr;  // what is written; partials are always by sequence
    for (int64_t token = first; token < min64(first + kTokensPerItem, span.length); ++token) {
        const int64_t row = span.begin + token;
        for (int64_t head = 0; head < plan.heads; ++head) {
            const float* lse =
                plan.partial_lse + b * plan.lse_stride_b + token * plan.lse_stride_s + head * plan.lse_stride_h;
            const double sink = plan.sink != nullptr ? static_cast<double>(plan.sink[head]) : -HUGE_VAL;
            double top = sink;
            for (int64_t i = 0; i < plan.num_partials; ++i) {
                const double value = lse[i * plan.lse_stride_p];
                top = value > top ? value : top;
            }
            double total = sink == -HUGE_VAL ? 0.0 : (sink == top ? 1.0 : exp(sink - top));
            for (int64_t i = 0; i < plan.num_partials; ++i) {
                const double value = lse[i * plan.lse_stride_p];
                total += value == -HUGE_VAL ? 0.0 : (value == top ? 1.0 : exp(value - top));
            }
            for (int64_t d = 0; d < plan.head_dim; ++d) {
                sum[d] = 0.0f;
            }
            const char* out =
                plan.partial_out + (b * plan.out_stride_b + token * plan.out_stride_s + head * plan.out_stride_h) *
                                       element_bytes(plan.dtype);
            for (int64_t i = 0; i < plan.num_partials; ++i) {
                const double value = lse[i * plan.lse_stride_p];
                if (value == -HUGE_VAL) {
                    continue;  // its out may be anything, NaN too
                }
                const float weight = static_cast<float>((value == top ? 1.0 : exp(value - top)) / total);
                load_row(out + i * plan.out_stride_p * element_bytes(plan.dtype), plan.dtype, plan.head_dim, part);
                for (int64_t d = 0; d < plan.head_dim; ++d) {
                    sum[d] += weight * part[d];
                }
            }
            store_row(
                sum, plan.out_dtype, plan.head_dim,
                plan.out + ((packed ? row * plan.dst_stride_s : b * plan.dst_stride_b + token * plan.dst_stride_s) +
                            head * plan.dst_stride_h) *
                               element_bytes(plan.out_dtype));
            if (plan.lse != nullptr) {
                const double merged = total == 0.0 ? -HUGE_VAL : top + log(total);
                plan.lse[(packed ? row : b * plan.dst_lse_stride_b + token) + head * plan.dst_lse_stride_h] =
                    static_cast<float>(merged);
            }
        }
    }
}

}  // namespace flare::cpu::FLARE_CPU_NAMESPACE
