// MLA problems for tests: params with their data, random mixtures of all options, definitions in double.
#pragma once

#include "cpu_test.h"

#include <algorithm>
#include <memory>

namespace mla_cases {

using namespace cpu_test;

// Which sizes a mixture draws from.
enum class Grid {
    kCpu,     // small, any width; NaN in keys that rows see
    kDevice,  // multiples of 8 and tile edges of the CUDA kernels; a few of the others
};

constexpr int64_t kRow = 656;

inline int64_t index_at(const void* array, int32_t dtype, int64_t i) {
    return static_cast<int64_t>(read(array, dtype == 0 ? FLARE_INT32 : dtype, i));
}

// Channel d of a 656-byte row.
inline double read656(const char* row, int64_t d) {
    if (d >= 512) {
        return read(row + 528, FLARE_BF16, d - 512);
    }
    return read(row, FLARE_FP8_E4M3, d) * read(row + 512, FLARE_FP32, d / 128);
}

inline void fill656(char* row, Random& random) {
    for (int64_t d = 0; d < 512; ++d) {
        write(row, FLARE_FP8_E4M3, d, 8 * random.normal());
    }
    for (int64_t group = 0; group < 4; ++group) {
        write(row + 512, FLARE_FP32, group, 0.1 + 0.1 * std::fabs(random.normal()));
    }
    for (int64_t d = 0; d < 64; ++d) {
        write(row + 528, FLARE_BF16, d, random.normal());
    }
}

// Softmax over logits; out row and lse. value(j, d) is only asked for keys given.
template <class Value>
double softmax_row(const std::vector<double>& logits, double sink, int64_t width, const Value& value,
                   std::vector<double>* out) {
    double top = sink;
    for (const double s : logits) {
        top = s > top ? s : top;
    }
    out->assign(static_cast<size_t>(width), 0.0);
    double total = top == -HUGE_VAL ? 0.0 : top == sink ? 1.0 : std::exp(sink - top);  // the sink may be infinite
    for (size_t j = 0; j < logits.size(); ++j) {
        const double weight = std::exp(logits[j] - top);
        total += weight;
        for (int64_t d = 0; d < width; ++d) {
            (*out)[static_cast<size_t>(d)] += weight * value(static_cast<int64_t>(j), d);
        }
    }
    for (double& element : *out) {
        element = logits.empty() ? 0.0 : element / total;
    }
    return total == 0.0 ? -HUGE_VAL : top + std::log(total);
}

inline double weight_at(const void* w, int32_t dtype, int32_t layout, int64_t stride_h, int64_t stride_r, int64_t h, int64_t c,
                 int64_t d) {
    return read(w, dtype, h * stride_h + (layout == FLARE_WEIGHT_CD ? c * stride_r + d : d * stride_r + c));
}

inline void set_weights(Data* data, int32_t dtype, int32_t layout, int64_t heads, int64_t d_c, int64_t d, int64_t* stride_h,
                 int64_t* stride_r, int64_t gap, Random& random) {
    const int64_t rows = layout == FLARE_WEIGHT_CD ? d_c : d;
    const int64_t columns = layout == FLARE_WEIGHT_CD ? d : d_c;
    *stride_r = columns + gap;
    *stride_h = rows * *stride_r + gap;
    *data = Data(dtype, heads * *stride_h);
    for (int64_t h = 0; h < heads; ++h) {
        for (int64_t r = 0; r < rows; ++r) {
            for (int64_t i = 0; i < columns; ++i) {
                data->set(h * *stride_h + r * *stride_r + i, random.normal() / std::sqrt(static_cast<double>(d_c)));
            }
        }
    }
}

// ---- prefill --------------------------------------------------------------------------------------------------------

struct Prefill {
    flare_mla_prefill_params p{};
    Data q_nope, q_rope, c_kv, k_rope, w_uk, w_uv;
    Output out, lse;
    Indices cu_q, cu_k, used_q, used_k, table;
    Workspace workspace;

    struct Lengths {
        int64_t q_begin, q, k_begin, k;
    };
    Lengths lengths(int64_t b) const {
        Lengths n{0, p.seqlen_q, 0, p.seqlen_k};
        if (p.cu_seqlens_q != nullptr) {
            n.q_begin = index_at(p.cu_seqlens_q, p.index_dtype, b);
            n.q = index_at(p.cu_seqlens_q, p.index_dtype, b + 1) - n.q_begin;
        }
        if (p.cu_seqlens_k != nullptr) {
            n.k_begin = index_at(p.cu_seqlens_k, p.index_dtype, b);
            n.k = index_at(p.cu_seqlens_k, p.index_dtype, b + 1) - n.k_begin;
        }
        n.q = p.seqused_q != nullptr ? index_at(p.seqused_q, p.index_dtype, b) : n.q;
        n.k = p.seqused_k != nullptr ? index_at(p.seqused_k, p.index_dtype, b) : n.k;
        return n;
    }
    int64_t key_row(const Lengths& n, int64_t b, int64_t j, int64_t stride_b, int64_t stride_s) const {
        if (p.block_table != nullptr) {
            return index_at(p.block_table, p.index_dtype, b * p.block_table_stride_b + j / p.page_size) * stride_b +
                   j % p.page_size * stride_s;
        }
        return p.cu_seqlens_k != nullptr ? (n.k_begin + j) * stride_s : b * stride_b + j * stride_s;
    }

