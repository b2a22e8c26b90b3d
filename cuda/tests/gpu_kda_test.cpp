// KDA on CUDA against the CPU backend, through flare.h: seeded random cases over every option, the edge cases of the
// recurrence, and what must hold bit for bit. Outputs are poisoned, unused memory is NaN and stays so, kernel names are
// asserted. Ends with status 77 (skipped) where there is no usable GPU.
#if defined(FLARE_HAVE_CUDA)
#include "gpu_support.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <functional>
#include <map>
#include <memory>
#include <numeric>
#include <thread>

using namespace gpu_test;

namespace {

struct Case {
    std::string name;
    std::vector<int64_t> lengths;  // packed sequences; empty: dense
    int64_t batch = 1, tokens = 100, heads_qk = 2, heads_v = 2, dim_k = 128, dim_v = 128;
    int32_t dtype = FLARE_BF16, gate_dtype = 0, beta_dtype = 0, index_dtype = FLARE_INT32;
    int32_t initial_dtype = FLARE_FP32, final_dtype = FLARE_FP32, checkpoint_dtype = FLARE_FP32;
    int32_t layout = FLARE_STATE_VK, gate = FLARE_GATE_BOUNDED, beta = FLARE_BETA_SIGMOID, l2norm = 1, per_channel = 0;
    float lower_bound = -5.0f, scale = 0.0f;
    bool a_log = true, dt_bias = true, initial = true, final = true, in_place = false, slots = false,
         heads_first = false;
    int64_t checkpoint_interval = 0;
    int64_t pad = 0;  // extra elements behind every row
    int64_t state_pad = 0;
    double gate_mean = 0.0, gate_spread = 1.0, beta_mean = 0.0, beta_spread = 1.0;
    enum class Keys { kNormal, kSame, kTwoInTurn, kEveryThirdZero, kTinyAndLarge } keys = Keys::kNormal;
    double collinear = 0.0;     // keys = one row per head + this much noise
    double minus_1000 = 0.0;    // share of gates of -1000
    double alternating = 0.0;   // raw gates are this and minus this, channel by channel
    double beta_at_end = 0.0;   // share of betas at -50, 0 or 50 before their activation
    int64_t nan_sequence = -1;
    double value_size = 1.0;
    // decode
    int64_t slots_per_sequence = 1;
    bool accepted = false, state_out = false;
    int32_t kernel = FLARE_KERNEL_PORTABLE;
    double bound = 0.0;  // 0: of the dtype
    bool strict = false;  // holds it even where half an ulp in the inputs moves the answer by more
    std::string runs;    // the kernel that is to run, where it follows from more than dtypes and sizes of heads
    int32_t threads = 0;  // of the CPU backend

    int64_t sequences() const { return lengths.empty() ? batch : static_cast<int64_t>(lengths.size()); }
    int64_t rows() const {
        return lengths.empty() ? tokens : std::accumulate(lengths.begin(), lengths.end(), int64_t{0});
    }
    int64_t batches() const { return lengths.empty() ? batch : 1; }
    double error_bound() const {
        return bound > 0 ? bound : dtype == FLARE_FP32 ? 1e-5 : dtype == FLARE_FP16 ? 2e-3 : 6e-3;
    }
};

std::string describe(const Case& c) {
    char text[320];
    const char* gates[] = {"log", "softplus", "bounded"};
    std::snprintf(text, sizeof(text), "%s%s %s N%lld T%lld H%lld/%lld K%lld V%lld %s%s%s beta %d%s%s%s%s",
                  c.name.c_str(), c.lengths.empty() ? "" : " packed", name_of(c.dtype),
                  static_cast<long long>(c.sequences()), static_cast<long long>(c.rows()),
                  static_cast<long long>(c.heads_qk), static_cast<long long>(c.heads_v),
                  static_cast<long long>(c.dim_k), static_cast<long long>(c.dim_v), gates[c.gate],
                  c.a_log ? " a_log" : "", c.dt_bias ? " bias" : "", c.beta, c.per_channel != 0 ? " per channel" : "",
                  c.layout == FLARE_STATE_KV ? " K,V" : " V,K", c.slots ? " slots" : "",
                  c.checkpoint_interval > 0 ? " checkpoints" : "");
    return text;
}

using Tensor = std::unique_ptr<Mirror>;

// A token tensor [B, T, heads, dim] with its strides.
struct Tokens {
    Tokens(const Case& c, int32_t dtype, int64_t heads, int64_t dim) {
        // Rows of 16-bit and 32-bit types alike stay multiples of 16 bytes where the pad is a multiple of 8.
        stride_h = c.heads_first ? (c.rows() + 1) * (dim + c.pad) : dim + c.pad;
        stride_t = c.heads_first ? dim + c.pad : heads * (dim + c.pad);
        stride_b = heads * (c.rows() + 1) * (dim + c.pad);
        data = std::make_unique<Mirror>(dtype, c.batches() * stride_b + 8);
    }
    int64_t at(int64_t b, int64_t t, int64_t h) const { return b * stride_b + t * stride_t + h * stride_h; }
    Tensor data;
    int64_t stride_b, stride_t, stride_h;
};

struct Data {
    explicit Data(const Case& c)
        : q(c, c.dtype, c.heads_qk, c.dim_k),
          k(c, c.dtype, c.heads_qk, c.dim_k),
          v(c, c.dtype, c.heads_v, c.dim_v),
          g(c, c.gate_dtype != 0 ? c.gate_dtype : c.dtype, c.heads_v, c.dim_k),
          beta(c, c.beta_dtype != 0 ? c.beta_dtype : c.dtype, c.heads_v, c.per_channel != 0 ? c.dim_v : 1),
          out(c, c.dtype, c.heads_v, c.dim_v),
          a_log(FLARE_FP32, c.heads_v),
          dt_bias(FLARE_FP32, c.heads_v * c.dim_k),
          cu(c.index_dtype, c.sequences() + 1) {
        const double size = c.l2norm != 0 ? 1.0 : 1.0 / std::sqrt(static_cast<double>(c.dim_k));
        std::vector<int64_t> starts{0};
        for (const int64_t length : c.lengths) {
            starts.push_back(starts.back() + length);
        }
        cu.set_indices(starts);
        std::vector<double> shared(static_cast<size_t>(c.heads_qk * c.dim_k));
        for (double& x : shared) {
            x = normal();
        }
        for (int64_t b = 0; b < c.batches(); ++b) {
            for (int64_t t = 0; t < c.rows(); ++t) {
                const int64_t sequence = std::upper_bound(starts.begin(), starts.end(), t) - starts.begin() - 1;
                if (!c.lengths.empty() && sequence == c.nan_sequence) {
                    continue;  // stays NaN
                }
                for (int64_t h = 0; h < c.heads_qk; ++h) {
                    for (int64_t i = 0; i < c.dim_k; ++i) {
                        q.data->set(q.at(b, t, h) + i, size * normal());
                        const double key = c.collinear > 0
                                               ? shared[static_cast<size_t>(h * c.dim_k + i)] + c.collinear * normal()
                                               : normal();
                        k.data->set(k.at(b, t, h) + i, size * key);
                    }
                }
                for (int64_t h = 0; h < c.heads_v; ++h) {
                    for (int64_t i = 0; i < c.dim_k; ++i) {
                        double gate = c.gate_mean + c.gate_spread * normal();
                        gate = c.alternating != 0.0     ? (i % 2 == 0 ? c.alternating : -c.alternating)
                               : c.gate == FLARE_GATE_LOG ? -std::fabs(gate)
                                                          : gate;
                        const double wild = c.gate == FLARE_GATE_SOFTPLUS ? 1000.0 : -1000.0;
                        g.data->set(g.at(b, t, h) + i,
                                    c.minus_1000 > 0 && integer(0, 999) < 1000 * c.minus_1000 ? wild : gate);
                    }
                    for (int64_t i = 0; i < c.dim_v; ++i) {
                        v.data->set(v.at(b, t, h) + i, c.value_size * normal());
                    }
                    for (int64_t i = 0; i < (c.per_channel != 0 ? c.dim_v : 1); ++i) {
                        const bool at_end = c.beta_at_end > 0 && integer(0, 999) < 1000 * c.beta_at_end;
                        const double raw =
                            at_end ? static_cast<double>(pick({-50, 0, 50})) : c.beta_mean + c.beta_spread * normal();
                        beta.data->set(beta.at(b, t, h) + i,
                                       c.beta == FLARE_BETA_RAW ? 1.0 / (1.0 + std::exp(-raw)) : raw);
                    }
                }
            }
        }
        arrange_keys(c);
        for (Tokens* x : {&q, &k, &v, &g, &beta}) {
            x->data->upload();
        }
        a_log.fill_normal(0.5);
        dt_bias.fill_normal();
    }

