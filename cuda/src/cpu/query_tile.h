// Online softmax of one tile of query rows against tiles of keys: the core of attention, MLA prefill and MLA decode.
//
// A tile is up to a few hundred rows that share K and V: the query heads of one group, token after token. Rows are the
// vector lanes. They are cut into panels of kPanel rows, stored column-major, so that everything runs down the lanes:
//
//     q  [d_qk][panel]     packed once
//     s  [keys][panel]     = K Q^T: K is broadcast, row-major as it lies; then in place p = 2^(c (s - m))
//     o  [d_v][panel]      = o * 2^(c (m_old - m)) + V^T p: V is broadcast
//
// No packing of K or V, no horizontal operation in the softmax, and the rescaling of o rides on the product's epilogue.
// exp(scale (s - m)) is 2^(c (s - m)) with c = scale log2(e): the difference first, so that scores of any size lose
// nothing but what their own fp32 rounding lost. For each key tile, o's new terms are summed from zero and then added,
// which keeps the rounding error of long sequences down (it grows with the square roots of tile and tile count).
//
// Bits of a row's result depend on the key tile boundaries alone (and on whether the tile has few rows), not on the
// tile or panel that the row is in: skipped blocks would have added exact zeros.
#pragma once

#include "gemm.h"
#include "rows.h"

namespace flare::cpu::FLARE_CPU_NAMESPACE {

constexpr float kLog2E = 1.44269504088896340736f;
constexpr double kLn2 = 0.69314718055994530942;
constexpr float kInfinity = __builtin_inff();

// How a score becomes a logit in units of log2; the same for all rows of a tile but for the slopes.
struct ScoreRule {
    float scale_log2;     // log2(e) * scale; not negative (a negative one goes into q)
    float softcap_log2;   // log2(e) * softcap; 0 = off
    float softcap_scale;  // scale / softcap
    bool has_alibi;

