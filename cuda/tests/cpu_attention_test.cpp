// flare_attention_forward and flare_attention_merge on the CPU against a definition in double: random mixtures of all
// options on every instruction set, then the edges one by one.
#include "cpu_test.h"

#include <algorithm>
#include <memory>

using namespace cpu_test;

namespace {

int64_t index_at(const void* array, int32_t dtype, int64_t i) {
    return static_cast<int64_t>(read(array, dtype, i));
}

struct Lengths {
    int64_t q_begin, q, k_begin, k;
};

Lengths lengths_of(const flare_attention_params& p, int64_t b) {
    const int32_t type = p.index_dtype == 0 ? FLARE_INT32 : p.index_dtype;
    Lengths n{0, p.seqlen_q, 0, p.seqlen_k};
    if (p.cu_seqlens_q != nullptr) {
        n.q_begin = index_at(p.cu_seqlens_q, type, b);
        n.q = index_at(p.cu_seqlens_q, type, b + 1) - n.q_begin;
    }
    if (p.cu_seqlens_k != nullptr) {
        n.k_begin = index_at(p.cu_seqlens_k, type, b);
        n.k = index_at(p.cu_seqlens_k, type, b + 1) - n.k_begin;
    }
    n.q = p.seqused_q != nullptr ? index_at(p.seqused_q, type, b) : n.q;
    n.k = p.seqused_k != nullptr ? index_at(p.seqused_k, type, b) : n.k;
    return n;
}

// Offset of key j's row of sequence b in k or v.
int64_t key_offset(const flare_attention_params& p, const Lengths& n, int64_t b, int64_t j, int64_t head,
                   int64_t stride_b, int64_t stride_s, int64_t stride_h) {
    const int32_t type = p.index_dtype == 0 ? FLARE_INT32 : p.index_dtype;
    if (p.block_table != nullptr) {
        const int64_t page = index_at(p.block_table, type, b * p.block_table_stride_b + j / p.page_size);
        return page * stride_b + j % p.page_size * stride_s + head * stride_h;
    }
    return (p.cu_seqlens_k != nullptr ? (n.k_begin + j) * stride_s : b * stride_b + j * stride_s) + head * stride_h;
}

// The definition, straight from the header's text.
void reference(const flare_attention_params& p, Output& out, Output* lse) {
    const double scale = (p.flags & FLARE_FLAG_SCALE) != 0 || p.scale != 0
                             ? static_cast<double>(p.scale)
                             : 1.0 / std::sqrt(static_cast<double>(p.head_dim_qk));
    const int64_t group = p.heads_q / p.heads_kv;
    std::vector<double> scores;
    std::vector<double> row(static_cast<size_t>(p.head_dim_v));
    for (int64_t b = 0; b < p.batch; ++b) {
        const Lengths n = lengths_of(p, b);
        for (int64_t h = 0; h < p.heads_q; ++h) {
            const int64_t hk = h / group;
            const auto descale = [&](const float* values) {
                return values == nullptr
                           ? 1.0
                           : static_cast<double>(values[b * p.descale_stride_b + hk * p.descale_stride_h]);
            };
            for (int64_t i = 0; i < n.q; ++i) {
                const int64_t position = i + n.k - n.q;
                int64_t low = 0;
                int64_t high = n.k;
                if (p.mask == FLARE_MASK_CAUSAL) {
                    high = std::min(high, position + 1);
                } else if (p.mask == FLARE_MASK_WINDOW) {
                    low = p.window_left < 0
                              ? 0
                              : std::max<int64_t>(0, position - std::min<int64_t>(p.window_left, 1 << 30));
                    high = p.window_right < 0
                               ? high
                               : std::min(high, position + std::min<int64_t>(p.window_right, 1 << 30) + 1);
                }
                const int64_t q_at =
                    (p.cu_seqlens_q != nullptr ? (n.q_begin + i) * p.q_stride_s : b * p.q_stride_b + i * p.q_stride_s) +
                    h * p.q_stride_h;
                double top = p.sink != nullptr ? static_cast<double>(p.sink[h]) : -HUGE_VAL;
                scores.clear();
                for (int64_t j = low; j < high; ++j) {
                    const int64_t k_at = key_offset(p, n, b, j, hk, p.k_stride_b, p.k_stride_s, p.k_stride_h);
                    double s = 0;
                    for (int64_t d = 0; d < p.head_dim_qk; ++d) {
                        s += read(p.q, p.dtype, q_at + d) * read(p.k, p.dtype, k_at + d);
                    }
                    s *= scale * descale(p.q_descale) * descale(p.k_descale);
                    if (p.softcap > 0) {
                        s = p.softcap * std::tanh(s / p.softcap);
                    }
                    if (p.alibi_slopes != nullptr) {
                        s -= static_cast<double>(p.alibi_slopes[b * p.alibi_stride_b + h]) *
                             std::fabs(static_cast<double>(position - j));
                    }
                    scores.push_back(s);
                    top = s > top ? s : top;
                }
                double total =
                    p.sink != nullptr && top != -HUGE_VAL ? std::exp(static_cast<double>(p.sink[h]) - top) : 0.0;
                std::fill(row.begin(), row.end(), 0.0);
                for (int64_t j = low; j < high; ++j) {
                    const double weight = std::exp(scores[static_cast<size_t>(j - low)] - top);
                    total += weight;
                    const int64_t v_at = key_offset(p, n, b, j, hk, p.v_stride_b, p.v_stride_s, p.v_stride_h);
                    for (int64_t d = 0; d < p.head_dim_v; ++d) {
                        row[static_cast<size_t>(d)] += weight * read(p.v, p.dtype, v_at + d);
                    }
                }
                const int64_t out_at = (p.cu_seqlens_q != nullptr ? (n.q_begin + i) * p.out_stride_s
                                                                  : b * p.out_stride_b + i * p.out_stride_s) +
                                       h * p.out_stride_h;
                for (int64_t d = 0; d < p.head_dim_v; ++d) {
                    out.expect(out_at + d,
                               low < high ? row[static_cast<size_t>(d)] * descale(p.v_descale) / total : 0.0);
                }
                if (lse != nullptr) {
                    const int64_t at =
                        (p.cu_seqlens_q != nullptr ? n.q_begin : b * p.lse_stride_b) + h * p.lse_stride_h + i;
                    lse->expect(at, total == 0 ? -HUGE_VAL : top + std::log(total));
                }
            }
        }
    }
}

// One call with all its memory.
struct Problem {
    flare_attention_params p{};
    Data q, k, v;
    Output out, lse;
    Indices cu_q, cu_k, used_q, used_k, table;
    std::vector<float> slopes, sink, q_descale, k_descale, v_descale;
    Workspace workspace;

