// Multi-head latent attention, one item each: up-projecting prefill, absorbed decode, and the per-head products with
// W_uk and W_uv that decode can do for the caller.
#pragma once

#include "attention_kernel.h"

namespace flare::cpu::FLARE_CPU_NAMESPACE {

constexpr int64_t kLatentRowBytes = 656;

// 512 e4m3 values in groups of 128 with an fp32 scale each, then 64 bf16 values -> 576 floats.
inline void load_latent656(const char* row, float* dst) {
    float scales[4];
    __builtin_memcpy(scales, row + 512, sizeof(scales));
    for (int64_t i = 0; i < 512; i += kLanes) {
        vstore(dst + i, vmul(vload_e4m3(reinterpret_cast<const uint8_t*>(row) + i), vset(scales[i / 128])));
    }
    load_row(row + 528, FLARE_BF16, 64, dst + 512);
}

// Columns [first, first + columns) of B [k][n] as a panel [k][width]; the columns up to `width` become 0. B's stored
// rows are k, or with `transposed` its columns n. staging: kLanes * (k rounded up) floats. The panel has room for k
// rounded up.
inline void pack_columns(const char* b, int32_t dtype, int64_t stride_r, bool transposed, int64_t k, int64_t first,
                         int64_t columns, int64_t width, float* staging, float* panel) {
    const int64_t bytes = element_bytes(dtype);
    if (!transposed) {
        for (int64_t i = 0; i < k; ++i) {
            load_row(b + (i * stride_r + first) * bytes, dtype, columns, panel + i * width);
            for (int64_t j = columns; j < width; ++j) {
                panel[i * width + j] = 0.0f;
            }
        }
        return;
    }
    const int64_t k_padded = round_up(k, kLanes);
    for (int64_t column = 0; column < width; column += kLanes) {
        for (int64_t r = 0; r < kLanes; ++r) {
            float* row = staging + r * k_padded;
            const int64_t loaded = column + r < columns ? k : 0;
            if (loaded != 0) {
                load_row(b + (first + column + r) * stride_r * bytes, dtype, k, row);
            }
            for (int64_t i = loaded; i < k_padded; ++i) {
                row[i] = 0.0f;
            }
        }
        transpose_rows(staging, k_padded, k_padded, nullptr, panel + column, width);
    }
}

// A whole weight [k][n] as panels of kPanel columns.
struct PackedWeight {
    PackedWeight(Carver& carver, int64_t k_rows, int64_t n_columns)
        : k(k_rows), n(n_columns), data(carver.take<float>(round_up(k_rows, kLanes) * round_up(n_columns, kLanes))) {}

    int64_t width(int64_t column) const { return round_up(min64(kPanel, n - column), kLanes); }
    float* panel(int64_t column) const { return data + column * round_up(k, kLanes); }

    void pack(const char* b, int32_t dtype, int64_t stride_r, bool transposed, float* staging) {
        for (int64_t column = 0; column < n; column += kPanel) {
            pack_columns(b, dtype, stride_r, transposed, k, column, min64(kPanel, n - column), width(column), staging,
                         panel(column));
        }
    }

    // c [rows][c_stride] = a [rows][a_stride] B; writes n rounded up to kLanes columns.
    void multiply(int64_t rows, const float* a, int64_t a_stride, float* c, int64_t c_stride) const {
        for (int64_t column = 0; column < n; column += kPanel) {
            const int64_t w = width(column);
            gemm_panel<Orientation::kRowMajor>(static_cast<int>(w / kLanes), rows, k, a, a_stride, panel(column), w,
                                               c + column, c_stride, Update::kStore);
        }
    }

    int64_t k;
    int64_t n;
    float* data;
};

// ---- prefill: K = c W_uk[h] and V = c W_uv[h] exist for one key tile at a time --------------------------------------

struct MlaPrefillScratch {
    MlaPrefillScratch(Carver& carver, const MlaPrefillPlan& plan)
        : d_nope(plan.params->d_nope),
          d_rope(plan.params->d_rope),
          d_c(plan.params->d_c),
          d_v(plan.params->d_v),
          // A latent row of 656 bytes brings its rope part along.
          latent_stride(round_up(d_c + (plan.params->latent_dtype == FLARE_UINT8 ? d_rope : 0), kLanes)),
          k_stride(round_up(d_nope + d_rope, kLanes) + kLanes),
          v_stride(round_up(d_v, kLanes)),
          queries(carver, plan.row_tile, d_nope + d_rope, d_v, plan.key_tile),
          w_uk(carver, d_c, d_nope),
          w_uv(carver, d_c, d_v),
          staging(carver.take<float>(kLanes * round_up(d_c, kLanes))),
          latents(carver.take<float>(plan.key_tile * latent_stride)),
          k(carver.take<float>(plan.key_tile * k_stride)),
          v(carver.take<float>(plan.key_tile * v_stride)),
          v_clean(carver.take<float>(plan.key_tile * v_stride)),
          is_nonfinite(carver.take<uint8_t>(plan.key_tile)) {}

