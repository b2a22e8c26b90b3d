// flare_kda_forward and flare_kda_decode on the CPU against the recurrence in double: random mixtures of all options on every
// instruction set, then properties that hold bit for bit, adversarial data and index errors.
#include "cpu_test.h"

#include <algorithm>
#include <functional>

using namespace cpu_test;

namespace {

struct Spec {
    int32_t dtype = FLARE_FP32, gate_dtype = 0, beta_dtype = 0, index_dtype = FLARE_INT32;
    int32_t gate = FLARE_GATE_BOUNDED, beta_activation = FLARE_BETA_SIGMOID;
    bool l2norm = true, beta_per_channel = false, with_a_log = true, with_bias = true, heads_first = false;
    float lower_bound = -5.0f, scale = 0.0f;
    int64_t heads = 1, heads_v = 1, k_dim = 128, v_dim = 128;
    bool varlen = false;
    std::vector<int64_t> lengths;  // of the sequences; dense: all equal
    int64_t tail = 0;              // varlen: tokens after the last sequence, which belong to none
    uint64_t seed = 1;
};

int64_t total_of(const Spec& s) {
    int64_t total = 0;
    for (const int64_t length : s.lengths) {
        total += length;
    }
    return total;
}

// The token tensors, with gaps between rows; what belongs to no token of a sequence is NaN.
class Tokens {
  public:
    explicit Tokens(const Spec& spec) : s(spec), random(spec.seed) {
        batch = s.varlen ? 1 : static_cast<int64_t>(s.lengths.size());
        seqlen = s.varlen ? total_of(s) + s.tail : s.lengths.empty() ? 0 : s.lengths[0];
        gate_dtype = s.gate_dtype != 0 ? s.gate_dtype : s.dtype;
        beta_dtype = s.beta_dtype != 0 ? s.beta_dtype : s.dtype;
        q = make(s.dtype, s.heads, s.k_dim);
        k = make(s.dtype, s.heads, s.k_dim);
        v = make(s.dtype, s.heads_v, s.v_dim);
        g = make(gate_dtype, s.heads_v, s.k_dim);
        beta = make(beta_dtype, s.heads_v, s.beta_per_channel ? s.v_dim : 1);
        a_log = Data(FLARE_FP32, s.heads_v);
        bias = Data(FLARE_FP32, s.heads_v * s.k_dim);
        a_log.set_random(0, s.heads_v, random);
        bias.set_random(0, s.heads_v * s.k_dim, random);
        int64_t begin = 0;
        for (size_t n = 0; n < s.lengths.size(); ++n) {
            begins.push_back(begin);
            for (int64_t t = 0; t < s.lengths[n]; ++t) {
                fill_token(s.varlen ? 0 : static_cast<int64_t>(n), s.varlen ? begin + t : t);
            }
            begin += s.varlen ? s.lengths[n] : 0;
        }
        std::vector<int64_t> cumulative = begins;
        cumulative.push_back(begin);
        cu_seqlens = Indices(s.index_dtype, cumulative);
    }

    struct Tensor {
        Data data;
        int32_t dtype;
        int64_t heads, dim, stride_b, stride_t, stride_h;
        int64_t at(int64_t b, int64_t t, int64_t h, int64_t c) const { return b * stride_b + t * stride_t + h * stride_h + c; }
        double get(int64_t b, int64_t t, int64_t h, int64_t c) { return read(data.data(), dtype, at(b, t, h, c)); }
        void set(int64_t b, int64_t t, int64_t h, int64_t c, double value) { data.set(at(b, t, h, c), value); }
        template <class Fill>
        void set_row(int64_t b, int64_t t, const Fill& fill) {
            for (int64_t h = 0; h < heads; ++h) {
                for (int64_t c = 0; c < dim; ++c) {
                    set(b, t, h, c, fill(h, c));
                }
            }
        }
    };

    Tensor make(int32_t dtype, int64_t heads, int64_t dim) const {
        Tensor t{};
        t.dtype = dtype;
        t.heads = heads;
        t.dim = dim;
        const int64_t row = dim + 3;
        t.stride_t = s.heads_first ? row : heads * row + 1;
        t.stride_h = s.heads_first ? seqlen * row : row;
        t.stride_b = heads * seqlen * row + seqlen + 5;
        t.data = Data(dtype, batch * t.stride_b + 1);
        return t;
    }

    void fill_token(int64_t b, int64_t t) {
        const double key_scale = s.l2norm ? 1.0 : 1.0 / std::sqrt(static_cast<double>(s.k_dim));
        q.set_row(b, t, [&](int64_t, int64_t) { return random.normal(); });
        k.set_row(b, t, [&](int64_t, int64_t) { return key_scale * random.normal(); });
        v.set_row(b, t, [&](int64_t, int64_t) { return random.normal(); });
        g.set_row(b, t, [&](int64_t, int64_t) {
            if (s.gate == FLARE_GATE_LOG) {
                return random.chance(0.05) ? -1000.0 : -std::exp(random.normal() - 2.0);
            }
            return random.chance(0.05) ? 60.0 * random.normal() : 2.0 * random.normal();
        });
        beta.set_row(b, t, [&](int64_t, int64_t) {
            return s.beta_activation == FLARE_BETA_RAW ? static_cast<double>(random.integer(0, 64)) / 64.0 : 2.0 * random.normal();
        });
    }

    template <class Params>
    void bind(Params& p) {
        p.struct_size = sizeof(Params);
        p.device = FLARE_DEVICE_CPU;
        p.dtype = s.dtype;
        p.gate_dtype = s.gate_dtype;
        p.beta_dtype = s.beta_dtype;
        p.index_dtype = s.index_dtype;
        p.gate = s.gate;
        p.beta_activation = s.beta_activation;
        p.qk_l2norm = s.l2norm;
        p.beta_per_channel = s.beta_per_channel;
        p.lower_bound = s.gate == FLARE_GATE_BOUNDED ? s.lower_bound : 0.0f;
        p.scale = s.scale;
        p.batch = batch;
        p.seqlen = seqlen;
        p.heads_qk = s.heads;
        p.heads_v = s.heads_v;
        p.head_dim_k = s.k_dim;
        p.head_dim_v = s.v_dim;
        p.q = q.data.data();
        p.k = k.data.data();
        p.v = v.data.data();
        p.g = g.data.data();
        p.beta = beta.data.data();
        p.a_log = s.gate != FLARE_GATE_LOG && s.with_a_log ? reinterpret_cast<float*>(a_log.data()) : nullptr;
        p.dt_bias = s.gate != FLARE_GATE_LOG && s.with_bias ? reinterpret_cast<float*>(bias.data()) : nullptr;
        p.q_stride_b = q.stride_b, p.q_stride_t = q.stride_t, p.q_stride_h = q.stride_h;
        p.k_stride_b = k.stride_b, p.k_stride_t = k.stride_t, p.k_stride_h = k.stride_h;
        p.v_stride_b = v.stride_b, p.v_stride_t = v.stride_t, p.v_stride_h = v.stride_h;
        p.g_stride_b = g.stride_b, p.g_stride_t = g.stride_t, p.g_stride_h = g.stride_h;
        p.beta_stride_b = beta.stride_b, p.beta_stride_t = beta.stride_t, p.beta_stride_h = beta.stride_h;
        p.out_stride_b = v.stride_b, p.out_stride_t = v.stride_t, p.out_stride_h = v.stride_h;
        if (s.varlen) {
            p.num_sequences = static_cast<int64_t>(s.lengths.size());
            p.cu_seqlens = cu_seqlens.data();
        }
    }

