// Kimi Delta Attention on the vectors of one instruction set: chunked forward, and decode token by token.
//
// Recurrence, per token t, on the K x V state S of a (sequence, value head), with d_t = exp(gate_t):
//     S <- diag(d_t) S;   u_t = b_t (v_t - S^T k_t);   S <- S + k_t u_t^T;   o_t = scale S^T q_t
//
// Chunked form, C = 16 tokens, with the channelwise products D_i = d_1 ... d_i and R_i = d_{i+1} ... d_C:
//     Kd_i = k_i D_i        Qd_i = scale q_i D_i        Kr_i = k_i R_i
//     P_ij = sum_a k_i[a] k_j[a] d_{j+1}[a] ... d_i[a]   (i > j);     A_ij the same with scale q_i   (i >= j)
//     u_i  = b_i (v_i - Kd_i S - sum_{j<i} P_ij u_j)     forward substitution in fp32
//     o_i  = Qd_i S + sum_{j<=i} A_ij u_j
//     S   <- diag(D_C) S + Kr^T U
//
// Decays are only ever multiplied, never divided and never taken as exp(-sum): every factor is <= 1 where gates are <= 0, so a gate of
// -1000 becomes 0 and nothing overflows. P and A come from walking each key forward through the decays (pairs of a chunk: 1/8 of the
// work). Row i of a chunk depends on tokens <= i alone and a value column on no other column, so bits depend neither on later tokens nor
// on how columns are divided among threads.
//
// Where D_C is near 1, S <- S + (D_C - 1) S: the rounding of D_C itself is the same in every chunk when gates are, and a memory of
// thousands of tokens would add it up.
//
// The state lives in panels of kWidth columns, [panel][Kp][kWidth], Kp = K rounded up to 16 with zeros: one panel (16 KB at K = 128
// with AVX-512) and the chunk's Kd, Qd and Kr (24 KB) stay in the first-level cache while the chunk's three state products run on them.
#pragma once

#include "gemm.h"
#include "kda_task.h"
#include "rows.h"

#if defined(__SSE__)
#include <xmmintrin.h>
#endif

namespace flare::cpu::FLARE_CPU_NAMESPACE {
namespace kda {

constexpr int kChunk = static_cast<int>(kKdaChunk);
constexpr int kVecs = 2;
constexpr int kWidth = kVecs * kLanes;
constexpr int kMaxChannels = 512;

FLARE_INLINE int64_t padded_k(int64_t head_dim_k) {
    return round_up(head_dim_k, 16);
}

// Results too small for a normal float become zero: a state that decays for long would otherwise end up in subnormals, which take
// a hundred times longer on some processors. Inputs are not flushed.
class FlushToZero {
  public:
#if defined(__SSE__)
    FlushToZero() : saved_(_mm_getcsr()) { _mm_setcsr(saved_ | 0x8000u); }
    ~FlushToZero() { _mm_setcsr(saved_); }

  private:
    unsigned saved_;
#else
    FlushToZero() {}
#endif
};

// ---- rows in the caller's memory -------------------------------------------------------------------------------------

FLARE_INLINE const void* element(const void* base, int32_t dtype, int64_t offset) {
    return static_cast<const char*>(base) + offset * element_bytes(dtype);
}

FLARE_INLINE void* element(void* base, int32_t dtype, int64_t offset) {
    return static_cast<char*>(base) + offset * element_bytes(dtype);
}

// dst[0, count) = src[offset, offset + count), dst[count, padded) = 0.
inline void load_padded(const void* src, int32_t dtype, int64_t offset, int64_t count, int64_t padded, float* dst) {
    load_row(element(src, dtype, offset), dtype, count, dst);
    for (int64_t i = count; i < padded; ++i) {
        dst[i] = 0.0f;
    }
}

// ---- scratch ---------------------------------------------------------------------------------------------------------

struct Scratch {
    Scratch(Carver& carver, int64_t head_dim_k, int64_t panels) {
        const int64_t kp = padded_k(head_dim_k);
        state = carver.take<float>(panels * kp * kWidth);
        kq = carver.take<float>(2 * kChunk * kp);
        kr = carver.take<float>(kChunk * kp);
        products = carver.take<float>(2 * kChunk * kWidth);
        u = carver.take<float>(kChunk * kWidth);
        v = carver.take<float>(kChunk * kWidth);
        beta = carver.take<float>(kChunk * kWidth);
        p = carver.take<float>(kChunk * kChunk);
        a = carver.take<float>(kChunk * kChunk);
        k = carver.take<float>(kChunk * kp);
        q = carver.take<float>(kChunk * kp);
        decay = carver.take<float>(kChunk * kp);
        log_decay = carver.take<float>(kChunk * kp);
        keep = carver.take<float>(kChunk * kp);
        fade = carver.take<float>(kChunk * kp);
        rows = carver.take<float>(kLanes * kp);
    }

