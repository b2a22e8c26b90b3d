// MLA through flare.h, portable kernels forced (or any: argument 0, 1, 2 = the field `kernel`): decode in TB/s, prefill next to
// two passes (K and V by matrix product, then attention). L2 flushed before each call, device events around it, median of 20.
//   nvcc -std=c++17 -O3 -arch=sm_90 -Icuda/include -Icuda/src cuda/bench/mla_portable_bench.cu
//       cuda/src/mla/head_product_sm80.cu -o mla_portable_bench -Lbuild -lflare -Xlinker -rpath=build && ./mla_portable_bench 1
// Decode bytes: cache rows once, q and out once. Prefill FLOPs: attention over visible pairs and one up-projection.
#include <cuda_bf16.h>
#include <cuda_runtime.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <vector>

#include "flare.h"
#include "mla/head_product_sm80.h"

namespace {

void check(cudaError_t error) {
    if (error != cudaSuccess) {
        std::printf("%s\n", cudaGetErrorString(error));
        std::exit(1);
    }
}

struct Buffer {
    explicit Buffer(size_t n) : bytes(n) { check(cudaMalloc(&data, n + 256)); }
    ~Buffer() { cudaFree(data); }
    Buffer(const Buffer&) = delete;
    Buffer& operator=(const Buffer&) = delete;
    void* data = nullptr;
    size_t bytes;
};

__device__ float uniform(uint64_t x) {
    x = (x ^ (x >> 31)) * 0x9E3779B97F4A7C15ull;
    x = (x ^ (x >> 29)) * 0xBF58476D1CE4E5B9ull;
    return static_cast<float>(static_cast<double>(x >> 11) / (1ull << 53)) * 2.0f - 1.0f;
}

__global__ void fill(__nv_bfloat16* x, int64_t n, uint64_t seed, float factor) {
    for (int64_t i = blockIdx.x * int64_t{blockDim.x} + threadIdx.x; i < n; i += int64_t{gridDim.x} * blockDim.x) {
        x[i] = __float2bfloat16(factor * 1.7f * uniform(i + (seed << 40) + 1));
    }
}

__global__ void fill_rows656(char* x, int64_t rows, uint64_t seed) {
    for (int64_t i = blockIdx.x * int64_t{blockDim.x} + threadIdx.x; i < rows * 656; i += int64_t{gridDim.x} * blockDim.x) {
        const int byte = static_cast<int>(i % 656);
        const uint32_t bits = static_cast<uint32_t>(uniform(i + (seed << 40)) * 1e6f);
        if (byte < 512) {
            x[i] = static_cast<char>((bits & 0x87) | 0x30);
        } else if (byte < 528 && byte % 4 == 0) {
            *reinterpret_cast<float*>(x + i) = 0.7f;
        } else if (byte >= 528 && byte % 2 == 0) {
            *reinterpret_cast<__nv_bfloat16*>(x + i) = __float2bfloat16(uniform(i));
        }
    }
}

void fill(Buffer& buffer, uint64_t seed, float factor = 1.0f) {
    fill<<<2048, 256>>>(static_cast<__nv_bfloat16*>(buffer.data), static_cast<int64_t>(buffer.bytes / 2), seed, factor);
}

void expect(int32_t status) {
    if (status != FLARE_OK) {
        char text[512];
        flare_last_error(text, sizeof(text));
        std::printf("%s: %s\n", flare_status_string(status), text);
        std::exit(1);
    }
}

Buffer& flush() {
    static Buffer buffer(256u << 20);
    return buffer;
}

double median_us(const std::function<void()>& call) {
    cudaEvent_t start;
    cudaEvent_t stop;
    check(cudaEventCreate(&start));
    check(cudaEventCreate(&stop));
    std::vector<float> times;
    for (int i = 0; i < 23; ++i) {
        check(cudaMemsetAsync(flush().data, i, flush().bytes));
        check(cudaEventRecord(start));
        call();
        check(cudaEventRecord(stop));
        check(cudaEventSynchronize(stop));
        float ms = 0.0f;
        check(cudaEventElapsedTime(&ms, start, stop));
        if (i >= 3) {
            times.push_back(1000.0f * ms);
        }
    }
    std::sort(times.begin(), times.end());
    check(cudaEventDestroy(start));
    check(cudaEventDestroy(stop));
    return times[times.size() / 2];
}

struct DecodeRow {
    int batch, sq, heads, len, page;  // page 0: contiguous
    bool rows656, fused;
    int splits;
};

void decode(int32_t kernel, const DecodeRow& r) {
    const int page = r.page > 0 ? r.page : r.len;
    const int pages_each = (r.len + page - 1) / page;
    const int64_t pages = int64_t{r.batch} * pages_each;
    const int64_t row_bytes = r.rows656 ? 656 : 1152;
    const int q_width = r.fused ? 128 : 576;
    const int out_width = r.fused ? 128 : 512;
    const int64_t rows = int64_t{r.batch} * r.sq * r.heads;
    Buffer q(rows * q_width * 2), q_rope(rows * 64 * 2), kv(pages * page * row_bytes), out(rows * out_width * 2), lse(rows * 4);
    Buffer w_uk(int64_t{r.heads} * 512 * 128 * 2), w_uv(int64_t{r.heads} * 512 * 128 * 2);
    fill(q, 1);
    fill(q_rope, 2);
    fill(w_uk, 4, 0.04f);
    fill(w_uv, 5, 0.04f);
    if (r.rows656) {
        fill_rows656<<<2048, 256>>>(static_cast<char*>(kv.data), pages * page, 3);
    } else {
        fill(kv, 3);
    }
    std::vector<int> table(pages);
    for (int64_t i = 0; i < pages; ++i) {
        table[i] = static_cast<int>(i * 7919 % pages);
    }
    std::vector<int> lengths(r.batch, r.len);
    Buffer d_table(table.size() * 4), d_lengths(lengths.size() * 4);
    check(cudaMemcpy(d_table.data, table.data(), d_table.bytes, cudaMemcpyHostToDevice));
    check(cudaMemcpy(d_lengths.data, lengths.data(), d_lengths.bytes, cudaMemcpyHostToDevice));
    flare_mla_decode_params p;
    std::memset(&p, 0, sizeof(p));
    p.struct_size = sizeof(p);
    p.kernel = kernel;
    p.dtype = FLARE_BF16;
    p.kv_dtype = r.rows656 ? FLARE_UINT8 : 0;
    p.mask = FLARE_MASK_CAUSAL;
    p.num_splits = r.splits;
    p.batch = r.batch;
    p.seqlen_q = r.sq;
    p.seqlen_k = r.len;
    p.heads = r.heads;
    p.d_c = 512;
    p.d_rope = 64;
    p.d_nope = 128;
    p.d_v = 128;
    p.q = q.data;
    p.kv = kv.data;
    p.out = out.data;
    p.lse = static_cast<float*>(lse.data);
    if (r.fused) {
        p.q_rope = q_rope.data;
        p.w_uk = w_uk.data;
        p.w_uv = w_uv.data;
        p.q_rope_stride_h = 64;
        p.q_rope_stride_s = int64_t{r.heads} * 64;
        p.q_rope_stride_b = r.sq * p.q_rope_stride_s;
        p.w_uk_stride_r = p.w_uv_stride_r = 128;
        p.w_uk_stride_h = p.w_uv_stride_h = 512 * 128;
    }
    p.q_stride_h = q_width;
    p.q_stride_s = int64_t{r.heads} * q_width;
    p.q_stride_b = r.sq * p.q_stride_s;
    p.kv_stride_s = r.rows656 ? 656 : 576;
    p.kv_stride_b = page * p.kv_stride_s;
    p.out_stride_h = out_width;
    p.out_stride_s = int64_t{r.heads} * out_width;
    p.out_stride_b = r.sq * p.out_stride_s;
    p.lse_stride_h = r.sq;
    p.lse_stride_b = int64_t{r.heads} * r.sq;
    p.seqlens_k = d_lengths.data;
    if (r.page > 0) {
        p.block_table = d_table.data;
        p.block_table_stride_b = pages_each;
        p.page_size = page;
        p.num_pages = pages;
    }
    uint64_t bytes = 0;
    expect(flare_mla_decode_workspace(&p, &bytes));
    Buffer workspace(bytes);
    p.workspace = workspace.data;
    p.workspace_bytes = bytes;
    char name[128];
    expect(flare_kernel_name(FLARE_OP_MLA_DECODE, &p, name, sizeof(name)));
    const double us = median_us([&] { expect(flare_mla_decode(&p)); });
    const double moved =
        static_cast<double>(r.batch) * r.len * row_bytes + static_cast<double>(rows) * 2 * (q_width + out_width);
    std::printf("| %-34s | %3d, %d, %3d, %6d | %4d%s%s splits %d | %7.1f us | %.2f TB/s | %4.0f TFLOP/s |\n", name, r.batch,
                r.sq, r.heads, r.len, r.page, r.rows656 ? " row656" : "", r.fused ? " fused" : "", r.splits, us,
                moved / us * 1e-6, 2.0 * static_cast<double>(rows) * r.len * 1088 / us * 1e-6);
    std::fflush(stdout);
}

__global__ void copy_rope(__nv_bfloat16* k, const __nv_bfloat16* rope, int64_t tokens, int heads) {
    const int64_t n = tokens * heads * 8;
    for (int64_t i = blockIdx.x * int64_t{blockDim.x} + threadIdx.x; i < n; i += int64_t{gridDim.x} * blockDim.x) {
        const int64_t token = i / 8 / heads;
        reinterpret_cast<uint4*>(k + (i / 8) * 192 + 128)[i % 8] = reinterpret_cast<const uint4*>(rope + token * 64)[i % 8];
    }
}

void prefill(int32_t kernel, int batch, int n, int heads, bool causal) {
    const int64_t tokens = int64_t{batch} * n;
    Buffer q(tokens * heads * 192 * 2), c(tokens * 512 * 2), rope(tokens * 64 * 2), out(tokens * heads * 128 * 2),
        k(tokens * heads * 192 * 2), v(tokens * heads * 128 * 2);
    Buffer w_uk(int64_t{heads} * 512 * 128 * 2), w_uv(int64_t{heads} * 512 * 128 * 2);
    fill(q, 1);
    fill(c, 2);
    fill(rope, 3);
    fill(w_uk, 4, 0.044f);
    fill(w_uv, 5, 0.044f);
    flare_mla_prefill_params p;
    std::memset(&p, 0, sizeof(p));
    p.struct_size = sizeof(p);
    p.kernel = kernel;
    p.dtype = FLARE_BF16;
    p.mask = causal ? FLARE_MASK_CAUSAL : FLARE_MASK_NONE;
    p.batch = batch;
    p.seqlen_q = p.seqlen_k = n;
    p.heads = heads;
    p.d_nope = p.d_v = 128;
    p.d_rope = 64;
    p.d_c = 512;
    p.q_nope = q.data;
    p.q_rope = static_cast<__nv_bfloat16*>(q.data) + 128;
    p.c_kv = c.data;
    p.k_rope = rope.data;
    p.w_uk = w_uk.data;
    p.w_uv = w_uv.data;
    p.out = out.data;
    p.q_nope_stride_h = p.q_rope_stride_h = 192;
    p.q_nope_stride_s = p.q_rope_stride_s = int64_t{heads} * 192;
    p.q_nope_stride_b = p.q_rope_stride_b = n * p.q_nope_stride_s;
    p.c_kv_stride_s = 512;
    p.c_kv_stride_b = int64_t{n} * 512;
    p.k_rope_stride_s = 64;
    p.k_rope_stride_b = int64_t{n} * 64;
    p.w_uk_stride_r = p.w_uv_stride_r = 128;
    p.w_uk_stride_h = p.w_uv_stride_h = 512 * 128;
    p.out_stride_h = 128;
    p.out_stride_s = int64_t{heads} * 128;
    p.out_stride_b = n * p.out_stride_s;
    uint64_t bytes = 0;
    expect(flare_mla_prefill_workspace(&p, &bytes));
    Buffer workspace(bytes);
    p.workspace = workspace.data;
    p.workspace_bytes = bytes;
    char name[128];
    expect(flare_kernel_name(FLARE_OP_MLA_PREFILL, &p, name, sizeof(name)));
    const double us = median_us([&] { expect(flare_mla_prefill(&p)); });

    flare::mla::HeadProduct product{};
    product.a = c.data;
    product.a_stride_s = 512;
    product.b = w_uk.data;
    product.b_stride_h = 512 * 128;
    product.b_stride_r = 128;
    product.c = k.data;
    product.c_stride_h = 192;
    product.c_stride_s = int64_t{heads} * 192;
    product.heads = heads;
    product.k = 512;
    product.n = 128;
    product.batch = 1;
    product.seqlen_q = static_cast<int32_t>(tokens);
    flare::mla::HeadProduct values = product;
    values.b = w_uv.data;
    values.c = v.data;
    values.c_stride_h = 128;
    values.c_stride_s = int64_t{heads} * 128;
    flare_attention_params a;
    std::memset(&a, 0, sizeof(a));
    a.struct_size = sizeof(a);
    a.dtype = FLARE_BF16;
    a.batch = batch;
    a.seqlen_q = a.seqlen_k = n;
    a.heads_q = a.heads_kv = heads;
    a.head_dim_qk = 192;
    a.head_dim_v = 128;
    a.q = q.data;
    a.k = k.data;
    a.v = v.data;
    a.out = out.data;
    a.q_stride_h = a.k_stride_h = 192;
    a.q_stride_s = a.k_stride_s = int64_t{heads} * 192;
    a.q_stride_b = a.k_stride_b = n * a.q_stride_s;
    a.v_stride_h = a.out_stride_h = 128;
    a.v_stride_s = a.out_stride_s = int64_t{heads} * 128;
    a.v_stride_b = a.out_stride_b = n * a.v_stride_s;
    a.mask = p.mask;
    double attention[2] = {0, 0};
    char attention_name[2][128] = {"-", "-"};
    for (int i = 0; i < 2; ++i) {
        a.kernel = i == 0 ? FLARE_KERNEL_AUTO : FLARE_KERNEL_PORTABLE;
        uint64_t attention_bytes = 0;
        if (flare_attention_workspace(&a, &attention_bytes) == FLARE_OK) {
            Buffer attention_workspace(attention_bytes);
            a.workspace = attention_workspace.data;
            a.workspace_bytes = attention_bytes;
            flare_kernel_name(FLARE_OP_ATTENTION_FORWARD, &a, attention_name[i], sizeof(attention_name[i]));
            attention[i] = median_us([&] { expect(flare_attention_forward(&a)); });
        }
    }
    const double project = median_us([&] {
        flare::mla::launch_head_product_sm80(product, nullptr);
        flare::mla::launch_head_product_sm80(values, nullptr);
        copy_rope<<<1024, 256>>>(static_cast<__nv_bfloat16*>(k.data), static_cast<const __nv_bfloat16*>(rope.data), tokens,
                                 heads);
    });
    const double pairs = causal ? 0.5 * n * (n + 1.0) : 1.0 * n * n;
    const double flops = batch * heads * (pairs * 640 + n * 262144.0);
    std::printf(
        "| %-30s | %d, %5d, %3d %s | %8.1f us | %4.0f TFLOP/s | workspace %llu | product %.1f, %s %.1f, %s %.1f us | ratio "
        "%.2f, %.2f |\n",
        name, batch, n, heads, causal ? "causal" : "full", us, flops / us * 1e-6, static_cast<unsigned long long>(bytes),
        project, attention_name[0], attention[0], attention_name[1], attention[1], us / (project + attention[0]),
        attention[1] > 0 ? us / (project + attention[1]) : 0.0);
    std::fflush(stdout);
}

}  // namespace