    int64_t d_nope, d_rope, d_c, d_v;
    int64_t latent_stride, k_stride, v_stride;
    QueryTile queries;
    PackedWeight w_uk;
    PackedWeight w_uv;
    float* staging;
    float* latents;
    float* k;
    float* v;
    float* v_clean;
    uint8_t* is_nonfinite;
};

inline size_t mla_prefill_scratch(const MlaPrefillPlan& plan) {
    Carver carver(nullptr);
    MlaPrefillScratch scratch(carver, plan);
    return carver.used();
}

inline void mla_prefill_item(const MlaPrefillPlan& plan, int64_t item, void* scratch_memory) {
    const flare_mla_prefill_params& p = *plan.params;
    const int64_t head = item % p.heads;
    const int64_t b = item / p.heads % p.batch;
    const int64_t tile = plan.num_tiles - 1 - item / p.heads / p.batch;
    const SequenceSpan q_span = sequence_span(p.cu_seqlens_q, p.seqused_q, p.seqlen_q, p.index_dtype, b);
    const SequenceSpan k_span = sequence_span(p.cu_seqlens_k, p.seqused_k, p.seqlen_k, p.index_dtype, b);
    const int64_t row0 = tile * plan.row_tile;
    const int64_t rows = min64(plan.row_tile, q_span.length - row0);
    if (rows <= 0) {
        return;
    }
    Carver carver(scratch_memory);
    MlaPrefillScratch scratch(carver, plan);
    QueryTile& queries = scratch.queries;

    const int64_t bytes = element_bytes(p.dtype);
    const bool packed_q = p.cu_seqlens_q != nullptr;
    const int64_t nope_begin = packed_q ? q_span.begin * p.q_nope_stride_s : b * p.q_nope_stride_b;
    const int64_t rope_begin = packed_q ? q_span.begin * p.q_rope_stride_s : b * p.q_rope_stride_b;
    const char* q_nope = static_cast<const char*>(p.q_nope) + (nope_begin + head * p.q_nope_stride_h) * bytes;
    const char* q_rope = static_cast<const char*>(p.q_rope) + (rope_begin + head * p.q_rope_stride_h) * bytes;
    queries.set_queries(rows, p.scale < 0.0f, [&](int64_t row, float* dst) {
        load_row(q_nope + (row0 + row) * p.q_nope_stride_s * bytes, p.dtype, scratch.d_nope, dst);
        if (scratch.d_rope > 0) {
            load_row(q_rope + (row0 + row) * p.q_rope_stride_s * bytes, p.dtype, scratch.d_rope, dst + scratch.d_nope);
        }
    });
    ScoreRule rule{};
    rule.scale_log2 = (p.scale < 0.0f ? -p.scale : p.scale) * kLog2E;

    int64_t end = 0;
    for (int64_t row = 0; row < rows; ++row) {
        const int64_t position = row0 + row + k_span.length - q_span.length;
        const int64_t high = p.mask == FLARE_MASK_CAUSAL ? max64(0, position + 1) : k_span.length;
        queries.set_row(row, 0, high, position, 0.0f);
        end = max64(end, high);
    }
    if (end > 0) {
        const bool transposed = p.weight_layout == FLARE_WEIGHT_DC;
        scratch.w_uk.pack(static_cast<const char*>(p.w_uk) + head * p.w_uk_stride_h * bytes, p.dtype, p.w_uk_stride_r,
                          transposed, scratch.staging);
        scratch.w_uv.pack(static_cast<const char*>(p.w_uv) + head * p.w_uv_stride_h * bytes, p.dtype, p.w_uv_stride_r,
                          transposed, scratch.staging);
    }

    const bool paged = p.block_table != nullptr;
    const bool rows656 = p.latent_dtype == FLARE_UINT8;
    const int64_t latent_bytes = element_bytes(p.latent_dtype);
    const auto source = [&](const void* base, int64_t stride_b, int64_t stride_s) {
        const int64_t begin = paged ? 0 : (p.cu_seqlens_k != nullptr ? k_span.begin * stride_s : b * stride_b);
        return RowSource{static_cast<const char*>(base) + begin * latent_bytes,
                         stride_s * latent_bytes,
                         p.block_table,
                         b * p.block_table_stride_b,
                         p.index_dtype,
                         stride_b * latent_bytes,
                         p.page_size};
    };
    const RowSource latent_rows = source(p.c_kv, p.c_kv_stride_b, p.c_kv_stride_s);
    const RowSource rope_rows = source(p.k_rope, p.k_rope_stride_b, p.k_rope_stride_s);
    for (int64_t first = 0; first < end; first += plan.key_tile) {
        KeyTile keys{};
        keys.first = first;
        keys.count = min64(plan.key_tile, end - first);
        keys.k = scratch.k;
        keys.k_stride = scratch.k_stride;
        keys.v = scratch.v;
        keys.v_stride = scratch.v_stride;
        if (rows656) {
            for (int64_t j = 0; j < keys.count; ++j) {
                load_latent656(latent_rows.row(first + j), scratch.latents + j * scratch.latent_stride);
            }
        } else {
            load_rows(latent_rows, p.dtype, first, keys.count, scratch.d_c, scratch.latents, scratch.latent_stride);
        }
        scratch.w_uk.multiply(keys.count, scratch.latents, scratch.latent_stride, scratch.k, scratch.k_stride);
        scratch.w_uv.multiply(keys.count, scratch.latents, scratch.latent_stride, scratch.v, scratch.v_stride);
        if (rows656) {  // after the product, whose last columns are padding
            for (int64_t j = 0; j < keys.count; ++j) {
                load_row(scratch.latents + j * scratch.latent_stride + scratch.d_c, FLARE_FP32, scratch.d_rope,
                         scratch.k + j * scratch.k_stride + scratch.d_nope);
            }
        } else if (scratch.d_rope > 0) {
            load_rows(rope_rows, p.dtype, first, keys.count, scratch.d_rope, scratch.k + scratch.d_nope,
                      scratch.k_stride);
        }
        mark_nonfinite(keys, scratch.d_v, scratch.v_clean, scratch.is_nonfinite);
        queries.update(keys, rule);
    }

    const int64_t out_begin = packed_q ? q_span.begin * p.out_stride_s : b * p.out_stride_b;
    char* out = static_cast<char*>(p.out) + (out_begin + head * p.out_stride_h) * element_bytes(p.out_dtype);
    float* lse_row =
        p.lse == nullptr ? nullptr : p.lse + (packed_q ? q_span.begin : b * p.lse_stride_b) + head * p.lse_stride_h;
    queries.finish(
        1.0f, [](int64_t) { return -kInfinity; },
        [&](int64_t row, const float* values, float lse) {
            store_row(values, p.out_dtype, scratch.d_v,
                      out + (row0 + row) * p.out_stride_s * element_bytes(p.out_dtype));
            if (lse_row != nullptr) {
                lse_row[row0 + row] = lse;
            }
        });
}

// ---- decode: all heads share the latent row as key, and its first d_c channels as value -----------------------------

struct MlaDecodeScratch {
    MlaDecodeScratch(Carver& carver, const MlaDecodePlan& plan)
        : d_c(plan.params->d_c),
          d_k(d_c + plan.params->d_rope),
          k_stride(round_up(d_k, kLanes)),
          queries(carver, plan.row_tile, d_k, d_c, plan.key_tile),
          k(carver.take<float>(plan.key_tile * k_stride)),
          v_clean(carver.take<float>(plan.key_tile * round_up(d_c, kLanes))),
          is_nonfinite(carver.take<uint8_t>(plan.key_tile)) {}

