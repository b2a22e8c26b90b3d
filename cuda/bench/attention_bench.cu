// Times the Hopper attention forward kernels: fresh random inputs, L2 flushed by a 256 MB write before every launch, median
// of CUDA event times, error of sampled rows against a reference beside every time. FLOPs count visible pairs only.
//   nvcc -std=c++17 -O3 -gencode arch=compute_90a,code=sm_90a -Icuda/include -Icuda/src -Icuda/tests \
//        cuda/bench/attention_bench.cu cuda/src/attention/*sm90*.cu -o attention_bench
//   ./attention_bench [forward|window|all]
#include <algorithm>
#include <cstring>

#include "attention_sm90_common.cuh"

namespace {

using namespace attention_test;

double visible_pairs(const Shape& s) {
    double pairs = 0;
    for (int i = 0; i < s.seqlen_q; ++i) {
        const int64_t pos = int64_t{i} + s.seqlen_k - s.seqlen_q;
        const int64_t lo = s.left < 0 ? 0 : std::max<int64_t>(0, pos - s.left);
        const int64_t hi = s.right < 0 ? s.seqlen_k - 1 : std::min<int64_t>(s.seqlen_k - 1, pos + s.right);
        pairs += static_cast<double>(std::max<int64_t>(0, hi - lo + 1));
    }
    return pairs;
}

template <typename T>
void time_shape(const Shape& s, const char* label) {
    static void* flush = slab(7, size_t{256} << 20);
    const FwdParams p = make_params<T>(s, 0, 5);
    if (launch(p) != FLARE_OK) {
        return;
    }
    const Error e = compare_all<T>(p, std::max(1, s.seqlen_q / 8));
    cudaEvent_t begin, end;
    CHECK(cudaEventCreate(&begin));
    CHECK(cudaEventCreate(&end));
    std::vector<float> times;
    for (int i = 0; i < 25; ++i) {
        CHECK(cudaMemsetAsync(flush, i, size_t{256} << 20));
        CHECK(cudaEventRecord(begin));
        launch(p);
        CHECK(cudaEventRecord(end));
        CHECK(cudaEventSynchronize(end));
        float ms;
        CHECK(cudaEventElapsedTime(&ms, begin, end));
        if (i >= 5) {
            times.push_back(ms);
        }
    }
    CHECK(cudaEventDestroy(begin));
    CHECK(cudaEventDestroy(end));
    std::sort(times.begin(), times.end());
    const double ms = times[times.size() / 2];
    const double flop = 2.0 * s.batch * s.heads_q * visible_pairs(s) * (s.head_dim + s.head_dim_v);
    std::printf("%-6s %s D=%d/%d H=%d N=%d B=%d window=%d,%d: %.4f ms %.0f TFLOP/s (p10 %.0f p90 %.0f) error %.1e lse %.0e%s\n",
                label, std::is_same_v<T, __half> ? "fp16" : "bf16", s.head_dim, s.head_dim_v, s.heads_q, s.seqlen_q,
                s.batch, s.left, s.right, ms, flop / ms * 1e-9, flop / times[times.size() * 9 / 10] * 1e-9,
                flop / times[times.size() / 10] * 1e-9, e.relative, e.lse,
                e.bad > 0 || e.relative > 5e-3 ? " WRONG" : "");
}

void forward(int d, int dv) {
    const int heads = 2048 / d;
    for (int n = 512; n <= 16384; n *= 2) {
        const int batch = 16384 / n;
        time_shape<__nv_bfloat16>({batch, heads, heads, n, n, d, dv, -1, -1}, "full");
        time_shape<__nv_bfloat16>({batch, heads, heads, n, n, d, dv, -1, 0}, "causal");
    }
}

void window(int d) {
    if (d == 128) {
        time_shape<__nv_bfloat16>({2, 16, 16, 8192, 8192, 128, 128, 1023, 0}, "window");
        time_shape<__nv_bfloat16>({1, 16, 16, 16384, 16384, 128, 128, 1023, 0}, "window");
        time_shape<__nv_bfloat16>({1, 16, 16, 16384, 16384, 128, 128, 4095, 0}, "window");
        time_shape<__nv_bfloat16>({1, 16, 16, 65536, 65536, 128, 128, 4095, 0}, "window");
    }
    if (d == 64) {
        time_shape<__nv_bfloat16>({1, 32, 32, 16384, 16384, 64, 64, 511, 0}, "window");
    }
}

}  // namespace

int main(int argc, char** argv) {
    const char* what = argc > 1 ? argv[1] : "all";
#ifdef FLARE_VARIANT
    const int v[] = {V_D, V_DV};
    if (std::strcmp(what, "window") != 0) {
        forward(v[0], v[1]);
    }
    window(v[0]);
#else
    if (std::strcmp(what, "window") != 0) {
        for (int d : {64, 128, 256}) {
            forward(d, d);
        }
        time_shape<__nv_bfloat16>({2, 16, 16, 8192, 8192, 192, 128, -1, 0}, "causal");
        time_shape<__nv_bfloat16>({2, 16, 16, 8192, 8192, 192, 192, -1, 0}, "causal");
        time_shape<__nv_bfloat16>({2, 16, 16, 8192, 8192, 96, 96, -1, 0}, "causal");
        time_shape<__half>({1, 16, 16, 16384, 16384, 128, 128, -1, -1}, "full");
        time_shape<__half>({1, 16, 16, 16384, 16384, 128, 128, -1, 0}, "causal");
    }
    if (std::strcmp(what, "forward") != 0) {
        window(64);
        window(128);
    }
#endif
    return 0;
}
