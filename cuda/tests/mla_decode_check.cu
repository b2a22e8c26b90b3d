// MLA decode against float64 on the GPU. nvcc + this file + src/mla/decode_sm90.cu; no library, no Java.
//   nvcc -std=c++17 -O3 -gencode arch=compute_90a,code=sm_90a -Icuda/include -Icuda/src cuda/tests/mla_decode_check.cu
//   \
//       cuda/src/mla/decode_sm90.cu -o mla_decode_check && ./mla_decode_check
// Outputs are poisoned before every run; every unused cache row, page and table entry holds NaN or nonsense; pages are
// shuffled; runs are repeated and compared bitwise.
#include <algorithm>
#include <cstring>
#include <numeric>

#include "mla_common.cuh"

using namespace flare::mla;
using namespace flare::mla::testing;

namespace {

enum Lengths { kFull, kRagged, kEdges, kHalfZero, kAllZero, kOneLong };

struct Case {
    const char* name;
    int batch, sq, heads, max_len;
    Lengths lengths;
    int page;  // 0: contiguous
    int causal;
    int d_c, d_rope;
    float scale;
    int index64, never_split, loose_strides;
};

std::mt19937 rng(20261130);

std::vector<int> make_lengths(const Case& c) {
    static const int edges[] = {0, 1, 63, 64, 65, 127, 128, 129, 2, 191, 192, 193, 255, 256, 257, 3};
    std::vector<int> lens(c.batch);
    for (int b = 0; b < c.batch; ++b) {
        switch (c.lengths) {
            case kFull:
                lens[b] = c.max_len;
                break;
            case kRagged:
                lens[b] = 1 + static_cast<int>(rng() % c.max_len);
                break;
            case kEdges:
                lens[b] = std::min(c.max_len, edges[b % 16]);
                break;
            case kHalfZero:
                lens[b] = rng() % 2 ? 0 : 1 + static_cast<int>(rng() % c.max_len);
                break;
            case kAllZero:
                lens[b] = 0;
                break;
            case kOneLong:
                lens[b] = b == c.batch / 2 ? c.max_len : 1 + static_cast<int>(rng() % 70);
                break;
        }
    }
    return lens;
}

template <typename T>
bool run_case(const Case& c, double out_bound, double lse_bound) {
    const int d = c.d_c + c.d_rope;
    const bool paged = c.page > 0;
    const std::vector<int> lens = make_lengths(c);
    const int64_t q_rows = int64_t{c.batch} * c.sq * c.heads;

    // Dense inputs.
    Buffer q(q_rows * d * sizeof(T));
    Buffer keys(int64_t{c.batch} * c.max_len * d * sizeof(T));
    fill_normal<<<512, 256>>>(q.as<T>(), q_rows * d, rng(), 1.0f);
    fill_normal<<<512, 256>>>(keys.as<T>(), int64_t{c.batch} * c.max_len * d, rng(), 1.0f);

    // The cache: rows of NaN, used ones scattered to shuffled pages.
    const int64_t kv_row = d + (c.loose_strides ? 16 : 0);
    const int pages_per = paged ? (c.max_len + c.page - 1) / c.page : 0;
    const int num_pages = paged ? c.batch * pages_per + 3 : 0;
    const int64_t page_rows = paged ? c.page + (c.loose_strides ? 1 : 0) : c.max_len;
    const int64_t pool_rows = paged ? num_pages * page_rows : int64_t{c.batch} * c.max_len;
    Buffer pool(pool_rows * kv_row * sizeof(T));
    CUDA_CHECK(cudaMemset(pool.data, 0xff, pool.bytes));
    const int64_t table_stride = pages_per + 2;
    std::vector<int64_t> table(c.batch * table_stride, 2147480000);
    std::vector<int> order(num_pages);
    std::iota(order.begin(), order.end(), 0);
    std::shuffle(order.begin(), order.end(), rng);
    std::vector<int64_t> row_of(int64_t{c.batch} * c.max_len, -1);
    for (int b = 0, next = 0; b < c.batch; ++b) {
        for (int j = 0; j < lens[b]; ++j) {
            if (paged && j % c.page == 0) {
                table[b * table_stride + j / c.page] = order[next++];
            }
            row_of[int64_t{b} * c.max_len + j] =
                paged ? table[b * table_stride + j / c.page] * page_rows + j % c.page : int64_t{b} * c.max_len + j;
        }
    }
    Buffer d_row_of(row_of.size() * 8);
    CUDA_CHECK(cudaMemcpy(d_row_of.data, row_of.data(), d_row_of.bytes, cudaMemcpyHostToDevice));
    scatter_rows<<<static_cast<unsigned>(row_of.size()), 128>>>(keys.as<T>(), pool.as<T>(), d_row_of.as<int64_t>(),
                                                                static_cast<int64_t>(row_of.size()), d, kv_row);
    const std::vector<int64_t> lens64(lens.begin(), lens.end());
    const std::vector<int> table32(table.begin(), table.end());
    Buffer d_lens(c.batch * 4), d_lens64(c.batch * 8), d_table(table.size() * 8);
    CUDA_CHECK(cudaMemcpy(d_lens.data, lens.data(), d_lens.bytes, cudaMemcpyHostToDevice));
    CUDA_CHECK(cudaMemcpy(d_lens64.data, lens64.data(), d_lens64.bytes, cudaMemcpyHostToDevice));
    if (c.index64) {
        CUDA_CHECK(cudaMemcpy(d_table.data, table.data(), table.size() * 8, cudaMemcpyHostToDevice));
    } else {
        CUDA_CHECK(cudaMemcpy(d_table.data, table32.data(), table32.size() * 4, cudaMemcpyHostToDevice));
    }

    // q with heads padded apart when loose.
    const int64_t q_head = d + (c.loose_strides ? 8 : 0);
    const int64_t q_token = c.heads * q_head + (c.loose_strides ? 24 : 0);
    Buffer q_used(c.batch * c.sq * q_token * sizeof(T));
    CUDA_CHECK(cudaMemset(q_used.data, 0xff, q_used.bytes));
    for (int64_t row = 0; row < int64_t{c.batch} * c.sq; ++row) {
        CUDA_CHECK(cudaMemcpy2DAsync(q_used.as<T>() + row * q_token, q_head * sizeof(T), q.as<T>() + row * c.heads * d,
                                     d * sizeof(T), d * sizeof(T), c.heads, cudaMemcpyDeviceToDevice));
    }

    MlaDecodeParams p{};
    Buffer out(q_rows * c.d_c * sizeof(T));
    Buffer lse(q_rows * 4);
    p.q = q_used.data;
    p.kv = pool.data;
    p.out = out.data;
    p.lse = lse.as<float>();
    p.q_stride_h = q_head;
    p.q_stride_s = q_token;
    p.q_stride_b = c.sq * q_token;
    p.kv_stride_s = kv_row;
    p.kv_stride_b = page_rows * kv_row;
    p.out_stride_h = c.d_c;
    p.out_stride_s = int64_t{c.heads} * c.d_c;
    p.out_stride_b = c.sq * p.out_stride_s;
    p.lse_stride_h = c.sq;
    p.lse_stride_b = int64_t{c.heads} * c.sq;
    p.dtype = sizeof(T) == 2 && std::is_same_v<T, __half> ? DType::kFp16 : DType::kBf16;
    p.out_dtype = p.kv_dtype = p.dtype;
    p.batch = c.batch;
    p.seqlen_q = c.sq;
    p.seqlen_k = c.max_len;
    p.heads = c.heads;
    p.d_c = c.d_c;
    p.d_rope = c.d_rope;
    p.scale = c.scale;
    p.causal = c.causal;
    p.seqlens_k = c.index64 ? d_lens64.data : d_lens.data;
    p.block_table = paged ? d_table.data : nullptr;
    p.block_table_stride_b = table_stride;
    p.index_is_64 = c.index64;
    p.page_size = c.page;
    p.num_pages = num_pages;
    p.deterministic = c.never_split;
    p.sm_count = sm_count();

    const size_t workspace_bytes = mla_decode_sm90_workspace(p);
    Buffer workspace(workspace_bytes);
    std::vector<uint16_t> got(out.bytes / 2), again(out.bytes / 2);
    std::vector<float> got_lse(q_rows), again_lse(q_rows);
    bool repeatable = true;
    for (int run = 0; run < 3; ++run) {
        CUDA_CHECK(cudaMemset(out.data, 0xff, out.bytes));
        CUDA_CHECK(cudaMemset(lse.data, 0xff, lse.bytes));
        CUDA_CHECK(cudaMemset(workspace.data, 0xff, workspace.bytes));
        const int rc = launch_mla_decode_sm90(p, workspace.data, workspace_bytes, nullptr);
        if (rc != 0) {
            std::printf("FAIL %-28s status %d\n", c.name, rc);
            return false;
        }
        CUDA_CHECK(cudaDeviceSynchronize());
        CUDA_CHECK(cudaMemcpy(again.data(), out.data, out.bytes, cudaMemcpyDeviceToHost));
        CUDA_CHECK(cudaMemcpy(again_lse.data(), lse.data, lse.bytes, cudaMemcpyDeviceToHost));
        if (run == 0) {
            got = again;
            got_lse = again_lse;
        }
        repeatable = repeatable && got == again && std::memcmp(got_lse.data(), again_lse.data(), lse.bytes) == 0;
    }

    Buffer ref(q_rows * c.d_c * 8), ref_lse(q_rows * 8);
    CUDA_CHECK(cudaFuncSetAttribute(reference<T>, cudaFuncAttributeMaxDynamicSharedMemorySize, 200 * 1024));
    reference<T><<<static_cast<unsigned>(q_rows), 256, c.max_len * sizeof(double)>>>(
        q.as<T>(), keys.as<T>(), ref.as<double>(), ref_lse.as<double>(), d_lens.as<int>(), c.max_len, c.sq, c.heads,
        c.d_c, d, c.scale, c.causal);
    CUDA_CHECK(cudaDeviceSynchronize());
    std::vector<double> want(q_rows * c.d_c), want_lse(q_rows);
    CUDA_CHECK(cudaMemcpy(want.data(), ref.data, ref.bytes, cudaMemcpyDeviceToHost));
    CUDA_CHECK(cudaMemcpy(want_lse.data(), ref_lse.data, ref_lse.bytes, cudaMemcpyDeviceToHost));
    double diff = 0.0, norm = 0.0, lse_error = 0.0;
    int64_t bad = 0;
    for (size_t i = 0; i < want.size(); ++i) {
        T value;
        std::memcpy(&value, &got[i], 2);
        const double x = static_cast<double>(static_cast<float>(value));
        bad += std::isfinite(x) ? 0 : 1;
        diff += (x - want[i]) * (x - want[i]);
        norm += want[i] * want[i];
    }
    for (int64_t i = 0; i < q_rows; ++i) {
        if (std::isinf(want_lse[i]) || !std::isfinite(got_lse[i])) {
            bad += static_cast<double>(got_lse[i]) == want_lse[i] ? 0 : 1;
        } else {
            lse_error = std::max(lse_error, std::fabs(got_lse[i] - want_lse[i]));
        }
    }
    const double error = norm > 0.0 ? std::sqrt(diff / norm) : std::sqrt(diff);
    const bool pass = bad == 0 && repeatable && error <= out_bound && lse_error <= lse_bound;
    std::printf("%s %-28s %s B=%d Sq=%d H=%d Sk=%d page=%d  out %.2e  lse %.2e%s%s  %s\n", pass ? "PASS" : "FAIL",
                c.name, std::is_same_v<T, __half> ? "fp16" : "bf16", c.batch, c.sq, c.heads, c.max_len, c.page, error,
                lse_error, bad ? "  not finite or empty rows wrong" : "", repeatable ? "" : "  runs differ",
                mla_decode_sm90_kernel_name(p));
    return pass;
}

}  // namespace