    float* state;     // [panels][Kp][kWidth]
    float* kq;        // [2 n][Kp]: n rows of Kd, then n rows of Qd
    float* kr;        // [C][Kp]
    float* products;  // [2 n][kWidth]: Kd S, then Qd S; the latter becomes the output
    float* u;         // [C][kWidth]
    float* v;         // [C][kWidth]
    float* beta;      // [C], or [C][kWidth] of the current panel
    float* p;         // [C][C]
    float* a;         // [C][C]
    float* k;         // [C][Kp] normalised
    float* q;         // [C][Kp] normalised, times scale
    float* decay;     // [C][Kp] d_t
    float* log_decay;  // [C][Kp]
    float* keep;      // keep + fade is D_C [Kp], or in decode d_t [C][Kp]: see split_decay
    float* fade;
    float* rows;      // [kLanes][Kp], for transpositions
};

// ---- state blocks ----------------------------------------------------------------------------------------------------

// Columns of panel `panel` that exist.
inline int64_t panel_columns(const KdaTask& task, int64_t panel) {
    const int64_t rest = task.head_dim_v - panel * kWidth;
    return rest < kWidth ? rest : kWidth;
}

inline void load_panel(const KdaTask& task, const KdaState& from, int64_t panel, const Scratch& scratch, float* state) {
    const int64_t kp = padded_k(task.head_dim_k);
    const int64_t columns = panel_columns(task, panel);
    if (from.data == nullptr) {
        for (int64_t i = 0; i < kp * kWidth; i += kLanes) {
            vstore(state + i, vset(0.0f));
        }
        return;
    }
    if (task.state_layout == FLARE_STATE_KV) {
        for (int64_t c = 0; c < task.head_dim_k; ++c) {
            const int64_t offset = c * task.head_dim_v + panel * kWidth;
            load_padded(from.data, from.dtype, offset, columns, kWidth, state + c * kWidth);
        }
        for (int64_t i = task.head_dim_k * kWidth; i < kp * kWidth; ++i) {
            state[i] = 0.0f;
        }
        return;
    }
    for (int64_t column = 0; column < kWidth; column += kLanes) {
        for (int64_t j = 0; j < kLanes; ++j) {
            const int64_t offset = (panel * kWidth + column + j) * task.head_dim_k;
            const int64_t count = column + j < columns ? task.head_dim_k : 0;
            load_padded(from.data, from.dtype, count > 0 ? offset : 0, count, kp, scratch.rows + j * kp);
        }
        transpose_rows(scratch.rows, kp, kp, nullptr, state + column, kWidth);
    }
}

inline void store_panel(const KdaTask& task, const KdaState& to, int64_t panel, const Scratch& scratch, const float* state) {
    const int64_t kp = padded_k(task.head_dim_k);
    const int64_t columns = panel_columns(task, panel);
    if (task.state_layout == FLARE_STATE_KV) {
        for (int64_t c = 0; c < task.head_dim_k; ++c) {
            const int64_t offset = c * task.head_dim_v + panel * kWidth;
            store_row(state + c * kWidth, to.dtype, columns, element(to.data, to.dtype, offset));
        }
        return;
    }
    for (int64_t column = 0; column < columns; column += kLanes) {
        for (int64_t c = 0; c < kp; c += kLanes) {
            transpose_rows(state + c * kWidth + column, kWidth, kLanes, nullptr, scratch.rows + c, kp);
        }
        for (int64_t j = 0; j < kLanes && column + j < columns; ++j) {
            const int64_t offset = (panel * kWidth + column + j) * task.head_dim_k;
            store_row(scratch.rows + j * kp, to.dtype, task.head_dim_k, element(to.data, to.dtype, offset));
        }
    }
}

// ---- tokens ----------------------------------------------------------------------------------------------------------

FLARE_INLINE Vec sigmoid(Vec x) {
    return vdiv(vset(1.0f), vadd(vset(1.0f), vexp(vsub(vset(0.0f), x))));
}

// ln(1 + e^x) = max(x, 0) + 2 artanh(z / (2 + z)), z = e^-|x|: keeps its relative accuracy where it is tiny.
FLARE_INLINE Vec softplus(Vec x) {
    const Vec z = vexp(vsub(vset(0.0f), vabs(x)));
    const Vec s = vdiv(z, vadd(z, vset(2.0f)));  // in (0, 1/3]
    const Vec square = vmul(s, s);
    Vec series = vset(2.0f / 15.0f);
    series = vfma(series, square, vset(2.0f / 13.0f));
    series = vfma(series, square, vset(2.0f / 11.0f));
    series = vfma(series, square, vset(2.0f / 9.0f));
    series = vfma(series, square, vset(2.0f / 7.0f));
    series = vfma(series, square, vset(2.0f / 5.0f));
    series = vfma(series, square, vset(2.0f / 3.0f));
    series = vfma(series, square, vset(2.0f));
    return vfma(series, s, vmax(vset(0.0f), x));
}

// row: raw gates, turned into log decays; decay = exp(row).
inline void gate_row(const KdaTask& task, int64_t kp, float* row, float* decay) {
    const Vec factor = vset(task.gate_factor);
    for (int64_t c = 0; c < kp; c += kLanes) {
        Vec x = vload(row + c);
        if (task.gate != FLARE_GATE_LOG) {
            if (task.dt_bias != nullptr) {
                const int64_t rest = task.head_dim_k - c;
                const int lanes = rest < 0 ? 0 : rest < kLanes ? static_cast<int>(rest) : kLanes;
                x = vadd(x, vload_n(task.dt_bias + c, lanes));
            }
            if (task.gate == FLARE_GATE_SOFTPLUS) {
                x = vsub(vset(0.0f), vmul(factor, softplus(x)));
            } else {
                x = vmul(vset(task.lower_bound), sigmoid(vmul(factor, x)));
            }
        }
        vstore(row + c, x);
        vstore(decay + c, vexp(x));
    }
}

// e^x = keep + fade, keep 1 or 0: near x = 0, fade is e^x - 1 with a relative accuracy of its own.
FLARE_INLINE void split_decay(Vec x, float* keep, float* fade) {
    const Mask is_slow = vle(vabs(x), vset(0.34f));
    Vec p = vset(1.9875691500e-4f);  // the polynomial of vexp
    p = vfma(p, x, vset(1.3981999507e-3f));
    p = vfma(p, x, vset(8.3334519073e-3f));
    p = vfma(p, x, vset(4.1665795894e-2f));
    p = vfma(p, x, vset(1.6666665459e-1f));
    p = vfma(p, x, vset(5.0000001201e-1f));
    vstore(keep, vselect(is_slow, vset(1.0f), vset(0.0f)));
    vstore(fade, vselect(is_slow, vfma(vmul(p, x), x, x), vexp(x)));
}

inline float inverse_norm(const float* row, int64_t kp) {
    Vec sum = vset(0.0f);
    for (int64_t c = 0; c < kp; c += kLanes) {
        const Vec x = vload(row + c);
        sum = vfma(x, x, sum);
    }
    return 1.0f / __builtin_sqrtf(vreduce_add(sum) + 1e-6f);
}

inline void scale_row(float* row, int64_t kp, float factor) {
    for (int64_t c = 0; c < kp; c += kLanes) {
        vstore(row + c, vmul(vload(row + c), vset(factor)));
    }
}

inline void activate_beta(const KdaTask& task, int64_t count, float* beta) {
    if (task.beta_activation == FLARE_BETA_RAW) {
        return;
    }
    const Vec factor = vset(task.beta_activation == FLARE_BETA_SIGMOID2 ? 2.0f : 1.0f);
    for (int64_t i = 0; i < count; i += kLanes) {
        vstore(beta + i, vmul(factor, sigmoid(vload(beta + i))));
    }
}

// q, k and decays of tokens [first, first + n), and their betas if those are scalars.
inline void load_tokens(const KdaTask& task, int64_t first, int n, const Scratch& scratch) {
    const int64_t kp = padded_k(task.head_dim_k);
    for (int t = 0; t < n; ++t) {
        float* q = scratch.q + t * kp;
        float* k = scratch.k + t * kp;
        float* log_decay = scratch.log_decay + t * kp;
        const int64_t token = first + t;
        load_padded(task.q, task.dtype, token * task.q_stride_t, task.head_dim_k, kp, q);
        load_padded(task.k, task.dtype, token * task.k_stride_t, task.head_dim_k, kp, k);
        load_padded(task.g, task.gate_dtype, token * task.g_stride_t, task.head_dim_k, kp, log_decay);
        if (task.qk_l2norm) {
            scale_row(q, kp, inverse_norm(q, kp));
            scale_row(k, kp, inverse_norm(k, kp));
        }
        scale_row(q, kp, task.scale);
        gate_row(task, kp, log_decay, scratch.decay + t * kp);
        if (!task.beta_per_channel) {
            scratch.beta[t] = load_element(task.beta, task.beta_dtype, token * task.beta_stride_t);
        }
    }
    if (!task.beta_per_channel) {
        for (int t = n; t < kChunk; ++t) {
            scratch.beta[t] = 0.0f;
        }
        activate_beta(task, kChunk, scratch.beta);
    }
}

// v of the panel, and its betas if those are per channel.
inline void load_values(const KdaTask& task, int64_t first, int n, int64_t panel, const Scratch& scratch) {
    const int64_t columns = panel_columns(task, panel);
    for (int t = 0; t < n; ++t) {
        const int64_t offset = (first + t) * task.v_stride_t + panel * kWidth;
        load_padded(task.v, task.dtype, offset, columns, kWidth, scratch.v + t * kWidth);
        if (task.beta_per_channel) {
            const int64_t beta_offset = (first + t) * task.beta_stride_t + panel * kWidth;
            float* beta = scratch.beta + t * kWidth;
            load_padded(task.beta, task.beta_dtype, beta_offset, columns, kWidth, beta);
            activate_beta(task, kWidth, beta);
        }
    }
}

FLARE_INLINE Vec beta_of(const KdaTask& task, const Scratch& scratch, int t, int vec) {
    return task.beta_per_channel ? vload(scratch.beta + t * kWidth + vec * kLanes) : vset(scratch.beta[t]);
}

// ---- chunk -----------------------------------------------------------------------------------------------------------

// P and A. kKeyVecs = Kp / kLanes where that is known at compile time (the walking key stays in registers), else 0.
template <int kKeyVecs>
void walk_pairs(int n, int64_t kp, const Scratch& scratch) {
    const int vecs = kKeyVecs > 0 ? kKeyVecs : static_cast<int>(kp / kLanes);
    Vec walking[kKeyVecs > 0 ? kKeyVecs : kMaxChannels / kLanes];
    for (int j = 0; j < n; ++j) {
        Vec diagonal = vset(0.0f);
#pragma GCC unroll 8
        for (int x = 0; x < vecs; ++x) {
            walking[x] = vload(scratch.k + j * kp + x * kLanes);
            diagonal = vfma(vload(scratch.q + j * kp + x * kLanes), walking[x], diagonal);
        }
        scratch.a[j * kChunk + j] = vreduce_add(diagonal);
        for (int i = j + 1; i < n; ++i) {
            const float* decay = scratch.decay + i * kp;
            const float* k = scratch.k + i * kp;
            const float* q = scratch.q + i * kp;
            Vec p = vset(0.0f);
            Vec a = vset(0.0f);
#pragma GCC unroll 8
            for (int x = 0; x < vecs; ++x) {
                walking[x] = vmul(walking[x], vload(decay + x * kLanes));
                p = vfma(vload(k + x * kLanes), walking[x], p);
                a = vfma(vload(q + x * kLanes), walking[x], a);
            }
            scratch.p[i * kChunk + j] = vreduce_add(p);
            scratch.a[i * kChunk + j] = vreduce_add(a);
        }
    }
}

// Kd, Qd, Kr and D_C.
inline void decay_rows(int n, int64_t kp, const Scratch& scratch) {
    float* qd = scratch.kq + n * kp;
    for (int64_t c = 0; c < kp; c += kLanes) {
        Vec product = vset(1.0f);
        Vec log_total = vset(0.0f);
        for (int t = 0; t < n; ++t) {
            log_total = vadd(log_total, vload(scratch.log_decay + t * kp + c));
            product = vmul(product, vload(scratch.decay + t * kp + c));
            vstore(scratch.kq + t * kp + c, vmul(vload(scratch.k + t * kp + c), product));
            vstore(qd + t * kp + c, vmul(vload(scratch.q + t * kp + c), product));
        }
        split_decay(log_total, scratch.keep + c, scratch.fade + c);
        product = vset(1.0f);
        for (int t = n - 1; t >= 0; --t) {
            vstore(scratch.kr + t * kp + c, vmul(vload(scratch.k + t * kp + c), product));
            product = vmul(product, vload(scratch.decay + t * kp + c));
        }
    }
}

inline void prepare_chunk(const KdaTask& task, int64_t first, int n, const Scratch& scratch) {
    const int64_t kp = padded_k(task.head_dim_k);
    load_tokens(task, first, n, scratch);
    if (kp == 128) {
        walk_pairs<128 / kLanes>(n, kp, scratch);
    } else if (kp == 64) {
        walk_pairs<64 / kLanes>(n, kp, scratch);
    } else {
        walk_pairs<0>(n, kp, scratch);
    }
    decay_rows(n, kp, scratch);
}

// u and o of rows [row, row + kRows) of the chunk; those above are done.
template <int kRows>
FLARE_INLINE void solve_rows(const KdaTask& task, int row, float* out, const Scratch& scratch) {
    Vec u[kRows][kVecs];
    Vec o[kRows][kVecs];
    const float* p = scratch.p + row * kChunk;
    const float* a = scratch.a + row * kChunk;
#pragma GCC unroll 4
    for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 4
        for (int x = 0; x < kVecs; ++x) {
            const int64_t at = (row + r) * kWidth + x * kLanes;
            u[r][x] = vsub(vload(scratch.v + at), vload(scratch.products + at));
            o[r][x] = vload(out + at);
        }
    }
    for (int j = 0; j < row; ++j) {
#pragma GCC unroll 4
        for (int x = 0; x < kVecs; ++x) {
            const Vec done = vload(scratch.u + j * kWidth + x * kLanes);
#pragma GCC unroll 4
            for (int r = 0; r < kRows; ++r) {
                u[r][x] = vfnma(vset(p[r * kChunk + j]), done, u[r][x]);
                o[r][x] = vfma(vset(a[r * kChunk + j]), done, o[r][x]);
            }
        }
    }
#pragma GCC unroll 4
    for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 4
        for (int x = 0; x < kVecs; ++x) {
            const int64_t at = (row + r) * kWidth + x * kLanes;
#pragma GCC unroll 4
            for (int s = 0; s < r; ++s) {
                u[r][x] = vfnma(vset(p[r * kChunk + row + s]), u[s][x], u[r][x]);
                o[r][x] = vfma(vset(a[r * kChunk + row + s]), u[s][x], o[r][x]);
            }
            u[r][x] = vmul(beta_of(task, scratch, row + r, x), u[r][x]);
            o[r][x] = vfma(vset(a[r * kChunk + row + r]), u[r][x], o[r][x]);
            vstore(scratch.u + at, u[r][x]);
            vstore(out + at, o[r][x]);
        }
    }
}