    // One token of the definition: state [K][V] in, state and out [V].
    void step(int64_t b, int64_t t, int64_t hv, std::vector<double>& state, std::vector<double>& out) {
        const int64_t h = hv / (s.heads_v / s.heads);
        const int64_t kd = s.k_dim;
        const int64_t vd = s.v_dim;
        std::vector<double> qt(kd), kt(kd);
        double qq = 1e-6, kk = 1e-6;
        for (int64_t c = 0; c < kd; ++c) {
            qt[c] = q.get(b, t, h, c);
            kt[c] = k.get(b, t, h, c);
            qq += qt[c] * qt[c];
            kk += kt[c] * kt[c];
        }
        const double factor = s.with_a_log ? std::exp(read(a_log.data(), FLARE_FP32, hv)) : 1.0;
        const double scale = s.scale != 0.0f ? static_cast<double>(s.scale) : 1.0 / std::sqrt(static_cast<double>(kd));
        std::vector<double> error(vd);
        for (int64_t j = 0; j < vd; ++j) {
            error[j] = v.get(b, t, hv, j);
        }
        for (int64_t c = 0; c < kd; ++c) {
            qt[c] *= s.l2norm ? scale / std::sqrt(qq) : scale;
            kt[c] /= s.l2norm ? std::sqrt(kk) : 1.0;
            double gate = g.get(b, t, hv, c);
            if (s.gate != FLARE_GATE_LOG) {
                gate += s.with_bias ? read(bias.data(), FLARE_FP32, hv * kd + c) : 0.0;
                gate = s.gate == FLARE_GATE_SOFTPLUS
                           ? -factor * (gate > 0.0 ? gate + std::log1p(std::exp(-gate)) : std::log1p(std::exp(gate)))
                           : static_cast<double>(s.lower_bound) / (1.0 + std::exp(-factor * gate));
            }
            const double decay = std::exp(gate);
            for (int64_t j = 0; j < vd; ++j) {
                state[c * vd + j] *= decay;
                error[j] -= kt[c] * state[c * vd + j];
            }
        }
        for (int64_t j = 0; j < vd; ++j) {
            double b_t = beta.get(b, t, hv, s.beta_per_channel ? j : 0);
            if (s.beta_activation != FLARE_BETA_RAW) {
                b_t = (s.beta_activation == FLARE_BETA_SIGMOID2 ? 2.0 : 1.0) / (1.0 + std::exp(-b_t));
            }
            error[j] *= b_t;
        }
        std::fill(out.begin(), out.end(), 0.0);
        for (int64_t c = 0; c < kd; ++c) {
            for (int64_t j = 0; j < vd; ++j) {
                state[c * vd + j] += kt[c] * error[j];
                out[j] += qt[c] * state[c * vd + j];
            }
        }
    }

