// MLA decode timing: L2 flushed before each launch, device events around it, median of 30.
//   nvcc -std=c++17 -O3 -gencode arch=compute_90a,code=sm_90a -Icuda/include -Icuda/src -Icuda/tests \
//       cuda/bench/mla_bench.cu cuda/src/mla/decode_sm90.cu -o mla_bench && ./mla_bench
// FLOPs: 2 B H Sq Sk (576 + 512); bytes: cache rows once, q and out once.
#include <algorithm>
#include <numeric>

#include "mla_common.cuh"

using namespace flare::mla;
using namespace flare::mla::testing;

namespace {

struct Row {
    int batch, sq, heads, len, page, ragged;
    double peer_us;  // FlashMLA at commit 9241ae3, same card; 0 = none
    int topk = 0;  // token indices, len is then the cache of a sequence
};

double time_row(const Row& r, bool print) {
    const int d = 576;
    const int pages_per = (r.len + r.page - 1) / r.page;
    const int num_pages = r.batch * pages_per;
    const int64_t q_elements = int64_t{r.batch} * r.sq * r.heads * d;
    const int64_t kv_rows = int64_t{num_pages} * r.page;
    Buffer q(q_elements * 2), kv(kv_rows * d * 2), out(int64_t{r.batch} * r.sq * r.heads * 512 * 2);
    Buffer lse(int64_t{r.batch} * r.sq * r.heads * 4), flush(256u << 20);
    fill_normal<<<1024, 256>>>(q.as<__nv_bfloat16>(), q_elements, 1, 1.0f);
    fill_normal<<<4096, 256>>>(kv.as<__nv_bfloat16>(), kv_rows * d, 7, 1.0f);
    std::mt19937 rng(5);
    std::vector<int> table(num_pages), lens(r.batch, r.len);
    std::iota(table.begin(), table.end(), 0);
    std::shuffle(table.begin(), table.end(), rng);
    double keys = 0.0;
    for (int& len : lens) {
        if (r.ragged) {
            len = r.len / 2 + static_cast<int>(rng() % (r.len / 2));
        }
        keys += r.topk ? r.topk * r.sq : len;
    }
    std::vector<int> indices(int64_t{r.batch} * r.sq * r.topk);
    for (int& index : indices) {
        index = static_cast<int>(rng() % kv_rows);
    }
    Buffer d_indices(indices.size() * 4);
    CUDA_CHECK(cudaMemcpy(d_indices.data, indices.data(), d_indices.bytes * (indices.empty() ? 0 : 1), cudaMemcpyHostToDevice));
    Buffer d_table(table.size() * 4), d_lens(lens.size() * 4);
    CUDA_CHECK(cudaMemcpy(d_table.data, table.data(), d_table.bytes, cudaMemcpyHostToDevice));
    CUDA_CHECK(cudaMemcpy(d_lens.data, lens.data(), d_lens.bytes, cudaMemcpyHostToDevice));
    MlaDecodeParams p{};
    p.q = q.data;
    p.kv = kv.data;
    p.out = out.data;
    p.lse = lse.as<float>();
    p.q_stride_h = d;
    p.q_stride_s = int64_t{r.heads} * d;
    p.q_stride_b = r.sq * p.q_stride_s;
    p.kv_stride_s = d;
    p.kv_stride_b = int64_t{r.page} * p.kv_stride_s;
    p.out_stride_h = 512;
    p.out_stride_s = int64_t{r.heads} * 512;
    p.out_stride_b = r.sq * p.out_stride_s;
    p.lse_stride_h = r.sq;
    p.lse_stride_b = int64_t{r.heads} * r.sq;
    p.dtype = p.out_dtype = p.kv_dtype = DType::kBf16;
    p.batch = r.batch;
    p.seqlen_q = r.sq;
    p.seqlen_k = r.len;
    p.heads = r.heads;
    p.d_c = 512;
    p.d_rope = 64;
    p.scale = 0.0721688f;
    p.causal = 1;
    if (r.topk) {
        p.indices = d_indices.data;
        p.topk = r.topk;
        p.indices_stride_s = r.topk;
        p.indices_stride_b = int64_t{r.sq} * r.topk;
    } else {
        p.seqlens_k = d_lens.data;
        p.block_table = d_table.data;
        p.block_table_stride_b = pages_per;
    }
    p.page_size = r.page;
    p.num_pages = num_pages;
    p.sm_count = sm_count();
    const size_t bytes = mla_decode_sm90_workspace(p);
    Buffer workspace(bytes);
    cudaEvent_t start, stop;
    CUDA_CHECK(cudaEventCreate(&start));
    CUDA_CHECK(cudaEventCreate(&stop));
    std::vector<float> times;
    for (int i = 0; i < 33; ++i) {
        CUDA_CHECK(cudaMemsetAsync(flush.data, i, flush.bytes));
        CUDA_CHECK(cudaEventRecord(start));
        if (launch_mla_decode_sm90(p, workspace.data, bytes, nullptr) != 0) {
            std::printf("launch failed\n");
            std::exit(2);
        }
        CUDA_CHECK(cudaEventRecord(stop));
        CUDA_CHECK(cudaEventSynchronize(stop));
        float ms = 0.0f;
        CUDA_CHECK(cudaEventElapsedTime(&ms, start, stop));
        if (i >= 3) {
            times.push_back(ms * 1000.0f);
        }
    }
    std::sort(times.begin(), times.end());
    const double us = times[times.size() / 2];
    const double flops = 2.0 * r.heads * (r.topk ? 1 : r.sq) * keys * (576 + 512);
    const double moved = keys * 1152.0 + 2.0 * r.batch * r.sq * r.heads * (576 + 512);
    if (print) {
        char keys_read[32] = "";
        std::snprintf(keys_read, sizeof(keys_read), r.topk ? " top %d" : "", r.topk);
        std::printf("| %d, %d, %d, %d%s | %d%s | %.1f (%.1f-%.1f) | %.0f | %.2f | %.1f | %.2f |\n", r.batch, r.sq,
                    r.heads, r.len, keys_read, r.page, r.ragged ? " ragged" : "", us, times[3],
                    times[times.size() - 4],
                    flops / us * 1e-6, moved / us * 1e-6, r.peer_us, r.peer_us > 0.0 ? r.peer_us / us : 0.0);
        std::fflush(stdout);
    }
    CUDA_CHECK(cudaEventDestroy(start));
    CUDA_CHECK(cudaEventDestroy(stop));
    return us;
}

}  // namespace