    void arrange_keys(const Case& c) {
        for (int64_t b = 0; b < c.batches() && c.keys != Case::Keys::kNormal; ++b) {
            for (int64_t t = 0; t < c.rows(); ++t) {
                for (int64_t h = 0; h < c.heads_qk; ++h) {
                    for (int64_t i = 0; i < c.dim_k; ++i) {
                        const int64_t at = k.at(b, t, h) + i;
                        switch (c.keys) {
                            case Case::Keys::kSame:
                                k.data->set(at, k.data->get(k.at(b, 0, h) + i));
                                break;
                            case Case::Keys::kTwoInTurn:
                                k.data->set(at, k.data->get(k.at(b, t % 2, h) + i));
                                break;
                            case Case::Keys::kEveryThirdZero:
                                k.data->set(at, t % 3 == 0 ? 0.0f : k.data->get(at));
                                break;
                            default:
                                k.data->set(at, k.data->get(at) * (t % 2 == 0 ? 1e-4f : 1e2f));
                                break;
                        }
                    }
                }
            }
        }
    }

    template <typename Params>
    void set(Params& p, const Case& c) const {
        std::memset(static_cast<void*>(&p), 0, sizeof(p));
        p.struct_size = sizeof(p);
        p.kernel = c.kernel;
        p.dtype = c.dtype;
        p.gate_dtype = c.gate_dtype;
        p.beta_dtype = c.beta_dtype;
        p.index_dtype = c.index_dtype;
        p.state_layout = c.layout;
        p.gate = c.gate;
        p.lower_bound = c.lower_bound;
        p.beta_activation = c.beta;
        p.qk_l2norm = c.l2norm;
        p.beta_per_channel = c.per_channel;
        p.scale = c.scale;
        p.batch = c.batches();
        p.seqlen = c.rows();
        p.heads_qk = c.heads_qk;
        p.heads_v = c.heads_v;
        p.head_dim_k = c.dim_k;
        p.head_dim_v = c.dim_v;
        p.num_sequences = c.sequences();
        p.num_threads = c.threads;
        p.q_stride_b = q.stride_b, p.q_stride_t = q.stride_t, p.q_stride_h = q.stride_h;
        p.k_stride_b = k.stride_b, p.k_stride_t = k.stride_t, p.k_stride_h = k.stride_h;
        p.v_stride_b = v.stride_b, p.v_stride_t = v.stride_t, p.v_stride_h = v.stride_h;
        p.g_stride_b = g.stride_b, p.g_stride_t = g.stride_t, p.g_stride_h = g.stride_h;
        p.beta_stride_b = beta.stride_b, p.beta_stride_t = beta.stride_t, p.beta_stride_h = beta.stride_h;
        p.out_stride_b = out.stride_b, p.out_stride_t = out.stride_t, p.out_stride_h = out.stride_h;
    }

    template <typename Params>
    void point(Params& p, const Case& c, int32_t device) {
        p.device = device;
        p.q = q.data->on(device);
        p.k = k.data->on(device);
        p.v = v.data->on(device);
        p.g = g.data->on(device);
        p.beta = beta.data->on(device);
        p.out = out.data->on(device);
        p.a_log = c.a_log && c.gate != FLARE_GATE_LOG ? a_log.floats(device) : nullptr;
        p.dt_bias = c.dt_bias && c.gate != FLARE_GATE_LOG ? dt_bias.floats(device) : nullptr;
        p.cu_seqlens = c.lengths.empty() ? nullptr : cu.on(device);
    }