inline void solve_chunk(const KdaTask& task, int n, float* out, const Scratch& scratch) {
    int row = 0;
    for (; row + 4 <= n; row += 4) {
        solve_rows<4>(task, row, out, scratch);
    }
    switch (n - row) {
        case 3:
            solve_rows<3>(task, row, out, scratch);
            break;
        case 2:
            solve_rows<2>(task, row, out, scratch);
            break;
        case 1:
            solve_rows<1>(task, row, out, scratch);
            break;
        default:
            break;
    }
}

// S = diag(D_C) S + Kr^T U
inline void update_state(int n, int64_t kp, float* state, const Scratch& scratch) {
#if defined(FLARE_CPU_ISA_AVX512)
    constexpr int kRows = 8;
#else
    constexpr int kRows = 4;
#endif
    for (int64_t c = 0; c < kp; c += kRows) {
        Vec s[kRows][kVecs];
        float* rows = state + c * kWidth;
#pragma GCC unroll 8
        for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 4
            for (int x = 0; x < kVecs; ++x) {
                const Vec old = vload(rows + r * kWidth + x * kLanes);
                s[r][x] = vfma(vset(scratch.fade[c + r]), old, vmul(vset(scratch.keep[c + r]), old));
            }
        }
        const float* kr = scratch.kr + c;
        for (int t = 0; t < n; ++t) {
            Vec u[kVecs];
#pragma GCC unroll 4
            for (int x = 0; x < kVecs; ++x) {
                u[x] = vload(scratch.u + t * kWidth + x * kLanes);
            }
#pragma GCC unroll 8
            for (int r = 0; r < kRows; ++r) {
                const Vec key = vset(kr[t * kp + r]);
#pragma GCC unroll 4
                for (int x = 0; x < kVecs; ++x) {
                    s[r][x] = vfma(key, u[x], s[r][x]);
                }
            }
        }
#pragma GCC unroll 8
        for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 4
            for (int x = 0; x < kVecs; ++x) {
                vstore(rows + r * kWidth + x * kLanes, s[r][x]);
            }
        }
    }
}

