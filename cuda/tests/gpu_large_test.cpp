// Offsets beyond 2^31 elements: the same call on dense tensors and on the same numbers laid out with huge strides, which must
// give the same bits. Ends with status 77 (skipped) where there is no usable GPU, or none with 100 GB.
#if defined(FLARE_HAVE_CUDA)
#include "gpu_support.h"

#include <functional>
#include <memory>
#include <tuple>
#include <type_traits>

using namespace gpu_test;

namespace {

constexpr int64_t kHuge = (int64_t{1} << 31) + 64;

int64_t product(const std::vector<int64_t>& shape) {
    int64_t n = 1;
    for (const int64_t extent : shape) {
        n *= extent;
    }
    return n;
}

// A device tensor twice: dense, and with strides of the caller's.
class Twice {
  public:
    Twice(int32_t dtype, std::vector<int64_t> shape, std::vector<int64_t> wide)
        : dtype_(dtype), shape_(std::move(shape)), wide_(std::move(wide)), dense_(shape_.size(), 1) {
        int64_t span = 1;
        for (size_t i = shape_.size(); i-- > 0;) {
            dense_[i] = i + 1 == shape_.size() ? 1 : dense_[i + 1] * shape_[i + 1];
            span += (shape_[i] - 1) * wide_[i];
        }
        check_cuda(cudaMalloc(&near_, static_cast<size_t>(product(shape_) * bytes_of(dtype_))), "cudaMalloc");
        check_cuda(cudaMalloc(&far_, static_cast<size_t>(span * bytes_of(dtype_))), "cudaMalloc of a large tensor");
    }
    ~Twice() {
        cudaFree(near_);
        cudaFree(far_);
    }
    Twice(const Twice&) = delete;
    Twice& operator=(const Twice&) = delete;

    Twice& fill(double factor = 1.0) {
        std::vector<unsigned char> host(static_cast<size_t>(product(shape_) * bytes_of(dtype_)));
        for (int64_t i = 0; i < product(shape_); ++i) {
            write_float(host.data(), dtype_, i, static_cast<float>(factor * normal()));
        }
        check_cuda(cudaMemcpy(near_, host.data(), host.size(), cudaMemcpyHostToDevice), "upload");
        copy(near_, dense_, far_, wide_);
        return *this;
    }
    Twice& poison() {
        check_cuda(cudaMemset(near_, 0xff, static_cast<size_t>(product(shape_) * bytes_of(dtype_))), "poison");
        copy(near_, dense_, far_, wide_);
        return *this;
    }
    void* data(bool far) const { return far ? far_ : near_; }
    int64_t stride(bool far, size_t i) const { return far ? wide_[i] : dense_[i]; }
    std::vector<unsigned char> download(bool far) {
        std::vector<unsigned char> host(static_cast<size_t>(product(shape_) * bytes_of(dtype_)));
        if (far) {
            copy(far_, wide_, near_, dense_);
        }
        check_cuda(cudaMemcpy(host.data(), near_, host.size(), cudaMemcpyDeviceToHost), "download");
        return host;
    }

  private:
    void copy(void* from, const std::vector<int64_t>& from_stride, void* to, const std::vector<int64_t>& to_stride) const {
        flare_cast_params p;
        std::memset(&p, 0, sizeof(p));
        p.struct_size = sizeof(p);
        p.src_dtype = p.dst_dtype = dtype_;
        p.rank = static_cast<int32_t>(shape_.size());
        p.src = from;
        p.dst = to;
        for (size_t i = 0; i < shape_.size(); ++i) {
            p.shape[i] = shape_[i];
            p.src_stride[i] = from_stride[i];
            p.dst_stride[i] = to_stride[i];
        }
        report(flare_cast(&p) == FLARE_OK, "flare_cast", last_error());
    }