    // Whether scores are turned into logits before the softmax. Else the factor c is left to the exponential; a scale
    // of zero can't be, as masked scores are -inf.
    bool transforms() const { return softcap_log2 != 0.0f || has_alibi || scale_log2 == 0.0f; }
    float exponent_scale() const { return transforms() ? 1.0f : scale_log2; }
};

struct KeyTile {
    int64_t first;   // position of the first key in the sequence
    int64_t count;   // keys
    const float* k;  // [count][k_stride]
    int64_t k_stride;
    const float* v;  // [count][v_stride]
    int64_t v_stride;
    const float* v_clean;  // v with its non-finite rows zeroed, or v itself if there are none
    int64_t v_clean_stride;
    const uint8_t* is_nonfinite;  // [count], or nullptr if no row of v is
};

// Finds rows of v that hold NaN or infinities. Those must reach exactly the queries that see them, but a product would
// spread 0 * NaN to the others of the panel: v_clean [count][d_v rounded up] takes a copy without them.
inline void mark_nonfinite(KeyTile& tile, int64_t d_v, float* v_clean, uint8_t* is_nonfinite) {
    const int64_t clean_stride = round_up(d_v, kLanes);
    tile.v_clean = tile.v;
    tile.v_clean_stride = tile.v_stride;
    tile.is_nonfinite = nullptr;
    for (int64_t j = 0; j < tile.count; ++j) {
        const float* row = tile.v + j * tile.v_stride;
        if (__builtin_expect(!has_nonfinite(row, d_v), 1)) {
            continue;
        }
        if (tile.is_nonfinite == nullptr) {
            for (int64_t i = 0; i < tile.count; ++i) {
                is_nonfinite[i] = 0;
                load_row(tile.v + i * tile.v_stride, FLARE_FP32, d_v, v_clean + i * clean_stride);
            }
            tile.is_nonfinite = is_nonfinite;
            tile.v_clean = v_clean;
            tile.v_clean_stride = clean_stride;
        }
        is_nonfinite[j] = 1;
        for (int64_t d = 0; d < d_v; ++d) {
            v_clean[j * clean_stride + d] = 0.0f;
        }
    }
}

enum class Transform { kMask, kScale, kSoftcap };

// Masks, and makes logits of scores (Transform::kMask leaves them as they are).
template <int kVecs, Transform kTransform, bool kAlibi>
inline void transform_scores(float* s, int64_t count, const ScoreRule& rule, const float* slope_log2,
                             const float* position, const float* low, const float* high, float first_key) {
    constexpr int kWidth = kVecs * kLanes;
    for (int64_t j = 0; j < count; ++j) {
        const Vec key = vset(first_key + static_cast<float>(j));
#pragma GCC unroll 4
        for (int v = 0; v < kVecs; ++v) {
            Vec x = vload(s + j * kWidth + v * kLanes);
            if (kTransform == Transform::kSoftcap) {
                x = vmul(vtanh(vmul(x, vset(rule.softcap_scale))), vset(rule.softcap_log2));
            } else if (kTransform == Transform::kScale) {
                x = vmul(x, vset(rule.scale_log2));
            }
            if (kAlibi) {
                const Vec distance = vabs(vsub(vload(position + v * kLanes), key));
                x = vfnma(vload(slope_log2 + v * kLanes), distance, x);
            }
            const Mask visible = mask_and(vle(vload(low + v * kLanes), key), vlt(key, vload(high + v * kLanes)));
            vstore(s + j * kWidth + v * kLanes, vselect(visible, x, vset(-kInfinity)));
        }
    }
}

// s -> p = 2^(c (s - m)), m and l updated, alpha = 2^(c (m_old - m)) for the rescaling of o.
template <int kVecs>
inline void softmax_update(float* s, int64_t count, float c, float* m, float* l, float* alpha) {
    constexpr int kWidth = kVecs * kLanes;
    Vec largest[kVecs];
#pragma GCC unroll 4
    for (int v = 0; v < kVecs; ++v) {
        largest[v] = vset(-kInfinity);
    }
    for (int64_t j = 0; j < count; ++j) {
#pragma GCC unroll 4
        for (int v = 0; v < kVecs; ++v) {
            largest[v] = vmax(largest[v], vload(s + j * kWidth + v * kLanes));
        }
    }
    Vec base[kVecs];
    Vec sum[kVecs];
#pragma GCC unroll 4
    for (int v = 0; v < kVecs; ++v) {
        const Vec old_m = vload(m + v * kLanes);
        const Vec new_m = vmax(old_m, largest[v]);
        vstore(m + v * kLanes, new_m);
        // A row that has seen nothing keeps m = -inf; only the base is replaced, so that no inf - inf arises.
        base[v] = vselect(veq(new_m, vset(-kInfinity)), vset(0.0f), new_m);
        vstore(alpha + v * kLanes, vexp2(vmul(vsub(old_m, base[v]), vset(c))));
        sum[v] = vset(0.0f);
    }
    for (int64_t j = 0; j < count; ++j) {
#pragma GCC unroll 4
        for (int v = 0; v < kVecs; ++v) {
            float* place = s + j * kWidth + v * kLanes;
            const Vec p = vexp2(vmul(vsub(vload(place), base[v]), vset(c)));
            sum[v] = vadd(sum[v], p);
            vstore(place, p);
        }
    }
#pragma GCC unroll 4
    for (int v = 0; v < kVecs; ++v) {
        vstore(l + v * kLanes, vfma(vload(l + v * kLanes), vload(alpha + v * kLanes), sum[v]));
    }
}

// ---- few rows: one query of a head or of a small group --------------------------------------------------------------
//
// Most lanes of a panel would idle. Up to kFewRows rows, the products run along the head dimension instead, with the
// same layout of s and o.

constexpr int64_t kFewRows = kLanes / 2;

// s[j][row], for kRows rows from `row`; q_rows [rows][d rounded up], zero-padded.
template <int kRows>
inline void few_row_scores(int64_t count, int64_t d, const float* k, int64_t k_stride, const float* q_rows,
                           int64_t q_stride, float* s, int64_t width) {
    float partial[kRows][kLanes][kLanes];
    const int64_t whole = d / kLanes * kLanes;
    for (int64_t first = 0; first < count; first += kLanes) {
        const int64_t keys = min64(kLanes, count - first);
        for (int64_t j = 0; j < keys; ++j) {
            const float* key = k + (first + j) * k_stride;
            Vec acc[kRows];
            const Vec tail = whole < d ? vload_n(key + whole, static_cast<int>(d - whole)) : vset(0.0f);
#pragma GCC unroll 4
            for (int r = 0; r < kRows; ++r) {
                acc[r] = whole < d ? vmul(tail, vload(q_rows + r * q_stride + whole)) : vset(0.0f);
            }
            for (int64_t i = 0; i < whole; i += kLanes) {
                const Vec channels = vload(key + i);
#pragma GCC unroll 4
                for (int r = 0; r < kRows; ++r) {
                    acc[r] = vfma(channels, vload(q_rows + r * q_stride + i), acc[r]);
                }
            }
#pragma GCC unroll 4
            for (int r = 0; r < kRows; ++r) {
                vstore(partial[r][j], acc[r]);
            }
        }
        for (int r = 0; r < kRows; ++r) {
            Vec block[kLanes];
#pragma GCC unroll 16
            for (int j = 0; j < kLanes; ++j) {
                block[j] = j < keys ? vload(partial[r][j]) : vset(0.0f);
            }
            transpose_vectors(block);
#pragma GCC unroll 4
            for (int half = kLanes / 2; half > 0; half /= 2) {
#pragma GCC unroll 8
                for (int j = 0; j < half; ++j) {
                    block[j] = vadd(block[j], block[j + half]);
                }
            }
            float sums[kLanes];
            vstore(sums, block[0]);
            for (int64_t j = 0; j < keys; ++j) {
                s[(first + j) * width + r] = sums[j];
            }
        }
    }
}

// o[d][row] = o * alpha[row] + sum_j p[j][row] v[j][d] for kRows rows and the kBlock vectors of channels from `first`.
template <int kRows, int kBlock>
FLARE_INLINE void few_row_block(int64_t count, int64_t first, int64_t d_v, const float* v, int64_t v_stride,
                                const float* p, int64_t width, const float* alpha, float* o) {
    Vec acc[kRows][kBlock];
#pragma GCC unroll 4
    for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 8
        for (int i = 0; i < kBlock; ++i) {
            acc[r][i] = vset(0.0f);
        }
    }
    for (int64_t j = 0; j < count; ++j) {
        const float* value = v + j * v_stride + first;
#pragma GCC unroll 4
        for (int r = 0; r < kRows; ++r) {
            const Vec weight = vset(p[j * width + r]);
#pragma GCC unroll 8
            for (int i = 0; i < kBlock; ++i) {
                acc[r][i] = vfma(weight, vload(value + i * kLanes), acc[r][i]);
            }
        }
    }
    for (int r = 0; r < kRows; ++r) {
        for (int i = 0; i < kBlock; ++i) {
            float sums[kLanes];
            vstore(sums, acc[r][i]);
            const int64_t begin = first + i * kLanes;
            for (int64_t lane = 0; lane < min64(kLanes, d_v - begin); ++lane) {
                float& element = o[(begin + lane) * width + r];
                element = element * alpha[r] + sums[lane];
            }
        }
    }
}