    void reference() {
        const double scale = (p.flags & FLARE_FLAG_SCALE) != 0 || p.scale != 0
                                 ? static_cast<double>(p.scale)
                                 : 1.0 / std::sqrt(static_cast<double>(p.d_nope + p.d_rope));
        const bool rows656 = p.latent_dtype == FLARE_UINT8;
        for (int64_t b = 0; b < p.batch; ++b) {
            const Lengths n = lengths(b);
            for (int64_t h = 0; h < p.heads; ++h) {
                std::vector<double> keys(static_cast<size_t>(n.k * (p.d_nope + p.d_rope)));
                std::vector<double> values(static_cast<size_t>(n.k * p.d_v));
                std::vector<double> latent(static_cast<size_t>(p.d_c));
                const int64_t width = p.d_nope + p.d_rope;
                for (int64_t j = 0; j < n.k; ++j) {
                    const int64_t row = key_row(n, b, j, p.c_kv_stride_b, p.c_kv_stride_s);
                    const int64_t rope = key_row(n, b, j, p.k_rope_stride_b, p.k_rope_stride_s);
                    const char* bytes = static_cast<const char*>(p.c_kv) + row;
                    for (int64_t c = 0; c < p.d_c; ++c) {
                        latent[static_cast<size_t>(c)] = rows656 ? read656(bytes, c) : read(p.c_kv, p.dtype, row + c);
                    }
                    for (int64_t d = 0; d < p.d_nope; ++d) {
                        for (int64_t c = 0; c < p.d_c; ++c) {
                            keys[static_cast<size_t>(j * width + d)] +=
                                latent[static_cast<size_t>(c)] *
                                weight_at(p.w_uk, p.dtype, p.weight_layout, p.w_uk_stride_h, p.w_uk_stride_r, h, c, d);
                        }
                    }
                    for (int64_t d = 0; d < p.d_v; ++d) {
                        for (int64_t c = 0; c < p.d_c; ++c) {
                            values[static_cast<size_t>(j * p.d_v + d)] +=
                                latent[static_cast<size_t>(c)] *
                                weight_at(p.w_uv, p.dtype, p.weight_layout, p.w_uv_stride_h, p.w_uv_stride_r, h, c, d);
                        }
                    }
                    for (int64_t d = 0; d < p.d_rope; ++d) {
                        keys[static_cast<size_t>(j * width + p.d_nope + d)] =
                            rows656 ? read656(bytes, 512 + d) : read(p.k_rope, p.dtype, rope + d);
                    }
                }
                for (int64_t i = 0; i < n.q; ++i) {
                    const auto q_row = [&](int64_t stride_b, int64_t stride_s, int64_t stride_h) {
                        return (p.cu_seqlens_q != nullptr ? (n.q_begin + i) * stride_s : b * stride_b + i * stride_s) +
                               h * stride_h;
                    };
                    const int64_t nope = q_row(p.q_nope_stride_b, p.q_nope_stride_s, p.q_nope_stride_h);
                    const int64_t rope = q_row(p.q_rope_stride_b, p.q_rope_stride_s, p.q_rope_stride_h);
                    const int64_t visible = p.mask == FLARE_MASK_CAUSAL ? std::max<int64_t>(0, i + n.k - n.q + 1) : n.k;
                    std::vector<double> logits;
                    for (int64_t j = 0; j < visible; ++j) {
                        double s = 0;
                        for (int64_t d = 0; d < p.d_nope; ++d) {
                            s += read(p.q_nope, p.dtype, nope + d) * keys[static_cast<size_t>(j * width + d)];
                        }
                        for (int64_t d = 0; d < p.d_rope; ++d) {
                            s +=
                                read(p.q_rope, p.dtype, rope + d) * keys[static_cast<size_t>(j * width + p.d_nope + d)];
                        }
                        logits.push_back(scale * s);
                    }
                    std::vector<double> row;
                    const double row_lse = softmax_row(
                        logits, -HUGE_VAL, p.d_v,
                        [&](int64_t j, int64_t d) { return values[static_cast<size_t>(j * p.d_v + d)]; }, &row);
                    for (int64_t d = 0; d < p.d_v; ++d) {
                        out.expect(q_row(p.out_stride_b, p.out_stride_s, p.out_stride_h) + d,
                                   row[static_cast<size_t>(d)]);
                    }
                    if (p.lse != nullptr) {
                        lse.expect(
                            (p.cu_seqlens_q != nullptr ? n.q_begin : b * p.lse_stride_b) + h * p.lse_stride_h + i,
                            row_lse);
                    }
                }
            }
        }
    }