    int32_t dtype_;
    std::vector<int64_t> shape_, wide_, dense_;
    void* near_ = nullptr;
    void* far_ = nullptr;
};

struct Indices {
    explicit Indices(const std::vector<int64_t>& values) : mirror(FLARE_INT32, static_cast<int64_t>(values.size())) {
        mirror.set_indices(values);
    }
    void* data() { return mirror.on(0); }
    Mirror mirror;
};

// Runs the call dense and wide; `set` points the params at one of both.
template <typename Params>
void compare_both(const std::string& what, int32_t operation, Params& p, int32_t (*call)(const Params*),
                  int32_t (*workspace)(const Params*, uint64_t*), const std::function<void(Params&, bool)>& set,
                  const std::vector<Twice*>& outputs) {
    std::string kernels[2];
    std::vector<std::vector<unsigned char>> results[2];
    for (const bool far : {false, true}) {
        set(p, far);
        const int32_t status = run_gpu(operation, p, call, workspace, &kernels[far]);
        if (status != FLARE_OK) {
            report(false, what, std::string(flare_status_string(status)) + " " + last_error());
            return;
        }
        for (Twice* output : outputs) {
            results[far].push_back(output->download(far));
        }
    }
    report(kernels[0] == kernels[1], what, "dense " + kernels[0] + ", wide " + kernels[1]);
    for (size_t i = 0; i < outputs.size(); ++i) {
        report(results[0][i] == results[1][i], what, kernels[1] + ": output " + std::to_string(i) + " differs");
    }
    std::printf("%s: %s\n", what.c_str(), kernels[1].c_str());
}

enum class Wide { kBatch, kRow, kHead };
const char* name_of(Wide wide) {
    return wide == Wide::kBatch ? "batch" : wide == Wide::kRow ? "row" : "head";
}

// Strides of [B, S, H, D], of which one is so large that offsets exceed 2^31; what lies inside a step of it is dense.
std::vector<int64_t> wide_strides(Wide wide, int64_t batch, int64_t rows, int64_t heads, int64_t dim) {
    const auto step = [](int64_t count) { return kHuge / std::max<int64_t>(count - 1, 1) / 64 * 64 + 64; };
    switch (wide) {
        case Wide::kBatch:
            return {step(batch), heads * dim, dim, 1};
        case Wide::kRow:
            return {heads * dim, step(rows), dim, 1};
        default:
            return {rows * dim, dim, step(heads), 1};
    }
}

void test_attention(Wide wide, int32_t dtype, int32_t kernel, int64_t d, int64_t sq, int64_t sk, bool paged) {
    const int64_t batch = 2, heads = 4, heads_kv = 2, page = 16;
    const int64_t pages = (sk + page - 1) / page * batch;
    const int32_t out_dtype = dtype == FLARE_FP8_E4M3 ? FLARE_BF16 : dtype;
    const int64_t batch_k = paged ? pages : batch, rows_k = paged ? page : sk;
    Twice q(dtype, {batch, sq, heads, d}, wide_strides(wide, batch, sq, heads, d));
    Twice k(dtype, {batch_k, rows_k, heads_kv, d}, wide_strides(wide, batch_k, rows_k, heads_kv, d));
    Twice v(dtype, {batch_k, rows_k, heads_kv, d}, wide_strides(wide, batch_k, rows_k, heads_kv, d));
    Twice out(out_dtype, {batch, sq, heads, d}, wide_strides(wide, batch, sq, heads, d));
    Twice lse(FLARE_FP32, {batch, heads, sq}, {heads * sq, kHuge / heads, 1});
    q.fill(), k.fill(), v.fill();
    std::vector<int64_t> table;
    for (int64_t i = pages; i-- > 0;) {
        table.push_back(i);
    }
    Indices block_table(table), used({sk, sk - 5});
    flare_attention_params p;
    std::memset(&p, 0, sizeof(p));
    p.struct_size = sizeof(p);
    p.kernel = kernel;
    p.dtype = dtype;
    p.batch = batch, p.seqlen_q = sq, p.seqlen_k = sk, p.heads_q = heads, p.heads_kv = heads_kv;
    p.head_dim_qk = p.head_dim_v = d;
    p.mask = FLARE_MASK_CAUSAL;
    if (paged) {
        p.block_table = block_table.data();
        p.block_table_stride_b = pages / batch;
        p.seqused_k = used.data();
        p.page_size = page;
        p.num_pages = pages;
    }
    char what[160];
    std::snprintf(what, sizeof(what), "attention %s D%lld Sq%lld Sk%lld%s kernel %d, wide %s", gpu_test::name_of(dtype),
                  static_cast<long long>(d), static_cast<long long>(sq), static_cast<long long>(sk),
                  paged ? " paged" : "", kernel, name_of(wide));
    compare_both<flare_attention_params>(
        what, FLARE_OP_ATTENTION_FORWARD, p, flare_attention_forward, flare_attention_workspace,
        [&](flare_attention_params& x, bool far) {
            out.poison(), lse.poison();
            x.q = q.data(far), x.k = k.data(far), x.v = v.data(far), x.out = out.data(far);
            x.lse = static_cast<float*>(lse.data(far));
            x.q_stride_b = q.stride(far, 0), x.q_stride_s = q.stride(far, 1), x.q_stride_h = q.stride(far, 2);
            x.k_stride_b = k.stride(far, 0), x.k_stride_s = k.stride(far, 1), x.k_stride_h = k.stride(far, 2);
            x.v_stride_b = v.stride(far, 0), x.v_stride_s = v.stride(far, 1), x.v_stride_h = v.stride(far, 2);
            x.out_stride_b = out.stride(far, 0), x.out_stride_s = out.stride(far, 1), x.out_stride_h = out.stride(far, 2);
            x.lse_stride_b = lse.stride(far, 0), x.lse_stride_h = lse.stride(far, 1);
        },
        {&out, &lse});
}

enum class Cache { kContiguous, kPaged, kSparse };

void test_mla_decode(Wide wide, int32_t kernel, int64_t heads, Cache cache, bool rows656) {
    const int64_t batch = 2, sq = 2, sk = 700, page = 64, topk = 300;
    const int64_t width = rows656 ? 656 : 576;
    const int64_t pages = (sk + page - 1) / page * batch;
    const int64_t batch_k = cache == Cache::kContiguous ? batch : pages, rows_k = cache == Cache::kContiguous ? sk : page;
    const auto step = [](int64_t count) { return (kHuge + 4096) / (count - 1) / 64 * 64 + 64; };
    // As scales and bf16 the bytes of such e4m3 numbers are finite, too.
    const int32_t kv_dtype = rows656 ? FLARE_FP8_E4M3 : FLARE_BF16;
    const std::vector<int64_t> kv_wide = wide == Wide::kBatch ? std::vector<int64_t>{step(batch_k), width, 1}
                                                              : std::vector<int64_t>{width, step(rows_k), 1};
    Twice kv(kv_dtype, {batch_k, rows_k, width}, kv_wide);
    Twice q(FLARE_BF16, {batch, sq, heads, 576}, wide_strides(wide, batch, sq, heads, 576));
    Twice out(FLARE_BF16, {batch, sq, heads, 512}, wide_strides(wide, batch, sq, heads, 512));
    q.fill();
    kv.fill();
    std::vector<int64_t> table, rows;
    for (int64_t i = pages; i-- > 0;) {
        table.push_back(i);
    }
    for (int64_t i = 0; i < batch * sq * topk; ++i) {
        rows.push_back(i % 7 == 6 ? -1 : i * 13 % (pages * page));
    }
    Indices block_table(table), lengths({sk, sk - 33}), indices(rows);
    flare_mla_decode_params p;
    std::memset(&p, 0, sizeof(p));
    p.struct_size = sizeof(p);
    p.kernel = kernel;
    p.dtype = FLARE_BF16;
    p.kv_dtype = rows656 ? FLARE_UINT8 : 0;
    p.mask = FLARE_MASK_CAUSAL;
    p.batch = batch, p.seqlen_q = sq, p.seqlen_k = sk, p.heads = heads, p.d_c = 512, p.d_rope = 64, p.d_nope = 128;
    p.page_size = page, p.num_pages = pages;
    if (cache == Cache::kPaged) {
        p.block_table = block_table.data(), p.block_table_stride_b = pages / batch;
    }
    if (cache == Cache::kSparse) {
        p.indices = indices.data(), p.topk = topk, p.indices_stride_s = topk, p.indices_stride_b = sq * topk;
    } else {
        p.seqlens_k = lengths.data();
    }
    char what[160];
    std::snprintf(what, sizeof(what), "mla_decode H%lld %s%s kernel %d, wide %s", static_cast<long long>(heads),
                  cache == Cache::kPaged    ? "paged"
                  : cache == Cache::kSparse ? "sparse"
                                            : "contiguous",
                  rows656 ? " rows656" : "", kernel, name_of(wide));
    compare_both<flare_mla_decode_params>(
        what, FLARE_OP_MLA_DECODE, p, flare_mla_decode, flare_mla_decode_workspace,
        [&](flare_mla_decode_params& x, bool far) {
            out.poison();
            x.q = q.data(far), x.kv = kv.data(far), x.out = out.data(far);
            x.q_stride_b = q.stride(far, 0), x.q_stride_s = q.stride(far, 1), x.q_stride_h = q.stride(far, 2);
            x.kv_stride_b = kv.stride(far, 0), x.kv_stride_s = kv.stride(far, 1);
            x.out_stride_b = out.stride(far, 0), x.out_stride_s = out.stride(far, 1), x.out_stride_h = out.stride(far, 2);
        },
        {&out});
}

void test_mla_prefill(Wide wide, int32_t kernel, int64_t sq) {
    const int64_t batch = 2, sk = 300, heads = 2;
    Twice q(FLARE_BF16, {batch, sq, heads, 128}, wide_strides(wide, batch, sq, heads, 128));
    Twice q_rope(FLARE_BF16, {batch, sq, heads, 64}, wide_strides(wide, batch, sq, heads, 64));
    Twice out(FLARE_BF16, {batch, sq, heads, 128}, wide_strides(wide, batch, sq, heads, 128));
    const auto latent = [&](int64_t width) {
        return wide == Wide::kBatch ? std::vector<int64_t>{kHuge, width, 1}
                                    : std::vector<int64_t>{width, kHuge / 256 / 64 * 64, 1};
    };
    Twice c_kv(FLARE_BF16, {batch, sk, 512}, latent(512)), k_rope(FLARE_BF16, {batch, sk, 64}, latent(64));
    Twice w_uk(FLARE_BF16, {heads, 512, 128}, {kHuge, 128, 1}), w_uv(FLARE_BF16, {heads, 512, 128}, {kHuge, 128, 1});
    q.fill(), q_rope.fill(), c_kv.fill(), k_rope.fill(), w_uk.fill(0.04), w_uv.fill(0.04);
    flare_mla_prefill_params p;
    std::memset(&p, 0, sizeof(p));
    p.struct_size = sizeof(p);
    p.kernel = kernel;
    p.dtype = FLARE_BF16;
    p.mask = FLARE_MASK_CAUSAL;
    p.batch = batch, p.seqlen_q = sq, p.seqlen_k = sk, p.heads = heads;
    p.d_nope = p.d_v = 128, p.d_rope = 64, p.d_c = 512;
    char what[160];
    std::snprintf(what, sizeof(what), "mla_prefill Sq%lld kernel %d, wide %s", static_cast<long long>(sq), kernel,
                  name_of(wide));
    compare_both<flare_mla_prefill_params>(
        what, FLARE_OP_MLA_PREFILL, p, flare_mla_prefill, flare_mla_prefill_workspace,
        [&](flare_mla_prefill_params& x, bool far) {
            out.poison();
            x.q_nope = q.data(far), x.q_rope = q_rope.data(far), x.c_kv = c_kv.data(far), x.k_rope = k_rope.data(far);
            x.w_uk = w_uk.data(far), x.w_uv = w_uv.data(far), x.out = out.data(far);
            x.q_nope_stride_b = q.stride(far, 0), x.q_nope_stride_s = q.stride(far, 1), x.q_nope_stride_h = q.stride(far, 2);
            x.q_rope_stride_b = q_rope.stride(far, 0), x.q_rope_stride_s = q_rope.stride(far, 1);
            x.q_rope_stride_h = q_rope.stride(far, 2);
            x.c_kv_stride_b = c_kv.stride(far, 0), x.c_kv_stride_s = c_kv.stride(far, 1);
            x.k_rope_stride_b = k_rope.stride(far, 0), x.k_rope_stride_s = k_rope.stride(far, 1);
            x.w_uk_stride_h = w_uk.stride(far, 0), x.w_uk_stride_r = w_uk.stride(far, 1);
            x.w_uv_stride_h = w_uv.stride(far, 0), x.w_uv_stride_r = w_uv.stride(far, 1);
            x.out_stride_b = out.stride(far, 0), x.out_stride_s = out.stride(far, 1), x.out_stride_h = out.stride(far, 2);
        },
        {&out});
}

// Decode: the same tensors, a few tokens, states in a pool.
template <typename Params>
void test_kda(Wide wide, int32_t kernel, int32_t operation, int32_t gate, int64_t tokens, int32_t (*call)(const Params*),
              int32_t (*workspace)(const Params*, uint64_t*)) {
    const int64_t batch = 2, heads = 3, d = 128;
    const std::vector<int64_t> shape{batch, tokens, heads, d}, strides = wide_strides(wide, batch, tokens, heads, d);
    Twice q(FLARE_BF16, shape, strides), k(FLARE_BF16, shape, strides), v(FLARE_BF16, shape, strides);
    Twice g(FLARE_BF16, shape, strides), out(FLARE_BF16, shape, strides);
    Twice beta(FLARE_BF16, {batch, tokens, heads}, {kHuge, heads, 1});
    Twice state(FLARE_FP32, {batch, heads, d * d}, {kHuge, d * d, 1});
    q.fill(), k.fill(), v.fill(), g.fill(), beta.fill();
    Params p;
    std::memset(static_cast<void*>(&p), 0, sizeof(p));
    p.struct_size = sizeof(p);
    p.kernel = kernel;
    p.dtype = FLARE_BF16;
    p.state_layout = FLARE_STATE_VK;
    p.gate = gate;
    p.lower_bound = -5.0f;
    p.beta_activation = FLARE_BETA_SIGMOID;
    p.qk_l2norm = 1;
    p.batch = batch, p.seqlen = tokens, p.heads_qk = p.heads_v = heads, p.head_dim_k = p.head_dim_v = d;
    char what[160];
    std::snprintf(what, sizeof(what), "%s gate %d kernel %d, wide %s",
                  operation == FLARE_OP_KDA_FORWARD ? "kda_forward" : "kda_decode", gate, kernel, name_of(wide));
    compare_both<Params>(
        what, operation, p, call, workspace,
        [&](Params& x, bool far) {
            out.poison();
            x.q = q.data(far), x.k = k.data(far), x.v = v.data(far), x.g = g.data(far), x.beta = beta.data(far);
            x.out = out.data(far);
            for (const auto& [b, t, h, tensor] :
                 {std::make_tuple(&x.q_stride_b, &x.q_stride_t, &x.q_stride_h, &q),
                  std::make_tuple(&x.k_stride_b, &x.k_stride_t, &x.k_stride_h, &k),
                  std::make_tuple(&x.v_stride_b, &x.v_stride_t, &x.v_stride_h, &v),
                  std::make_tuple(&x.g_stride_b, &x.g_stride_t, &x.g_stride_h, &g),
                  std::make_tuple(&x.beta_stride_b, &x.beta_stride_t, &x.beta_stride_h, &beta),
                  std::make_tuple(&x.out_stride_b, &x.out_stride_t, &x.out_stride_h, &out)}) {
                *b = tensor->stride(far, 0), *t = tensor->stride(far, 1), *h = tensor->stride(far, 2);
            }
            if constexpr (std::is_same_v<Params, flare_kda_forward_params>) {
                state.poison();
                x.final_state = state.data(far);
                x.final_state_stride_n = state.stride(far, 0), x.final_state_stride_h = state.stride(far, 1);
            } else {
                random_bits.seed(7);
                state.fill(0.3);
                x.state = state.data(far);
                x.num_slots = batch;
                x.state_stride_n = state.stride(far, 0), x.state_stride_h = state.stride(far, 1);
            }
        },
        {&out, &state});
}

}  // namespace