    Problem(int32_t dtype, int64_t batch, int64_t heads_q, int64_t heads_kv, int64_t sq, int64_t sk, int64_t d,
            int64_t dv) {
        p.struct_size = sizeof(p);
        p.device = FLARE_DEVICE_CPU;
        p.dtype = dtype;
        p.batch = batch;
        p.heads_q = heads_q;
        p.heads_kv = heads_kv;
        p.seqlen_q = sq;
        p.seqlen_k = sk;
        p.head_dim_qk = d;
        p.head_dim_v = dv;
    }

    // Strides of [B, S, H, D], or of [B, H, S, D], with `gap` unused elements after each row.
    void lay_out(int64_t batch_q, int64_t rows_q, int64_t batch_k, int64_t rows_k, bool head_major, int64_t gap,
                 bool with_lse, Random& random) {
        const auto strides = [&](int64_t rows, int64_t heads, int64_t width, int64_t* b, int64_t* s, int64_t* h) {
            width += gap;
            *s = head_major ? width : heads * width;
            *h = head_major ? rows * width : width;
            *b = rows * heads * width;
        };
        strides(rows_q, p.heads_q, p.head_dim_qk, &p.q_stride_b, &p.q_stride_s, &p.q_stride_h);
        strides(rows_k, p.heads_kv, p.head_dim_qk, &p.k_stride_b, &p.k_stride_s, &p.k_stride_h);
        strides(rows_k, p.heads_kv, p.head_dim_v, &p.v_stride_b, &p.v_stride_s, &p.v_stride_h);
        strides(rows_q, p.heads_q, p.head_dim_v, &p.out_stride_b, &p.out_stride_s, &p.out_stride_h);
        q = Data(p.dtype, batch_q * p.q_stride_b);
        k = Data(p.dtype, batch_k * p.k_stride_b);
        v = Data(p.dtype, batch_k * p.v_stride_b);
        const int32_t out_dtype = p.out_dtype != 0 ? p.out_dtype : p.dtype == FLARE_FP8_E4M3 ? FLARE_BF16 : p.dtype;
        out = Output(out_dtype, batch_q * p.out_stride_b);
        p.lse_stride_h = rows_q + gap;
        p.lse_stride_b = p.heads_q * p.lse_stride_h;
        lse = Output(FLARE_FP32, batch_q * p.lse_stride_b);
        p.q = q.data();
        p.k = k.data();
        p.v = v.data();
        p.out = out.data();
        p.lse = with_lse ? reinterpret_cast<float*>(lse.data()) : nullptr;
        fill(random);
    }

    // Only rows that are in use get values; everything else stays NaN.
    void fill(Random& random) {
        for (int64_t b = 0; b < p.batch; ++b) {
            const Lengths n = lengths_of(p, b);
            for (int64_t i = 0; i < n.q; ++i) {
                for (int64_t h = 0; h < p.heads_q; ++h) {
                    const int64_t row = p.cu_seqlens_q != nullptr ? (n.q_begin + i) * p.q_stride_s
                                                                  : b * p.q_stride_b + i * p.q_stride_s;
                    q.set_random(row + h * p.q_stride_h, p.head_dim_qk, random);
                }
            }
            for (int64_t j = 0; j < n.k; ++j) {
                for (int64_t h = 0; h < p.heads_kv; ++h) {
                    k.set_random(key_offset(p, n, b, j, h, p.k_stride_b, p.k_stride_s, p.k_stride_h), p.head_dim_qk,
                                 random);
                    v.set_random(key_offset(p, n, b, j, h, p.v_stride_b, p.v_stride_s, p.v_stride_h), p.head_dim_v,
                                 random);
                }
            }
        }
    }

