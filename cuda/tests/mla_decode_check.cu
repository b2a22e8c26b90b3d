// MLA decode against float64 on the GPU. nvcc + this file + src/mla/decode_sm90.cu; no library, no Java.
//   nvcc -std=c++17 -O3 -gencode arch=compute_90a,code=sm_90a -Icuda/include -Icuda/src cuda/tests/mla_decode_check.cu
//   \
//       cuda/src/mla/decode_sm90.cu -o mla_decode_check && ./mla_decode_check
// Outputs are poisoned before every run; every unused cache row, page and table entry holds NaN or nonsense; pages are
// shuffled; runs are repeated, the last three from one captured graph, and compared bitwise.
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
    int topk = 0;        // token indices
    int sink = 0;
    int ragged_q = 0;
    int rope_apart = 0;  // q_rope given
    int splits = 0;
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

std::vector<int64_t> make_indices(const Case& c, const std::vector<int>& lens, const std::vector<int64_t>& table,
                                  int64_t table_stride, int num_pages, std::vector<int64_t>& row_of, std::vector<int>& counts,
                                  std::vector<int>& topk_lengths) {
    const int page_size = c.page > 0 ? c.page : c.max_len;
    const int64_t absent[] = {-1, -2147483648ll, int64_t{c.page > 0 ? num_pages : c.batch} * page_size, 2147483647, -123456,
                              c.index64 ? (int64_t{1} << 32) + 3 : 2147480000};
    std::vector<int64_t> indices(int64_t{c.batch} * c.sq * c.topk, -1);
    row_of.assign(indices.size(), -1);
    for (int b = 0; b < c.batch; ++b) {
        for (int t = 0; t < c.sq; ++t) {
            const int request = b * c.sq + t;
            topk_lengths[request] = request % 5 == 4 ? 0 : request % 3 == 0 ? c.topk : static_cast<int>(rng() % (c.topk + 1));
            for (int i = 0; i < c.topk; ++i) {
                const int64_t at = int64_t{request} * c.topk + i;
                if (lens[b] == 0 || rng() % 7 == 0 || request % 11 == 10) {
                    indices[at] = absent[rng() % 6];
                    continue;
                }
                const int key = static_cast<int>(rng() % lens[b]);  // some more than once
                indices[at] = c.page > 0 ? table[b * table_stride + key / c.page] * c.page + key % c.page
                                         : int64_t{b} * c.max_len + key;
                if (i < topk_lengths[request]) {
                    row_of[int64_t{request} * c.topk + counts[request]++] = int64_t{b} * c.max_len + key;
                }
            }
        }
    }
    return indices;
}

