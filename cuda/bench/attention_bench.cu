// Times the Hopper attention forward kernels: fresh random inputs, L2 flushed by a 256 MB write before every launch, median
// of CUDA event times, error of sampled rows against a reference beside every time. FLOPs count visible pairs only.
//   nvcc -std=c++17 -O3 -gencode arch=compute_90a,code=sm_90a -Icuda/include -Icuda/src -Icuda/tests \
//        cuda/bench/attention_bench.cu cuda/src/attention/*sm90*.cu -o attention_bench
//   ./attention_bench [forward|window|varlen|all]
// One launch each of some shapes, for a profiler (pipes, caches, clock):
//   ncu --clock-control none -k regex:attention_fwd --section SpeedOfLight --section ComputeWorkloadAnalysis \
//       --section MemoryWorkloadAnalysis --print-details all ./attention_bench once
#include <algorithm>
#include <cstring>

#include "attention_sm90_common.cuh"

namespace {

using namespace attention_test;

double visible_pairs(const Shape& s) {
    double pairs = 0;
    for (int i = 0; i < s.seqlen_q; ++i) {  // of one sequence
        const int64_t pos = int64_t{i} + s.seqlen_k - s.seqlen_q;
        const int64_t lo = s.left < 0 ? 0 : std::max<int64_t>(0, pos - s.left);
        const int64_t hi = s.right < 0 ? s.seqlen_k - 1 : std::min<int64_t>(s.seqlen_k - 1, pos + s.right);
        pairs += static_cast<double>(std::max<int64_t>(0, hi - lo + 1));
    }
    return pairs;
}

// Milliseconds, sorted.
std::vector<float> time_launches(const FwdParams& p) {
    static void* flush = slab(7, size_t{256} << 20);
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
    return times;
}

template <typename T>
void report(const FwdParams& p, const char* label, double pairs) {
    if (launch(p) != FLARE_OK) {
        return;
    }
    const Error e = compare_all<T>(p, std::max(1, p.seqlen_q / 8));
    const std::vector<float> times = time_launches(p);
    const double ms = times[times.size() / 2];
    const double flop = 2.0 * p.heads_q * pairs * (p.head_dim + p.head_dim_v);
    std::printf("%-6s %s D=%d/%d H=%d N=%d B=%d window=%d,%d: %.4f ms %.0f TFLOP/s (p10 %.0f p90 %.0f) error %.1e lse %.0e%s\n",
                label, std::is_same_v<T, __half> ? "fp16" : std::is_same_v<T, __nv_bfloat16> ? "bf16" : "e4m3", p.head_dim,
                p.head_dim_v, p.heads_q, p.seqlen_q, p.batch, p.window_left, p.window_right, ms, flop / ms * 1e-9,
                flop / times[times.size() * 9 / 10] * 1e-9, flop / times[times.size() / 10] * 1e-9, e.relative, e.lse,
                e.bad > 0 || e.relative > (std::is_same_v<T, __nv_fp8_e4m3> ? 5e-2 : 5e-3) ? " WRONG" : "");
}

template <typename T>
void time_shape(const Shape& s, const char* label) {
    report<T>(make_params<T>(s, 0, 5), label, s.batch * visible_pairs(s));
}

// 16 packed sequences of random lengths, then as many of one length with the same number of visible pairs.
void varlen() {
    std::vector<int32_t> starts{0};
    uint32_t state = 12345;
    double squares = 0;
    int longest = 0;
    for (int i = 0; i < 16; ++i) {
        state = state * 1664525u + 1013904223u;
        const int length = 100 + static_cast<int>((state >> 8) % 3901);
        starts.push_back(starts.back() + length);
        squares += double(length) * length;
        longest = std::max(longest, length);
    }
    const int equal = static_cast<int>(std::lround(std::sqrt(squares / 16)));
    for (int right : {-1, 0}) {
        FwdParams p = make_params<__nv_bfloat16>({1, 16, 16, starts.back(), starts.back(), 128, 128, -1, right}, 0, 6);
        int32_t* cu = static_cast<int32_t*>(slab(5, starts.size() * sizeof(int32_t)));
        CHECK(cudaMemcpy(cu, starts.data(), starts.size() * sizeof(int32_t), cudaMemcpyHostToDevice));
        p.cu_seqlens_q = p.cu_seqlens_k = cu;
        p.total_q = p.total_k = starts.back();
        p.lse_stride = {0, 1, starts.back()};
        p.batch = 16;
        p.seqlen_q = p.seqlen_k = longest;
        double pairs = 0;
        for (int i = 0; i < 16; ++i) {
            const int n = starts[i + 1] - starts[i];
            pairs += visible_pairs({1, 16, 16, n, n, 128, 128, -1, right});
        }
        report<__nv_bfloat16>(p, "varlen", pairs);
        time_shape<__nv_bfloat16>({16, 16, 16, equal, equal, 128, 128, -1, right}, "equal");
    }
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

template <typename T>
void launch_once(const Shape& s) {
    CHECK(cudaDeviceSynchronize());
    if (launch(make_params<T>(s, 0, 5)) == FLARE_OK) {
        CHECK(cudaDeviceSynchronize());
        std::printf("%s D=%d N=%d right=%d left=%d\n", std::is_same_v<T, __half> ? "fp16" : "bf16", s.head_dim, s.seqlen_q, s.right,
                    s.left);
    }
}

void once() {
    for (int n : {4096, 16384}) {
        for (int right : {-1, 0}) {
            launch_once<__nv_bfloat16>({16384 / n, 16, 16, n, n, 128, 128, -1, right});
            launch_once<__half>({16384 / n, 16, 16, n, n, 128, 128, -1, right});
        }
    }
    launch_once<__nv_bfloat16>({1, 16, 16, 16384, 16384, 128, 128, 1023, 0});
    launch_once<__nv_bfloat16>({1, 32, 32, 16384, 16384, 64, 64, -1, -1});
    launch_once<__nv_bfloat16>({1, 8, 8, 16384, 16384, 256, 256, -1, -1});
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
    if (std::strcmp(what, "once") == 0) {
        once();
        return 0;
    }
    const bool everything = std::strcmp(what, "all") == 0;
    if (everything || std::strcmp(what, "forward") == 0) {
        for (int d : {64, 128, 256}) {
            forward(d, d);
        }
        time_shape<__nv_bfloat16>({2, 16, 16, 8192, 8192, 192, 128, -1, 0}, "causal");
        time_shape<__nv_bfloat16>({2, 16, 16, 8192, 8192, 192, 192, -1, 0}, "causal");
        time_shape<__nv_bfloat16>({2, 16, 16, 8192, 8192, 96, 96, -1, 0}, "causal");
        time_shape<__half>({1, 16, 16, 16384, 16384, 128, 128, -1, -1}, "full");
        time_shape<__half>({1, 16, 16, 16384, 16384, 128, 128, -1, 0}, "causal");
        for (int n : {512, 1024, 2048, 4096, 8192, 16384}) {
            time_shape<__nv_fp8_e4m3>({16384 / n, 16, 16, n, n, 128, 128, -1, -1}, "full");
            time_shape<__nv_fp8_e4m3>({16384 / n, 16, 16, n, n, 128, 128, -1, 0}, "causal");
        }
    }
    if (everything || std::strcmp(what, "window") == 0) {
        window(64);
        window(128);
    }
    if (everything || std::strcmp(what, "varlen") == 0) {
        varlen();
    }
#endif
    return 0;
}