inline void store_output(const KdaTask& task, int64_t first, int n, int64_t panel, const float* out) {
    const int64_t columns = panel_columns(task, panel);
    for (int t = 0; t < n; ++t) {
        const int64_t offset = (first + t) * task.out_stride_t + panel * kWidth;
        store_row(out + t * kWidth, task.dtype, columns, element(task.out, task.dtype, offset));
    }
}

inline void run_panel(const KdaTask& task, int64_t first, int n, int64_t panel, float* state, const Scratch& scratch) {
    const int64_t kp = padded_k(task.head_dim_k);
    float* out = scratch.products + n * kWidth;
    load_values(task, first, n, panel, scratch);
    gemm_panel<Orientation::kRowMajor>(kVecs, 2 * n, kp, scratch.kq, kp, state, kWidth, scratch.products, kWidth,
                                       Update::kStore);
    solve_chunk(task, n, out, scratch);
    update_state(n, kp, state, scratch);
    store_output(task, first, n, panel, out);
}

inline KdaState shifted(const KdaState& state, int64_t offset) {
    return KdaState{element(state.data, state.dtype, offset), state.dtype};
}

inline void forward(const KdaTask& task, void* memory) {
    const FlushToZero flush_to_zero;
    const int64_t kp = padded_k(task.head_dim_k);
    Carver carver(memory);
    const Scratch scratch(carver, task.head_dim_k, task.panel_end - task.panel_begin);
    for (int64_t panel = task.panel_begin; panel < task.panel_end; ++panel) {
        load_panel(task, task.initial, panel, scratch, scratch.state + (panel - task.panel_begin) * kp * kWidth);
    }
    for (int64_t first = 0; first < task.num_tokens; first += kChunk) {
        const int64_t rest = task.num_tokens - first;
        const int n = rest < kChunk ? static_cast<int>(rest) : kChunk;
        prepare_chunk(task, first, n, scratch);
        const int64_t done = first + n;
        const bool is_checkpoint = task.checkpoints.data != nullptr && done % task.checkpoint_interval == 0;
        for (int64_t panel = task.panel_begin; panel < task.panel_end; ++panel) {
            float* state = scratch.state + (panel - task.panel_begin) * kp * kWidth;
            run_panel(task, first, n, panel, state, scratch);
            if (is_checkpoint) {
                const int64_t row = done / task.checkpoint_interval - 1;
                store_panel(task, shifted(task.checkpoints, row * task.checkpoint_stride), panel, scratch, state);
            }
        }
    }
    if (task.final.data != nullptr) {
        for (int64_t panel = task.panel_begin; panel < task.panel_end; ++panel) {
            store_panel(task, task.final, panel, scratch, scratch.state + (panel - task.panel_begin) * kp * kWidth);
        }
    }
}