template <int kRows>
inline void few_row_values(int64_t count, int64_t d_v, const float* v, int64_t v_stride, const float* p, int64_t width,
                           const float* alpha, float* o) {
    constexpr int kBlock = kRows == 1 ? 8 : 4;
    int64_t first = 0;
    for (; first + kBlock * kLanes <= d_v; first += kBlock * kLanes) {
        few_row_block<kRows, kBlock>(count, first, d_v, v, v_stride, p, width, alpha, o);
    }
    for (; first < d_v; first += kLanes) {
        few_row_block<kRows, 1>(count, first, d_v, v, v_stride, p, width, alpha, o);
    }
}

class QueryTile {
  public:
    // Carves the tile's memory; `max_keys` is the largest key tile.
    QueryTile(Carver& carver, int64_t max_rows, int64_t d_qk, int64_t d_v, int64_t max_keys)
        : d_qk_(d_qk), d_v_(d_v), d_qk_padded_(round_up(d_qk, kLanes)), d_v_padded_(round_up(d_v, kLanes)) {
        const int64_t rows = round_up(max_rows, kPanel);
        q_ = carver.take<float>(rows * d_qk_padded_);
        o_ = carver.take<float>(rows * d_v_padded_);
        m_ = carver.take<float>(rows);
        l_ = carver.take<float>(rows);
        slope_log2_ = carver.take<float>(rows);
        low_ = carver.take<int64_t>(rows);
        high_ = carver.take<int64_t>(rows);
        position_ = carver.take<int64_t>(rows);
        s_ = carver.take<float>(max_keys * kPanel);
        max_keys_ = max_keys;
        staging_ = carver.take<float>(kLanes * (d_qk_padded_ > d_v_padded_ ? d_qk_padded_ : d_v_padded_));
    }

