// Speed of the CPU backend beside OpenBLAS sgemm, in one run on the same cores: a Markdown table.
//
//     env -u OPENBLAS_CORETYPE -u OPENBLAS_L2_SIZE cpu_bench [repetitions]
//
// Every round times sgemm and then each operation, so that whatever else the machine does meets them alike; the best of
// the rounds counts. FLOPs: attention 2 (D + Dv) per visible (query, key) pair and head; MLA prefill that plus the
// up-projection once, 2 d_c (d_nope + d_v) per key and head; KDA forward 6 K V + 16 (4 K + 4 V) per token and head, the minimum of the
// chunked form with chunks of 16, KDA decode 7 K V.
#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "flare.h"

#ifdef FLARE_HAVE_OPENBLAS
extern "C" {
void cblas_sgemm(int order, int trans_a, int trans_b, int m, int n, int k, float alpha, const float* a, int lda,
                 const float* b, int ldb, float beta, float* c, int ldc);
void openblas_set_num_threads(int threads);
char* openblas_get_corename(void);
}
#endif

namespace {

std::vector<float> random_floats(size_t count, float deviation = 1.0f) {
    static std::mt19937 engine(7);
    std::normal_distribution<float> normal(0.0f, deviation);
    std::vector<float> values(count);
    for (float& value : values) {
        value = normal(engine);
    }
    return values;
}

// The same values in the storage type, through flare_cast.
std::vector<char> stored(const std::vector<float>& values, int32_t dtype) {
    std::vector<char> bytes(values.size() * (dtype == FLARE_FP32 ? 4 : 2));
    flare_cast_params p{};
    p.struct_size = sizeof(p);
    p.device = FLARE_DEVICE_CPU;
    p.src_dtype = FLARE_FP32;
    p.dst_dtype = dtype;
    p.rank = 1;
    p.src = values.data();
    p.dst = bytes.data();
    p.shape[0] = static_cast<int64_t>(values.size());
    p.src_stride[0] = p.dst_stride[0] = 1;
    if (flare_cast(&p) != FLARE_OK) {
        std::abort();
    }
    return bytes;
}

void require(int32_t status) {
    if (status != FLARE_OK) {
        char text[512];
        flare_last_error(text, sizeof(text));
        std::fprintf(stderr, "%s: %s\n", flare_status_string(status), text);
        std::exit(1);
    }
}

struct Case {
    std::string name;
    std::string shape;
    double flops;
    std::function<void()> run;
    double best = 1e30;
};

// Dense self-attention [B, N, H, D].
struct AttentionCase {
    AttentionCase(int32_t dtype, int64_t heads, int64_t heads_kv, int64_t n_q, int64_t n, int64_t d, int32_t mask,
                  int64_t window)
        : q(stored(random_floats(static_cast<size_t>(n_q * heads * d)), dtype)),
          k(stored(random_floats(static_cast<size_t>(n * heads_kv * d)), dtype)),
          v(stored(random_floats(static_cast<size_t>(n * heads_kv * d)), dtype)),
          out(q.size()) {
        p.struct_size = sizeof(p);
        p.device = FLARE_DEVICE_CPU;
        p.dtype = dtype;
        p.batch = 1;
        p.seqlen_q = n_q;
        p.seqlen_k = n;
        p.heads_q = heads;
        p.heads_kv = heads_kv;
        p.head_dim_qk = p.head_dim_v = d;
        p.q = q.data();
        p.k = k.data();
        p.v = v.data();
        p.out = out.data();
        p.q_stride_h = p.k_stride_h = p.v_stride_h = p.out_stride_h = d;
        p.q_stride_s = p.out_stride_s = heads * d;
        p.k_stride_s = p.v_stride_s = heads_kv * d;
        p.q_stride_b = p.out_stride_b = n_q * heads * d;
        p.k_stride_b = p.v_stride_b = n * heads_kv * d;
        p.mask = mask;
        p.window_left = window - 1;
        uint64_t bytes = 0;
        require(flare_attention_workspace(&p, &bytes));
        workspace.resize(bytes + 256);
        p.workspace = workspace.data() + (256 - reinterpret_cast<uintptr_t>(workspace.data()) % 256);
        p.workspace_bytes = bytes;
        double pairs = 0;
        for (int64_t i = 0; i < n_q; ++i) {
            const int64_t position = i + n - n_q;
            const int64_t high = mask == FLARE_MASK_NONE ? n : position + 1;
            const int64_t low = mask == FLARE_MASK_WINDOW ? std::max<int64_t>(0, position - window + 1) : 0;
            pairs += static_cast<double>(high - low);
        }
        flops = pairs * static_cast<double>(heads) * 4.0 * static_cast<double>(d);
    }
    void run() { require(flare_attention_forward(&p)); }

