// The CUDA backend against the CPU backend, through flare.h: the same params and data, outputs poisoned, errors held to the
// bounds of the golden vectors. Ends with status 77 (skipped) where there is no usable GPU.
#if defined(FLARE_HAVE_CUDA)
#include "gpu_support.h"

using namespace gpu_test;

namespace {

void check(const std::string& what, const std::string& kernel, int32_t status, double error, double bound) {
    char text[640];
    std::snprintf(text, sizeof(text), "[%s] %s, error %.2e, bound %.1e", kernel.c_str(), flare_status_string(status), error,
                  bound);
    report(status == FLARE_OK && error <= bound, what, text + (status == FLARE_OK ? "" : " " + last_error()));
    if (status == FLARE_OK && error <= bound) {
        std::printf("ok   %-64s %-34s %.1e <= %.1e\n", what.c_str(), kernel.c_str(), error, bound);
    }
}

// Every element must have been written, also by the CPU.
Difference compare_whole(const Mirror& x) {
    for (int64_t i = 0; i < x.count; ++i) {
        if (std::isnan(x.get(i))) {
            return {HUGE_VAL, HUGE_VAL};
        }
    }
    return compare(x);
}

double bound_of(int32_t dtype, double fp16, double bf16) {
    return dtype == FLARE_BF16 ? bf16 : fp16;
}

// Calls on the CPU, then on the GPU; returns the GPU's status.
template <typename Params, typename Point>
int32_t run_both(int32_t operation, Params p, Point point, int32_t (*call)(const Params*),
                 int32_t (*workspace)(const Params*, uint64_t*), std::string* kernel) {
    p.struct_size = sizeof(p);
    p.device = FLARE_DEVICE_CPU;
    point(p, FLARE_DEVICE_CPU);
    if (const int32_t status = call(&p)) {
        std::printf("the CPU backend refused\n");
        return status;
    }
    p.device = 0;
    point(p, 0);
    return run_gpu(operation, p, call, workspace, kernel);
}

void test_attention(int32_t dtype, int64_t batch, int64_t sq, int64_t sk, int64_t heads, int64_t heads_kv, int64_t d,
                    int64_t dv, int32_t mask, int64_t left, int64_t right, float softcap, bool alibi, bool sink) {
    Mirror q(dtype, batch * sq * heads * d), k(dtype, batch * sk * heads_kv * d), v(dtype, batch * sk * heads_kv * dv),
        out(dtype, batch * sq * heads * dv);
    Mirror lse(FLARE_FP32, batch * heads * sq), slopes(FLARE_FP32, heads), sinks(FLARE_FP32, heads);
    for (Mirror* x : {&q, &k, &v, &sinks}) {
        x->fill_normal();
    }
    slopes.fill_normal(0.1);
    flare_attention_params p;
    std::memset(&p, 0, sizeof(p));
    p.dtype = dtype;
    p.batch = batch;
    p.seqlen_q = sq;
    p.seqlen_k = sk;
    p.heads_q = heads;
    p.heads_kv = heads_kv;
    p.head_dim_qk = d;
    p.head_dim_v = dv;
    p.q_stride_h = p.k_stride_h = d;
    p.v_stride_h = p.out_stride_h = dv;
    p.q_stride_s = heads * d;
    p.k_stride_s = heads_kv * d;
    p.v_stride_s = heads_kv * dv;
    p.out_stride_s = heads * dv;
    p.q_stride_b = sq * p.q_stride_s;
    p.k_stride_b = sk * p.k_stride_s;
    p.v_stride_b = sk * p.v_stride_s;
    p.out_stride_b = sq * p.out_stride_s;
    p.lse_stride_h = sq;
    p.lse_stride_b = heads * sq;
    p.mask = mask;
    p.window_left = left;
    p.window_right = right;
    p.softcap = softcap;
    const auto point = [&](flare_attention_params& at, int32_t device) {
        at.q = q.on(device);
        at.k = k.on(device);
        at.v = v.on(device);
        at.out = out.on(device);
        at.lse = lse.floats(device);
        at.alibi_slopes = alibi ? slopes.floats(device) : nullptr;
        at.sink = sink ? sinks.floats(device) : nullptr;
    };
    std::string kernel = "?";
    const int32_t status =
        run_both(FLARE_OP_ATTENTION_FORWARD, p, point, flare_attention_forward, flare_attention_workspace, &kernel);
    char what[160];
    std::snprintf(what, sizeof(what), "attention %s B%d Sq%d Sk%d H%d/%d D%d/%d mask %d (%d,%d)%s%s%s", name_of(dtype),
                  static_cast<int>(batch), static_cast<int>(sq), static_cast<int>(sk), static_cast<int>(heads),
                  static_cast<int>(heads_kv), static_cast<int>(d), static_cast<int>(dv), mask, static_cast<int>(left),
                  static_cast<int>(right), softcap > 0 ? " softcap" : "", alibi ? " alibi" : "", sink ? " sink" : "");
    check(what, kernel, status, compare_whole(out).relative, bound_of(dtype, 1e-3, 5e-3));
    check(std::string(what) + " lse", kernel, status, compare_whole(lse).largest, bound_of(dtype, 1e-3, 2e-3));
}

void test_mla_decode(int32_t dtype, int64_t batch, int64_t sq, int64_t heads, int64_t sk, int64_t page) {
    const int64_t width = 576;
    const int64_t pages_each = (sk + page - 1) / page;
    const int64_t pages = batch * pages_each;
    Mirror q(dtype, batch * sq * heads * width), kv(dtype, pages * page * width), out(dtype, batch * sq * heads * 512);
    Mirror lse(FLARE_FP32, batch * heads * sq);
    Mirror table(FLARE_INT32, pages), lengths(FLARE_INT32, batch);
    q.fill_normal();
    kv.fill_normal();
    for (int64_t i = 0; i < pages; ++i) {
        table.set_index(i, pages - 1 - i);
    }
    for (int64_t b = 0; b < batch; ++b) {
        lengths.set_index(b, b == 1 ? 0 : sk - 3 * b);
    }
    table.upload();
    lengths.upload();
    flare_mla_decode_params p;
    std::memset(&p, 0, sizeof(p));
    p.dtype = dtype;
    p.batch = batch;
    p.seqlen_q = sq;
    p.seqlen_k = sk;
    p.heads = heads;
    p.d_c = 512;
    p.d_rope = 64;
    p.d_nope = 128;
    p.mask = FLARE_MASK_CAUSAL;
    p.q_stride_h = width;
    p.q_stride_s = heads * width;
    p.q_stride_b = sq * heads * width;
    p.kv_stride_s = width;
    p.kv_stride_b = page * width;
    p.out_stride_h = 512;
    p.out_stride_s = heads * 512;
    p.out_stride_b = sq * heads * 512;
    p.lse_stride_h = sq;
    p.lse_stride_b = heads * sq;
    p.page_size = page;
    p.num_pages = pages;
    p.block_table_stride_b = pages_each;
    const auto point = [&](flare_mla_decode_params& at, int32_t device) {
        at.q = q.on(device);
        at.kv = kv.on(device);
        at.out = out.on(device);
        at.lse = lse.floats(device);
        at.block_table = table.on(device);
        at.seqlens_k = lengths.on(device);
    };
    std::string kernel = "?";
    const int32_t status = run_both(FLARE_OP_MLA_DECODE, p, point, flare_mla_decode, flare_mla_decode_workspace, &kernel);
    char what[160];
    std::snprintf(what, sizeof(what), "mla_decode %s B%d Sq%d H%d Sk%d page %d", name_of(dtype), static_cast<int>(batch),
                  static_cast<int>(sq), static_cast<int>(heads), static_cast<int>(sk), static_cast<int>(page));
    check(what, kernel, status, compare_whole(out).relative, bound_of(dtype, 1.5e-3, 6e-3));
}

struct KdaData {
    KdaData(int32_t type, int64_t n, int64_t t, int64_t h, int64_t hv)
        : dtype(type),
          q(type, n * t * h * 128),
          k(type, n * t * h * 128),
          v(type, n * t * hv * 128),
          g(type, n * t * hv * 128),
          beta(type, n * t * hv),
          out(type, n * t * hv * 128),
          a_log(FLARE_FP32, hv),
          dt_bias(FLARE_FP32, hv * 128),
          initial(FLARE_FP32, n * hv * 128 * 128),
          final_state(FLARE_FP32, n * hv * 128 * 128) {
        for (Mirror* x : {&q, &k, &v, &g, &beta, &dt_bias, &initial}) {
            x->fill_normal();
        }
        a_log.fill_normal(0.5);
    }