    int64_t rows() const { return rows_; }

    // load(row, dst) writes row's d_qk query values.
    template <class Load>
    void set_queries(int64_t rows, bool negate, const Load& load) {
        rows_ = rows;
        for (int64_t i = 0; i < kLanes * d_qk_padded_; ++i) {
            staging_[i] = 0.0f;
        }
        for (int64_t row = 0; row < rows; row += kLanes) {
            const int64_t count = min64(kLanes, rows - row);
            for (int64_t r = 0; r < count; ++r) {
                float* dst = staging_ + r * d_qk_padded_;
                load(row + r, dst);
                if (negate) {
                    for (int64_t d = 0; d < d_qk_; ++d) {
                        dst[d] = -dst[d];
                    }
                }
            }
            for (int64_t i = count * d_qk_padded_; i < kLanes * d_qk_padded_; ++i) {
                staging_[i] = 0.0f;  // lanes without a row: finite
            }
            if (rows <= kFewRows) {
                for (int64_t i = 0; i < rows * d_qk_padded_; ++i) {
                    q_[i] = staging_[i];
                }
                break;
            }
            const int64_t panel = row / kPanel;
            float* q = q_ + panel * kPanel * d_qk_padded_ + row % kPanel;
            transpose_rows(staging_, d_qk_padded_, d_qk_padded_, nullptr, q, vecs_of(panel) * kLanes);
        }
        if (rows <= kFewRows) {  // its idle lanes of s are never written: give them something finite
            for (int64_t i = 0; i < max_keys_ * kLanes; ++i) {
                s_[i] = 0.0f;
            }
        }
        const int64_t padded = round_up(rows, kLanes);
        for (int64_t row = 0; row < padded; ++row) {
            m_[row] = -kInfinity;
            l_[row] = 0.0f;
            slope_log2_[row] = 0.0f;
            position_[row] = 0;
            low_[row] = 0;
            high_[row] = 0;
        }
        for (int64_t panel = 0; panel * kPanel < rows; ++panel) {
            float* o = o_ + panel * kPanel * d_v_padded_;
            for (int64_t i = 0; i < d_v_padded_ * vecs_of(panel) * kLanes; ++i) {
                o[i] = 0.0f;
            }
        }
    }

    // Row sees keys [low, high); position is its own place among the keys, for ALiBi.
    void set_row(int64_t row, int64_t low, int64_t high, int64_t position, float slope) {
        low_[row] = low;
        high_[row] = high > low ? high : low;
        position_[row] = position;
        slope_log2_[row] = slope * kLog2E;
    }

    void update(const KeyTile& tile, const ScoreRule& rule) {
        c_ = rule.exponent_scale();
        for (int64_t panel = 0; panel * kPanel < rows_; ++panel) {
            switch (vecs_of(panel)) {
                case 1:
                    update_panel<1>(panel, tile, rule);
                    break;
                case 2:
                    update_panel<2>(panel, tile, rule);
                    break;
                case 3:
                    if constexpr (kMaxVecs >= 3) {
                        update_panel<3>(panel, tile, rule);
                    }
                    break;
                default:
                    if constexpr (kMaxVecs >= 4) {
                        update_panel<4>(panel, tile, rule);
                    }
                    break;
            }
        }
    }