    Tokens q, k, v, g, beta, out;
    Mirror a_log, dt_bias, cu;
};

double relative(const Mirror& x) {
    return compare(x).relative;
}

struct Worst {
    double share = 0.0;  // of a bound
    std::string what;
    int64_t count = 0;
};
std::map<std::string, Worst> worst;  // by kernel and dtype

void report_error(const std::string& what, const std::string& kernel, double error, double bound) {
    char text[160];
    std::snprintf(text, sizeof(text), "[%s] error %.2e, bound %.1e", kernel.c_str(), error, bound);
    report(error <= bound, what, text);
    const std::lock_guard<std::mutex> lock(reporting);
    Worst& entry = worst[kernel + (what.find(" fp16 ") != std::string::npos   ? " fp16"
                                   : what.find(" fp32 ") != std::string::npos ? " fp32"
                                                                              : " bf16")];
    ++entry.count;
    if (error / bound > entry.share) {
        entry.share = error / bound;
        entry.what = what;
    }
}

// A pool of states [rows, HV, K x V]; rows in `valid` are filled.
Tensor make_states(const Case& c, int32_t dtype, int64_t rows, const std::vector<int64_t>& valid) {
    const int64_t block = c.dim_k * c.dim_v;
    Tensor states = std::make_unique<Mirror>(dtype, rows * c.heads_v * (block + c.state_pad));
    for (const int64_t row : valid) {
        for (int64_t h = 0; h < c.heads_v; ++h) {
            for (int64_t i = 0; i < block; ++i) {
                states->set((row * c.heads_v + h) * (block + c.state_pad) + i, 0.3 * normal());
            }
        }
    }
    states->upload();
    return states;
}

struct ForwardRun {
    explicit ForwardRun(const Case& c)
        : data(c), slots(c.index_dtype, c.sequences()), cu_checkpoints(c.index_dtype, c.sequences() + 1) {
        const int64_t n = c.sequences();
        const int64_t rows = c.slots ? 2 * n + 1 : n;
        std::vector<int64_t> order(static_cast<size_t>(rows));
        std::iota(order.begin(), order.end(), 0);
        if (c.slots) {
            std::shuffle(order.begin(), order.end(), random_bits);
        }
        order.resize(static_cast<size_t>(n));
        std::vector<int64_t> named = order;
        for (int64_t& slot : named) {
            slot = c.slots && integer(0, 3) == 0 ? -1 : slot;
        }
        slots.set_indices(named);
        initial = make_states(c, c.initial_dtype, rows, order);
        final = make_states(c, c.final_dtype, rows, {});
        data.set(p, c);
        p.initial_state_dtype = c.initial_dtype;
        p.final_state_dtype = c.final_dtype;
        p.checkpoint_dtype = c.checkpoint_dtype;
        if (c.state_pad > 0) {
            p.initial_state_stride_h = p.final_state_stride_h = c.dim_k * c.dim_v + c.state_pad;
        }
        p.num_slots = rows;
        p.padding_slot = -1;
        p.checkpoint_interval = c.checkpoint_interval;
        int64_t checkpoint_rows = 0;
        if (c.checkpoint_interval > 0) {
            std::vector<int64_t> first{0};
            for (int64_t i = 0; i < n; ++i) {
                first.push_back(first.back() + (c.lengths.empty() ? c.tokens : c.lengths[static_cast<size_t>(i)]) /
                                                   c.checkpoint_interval);
            }
            cu_checkpoints.set_indices(first);
            checkpoint_rows = c.batches() * (c.rows() / c.checkpoint_interval);
        }
        checkpoints = std::make_unique<Mirror>(c.checkpoint_dtype, checkpoint_rows * c.heads_v * c.dim_k * c.dim_v);
    }

    void point(const Case& c, int32_t device) {
        data.point(p, c, device);
        p.initial_state = c.initial ? initial->on(device) : nullptr;
        p.final_state = c.in_place ? initial->on(device) : c.final ? final->on(device) : nullptr;
        p.state_slots = c.slots ? slots.on(device) : nullptr;
        p.checkpoints = c.checkpoint_interval > 0 ? checkpoints->on(device) : nullptr;
        p.cu_checkpoints = c.checkpoint_interval > 0 && !c.lengths.empty() ? cu_checkpoints.on(device) : nullptr;
    }