    void run(int32_t threads, const std::string& name) {
        out.poison();
        lse.poison();
        p.num_threads = threads;
        uint64_t bytes = 0;
        int32_t status = flare_attention_workspace(&p, &bytes);
        EXPECT(status == FLARE_OK, "%s: workspace: %s", name.c_str(), last_error().c_str());
        workspace.give(p, bytes);
        status = flare_attention_forward(&p);
        EXPECT(status == FLARE_OK, "%s: %s", name.c_str(), last_error().c_str());
    }

    double bound() const {
        const int32_t out_dtype = p.out_dtype != 0 ? p.out_dtype : p.dtype;
        return out_bound(p.dtype, out_dtype, 2e-6, 1e-3, 5e-3);
    }

    void check(const std::string& name) {
        reference(p, out, p.lse != nullptr ? &lse : nullptr);
        for (const flare::cpu::Isa isa : kIsas) {
            flare::cpu::override_isa(isa);
            const std::string full = name + " " + flare::cpu::isa_name(isa);
            run(0, full);
            out.check_relative(bound(), full.c_str());
            if (p.lse != nullptr) {
                lse.check_absolute(1e-5, (full + " lse").c_str());
            }
            const std::vector<char> first_out = out.snapshot();
            const std::vector<char> first_lse = lse.snapshot();
            run(1, full);
            EXPECT(first_out == out.snapshot() && first_lse == lse.snapshot(), "%s: bits depend on the thread count",
                   full.c_str());
        }
        flare::cpu::override_isa(flare::cpu::Isa::kAvx512);
    }
};

std::vector<int64_t> cumulative(const std::vector<int64_t>& lengths, int64_t start) {
    std::vector<int64_t> sums = {start};
    for (const int64_t n : lengths) {
        sums.push_back(sums.back() + n);
    }
    return sums;
}

std::unique_ptr<Problem> random_problem(Random& random, std::string* name) {
    const int32_t dtype =
        static_cast<int32_t>(random.pick({FLARE_FP32, FLARE_FP32, FLARE_FP16, FLARE_BF16, FLARE_FP8_E4M3}));
    const int64_t heads_kv = random.integer(1, 3);
    const int64_t group = random.pick({1, 1, 2, 3, 5, 8});
    const int64_t d = random.pick({1, 7, 8, 16, 40, 64, 72, 96, 128, 200});
    const int64_t dv = random.chance(0.6) ? d : random.pick({1, 8, 33, 64, 128});
    const int64_t batch = random.integer(1, 3);
    const int64_t sq = random.pick({0, 1, 1, 2, 5, 17, 63, 64, 65, 100, 130});
    const int64_t sk = random.pick({0, 1, 3, 31, 64, 95, 96, 97, 150, 193, 300});
    auto problem = std::make_unique<Problem>(dtype, batch, heads_kv * group, heads_kv, sq, sk, d, dv);
    flare_attention_params& p = problem->p;
    p.index_dtype = static_cast<int32_t>(random.pick({0, FLARE_INT32, FLARE_INT64}));
    const int32_t type = p.index_dtype == 0 ? FLARE_INT32 : p.index_dtype;
    if (random.chance(0.3)) {
        p.out_dtype = static_cast<int32_t>(random.pick({FLARE_FP32, FLARE_FP16, FLARE_BF16}));
    }
    const bool varlen_q = random.chance(0.35);
    const bool paged = random.chance(0.3);
    const bool varlen_k = !paged && random.chance(0.5);
    const auto ragged = [&](int64_t longest) {
        std::vector<int64_t> lengths;
        for (int64_t b = 0; b < batch; ++b) {
            lengths.push_back(random.chance(0.2) ? 0 : random.integer(0, longest));
        }
        return lengths;
    };
    std::vector<int64_t> q_lengths(static_cast<size_t>(batch), sq);
    std::vector<int64_t> k_lengths(static_cast<size_t>(batch), sk);
    if (varlen_q) {
        q_lengths = ragged(sq);
        const std::vector<int64_t> sums = cumulative(q_lengths, random.integer(0, 3));
        p.total_q = sums.back() + random.integer(0, 3);
        problem->cu_q = Indices(type, sums);
        p.cu_seqlens_q = problem->cu_q.data();
    }
    if (varlen_k) {
        k_lengths = ragged(sk);
        const std::vector<int64_t> sums = cumulative(k_lengths, random.integer(0, 3));
        p.total_k = sums.back() + random.integer(0, 3);
        problem->cu_k = Indices(type, sums);
        p.cu_seqlens_k = problem->cu_k.data();
    }
    const auto shortened = [&](const std::vector<int64_t>& lengths) {
        std::vector<int64_t> used;
        for (const int64_t n : lengths) {
            used.push_back(random.integer(0, n));
        }
        return used;
    };
    if (random.chance(0.3)) {
        problem->used_q = Indices(type, shortened(q_lengths));
        p.seqused_q = problem->used_q.data();
    }
    if (paged || random.chance(0.3)) {
        k_lengths = shortened(k_lengths);
        problem->used_k = Indices(type, k_lengths);
        p.seqused_k = problem->used_k.data();
    }
    if (random.chance(0.6)) {
        p.mask = random.chance(0.5) ? FLARE_MASK_CAUSAL : FLARE_MASK_WINDOW;
        p.window_left = random.pick({-1, 0, 1, 5, 40, 96, 1000, INT32_MAX, INT64_MAX});
        p.window_right = random.pick({-1, 0, 0, 2, 30, 1000, INT64_MAX});
    }
    if (paged) {
        p.page_size = random.pick({1, 3, 16, 61, 64});
        const int64_t pages_each = (sk + p.page_size - 1) / p.page_size + 1;
        p.num_pages = batch * pages_each + 2;
        p.block_table_stride_b = pages_each + 1;
        std::vector<int64_t> free_pages;
        for (int64_t page = 0; page < p.num_pages; ++page) {
            free_pages.push_back(page);
        }
        std::vector<int64_t> table(static_cast<size_t>(batch * p.block_table_stride_b), 2147480000);
        for (int64_t b = 0; b < batch; ++b) {
            for (int64_t i = 0; i * p.page_size < k_lengths[static_cast<size_t>(b)]; ++i) {
                const int64_t at = random.integer(0, static_cast<int64_t>(free_pages.size()) - 1);
                table[static_cast<size_t>(b * p.block_table_stride_b + i)] = free_pages[static_cast<size_t>(at)];
                free_pages.erase(free_pages.begin() + at);
            }
        }
        problem->table = Indices(type, table);
        p.block_table = problem->table.data();
    }
    if (random.chance(0.3)) {
        p.softcap = static_cast<float>(random.pick({1, 5, 50}));
    }
    if (random.chance(0.3)) {
        p.alibi_stride_b = random.chance(0.5) ? 0 : p.heads_q;
        for (int64_t i = 0; i < batch * p.heads_q; ++i) {
            problem->slopes.push_back(static_cast<float>(std::exp2(-static_cast<double>(random.integer(0, 8)))));
        }
        p.alibi_slopes = problem->slopes.data();
    }
    if (random.chance(0.3)) {
        for (int64_t h = 0; h < p.heads_q; ++h) {
            problem->sink.push_back(random.chance(0.2) ? -HUGE_VALF : static_cast<float>(2 * random.normal()));
        }
        p.sink = problem->sink.data();
    }
    if (random.chance(0.3)) {
        p.flags = FLARE_FLAG_SCALE;
        p.scale = static_cast<float>(random.pick({0, 1, 2}) == 0 ? 0.0 : 0.2 * random.normal());
    }
    if (dtype == FLARE_FP8_E4M3 && random.chance(0.7)) {
        for (int64_t i = 0; i < batch * heads_kv; ++i) {
            problem->q_descale.push_back(static_cast<float>(0.5 + 0.5 * std::fabs(random.normal())));
            problem->k_descale.push_back(static_cast<float>(0.5 + 0.5 * std::fabs(random.normal())));
            problem->v_descale.push_back(static_cast<float>(0.5 + 0.5 * std::fabs(random.normal())));
        }
        p.q_descale = problem->q_descale.data();
        p.k_descale = random.chance(0.8) ? problem->k_descale.data() : nullptr;
        p.v_descale = problem->v_descale.data();
        p.descale_stride_h = random.integer(0, 1);
        p.descale_stride_b = random.chance(0.5) ? 0 : heads_kv;
    }
    p.num_splits = static_cast<int32_t>(random.pick({0, 0, 1, 2, 3, 7}));
    p.deterministic = static_cast<int32_t>(random.integer(0, 1));
    problem->lay_out(varlen_q ? 1 : batch, varlen_q ? p.total_q : sq,
                     paged      ? p.num_pages
                     : varlen_k ? 1
                                : batch,
                     paged      ? p.page_size
                     : varlen_k ? p.total_k
                                : sk,
                     random.chance(0.5), random.pick({0, 0, 3, 16}), random.chance(0.8), random);
    if (random.chance(0.25)) {  // NaN where somebody may see it: it must reach those rows, and no others
        for (int i = 0; i < 3; ++i) {
            const int64_t b = random.integer(0, batch - 1);
            const Lengths n = lengths_of(p, b);
            if (n.k > 0) {
                const int64_t j = random.integer(0, n.k - 1);
                const bool in_k = random.chance(0.5);
                const int64_t at = in_k ? key_offset(p, n, b, j, 0, p.k_stride_b, p.k_stride_s, p.k_stride_h)
                                        : key_offset(p, n, b, j, 0, p.v_stride_b, p.v_stride_s, p.v_stride_h);
                (in_k ? problem->k : problem->v).set(at, std::numeric_limits<double>::quiet_NaN());
            }
        }
    }
    char text[256];
    std::snprintf(
        text, sizeof(text), "dtype %d B %lld H %lld/%lld N %lld/%lld D %lld/%lld mask %d (%lld,%lld) splits %d%s%s%s",
        dtype, static_cast<long long>(batch), static_cast<long long>(p.heads_q), static_cast<long long>(heads_kv),
        static_cast<long long>(sq), static_cast<long long>(sk), static_cast<long long>(d), static_cast<long long>(dv),
        p.mask, static_cast<long long>(p.window_left), static_cast<long long>(p.window_right), p.num_splits,
        varlen_q ? " varlen_q" : "", varlen_k ? " varlen_k" : "", paged ? " paged" : "");
    *name = text;
    return problem;
}

void test_random_mixtures(int count) {
    Random random(20260101);
    double worst = 0;
    for (int i = 0; i < count; ++i) {
        std::string name;
        const std::unique_ptr<Problem> problem = random_problem(random, &name);
        problem->check("mixture " + std::to_string(i) + ": " + name);
        worst = std::max(worst, problem->out.worst());
    }
    std::printf("%d mixtures: worst error %.2f of the bound\n", count, worst);
}

std::unique_ptr<Problem> dense(int32_t dtype, int64_t heads_q, int64_t heads_kv, int64_t sq, int64_t sk, int64_t d,
                               int64_t dv, int32_t mask, Random& random) {
    auto problem = std::make_unique<Problem>(dtype, 1, heads_q, heads_kv, sq, sk, d, dv);
    problem->p.mask = mask;
    problem->lay_out(1, sq, 1, sk, false, 0, true, random);
    return problem;
}

void test_sizes() {
    Random random(2);
    for (const int64_t d : {80, 112, 160, 224, 256, 512}) {
        dense(FLARE_BF16, 2, 1, 40, 120, d, d, FLARE_MASK_CAUSAL, random)->check("head dim " + std::to_string(d));
    }
    dense(FLARE_FP32, 1, 1, 1, 3000, 128, 128, FLARE_MASK_NONE, random)->check("long decode");
    const auto longest = dense(FLARE_FP32, 1, 1, 20, 16384, 64, 64, FLARE_MASK_NONE, random);
    longest->check("16384 keys");  // rounding errors must not add up along the keys
    std::printf("16384 keys: worst error %.2f of the bound\n", longest->out.worst());
    dense(FLARE_FP32, 8, 2, 3, 2600, 64, 64, FLARE_MASK_CAUSAL, random)->check("automatic splits");
    dense(FLARE_FP32, 1, 1, 300, 1200, 64, 512, FLARE_MASK_CAUSAL, random)->check("many tiles");
    dense(FLARE_FP32, 16, 1, 33, 700, 64, 64, FLARE_MASK_CAUSAL, random)->check("packed group");
}

// Scores so low that a first block without visible keys must not leave a maximum of 0 behind; and large ones. Whole
// numbers, so that the scores themselves are exact in fp32.
void test_extreme_scores() {
    Random random(3);
    for (const double size : {-1e4, 1e4}) {
        auto problem = std::make_unique<Problem>(FLARE_FP32, 1, 1, 1, 200, 400, 16, 16);
        problem->p.mask = FLARE_MASK_WINDOW;
        problem->p.window_left = 20;
        problem->p.window_right = 0;
        problem->p.scale = 1.0f;
        problem->lay_out(1, 200, 1, 400, false, 0, true, random);
        for (int64_t i = 0; i < 200 * 16; ++i) {
            problem->q.set(i, i % 16 == 0 ? size : static_cast<double>(random.integer(-1, 1)));
        }
        for (int64_t j = 0; j < 400 * 16; ++j) {
            problem->k.set(j, j % 16 == 0 ? 1.0 : static_cast<double>(random.integer(-1, 1)));
        }
        problem->check("scores near " + std::to_string(size));
    }
    auto sinks = dense(FLARE_FP32, 2, 1, 20, 50, 16, 16, FLARE_MASK_NONE, random);
    sinks->sink = {300.0f, -300.0f};  // far above and far below every score
    sinks->p.sink = sinks->sink.data();
    sinks->check("extreme sinks");
    auto infinite = dense(FLARE_FP32, 1, 1, 5, 50, 16, 16, FLARE_MASK_NONE, random);
    infinite->sink = {HUGE_VALF};
    infinite->p.sink = infinite->sink.data();
    infinite->run(0, "infinite sink");
    EXPECT(read(infinite->out.data(), FLARE_FP32, 0) == 0.0 && read(infinite->lse.data(), FLARE_FP32, 0) == HUGE_VAL,
           "an infinite sink takes all weight");
}

// A window that reaches everything is the causal mask, bit by bit; results don't depend on neighbours in the batch.
void test_bitwise_promises() {
    Random random(4);
    auto causal = dense(FLARE_FP32, 2, 1, 150, 333, 40, 40, FLARE_MASK_CAUSAL, random);
    causal->run(0, "causal");
    const std::vector<char> expected = causal->out.snapshot();
    for (const int64_t left : {int64_t{-1}, int64_t{332}, int64_t{333}, INT64_MAX}) {
        causal->p.mask = FLARE_MASK_WINDOW;
        causal->p.window_left = left;
        causal->p.window_right = 0;
        causal->run(0, "window");
        EXPECT(causal->out.snapshot() == expected, "window (%lld, 0) differs from causal",
               static_cast<long long>(left));
    }
    for (int repeat = 0; repeat < 20; ++repeat) {
        causal->run(0, "repeat");
        EXPECT(causal->out.snapshot() == expected, "repeat %d differs", repeat);
    }
}

// deterministic: a sequence's bits don't depend on the others of the batch, nor on the maxima.
void test_batch_invariance() {
    Random random(12);
    const std::vector<int64_t> q_lengths = {1, 70, 5, 300};
    const std::vector<int64_t> k_lengths = {2100, 700, 3000, 310};
    Problem batch(FLARE_FP32, 4, 4, 2, 300, 3000, 32, 32);
    flare_attention_params& p = batch.p;
    batch.cu_q = Indices(FLARE_INT32, cumulative(q_lengths, 0));
    batch.cu_k = Indices(FLARE_INT32, cumulative(k_lengths, 0));
    p.cu_seqlens_q = batch.cu_q.data();
    p.cu_seqlens_k = batch.cu_k.data();
    p.total_q = 376;
    p.total_k = 6110;
    p.mask = FLARE_MASK_CAUSAL;
    p.deterministic = 1;
    batch.lay_out(1, p.total_q, 1, p.total_k, false, 0, true, random);
    batch.run(0, "batch");
    for (int64_t b = 0; b < 4; ++b) {
        const Lengths n = lengths_of(p, b);
        flare_attention_params alone = p;
        Output out(FLARE_FP32, n.q * p.out_stride_s);
        alone.batch = 1;
        alone.cu_seqlens_q = alone.cu_seqlens_k = nullptr;
        alone.seqlen_q = n.q;
        alone.seqlen_k = n.k;
        alone.q = batch.q.data() + n.q_begin * p.q_stride_s * 4;
        alone.k = batch.k.data() + n.k_begin * p.k_stride_s * 4;
        alone.v = batch.v.data() + n.k_begin * p.v_stride_s * 4;
        alone.out = out.data();
        alone.lse = nullptr;
        EXPECT(flare_attention_forward(&alone) == FLARE_OK, "%s", last_error().c_str());
        EXPECT(std::memcmp(out.data(), batch.out.data() + n.q_begin * p.out_stride_s * 4,
                           static_cast<size_t>(n.q * p.out_stride_s * 4)) == 0,
               "sequence %lld alone differs", static_cast<long long>(b));
    }
}

// W = 1: out is the row's own value.
void test_window_of_one() {
    Random random(5);
    auto problem = dense(FLARE_FP32, 1, 1, 130, 130, 8, 8, FLARE_MASK_WINDOW, random);
    problem->run(0, "window of one");
    for (int64_t i = 0; i < 130 * 8; ++i) {
        EXPECT(read(problem->out.data(), FLARE_FP32, i) == read(problem->v.data(), FLARE_FP32, i), "element %lld",
               static_cast<long long>(i));
    }
}

// Pages left of every row's window may be gone: their entries are not looked at.
void test_evicted_pages() {
    Random random(6);
    Problem problem(FLARE_FP32, 1, 2, 1, 2, 200, 16, 16);
    flare_attention_params& p = problem.p;
    problem.used_k = Indices(FLARE_INT32, {200});
    p.seqused_k = problem.used_k.data();
    p.page_size = 16;
    p.num_pages = 13;
    p.block_table_stride_b = 13;
    std::vector<int64_t> table;
    for (int64_t page = 0; page < 13; ++page) {
        table.push_back(12 - page);
    }
    problem.table = Indices(FLARE_INT32, table);
    p.block_table = problem.table.data();
    p.mask = FLARE_MASK_WINDOW;
    p.window_left = 30;
    problem.lay_out(1, 2, 13, 16, false, 0, true, random);
    for (size_t page = 0; page < 10; ++page) {  // first visible key: 198 - 30 = 168, on page 10
        table[page] = -1;
    }
    problem.table = Indices(FLARE_INT32, table);
    p.block_table = problem.table.data();
    problem.check("evicted pages");
    table[10] = 13;
    problem.table = Indices(FLARE_INT32, table);
    p.block_table = problem.table.data();
    EXPECT(flare_attention_forward(&p) == FLARE_ERROR_INDEX, "page 13 of 13");
    EXPECT(last_error().find("block_table[0][10] is 13, allowed are 0..12") != std::string::npos, "%s",
           last_error().c_str());
}

// Bad entries: found before anything is written.
void test_bad_indices() {
    Random random(7);
    const auto expect_refusal = [&](const char* what, const std::vector<int64_t>& cu_q,
                                    const std::vector<int64_t>& cu_k, const std::vector<int64_t>& used_q,
                                    const std::vector<int64_t>& used_k, const char* text) {
        Problem problem(FLARE_FP32, 2, 1, 1, 4, 6, 8, 8);
        flare_attention_params& p = problem.p;
        p.total_q = 8;
        p.total_k = 12;
        problem.cu_q = Indices(FLARE_INT32, {0, 4, 8});
        problem.cu_k = Indices(FLARE_INT32, {0, 6, 12});
        p.cu_seqlens_q = problem.cu_q.data();
        p.cu_seqlens_k = problem.cu_k.data();
        problem.lay_out(1, 8, 1, 12, false, 0, true, random);
        problem.cu_q = Indices(FLARE_INT32, cu_q);
        problem.cu_k = Indices(FLARE_INT32, cu_k);
        problem.used_q = Indices(FLARE_INT32, used_q);
        problem.used_k = Indices(FLARE_INT32, used_k);
        p.cu_seqlens_q = problem.cu_q.data();
        p.cu_seqlens_k = problem.cu_k.data();
        p.seqused_q = used_q.empty() ? nullptr : problem.used_q.data();
        p.seqused_k = used_k.empty() ? nullptr : problem.used_k.data();
        const std::vector<char> before = problem.out.snapshot();
        EXPECT(flare_attention_forward(&p) == FLARE_ERROR_INDEX, "%s", what);
        EXPECT(last_error().find(text) != std::string::npos, "%s: \"%s\" lacks \"%s\"", what, last_error().c_str(),
               text);
        EXPECT(problem.out.snapshot() == before, "%s: something was written", what);
    };
    expect_refusal("decreasing", {0, 4, 3}, {0, 6, 12}, {}, {}, "cu_seqlens_q[2] is 3");
    expect_refusal("beyond the total", {0, 4, 9}, {0, 6, 12}, {}, {}, "cu_seqlens_q[2] is 9");
    expect_refusal("negative", {-1, 4, 8}, {0, 6, 12}, {}, {}, "cu_seqlens_q[0] is -1");
    expect_refusal("longer than the maximum", {0, 4, 8}, {0, 5, 12}, {}, {}, "cu_seqlens_k[2]");
    expect_refusal("used beyond the length", {0, 4, 8}, {0, 6, 12}, {4, 5}, {}, "seqused_q[1] is 5, allowed are 0..4");
    expect_refusal("negative use", {0, 4, 8}, {0, 6, 12}, {}, {-1, 6}, "seqused_k[0] is -1, allowed are 0..6");
}

void test_merge() {
    Random random(8);
    for (const int32_t dtype : {FLARE_FP32, FLARE_BF16, FLARE_FP16}) {
        const int64_t partials = 5, batch = 2, seqlen = 19, heads = 3, d = 40;
        Data parts(dtype, partials * batch * seqlen * heads * d);
        std::vector<float> part_lse(static_cast<size_t>(partials * batch * heads * seqlen));
        Output out(dtype, batch * seqlen * heads * (d + 2));
        Output lse(FLARE_FP32, batch * heads * seqlen);
        flare_attention_merge_params p{};
        p.struct_size = sizeof(p);
        p.device = FLARE_DEVICE_CPU;
        p.dtype = dtype;
        p.num_partials = partials;
        p.batch = batch;
        p.seqlen = seqlen;
        p.heads = heads;
        p.head_dim = d;
        p.partial_out_stride_h = d;
        p.partial_out_stride_s = heads * d;
        p.partial_out_stride_b = seqlen * heads * d;
        p.partial_out_stride_p = batch * seqlen * heads * d;
        p.partial_lse_stride_h = seqlen;
        p.partial_lse_stride_b = heads * seqlen;
        p.partial_lse_stride_p = batch * heads * seqlen;
        p.out_stride_h = d + 2;
        p.out_stride_s = heads * (d + 2);
        p.out_stride_b = seqlen * heads * (d + 2);
        p.lse_stride_h = seqlen;
        p.lse_stride_b = heads * seqlen;
        p.partial_out = parts.data();
        p.partial_lse = part_lse.data();
        p.out = out.data();
        p.lse = reinterpret_cast<float*>(lse.data());
        for (int64_t b = 0; b < batch; ++b) {
            for (int64_t h = 0; h < heads; ++h) {
                for (int64_t s = 0; s < seqlen; ++s) {
                    double total = 0;
                    std::vector<double> sum(static_cast<size_t>(d));
                    for (int64_t i = 0; i < partials; ++i) {
                        const int64_t at = i * p.partial_out_stride_p + b * p.partial_out_stride_b +
                                           s * p.partial_out_stride_s + h * d;
                        float& value = part_lse[static_cast<size_t>(
                            i * p.partial_lse_stride_p + b * p.partial_lse_stride_b + h * p.partial_lse_stride_h + s)];
                        if (s == 3 || random.chance(0.3)) {
                            value = -HUGE_VALF;  // its out stays NaN
                            continue;
                        }
                        value = static_cast<float>(3 * random.normal());
                        parts.set_random(at, d, random);
                        total += std::exp(static_cast<double>(value));
                        for (int64_t c = 0; c < d; ++c) {
                            sum[static_cast<size_t>(c)] +=
                                std::exp(static_cast<double>(value)) * read(parts.data(), dtype, at + c);
                        }
                    }
                    for (int64_t c = 0; c < d; ++c) {
                        out.expect(b * p.out_stride_b + s * p.out_stride_s + h * p.out_stride_h + c,
                                   total > 0 ? sum[static_cast<size_t>(c)] / total : 0.0);
                    }
                    lse.expect(b * p.lse_stride_b + h * p.lse_stride_h + s, total > 0 ? std::log(total) : -HUGE_VAL);
                }
            }
        }
        for (const flare::cpu::Isa isa : kIsas) {
            flare::cpu::override_isa(isa);
            out.poison();
            lse.poison();
            EXPECT(flare_attention_merge(&p) == FLARE_OK, "%s", last_error().c_str());
            out.check_relative(out_bound(dtype, dtype, 5e-7, 1e-3, 5e-3), "merge");
            lse.check_absolute(1e-6, "merge lse");
        }
        flare::cpu::override_isa(flare::cpu::Isa::kAvx512);
    }
}

// The workspace for given maxima is enough for every smaller size.
void test_workspace_is_monotone() {
    Random random(10);
    const auto bytes_for = [](int64_t batch, int64_t sq, int64_t sk, int32_t splits) {
        flare_attention_params p{};
        p.struct_size = sizeof(p);
        p.device = FLARE_DEVICE_CPU;
        p.dtype = FLARE_FP32;
        p.batch = batch;
        p.heads_q = 6;
        p.heads_kv = 2;
        p.seqlen_q = sq;
        p.seqlen_k = sk;
        p.head_dim_qk = p.head_dim_v = 16;
        p.num_splits = splits;
        p.q_stride_h = p.k_stride_h = p.v_stride_h = p.out_stride_h = 16;
        p.q_stride_s = p.out_stride_s = 96;
        p.k_stride_s = p.v_stride_s = 32;
        p.q_stride_b = p.out_stride_b = sq * 96;
        p.k_stride_b = p.v_stride_b = sk * 32;
        uint64_t bytes = 0;
        EXPECT(flare_attention_workspace(&p, &bytes) == FLARE_OK, "%s", last_error().c_str());
        return bytes;
    };
    for (int repeat = 0; repeat < 2000; ++repeat) {
        const int32_t splits = static_cast<int32_t>(random.pick({0, 0, 1, 3}));
        const int64_t batch = random.integer(1, 40);
        const int64_t sq = random.integer(1, 90);
        const int64_t sk = random.integer(1, 20000);
        const uint64_t large = bytes_for(batch, sq, sk, splits);
        const uint64_t small =
            bytes_for(random.integer(1, batch), random.integer(1, sq), random.integer(1, sk), splits);
        EXPECT(small <= large, "%llu for less, %llu for more", static_cast<unsigned long long>(small),
               static_cast<unsigned long long>(large));
    }
}

// Two halves of the keys, merged, are the whole.
void test_merge_of_halves() {
    Random random(9);
    auto whole = dense(FLARE_FP32, 2, 1, 10, 201, 32, 32, FLARE_MASK_NONE, random);
    reference(whole->p, whole->out, &whole->lse);
    std::vector<float> parts(2 * 10 * 2 * 32);
    std::vector<float> part_lse(2 * 2 * 10);
    for (int half = 0; half < 2; ++half) {
        flare_attention_params p = whole->p;
        p.seqlen_k = half == 0 ? 100 : 101;
        p.k = whole->k.data() + half * 100 * p.k_stride_s * 4;
        p.v = whole->v.data() + half * 100 * p.v_stride_s * 4;
        p.out = parts.data() + half * 10 * 2 * 32;
        p.lse = part_lse.data() + half * 20;
        p.lse_stride_h = 10;
        EXPECT(flare_attention_forward(&p) == FLARE_OK, "%s", last_error().c_str());
    }
    flare_attention_merge_params m{};
    m.struct_size = sizeof(m);
    m.device = FLARE_DEVICE_CPU;
    m.dtype = FLARE_FP32;
    m.num_partials = 2;
    m.batch = 1;
    m.seqlen = 10;
    m.heads = 2;
    m.head_dim = 32;
    m.partial_out = parts.data();
    m.partial_lse = part_lse.data();
    m.out = whole->out.data();
    m.lse = reinterpret_cast<float*>(whole->lse.data());
    m.partial_out_stride_h = m.out_stride_h = 32;
    m.partial_out_stride_s = m.out_stride_s = 64;
    m.partial_out_stride_b = m.partial_out_stride_p = m.out_stride_b = 640;
    m.partial_lse_stride_h = m.lse_stride_h = 10;
    m.partial_lse_stride_b = m.partial_lse_stride_p = m.lse_stride_b = 20;
    EXPECT(flare_attention_merge(&m) == FLARE_OK, "%s", last_error().c_str());
    whole->out.check_relative(2e-6, "halves");
    whole->lse.check_absolute(1e-5, "halves lse");
}

}  // namespace

int main() {
    test_sizes();
    test_extreme_scores();
    test_bitwise_promises();
    test_batch_invariance();
    test_window_of_one();
    test_evicted_pages();
    test_bad_indices();
    test_merge();
    test_merge_of_halves();
    test_workspace_is_monotone();
    test_random_mixtures(250);
    return finish("cpu_attention_test");
}