    // Normalises and hands out the rows: store(row, values [d_v], lse). sink(row) is one more logit (natural units),
    // -inf for none; v_scale multiplies the values.
    template <class Sink, class Store>
    void finish(float v_scale, const Sink& sink, const Store& store) {
        for (int64_t row = 0; row < rows_; row += kLanes) {
            const int64_t count = min64(kLanes, rows_ - row);
            float factor[kLanes];
            float lse[kLanes];
            for (int64_t r = 0; r < kLanes; ++r) {
                factor[r] = 0.0f;
                if (r < count) {
                    normaliser(static_cast<double>(m_[row + r]) * c_, l_[row + r], sink(row + r), v_scale, factor + r,
                               lse + r);
                }
            }
            const int64_t panel = row / kPanel;
            const int width = vecs_of(panel) * kLanes;
            const float* o = o_ + panel * kPanel * d_v_padded_ + row % kPanel;
            for (int64_t d = 0; d < d_v_padded_; d += kLanes) {
                transpose_rows(o + d * width, width, kLanes, factor, staging_ + d, d_v_padded_);
            }
            for (int64_t r = 0; r < count; ++r) {
                float* values = staging_ + r * d_v_padded_;
                if (l_[row + r] == 0.0f) {  // nothing seen
                    for (int64_t d = 0; d < d_v_; ++d) {
                        values[d] = 0.0f;
                    }
                }
                store(row + r, values, lse[r]);
            }
        }
    }

  private:
    int vecs_of(int64_t panel) const {
        const int64_t rest = (rows_ - panel * kPanel + kLanes - 1) / kLanes;
        return rest < kMaxVecs ? static_cast<int>(rest) : kMaxVecs;
    }

    // In double: a handful of operations per row, and lse keeps fp32's full precision.
    static void normaliser(double m, float l, float sink, float v_scale, float* factor, float* lse) {
        const double sink_log2 = static_cast<double>(sink) / kLn2;
        if (l == 0.0f || sink == kInfinity) {
            *factor = 0.0f;
            *lse = sink;
            return;
        }
        double top = m;
        if (sink_log2 > top) {
            top = sink_log2;
        }
        const double weight = exp2(m - top);
        const double total = l * weight + (sink == -kInfinity ? 0.0 : exp2(sink_log2 - top));
        *factor = static_cast<float>(weight / total * v_scale);
        *lse = static_cast<float>(top * kLn2 + log(total));
    }