    Data data;
    Mirror slots, cu_checkpoints;
    Tensor initial, final, checkpoints;
    flare_kda_forward_params p;
};

// Which kernel a forward case is to run. Automatic choice on a Hopper card: its kernel where that takes the case.
bool expected_forward(const Case& c, const std::string& kernel) {
    const int32_t gate = c.gate_dtype != 0 ? c.gate_dtype : c.dtype;
    const int32_t beta = c.beta_dtype != 0 ? c.beta_dtype : c.dtype;
    const bool narrow = c.dtype != FLARE_FP32 && c.per_channel == 0 && (gate == c.dtype || gate == FLARE_FP32) &&
                        (beta == c.dtype || beta == FLARE_FP32) && c.pad % 8 == 0;
    const auto starts = [&](const char* prefix) { return kernel.rfind(prefix, 0) == 0; };
    const bool chunked = narrow && c.dim_k <= 128 && c.dim_k % 8 == 0 && c.dim_v % 8 == 0;
    if (starts("kda_forward_sm90")) {
        return c.kernel != FLARE_KERNEL_PORTABLE && narrow && c.dim_k == c.dim_v && (c.dim_k == 64 || c.dim_k == 128);
    }
    if (c.kernel == FLARE_KERNEL_AUTO && narrow && c.dim_k == 128 && c.dim_v == 128) {
        return false;  // a Hopper card is what these tests are for
    }
    return chunked ? starts("kda_forward_sm80_chunked") : kernel == "kda_forward_sm80_recurrent";
}

// ||x - y|| / ||x|| on the host, over what is finite in both.
double distance(const Mirror& x, const Mirror& y) {
    double error = 0.0;
    double norm = 0.0;
    for (int64_t i = 0; i < x.count; ++i) {
        const double a = x.get(i);
        const double b = y.get(i);
        if (std::isfinite(a) && std::isfinite(b)) {
            error += (a - b) * (a - b);
            norm += a * a;
        }
    }
    return error == 0.0 ? 0.0 : std::sqrt(error / norm);
}

// How far the answer moves with inputs that move by up to half an ulp: from the numbers that were rounded to the inputs of
// `run` to these inputs, both on the CPU. `start`: the generator as it was before the inputs.
double half_an_ulp(const Case& c, ForwardRun& run, const std::mt19937_64& start) {
    random_bits = start;
    Case wide_case = c;
    wide_case.dtype = FLARE_FP32;
    wide_case.gate_dtype = wide_case.beta_dtype = 0;
    ForwardRun wide(wide_case);
    wide.point(wide_case, FLARE_DEVICE_CPU);
    wide.p.kernel = FLARE_KERNEL_AUTO;
    const int32_t status = flare_kda_forward(&wide.p);
    report(status == FLARE_OK, describe(wide_case), last_error());
    double moved = distance(*wide.data.out.data, *run.data.out.data);
    if (c.final || c.in_place) {
        moved = std::max(moved, c.in_place ? distance(*wide.initial, *run.initial) : distance(*wide.final, *run.final));
    }
    return moved;
}

void test_forward(const Case& c) {
    const std::mt19937_64 start = random_bits;
    ForwardRun run(c);
    const std::string what = "kda_forward " + describe(c);
    run.point(c, FLARE_DEVICE_CPU);
    run.p.kernel = FLARE_KERNEL_AUTO;
    const int32_t cpu = flare_kda_forward(&run.p);
    report(cpu == FLARE_OK, what, std::string("the CPU backend says ") + flare_status_string(cpu) + " " + last_error());
    run.point(c, 0);
    run.p.kernel = c.kernel;
    std::string kernel;
    const int32_t gpu = run_gpu(FLARE_OP_KDA_FORWARD, run.p, flare_kda_forward, flare_kda_forward_workspace, &kernel);
    report(gpu == FLARE_OK, what, std::string(flare_status_string(gpu)) + " " + last_error());
    if (cpu != FLARE_OK || gpu != FLARE_OK) {
        return;
    }
    report(expected_forward(c, kernel) && (c.runs.empty() || c.runs == kernel), what, "runs " + kernel);
    const double error = relative(*run.data.out.data);
    const double state_error = c.final || c.in_place ? relative(c.in_place ? *run.initial : *run.final) : 0.0;
    const double checkpoint_error = c.checkpoint_interval > 0 ? relative(*run.checkpoints) : 0.0;
    double bound = c.error_bound();
    if (!c.strict && c.dtype == FLARE_BF16 && std::max({error, state_error, checkpoint_error}) > bound &&
        half_an_ulp(c, run, start) > bound) {
        bound = std::max(bound, 1.2e-2);  // the acceptance bound of nearly equal keys: no kernel could do much better
    }
    const auto state_bound = [&](int32_t dtype) { return std::max(bound, dtype == FLARE_BF16 ? 5e-3 : 0.0); };
    report_error(what, kernel, error, bound);
    if (c.final || c.in_place) {
        report_error(what + " state", kernel, state_error, state_bound(c.final_dtype));
    }
    if (c.checkpoint_interval > 0) {
        report_error(what + " checkpoints", kernel, checkpoint_error, state_bound(c.checkpoint_dtype));
    }
}

void test_decode(const Case& c) {
    const int64_t n = c.sequences();
    const int64_t per = c.slots_per_sequence;
    const int64_t rows = c.slots ? 2 * n * per + 1 : n;
    std::vector<int64_t> order(static_cast<size_t>(rows));
    std::iota(order.begin(), order.end(), 0);
    if (c.slots) {
        std::shuffle(order.begin(), order.end(), random_bits);
    }
    order.resize(static_cast<size_t>(n * per));
    std::vector<int64_t> named = order;
    for (int64_t& slot : named) {
        slot = c.slots && integer(0, 5) == 0 ? -7 : slot;
    }
    Data data(c);
    Mirror slots(c.index_dtype, n * per), accepted(c.index_dtype, n);
    slots.set_indices(named);
    std::vector<int64_t> counts;
    for (int64_t i = 0; i < n; ++i) {
        counts.push_back(integer(1, per));
    }
    accepted.set_indices(counts);
    Tensor state = make_states(c, c.initial_dtype, rows, order);
    Tensor state_out = make_states(c, c.initial_dtype, rows, {});
    flare_kda_decode_params p;
    data.set(p, c);
    p.state_dtype = c.initial_dtype;
    p.num_slots = rows;
    p.slots_stride_n = per;
    p.slots_per_sequence = per;
    p.padding_slot = -7;
    if (c.state_pad > 0) {
        p.state_stride_h = c.dim_k * c.dim_v + c.state_pad;
    }
    const auto point = [&](int32_t device) {
        data.point(p, c, device);
        p.state = state->on(device);
        p.state_out = c.state_out ? state_out->on(device) : nullptr;
        p.slots = c.slots ? slots.on(device) : nullptr;
        p.num_accepted = c.accepted ? accepted.on(device) : nullptr;
    };
    const std::string what = "kda_decode " + describe(c);
    point(FLARE_DEVICE_CPU);
    const int32_t cpu = flare_kda_decode(&p);
    report(cpu == FLARE_OK, what, std::string("the CPU backend says ") + flare_status_string(cpu) + " " + last_error());
    point(0);
    std::string kernel;
    const int32_t gpu = run_gpu(FLARE_OP_KDA_DECODE, p, flare_kda_decode, flare_kda_decode_workspace, &kernel);
    report(gpu == FLARE_OK, what, std::string(flare_status_string(gpu)) + " " + last_error());
    if (cpu != FLARE_OK || gpu != FLARE_OK) {
        return;
    }
    const bool tuned = c.dtype != FLARE_FP32 && c.dim_k == c.dim_v && (c.dim_k == 64 || c.dim_k == 128) &&
                       c.state_pad % 8 == 0 && c.pad % 4 == 0;
    report(tuned == (kernel != "kda_decode_sm80_recurrent"), what, "runs " + kernel);
    report_error(what, kernel, relative(*data.out.data),
                 c.dtype == FLARE_FP32   ? 1e-5
                 : c.dtype == FLARE_FP16 ? 5e-4
                                         : 3e-3);
    report_error(what + " state", kernel, relative(*state), c.initial_dtype == FLARE_BF16 ? 3e-3 : 1e-5);
    if (c.state_out) {
        report_error(what + " state_out", kernel, relative(*state_out), c.initial_dtype == FLARE_BF16 ? 3e-3 : 1e-5);
    }
}

int32_t any_state() {
    return static_cast<int32_t>(pick({FLARE_FP32, FLARE_FP32, FLARE_BF16}));
}

// Options that both operations share. Sizes: tuned ones, their neighbours, anything.
Case random_case() {
    Case c;
    c.dtype = static_cast<int32_t>(pick({FLARE_BF16, FLARE_BF16, FLARE_FP16, FLARE_FP32}));
    const int64_t sizes = integer(0, 3);
    c.dim_k = sizes == 0 ? 128 : sizes == 1 ? 64 : sizes == 2 ? 8 * integer(1, 32) : integer(1, 300);
    c.dim_v = integer(0, 1) != 0 && sizes < 2 ? c.dim_k : sizes < 3 ? 8 * integer(1, 24) : integer(1, 150);
    c.heads_qk = integer(1, 3);
    c.heads_v = c.heads_qk * integer(1, 3);
    c.gate = static_cast<int32_t>(integer(0, 2));
    c.beta = static_cast<int32_t>(integer(0, 2));
    c.l2norm = c.beta == FLARE_BETA_SIGMOID2 || integer(0, 3) != 0 ? 1 : 0;
    c.per_channel = integer(0, 5) == 0 ? 1 : 0;
    c.a_log = integer(0, 2) != 0;
    c.dt_bias = integer(0, 2) != 0;
    c.gate_dtype = integer(0, 2) == 0 ? FLARE_FP32 : 0;
    c.beta_dtype = static_cast<int32_t>(integer(0, 2) == 0 ? pick({FLARE_FP32, FLARE_FP16, FLARE_BF16}) : 0);
    c.gate_spread = c.gate == FLARE_GATE_LOG ? pick({1, 1, 10}) * 0.1 : 1.0;
    c.lower_bound = integer(0, 2) == 0 ? -static_cast<float>(integer(1, 40)) : -5.0f;
    c.index_dtype = static_cast<int32_t>(pick({FLARE_INT32, FLARE_INT64}));
    c.layout = static_cast<int32_t>(pick({FLARE_STATE_KV, FLARE_STATE_VK}));
    c.scale = integer(0, 3) == 0 ? 0.7f : 0.0f;
    c.pad = pick({0, 0, 8, 16, sizes == 3 ? 3 : 0});
    c.state_pad = pick({0, 0, 8, sizes == 3 ? 1 : 0});
    c.heads_first = integer(0, 3) == 0;
    c.minus_1000 = integer(0, 4) == 0 ? 0.3 : 0.0;
    return c;
}

Case random_forward() {
    Case c = random_case();
    c.name = "random";
    c.kernel = integer(0, 3) == 0 ? FLARE_KERNEL_AUTO : FLARE_KERNEL_PORTABLE;
    if (integer(0, 1) != 0) {
        const int64_t n = integer(1, 6);
        for (int64_t i = 0; i < n; ++i) {
            c.lengths.push_back(pick({0, 1, 31, 32, 33, 64, integer(0, 200), integer(0, 50)}));
        }
    } else {
        c.batch = integer(1, 3);
        c.tokens = pick({0, 1, 2, 15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 129, integer(1, 300)});
    }
    c.initial_dtype = any_state();
    c.final_dtype = any_state();
    c.checkpoint_dtype = any_state();
    c.initial = integer(0, 3) != 0;
    c.final = integer(0, 3) != 0;
    c.slots = integer(0, 2) == 0;
    c.checkpoint_interval = integer(0, 2) == 0 ? 64 * integer(1, 2) : 0;
    if (c.initial && integer(0, 3) == 0) {
        c.in_place = true;
        c.final_dtype = c.initial_dtype;
    }
    return c;
}

// Longer sequences of the sizes that the tuned kernels take, with keys and gates that add errors up: the same key again and
// again, two in turn, hardly any decay, beta up to 2.
Case random_long() {
    Case c = random_case();
    c.dtype = static_cast<int32_t>(pick({FLARE_BF16, FLARE_BF16, FLARE_FP16}));
    c.dim_k = pick({128, 128, 128, 64, 64, 8 * integer(1, 16)});
    c.dim_v = integer(0, 3) != 0 ? c.dim_k : pick({64, 128, 8 * integer(1, 24)});
    c.heads_qk = integer(1, 2);
    c.heads_v = c.heads_qk * integer(1, 2);
    c.per_channel = 0;
    c.beta_dtype = integer(0, 2) == 0 ? FLARE_FP32 : 0;
    c.pad = pick({0, 0, 8});
    c.state_pad = 0;
    c.threads = 1;
    c.kernel = integer(0, 3) == 0 ? FLARE_KERNEL_PORTABLE : FLARE_KERNEL_AUTO;
    if (integer(0, 1) != 0) {
        const int64_t n = integer(1, 4);
        for (int64_t i = 0; i < n; ++i) {
            c.lengths.push_back(pick({0, 1, 31, 33, integer(0, 100), integer(0, 300), integer(0, 2000)}));
        }
    } else {
        c.batch = integer(1, 2);
        c.tokens = pick({1, 33, 64, integer(1, 100), integer(1, 300), integer(1, 2000)});
    }
    c.initial = integer(0, 1) != 0;
    c.initial_dtype = any_state();
    c.final_dtype = any_state();
    c.lower_bound = pick({-5, -5, -5, -1, -2, 0}) - 0x1p-10f;
    c.lower_bound = c.lower_bound < -5.0f ? -5.0f : c.lower_bound;
    c.minus_1000 = integer(0, 7) == 0 ? 0.15 : 0.0;
    switch (integer(0, 5)) {
        case 0:  // hardly any decay
            c.gate_mean = c.gate == FLARE_GATE_LOG ? 0.0 : -8.0;
            c.gate_spread = integer(0, 1) != 0 ? 0.0 : c.gate == FLARE_GATE_LOG ? 1e-3 : 1.0;
            break;
        case 1:
            c.gate_mean = c.gate == FLARE_GATE_LOG ? 0.01 : -4.0;
            c.gate_spread = c.gate == FLARE_GATE_LOG ? 0.01 : 1.0;
            break;
        case 2:
            c.alternating = c.gate == FLARE_GATE_BOUNDED ? 50.0 : 0.0;
            break;
        default:
            break;
    }
    switch (integer(0, 7)) {
        case 0:
            c.keys = Case::Keys::kSame;
            break;
        case 1:
            c.keys = Case::Keys::kTwoInTurn;
            break;
        case 2:
            c.keys = Case::Keys::kEveryThirdZero;
            break;
        case 3:
            c.collinear = static_cast<double>(pick({1, 10, 50, 300})) * 1e-3;
            break;
        default:
            break;
    }
    c.beta_at_end = integer(0, 1) != 0 ? 0.125 : 0.0;
    c.value_size = integer(0, 5) == 0 ? static_cast<double>(pick({1, 10, 1000000})) * 1e-3 : 1.0;
    // A 16-bit output has no digits for values that small.
    c.value_size = c.dtype == FLARE_FP16 ? std::max(c.value_size, 1.0) : c.value_size;
    c.name = "long";
    return c;
}

Case random_decode() {
    Case c = random_case();
    c.name = "random";
    c.initial_dtype = any_state();
    const int64_t longest = pick({1, 1, 2, 4, 6});
    if (integer(0, 1) != 0) {
        const int64_t n = integer(1, 6);
        for (int64_t i = 0; i < n; ++i) {
            c.lengths.push_back(integer(0, longest));
        }
    } else {
        c.batch = integer(1, 6);
        c.tokens = longest;
    }
    c.slots = integer(0, 1) != 0;
    if (c.slots && integer(0, 1) != 0 && longest > 1) {
        c.slots_per_sequence = longest;
        c.accepted = integer(0, 1) != 0;
    }
    c.state_out = integer(0, 2) == 0;
    return c;
}

void test_edges() {
    const auto forward = [](const char* name, int32_t kernel, const std::function<void(Case&)>& change) {
        Case c;
        c.name = name;
        c.kernel = kernel;
        change(c);
        test_forward(c);
    };
    for (const int32_t kernel : {FLARE_KERNEL_PORTABLE, FLARE_KERNEL_AUTO}) {
        for (const int64_t t : {1, 2, 15, 16, 17, 31, 33, 63, 64, 65, 127, 129}) {
            forward("length", kernel, [&](Case& c) { c.tokens = t; });
            forward("length K = V = 64", kernel, [&](Case& c) { c.tokens = t, c.dim_k = c.dim_v = 64; });
        }
        forward("empty sequences", kernel, [](Case& c) { c.lengths = {0, 0, 33, 0, 0, 40, 1, 0}; });
        forward("all empty", kernel, [](Case& c) { c.lengths = {0, 0, 0}; });
        forward("no tokens", kernel, [](Case& c) { c.tokens = 0; });
        forward("no sequences", kernel, [](Case& c) { c.batch = 0; });
        forward("a thousand tokens alone", kernel,
                [](Case& c) { c.lengths.assign(1000, 1), c.heads_qk = c.heads_v = 1; });
        forward("one long, many short", kernel, [](Case& c) {
            c.lengths.assign(40, 1);
            c.lengths[20] = 2000;
            c.heads_qk = c.heads_v = 1;
        });
        for (const int32_t gate : {FLARE_GATE_LOG, FLARE_GATE_SOFTPLUS}) {
            forward("gates of -1000", kernel,
                    [&](Case& c) { c.gate = gate, c.minus_1000 = 0.5, c.a_log = false, c.bound = 5e-3; });
            forward("all gates -1000", kernel,
                    [&](Case& c) { c.gate = gate, c.minus_1000 = 1.0, c.a_log = false, c.bound = 5e-3; });
        }
        forward("gates of 0", kernel, [](Case& c) { c.gate = FLARE_GATE_LOG, c.gate_spread = 0.0, c.tokens = 300; });
        forward("saturated bound", kernel, [](Case& c) { c.gate_mean = 50.0, c.tokens = 300; });
        forward("bound of -1e-3", kernel, [](Case& c) { c.lower_bound = -1e-3f, c.tokens = 500; });
        forward("slow decay", kernel, [](Case& c) {
            c.gate_mean = -8.0, c.gate_spread = 0.1, c.a_log = c.dt_bias = false, c.tokens = 1024, c.bound = 5e-3;
        });
        // The portable kernels stay far below the bound of nearly collinear keys.
        const double collinear_bound = kernel == FLARE_KERNEL_PORTABLE ? 8e-3 : 1.2e-2;
        forward("collinear keys", kernel, [&](Case& c) {
            c.collinear = 1e-3, c.gate_mean = -4.0, c.gate_spread = 0.0, c.beta_mean = 8.0, c.beta_spread = 0.0;
            c.a_log = c.dt_bias = false, c.tokens = 1024, c.heads_qk = c.heads_v = 1, c.bound = collinear_bound;
        });
        forward("collinear keys, long", kernel, [&](Case& c) {
            c.collinear = 1e-3, c.gate_mean = -12.0, c.gate_spread = 0.0, c.beta_mean = 8.0, c.beta_spread = 0.0;
            c.a_log = c.dt_bias = false, c.tokens = 16384, c.heads_qk = c.heads_v = 1, c.bound = collinear_bound;
        });
        forward("collinear keys, norm 0.9", kernel, [&](Case& c) {
            c.collinear = 3e-1, c.gate = FLARE_GATE_LOG, c.gate_mean = 0.02, c.gate_spread = 0.004,
            c.beta = FLARE_BETA_RAW;
            c.beta_mean = 50.0, c.beta_spread = 0.0, c.tokens = 2048, c.heads_qk = c.heads_v = 1,
            c.bound = collinear_bound;
        });
        for (const Case::Keys keys : {Case::Keys::kSame, Case::Keys::kTwoInTurn}) {
            for (const int64_t dim : {64, 128}) {
                forward("one key or two in turn, hardly any decay", kernel, [&](Case& c) {
                    c.keys = keys, c.gate = FLARE_GATE_SOFTPLUS, c.gate_mean = -8.0, c.gate_spread = 0.0;
                    c.gate_dtype = FLARE_FP32, c.beta = FLARE_BETA_SIGMOID2, c.dim_k = c.dim_v = dim, c.tokens = 1900;
                    c.a_log = c.dt_bias = false, c.heads_qk = c.heads_v = 1, c.bound = 5e-3, c.strict = true;
                });
            }
        }
        if (kernel == FLARE_KERNEL_PORTABLE) {
            for (const double noise : {0.01, 0.05, 0.3}) {
                forward("keys equal to a few percent, memory of 100 tokens", kernel, [&](Case& c) {
                    c.collinear = noise, c.gate_mean = -6.0, c.gate_spread = 0.5, c.beta_mean = 6.0,
                    c.beta_spread = 0.5;
                    c.a_log = c.dt_bias = false, c.tokens = 512, c.heads_qk = c.heads_v = 1, c.bound = 6e-3;
                });
            }
            for (const double size : {1e-8, 1e-3, 1e4, 1e9}) {
                forward("small and large values", kernel,
                        [&](Case& c) { c.value_size = size, c.initial = false, c.tokens = 200; });
            }
        }
        if (kernel == FLARE_KERNEL_PORTABLE) {
            for (const Case::Keys keys :
                 {Case::Keys::kSame, Case::Keys::kTwoInTurn, Case::Keys::kEveryThirdZero, Case::Keys::kTinyAndLarge}) {
                for (const int32_t dtype : {FLARE_BF16, FLARE_FP16}) {
                    const auto arranged = [&](const char* name, const std::function<void(Case&)>& change) {
                        forward(name, kernel, [&](Case& c) {
                            c.keys = keys, c.dtype = dtype, c.heads_qk = c.heads_v = 1, c.tokens = 1900;
                            c.dim_k = 64, c.dim_v = keys == Case::Keys::kSame ? 128 : 64;
                            c.a_log = c.dt_bias = false;
                            change(c);
                        });
                    };
                    arranged("arranged keys, gates of -1000",
                             [](Case& c) { c.gate = FLARE_GATE_LOG, c.minus_1000 = 0.15; });
                    arranged("arranged keys, gates of 0",
                             [](Case& c) { c.gate = FLARE_GATE_LOG, c.gate_spread = 0.0; });
                    // Beyond the recipes: what 16-bit operands do to a memory of 600 tokens. Held here so that it
                    // doesn't get worse.
                    arranged("arranged keys, beta up to 2, slow decay", [&](Case& c) {
                        c.beta = FLARE_BETA_SIGMOID2, c.gate_mean = -8.0, c.gate_spread = 0.0;
                        c.bound = dtype == FLARE_FP16 ? 3e-3 : keys == Case::Keys::kTwoInTurn ? 2.5e-2 : 8e-3;
                    });
                    arranged("arranged keys, beta up to 2",
                             [](Case& c) { c.beta = FLARE_BETA_SIGMOID2, c.gate_spread = 50.0; });
                }
            }
        }
        forward("beta 0", kernel, [](Case& c) { c.beta_mean = -60.0, c.beta_spread = 0.0; });
        forward("beta 1", kernel, [](Case& c) { c.beta_mean = 60.0, c.beta_spread = 0.0; });
        forward("beta 2", kernel, [](Case& c) { c.beta = FLARE_BETA_SIGMOID2, c.beta_mean = 3.0; });
        forward("NaN neighbour", kernel, [](Case& c) { c.lengths = {45, 37, 50, 7}, c.nan_sequence = 1; });
        forward("grouped 1:8", kernel, [](Case& c) { c.heads_qk = 1, c.heads_v = 8; });
        forward("K 64, V 128", kernel, [](Case& c) { c.dim_k = 64, c.layout = FLARE_STATE_KV; });
        forward("K 128, V 64", kernel, [](Case& c) { c.dim_v = 64, c.layout = FLARE_STATE_KV; });
        forward("K 96, V 200", kernel, [](Case& c) { c.dim_k = 96, c.dim_v = 200; });
        forward("K = V = 256", kernel, [](Case& c) { c.dim_k = c.dim_v = 256; });
        forward("in place, slots", kernel, [](Case& c) { c.batch = 5, c.in_place = c.slots = true; });
        forward("130 tokens, checkpoints", kernel, [](Case& c) { c.tokens = 130, c.checkpoint_interval = 64; });
    }
}

// The device tensors of a run, from `first` tokens on, `count` of them.
void narrow(flare_kda_forward_params& p, int64_t element, int64_t first, int64_t count) {
    const auto move = [&](const void* x, int64_t stride) {
        return static_cast<const char*>(x) + first * stride * element;
    };
    p.q = move(p.q, p.q_stride_t);
    p.k = move(p.k, p.k_stride_t);
    p.v = move(p.v, p.v_stride_t);
    p.g = move(p.g, p.g_stride_t);
    p.beta = move(p.beta, p.beta_stride_t);
    p.out = const_cast<char*>(move(p.out, p.out_stride_t));
    p.seqlen = count;
}

// With deterministic = 1 and fp32 states: cut at a multiple of 64 or one call, alone or among others, now or later: the
// same bits.
void test_bits(int32_t kernel, int64_t dim, int32_t gate, int64_t tokens) {
    Case c;
    c.name = "bits";
    c.kernel = kernel;
    c.tokens = tokens;
    c.batch = 3;
    c.gate = gate;
    c.dim_k = c.dim_v = dim;
    ForwardRun run(c);
    const std::string what = describe(c);
    run.point(c, 0);
    run.p.deterministic = 1;
    std::string name;
    const auto go = [&](flare_kda_forward_params p) {
        const int32_t status = run_gpu(FLARE_OP_KDA_FORWARD, p, flare_kda_forward, flare_kda_forward_workspace, &name);
        report(status == FLARE_OK, what, last_error());
    };
    go(run.p);
    const std::vector<unsigned char> out = run.data.out.data->download();
    const std::vector<unsigned char> state = run.final->download();
    go(run.p);
    report(out == run.data.out.data->download() && state == run.final->download(), what, "a second run differs");
    run.data.out.data->upload();
    flare_kda_forward_params p = run.p;
    narrow(p, 2, 0, 192);
    go(p);
    p = run.p;
    narrow(p, 2, 192, c.tokens - 192);
    p.initial_state = p.final_state;
    go(p);
    report(out == run.data.out.data->download(), what, "cut at 192: other outputs");
    report(state == run.final->download(), what, "cut at 192: another state");
    run.data.out.data->upload();
    p = run.p;
    p.batch = 1;
    narrow(p, 2, 0, 100);
    go(p);
    const std::vector<unsigned char> prefix = run.data.out.data->download();
    bool same = true;
    for (int64_t t = 0; t < 100; ++t) {
        for (int64_t h = 0; h < c.heads_v; ++h) {
            const size_t at = static_cast<size_t>(2 * run.data.out.at(0, t, h));
            same = same && std::memcmp(&prefix[at], &out[at], static_cast<size_t>(2 * dim)) == 0;
        }
    }
    report(same, what, "a prefix alone differs");
}

// Few heads and long sequences, whose segments run side by side.
void test_segments() {
    const auto segments = [](const char* name, const std::function<void(Case&)>& change) {
        Case c;
        c.name = std::string("segments, ") + name;
        c.kernel = FLARE_KERNEL_AUTO;
        c.runs = "kda_forward_sm90_segments";
        c.tokens = 2501;
        change(c);
        test_forward(c);
    };
    segments("plain", [](Case&) {});
    segments("whole segments", [](Case& c) { c.tokens = 2560, c.heads_qk = c.heads_v = 1; });
    segments("bf16 states", [](Case& c) {
        c.batch = 2, c.heads_qk = 1, c.layout = FLARE_STATE_KV;
        c.initial_dtype = c.final_dtype = FLARE_BF16;
    });
    segments("no states", [](Case& c) { c.initial = c.final = false; });
    segments("rows apart", [](Case& c) { c.batch = 2, c.heads_first = true, c.pad = 8; });
    segments("slots in place", [](Case& c) { c.batch = 3, c.slots = c.in_place = true; });
    segments("slots", [](Case& c) { c.batch = 3, c.slots = true, c.layout = FLARE_STATE_KV; });
    for (const int64_t interval : {64, 192, 1024}) {
        segments("checkpoints", [&](Case& c) { c.batch = 2, c.checkpoint_interval = interval; });
        segments("checkpoints", [&](Case& c) { c.lengths = {3900, 0, 3001}, c.checkpoint_interval = interval; });
    }
    segments("lengths", [](Case& c) {
        c.lengths = {6001, 3, 0, 2817}, c.index_dtype = FLARE_INT64;
        c.heads_qk = c.heads_v = 1;
    });
    segments("NaN neighbour", [](Case& c) { c.lengths = {2501, 1037, 3700}, c.nan_sequence = 1; });
    segments("slow decay", [](Case& c) { c.gate_mean = -8.0; });
    segments("collinear keys", [](Case& c) {
        c.collinear = 1e-2, c.a_log = c.dt_bias = false;
        c.gate_mean = -8.0, c.gate_spread = 0.0, c.beta_mean = 8.0, c.beta_spread = 0.0;
        c.bound = 1.2e-2;
    });
    segments("gates of 0", [](Case& c) { c.gate_mean = -60.0, c.beta_mean = -4.0; });
    segments("values of 1e6", [](Case& c) { c.value_size = 1e6; });
    for (const int32_t gate : {FLARE_GATE_SOFTPLUS, FLARE_GATE_LOG}) {
        segments("any gate", [&](Case& c) { c.gate = gate; });
    }
    segments("any gate, slow decay", [](Case& c) { c.gate = FLARE_GATE_SOFTPLUS, c.gate_mean = -8.0; });
    segments("any gate, lengths, checkpoints", [](Case& c) {
        c.gate = FLARE_GATE_SOFTPLUS, c.lengths = {3900, 0, 3001}, c.checkpoint_interval = 192;
        c.heads_qk = c.heads_v = 1;
    });
    segments("any gate, gates of -1000", [](Case& c) { c.gate = FLARE_GATE_LOG, c.minus_1000 = 0.15; });
    segments("K = V = 64 in none", [](Case& c) {
        c.dim_k = c.dim_v = 64;
        c.runs = "kda_forward_sm90_split";
    });
}

// A graph is captured once and replayed over other contents of cu_seqlens.
void test_graph(int64_t unit) {
    Case c;
    c.name = "graph";
    c.lengths = {100 * unit, 60 * unit, 40 * unit};
    ForwardRun run(c);
    run.point(c, 0);
    uint64_t bytes = 0;
    flare_kda_forward_workspace(&run.p, &bytes);
    void* scratch = nullptr;
    check_cuda(cudaMalloc(&scratch, bytes + 256), "cudaMalloc");
    run.p.workspace = scratch;
    run.p.workspace_bytes = bytes;
    cudaStream_t stream;
    cudaGraph_t graph;
    cudaGraphExec_t executable;
    check_cuda(cudaStreamCreate(&stream), "stream");
    run.p.stream = stream;
    check_cuda(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal), "capture");
    const int32_t status = flare_kda_forward(&run.p);
    check_cuda(cudaStreamEndCapture(stream, &graph), "capture");
    report(status == FLARE_OK, "graph", last_error());
    check_cuda(cudaGraphInstantiate(&executable, graph, 0), "instantiate");
    for (const std::vector<int64_t>& starts :
         {std::vector<int64_t>{0, 100 * unit, 160 * unit, 200 * unit}, std::vector<int64_t>{0, 7, 7, 200 * unit}}) {
        run.data.cu.set_indices(starts);
        check_cuda(cudaGraphLaunch(executable, stream), "launch");
        check_cuda(cudaStreamSynchronize(stream), "launch");
        flare_kda_forward_params p = run.p;
        run.point(c, FLARE_DEVICE_CPU);
        run.p.kernel = FLARE_KERNEL_AUTO;
        report(flare_kda_forward(&run.p) == FLARE_OK, "graph", last_error());
        run.p = p;
        report_error("kda_forward replayed", "graph", relative(*run.data.out.data), c.error_bound());
        report_error("kda_forward replayed state", "graph", relative(*run.final), c.error_bound());
    }
    cudaGraphExecDestroy(executable);
    cudaGraphDestroy(graph);
    cudaStreamDestroy(stream);
    cudaFree(scratch);
}

