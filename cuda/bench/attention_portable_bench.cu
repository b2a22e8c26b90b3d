// Times the portable attention kernels: prefill, sliding window and paged decode; fresh random inputs, L2 flushed by a 256 MB
// write before every launch, median of CUDA event times, error of sampled rows against a reference beside every time. FLOPs
// count visible pairs only, bytes count K and V once.
//   nvcc -std=c++17 -O3 -gencode arch=compute_80,code=sm_90 -Icuda/include -Icuda/src -Icuda/tests
//        cuda/bench/attention_portable_bench.cu cuda/src/attention/*_sm80.cu -o attention_portable_bench
//   ./attention_portable_bench [forward|window|decode|all]
#include <cstring>
#include <numeric>
#include <random>

#include "attention/forward_sm80.h"
#include "attention_sm90_common.cuh"

namespace {

using namespace attention_test;
namespace attention = flare::attention;
using T = __nv_bfloat16;

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

// Median milliseconds; negative when the launch fails.
double time_launch(const FwdParams& p, void* workspace) {
    static void* flush = slab(7, size_t{256} << 20);
    cudaEvent_t begin, end;
    CHECK(cudaEventCreate(&begin));
    CHECK(cudaEventCreate(&end));
    std::vector<float> times;
    for (int i = 0; i < 15; ++i) {
        CHECK(cudaMemsetAsync(flush, i, size_t{256} << 20));
        CHECK(cudaEventRecord(begin));
        if (attention::launch_attention_sm80(p, workspace, nullptr) != FLARE_OK) {
            return -1.0;
        }
        CHECK(cudaEventRecord(end));
        CHECK(cudaEventSynchronize(end));
        float ms;
        CHECK(cudaEventElapsedTime(&ms, begin, end));
        if (i >= 3) {
            times.push_back(ms);
        }
    }
    CHECK(cudaEventDestroy(begin));
    CHECK(cudaEventDestroy(end));
    std::sort(times.begin(), times.end());
    return times[times.size() / 2];
}

void time_prefill(const Shape& s, const char* label) {
    FwdParams p = make_params<T>(s, 0, 5);
    p.out_dtype = p.dtype;
    const double ms = time_launch(p, nullptr);
    const Error e = compare_all<T>(p, std::max(1, s.seqlen_q / 8));
    const double flop = 2.0 * s.batch * s.heads_q * visible_pairs(s) * (s.head_dim + s.head_dim_v);
    std::printf("%-6s %s H=%d N=%d B=%d window=%d,%d: %.4f ms %.0f TFLOP/s error %.1e lse %.0e%s\n", label,
                attention::attention_sm80_kernel_name(p), s.heads_q, s.seqlen_q, s.batch, s.left, s.right, ms, flop / ms * 1e-9,
                e.relative, e.lse, ms < 0 || e.bad > 0 || e.relative > 5e-3 ? " WRONG" : "");
}

// One block a (sampled head, sequence), fp32: err[0] += |out - ref|^2, err[1] += |ref|^2.
__global__ void compare_decode(FwdParams p, int head_step, double* err) {
    extern __shared__ float score[];
    __shared__ float query[128];
    __shared__ float part[256];
    const int head = static_cast<int>(blockIdx.x) * head_step % p.heads_q;
    const int batch = static_cast<int>(blockIdx.y);
    const int kv_head = head / (p.heads_q / p.heads_kv);
    const int thread = static_cast<int>(threadIdx.x);
    const auto place = [&](int key, const Strides& stride) {
        const int64_t page = p.block_table[batch * p.block_table_stride + key / p.page_size];
        return page * stride.batch + key % p.page_size * stride.row + kv_head * stride.head;
    };
    const int64_t row = batch * p.q_stride.batch + head * p.q_stride.head;
    if (thread < 128) {
        query[thread] = Bits<T>::load(p.q, row + thread);
    }
    __syncthreads();
    float best = -INFINITY;
    for (int j = thread; j < p.seqlen_k; j += 256) {
        const int64_t at = place(j, p.k_stride);
        float dot = 0.0f;
        for (int d = 0; d < 128; ++d) {
            dot += query[d] * Bits<T>::load(p.k, at + d);
        }
        score[j] = dot * p.scale;
        best = fmaxf(best, score[j]);
    }
    part[thread] = best;
    __syncthreads();
    for (int i = 0; i < 256; ++i) {
        best = fmaxf(best, part[i]);
    }
    __syncthreads();
    float sum = 0.0f;
    for (int j = thread; j < p.seqlen_k; j += 256) {
        score[j] = expf(score[j] - best);
        sum += score[j];
    }
    part[thread] = sum;
    __syncthreads();
    sum = 0.0f;
    for (int i = 0; i < 256; ++i) {
        sum += part[i];
    }
    if (thread < 128) {
        float ref = 0.0f;
        for (int j = 0; j < p.seqlen_k; ++j) {
            ref += score[j] * Bits<T>::load(p.v, place(j, p.v_stride) + thread);
        }
        ref /= sum;
        const float got = Bits<T>::load(p.o, row + thread);
        atomicAdd(err, isnan(got) ? INFINITY : static_cast<double>(got - ref) * (got - ref));
        atomicAdd(err + 1, static_cast<double>(ref) * ref);
    }
}

void time_decode(int batch, int context, int heads, int heads_kv) {
    constexpr int kDim = 128;
    constexpr int kPage = 64;
    const int pages = batch * context / kPage;
    const int64_t count = int64_t{pages} * kPage * heads_kv * kDim;
    const int64_t rows = int64_t{batch} * heads * kDim;
    FwdParams p{};
    void* q = slab(0, rows * 2);
    void* k = slab(1, count * 2);
    void* v = slab(2, count * 2);
    p.o = slab(3, rows * 2);
    fill_normal<T><<<64, 256>>>(q, rows, 1);
    fill_normal<T><<<2048, 256>>>(k, count, 2);
    fill_normal<T><<<2048, 256>>>(v, count, 3);
    CHECK(cudaMemset(p.o, 0xff, rows * 2));
    std::vector<int32_t> table(pages);
    std::iota(table.begin(), table.end(), 0);
    std::shuffle(table.begin(), table.end(), std::mt19937(1));
    auto* device_table = static_cast<int32_t*>(slab(4, pages * 4));
    CHECK(cudaMemcpy(device_table, table.data(), pages * 4, cudaMemcpyHostToDevice));
    p.q = q;
    p.k = k;
    p.v = v;
    p.q_stride = p.o_stride = {int64_t{heads} * kDim, int64_t{heads} * kDim, kDim};
    p.k_stride = p.v_stride = {int64_t{kPage} * heads_kv * kDim, int64_t{heads_kv} * kDim, kDim};
    p.dtype = p.out_dtype = DType::kBf16;
    p.batch = batch;
    p.heads_q = heads;
    p.heads_kv = heads_kv;
    p.seqlen_q = 1;
    p.seqlen_k = context;
    p.head_dim = p.head_dim_v = kDim;
    p.window_left = p.window_right = -1;
    p.scale = 0.08838834764f;
    p.block_table = device_table;
    p.block_table_stride = context / kPage;
    p.page_size = kPage;
    p.num_pages = pages;
    p.sm_count = sm_count();
    void* workspace = slab(5, attention::sm80_workspace(p) + 256);
    const double ms = time_launch(p, workspace);
    double error = 0.0;
    if (context <= 32768) {
        static double* err = nullptr;
        if (err == nullptr) {
            CHECK(cudaMalloc(&err, 2 * sizeof(double)));
            CHECK(cudaFuncSetAttribute(compare_decode, cudaFuncAttributeMaxDynamicSharedMemorySize, 200 * 1024));
        }
        CHECK(cudaMemset(err, 0, 2 * sizeof(double)));
        compare_decode<<<dim3(3, batch), 256, context * 4>>>(p, 5, err);
        double host[2];
        CHECK(cudaMemcpy(host, err, sizeof(host), cudaMemcpyDeviceToHost));
        error = std::sqrt(host[0] / host[1]);
    }
    std::printf("decode %s B=%d context %d H=%d/%d page %d: %d splits %.1f us %.2f TB/s error %s%.1e%s\n",
                attention::attention_sm80_kernel_name(p), batch, context, heads, heads_kv, kPage,
                attention::plan_sm80(p).num_splits, ms * 1e3, 4.0 * static_cast<double>(count) / ms * 1e-9,
                context <= 32768 ? "" : "unchecked ", error, ms < 0 || !(error < 5e-3) ? " WRONG" : "");
}

}  // namespace

