// The CUDA backend against the CPU backend, through flare.h: the same params and data, outputs poisoned, errors held to the bounds of
// the golden vectors. Ends with status 77 (skipped) where there is no usable GPU.
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include "cpu/convert.h"
#include "flare.h"

#if defined(FLARE_HAVE_CUDA)
#include <cuda_runtime_api.h>

namespace {

constexpr int kSkipped = 77;
int failures = 0;
int cases = 0;
std::mt19937_64 random_bits(0x5EED);

double normal() {
    static std::normal_distribution<double> distribution;
    return distribution(random_bits);
}

uint16_t narrow(float x, int32_t dtype) { return dtype == FLARE_BF16 ? flare::cpu::float_to_bf16(x) : flare::cpu::float_to_fp16(x); }
float widen(uint16_t x, int32_t dtype) { return dtype == FLARE_BF16 ? flare::cpu::bf16_to_float(x) : flare::cpu::fp16_to_float(x); }

void check_cuda(cudaError_t error, const char* what) {
    if (error != cudaSuccess) {
        std::printf("FAIL %s: %s\n", what, cudaGetErrorString(error));
        std::exit(1);
    }
}

// Memory on both sides with the same content.
template <typename T>
class Mirror {
  public:
    explicit Mirror(size_t count) : host(count) { check_cuda(cudaMalloc(&device_, (count + 64) * sizeof(T)), "cudaMalloc"); }
    ~Mirror() { cudaFree(device_); }
    Mirror(const Mirror&) = delete;
    Mirror& operator=(const Mirror&) = delete;

    void upload() { check_cuda(cudaMemcpy(device_, host.data(), host.size() * sizeof(T), cudaMemcpyHostToDevice), "upload"); }
    std::vector<T> download() const {
        std::vector<T> result(host.size());
        check_cuda(cudaMemcpy(result.data(), device_, host.size() * sizeof(T), cudaMemcpyDeviceToHost), "download");
        return result;
    }
    T* on(int32_t device) { return device < 0 ? host.data() : static_cast<T*>(device_); }

    std::vector<T> host;