    Spec s;
    Random random;
    int64_t batch, seqlen;
    int32_t gate_dtype, beta_dtype;
    Tensor q, k, v, g, beta;
    Data a_log, bias;
    std::vector<int64_t> begins;
    Indices cu_seqlens;
};

// Index of element (c, j) of a state block.
int64_t state_index(const Spec& s, int32_t layout, int64_t c, int64_t j) {
    return layout == FLARE_STATE_KV ? c * s.v_dim + j : j * s.k_dim + c;
}

double bound_of(int32_t dtype, int32_t other = FLARE_FP32) {
    return out_bound(dtype, other, 1e-5, 2e-3, 6e-3);
}

void run(const flare_kda_forward_params& p, const char* what) {
    const int32_t status = flare_kda_forward(&p);
    EXPECT(status == FLARE_OK, "%s: status %d, %s", what, status, last_error().c_str());
}

void run(const flare_kda_decode_params& p, const char* what) {
    const int32_t status = flare_kda_decode(&p);
    EXPECT(status == FLARE_OK, "%s: status %d, %s", what, status, last_error().c_str());
}

// ---- random mixtures against the definition ---------------------------------------------------------------------------

Spec random_spec(Random& random, bool decode) {
    Spec s;
    s.dtype = static_cast<int32_t>(random.pick({FLARE_FP32, FLARE_FP32, FLARE_FP16, FLARE_BF16}));
    s.gate_dtype = static_cast<int32_t>(random.pick({0, 0, FLARE_FP32, FLARE_BF16}));
    s.beta_dtype = static_cast<int32_t>(random.pick({0, 0, FLARE_FP32, FLARE_FP16}));
    s.index_dtype = static_cast<int32_t>(random.pick({FLARE_INT32, FLARE_INT64}));
    s.gate = static_cast<int32_t>(random.pick({FLARE_GATE_LOG, FLARE_GATE_SOFTPLUS, FLARE_GATE_BOUNDED}));
    s.beta_activation = static_cast<int32_t>(random.pick({FLARE_BETA_RAW, FLARE_BETA_SIGMOID, FLARE_BETA_SIGMOID2}));
    s.l2norm = random.chance(0.7) || s.beta_activation == FLARE_BETA_SIGMOID2;
    s.beta_per_channel = random.chance(0.2);
    s.with_a_log = random.chance(0.7);
    s.with_bias = random.chance(0.7);
    s.heads_first = random.chance(0.5);
    s.lower_bound = random.chance(0.8) ? -5.0f : -1e-3f;
    s.scale = random.chance(0.7) ? 0.0f : 0.3f;
    s.heads = random.pick({1, 1, 2, 3});
    s.heads_v = s.heads * random.pick({1, 1, 2, 4});
    s.k_dim = random.pick({1, 7, 16, 33, 64, 100, 128});
    s.v_dim = random.pick({1, 5, 16, 40, 64, 96, 128});
    s.varlen = random.chance(0.6);
    s.seed = static_cast<uint64_t>(random.integer(1, 1 << 30));
    const int64_t sequences = random.integer(0, s.varlen ? 5 : 3);
    for (int64_t n = 0; n < sequences; ++n) {
        const int64_t length = decode ? random.pick({0, 1, 1, 2, 3, 5}) : random.pick({0, 0, 1, 2, 15, 16, 17, 31, 33, 63, 64, 65, 129});
        s.lengths.push_back(s.varlen || n == 0 ? length : s.lengths[0]);
    }
    s.tail = s.varlen ? random.pick({0, 0, 3}) : 0;
    return s;
}

// Distinct slots for n sequences out of `slots`, some of them the padding slot.
std::vector<int64_t> random_slots(int64_t n, int64_t slots, int64_t padding, Random& random) {
    std::vector<int64_t> all;
    for (int64_t i = 0; i < slots; ++i) {
        all.push_back(i);
    }
    std::vector<int64_t> chosen;
    for (int64_t i = 0; i < n; ++i) {
        const size_t at = static_cast<size_t>(random.integer(0, static_cast<int64_t>(all.size()) - 1));
        chosen.push_back(random.chance(0.2) ? padding : all[at]);
        all.erase(all.begin() + static_cast<int64_t>(at));
    }
    return chosen;
}

void check_forward(const Spec& s, Random& random) {
    Tokens tokens(s);
    flare_kda_forward_params p{};
    tokens.bind(p);
    const int64_t n_seq = static_cast<int64_t>(s.lengths.size());
    const int64_t block = s.k_dim * s.v_dim;
    const int32_t layout = static_cast<int32_t>(random.pick({FLARE_STATE_KV, FLARE_STATE_VK}));
    const bool use_slots = n_seq > 0 && random.chance(0.3);
    const int64_t rows = use_slots ? n_seq + 2 : n_seq;
    const std::vector<int64_t> slot_values = random_slots(n_seq, rows + 1, -1, random);
    const Indices slots(s.index_dtype, slot_values);
    const int32_t initial_dtype = static_cast<int32_t>(random.pick({0, FLARE_FP32, FLARE_BF16}));
    const bool has_initial = random.chance(0.6);
    const bool wants_final = random.chance(0.8);
    const bool in_place = has_initial && wants_final && random.chance(0.4);
    const int32_t final_dtype = in_place ? initial_dtype : static_cast<int32_t>(random.pick({0, FLARE_FP32, FLARE_BF16}));
    const int64_t stride_h = block + 7;
    const int64_t stride_n = s.heads_v * stride_h + 11;
    const int64_t pool = (rows + 1) * stride_n;
    const int64_t interval = 64;
    const bool checkpoints_wanted = random.chance(0.5);
    p.state_layout = layout;
    p.num_threads = static_cast<int32_t>(random.pick({0, 1, 2}));

    Output out(s.dtype, tokens.v.data.count());
    Data initial(initial_dtype == 0 ? FLARE_FP32 : initial_dtype, pool);
    Output final_state(final_dtype == 0 ? FLARE_FP32 : final_dtype, pool);
    std::vector<int64_t> checkpoint_rows = {random.pick({0, 1})};
    for (const int64_t length : s.lengths) {
        checkpoint_rows.push_back(checkpoint_rows.back() + length / interval + (s.varlen ? random.pick({0, 1}) : 0));
    }
    if (!s.varlen) {
        for (size_t n = 0; n < checkpoint_rows.size(); ++n) {
            checkpoint_rows[n] = static_cast<int64_t>(n) * (tokens.seqlen / interval);
        }
    }
    const Indices cu_checkpoints(s.index_dtype, checkpoint_rows);
    const int32_t checkpoint_dtype = static_cast<int32_t>(random.pick({0, FLARE_BF16}));
    Output checkpoints(checkpoint_dtype == 0 ? FLARE_FP32 : checkpoint_dtype, (checkpoint_rows.back() + 1) * s.heads_v * block);

    std::vector<double> state(static_cast<size_t>(block)), row(static_cast<size_t>(s.v_dim));
    for (int64_t n = 0; n < n_seq; ++n) {
        const int64_t slot = use_slots ? slot_values[static_cast<size_t>(n)] : n;
        for (int64_t hv = 0; hv < s.heads_v; ++hv) {
            const int64_t at = slot * stride_n + hv * stride_h;
            std::fill(state.begin(), state.end(), 0.0);
            if (has_initial && slot >= 0) {
                initial.set_random(at, block, random);
                for (int64_t c = 0; c < s.k_dim; ++c) {
                    for (int64_t j = 0; j < s.v_dim; ++j) {
                        state[c * s.v_dim + j] =
                            read(initial.data(), initial_dtype == 0 ? FLARE_FP32 : initial_dtype, at + state_index(s, layout, c, j));
                    }
                }
            }
            for (int64_t t = 0; t < s.lengths[static_cast<size_t>(n)]; ++t) {
                const int64_t b = s.varlen ? 0 : n;
                const int64_t token = tokens.begins[static_cast<size_t>(n)] + t;
                tokens.step(b, token, hv, state, row);
                for (int64_t j = 0; j < s.v_dim; ++j) {
                    out.expect(tokens.v.at(b, token, hv, j), row[j]);
                }
                if (checkpoints_wanted && (t + 1) % interval == 0) {
                    const int64_t index = checkpoint_rows[static_cast<size_t>(n)] + (t + 1) / interval - 1;
                    for (int64_t c = 0; c < s.k_dim; ++c) {
                        for (int64_t j = 0; j < s.v_dim; ++j) {
                            checkpoints.expect((index * s.heads_v + hv) * block + state_index(s, layout, c, j), state[c * s.v_dim + j]);
                        }
                    }
                }
            }
            for (int64_t c = 0; c < s.k_dim && wants_final && slot >= 0; ++c) {
                for (int64_t j = 0; j < s.v_dim; ++j) {
                    final_state.expect(at + state_index(s, layout, c, j), state[c * s.v_dim + j]);
                }
            }
        }
    }
    if (in_place) {
        // The pool is copied over the poison where sequences read it; everything else must stay poisoned.
        const int64_t width = bytes_of(initial_dtype == 0 ? FLARE_FP32 : initial_dtype);
        for (int64_t n = 0; n < n_seq; ++n) {
            const int64_t slot = use_slots ? slot_values[static_cast<size_t>(n)] : n;
            for (int64_t hv = 0; hv < s.heads_v && slot >= 0; ++hv) {
                const int64_t at = (slot * stride_n + hv * stride_h) * width;
                std::memcpy(final_state.data() + at, initial.data() + at, static_cast<size_t>(block * width));
            }
        }
    }
    p.out = out.data();
    p.initial_state = in_place ? final_state.data() : has_initial ? initial.data() : nullptr;
    p.final_state = wants_final ? final_state.data() : nullptr;
    p.initial_state_dtype = initial_dtype;
    p.final_state_dtype = final_dtype;
    p.checkpoint_dtype = checkpoint_dtype;
    p.initial_state_stride_n = p.final_state_stride_n = stride_n;
    p.initial_state_stride_h = p.final_state_stride_h = stride_h;
    if (use_slots) {
        p.state_slots = slots.data();
        p.num_slots = rows + 1;
        p.padding_slot = -1;
    }
    if (checkpoints_wanted) {
        p.checkpoints = checkpoints.data();
        p.checkpoint_interval = interval;
        p.cu_checkpoints = s.varlen ? cu_checkpoints.data() : nullptr;
    }
    run(p, "forward");
    const double bound = bound_of(s.dtype);
    out.check_relative(bound, "forward out");
    final_state.check_relative(bound_of(s.dtype, final_dtype == FLARE_BF16 ? FLARE_BF16 : FLARE_FP32), "forward final_state");
    checkpoints.check_relative(bound_of(s.dtype, checkpoint_dtype == FLARE_BF16 ? FLARE_BF16 : FLARE_FP32), "checkpoints");
}

void check_decode(const Spec& s, Random& random) {
    Tokens tokens(s);
    flare_kda_decode_params p{};
    tokens.bind(p);
    const int64_t n_seq = static_cast<int64_t>(s.lengths.size());
    const int64_t block = s.k_dim * s.v_dim;
    const int32_t layout = static_cast<int32_t>(random.pick({FLARE_STATE_KV, FLARE_STATE_VK}));
    const int32_t state_dtype = static_cast<int32_t>(random.pick({0, FLARE_FP32, FLARE_BF16}));
    const int32_t stored = state_dtype == 0 ? FLARE_FP32 : state_dtype;
    const int64_t width = bytes_of(stored);
    const bool use_slots = n_seq > 0 && random.chance(0.7);
    const bool per_token = use_slots && random.chance(0.5);
    const bool accepted_given = per_token && random.chance(0.5);
    const bool elsewhere = random.chance(0.3);
    const int64_t per_sequence = per_token ? std::max<int64_t>(2, tokens.seqlen) : 1;
    const int64_t pool_rows = (use_slots ? n_seq * per_sequence : n_seq) + 3;
    std::vector<int64_t> slot_values = random_slots(n_seq * per_sequence, pool_rows, 777777, random);
    std::vector<int64_t> accepted_values;
    for (int64_t n = 0; n < n_seq; ++n) {
        accepted_values.push_back(random.integer(1, per_sequence));
    }
    const Indices slots(s.index_dtype, slot_values);
    const Indices accepted(s.index_dtype, accepted_values);
    const int64_t stride_h = block + 5;
    const int64_t stride_n = s.heads_v * stride_h + 9;
    Data source(stored, pool_rows * stride_n);
    Output target(stored, pool_rows * stride_n);
    Output out(s.dtype, tokens.v.data.count());

    std::vector<double> state(static_cast<size_t>(block)), row(static_cast<size_t>(s.v_dim));
    for (int64_t n = 0; n < n_seq; ++n) {
        const int64_t start_entry = n * per_sequence + (accepted_given ? accepted_values[static_cast<size_t>(n)] - 1 : 0);
        const int64_t start = use_slots ? slot_values[static_cast<size_t>(start_entry)] : n;
        const int64_t length = s.lengths[static_cast<size_t>(n)];
        bool start_is_overwritten = !per_token && start != 777777;
        for (int64_t t = 0; per_token && t < length; ++t) {
            start_is_overwritten |= slot_values[static_cast<size_t>(n * per_sequence + t)] == start;
        }
        for (int64_t hv = 0; hv < s.heads_v; ++hv) {
            std::fill(state.begin(), state.end(), 0.0);
            const auto expect_state = [&](int64_t slot) {
                for (int64_t c = 0; c < s.k_dim && slot != 777777; ++c) {
                    for (int64_t j = 0; j < s.v_dim; ++j) {
                        target.expect(slot * stride_n + hv * stride_h + state_index(s, layout, c, j), state[c * s.v_dim + j]);
                    }
                }
            };
            if (start != 777777) {
                const int64_t at = start * stride_n + hv * stride_h;
                source.set_random(at, block, random);
                for (int64_t c = 0; c < s.k_dim; ++c) {
                    for (int64_t j = 0; j < s.v_dim; ++j) {
                        state[c * s.v_dim + j] = read(source.data(), stored, at + state_index(s, layout, c, j));
                    }
                }
                if (!elsewhere) {
                    std::memcpy(target.data() + at * width, source.data() + at * width, static_cast<size_t>(block * width));
                    if (!start_is_overwritten) {
                        expect_state(start);
                    }
                }
            }
            for (int64_t t = 0; t < length; ++t) {
                const int64_t b = s.varlen ? 0 : n;
                const int64_t token = tokens.begins[static_cast<size_t>(n)] + t;
                tokens.step(b, token, hv, state, row);
                for (int64_t j = 0; j < s.v_dim; ++j) {
                    out.expect(tokens.v.at(b, token, hv, j), row[j]);
                }
                if (per_token) {
                    expect_state(slot_values[static_cast<size_t>(n * per_sequence + t)]);
                }
            }
            if (!per_token) {
                expect_state(start);
            }
        }
    }
    p.out = out.data();
    p.state = elsewhere ? source.data() : target.data();
    p.state_out = elsewhere ? target.data() : nullptr;
    p.state_dtype = state_dtype;
    p.state_layout = layout;
    p.state_stride_n = stride_n;
    p.state_stride_h = stride_h;
    p.num_slots = pool_rows;
    p.num_threads = static_cast<int32_t>(random.pick({0, 1, 2}));
    if (use_slots) {
        p.slots = slots.data();
        p.slots_stride_n = per_sequence;
        p.slots_per_sequence = per_token ? per_sequence : 0;
        p.padding_slot = 777777;
        p.num_accepted = accepted_given ? accepted.data() : nullptr;
    }
    run(p, "decode");
    out.check_relative(bound_of(s.dtype), "decode out");
    target.check_relative(bound_of(s.dtype, stored), "decode state");
}

// ---- exact properties -------------------------------------------------------------------------------------------------

// A dense fp32 run: out [tokens][V] of head 0 and the final state, as bits.
struct Result {
    std::vector<char> out, state;
};

Result run_plain(Tokens& tokens, int64_t batch_row, int64_t first, int64_t count, const std::vector<char>* initial, int32_t layout,
                 int32_t threads) {
    const Spec& s = tokens.s;
    flare_kda_forward_params p{};
    tokens.bind(p);
    const auto shifted = [&](const void* base, const Tokens::Tensor& t) {
        return static_cast<const char*>(base) + t.at(batch_row, first, 0, 0) * bytes_of(t.dtype);
    };
    p.q = shifted(p.q, tokens.q);
    p.k = shifted(p.k, tokens.k);
    p.v = shifted(p.v, tokens.v);
    p.g = shifted(p.g, tokens.g);
    p.beta = shifted(p.beta, tokens.beta);
    p.batch = 1;
    p.seqlen = count;
    p.cu_seqlens = nullptr;
    p.num_sequences = 0;
    p.num_threads = threads;
    Result result;
    result.out.assign(static_cast<size_t>(count * s.heads_v * s.v_dim * bytes_of(s.dtype)), 0);
    result.state.assign(static_cast<size_t>(s.heads_v * s.k_dim * s.v_dim * 4), 0);
    p.out = result.out.data();
    p.out_stride_h = s.v_dim;
    p.out_stride_t = s.heads_v * s.v_dim;
    p.out_stride_b = count * p.out_stride_t;
    p.state_layout = layout;
    p.initial_state = initial != nullptr ? initial->data() : nullptr;
    p.final_state = result.state.data();
    run(p, "plain");
    return result;
}

void check_bitwise(Random& random) {
    Spec s;
    s.gate = FLARE_GATE_SOFTPLUS;
    s.heads = 2;
    s.heads_v = 4;
    s.k_dim = 64;
    s.v_dim = 96;
    s.lengths.assign(2, 150);
    Tokens tokens(s);
    const int64_t row_bytes = s.heads_v * s.v_dim * 4;
    const auto prefix_equal = [&](const Result& a, const Result& b, int64_t count) {
        return std::memcmp(a.out.data(), b.out.data(), static_cast<size_t>(count * row_bytes)) == 0;
    };
    const Result whole = run_plain(tokens, 1, 0, 150, nullptr, FLARE_STATE_KV, 0);
    for (const int32_t threads : {0, 1, 2, 3}) {
        const Result again = run_plain(tokens, 1, 0, 150, nullptr, FLARE_STATE_KV, threads);
        EXPECT(again.out == whole.out && again.state == whole.state, "threads %d change bits", threads);
    }
    for (const int64_t prefix : {1, 15, 16, 17, 40, 64, 149}) {
        EXPECT(prefix_equal(run_plain(tokens, 1, 0, prefix, nullptr, FLARE_STATE_KV, 0), whole, prefix), "prefix of %lld",
               static_cast<long long>(prefix));
    }
    const Result other_layout = run_plain(tokens, 1, 0, 150, nullptr, FLARE_STATE_VK, 0);
    EXPECT(other_layout.out == whole.out, "the state layout changes the output");
    for (int64_t hv = 0; hv < s.heads_v; ++hv) {
        for (int64_t c = 0; c < s.k_dim; ++c) {
            for (int64_t j = 0; j < s.v_dim; ++j) {
                const double kv = read(whole.state.data(), FLARE_FP32, (hv * s.k_dim + c) * s.v_dim + j);
                const double vk = read(other_layout.state.data(), FLARE_FP32, (hv * s.v_dim + j) * s.k_dim + c);
                EXPECT(kv == vk, "layouts differ at %lld %lld", static_cast<long long>(c), static_cast<long long>(j));
            }
        }
    }
    for (const int64_t cut : {16, 64, 128}) {
        const Result head = run_plain(tokens, 1, 0, cut, nullptr, FLARE_STATE_VK, 0);
        Result tail = run_plain(tokens, 1, cut, 150 - cut, &head.state, FLARE_STATE_VK, 0);
        EXPECT(tail.state == other_layout.state, "cut at %lld changes the state", static_cast<long long>(cut));
        EXPECT(std::memcmp(tail.out.data(), whole.out.data() + cut * row_bytes, tail.out.size()) == 0, "cut at %lld changes the output",
               static_cast<long long>(cut));
    }
    // Batch mates: packed between NaN sequences, and beside another batch row.
    {
        Spec packed = s;
        packed.varlen = true;
        packed.lengths = {7, 150, 33};
        packed.tail = 4;
        Tokens mates(packed);
        for (int64_t t = 0; t < mates.seqlen; ++t) {
            const bool own = t >= 7 && t < 157;
            const auto copy = [&](Tokens::Tensor& to, Tokens::Tensor& from) {
                to.set_row(0, t, [&](int64_t h, int64_t c) { return own ? from.get(1, t - 7, h, c) : std::nan(""); });
            };
            copy(mates.q, tokens.q);
            copy(mates.k, tokens.k);
            copy(mates.v, tokens.v);
            copy(mates.g, tokens.g);
            copy(mates.beta, tokens.beta);
        }
        for (int64_t i = 0; i < s.heads_v * s.k_dim; ++i) {
            mates.bias.set(i, read(tokens.bias.data(), FLARE_FP32, i));
        }
        for (int64_t hv = 0; hv < s.heads_v; ++hv) {
            mates.a_log.set(hv, read(tokens.a_log.data(), FLARE_FP32, hv));
        }
        flare_kda_forward_params p{};
        mates.bind(p);
        std::vector<char> out(static_cast<size_t>(mates.seqlen * row_bytes));
        std::vector<float> states(static_cast<size_t>(3 * s.heads_v * s.k_dim * s.v_dim));
        p.out = out.data();
        p.out_stride_h = s.v_dim;
        p.out_stride_t = s.heads_v * s.v_dim;
        p.out_stride_b = mates.seqlen * p.out_stride_t;
        p.state_layout = FLARE_STATE_KV;
        p.final_state = states.data();
        run(p, "packed");
        EXPECT(std::memcmp(out.data() + 7 * row_bytes, whole.out.data(), whole.out.size()) == 0, "batch mates change the output");
        EXPECT(std::memcmp(reinterpret_cast<char*>(states.data()) + whole.state.size(), whole.state.data(), whole.state.size()) == 0,
               "batch mates change the state");
    }
    // Later tokens, NaN and infinities included, change nothing before them.
    for (const int64_t at : {0, 5, 16, 31, 70}) {
        Tokens changed(s);
        for (int64_t t = at; t < 150; ++t) {
            changed.g.set_row(1, t, [&](int64_t, int64_t) { return 50.0 * random.normal(); });
        }
        EXPECT(prefix_equal(run_plain(changed, 1, 0, 150, nullptr, FLARE_STATE_KV, 0), whole, at), "gates from %lld on",
               static_cast<long long>(at));
        for (Tokens::Tensor* tensor : {&changed.q, &changed.k, &changed.v, &changed.g, &changed.beta}) {
            Tokens poisoned(s);
            Tokens::Tensor* target = tensor == &changed.q   ? &poisoned.q
                                     : tensor == &changed.k ? &poisoned.k
                                     : tensor == &changed.v ? &poisoned.v
                                     : tensor == &changed.g ? &poisoned.g
                                                            : &poisoned.beta;
            target->set_row(1, at, [&](int64_t, int64_t) { return std::nan(""); });
            EXPECT(prefix_equal(run_plain(poisoned, 1, 0, 150, nullptr, FLARE_STATE_KV, 0), whole, at), "NaN at token %lld",
                   static_cast<long long>(at));
        }
    }
}

// ---- single edges -----------------------------------------------------------------------------------------------------

// Expected output and final state of sequence 0 of a spec; the data may have been changed after construction.
void compare(Tokens& tokens, double bound, const char* what) {
    const Spec& s = tokens.s;
    flare_kda_forward_params p{};
    tokens.bind(p);
    Output out(s.dtype, tokens.v.data.count());
    Output final_state(FLARE_FP32, static_cast<int64_t>(s.lengths.size()) * s.heads_v * s.k_dim * s.v_dim);
    std::vector<double> row(static_cast<size_t>(s.v_dim));
    for (size_t n = 0; n < s.lengths.size(); ++n) {
        for (int64_t hv = 0; hv < s.heads_v; ++hv) {
            std::vector<double> state(static_cast<size_t>(s.k_dim * s.v_dim));
            for (int64_t t = 0; t < s.lengths[n]; ++t) {
                const int64_t b = s.varlen ? 0 : static_cast<int64_t>(n);
                tokens.step(b, tokens.begins[n] + t, hv, state, row);
                for (int64_t j = 0; j < s.v_dim; ++j) {
                    out.expect(tokens.v.at(b, tokens.begins[n] + t, hv, j), row[j]);
                }
            }
            for (int64_t i = 0; i < s.k_dim * s.v_dim; ++i) {
                final_state.expect((static_cast<int64_t>(n) * s.heads_v + hv) * s.k_dim * s.v_dim + i, state[i]);
            }
        }
    }
    p.out = out.data();
    p.final_state = final_state.data();
    p.state_layout = FLARE_STATE_KV;
    run(p, what);
    out.check_relative(bound, what);
    final_state.check_relative(bound, what);
    std::printf("  %-44s %.2g of the bound %.2g\n", what, std::max(out.worst(), final_state.worst()), bound);
}

void check_gates() {
    const struct {
        const char* name;
        int32_t gate;
        std::function<double(Random&)> raw;
    } cases[] = {
        {"log gate -1000 everywhere", FLARE_GATE_LOG, [](Random&) { return -1000.0; }},
        {"log gate -1000 at random", FLARE_GATE_LOG, [](Random& r) { return r.chance(0.5) ? -1000.0 : -0.01; }},
        {"log gate 0", FLARE_GATE_LOG, [](Random&) { return 0.0; }},
        {"log gate -infinity at random", FLARE_GATE_LOG, [](Random& r) { return r.chance(0.2) ? -HUGE_VAL : -0.1; }},
        {"log gate -5", FLARE_GATE_LOG, [](Random&) { return -5.0; }},
        {"softplus, huge", FLARE_GATE_SOFTPLUS, [](Random& r) { return r.chance(0.5) ? 1000.0 : -3.0; }},
        {"softplus, raw -50", FLARE_GATE_SOFTPLUS, [](Random&) { return -50.0; }},
        {"softplus, wide", FLARE_GATE_SOFTPLUS, [](Random& r) { return 8.0 * r.normal(); }},
        {"bounded, raw +50", FLARE_GATE_BOUNDED, [](Random&) { return 50.0; }},
        {"bounded, raw -50", FLARE_GATE_BOUNDED, [](Random&) { return -50.0; }},
        {"bounded, alternating", FLARE_GATE_BOUNDED, [](Random& r) { return r.chance(0.5) ? 50.0 : -12.0; }},
    };
    for (const auto& item : cases) {
        Spec s;
        s.gate = item.gate;
        s.k_dim = 64;
        s.v_dim = 32;
        s.lengths.assign(1, 129);
        Tokens tokens(s);
        for (int64_t t = 0; t < 129; ++t) {
            tokens.g.set_row(0, t, [&](int64_t, int64_t) { return item.raw(tokens.random); });
        }
        compare(tokens, 1e-5, item.name);
    }
}

void check_keys_and_values() {
    const struct {
        const char* name;
        bool l2norm;
        std::function<double(Random&, int64_t, int64_t)> key;
    } cases[] = {
        {"identical keys", true, [](Random&, int64_t, int64_t c) { return std::sin(static_cast<double>(c + 1)); }},
        {"near-collinear keys", true,
         [](Random& r, int64_t, int64_t c) { return std::sin(static_cast<double>(c + 1)) + 1e-3 * r.normal(); }},
        {"two alternating keys", true, [](Random&, int64_t t, int64_t c) { return std::sin(static_cast<double>((t % 2 + 1) * (c + 1))); }},
        {"orthogonal keys", true, [](Random&, int64_t t, int64_t c) { return c == t % 64 ? 1.0 : 0.0; }},
        {"zero keys", true, [](Random&, int64_t, int64_t) { return 0.0; }},
        {"keys of norm 1e4", true, [](Random& r, int64_t, int64_t) { return 1e4 * r.normal(); }},
        {"keys of norm 1e-4", true, [](Random& r, int64_t, int64_t) { return 1e-5 * r.normal(); }},
        {"keys -50 +- 10", true, [](Random& r, int64_t, int64_t) { return -50.0 + 10.0 * r.normal(); }},
        {"short keys, no norm", false, [](Random& r, int64_t, int64_t) { return 0.05 * r.normal(); }},
    };
    for (const auto& item : cases) {
        for (const double beta : {-50.0, 0.0, 8.0, 50.0}) {
            Spec s;
            s.l2norm = item.l2norm;
            s.k_dim = 64;
            s.v_dim = 32;
            s.lengths.assign(1, 200);
            s.with_a_log = s.with_bias = false;
            Tokens tokens(s);
            for (int64_t t = 0; t < 200; ++t) {
                tokens.g.set_row(0, t, [&](int64_t, int64_t) { return -6.0; });
                tokens.k.set_row(0, t, [&](int64_t, int64_t c) { return item.key(tokens.random, t, c); });
                tokens.beta.set_row(0, t, [&](int64_t, int64_t) { return beta; });
                tokens.v.set_row(0, t, [&](int64_t, int64_t) { return 1e4 * tokens.random.normal(); });
            }
            compare(tokens, 1e-5, item.name);
        }
    }
    // Two published failures of low-precision triangular inverses. One key repeated, slow decay, beta near 1, values periodic with 16:
    {
        Spec s;
        s.dtype = FLARE_BF16;
        s.v_dim = 16;
        s.lengths.assign(1, 16384);
        s.with_a_log = s.with_bias = false;
        Tokens tokens(s);
        std::vector<double> values(16 * 16);
        for (double& value : values) {
            value = tokens.random.normal();
        }
        for (int64_t t = 0; t < 16384; ++t) {
            tokens.g.set_row(0, t, [&](int64_t, int64_t) { return -12.0; });
            tokens.k.set_row(0, t, [&](int64_t, int64_t c) { return std::sin(static_cast<double>(c + 1)); });
            tokens.beta.set_row(0, t, [&](int64_t, int64_t) { return 8.0; });
            tokens.v.set_row(0, t, [&](int64_t, int64_t c) { return values[static_cast<size_t>(t % 16 * 16 + c)]; });
        }
        compare(tokens, 1.2e-2, "one key repeated 16384 times, bf16");
    }
    // ... and correlated keys of norm 0.9, beta 1, gates in [-0.034, -0.012].
    {
        Spec s;
        s.gate = FLARE_GATE_LOG;
        s.beta_activation = FLARE_BETA_RAW;
        s.l2norm = false;
        s.v_dim = 16;
        s.lengths.assign(1, 16384);
        Tokens tokens(s);
        for (int64_t t = 0; t < 16384; ++t) {
            tokens.g.set_row(0, t, [&](int64_t, int64_t) { return -0.012 - 0.022 * static_cast<double>(tokens.random.integer(0, 100)) / 100; });
            std::vector<double> key(128);
            double norm = 0.0;
            for (int64_t c = 0; c < 128; ++c) {
                key[static_cast<size_t>(c)] = std::sin(static_cast<double>(c + 1)) + 0.05 * tokens.random.normal();
                norm += key[static_cast<size_t>(c)] * key[static_cast<size_t>(c)];
            }
            tokens.k.set_row(0, t, [&](int64_t, int64_t c) { return 0.9 * key[static_cast<size_t>(c)] / std::sqrt(norm); });
            tokens.beta.set_row(0, t, [&](int64_t, int64_t) { return 1.0; });
        }
        compare(tokens, 1e-5, "correlated keys of norm 0.9, fp32");
    }
}

void check_shapes() {
    for (const int64_t dim : {256, 512}) {
        Spec s;
        s.k_dim = dim;
        s.v_dim = dim == 512 ? 200 : 512;
        s.lengths.assign(1, 40);
        Tokens tokens(s);
        compare(tokens, 1e-5, dim == 512 ? "K 512, V 200" : "K 256, V 512");
    }
    {
        Spec s;
        s.varlen = true;
        s.k_dim = 16;
        s.v_dim = 16;
        s.lengths.assign(3000, 1);
        s.lengths[1500] = 700;
        Tokens tokens(s);
        compare(tokens, 1e-5, "3000 sequences, one of 700 tokens");
    }
    {
        Spec s;
        s.gate = FLARE_GATE_BOUNDED;
        s.k_dim = 16;
        s.v_dim = 16;
        s.lengths.assign(1, 65536);
        s.with_a_log = s.with_bias = false;
        Tokens tokens(s);
        for (int64_t t = 0; t < 65536; ++t) {
            tokens.g.set_row(0, t, [&](int64_t, int64_t) { return -50.0; });
            tokens.beta.set_row(0, t, [&](int64_t, int64_t) { return -5.0; });
        }
        compare(tokens, 1e-5, "65536 tokens without decay");
    }
    // Memories of 2000 to 50000 tokens: what rounding does to a decay that is the same for every token must not add up.
    for (const double log_decay : {-5e-4, -1e-4, -2e-5}) {
        Spec s;
        s.gate = FLARE_GATE_LOG;
        s.l2norm = false;
        s.k_dim = 16;
        s.v_dim = 16;
        s.lengths = {30000};
        s.with_a_log = s.with_bias = false;
        Tokens tokens(s);
        for (int64_t t = 0; t < 30000; ++t) {
            tokens.g.set_row(0, t, [&](int64_t, int64_t) { return log_decay; });
            tokens.k.set_row(0, t, [&](int64_t, int64_t) { return 0.01 * tokens.random.normal(); });
            tokens.beta.set_row(0, t, [&](int64_t, int64_t) { return 0.0; });
            tokens.v.set_row(0, t, [&](int64_t, int64_t) { return 1.0 + tokens.random.normal(); });
        }
        compare(tokens, 1e-5, "slow decay, 30000 tokens");
    }
}

// T = 1: out = scale (q.k) b v and S = b k v^T from zero; b = 0: S = diag(e^g) S0.
void check_by_hand() {
    float q[2] = {2.0f, 1.0f}, k[2] = {0.5f, 0.25f}, v[2] = {4.0f, -8.0f}, g[2] = {0.0f, 0.0f}, beta = 0.5f;
    float out[2], state[4];
    flare_kda_forward_params p{};
    p.struct_size = sizeof(p);
    p.device = FLARE_DEVICE_CPU;
    p.dtype = FLARE_FP32;
    p.state_layout = FLARE_STATE_KV;
    p.scale = 2.0f;
    p.batch = p.seqlen = p.heads_qk = p.heads_v = 1;
    p.head_dim_k = p.head_dim_v = 2;
    p.q = q, p.k = k, p.v = v, p.g = g, p.beta = &beta, p.out = out, p.final_state = state;
    p.q_stride_b = p.q_stride_t = p.q_stride_h = p.k_stride_b = p.k_stride_t = p.k_stride_h = 2;
    p.v_stride_b = p.v_stride_t = p.v_stride_h = p.g_stride_b = p.g_stride_t = p.g_stride_h = 2;
    p.out_stride_b = p.out_stride_t = p.out_stride_h = 2;
    p.beta_stride_b = p.beta_stride_t = p.beta_stride_h = 1;
    run(p, "by hand");
    EXPECT(out[0] == 5.0f && out[1] == -10.0f, "out %g %g", static_cast<double>(out[0]), static_cast<double>(out[1]));
    EXPECT(state[0] == 1.0f && state[1] == -2.0f && state[2] == 0.5f && state[3] == -1.0f, "state %g", static_cast<double>(state[0]));
    const float initial[4] = {1.0f, 2.0f, 3.0f, 4.0f};
    beta = 0.0f;
    g[0] = -std::log(2.0f);
    g[1] = -1000.0f;
    p.initial_state = initial;
    run(p, "by hand");
    EXPECT(std::fabs(state[0] - 0.5f) < 1e-6f && std::fabs(state[1] - 1.0f) < 1e-6f && state[2] == 0.0f && state[3] == 0.0f, "decayed state");

    char name[64];
    EXPECT(flare_kernel_name(FLARE_OP_KDA_FORWARD, &p, name, sizeof(name)) == FLARE_OK && std::strstr(name, "kda_forward") != nullptr,
           "kernel name %s", name);
    uint64_t bytes = 1;
    EXPECT(flare_kda_forward_workspace(&p, &bytes) == FLARE_OK && bytes == 0, "workspace %llu", static_cast<unsigned long long>(bytes));
}

// ---- errors -----------------------------------------------------------------------------------------------------------

void expect_index_error(int32_t status, Output& out, const char* part) {
    EXPECT(status == FLARE_ERROR_INDEX, "status %d instead of an index error about %s", status, part);
    EXPECT(last_error().find(part) != std::string::npos, "\"%s\" lacks \"%s\"", last_error().c_str(), part);
    out.check_relative(1.0, "output of a failed call");
}

void check_index_errors() {
    for (const int32_t type : {FLARE_INT32, FLARE_INT64}) {
        Spec s;
        s.index_dtype = type;
        s.varlen = true;
        s.k_dim = s.v_dim = 8;
        s.lengths = {70, 5};
        Tokens tokens(s);
        Output out(FLARE_FP32, tokens.v.data.count());
        Output states(FLARE_FP32, 4 * 64);
        const auto forward = [&](std::vector<int64_t> cu, std::vector<int64_t> slot_values, std::vector<int64_t> cu_rows, const char* part) {
            flare_kda_forward_params p{};
            tokens.bind(p);
            const Indices cu_seqlens(type, cu), slots(type, slot_values), rows(type, cu_rows);
            p.cu_seqlens = cu_seqlens.data();
            p.out = out.data();
            p.final_state = states.data();
            p.state_layout = FLARE_STATE_KV;
            p.state_slots = slots.data();
            p.num_slots = 4;
            p.padding_slot = -1;
            Output checkpoints(FLARE_FP32, 4 * 64);
            p.checkpoints = checkpoints.data();
            p.checkpoint_interval = 64;
            p.cu_checkpoints = rows.data();
            expect_index_error(flare_kda_forward(&p), out, part);
            states.check_relative(1.0, "states of a failed call");
            checkpoints.check_relative(1.0, "checkpoints of a failed call");
        };
        forward({0, 80, 75}, {0, 1}, {0, 1, 1}, "cu_seqlens[1] is 80, allowed are 0..75");
        forward({0, 70, 60}, {0, 1}, {0, 1, 1}, "cu_seqlens[2] is 60");
        forward({-1, 70, 75}, {0, 1}, {0, 1, 1}, "cu_seqlens[0] is -1");
        forward({0, 70, 75}, {0, 4}, {0, 1, 1}, "state_slots[1] is 4, allowed are 0..3");
        forward({0, 70, 75}, {-2, 1}, {0, 1, 1}, "state_slots[0] is -2");
        forward({0, 70, 75}, {2, 2}, {0, 1, 1}, "state_slots[1]");
        forward({0, 70, 75}, {0, 1}, {0, 0, 1}, "cu_checkpoints[1] is 0, allowed is 1 or more");
        forward({0, 70, 75}, {0, 1}, {-3, 1, 1}, "cu_checkpoints[0] is -3");

        Spec d = s;
        d.lengths = {2, 1};
        Tokens few(d);
        Output few_out(FLARE_FP32, few.v.data.count());
        const auto decode = [&](std::vector<int64_t> cu, std::vector<int64_t> slot_values, std::vector<int64_t> accepted_values,
                                const char* part) {
            flare_kda_decode_params p{};
            few.bind(p);
            const Indices cu_seqlens(type, cu), slots(type, slot_values), accepted(type, accepted_values);
            p.cu_seqlens = cu_seqlens.data();
            p.out = few_out.data();
            p.state = states.data();
            p.state_layout = FLARE_STATE_KV;
            p.num_slots = 4;
            p.slots = slots.data();
            p.slots_stride_n = p.slots_per_sequence = 2;
            p.padding_slot = -1;
            p.num_accepted = accepted.data();
            expect_index_error(flare_kda_decode(&p), few_out, part);
            states.check_relative(1.0, "states of a failed call");
        };
        decode({0, 2, 4}, {0, 1, 2, 3}, {1, 1}, "cu_seqlens[2] is 4");
        decode({0, 3, 3}, {0, 1, 2, 3}, {1, 1}, "the longest allowed is 2");
        decode({0, 2, 3}, {0, 1, 9, 3}, {1, 1}, "slots[2] is 9");
        decode({0, 2, 3}, {0, 1, 2, 9}, {1, 2}, "slots[3] is 9");
        decode({0, 2, 3}, {0, 1, 1, 3}, {1, 1}, "slots[2]");
        // Sequence 1 starts from its second slot, which its only token doesn't write; sequence 0 does.
        decode({0, 2, 3}, {0, 1, 2, 1}, {1, 2}, "slots[3] and slots[1] are both 1");
        decode({0, 2, 3}, {0, 1, 2, 3}, {0, 1}, "num_accepted[0] is 0, allowed are 1..2");
        decode({0, 2, 3}, {0, 1, 2, 3}, {1, 3}, "num_accepted[1] is 3");
    }
}

}  // namespace

int main() {
    for (const flare::cpu::Isa isa : kIsas) {
        flare::cpu::override_isa(isa);
        std::printf("%s\n", flare::cpu::isa_name(flare::cpu::active_isa()));
        Random random(20);
        for (int i = 0; i < 120; ++i) {
            check_forward(random_spec(random, false), random);
            check_decode(random_spec(random, true), random);
        }
        check_bitwise(random);
        check_gates();
        check_keys_and_values();
        check_shapes();
        check_by_hand();
        check_index_errors();
    }
    return finish("cpu_kda_test");
}