    int64_t d_c;
    int64_t d_k;
    int64_t k_stride;
    QueryTile queries;
    float* k;
    float* v_clean;
    uint8_t* is_nonfinite;
};

inline size_t mla_decode_scratch(const MlaDecodePlan& plan) {
    Carver carver(nullptr);
    MlaDecodeScratch scratch(carver, plan);
    return carver.used();
}

inline void mla_decode_item(const MlaDecodePlan& plan, int64_t item, void* scratch_memory) {
    const flare_mla_decode_params& p = *plan.params;
    const bool sparse = p.indices != nullptr;
    const int64_t splits = plan.partials.splits;
    const int64_t split = item % splits;
    const int64_t tile = item / splits % plan.num_tiles;
    const int64_t unit = item / splits / plan.num_tiles;  // a sequence, or with indices a query token
    const int64_t b = sparse ? unit / p.seqlen_q : unit;
    const int64_t token0 = sparse ? unit % p.seqlen_q : 0;
    const SequenceSpan q_span = sequence_span(p.cu_seqlens_q, nullptr, p.seqlen_q, p.index_dtype, b);
    const int64_t num_tokens = sparse ? 1 : q_span.length;
    const int64_t row0 = tile * plan.row_tile;
    const int64_t rows = min64(plan.row_tile, num_tokens * p.heads - row0);
    if (rows <= 0) {
        return;
    }
    Carver carver(scratch_memory);
    MlaDecodeScratch scratch(carver, plan);
    QueryTile& queries = scratch.queries;
    const auto token_of = [&](int64_t row) { return token0 + (row0 + row) / p.heads; };
    const auto head_of = [&](int64_t row) { return (row0 + row) % p.heads; };

    const int64_t bytes = element_bytes(p.dtype);
    const bool packed_q = p.cu_seqlens_q != nullptr;
    // Rows of the dense [token][head] buffers of absorbed queries and latent outputs.
    const int64_t first_row = packed_q ? q_span.begin : b * p.seqlen_q;
    const int64_t q_begin = packed_q ? q_span.begin * p.q_stride_s : b * p.q_stride_b;
    const int64_t rope_begin = packed_q ? q_span.begin * p.q_rope_stride_s : b * p.q_rope_stride_b;
    queries.set_queries(rows, p.scale < 0.0f, [&](int64_t row, float* dst) {
        const int64_t token = token_of(row);
        const int64_t head = head_of(row);
        const char* q = static_cast<const char*>(p.q) + (q_begin + token * p.q_stride_s + head * p.q_stride_h) * bytes;
        if (plan.q_latent != nullptr) {
            load_row(plan.q_latent + ((first_row + token) * p.heads + head) * scratch.d_c, FLARE_FP32, scratch.d_c,
                     dst);
        } else {
            load_row(q, p.dtype, p.q_rope != nullptr ? scratch.d_c : scratch.d_k, dst);
        }
        if (p.q_rope != nullptr && p.d_rope > 0) {
            const char* rope = static_cast<const char*>(p.q_rope) +
                               (rope_begin + token * p.q_rope_stride_s + head * p.q_rope_stride_h) * bytes;
            load_row(rope, p.dtype, p.d_rope, dst + scratch.d_c);
        }
    });
    ScoreRule rule{};
    rule.scale_log2 = (p.scale < 0.0f ? -p.scale : p.scale) * kLog2E;

    int64_t keys_total = 0;  // sparse: entries of the index list
    if (sparse) {
        keys_total = p.topk_length == nullptr
                         ? p.topk
                         : read_index(p.topk_length, p.index_dtype,
                                      b * p.topk_length_stride_b + token0 * p.topk_length_stride_s);
    } else {
        keys_total = p.seqlens_k == nullptr ? p.seqlen_k : read_index(p.seqlens_k, p.index_dtype, b);
    }
    int64_t low = 0;
    int64_t high = 0;
    for (int64_t row = 0; row < rows; ++row) {
        int64_t row_high = keys_total;
        if (!sparse && p.mask == FLARE_MASK_CAUSAL) {
            row_high = max64(0, token_of(row) + keys_total - q_span.length + 1);
        }
        queries.set_row(row, 0, row_high, 0, 0.0f);
        high = max64(high, row_high);
    }
    take_split(split, splits, plan.key_tile, &low, &high);

    const bool rows656 = p.kv_dtype == FLARE_UINT8;
    const int64_t kv_bytes = element_bytes(p.kv_dtype);
    const bool paged = p.block_table != nullptr;
    const RowSource latent_rows{static_cast<const char*>(p.kv) + (sparse || paged ? 0 : b * p.kv_stride_b * kv_bytes),
                                p.kv_stride_s * kv_bytes,
                                p.block_table,
                                b * p.block_table_stride_b,
                                p.index_dtype,
                                p.kv_stride_b * kv_bytes,
                                p.page_size};
    const int64_t indices_begin = b * p.indices_stride_b + token0 * p.indices_stride_s;
    for (int64_t first = low; first < high; first += plan.key_tile) {
        KeyTile keys{};
        keys.first = first;
        keys.k = scratch.k;
        keys.k_stride = scratch.k_stride;
        keys.v = scratch.k;
        keys.v_stride = scratch.k_stride;
        for (int64_t j = first; j < min64(first + plan.key_tile, high); ++j) {
            const char* row;
            if (sparse) {
                // Absent entries are left out: the tile holds the others, one after the other.
                const int64_t index = read_index(p.indices, p.index_dtype, indices_begin + j);
                if (index < 0 || index / p.page_size >= p.num_pages) {
                    continue;
                }
                row = latent_rows.base + index / p.page_size * latent_rows.page_bytes +
                      index % p.page_size * latent_rows.row_bytes;
            } else {
                row = latent_rows.row(j);
            }
            float* dst = scratch.k + keys.count * scratch.k_stride;
            if (rows656) {
                load_latent656(row, dst);
            } else {
                load_row(row, p.kv_dtype, scratch.d_k, dst);
            }
            ++keys.count;
        }
        mark_nonfinite(keys, scratch.d_c, scratch.v_clean, scratch.is_nonfinite);
        queries.update(keys, rule);
    }

    const int64_t out_begin = packed_q ? q_span.begin * p.out_stride_s : b * p.out_stride_b;
    float* lse_base = p.lse == nullptr ? nullptr : p.lse + (packed_q ? q_span.begin : b * p.lse_stride_b);
    queries.finish(
        1.0f, [&](int64_t row) { return p.sink != nullptr && splits == 1 ? p.sink[head_of(row)] : -kInfinity; },
        [&](int64_t row, const float* values, float lse) {
            const int64_t token = token_of(row);
            const int64_t head = head_of(row);
            const int64_t dense_row = (first_row + token) * p.heads + head;
            if (splits > 1) {
                const int64_t slot = ((split * p.batch + b) * plan.partials.rows + token) * p.heads + head;
                store_row(values, FLARE_FP32, scratch.d_c, plan.partials.out + slot * scratch.d_c);
                plan.partials.lse[slot] = lse;
                return;
            }
            if (plan.out_latent != nullptr) {
                store_row(values, FLARE_FP32, scratch.d_c, plan.out_latent + dense_row * scratch.d_c);
            } else {
                store_row(values, p.out_dtype, scratch.d_c,
                          static_cast<char*>(p.out) + (out_begin + token * p.out_stride_s + head * p.out_stride_h) *
                                                          element_bytes(p.out_dtype));
            }
            if (lse_base != nullptr) {
                lse_base[head * p.lse_stride_h + token] = lse;
            }
        });
}

// ---- c[row, h] = a[row, h] B[h] -------------------------------------------------------------------------------------

constexpr int64_t kProductRows = 48;

struct HeadProductScratch {
    HeadProductScratch(Carver& carver, const HeadProductPlan& plan)
        : panel(carver.take<float>(round_up(plan.k, kLanes) * kPanel)),
          staging(carver.take<float>(kLanes * round_up(plan.k, kLanes))),
          a(carver.take<float>(kProductRows * plan.k)),
          c(carver.take<float>(kProductRows * kPanel)) {}