  private:
    void* device_ = nullptr;
};

using Halves = Mirror<uint16_t>;
using Floats = Mirror<float>;
using Ints = Mirror<int32_t>;

void fill_normal(Halves& x, int32_t dtype, double factor = 1.0) {
    for (uint16_t& one : x.host) {
        one = narrow(static_cast<float>(factor * normal()), dtype);
    }
    x.upload();
}

void fill_normal(Floats& x, double factor = 1.0) {
    for (float& one : x.host) {
        one = static_cast<float>(factor * normal());
    }
    x.upload();
}

void poison(Halves& x) {
    for (uint16_t& one : x.host) {
        one = 0x7fff;
    }
    x.upload();
}

void poison(Floats& x) {
    for (float& one : x.host) {
        one = std::numeric_limits<float>::quiet_NaN();
    }
    x.upload();
}

// ||gpu - cpu|| / ||cpu||; infinite where one is NaN or the infinities differ.
double relative(const std::vector<double>& got, const std::vector<double>& want) {
    double error = 0.0;
    double norm = 0.0;
    for (size_t i = 0; i < got.size(); ++i) {
        if (got[i] == want[i]) {
            norm += std::isfinite(want[i]) ? want[i] * want[i] : 0.0;
            continue;
        }
        const double d = got[i] - want[i];
        if (!std::isfinite(d)) {
            return std::numeric_limits<double>::infinity();
        }
        error += d * d;
        norm += want[i] * want[i];
    }
    return error == 0.0 ? 0.0 : std::sqrt(error / norm);
}

std::vector<double> doubles(const std::vector<uint16_t>& x, int32_t dtype) {
    std::vector<double> result(x.size());
    for (size_t i = 0; i < x.size(); ++i) {
        result[i] = static_cast<double>(widen(x[i], dtype));
    }
    return result;
}

std::vector<double> doubles(const std::vector<float>& x) { return {x.begin(), x.end()}; }

void report(const std::string& what, const char* kernel, int32_t status, double error, double bound) {
    ++cases;
    if (status != FLARE_OK || !(error <= bound)) {
        ++failures;
        char text[512];
        flare_last_error(text, sizeof(text));
        std::printf("FAIL %s [%s]: %s, error %.2e, bound %.1e %s\n", what.c_str(), kernel, flare_status_string(status), error, bound,
                    status == FLARE_OK ? "" : text);
    } else {
        std::printf("ok   %-64s %-34s %.1e <= %.1e\n", what.c_str(), kernel, error, bound);
    }
}

double bound_of(int32_t dtype, double fp16, double bf16) { return dtype == FLARE_BF16 ? bf16 : fp16; }
const char* name_of(int32_t dtype) { return dtype == FLARE_BF16 ? "bf16" : "fp16"; }

// Calls on the CPU, then on the GPU with a workspace; returns the GPU's status.
template <typename Params, typename Point>
int32_t run_both(int32_t operation, Params p, Point point, int32_t (*call)(const Params*),
                 int32_t (*workspace)(const Params*, uint64_t*), char* kernel, size_t capacity) {
    p.struct_size = sizeof(p);
    p.device = FLARE_DEVICE_CPU;
    point(p, FLARE_DEVICE_CPU);
    if (const int32_t status = call(&p)) {
        std::printf("the CPU backend refused\n");
        return status;
    }
    p.device = 0;
    point(p, 0);
    std::strcpy(kernel, "?");
    if (const int32_t status = flare_kernel_name(operation, &p, kernel, capacity)) {
        return status;
    }
    uint64_t bytes = 0;
    if (const int32_t status = workspace(&p, &bytes)) {
        return status;
    }
    void* scratch = nullptr;
    check_cuda(cudaMalloc(&scratch, bytes + 256), "cudaMalloc");
    check_cuda(cudaMemset(scratch, 0xff, bytes + 256), "cudaMemset");
    p.workspace = scratch;
    p.workspace_bytes = bytes;
    const int32_t status = call(&p);
    check_cuda(cudaDeviceSynchronize(), "synchronize");
    cudaFree(scratch);
    return status;
}

void test_attention(int32_t dtype, int64_t batch, int64_t sq, int64_t sk, int64_t heads, int64_t heads_kv, int64_t d, int64_t dv, int32_t mask,
                    int64_t left, int64_t right, float softcap, bool alibi, bool sink) {
    Halves q(static_cast<size_t>(batch * sq * heads * d)), k(static_cast<size_t>(batch * sk * heads_kv * d)),
        v(static_cast<size_t>(batch * sk * heads_kv * dv)), out(static_cast<size_t>(batch * sq * heads * dv));
    Floats lse(static_cast<size_t>(batch * heads * sq)), slopes(static_cast<size_t>(heads)), sinks(static_cast<size_t>(heads));
    fill_normal(q, dtype);
    fill_normal(k, dtype);
    fill_normal(v, dtype);
    fill_normal(slopes, 0.1);
    fill_normal(sinks);
    poison(out);
    poison(lse);
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
        at.lse = lse.on(device);
        at.alibi_slopes = alibi ? slopes.on(device) : nullptr;
        at.sink = sink ? sinks.on(device) : nullptr;
    };
    char kernel[128];
    const int32_t status =
        run_both(FLARE_OP_ATTENTION_FORWARD, p, point, flare_attention_forward, flare_attention_workspace, kernel, sizeof(kernel));
    char what[160];
    std::snprintf(what, sizeof(what), "attention %s B%d Sq%d Sk%d H%d/%d D%d/%d mask %d (%d,%d)%s%s%s", name_of(dtype),
                  static_cast<int>(batch), static_cast<int>(sq), static_cast<int>(sk), static_cast<int>(heads), static_cast<int>(heads_kv),
                  static_cast<int>(d), static_cast<int>(dv), mask, static_cast<int>(left), static_cast<int>(right), softcap > 0 ? " softcap" : "",
                  alibi ? " alibi" : "", sink ? " sink" : "");
    report(what, kernel, status, relative(doubles(out.download(), dtype), doubles(out.host, dtype)), bound_of(dtype, 1e-3, 5e-3));
    double worst = 0.0;
    const std::vector<float> got = lse.download();
    for (size_t i = 0; i < got.size(); ++i) {
        if (got[i] != lse.host[i]) {
            const double e = std::fabs(static_cast<double>(got[i]) - static_cast<double>(lse.host[i]));
            worst = std::isnan(e) || e > worst ? e : worst;
        }
    }
    report(std::string(what) + " lse", kernel, status, worst, bound_of(dtype, 1e-3, 2e-3));
}