    template <typename Params>
    void set(Params& p, int64_t n, int64_t t, int64_t h, int64_t hv, int32_t gate, int32_t layout) const {
        std::memset(&p, 0, sizeof(p));
        p.dtype = dtype;
        p.state_layout = layout;
        p.gate = gate;
        p.lower_bound = -5.0f;
        p.qk_l2norm = 1;
        p.beta_activation = FLARE_BETA_SIGMOID;
        p.batch = n;
        p.seqlen = t;
        p.heads_qk = h;
        p.heads_v = hv;
        p.head_dim_k = p.head_dim_v = 128;
        p.q_stride_h = p.k_stride_h = p.v_stride_h = p.g_stride_h = p.out_stride_h = 128;
        p.q_stride_t = p.k_stride_t = h * 128;
        p.v_stride_t = p.g_stride_t = p.out_stride_t = hv * 128;
        p.q_stride_b = p.k_stride_b = t * h * 128;
        p.v_stride_b = p.g_stride_b = p.out_stride_b = t * hv * 128;
        p.beta_stride_h = 1;
        p.beta_stride_t = hv;
        p.beta_stride_b = t * hv;
    }

    template <typename Params>
    void point(Params& p, int32_t device) {
        p.q = q.on(device);
        p.k = k.on(device);
        p.v = v.on(device);
        p.g = g.on(device);
        p.beta = beta.on(device);
        p.a_log = a_log.floats(device);
        p.dt_bias = dt_bias.floats(device);
        p.out = out.on(device);
    }