int main(int argc, char** argv) {
    const int32_t kernel = argc > 1 ? std::atoi(argv[1]) : FLARE_KERNEL_PORTABLE;
    const DecodeRow rows[] = {
        {128, 1, 16, 4096, 64, false, false, 0},  {128, 1, 16, 4096, 64, false, false, 2},
        {128, 1, 16, 4096, 64, false, false, 4},  {128, 1, 16, 4096, 1, false, false, 0},
        {128, 1, 16, 4096, 0, false, false, 0},   {128, 1, 32, 4096, 64, false, false, 0},
        {128, 1, 64, 4096, 64, false, false, 0},  {128, 1, 128, 4096, 64, false, false, 0},
        {128, 2, 128, 4096, 64, false, false, 0}, {1, 1, 16, 131072, 64, false, false, 0},
        {1, 1, 128, 32768, 64, false, false, 0},  {128, 1, 16, 4096, 64, true, false, 0},
        {128, 1, 128, 4096, 64, true, false, 0},  {128, 1, 16, 4096, 64, false, true, 0},
        {128, 1, 128, 4096, 64, false, true, 0},
    };
    decode(kernel, rows[0]);
    for (const DecodeRow& row : rows) {
        decode(kernel, row);
    }
    prefill(kernel, 1, 4096, 16, true);
    prefill(kernel, 1, 4096, 16, false);
    prefill(kernel, 1, 8192, 16, true);
    prefill(kernel, 1, 2048, 128, true);
    return 0;
}