template <typename T>
bool run_case(const Case& c, double out_bound, double lse_bound) {
    const int d = c.d_c + c.d_rope;
    const bool paged = c.page > 0;
    const bool sparse = c.topk > 0;
    const std::vector<int> lens = make_lengths(c);
    std::vector<int> tokens(c.batch, c.sq), first(c.batch + 1, 0);
    for (int b = 0; b < c.batch; ++b) {
        if (c.ragged_q && b != 1) {
            tokens[b] = static_cast<int>(rng() % (c.sq + 1));
        }
        first[b + 1] = first[b] + tokens[b];
    }
    const int64_t total_tokens = first[c.batch];
    const int64_t q_rows = total_tokens * c.heads;

    // Dense inputs; the reference reads `keys`.
    const int64_t key_rows = int64_t{c.batch} * c.max_len;
    Buffer q(q_rows * d * sizeof(T));
    Buffer keys(key_rows * d * sizeof(T));
    fill_normal<<<512, 256>>>(q.as<T>(), q_rows * d, rng(), 1.0f);
    fill_normal<<<512, 256>>>(keys.as<T>(), key_rows * d, rng(), 1.0f);

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
    std::vector<int64_t> row_of(key_rows, -1);
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
    scatter_rows<<<static_cast<unsigned>(key_rows), 128>>>(keys.as<T>(), pool.as<T>(), d_row_of.as<int64_t>(), key_rows, d,
                                                           kv_row);

    // Token indices; the reference then reads what they name, request by request.
    const int requests = sparse ? c.batch * c.sq : c.batch;
    std::vector<int> counts(requests, 0), topk_lengths(requests, 0);
    std::vector<int64_t> indices, named;
    if (sparse) {
        indices = make_indices(c, lens, table, table_stride, num_pages, named, counts, topk_lengths);
    }
    Buffer d_named(named.size() * 8), named_keys(named.size() * d * sizeof(T));
    if (sparse) {
        CUDA_CHECK(cudaMemcpy(d_named.data, named.data(), d_named.bytes, cudaMemcpyHostToDevice));
        gather_rows<<<static_cast<unsigned>(named.size()), 128>>>(keys.as<T>(), named_keys.as<T>(), d_named.as<int64_t>(),
                                                                  d);
    }
    const auto upload = [&](const Buffer& to, const auto& from) {
        std::vector<int64_t> wide(from.begin(), from.end());
        std::vector<int32_t> narrow(from.begin(), from.end());
        CUDA_CHECK(cudaMemcpy(to.data, c.index64 ? static_cast<const void*>(wide.data()) : narrow.data(),
                              from.size() * (c.index64 ? 8 : 4), cudaMemcpyHostToDevice));
    };
    Buffer d_lens(c.batch * 8), d_table(table.size() * 8), d_first(first.size() * 8), d_indices(indices.size() * 8),
        d_topk_lengths(topk_lengths.size() * 8), d_counts(requests * 4);
    upload(d_lens, lens);
    upload(d_table, table);
    upload(d_first, first);
    upload(d_indices, indices);
    upload(d_topk_lengths, topk_lengths);
    CUDA_CHECK(cudaMemcpy(d_counts.data, sparse ? counts.data() : lens.data(), requests * 4, cudaMemcpyHostToDevice));

    // q with heads padded apart when loose; its rope part in a tensor of its own when apart.
    const int64_t q_width = c.rope_apart ? c.d_c : d;
    const int64_t q_head = q_width + (c.loose_strides ? 8 : 0);
    const int64_t q_token = c.heads * q_head + (c.loose_strides ? 24 : 0);
    const int64_t rope_head = c.d_rope + 8;
    const int64_t rope_token = c.heads * rope_head + (c.loose_strides ? 8 : 0);
    Buffer q_used(total_tokens * q_token * sizeof(T)), q_rope(total_tokens * rope_token * sizeof(T));
    CUDA_CHECK(cudaMemset(q_used.data, 0xff, q_used.bytes));
    CUDA_CHECK(cudaMemset(q_rope.data, 0xff, q_rope.bytes));
    for (int64_t row = 0; row < total_tokens; ++row) {
        const T* from = q.as<T>() + row * c.heads * d;
        CUDA_CHECK(cudaMemcpy2DAsync(q_used.as<T>() + row * q_token, q_head * sizeof(T), from, d * sizeof(T),
                                     q_width * sizeof(T), c.heads, cudaMemcpyDeviceToDevice));
        if (c.rope_apart) {
            CUDA_CHECK(cudaMemcpy2DAsync(q_rope.as<T>() + row * rope_token, rope_head * sizeof(T), from + c.d_c, d * sizeof(T),
                                         c.d_rope * sizeof(T), c.heads, cudaMemcpyDeviceToDevice));
        }
    }
    std::vector<float> sinks(c.heads);
    for (int h = 0; h < c.heads; ++h) {
        sinks[h] = h % 7 == 5 ? INFINITY : h % 7 == 6 ? -INFINITY : static_cast<float>(h % 7) - 2.0f;
    }
    Buffer d_sinks(c.heads * 4);
    CUDA_CHECK(cudaMemcpy(d_sinks.data, sinks.data(), c.heads * 4, cudaMemcpyHostToDevice));

    MlaDecodeParams p{};
    Buffer out(q_rows * c.d_c * sizeof(T));
    Buffer lse(q_rows * 4);
    p.q = q_used.data;
    p.q_rope = c.rope_apart ? q_rope.data : nullptr;
    p.kv = pool.data;
    p.out = out.data;
    p.lse = lse.as<float>();
    p.q_stride_h = q_head;
    p.q_stride_s = q_token;
    p.q_stride_b = c.sq * q_token;
    p.q_rope_stride_h = rope_head;
    p.q_rope_stride_s = rope_token;
    p.q_rope_stride_b = c.sq * rope_token;
    p.kv_stride_s = kv_row;
    p.kv_stride_b = page_rows * kv_row;
    p.out_stride_h = c.d_c;
    p.out_stride_s = int64_t{c.heads} * c.d_c;
    p.out_stride_b = c.sq * p.out_stride_s;
    p.lse_stride_h = c.ragged_q ? total_tokens : c.sq;
    p.lse_stride_b = int64_t{c.heads} * c.sq;
    p.dtype = std::is_same_v<T, __half> ? DType::kFp16 : DType::kBf16;
    p.out_dtype = p.dtype;
    p.kv_dtype = p.dtype;
    p.batch = c.batch;
    p.seqlen_q = c.sq;
    p.seqlen_k = c.max_len;
    p.heads = c.heads;
    p.d_c = c.d_c;
    p.d_rope = c.d_rope;
    p.scale = c.scale;
    p.causal = c.causal;
    p.index_is_64 = c.index64;
    p.page_size = paged ? c.page : c.max_len;
    p.num_pages = paged ? num_pages : c.batch;
    if (sparse) {
        p.causal = 0;
        p.indices = d_indices.data;
        p.indices_stride_s = c.topk;
        p.indices_stride_b = int64_t{c.sq} * c.topk;
        p.topk = c.topk;
        p.topk_length = d_topk_lengths.data;
        p.topk_length_stride_b = c.sq;
        p.topk_length_stride_s = 1;
    } else {
        p.seqlens_k = d_lens.data;
        p.block_table = paged ? d_table.data : nullptr;
        p.block_table_stride_b = table_stride;
    }
    p.cu_seqlens_q = c.ragged_q ? d_first.data : nullptr;
    p.total_q = total_tokens;
    p.sink = c.sink ? d_sinks.as<float>() : nullptr;
    p.num_splits = c.splits;
    p.deterministic = c.never_split;
    p.sm_count = sm_count();

    if (const int rc = select_mla_decode_sm90(p)) {
        std::printf("FAIL %-28s refused with %d\n", c.name, rc);
        return false;
    }
    const size_t workspace_bytes = mla_decode_sm90_workspace(p);
    Buffer workspace(workspace_bytes);
    std::vector<uint16_t> got(out.bytes / 2), again(out.bytes / 2);
    std::vector<float> got_lse(q_rows), again_lse(q_rows);
    bool repeatable = true;
    cudaStream_t stream;
    cudaGraph_t graph;
    cudaGraphExec_t replay;
    CUDA_CHECK(cudaStreamCreate(&stream));
    CUDA_CHECK(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal));
    const int captured = launch_mla_decode_sm90(p, workspace.data, workspace_bytes, stream);
    CUDA_CHECK(cudaStreamEndCapture(stream, &graph));
    CUDA_CHECK(cudaGraphInstantiate(&replay, graph, 0));
    for (int run = 0; run < 6; ++run) {
        CUDA_CHECK(cudaMemset(out.data, 0xff, out.bytes));
        CUDA_CHECK(cudaMemset(lse.data, 0xff, lse.bytes));
        if (run < 4) {  // later replays find what the first one left
            CUDA_CHECK(cudaMemset(workspace.data, 0xff, workspace.bytes));
        }
        CUDA_CHECK(cudaDeviceSynchronize());
        const int rc = run < 3 ? launch_mla_decode_sm90(p, workspace.data, workspace_bytes, nullptr) : captured;
        if (rc != 0) {
            std::printf("FAIL %-28s status %d\n", c.name, rc);
            return false;
        }
        if (run >= 3) {
            CUDA_CHECK(cudaGraphLaunch(replay, stream));
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
    CUDA_CHECK(cudaGraphExecDestroy(replay));
    CUDA_CHECK(cudaGraphDestroy(graph));
    CUDA_CHECK(cudaStreamDestroy(stream));

    // Reference rows [token][head], request by request.
    Buffer ref(q_rows * c.d_c * 8), ref_lse(q_rows * 8);
    CUDA_CHECK(cudaFuncSetAttribute(reference<T>, cudaFuncAttributeMaxDynamicSharedMemorySize, 200 * 1024));
    const int longest = sparse ? c.topk : c.max_len;
    const T* list = sparse ? named_keys.as<T>() : keys.as<T>();
    std::vector<int> request_tokens(requests), request_first(requests);
    for (int i = 0; i < requests; ++i) {
        request_tokens[i] = sparse ? 1 : tokens[i];
        request_first[i] = sparse ? i : first[i];
        const int64_t row = int64_t{request_first[i]} * c.heads;
        if (request_tokens[i] > 0) {
            reference<T><<<static_cast<unsigned>(request_tokens[i] * c.heads), 256, longest * sizeof(double)>>>(
                q.as<T>() + row * d, list + int64_t{i} * longest * d, ref.as<double>() + row * c.d_c,
                ref_lse.as<double>() + row, d_counts.as<int>() + i, longest, request_tokens[i], c.heads, c.d_c, d, c.scale, p.causal);
        }
    }
    CUDA_CHECK(cudaDeviceSynchronize());
    std::vector<double> want(q_rows * c.d_c), want_lse(q_rows);
    CUDA_CHECK(cudaMemcpy(want.data(), ref.data, ref.bytes, cudaMemcpyDeviceToHost));
    CUDA_CHECK(cudaMemcpy(want_lse.data(), ref_lse.data, ref_lse.bytes, cudaMemcpyDeviceToHost));
    double diff = 0.0, norm = 0.0, lse_error = 0.0;
    int64_t bad = 0;
    for (int i = 0; i < requests; ++i) {
        for (int t = 0; t < request_tokens[i]; ++t) {
            for (int h = 0; h < c.heads; ++h) {
                const int token = request_first[i] + t;
                const int64_t row = int64_t{token} * c.heads + h;
                double l = want_lse[int64_t{request_first[i]} * c.heads + int64_t{h} * request_tokens[i] + t];
                double factor = 1.0;
                if (c.sink) {
                    const double sink = sinks[h];
                    factor = std::isinf(sink) ? (sink > 0 ? 0.0 : 1.0) : 1.0 / (1.0 + std::exp(sink - l));
                    l = std::isinf(sink) ? (sink > 0 ? sink : l) : std::isinf(l) ? sink : l + std::log1p(std::exp(sink - l));
                }
                for (int j = 0; j < c.d_c; ++j) {
                    T value;
                    std::memcpy(&value, &got[row * c.d_c + j], 2);
                    const double x = static_cast<double>(static_cast<float>(value));
                    const double y = want[row * c.d_c + j] * factor;
                    bad += std::isfinite(x) ? 0 : 1;
                    diff += (x - y) * (x - y);
                    norm += y * y;
                }
                const float g = c.ragged_q ? got_lse[h * total_tokens + token]
                                           : got_lse[token / c.sq * p.lse_stride_b + int64_t{h} * c.sq + token % c.sq];
                if (std::isinf(l) || !std::isfinite(g)) {
                    bad += static_cast<double>(g) == l ? 0 : 1;
                } else {
                    lse_error = std::max(lse_error, std::fabs(g - l));
                }
            }
        }
    }
    const double error = norm > 0.0 ? std::sqrt(diff / norm) : std::sqrt(diff);
    const bool pass = bad == 0 && repeatable && error <= out_bound && lse_error <= lse_bound;
    std::printf("%s %-28s %s B=%d Sq=%d H=%d Sk=%d page=%d  out %.2e  lse %.2e%s%s  %s\n", pass ? "PASS" : "FAIL", c.name,
                std::is_same_v<T, __half> ? "fp16" : "bf16", c.batch, c.sq, c.heads, c.max_len,
                c.page, error, lse_error, bad ? "  not finite or empty rows wrong" : "", repeatable ? "" : "  runs differ",
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
    const auto with = [&](const char* name, int batch, int sq, int heads, int max_len, Lengths lengths, int page,
                          int causal) -> Case& {
        cases.push_back({name, batch, sq, heads, max_len, lengths, page, causal, 512, 64, v3, 0, 0, 0});
        return cases.back();
    };
    for (const int page : {64, 1, 16, 61, 0}) {
        with("sparse", 3, 2, 128, 900, kRagged, page, 0).topk = 256;
    }
    with("sparse_loose_index64", 4, 3, 17, 500, kRagged, 16, 0).topk = 130;
    cases.back().loose_strides = cases.back().index64 = 1;
    with("sparse_2048", 2, 1, 128, 8192, kFull, 64, 0).topk = 2048;
    with("sparse_latent256", 3, 2, 64, 900, kRagged, 64, 0).topk = 130;
    cases.back().d_c = 256;
    with("sparse_sink", 11, 3, 64, 300, kHalfZero, 64, 0).topk = 100;
    cases.back().sink = 1;
    with("sink", 16, 2, 64, 300, kEdges, 64, 1).sink = 1;
    with("sink_split", 1, 1, 128, 20000, kFull, 64, 0).sink = 1;
    with("rope_apart", 6, 2, 64, 900, kRagged, 64, 1).rope_apart = 1;
    with("rope_apart_cluster_loose", 6, 2, 128, 900, kRagged, 64, 1).rope_apart = 1;
    cases.back().loose_strides = 1;
    with("ragged_q", 9, 4, 64, 900, kRagged, 64, 1).ragged_q = 1;
    with("ragged_q_h3", 16, 7, 3, 300, kEdges, 64, 1).ragged_q = 1;
    with("ragged_q_split", 3, 8, 128, 9000, kOneLong, 64, 1).ragged_q = 1;
    with("ragged_q_rope_apart_loose", 9, 4, 20, 900, kRagged, 16, 1).ragged_q = 1;
    cases.back().loose_strides = cases.back().rope_apart = cases.back().index64 = 1;
    with("splits_2", 5, 1, 64, 3000, kRagged, 64, 0).splits = 2;
    with("splits_7_sink", 3, 2, 128, 3000, kRagged, 64, 1).splits = 7;
    cases.back().sink = 1;
    with("splits_300", 2, 1, 16, 3000, kRagged, 64, 0).splits = 300;
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