    std::vector<char> q, k, v, out, workspace;
    flare_attention_params p{};
    double flops;
};

struct MlaCase {
    MlaCase(int32_t dtype, int64_t heads, int64_t n, int64_t d_rope, int32_t mask)
        : q(stored(random_floats(static_cast<size_t>(n * heads * 128)), dtype)),
          q_rope(stored(random_floats(static_cast<size_t>(n * heads * d_rope)), dtype)),
          c(stored(random_floats(static_cast<size_t>(n * 512)), dtype)),
          k_rope(stored(random_floats(static_cast<size_t>(n * d_rope)), dtype)),
          w_uk(stored(random_floats(static_cast<size_t>(heads * 512 * 128), 0.044f), dtype)),
          w_uv(stored(random_floats(static_cast<size_t>(heads * 512 * 128), 0.044f), dtype)),
          out(q.size()) {
        p.struct_size = sizeof(p);
        p.device = FLARE_DEVICE_CPU;
        p.dtype = dtype;
        p.mask = mask;
        p.batch = 1;
        p.seqlen_q = p.seqlen_k = n;
        p.heads = heads;
        p.d_nope = p.d_v = 128;
        p.d_rope = d_rope;
        p.d_c = 512;
        p.q_nope = q.data();
        p.q_rope = d_rope > 0 ? q_rope.data() : nullptr;
        p.c_kv = c.data();
        p.k_rope = d_rope > 0 ? k_rope.data() : nullptr;
        p.w_uk = w_uk.data();
        p.w_uv = w_uv.data();
        p.out = out.data();
        p.q_nope_stride_h = p.out_stride_h = 128;
        p.q_nope_stride_s = p.out_stride_s = heads * 128;
        p.q_nope_stride_b = p.out_stride_b = n * heads * 128;
        p.q_rope_stride_h = d_rope;
        p.q_rope_stride_s = heads * d_rope;
        p.q_rope_stride_b = n * heads * d_rope;
        p.c_kv_stride_s = 512;
        p.c_kv_stride_b = n * 512;
        p.k_rope_stride_s = d_rope;
        p.k_rope_stride_b = n * d_rope;
        p.w_uk_stride_r = p.w_uv_stride_r = 128;
        p.w_uk_stride_h = p.w_uv_stride_h = 512 * 128;
        const double pairs = mask == FLARE_MASK_CAUSAL ? 0.5 * static_cast<double>(n) * static_cast<double>(n + 1)
                                                       : static_cast<double>(n) * static_cast<double>(n);
        flops = static_cast<double>(heads) *
                (pairs * 2.0 * static_cast<double>(256 + d_rope) + static_cast<double>(n) * 2.0 * 512.0 * 256.0);
    }
    void run() { require(flare_mla_prefill(&p)); }

    std::vector<char> q, q_rope, c, k_rope, w_uk, w_uv, out;
    flare_mla_prefill_params p{};
    double flops;
};

// One new token of 128 heads against a contiguous bf16 cache.
struct MlaDecodeCase {
    explicit MlaDecodeCase(int64_t n)
        : q(stored(random_floats(128 * 576), FLARE_BF16)),
          kv(stored(random_floats(static_cast<size_t>(n * 576)), FLARE_BF16)),
          out(128 * 512 * 2) {
        p.struct_size = sizeof(p);
        p.device = FLARE_DEVICE_CPU;
        p.dtype = FLARE_BF16;
        p.batch = 1;
        p.seqlen_q = 1;
        p.seqlen_k = n;
        p.heads = 128;
        p.d_c = 512;
        p.d_rope = 64;
        p.d_nope = 128;
        p.q = q.data();
        p.kv = kv.data();
        p.out = out.data();
        p.q_stride_h = p.kv_stride_s = 576;
        p.q_stride_b = p.q_stride_s = 128 * 576;
        p.kv_stride_b = n * 576;
        p.out_stride_h = 512;
        p.out_stride_b = p.out_stride_s = 128 * 512;
        uint64_t bytes = 0;
        require(flare_mla_decode_workspace(&p, &bytes));
        workspace.resize(bytes + 256);
        p.workspace = workspace.data() + (256 - reinterpret_cast<uintptr_t>(workspace.data()) % 256);
        p.workspace_bytes = bytes;
        flops = 128.0 * static_cast<double>(n) * 2.0 * (576.0 + 512.0);
    }
    void run() { require(flare_mla_decode(&p)); }