// ---- decode ----------------------------------------------------------------------------------------------------------

// One token of the recurrence. Sums over channels run in four interleaved parts, to hide the latency of their additions.
inline void step_panel(const KdaTask& task, int t, int64_t kp, float* state, float* out, const Scratch& scratch) {
    constexpr int kParts = 4;
    const float* k = scratch.k + t * kp;
    const float* q = scratch.q + t * kp;
    const float* keep = scratch.keep + t * kp;
    const float* fade = scratch.fade + t * kp;
    const float* decayed_k = scratch.kq + t * kp;
    Vec sum[kParts][kVecs];
#pragma GCC unroll 4
    for (int part = 0; part < kParts; ++part) {
#pragma GCC unroll 4
        for (int x = 0; x < kVecs; ++x) {
            sum[part][x] = vset(0.0f);
        }
    }
    for (int64_t c = 0; c < kp; c += kParts) {
#pragma GCC unroll 4
        for (int part = 0; part < kParts; ++part) {
            const Vec key = vset(decayed_k[c + part]);
#pragma GCC unroll 4
            for (int x = 0; x < kVecs; ++x) {
                sum[part][x] = vfma(key, vload(state + (c + part) * kWidth + x * kLanes), sum[part][x]);
            }
        }
    }
    Vec u[kVecs];
#pragma GCC unroll 4
    for (int x = 0; x < kVecs; ++x) {
        const Vec recalled = vadd(vadd(sum[0][x], sum[2][x]), vadd(sum[1][x], sum[3][x]));
        const Vec error = vsub(vload(scratch.v + t * kWidth + x * kLanes), recalled);
        u[x] = vmul(beta_of(task, scratch, t, x), error);
    }
#pragma GCC unroll 4
    for (int part = 0; part < kParts; ++part) {
#pragma GCC unroll 4
        for (int x = 0; x < kVecs; ++x) {
            sum[part][x] = vset(0.0f);
        }
    }
    for (int64_t c = 0; c < kp; c += kParts) {
#pragma GCC unroll 4
        for (int part = 0; part < kParts; ++part) {
#pragma GCC unroll 4
            for (int x = 0; x < kVecs; ++x) {
                float* at = state + (c + part) * kWidth + x * kLanes;
                const Vec old = vload(at);
                const Vec decayed = vfma(vset(fade[c + part]), old, vmul(vset(keep[c + part]), old));
                const Vec s = vfma(vset(k[c + part]), u[x], decayed);
                vstore(at, s);
                sum[part][x] = vfma(vset(q[c + part]), s, sum[part][x]);
            }
        }
    }
#pragma GCC unroll 4
    for (int x = 0; x < kVecs; ++x) {
        vstore(out + x * kLanes, vadd(vadd(sum[0][x], sum[2][x]), vadd(sum[1][x], sum[3][x])));
    }
}