int main() {
    if (!has_device()) {
        std::printf("gpu_large_test: skipped, no CUDA device here\n");
        return kSkipped;
    }
    size_t free = 0, total = 0;
    check_cuda(cudaMemGetInfo(&free, &total), "cudaMemGetInfo");
    if (free < size_t{100} << 30) {
        std::printf("gpu_large_test: skipped, it wants 100 GB of device memory\n");
        return kSkipped;
    }
    for (const int32_t kernel : {FLARE_KERNEL_AUTO, FLARE_KERNEL_PORTABLE}) {
        for (const Wide wide : {Wide::kBatch, Wide::kRow, Wide::kHead}) {
            for (const int64_t d : {64, 80, 128, 256}) {
                test_attention(wide, FLARE_BF16, kernel, d, 300, 300, false);
            }
            test_attention(wide, FLARE_FP8_E4M3, kernel, 128, 300, 300, false);
            test_attention(wide, FLARE_BF16, kernel, 128, 1, 3000, false);
            test_attention(wide, FLARE_BF16, kernel, 128, 9, 700, true);
            test_attention(wide, FLARE_BF16, kernel, 128, 1, 3000, true);
            test_kda<flare_kda_forward_params>(wide, kernel, FLARE_OP_KDA_FORWARD, FLARE_GATE_BOUNDED, 100, flare_kda_forward,
                                               flare_kda_forward_workspace);
            test_kda<flare_kda_forward_params>(wide, kernel, FLARE_OP_KDA_FORWARD, FLARE_GATE_SOFTPLUS, 100, flare_kda_forward,
                                               flare_kda_forward_workspace);
            test_kda<flare_kda_decode_params>(wide, kernel, FLARE_OP_KDA_DECODE, FLARE_GATE_BOUNDED, 3, flare_kda_decode,
                                              flare_kda_decode_workspace);
            if (wide == Wide::kHead) {
                continue;
            }
            for (const Cache cache : {Cache::kContiguous, Cache::kPaged, Cache::kSparse}) {
                test_mla_decode(wide, kernel, 16, cache, false);
                test_mla_decode(wide, kernel, 128, cache, false);
                test_mla_decode(wide, kernel, 16, cache, true);
            }
            test_mla_prefill(wide, kernel, 300);
            test_mla_prefill(wide, kernel, 3);
        }
    }
    test_attention(Wide::kRow, FLARE_FP32, FLARE_KERNEL_PORTABLE, 64, 200, 200, false);
    test_attention(Wide::kBatch, FLARE_FP32, FLARE_KERNEL_PORTABLE, 64, 200, 200, false);
    return finish("gpu_large_test");
}

#else
#include <cstdio>

int main() {
    std::printf("gpu_large_test: skipped, built without CUDA\n");
    return 77;
}

#endif