void test_mla_decode(int32_t dtype, int64_t batch, int64_t sq, int64_t heads, int64_t sk, int64_t page) {
    const int64_t width = 576;
    const int64_t pages_each = (sk + page - 1) / page;
    const int64_t pages = batch * pages_each;
    Halves q(static_cast<size_t>(batch * sq * heads * width)), kv(static_cast<size_t>(pages * page * width)),
        out(static_cast<size_t>(batch * sq * heads * 512));
    Floats lse(static_cast<size_t>(batch * heads * sq));
    Ints table(static_cast<size_t>(pages)), lengths(static_cast<size_t>(batch));
    fill_normal(q, dtype);
    fill_normal(kv, dtype);
    poison(out);
    poison(lse);
    for (int64_t i = 0; i < pages; ++i) {
        table.host[static_cast<size_t>(i)] = static_cast<int32_t>(pages - 1 - i);
    }
    for (int64_t b = 0; b < batch; ++b) {
        lengths.host[static_cast<size_t>(b)] = static_cast<int32_t>(b == 1 ? 0 : sk - 3 * b);
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
        at.lse = lse.on(device);
        at.block_table = table.on(device);
        at.seqlens_k = lengths.on(device);
    };
    char kernel[128];
    const int32_t status = run_both(FLARE_OP_MLA_DECODE, p, point, flare_mla_decode, flare_mla_decode_workspace, kernel, sizeof(kernel));
    char what[160];
    std::snprintf(what, sizeof(what), "mla_decode %s B%d Sq%d H%d Sk%d page %d", name_of(dtype), static_cast<int>(batch),
                  static_cast<int>(sq), static_cast<int>(heads), static_cast<int>(sk), static_cast<int>(page));
    report(what, kernel, status, relative(doubles(out.download(), dtype), doubles(out.host, dtype)), bound_of(dtype, 1.5e-3, 6e-3));
}

struct KdaData {
    KdaData(int32_t type, int64_t n, int64_t t, int64_t h, int64_t hv)
        : dtype(type),
          q(static_cast<size_t>(n * t * h * 128)),
          k(static_cast<size_t>(n * t * h * 128)),
          v(static_cast<size_t>(n * t * hv * 128)),
          g(static_cast<size_t>(n * t * hv * 128)),
          beta(static_cast<size_t>(n * t * hv)),
          out(static_cast<size_t>(n * t * hv * 128)),
          a_log(static_cast<size_t>(hv)),
          dt_bias(static_cast<size_t>(hv * 128)),
          initial(static_cast<size_t>(n * hv * 128 * 128)),
          final_state(static_cast<size_t>(n * hv * 128 * 128)) {
        for (Halves* x : {&q, &k, &v, &g, &beta}) {
            fill_normal(*x, dtype);
        }
        fill_normal(a_log, 0.5);
        fill_normal(dt_bias);
        fill_normal(initial);
        poison(out);
        poison(final_state);
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
        p.a_log = a_log.on(device);
        p.dt_bias = dt_bias.on(device);
        p.out = out.on(device);
    }

    void check(const std::string& what, const char* kernel, int32_t status, Floats& state) {
        const double bound = bound_of(dtype, 2e-3, 6e-3);
        report(what, kernel, status, relative(doubles(out.download(), dtype), doubles(out.host, dtype)), bound);
        report(what + " state", kernel, status, relative(doubles(state.download()), doubles(state.host)), bound);
    }

    int32_t dtype;
    Halves q, k, v, g, beta, out;
    Floats a_log, dt_bias, initial, final_state;
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
    char kernel[128];
    const int32_t status = run_both(FLARE_OP_KDA_FORWARD, p, point, flare_kda_forward, flare_kda_forward_workspace, kernel, sizeof(kernel));
    char what[160];
    std::snprintf(what, sizeof(what), "kda_forward %s N%d T%d H%d/%d gate %d layout %d", name_of(dtype), static_cast<int>(n),
                  static_cast<int>(t), static_cast<int>(h), static_cast<int>(hv), gate, layout);
    data.check(what, kernel, status, data.final_state);
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
    char kernel[128];
    const int32_t status = run_both(FLARE_OP_KDA_DECODE, p, point, flare_kda_decode, flare_kda_decode_workspace, kernel, sizeof(kernel));
    char what[160];
    std::snprintf(what, sizeof(what), "kda_decode %s N%d T%d H%d/%d gate %d layout %d", name_of(dtype), static_cast<int>(n),
                  static_cast<int>(t), static_cast<int>(h), static_cast<int>(hv), gate, layout);
    data.check(what, kernel, status, data.initial);
}

}  // namespace

int main() {
    int count = 0;
    if (cudaGetDeviceCount(&count) != cudaSuccess || count == 0) {
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
    std::printf("gpu_test: %d checks, %d failures\n", cases, failures);
    return failures != 0;
}

#else

int main() {
    std::printf("gpu_test: skipped, built without CUDA\n");
    return 77;
}

#endif