int main(int argc, char** argv) {
    const float v3 = 0.0721688f;
    std::vector<Case> cases = {
        {"one_block", 1, 1, 64, 64, kFull, 64, 0, 512, 64, v3},
        {"one_key", 2, 1, 64, 1, kFull, 64, 0, 512, 64, v3},
        {"two_blocks", 1, 1, 64, 128, kFull, 64, 0, 512, 64, v3},
        {"three_blocks", 1, 1, 64, 192, kFull, 64, 0, 512, 64, v3},
        {"cluster_short", 2, 1, 128, 140, kFull, 64, 0, 512, 64, v3},
        {"cluster", 3, 1, 128, 1000, kFull, 64, 0, 512, 64, v3},
        {"edges", 16, 1, 64, 300, kEdges, 64, 0, 512, 64, v3},
        {"edges_cluster", 16, 1, 128, 300, kEdges, 64, 0, 512, 64, v3},
        {"edges_causal", 16, 2, 128, 300, kEdges, 64, 1, 512, 64, v3},
        {"edges_causal_sq7", 16, 7, 3, 300, kEdges, 64, 1, 512, 64, v3},
        {"sq8_h1", 6, 8, 1, 140, kRagged, 64, 1, 512, 64, v3},
        {"h1", 2, 1, 1, 4096, kFull, 64, 0, 512, 64, v3},
        {"h3", 6, 4, 3, 140, kRagged, 64, 1, 512, 64, v3},
        {"h16", 64, 1, 16, 2000, kRagged, 64, 0, 512, 64, v3},
        {"h17", 5, 1, 17, 1000, kRagged, 64, 0, 512, 64, v3},
        {"h32", 9, 1, 32, 3000, kRagged, 64, 0, 512, 64, v3},
        {"h63", 6, 2, 63, 140, kRagged, 64, 1, 512, 64, v3},
        {"h64", 64, 1, 64, 2000, kRagged, 64, 0, 512, 64, v3},
        {"h65", 6, 1, 65, 900, kRagged, 64, 0, 512, 64, v3},
        {"h126", 6, 2, 126, 140, kRagged, 64, 1, 512, 64, v3},
        {"h128_sq1", 40, 1, 128, 4096, kRagged, 64, 0, 512, 64, v3},
        {"h128_sq2", 20, 2, 128, 4096, kRagged, 64, 1, 512, 64, v3},
        {"h128_sq4", 6, 4, 128, 2000, kRagged, 64, 1, 512, 64, v3},
        {"h128_sq8", 2, 8, 128, 700, kRagged, 64, 1, 512, 64, v3},
        {"h192_three_tiles", 3, 1, 192, 700, kRagged, 64, 0, 512, 64, v3},
        {"half_zero", 128, 2, 64, 1500, kHalfZero, 64, 1, 512, 64, v3},
        {"all_zero", 7, 2, 64, 100, kAllZero, 64, 1, 512, 64, v3},
        {"one_long", 30, 1, 128, 8192, kOneLong, 64, 0, 512, 64, v3},
        {"one_long_h16", 30, 1, 16, 8192, kOneLong, 64, 0, 512, 64, v3},
        {"split_1", 1, 1, 128, 20000, kFull, 64, 0, 512, 64, v3},
        {"split_1_h16", 1, 1, 16, 20000, kFull, 64, 0, 512, 64, v3},
        {"split_5_causal", 5, 3, 64, 5000, kRagged, 64, 1, 512, 64, v3},
        {"many", 300, 1, 128, 200, kRagged, 64, 0, 512, 64, v3},
        {"many_h8", 1000, 1, 8, 100, kRagged, 64, 0, 512, 64, v3},
        {"contiguous", 5, 1, 128, 1000, kRagged, 0, 0, 512, 64, v3},
        {"contiguous_sq2", 9, 2, 64, 333, kEdges, 0, 1, 512, 64, v3},
        {"page1", 6, 1, 128, 500, kRagged, 1, 0, 512, 64, v3},
        {"page2", 6, 1, 16, 500, kRagged, 2, 0, 512, 64, v3},
        {"page16", 16, 1, 128, 300, kEdges, 16, 0, 512, 64, v3},
        {"page32", 6, 2, 64, 1000, kRagged, 32, 1, 512, 64, v3},
        {"page48", 6, 1, 64, 1000, kRagged, 48, 0, 512, 64, v3},
        {"page61", 6, 1, 64, 1000, kRagged, 61, 0, 512, 64, v3},
        {"page128", 6, 1, 128, 1000, kRagged, 128, 0, 512, 64, v3},
        {"page192_index64", 6, 1, 16, 1000, kRagged, 192, 0, 512, 64, v3, 1},
        {"index64", 16, 1, 64, 300, kEdges, 64, 0, 512, 64, v3, 1},
        {"never_split", 3, 1, 128, 3000, kRagged, 64, 0, 512, 64, v3, 0, 1},
        {"loose_strides", 5, 3, 20, 500, kRagged, 64, 1, 512, 64, v3, 0, 0, 1},
        {"loose_strides_cluster", 5, 2, 64, 500, kRagged, 64, 1, 512, 64, v3, 0, 0, 1},
        {"no_rope", 4, 1, 64, 500, kRagged, 64, 0, 512, 0, 0.0883883f},
        {"latent256", 4, 1, 128, 500, kRagged, 64, 0, 256, 64, v3},
        {"rope32", 4, 1, 128, 500, kRagged, 64, 0, 512, 32, v3},
        {"scale_yarn", 4, 1, 128, 500, kRagged, 64, 0, 512, 64, 0.1352338f},
        {"scale_zero", 4, 1, 64, 500, kRagged, 64, 0, 512, 64, 0.0f},
        {"scale_negative", 4, 1, 64, 500, kRagged, 64, 0, 512, 64, -v3},
        {"scale_large", 4, 1, 128, 500, kRagged, 64, 0, 512, 64, 5.0f},
    };
    int failed = 0;
    int run = 0;
    for (const Case& c : cases) {
        if (argc > 1 && std::string(c.name).find(argv[1]) == std::string::npos) {
            continue;
        }
        // A large scale makes the rounding of P's argument visible in lse: relative to the scores' size.
        const double loose = c.scale > 1.0f ? 20.0 : 1.0;
        failed += run_case<__nv_bfloat16>(c, 6e-3, 2e-3 * loose) ? 0 : 1;
        failed += run_case<__half>(c, 1.5e-3, 1e-3 * loose) ? 0 : 1;
        run += 2;
    }
    std::printf("%d cases, %d failed\n", run, failed);
    return failed == 0 ? 0 : 1;
}