    std::vector<char> q, kv, out, workspace;
    flare_mla_decode_params p{};
    double flops;
};

// Bounded gate, l2-normalised q and k, fp32 states; T > 1: forward, T = 1: one token for each of B sequences.
struct KdaCase {
    KdaCase(int32_t dtype, int64_t batch, int64_t seqlen, int64_t heads, int64_t d, bool decode_step = false)
        : q(stored(random_floats(static_cast<size_t>(batch * seqlen * heads * d)), dtype)),
          k(stored(random_floats(static_cast<size_t>(batch * seqlen * heads * d)), dtype)),
          v(stored(random_floats(static_cast<size_t>(batch * seqlen * heads * d)), dtype)),
          g(stored(random_floats(static_cast<size_t>(batch * seqlen * heads * d)), dtype)),
          beta(stored(random_floats(static_cast<size_t>(batch * seqlen * heads)), dtype)),
          out(q.size()),
          a_log(random_floats(static_cast<size_t>(heads))),
          dt_bias(random_floats(static_cast<size_t>(heads * d))),
          state(static_cast<size_t>(batch * heads * d * d)),
          decode(decode_step) {
        const auto bind = [&](auto& p) {
            p.struct_size = sizeof(p);
            p.device = FLARE_DEVICE_CPU;
            p.dtype = dtype;
            p.state_layout = FLARE_STATE_VK;
            p.gate = FLARE_GATE_BOUNDED;
            p.lower_bound = -5.0f;
            p.beta_activation = FLARE_BETA_SIGMOID;
            p.qk_l2norm = 1;
            p.batch = batch;
            p.seqlen = seqlen;
            p.heads_qk = p.heads_v = heads;
            p.head_dim_k = p.head_dim_v = d;
            p.q = q.data();
            p.k = k.data();
            p.v = v.data();
            p.g = g.data();
            p.beta = beta.data();
            p.a_log = a_log.data();
            p.dt_bias = dt_bias.data();
            p.out = out.data();
            p.q_stride_h = p.k_stride_h = p.v_stride_h = p.g_stride_h = p.out_stride_h = d;
            p.q_stride_t = p.k_stride_t = p.v_stride_t = p.g_stride_t = p.out_stride_t = heads * d;
            p.q_stride_b = p.k_stride_b = p.v_stride_b = p.g_stride_b = p.out_stride_b = seqlen * heads * d;
            p.beta_stride_h = 1;
            p.beta_stride_t = heads;
            p.beta_stride_b = seqlen * heads;
        };
        bind(forward_params);
        forward_params.initial_state = forward_params.final_state = state.data();
        bind(decode_params);
        decode_params.state = state.data();
        decode_params.num_slots = batch;
        const double size = static_cast<double>(d);
        flops = static_cast<double>(batch * seqlen * heads) * (decode ? 7.0 * size * size : 6.0 * size * size + 16.0 * 8.0 * size);
    }
    void run() { require(decode ? flare_kda_decode(&decode_params) : flare_kda_forward(&forward_params)); }