    void run(int32_t threads, const std::string& name) {
        out.poison();
        lse.poison();
        p.num_threads = threads;
        uint64_t bytes = 0;
        EXPECT(flare_mla_prefill_workspace(&p, &bytes) == FLARE_OK, "%s: %s", name.c_str(), last_error().c_str());
        workspace.give(p, bytes);
        EXPECT(flare_mla_prefill(&p) == FLARE_OK, "%s: %s", name.c_str(), last_error().c_str());
    }
};

inline std::unique_ptr<Prefill> random_prefill(Random& random, int64_t forced_sq, std::string* name, Grid grid = Grid::kCpu) {
    const bool device = grid == Grid::kDevice && random.chance(0.85);
    const auto pick = [&](std::initializer_list<int64_t> cpu_sizes, std::initializer_list<int64_t> device_sizes) {
        return random.pick(device ? device_sizes : cpu_sizes);
    };
    auto problem = std::make_unique<Prefill>();
    flare_mla_prefill_params& p = problem->p;
    p.struct_size = sizeof(p);
    p.device = FLARE_DEVICE_CPU;
    p.dtype = static_cast<int32_t>(
        pick({FLARE_FP32, FLARE_FP32, FLARE_FP16, FLARE_BF16}, {FLARE_FP16, FLARE_FP16, FLARE_BF16, FLARE_BF16, FLARE_FP32}));
    p.out_dtype = random.chance(0.3) ? static_cast<int32_t>(random.pick({FLARE_FP32, FLARE_FP16, FLARE_BF16})) : 0;
    const bool rows656 = random.chance(0.2);
    p.latent_dtype = rows656 ? FLARE_UINT8 : 0;
    p.index_dtype = static_cast<int32_t>(random.pick({0, FLARE_INT64}));
    p.weight_layout = static_cast<int32_t>(random.integer(0, 1));
    p.mask = static_cast<int32_t>(random.integer(0, 1));
    p.batch = random.integer(1, 2);
    p.heads = random.integer(1, 3);
    p.seqlen_q = pick({0, 1, 2, 17, 64, 65, 80}, {0, 1, 17, 64, 128, 129, 170, 171, 172, 255, 256, 257, 300, 520});
    p.seqlen_k = pick({0, 1, 50, 96, 97, 130}, {0, 1, 31, 63, 64, 65, 127, 129, 256, 300, 520});
    if (forced_sq > 0) {
        p.seqlen_q = p.seqlen_k = forced_sq;
    }
    p.d_nope = pick({1, 8, 24, 32, 64, 70, 128}, {128, 128, 128, 64, 24, 72, 192});
    p.d_rope = rows656 ? 64 : pick({0, 0, 3, 16, 64}, {0, 64, 64, 64, 16, 24, 72});
    p.d_c = rows656 ? 512 : pick({1, 16, 40, 96, 128}, {512, 512, 256, 128, 40, 520});
    p.d_v = pick({1, 16, 30, 64, 80, 128}, {128, 128, 128, 64, 40, 80, 192});
    const bool varlen_q = random.chance(0.3);
    const bool paged = random.chance(0.35);
    const bool varlen_k = !paged && random.chance(0.4);
    std::vector<int64_t> k_lengths(static_cast<size_t>(p.batch), p.seqlen_k);
    std::vector<int64_t> q_lengths(static_cast<size_t>(p.batch), p.seqlen_q);
    const auto ragged = [&](std::vector<int64_t>* lengths, int64_t longest, int64_t* total) {
        std::vector<int64_t> sums = {random.integer(0, 2)};
        for (int64_t& n : *lengths) {
            n = random.integer(0, longest);
            sums.push_back(sums.back() + n);
        }
        *total = sums.back() + 1;
        return Indices(p.index_dtype, sums);
    };
    const auto shorten = [&](std::vector<int64_t>* lengths) {
        for (int64_t& n : *lengths) {
            n = random.integer(0, n);
        }
        return Indices(p.index_dtype, *lengths);
    };
    if (varlen_q) {
        problem->cu_q = ragged(&q_lengths, p.seqlen_q, &p.total_q);
        p.cu_seqlens_q = problem->cu_q.data();
    }
    if (varlen_k) {
        problem->cu_k = ragged(&k_lengths, p.seqlen_k, &p.total_k);
        p.cu_seqlens_k = problem->cu_k.data();
    }
    if (random.chance(0.3)) {
        problem->used_q = shorten(&q_lengths);
        p.seqused_q = problem->used_q.data();
    }
    if (paged || random.chance(0.3)) {
        problem->used_k = shorten(&k_lengths);
        p.seqused_k = problem->used_k.data();
    }
    if (paged) {
        p.page_size = pick({1, 5, 16, 64}, {1, 2, 16, 61, 64, 128});
        const int64_t pages_each = (p.seqlen_k + p.page_size - 1) / p.page_size;
        p.num_pages = p.batch * pages_each + 1;
        p.block_table_stride_b = pages_each;
        std::vector<int64_t> table;
        for (int64_t b = 0; b < p.batch; ++b) {
            for (int64_t i = 0; i < pages_each; ++i) {
                const bool used = i * p.page_size < k_lengths[static_cast<size_t>(b)];
                table.push_back(used ? p.num_pages - 1 - (b * pages_each + i) : -1);
            }
        }
        problem->table = Indices(p.index_dtype, table);
        p.block_table = problem->table.data();
    }
    if (random.chance(0.2)) {
        p.flags = FLARE_FLAG_SCALE;
        p.scale = random.chance(0.3) ? 0.0f : -0.1f;
    }
    const int64_t gap = pick({0, 3, 16}, {0, 8, 16});
    const int64_t batch_q = varlen_q ? 1 : p.batch;
    const int64_t rows_q = varlen_q ? p.total_q : p.seqlen_q;
    const int64_t batch_k = paged ? p.num_pages : varlen_k ? 1 : p.batch;
    const int64_t rows_k = paged ? p.page_size : varlen_k ? p.total_k : p.seqlen_k;
    const auto strides = [&](int64_t width, int64_t* b, int64_t* s, int64_t* h) {
        *h = width + gap;
        *s = p.heads * *h;
        *b = rows_q * *s;
    };
    strides(p.d_nope, &p.q_nope_stride_b, &p.q_nope_stride_s, &p.q_nope_stride_h);
    strides(p.d_rope, &p.q_rope_stride_b, &p.q_rope_stride_s, &p.q_rope_stride_h);
    strides(p.d_v, &p.out_stride_b, &p.out_stride_s, &p.out_stride_h);
    p.c_kv_stride_s = rows656 ? kRow + 16 * (gap / 16) : p.d_c + gap;
    p.c_kv_stride_b = rows_k * p.c_kv_stride_s;
    p.k_rope_stride_s = p.d_rope + gap;
    p.k_rope_stride_b = rows_k * p.k_rope_stride_s;
    problem->q_nope = Data(p.dtype, batch_q * p.q_nope_stride_b);
    problem->q_rope = Data(p.dtype, batch_q * p.q_rope_stride_b);
    problem->c_kv = Data(rows656 ? FLARE_UINT8 : p.dtype, batch_k * p.c_kv_stride_b);
    problem->k_rope = Data(p.dtype, batch_k * p.k_rope_stride_b);
    set_weights(&problem->w_uk, p.dtype, p.weight_layout, p.heads, p.d_c, p.d_nope, &p.w_uk_stride_h, &p.w_uk_stride_r,
                gap, random);
    set_weights(&problem->w_uv, p.dtype, p.weight_layout, p.heads, p.d_c, p.d_v, &p.w_uv_stride_h, &p.w_uv_stride_r,
                gap, random);
    problem->out = Output(p.out_dtype != 0 ? p.out_dtype : p.dtype, batch_q * p.out_stride_b);
    p.lse_stride_h = rows_q + gap;
    p.lse_stride_b = p.heads * p.lse_stride_h;
    problem->lse = Output(FLARE_FP32, batch_q * p.lse_stride_b);
    p.q_nope = problem->q_nope.data();
    p.q_rope = p.d_rope > 0 ? problem->q_rope.data() : nullptr;
    p.c_kv = problem->c_kv.data();
    p.k_rope = p.d_rope > 0 && !rows656 ? problem->k_rope.data() : nullptr;
    p.w_uk = problem->w_uk.data();
    p.w_uv = problem->w_uv.data();
    p.out = problem->out.data();
    p.lse = random.chance(0.8) ? reinterpret_cast<float*>(problem->lse.data()) : nullptr;
    for (int64_t b = 0; b < p.batch; ++b) {
        const Prefill::Lengths n = problem->lengths(b);
        for (int64_t i = 0; i < n.q; ++i) {
            const auto row = [&](int64_t stride_b, int64_t stride_s) {
                return varlen_q ? (n.q_begin + i) * stride_s : b * stride_b + i * stride_s;
            };
            for (int64_t h = 0; h < p.heads; ++h) {
                problem->q_nope.set_random(row(p.q_nope_stride_b, p.q_nope_stride_s) + h * p.q_nope_stride_h, p.d_nope,
                                           random);
                problem->q_rope.set_random(row(p.q_rope_stride_b, p.q_rope_stride_s) + h * p.q_rope_stride_h, p.d_rope,
                                           random);
            }
        }
        for (int64_t j = 0; j < n.k; ++j) {
            const int64_t at = problem->key_row(n, b, j, p.c_kv_stride_b, p.c_kv_stride_s);
            if (rows656) {
                fill656(problem->c_kv.data() + at, random);
            } else {
                problem->c_kv.set_random(at, p.d_c, random);
                problem->k_rope.set_random(problem->key_row(n, b, j, p.k_rope_stride_b, p.k_rope_stride_s), p.d_rope,
                                           random);
            }
        }
        if (grid == Grid::kCpu && n.k > 0 && !rows656 && random.chance(0.2)) {
            problem->c_kv.set(problem->key_row(n, b, random.integer(0, n.k - 1), p.c_kv_stride_b, p.c_kv_stride_s),
                              std::numeric_limits<double>::quiet_NaN());
        }
    }
    char text[256];
    std::snprintf(text, sizeof(text),
                  "prefill dtype %d%s B %lld H %lld N %lld/%lld d %lld+%lld/%lld/%lld mask %d layout %d%s%s%s", p.dtype,
                  rows656 ? " rows656" : "", static_cast<long long>(p.batch), static_cast<long long>(p.heads),
                  static_cast<long long>(p.seqlen_q), static_cast<long long>(p.seqlen_k),
                  static_cast<long long>(p.d_nope), static_cast<long long>(p.d_rope), static_cast<long long>(p.d_c),
                  static_cast<long long>(p.d_v), p.mask, p.weight_layout, varlen_q ? " varlen_q" : "",
                  varlen_k ? " varlen_k" : "", paged ? " paged" : "");
    *name = text;
    return problem;
}

// ---- decode ---------------------------------------------------------------------------------------------------------

struct Decode {
    flare_mla_decode_params p{};
    Data q, q_rope, kv, w_uk, w_uv;
    Output out, lse;
    Indices cu_q, lengths_k, table, indices, topk_length;
    std::vector<float> sink;
    Workspace workspace;