// Random cases on all cores until the time is up; a case follows from its seed alone, which a miss prints. No seconds: the
// one case of the seed.
void test_random(int seconds, uint64_t seed) {
    const auto end = std::chrono::steady_clock::now() + std::chrono::seconds(seconds);
    const unsigned cores = seconds > 0 ? std::max(1u, std::thread::hardware_concurrency()) : 1;
    std::atomic<uint64_t> next{seed};
    std::vector<std::thread> threads;
    for (unsigned i = 0; i < cores; ++i) {
        threads.emplace_back([&] {
            do {
                const uint64_t own = next++;
                random_bits.seed(own);
                Case c = own % 4 == 0 ? random_forward() : random_long();
                c.threads = 1;
                c.name += ", seed " + std::to_string(own);
                test_forward(c);
            } while (std::chrono::steady_clock::now() < end);
        });
    }
    for (std::thread& thread : threads) {
        thread.join();
    }
    std::printf("random cases from seed %llu to %llu\n", static_cast<unsigned long long>(seed),
                static_cast<unsigned long long>(next - 1));
}

}  // namespace

// gpu_kda_test [random cases of each operation, 250] [seed]; with a number the edge cases are left out.
// gpu_kda_test segments: those cases alone, which are long.
// gpu_kda_test random [seconds, 10] [seed, 1]: as many longer cases as the time allows, on all cores.
int main(int argc, char** argv) {
    if (!has_device()) {
        std::printf("gpu_kda_test: skipped, no CUDA device here\n");
        return kSkipped;
    }
    const auto print_worst = [] {
        for (const auto& [kernel, entry] : worst) {
            std::printf("%5lld checks, largest share of a bound %.2f: %s: %s\n", static_cast<long long>(entry.count),
                        entry.share, kernel.c_str(), entry.what.c_str());
        }
    };
    if (argc > 1 && std::strcmp(argv[1], "random") == 0) {
        test_random(argc > 2 ? std::atoi(argv[2]) : 10, argc > 3 ? std::strtoull(argv[3], nullptr, 10) : 1);
        print_worst();
        return finish("gpu_kda_test");
    }
    if (argc > 1 && std::strcmp(argv[1], "segments") == 0) {
        test_segments();
        test_graph(40);
        print_worst();
        return finish("gpu_kda_test");
    }
    if (argc > 2) {
        random_bits.seed(static_cast<uint64_t>(std::atoll(argv[2])));
    }
    const int repeats = argc > 1 ? std::atoi(argv[1]) : 250;
    for (int i = 0; i < repeats; ++i) {
        test_forward(random_forward());
        test_decode(random_decode());
    }
    if (argc == 1) {
        test_edges();
        for (const int32_t kernel : {FLARE_KERNEL_PORTABLE, FLARE_KERNEL_AUTO}) {
            for (const int32_t gate : {FLARE_GATE_BOUNDED, FLARE_GATE_SOFTPLUS}) {
                test_bits(kernel, 128, gate, 333);
                test_bits(kernel, 64, gate, 333);
            }
        }
        test_bits(FLARE_KERNEL_AUTO, 128, FLARE_GATE_BOUNDED, 3000);
        test_segments();
        test_graph(1);
        test_graph(40);  // in segments
    }
    print_worst();
    return finish("gpu_kda_test");
}

#else
#include <cstdio>

int main() {
    std::printf("gpu_kda_test: skipped, built without CUDA\n");
    return 77;
}

#endif