    void check_results(const std::string& what, const std::string& kernel, int32_t status, const Mirror& state) const {
        const double bound = bound_of(dtype, 2e-3, 6e-3);
        check(what, kernel, status, compare_whole(out).relative, bound);
        check(what + " state", kernel, status, compare_whole(state).relative, bound);
    }

    int32_t dtype;
    Mirror q, k, v, g, beta, out;
    Mirror a_log, dt_bias, initial, final_state;
};

void test_kda_forward(int32_t dtype, int64_t n, int64_t t, int64_t h, int64_t hv, int32_t gate, int32_t layout) {
    KdaData data(dtype, n, t, h, hv);
    flare_kda_forward_params p;
    data.set(p, n, t, h, hv, gate, layout);
    const auto point = [&](flare_kda_forward_params& at, int32_t device) {
        data.point(at, device);
        at.initial_state = data.initial.on(device);
        at.final_state = data.final_state.on(device);
    };
    std::string kernel = "?";
    const int32_t status = run_both(FLARE_OP_KDA_FORWARD, p, point, flare_kda_forward, flare_kda_forward_workspace, &kernel);
    char what[160];
    std::snprintf(what, sizeof(what), "kda_forward %s N%d T%d H%d/%d gate %d layout %d", name_of(dtype), static_cast<int>(n),
                  static_cast<int>(t), static_cast<int>(h), static_cast<int>(hv), gate, layout);
    data.check_results(what, kernel, status, data.final_state);
}

void test_kda_decode(int32_t dtype, int64_t n, int64_t t, int64_t h, int64_t hv, int32_t gate, int32_t layout) {
    KdaData data(dtype, n, t, h, hv);
    flare_kda_decode_params p;
    data.set(p, n, t, h, hv, gate, layout);
    p.num_slots = n;
    const auto point = [&](flare_kda_decode_params& at, int32_t device) {
        data.point(at, device);
        at.state = data.initial.on(device);
    };
    std::string kernel = "?";
    const int32_t status = run_both(FLARE_OP_KDA_DECODE, p, point, flare_kda_decode, flare_kda_decode_workspace, &kernel);
    char what[160];
    std::snprintf(what, sizeof(what), "kda_decode %s N%d T%d H%d/%d gate %d layout %d", name_of(dtype), static_cast<int>(n),
                  static_cast<int>(t), static_cast<int>(h), static_cast<int>(hv), gate, layout);
    data.check_results(what, kernel, status, data.initial);
}

}  // namespace

int main() {
    if (!has_device()) {
        std::printf("gpu_test: skipped, no CUDA device here\n");
        return kSkipped;
    }
    for (const int32_t dtype : {FLARE_BF16, FLARE_FP16}) {
        for (const int64_t d : {64, 128, 256}) {
            test_attention(dtype, 2, 333, 333, 4, 2, d, d, FLARE_MASK_NONE, 0, 0, 0, false, false);
            test_attention(dtype, 1, 300, 515, 4, 4, d, d, FLARE_MASK_CAUSAL, 0, 0, 0, false, false);
            test_attention(dtype, 1, 600, 600, 2, 1, d, d, FLARE_MASK_WINDOW, 99, 0, 0, false, false);
            test_attention(dtype, 1, 200, 100, 2, 1, d, d, FLARE_MASK_CAUSAL, 0, 0, 0, false, false);
            test_attention(dtype, 1, 1, 1, 1, 1, d, d, FLARE_MASK_NONE, 0, 0, 0, false, false);
        }
        test_attention(dtype, 1, 300, 300, 4, 2, 128, 128, FLARE_MASK_CAUSAL, 0, 0, 5.0f, true, true);
        for (const int64_t page : {64, 16, 1}) {
            test_mla_decode(dtype, 3, 1, 16, 700, page);
            test_mla_decode(dtype, 2, 2, 128, 300, page);
        }
        for (const int32_t gate : {FLARE_GATE_SOFTPLUS, FLARE_GATE_BOUNDED}) {
            for (const int32_t layout : {FLARE_STATE_KV, FLARE_STATE_VK}) {
                test_kda_forward(dtype, 2, 200, 2, 4, gate, layout);
                test_kda_forward(dtype, 1, 65, 3, 3, gate, layout);
                test_kda_decode(dtype, 3, 1, 2, 4, gate, layout);
                test_kda_decode(dtype, 2, 3, 2, 2, gate, layout);
            }
        }
    }
    return finish("gpu_test");
}

#else
#include <cstdio>

int main() {
    std::printf("gpu_test: skipped, built without CUDA\n");
    return 77;
}

#endif
