// MLA prefill timing: L2 flushed before each launch, device events around it, median of 15.
//   nvcc -std=c++17 -O3 -gencode arch=compute_90a,code=sm_90a -Icuda/include -Icuda/src -Icuda/tests \
//       cuda/bench/mla_prefill_bench.cu cuda/src/mla/prefill_sm90.cu -o mla_prefill_bench && ./mla_prefill_bench
// TFLOP/s count the attention over visible pairs and the up-projection once.
#include <algorithm>

#include "mla/prefill_sm90.h"
#include "mla_common.cuh"

using namespace flare::mla;
using namespace flare::mla::testing;

namespace {

struct Row {
    int batch, n, heads;
    double peer_ms;  // matrix product for [K | k_rope] and V, then cuDNN attention; same card, another run; 0 = none
};

void time_row(const Row& r, int runs) {
    const int64_t rows = int64_t{r.batch} * r.n;
    Buffer q_nope(rows * r.heads * 256), q_rope(rows * r.heads * 128), c_kv(rows * 1024), k_rope(rows * 128);
    Buffer w_uk(int64_t{r.heads} * 131072), w_uv(int64_t{r.heads} * 131072), out(rows * r.heads * 256);
    Buffer lse(rows * r.heads * 4), flush(256u << 20);
    const auto fill = [&](const Buffer& x, float stddev) {
        fill_normal<<<2048, 256>>>(x.as<__nv_bfloat16>(), static_cast<int64_t>(x.bytes / 2), x.bytes + 11, stddev);
    };
    fill(q_nope, 1.0f);
    fill(q_rope, 1.0f);
    fill(c_kv, 1.0f);
    fill(k_rope, 1.0f);
    fill(w_uk, 0.0442f);
    fill(w_uv, 0.0442f);
    MlaPrefillParams p{};
    p.q_nope = q_nope.data;
    p.q_rope = q_rope.data;
    p.c_kv = c_kv.data;
    p.k_rope = k_rope.data;
    p.w_uk = w_uk.data;
    p.w_uv = w_uv.data;
    p.out = out.data;
    p.lse = lse.as<float>();
    p.q_nope_stride_h = p.out_stride_h = 128;
    p.q_nope_stride_s = p.out_stride_s = r.heads * 128;
    p.q_nope_stride_b = p.out_stride_b = r.n * p.out_stride_s;
    p.q_rope_stride_h = 64;
    p.q_rope_stride_s = r.heads * 64;
    p.q_rope_stride_b = r.n * p.q_rope_stride_s;
    p.c_kv_stride_s = 512;
    p.c_kv_stride_b = r.n * 512;
    p.k_rope_stride_s = 64;
    p.k_rope_stride_b = r.n * 64;
    p.w_uk_stride_r = p.w_uv_stride_r = 128;
    p.w_uk_stride_h = p.w_uv_stride_h = 65536;
    p.lse_stride_h = r.n;
    p.lse_stride_b = int64_t{r.heads} * r.n;
    p.dtype = p.out_dtype = p.latent_dtype = DType::kBf16;
    p.batch = r.batch;
    p.seqlen_q = p.seqlen_k = r.n;
    p.heads = r.heads;
    p.d_nope = p.d_v = 128;
    p.d_rope = 64;
    p.d_c = 512;
    p.scale = 0.0721688f;
    p.causal = 1;
    p.sm_count = sm_count();
    cudaEvent_t start, stop;
    CUDA_CHECK(cudaEventCreate(&start));
    CUDA_CHECK(cudaEventCreate(&stop));
    std::vector<float> times;
    for (int i = 0; i < runs + 2; ++i) {
        CUDA_CHECK(cudaMemsetAsync(flush.data, i, flush.bytes));
        CUDA_CHECK(cudaEventRecord(start));
        if (launch_mla_prefill_sm90(p, nullptr, 0, nullptr) != 0) {
            std::printf("launch failed: %s\n", cudaGetErrorString(cudaGetLastError()));
            std::exit(2);
        }
        CUDA_CHECK(cudaEventRecord(stop));
        CUDA_CHECK(cudaEventSynchronize(stop));
        float ms = 0.0f;
        CUDA_CHECK(cudaEventElapsedTime(&ms, start, stop));
        if (i >= 2) {
            times.push_back(ms);
        }
    }
    std::sort(times.begin(), times.end());
    const double ms = times[times.size() / 2];
    const double pairs = 0.5 * r.n * (r.n + 1.0) * r.batch * r.heads;
    const double flops = pairs * 640.0 + double(rows) * r.heads * 262144.0;
    std::printf("| %d, %d, %d | %.3f (%.3f-%.3f) | %.0f | %.3f | %.2f |\n", r.batch, r.n, r.heads, ms, times[times.size() / 10],
                times[times.size() * 9 / 10], flops / ms * 1e-9, r.peer_ms, r.peer_ms > 0.0 ? ms / r.peer_ms : 0.0);
    std::fflush(stdout);
}

}  // namespace

int main(int argc, char** argv) {
    const Row rows[] = {{1, 8192, 128, 5.82}, {1, 4096, 16, 0.258}, {1, 2048, 128, 0.583}, {4, 4096, 128, 6.97},
                        {1, 1024, 128, 0},    {1, 512, 128, 0},     {1, 256, 128, 0},      {1, 16384, 16, 0}};
    const int count = argc > 1 ? std::atoi(argv[1]) : 8;
    std::printf("| B, N, H | ms (p10-p90) | TFLOP/s | two passes ms | ratio |\n|---|---|---|---|---|\n");
    for (int i = 0; i < count; ++i) {
        time_row(rows[i], argc > 2 ? std::atoi(argv[2]) : 15);
    }
    return 0;
}