    float* panel;
    float* staging;
    float* a;
    float* c;
};

inline size_t head_product_scratch(const HeadProductPlan& plan) {
    Carver carver(nullptr);
    HeadProductScratch scratch(carver, plan);
    return carver.used();
}

FLARE_INLINE char* grid_row(const RowGrid& grid, int64_t row, int64_t head) {
    const int64_t b = grid.seqlen > 0 ? row / grid.seqlen : 0;
    const int64_t s = grid.seqlen > 0 ? row % grid.seqlen : row;
    return grid.base + b * grid.stride_b + s * grid.stride_s + head * grid.stride_h;
}

inline void head_product_item(const HeadProductPlan& plan, int64_t item, void* scratch_memory) {
    Carver carver(scratch_memory);
    HeadProductScratch scratch(carver, plan);
    const int64_t panels = (plan.n + kPanel - 1) / kPanel;
    const int64_t head = item / panels;
    const int64_t column = item % panels * kPanel;
    const int64_t columns = min64(kPanel, plan.n - column);
    const int64_t width = round_up(columns, kLanes);
    pack_columns(static_cast<const char*>(plan.b) + head * plan.b_stride_h * element_bytes(plan.b_dtype), plan.b_dtype,
                 plan.b_stride_r, plan.b_transposed, plan.k, column, columns, width, scratch.staging, scratch.panel);
    for (int64_t first = plan.row_begin; first < plan.row_end; first += kProductRows) {
        const int64_t rows = min64(kProductRows, plan.row_end - first);
        for (int64_t r = 0; r < rows; ++r) {
            load_row(grid_row(plan.a, first + r, head), plan.a.dtype, plan.k, scratch.a + r * plan.k);
        }
        gemm_panel<Orientation::kRowMajor>(static_cast<int>(width / kLanes), rows, plan.k, scratch.a, plan.k,
                                           scratch.panel, width, scratch.c, width, Update::kStore);
        for (int64_t r = 0; r < rows; ++r) {
            store_row(scratch.c + r * width, plan.c.dtype, columns,
                      grid_row(plan.c, first + r, head) + column * element_bytes(plan.c.dtype));
        }
    }
}

}  // namespace flare::cpu::FLARE_CPU_NAMESPACE