int main() {
    const Row rows[] = {
        {128, 1, 128, 4096, 64, 0, 244.2}, {128, 1, 128, 8192, 64, 0, 475.1}, {128, 2, 128, 4096, 64, 0, 468.8},
        {64, 1, 128, 16384, 64, 0, 500.2}, {128, 1, 64, 4096, 64, 0, 172.9},  {128, 1, 16, 4096, 64, 0, 169.6},
        {1, 1, 128, 32768, 64, 0, 50.3},   {8, 1, 128, 32768, 64, 0, 133.6},  {1, 1, 16, 131072, 64, 0, 81.0},
        {128, 1, 128, 4096, 64, 1, 0},     {128, 1, 32, 4096, 64, 0, 0},      {128, 1, 16, 4096, 16, 0, 0},
        {128, 1, 16, 4096, 1, 0, 0},       {128, 1, 128, 4096, 16, 0, 0},     {128, 1, 128, 4096, 1, 0, 0},
        {1, 1, 128, 4096, 64, 0, 0},       {2, 1, 16, 1024, 64, 0, 0},
        {128, 2, 128, 32768, 64, 0, 0, 2048},
    };
    std::printf(
        "| B, Sq, H, Sk | page | us (p10-p90) | TFLOP/s | TB/s | FlashMLA us | speed-up "
        "|\n|---|---|---|---|---|---|---|\n");
    time_row(rows[0], false);
    for (const Row& r : rows) {
        time_row(r, true);
    }
    return 0;
}