int main(int argc, char** argv) {
    const char* what = argc > 1 ? argv[1] : "all";
    const auto wants = [&](const char* part) { return std::strcmp(what, "all") == 0 || std::strcmp(what, part) == 0; };
    if (wants("forward")) {
        for (int d : {64, 128, 256}) {
            const int heads = 2048 / d;
            for (int n : {4096, 16384}) {
                time_prefill({16384 / n, heads, heads, n, n, d, d, -1, -1}, "full");
                time_prefill({16384 / n, heads, heads, n, n, d, d, -1, 0}, "causal");
            }
        }
        time_prefill({2, 16, 16, 8192, 8192, 96, 96, -1, 0}, "causal");
        time_prefill({2, 16, 16, 8192, 8192, 192, 128, -1, 0}, "causal");
        time_prefill({2, 16, 16, 8192, 8192, 192, 192, -1, 0}, "causal");
        time_prefill({2, 16, 16, 8192, 8192, 80, 80, -1, 0}, "causal");
    }
    if (wants("window")) {
        time_prefill({1, 16, 16, 16384, 16384, 128, 128, 1023, 0}, "window");
        time_prefill({1, 16, 16, 16384, 16384, 128, 128, 4095, 0}, "window");
        time_prefill({1, 32, 32, 16384, 16384, 64, 64, 511, 0}, "window");
    }
    if (wants("decode")) {
        time_decode(1, 8192, 32, 8);
        time_decode(1, 131072, 32, 8);
        time_decode(16, 8192, 32, 8);
        time_decode(64, 8192, 32, 8);
        time_decode(128, 4096, 64, 8);
        time_decode(64, 8192, 32, 32);
    }
    return 0;
}