    std::vector<char> q, k, v, g, beta, out;
    std::vector<float> a_log, dt_bias, state;
    flare_kda_forward_params forward_params{};
    flare_kda_decode_params decode_params{};
    bool decode;
    double flops;
};

double seconds(const std::function<void()>& run) {
    const auto start = std::chrono::steady_clock::now();
    run();
    return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

}  // namespace

int main(int argc, char** argv) {
    const int rounds = argc > 1 ? std::atoi(argv[1]) : 15;
    std::vector<Case> cases;
#ifdef FLARE_HAVE_OPENBLAS
    const int size = 2048;
    const std::vector<float> a = random_floats(static_cast<size_t>(size) * size);
    const std::vector<float> b = random_floats(static_cast<size_t>(size) * size);
    std::vector<float> c(a.size());
    openblas_set_num_threads(static_cast<int>(std::thread::hardware_concurrency()));
    cases.push_back({"OpenBLAS sgemm", "2048 x 2048 x 2048", 2.0 * size * size * size, [&] {
                         cblas_sgemm(101, 111, 111, size, size, size, 1.0f, a.data(), size, b.data(), size, 0.0f,
                                     c.data(), size);
                     }});
#endif
    AttentionCase full32(FLARE_FP32, 8, 8, 2048, 2048, 128, FLARE_MASK_NONE, 0);
    AttentionCase full16(FLARE_BF16, 8, 8, 2048, 2048, 128, FLARE_MASK_NONE, 0);
    AttentionCase causal32(FLARE_FP32, 8, 8, 2048, 2048, 128, FLARE_MASK_CAUSAL, 0);
    AttentionCase causal16(FLARE_BF16, 8, 8, 2048, 2048, 128, FLARE_MASK_CAUSAL, 0);
    AttentionCase causal64(FLARE_FP32, 8, 8, 2048, 2048, 64, FLARE_MASK_CAUSAL, 0);
    AttentionCase long_full(FLARE_FP32, 1, 1, 16384, 16384, 128, FLARE_MASK_NONE, 0);
    AttentionCase window(FLARE_FP32, 1, 1, 16384, 16384, 128, FLARE_MASK_WINDOW, 256);
    AttentionCase decode(FLARE_BF16, 32, 8, 1, 16384, 128, FLARE_MASK_CAUSAL, 0);
    MlaCase mla32(FLARE_FP32, 8, 2048, 64, FLARE_MASK_NONE);
    MlaCase mla16(FLARE_BF16, 8, 2048, 64, FLARE_MASK_NONE);
    MlaCase mla_causal(FLARE_BF16, 8, 2048, 64, FLARE_MASK_CAUSAL);
    MlaDecodeCase mla_decode(8192);
    KdaCase kda32(FLARE_FP32, 1, 4096, 8, 128);
    KdaCase kda16(FLARE_BF16, 1, 4096, 8, 128);
    KdaCase kda64(FLARE_BF16, 1, 4096, 8, 64);
    KdaCase kda_one(FLARE_BF16, 1, 4096, 1, 128);
    KdaCase kda_step(FLARE_BF16, 64, 1, 16, 128, true);
    const auto add = [&](const char* name, const char* shape, auto& operation) {
        cases.push_back({name, shape, operation.flops, [&operation] { operation.run(); }});
    };
    add("attention fp32, full", "H 8, N 2048, D 128", full32);
    add("attention bf16, full", "H 8, N 2048, D 128", full16);
    add("attention fp32, causal", "H 8, N 2048, D 128", causal32);
    add("attention bf16, causal", "H 8, N 2048, D 128", causal16);
    add("attention fp32, causal", "H 8, N 2048, D 64", causal64);
    add("MLA prefill fp32, full", "H 8, N 2048, 128 + 64 / 512", mla32);
    add("MLA prefill bf16, full", "H 8, N 2048, 128 + 64 / 512", mla16);
    add("MLA prefill bf16, causal", "H 8, N 2048, 128 + 64 / 512", mla_causal);
    add("MLA decode bf16", "H 128, Nq 1, N 8192, 512 + 64", mla_decode);
    add("KDA forward fp32", "H 8, T 4096, 128 x 128", kda32);
    add("KDA forward bf16", "H 8, T 4096, 128 x 128", kda16);
    add("KDA forward bf16", "H 8, T 4096, 64 x 64", kda64);
    add("KDA forward bf16", "H 1, T 4096, 128 x 128", kda_one);
    add("KDA decode bf16, fp32 state", "B 64, H 16, T 1, 128 x 128", kda_step);
    add("attention fp32, full", "H 1, N 16384, D 128", long_full);
    add("attention fp32, window 256", "H 1, N 16384, D 128", window);
    add("attention bf16, decode", "H 32 / 8, Nq 1, N 16384, D 128", decode);

    for (int round = 0; round < rounds; ++round) {
        for (Case& item : cases) {
            // Long ones less often: a round should stay short against the machine's changes of mood.
            if (item.flops > 1e11 && round % 4 != 0) {
                continue;
            }
            item.best = std::min(item.best, seconds(item.run));
        }
    }

    std::printf("%s\n", flare_build_info());
#ifdef FLARE_HAVE_OPENBLAS
    std::printf("OpenBLAS kernels: %s; %u threads; best of %d rounds\n", openblas_get_corename(),
                std::thread::hardware_concurrency(), rounds);
#endif
    std::printf("\n| operation | shape | ms | GFLOP/s | of sgemm's rate |\n|---|---|---|---|---|\n");
    const double yardstick = cases[0].flops / cases[0].best;
    for (const Case& item : cases) {
        const double rate = item.flops / item.best;
        std::printf("| %s | %s | %.2f | %.0f | %.0f %% |\n", item.name.c_str(), item.shape.c_str(), item.best * 1e3,
                    rate * 1e-9, 100.0 * rate / yardstick);
    }
    const Case& full = cases[cases.size() - 3];
    const Case& narrow = cases[cases.size() - 2];
    std::printf("\nWindow 256 at N = 16384 takes 1/%.0f of full attention's time.\n", full.best / narrow.best);
    return 0;
}