    template <int kVecs>
    void update_panel(int64_t panel, const KeyTile& tile, const ScoreRule& rule) {
        constexpr int kWidth = kVecs * kLanes;
        const int64_t row0 = panel * kPanel;
        // Keys that some row sees, and keys that all rows see.
        int64_t some_low = INT64_MAX;
        int64_t some_high = 0;
        int64_t all_low = 0;
        int64_t all_high = INT64_MAX;
        for (int64_t row = row0; row < min64(row0 + kWidth, rows_); ++row) {
            if (low_[row] < high_[row]) {
                some_low = min64(some_low, low_[row]);
                some_high = max64(some_high, high_[row]);
            }
            all_low = max64(all_low, low_[row]);
            all_high = min64(all_high, high_[row]);
        }
        const int64_t begin = max64(tile.first, some_low);
        const int64_t end = min64(tile.first + tile.count, some_high);
        if (begin >= end) {
            return;
        }
        const int64_t skipped = begin - tile.first;
        const int64_t count = end - begin;
        const float* q = q_ + row0 * d_qk_padded_;
        float* o = o_ + row0 * d_v_padded_;
        const bool few_rows = kVecs == 1 && rows_ <= kFewRows;
        const float* k = tile.k + skipped * tile.k_stride;
        const float* v = tile.v_clean + skipped * tile.v_clean_stride;
        if (few_rows) {
            for_few_rows([&](auto block, int64_t row) {
                few_row_scores<decltype(block)::kRows>(count, d_qk_, k, tile.k_stride, q_ + row * d_qk_padded_,
                                                       d_qk_padded_, s_ + row, kWidth);
            });
        } else {
            gemm_rows<kVecs, Orientation::kRowMajor>(count, d_qk_, k, tile.k_stride, q, kWidth, s_, kWidth,
                                                     Update::kStore, nullptr);
        }
        const bool partly_visible = begin < all_low || end > all_high;
        if (partly_visible || rule.transforms()) {
            float low[kWidth];
            float high[kWidth];
            float position[kWidth];
            for (int64_t r = 0; r < kWidth; ++r) {
                // Relative to the tile, so exact in fp32; far away bounds are cut to just outside.
                low[r] = static_cast<float>(max64(-1, min64(low_[row0 + r] - tile.first, tile.count)));
                high[r] = static_cast<float>(max64(-1, min64(high_[row0 + r] - tile.first, tile.count)));
                position[r] = static_cast<float>(position_[row0 + r] - tile.first);
            }
            auto transform = transform_scores<kVecs, Transform::kMask, false>;
            if (rule.softcap_log2 != 0.0f) {
                transform = rule.has_alibi ? transform_scores<kVecs, Transform::kSoftcap, true>
                                           : transform_scores<kVecs, Transform::kSoftcap, false>;
            } else if (rule.transforms()) {
                transform = rule.has_alibi ? transform_scores<kVecs, Transform::kScale, true>
                                           : transform_scores<kVecs, Transform::kScale, false>;
            }
            transform(s_, count, rule, slope_log2_ + row0, position, low, high, static_cast<float>(skipped));
        }
        float alpha[kWidth];
        softmax_update<kVecs>(s_, count, c_, m_ + row0, l_ + row0, alpha);
        if (few_rows) {
            for_few_rows([&](auto block, int64_t row) {
                few_row_values<decltype(block)::kRows>(count, d_v_, v, tile.v_clean_stride, s_ + row, kWidth,
                                                       alpha + row, o + row);
            });
        } else {
            gemm_rows<kVecs, Orientation::kTransposed>(d_v_, count, v, tile.v_clean_stride, s_, kWidth, o, kWidth,
                                                       Update::kRescale, alpha);
        }
        if (__builtin_expect(tile.is_nonfinite != nullptr, 0)) {
            add_nonfinite(tile, skipped, count, row0, kWidth, o);
        }
    }

    template <int kCount>
    struct RowBlock {
        static constexpr int kRows = kCount;
    };

    // visit(RowBlock, first row) in blocks of 4, 2 and 1.
    template <class Visit>
    void for_few_rows(const Visit& visit) const {
        int64_t row = 0;
        for (; row + 4 <= rows_; row += 4) {
            visit(RowBlock<4>(), row);
        }
        if (row + 2 <= rows_) {
            visit(RowBlock<2>(), row);
            row += 2;
        }
        if (row < rows_) {
            visit(RowBlock<1>(), row);
        }
    }

    // The keys left out of v_clean, for the rows that see them.
    void add_nonfinite(const KeyTile& tile, int64_t skipped, int64_t count, int64_t row0, int64_t width, float* o) {
        for (int64_t j = 0; j < count; ++j) {
            if (tile.is_nonfinite[skipped + j] == 0) {
                continue;
            }
            const int64_t key = tile.first + skipped + j;
            const float* v = tile.v + (skipped + j) * tile.v_stride;
            for (int64_t r = 0; r < width; ++r) {
                if (key < low_[row0 + r] || key >= high_[row0 + r]) {
                    continue;
                }
                for (int64_t d = 0; d < d_v_; ++d) {
                    o[d * width + r] += s_[j * width + r] * v[d];
                }
            }
        }
    }

    int64_t d_qk_;
    int64_t d_v_;
    int64_t d_qk_padded_;
    int64_t d_v_padded_;
    int64_t rows_ = 0;
    float c_ = 1.0f;  // of the rule in use
    int64_t max_keys_;
    float* q_;  // [panel][d_qk padded][panel rows]; few rows: [row][d_qk padded]
    float* o_;  // [panel][d_v padded][panel rows]
    float* m_;  // running maximum of what the softmax sees: scores, or logits where the rule transforms
    float* l_;  // running sum
    float* slope_log2_;
    int64_t* low_;
    int64_t* high_;
    int64_t* position_;
    float* s_;        // [keys][panel rows]
    float* staging_;  // [kLanes][d padded], rows on their way in or out
};

}  // namespace flare::cpu::FLARE_CPU_NAMESPACE