inline void decode(const KdaTask& task, void* memory) {
    const FlushToZero flush_to_zero;
    const int64_t kp = padded_k(task.head_dim_k);
    Carver carver(memory);
    const Scratch scratch(carver, task.head_dim_k, task.panel_end - task.panel_begin);
    for (int64_t panel = task.panel_begin; panel < task.panel_end; ++panel) {
        load_panel(task, task.initial, panel, scratch, scratch.state + (panel - task.panel_begin) * kp * kWidth);
    }
    for (int64_t first = 0; first < task.num_tokens; first += kChunk) {
        const int64_t rest = task.num_tokens - first;
        const int n = rest < kChunk ? static_cast<int>(rest) : kChunk;
        load_tokens(task, first, n, scratch);
        for (int64_t i = 0; i < n * kp; i += kLanes) {
            vstore(scratch.kq + i, vmul(vload(scratch.k + i), vload(scratch.decay + i)));
            split_decay(vload(scratch.log_decay + i), scratch.keep + i, scratch.fade + i);
        }
        for (int64_t panel = task.panel_begin; panel < task.panel_end; ++panel) {
            float* state = scratch.state + (panel - task.panel_begin) * kp * kWidth;
            load_values(task, first, n, panel, scratch);
            for (int t = 0; t < n; ++t) {
                step_panel(task, t, kp, state, scratch.products + t * kWidth, scratch);
                if (task.token_slots != nullptr) {
                    const int64_t slot = read_index(task.token_slots, task.index_dtype, task.token_slots_offset + first + t);
                    if (slot != task.padding_slot) {
                        store_panel(task, shifted(task.token_states, slot * task.token_state_stride), panel, scratch, state);
                    }
                }
            }
            store_output(task, first, n, panel, scratch.products);
        }
    }
    if (task.final.data != nullptr) {
        for (int64_t panel = task.panel_begin; panel < task.panel_end; ++panel) {
            store_panel(task, task.final, panel, scratch, scratch.state + (panel - task.panel_begin) * kp * kWidth);
        }
    }
}

inline size_t scratch_bytes(int64_t head_dim_k, int64_t panels) {
    Carver carver(nullptr);
    const Scratch scratch(carver, head_dim_k, panels);
    static_cast<void>(scratch);
    return carver.used();
}

}  // namespace kda
}  // namespace flare::cpu::FLARE_CPU_NAMESPACE