    void tokens(int64_t b, int64_t* begin, int64_t* count) const {
        *begin = 0;
        *count = p.seqlen_q;
        if (p.cu_seqlens_q != nullptr) {
            *begin = index_at(p.cu_seqlens_q, p.index_dtype, b);
            *count = index_at(p.cu_seqlens_q, p.index_dtype, b + 1) - *begin;
        }
    }
    int64_t pool_row(int64_t index) const {
        return index / p.page_size * p.kv_stride_b + index % p.page_size * p.kv_stride_s;
    }
    int64_t key_row(int64_t b, int64_t j) const {
        if (p.block_table != nullptr) {
            return index_at(p.block_table, p.index_dtype, b * p.block_table_stride_b + j / p.page_size) *
                       p.kv_stride_b +
                   j % p.page_size * p.kv_stride_s;
        }
        return b * p.kv_stride_b + j * p.kv_stride_s;
    }
    // Rows that token i of sequence b attends to.
    std::vector<int64_t> visible(int64_t b, int64_t i, int64_t num_tokens) const {
        std::vector<int64_t> rows;
        if (p.indices != nullptr) {
            const int64_t count =
                p.topk_length == nullptr
                    ? p.topk
                    : index_at(p.topk_length, p.index_dtype, b * p.topk_length_stride_b + i * p.topk_length_stride_s);
            for (int64_t j = 0; j < count; ++j) {
                const int64_t index =
                    index_at(p.indices, p.index_dtype, b * p.indices_stride_b + i * p.indices_stride_s + j);
                if (index >= 0 && index < p.num_pages * p.page_size) {
                    rows.push_back(pool_row(index));
                }
            }
            return rows;
        }
        const int64_t length = p.seqlens_k == nullptr ? p.seqlen_k : index_at(p.seqlens_k, p.index_dtype, b);
        const int64_t end = p.mask == FLARE_MASK_CAUSAL ? length - (num_tokens - 1 - i) : length;
        for (int64_t j = 0; j < end; ++j) {
            rows.push_back(key_row(b, j));
        }
        return rows;
    }

    double latent(int64_t row, int64_t d) const {
        return p.kv_dtype == FLARE_UINT8 ? read656(static_cast<const char*>(p.kv) + row, d)
                                         : read(p.kv, p.dtype, row + d);
    }

    void reference() {
        const double scale = (p.flags & FLARE_FLAG_SCALE) != 0 || p.scale != 0
                                 ? static_cast<double>(p.scale)
                                 : 1.0 / std::sqrt(static_cast<double>(p.d_nope + p.d_rope));
        for (int64_t b = 0; b < p.batch; ++b) {
            int64_t begin;
            int64_t count;
            tokens(b, &begin, &count);
            for (int64_t i = 0; i < count; ++i) {
                const std::vector<int64_t> rows = visible(b, i, count);
                for (int64_t h = 0; h < p.heads; ++h) {
                    const auto at = [&](int64_t stride_b, int64_t stride_s, int64_t stride_h) {
                        return (p.cu_seqlens_q != nullptr ? (begin + i) * stride_s : b * stride_b + i * stride_s) +
                               h * stride_h;
                    };
                    const int64_t q_at = at(p.q_stride_b, p.q_stride_s, p.q_stride_h);
                    std::vector<double> query(static_cast<size_t>(p.d_c + p.d_rope));
                    for (int64_t c = 0; c < p.d_c; ++c) {
                        if (p.w_uk == nullptr) {
                            query[static_cast<size_t>(c)] = read(p.q, p.dtype, q_at + c);
                            continue;
                        }
                        for (int64_t d = 0; d < p.d_nope; ++d) {
                            query[static_cast<size_t>(c)] +=
                                read(p.q, p.dtype, q_at + d) *
                                weight_at(p.w_uk, p.dtype, p.weight_layout, p.w_uk_stride_h, p.w_uk_stride_r, h, c, d);
                        }
                    }
                    for (int64_t d = 0; d < p.d_rope; ++d) {
                        query[static_cast<size_t>(p.d_c + d)] =
                            p.q_rope != nullptr ? read(p.q_rope, p.dtype,
                                                       at(p.q_rope_stride_b, p.q_rope_stride_s, p.q_rope_stride_h) + d)
                                                : read(p.q, p.dtype, q_at + p.d_c + d);
                    }
                    std::vector<double> logits;
                    for (const int64_t row : rows) {
                        double s = 0;
                        for (int64_t d = 0; d < p.d_c + p.d_rope; ++d) {
                            s += query[static_cast<size_t>(d)] * latent(row, d);
                        }
                        logits.push_back(scale * s);
                    }
                    std::vector<double> row_out;
                    const double row_lse = softmax_row(
                        logits, p.sink != nullptr ? static_cast<double>(p.sink[h]) : -HUGE_VAL, p.d_c,
                        [&](int64_t j, int64_t d) { return latent(rows[static_cast<size_t>(j)], d); }, &row_out);
                    if (p.w_uv != nullptr) {
                        std::vector<double> projected(static_cast<size_t>(p.d_v));
                        for (int64_t d = 0; d < p.d_v; ++d) {
                            for (int64_t c = 0; c < p.d_c; ++c) {
                                projected[static_cast<size_t>(d)] +=
                                    row_out[static_cast<size_t>(c)] * weight_at(p.w_uv, p.dtype, p.weight_layout,
                                                                                p.w_uv_stride_h, p.w_uv_stride_r, h, c,
                                                                                d);
                            }
                        }
                        row_out = projected;
                    }
                    for (size_t d = 0; d < row_out.size(); ++d) {
                        out.expect(at(p.out_stride_b, p.out_stride_s, p.out_stride_h) + static_cast<int64_t>(d),
                                   row_out[d]);
                    }
                    if (p.lse != nullptr) {
                        lse.expect((p.cu_seqlens_q != nullptr ? begin : b * p.lse_stride_b) + h * p.lse_stride_h + i,
                                   row_lse);
                    }
                }
            }
        }
    }

    void run(int32_t threads, const std::string& name) {
        out.poison();
        lse.poison();
        p.num_threads = threads;
        uint64_t bytes = 0;
        EXPECT(flare_mla_decode_workspace(&p, &bytes) == FLARE_OK, "%s: %s", name.c_str(), last_error().c_str());
        workspace.give(p, bytes);
        EXPECT(flare_mla_decode(&p) == FLARE_OK, "%s: %s", name.c_str(), last_error().c_str());
    }
};

inline std::unique_ptr<Decode> random_decode(Random& random, std::string* name, Grid grid = Grid::kCpu) {
    const bool device = grid == Grid::kDevice && random.chance(0.85);
    const auto pick = [&](std::initializer_list<int64_t> cpu_sizes, std::initializer_list<int64_t> device_sizes) {
        return random.pick(device ? device_sizes : cpu_sizes);
    };
    auto problem = std::make_unique<Decode>();
    flare_mla_decode_params& p = problem->p;
    p.struct_size = sizeof(p);
    p.device = FLARE_DEVICE_CPU;
    p.dtype = static_cast<int32_t>(
        pick({FLARE_FP32, FLARE_FP32, FLARE_FP16, FLARE_BF16}, {FLARE_FP16, FLARE_FP16, FLARE_BF16, FLARE_BF16, FLARE_FP32}));
    p.out_dtype = random.chance(0.3) ? static_cast<int32_t>(random.pick({FLARE_FP32, FLARE_FP16, FLARE_BF16})) : 0;
    const bool rows656 = random.chance(0.25);
    p.kv_dtype = rows656 ? FLARE_UINT8 : 0;
    p.index_dtype = static_cast<int32_t>(random.pick({0, FLARE_INT64}));
    p.weight_layout = static_cast<int32_t>(random.integer(0, 1));
    p.mask = static_cast<int32_t>(random.integer(0, 1));
    p.batch = random.integer(1, 3);
    p.heads = pick({1, 3, 8, 16, 63, 65}, {1, 3, 8, 16, 16, 32, 63, 64, 65, 128});
    p.seqlen_q = pick({0, 1, 1, 2, 3}, {1, 1, 1, 2, 3, 4, 7, 8, 16});
    p.seqlen_k = pick({0, 1, 47, 48, 49, 100, 150}, {0, 1, 31, 32, 33, 63, 64, 65, 127, 129, 300, 700});
    p.d_c = rows656 ? 512 : pick({1, 16, 40, 64, 256}, {512, 512, 512, 256, 128, 64, 40, 520});
    p.d_rope = rows656 ? 64 : pick({0, 5, 16}, {0, 64, 64, 16, 24, 72});
    p.num_splits = static_cast<int32_t>(pick({0, 1, 2, 5}, {0, 0, 1, 2, 5, 40}));
    p.deterministic = static_cast<int32_t>(random.integer(0, 1));
    const bool fused_uk = random.chance(0.3);
    const bool fused_uv = random.chance(0.3);
    p.d_nope = fused_uk ? pick({1, 20, 64}, {128, 64, 24}) : 32;
    p.d_v = fused_uv ? pick({1, 17, 64, 100}, {128, 64, 40}) : 0;
    const bool rope_apart = fused_uk || random.chance(0.5);
    const bool sparse = random.chance(0.35);
    const bool paged = !sparse && random.chance(0.5);
    const bool varlen_q = !sparse && random.chance(0.3);
    if (varlen_q) {
        std::vector<int64_t> sums = {random.integer(0, 2)};
        for (int64_t b = 0; b < p.batch; ++b) {
            sums.push_back(sums.back() + random.integer(0, p.seqlen_q));
        }
        p.total_q = sums.back() + 1;
        problem->cu_q = Indices(p.index_dtype, sums);
        p.cu_seqlens_q = problem->cu_q.data();
    }
    std::vector<int64_t> k_lengths(static_cast<size_t>(p.batch), p.seqlen_k);
    if (!sparse && (paged || random.chance(0.5))) {
        for (int64_t& n : k_lengths) {
            n = random.chance(0.2) ? 0 : random.integer(0, p.seqlen_k);
        }
        problem->lengths_k = Indices(p.index_dtype, k_lengths);
        p.seqlens_k = problem->lengths_k.data();
    }
    int64_t pool = p.batch;
    int64_t pool_rows = p.seqlen_k;
    if (sparse || paged) {
        p.page_size = random.pick({1, 2, 16, 61, 64});
        const int64_t pages_each = (p.seqlen_k + p.page_size - 1) / p.page_size;
        p.num_pages = p.batch * pages_each + 1;
        pool = p.num_pages;
        pool_rows = p.page_size;
        if (paged) {
            p.block_table_stride_b = pages_each;
            std::vector<int64_t> table;
            for (int64_t b = 0; b < p.batch; ++b) {
                for (int64_t i = 0; i < pages_each; ++i) {
                    const bool used = i * p.page_size < k_lengths[static_cast<size_t>(b)];
                    table.push_back(used ? p.num_pages - 1 - (b * pages_each + i) : 2147480000);
                }
            }
            problem->table = Indices(p.index_dtype, table);
            p.block_table = problem->table.data();
        }
    }
    const int64_t gap = pick({0, 3, 16}, {0, 8, 16});
    p.kv_stride_s = rows656 ? kRow + 16 * (gap / 16) : p.d_c + p.d_rope + gap;
    p.kv_stride_b = pool_rows * p.kv_stride_s;
    const int64_t batch_q = varlen_q ? 1 : p.batch;
    const int64_t rows_q = varlen_q ? p.total_q : p.seqlen_q;
    const auto strides = [&](int64_t width, int64_t* b, int64_t* s, int64_t* h) {
        *h = width + gap;
        *s = p.heads * *h;
        *b = rows_q * *s;
    };
    const int64_t q_width = fused_uk ? p.d_nope : p.d_c + (rope_apart ? 0 : p.d_rope);
    strides(q_width, &p.q_stride_b, &p.q_stride_s, &p.q_stride_h);
    strides(p.d_rope, &p.q_rope_stride_b, &p.q_rope_stride_s, &p.q_rope_stride_h);
    strides(fused_uv ? p.d_v : p.d_c, &p.out_stride_b, &p.out_stride_s, &p.out_stride_h);
    problem->q = Data(p.dtype, batch_q * p.q_stride_b);
    problem->q_rope = Data(p.dtype, batch_q * p.q_rope_stride_b);
    problem->kv = Data(rows656 ? FLARE_UINT8 : p.dtype, pool * p.kv_stride_b);
    p.q = problem->q.data();
    p.q_rope = rope_apart && p.d_rope > 0 ? problem->q_rope.data() : nullptr;
    p.kv = problem->kv.data();
    if (fused_uk) {
        set_weights(&problem->w_uk, p.dtype, p.weight_layout, p.heads, p.d_c, p.d_nope, &p.w_uk_stride_h,
                    &p.w_uk_stride_r, gap, random);
        p.w_uk = problem->w_uk.data();
    }
    if (fused_uv) {
        set_weights(&problem->w_uv, p.dtype, p.weight_layout, p.heads, p.d_c, p.d_v, &p.w_uv_stride_h, &p.w_uv_stride_r,
                    gap, random);
        p.w_uv = problem->w_uv.data();
    }
    problem->out = Output(p.out_dtype != 0 ? p.out_dtype : p.dtype, batch_q * p.out_stride_b);
    p.out = problem->out.data();
    p.lse_stride_h = rows_q + gap;
    p.lse_stride_b = p.heads * p.lse_stride_h;
    problem->lse = Output(FLARE_FP32, batch_q * p.lse_stride_b);
    p.lse = random.chance(0.8) ? reinterpret_cast<float*>(problem->lse.data()) : nullptr;
    if (random.chance(0.3)) {
        p.flags = FLARE_FLAG_SCALE;
        p.scale = static_cast<float>(random.pick({0, -1, 1})) * 0.07f;
    }
    if (random.chance(0.3)) {
        for (int64_t h = 0; h < p.heads; ++h) {
            const float infinite = random.chance(0.3) ? HUGE_VALF : -HUGE_VALF;
            problem->sink.push_back(random.chance(0.2) ? infinite : static_cast<float>(random.normal()));
        }
        p.sink = problem->sink.data();
    }
    if (sparse) {
        p.topk = pick({0, 1, 40, 48, 70, 200}, {0, 1, 31, 32, 33, 64, 200, 513});
        p.indices_stride_s = p.topk + 1;
        p.indices_stride_b = p.seqlen_q * p.indices_stride_s;
        std::vector<int64_t> indices(static_cast<size_t>(p.batch * p.indices_stride_b + 1), INT32_MAX);
        const bool all_absent = random.chance(0.1);
        for (int64_t& index : indices) {
            const bool absent = all_absent || random.chance(0.2);
            index = absent ? random.pick({-1, INT32_MIN, INT32_MAX, 2147480000, p.num_pages * p.page_size})
                           : random.integer(0, p.num_pages * p.page_size - 1);
        }
        problem->indices = Indices(p.index_dtype, indices);
        p.indices = problem->indices.data();
        if (random.chance(0.5)) {
            std::vector<int64_t> counts;
            for (int64_t i = 0; i < p.batch * p.seqlen_q; ++i) {
                counts.push_back(random.integer(0, p.topk));
            }
            counts.push_back(0);
            problem->topk_length = Indices(p.index_dtype, counts);
            p.topk_length = problem->topk_length.data();
            p.topk_length_stride_s = 1;
            p.topk_length_stride_b = p.seqlen_q;
        }
    }
    // Values only where somebody looks.
    for (int64_t b = 0; b < p.batch; ++b) {
        int64_t begin;
        int64_t count;
        problem->tokens(b, &begin, &count);
        for (int64_t i = 0; i < count; ++i) {
            for (int64_t h = 0; h < p.heads; ++h) {
                const auto at = [&](int64_t stride_b, int64_t stride_s, int64_t stride_h) {
                    return (varlen_q ? (begin + i) * stride_s : b * stride_b + i * stride_s) + h * stride_h;
                };
                problem->q.set_random(at(p.q_stride_b, p.q_stride_s, p.q_stride_h), q_width, random);
                problem->q_rope.set_random(at(p.q_rope_stride_b, p.q_rope_stride_s, p.q_rope_stride_h), p.d_rope,
                                           random);
            }
            const std::vector<int64_t> rows = problem->visible(b, i, count);
            for (const int64_t row : rows) {
                if (rows656) {
                    fill656(problem->kv.data() + row, random);
                } else {
                    problem->kv.set_random(row, p.d_c + p.d_rope, random);
                }
            }
            if (grid == Grid::kCpu && !rows.empty() && !rows656 && random.chance(0.1)) {
                problem->kv.set(rows.back(), std::numeric_limits<double>::quiet_NaN());
            }
        }
    }
    char text[256];
    std::snprintf(text, sizeof(text),
                  "decode dtype %d%s B %lld H %lld N %lld/%lld d_c %lld d_r %lld mask %d splits %d%s%s%s%s%s%s",
                  p.dtype, rows656 ? " rows656" : "", static_cast<long long>(p.batch), static_cast<long long>(p.heads),
                  static_cast<long long>(p.seqlen_q), static_cast<long long>(p.seqlen_k), static_cast<long long>(p.d_c),
                  static_cast<long long>(p.d_rope), p.mask, p.num_splits, fused_uk ? " w_uk" : "",
                  fused_uv ? " w_uv" : "", sparse ? " sparse" : "", paged ? " paged" : "", varlen_q ? " varlen_q" : "",
                  rope_apart ? " rope apart" : "");
    *name = text;
    return problem;
}

}  // namespace mla_cases
