// MLA prefill on Hopper against float64 on the GPU. No library, no Java:
//   nvcc -std=c++17 -O3 -gencode arch=compute_90a,code=sm_90a -Icuda/include -Icuda/src cuda/tests/mla_prefill_check.cu \
//       cuda/src/mla/prefill_sm90.cu -o mla_prefill_check && ./mla_prefill_check [part of a case's name]
// Inputs are unit normal, weights N(0, 1 / d_c). Outputs are poisoned before every run, rows that belong to no sequence hold
// NaN, runs are repeated and compared bitwise.
#include <algorithm>
#include <cstring>

#include "mla/prefill_sm90.h"
#include "mla_common.cuh"

using namespace flare::mla;
using namespace flare::mla::testing;

namespace {

struct Case {
    const char* name;
    int batch, sq, sk, heads;
    int causal = 1;
    int d_nope = 128, d_v = 128, d_rope = 64, d_c = 512;
    int weight_dc = 0;
    int packed = 0;  // 1: cu_seqlens of both; lengths from the lists below, sq and sk the largest
    int used = 0;    // 1: seqused_k; 2: seqused_q and seqused_k, in 64-bit indices
    int loose = 0;   // strides with gaps
    int row_step = 1, head_step = 1;  // which rows and heads are compared
};

std::mt19937 rng(20261130);

// K and V of one (sequence, head): kv [rows][d_nope + d_v].
template <typename T>
__global__ void project(const T* c, int64_t c_stride, const T* w_uk, const T* w_uv, int64_t stride_k, int64_t stride_v,
                        int weight_dc, double* kv, int rows, int d_nope, int d_v, int d_c) {
    const int row = blockIdx.x;
    const int channel = threadIdx.x;
    if (row >= rows || channel >= d_nope + d_v) {
        return;
    }
    const bool is_k = channel < d_nope;
    const T* w = is_k ? w_uk : w_uv;
    const int64_t stride = is_k ? stride_k : stride_v;
    const int out = is_k ? channel : channel - d_nope;
    double sum = 0.0;
    for (int i = 0; i < d_c; ++i) {
        sum += static_cast<double>(static_cast<float>(c[row * c_stride + i])) *
               static_cast<double>(static_cast<float>(weight_dc ? w[out * stride + i] : w[i * stride + out]));
    }
    kv[int64_t{row} * (d_nope + d_v) + channel] = sum;
}

// Rows 0, row_step, .. of one (sequence, head): out [rows][d_v], lse [rows], in float64.
template <typename T>
__global__ void attend(const T* q_nope, int64_t q_nope_stride, const T* q_rope, int64_t q_rope_stride, const T* k_rope,
                       int64_t k_rope_stride, const double* kv, double* out, double* lse, int row_step, int sq, int sk,
                       int d_nope, int d_v, int d_rope, double scale, int causal) {
    extern __shared__ double scores[];
    __shared__ double reduce[256];
    const int row = blockIdx.x * row_step;
    const int visible = causal ? max(0, min(sk, row + sk - sq + 1)) : sk;
    const int width = d_nope + d_v;
    double top = -INFINITY;
    const int warp = threadIdx.x / 32;
    const int lane = threadIdx.x % 32;
    for (int j = warp; j < visible; j += 8) {
        double dot = 0.0;
        for (int c = lane; c < d_nope; c += 32) {
            dot += static_cast<double>(static_cast<float>(q_nope[row * q_nope_stride + c])) * kv[int64_t{j} * width + c];
        }
        for (int c = lane; c < d_rope; c += 32) {
            dot += static_cast<double>(static_cast<float>(q_rope[row * q_rope_stride + c])) *
                   static_cast<double>(static_cast<float>(k_rope[j * k_rope_stride + c]));
        }
        for (int offset = 16; offset > 0; offset /= 2) {
            dot += __shfl_xor_sync(0xffffffffu, dot, offset);
        }
        if (lane == 0) {
            scores[j] = dot * scale;
        }
        top = fmax(top, dot * scale);
    }
    const auto all = [&](double x, bool max) {
        reduce[threadIdx.x] = x;
        __syncthreads();
        for (int half = 128; half > 0; half /= 2) {
            if (threadIdx.x < half) {
                const double a = reduce[threadIdx.x];
                const double b = reduce[threadIdx.x + half];
                reduce[threadIdx.x] = max ? fmax(a, b) : a + b;
            }
            __syncthreads();
        }
        const double result = reduce[0];
        __syncthreads();
        return result;
    };
    top = all(top, true);
    double sum = 0.0;
    for (int j = threadIdx.x; j < visible; j += 256) {
        scores[j] = exp(scores[j] - top);
        sum += scores[j];
    }
    sum = all(sum, false);
    for (int c = threadIdx.x; c < d_v; c += 256) {
        double acc = 0.0;
        for (int j = 0; j < visible; ++j) {
            acc += scores[j] * kv[int64_t{j} * width + d_nope + c];
        }
        out[int64_t{blockIdx.x} * d_v + c] = sum > 0.0 ? acc / sum : 0.0;
    }
    if (threadIdx.x == 0) {
        lse[blockIdx.x] = sum > 0.0 ? top + log(sum) : -INFINITY;
    }
}

std::vector<int> offsets(const std::vector<int>& lengths) {
    std::vector<int> begin(lengths.size() + 1, 3);  // the first rows belong to nobody
    for (size_t i = 0; i < lengths.size(); ++i) {
        begin[i + 1] = begin[i] + lengths[i];
    }
    return begin;
}

// Device copy, as int32 or int64.
struct Indices {
    Indices(const std::vector<int>& values, bool wide) : buffer(values.size() * 8) {
        std::vector<int64_t> wider(values.begin(), values.end());
        CUDA_CHECK(cudaMemcpy(buffer.data, wide ? static_cast<const void*>(wider.data()) : values.data(),
                              values.size() * (wide ? 8 : 4), cudaMemcpyHostToDevice));
    }
    Buffer buffer;
};

template <typename T>
bool run_case(const Case& c, double out_bound, double lse_bound) {
    // Lengths of each sequence: what is there, and what is in use.
    std::vector<int> len_q(c.batch, c.sq), len_k(c.batch, c.sk);
    if (c.packed) {
        static const int short_q[] = {1, 0, 129, 64, 512, 513, 7, 300};
        static const int short_k[] = {1, 70, 129, 0, 512, 515, 200, 65};
        for (int b = 1; b < c.batch; ++b) {
            len_q[b] = std::min(c.sq, short_q[b % 8]);
            len_k[b] = std::min(c.sk, short_k[b % 8]);
        }
    }
    std::vector<int> used_q = len_q, used_k = len_k;
    if (c.used) {
        for (int b = 0; b < c.batch; ++b) {
            used_k[b] = b % 3 == 1 ? 0 : static_cast<int>(rng() % (len_k[b] + 1));
            used_q[b] = c.used == 2 ? static_cast<int>(rng() % (len_q[b] + 1)) : len_q[b];
        }
    }
    const bool wide = c.used == 2;
    const std::vector<int> begin_q = offsets(len_q), begin_k = offsets(len_k);
    const int gap = c.loose ? 8 : 0;
    const int64_t rows_q = c.packed ? begin_q.back() + 2 : int64_t{c.batch} * c.sq;
    const int64_t rows_k = c.packed ? begin_k.back() + 70 : int64_t{c.batch} * c.sk;

    MlaPrefillParams p{};
    p.batch = c.batch;
    p.seqlen_q = c.sq;
    p.seqlen_k = c.sk;
    p.heads = c.heads;
    p.d_nope = c.d_nope;
    p.d_rope = c.d_rope;
    p.d_c = c.d_c;
    p.d_v = c.d_v;
    p.total_q = rows_q;
    p.total_k = rows_k;
    p.dtype = p.out_dtype = p.latent_dtype = std::is_same_v<T, __half> ? DType::kFp16 : DType::kBf16;
    p.weight_layout = c.weight_dc ? WeightLayout::kDC : WeightLayout::kCD;
    p.scale = static_cast<float>(1.0 / std::sqrt(c.d_nope + c.d_rope));
    p.causal = c.causal;
    p.index_is_64 = wide;
    p.sm_count = sm_count();
    p.q_nope_stride_h = c.d_nope + gap;
    p.q_nope_stride_s = c.heads * p.q_nope_stride_h + gap;
    p.q_nope_stride_b = c.sq * p.q_nope_stride_s;
    p.q_rope_stride_h = c.d_rope + gap;
    p.q_rope_stride_s = c.heads * p.q_rope_stride_h + gap;
    p.q_rope_stride_b = c.sq * p.q_rope_stride_s;
    p.c_kv_stride_s = c.d_c + gap;
    p.c_kv_stride_b = c.sk * p.c_kv_stride_s;
    p.k_rope_stride_s = c.d_rope + gap;
    p.k_rope_stride_b = c.sk * p.k_rope_stride_s;
    p.w_uk_stride_r = (c.weight_dc ? c.d_c : c.d_nope) + gap;
    p.w_uk_stride_h = (c.weight_dc ? c.d_nope : c.d_c) * p.w_uk_stride_r;
    p.w_uv_stride_r = (c.weight_dc ? c.d_c : c.d_v) + gap;
    p.w_uv_stride_h = (c.weight_dc ? c.d_v : c.d_c) * p.w_uv_stride_r;
    p.out_stride_h = c.d_v + gap;
    p.out_stride_s = c.heads * p.out_stride_h;
    p.out_stride_b = c.sq * p.out_stride_s;
    p.lse_stride_h = c.packed ? rows_q : c.sq;
    p.lse_stride_b = int64_t{c.heads} * c.sq;

    Buffer q_nope(rows_q * p.q_nope_stride_s * 2), q_rope(rows_q * p.q_rope_stride_s * 2);
    Buffer c_kv(rows_k * p.c_kv_stride_s * 2), k_rope(rows_k * p.k_rope_stride_s * 2);
    Buffer w_uk(c.heads * p.w_uk_stride_h * 2), w_uv(c.heads * p.w_uv_stride_h * 2);
    Buffer out(rows_q * p.out_stride_s * 2), lse(rows_q * c.heads * 4);
    const auto fill = [&](const Buffer& x, float stddev) {
        fill_normal<<<1024, 256>>>(x.as<T>(), static_cast<int64_t>(x.bytes / 2), rng(), stddev);
    };
    fill(q_nope, 1.0f);
    fill(q_rope, 1.0f);
    fill(c_kv, 1.0f);
    fill(k_rope, 1.0f);
    fill(w_uk, static_cast<float>(1.0 / std::sqrt(c.d_c)));
    fill(w_uv, static_cast<float>(1.0 / std::sqrt(c.d_c)));
    // Key rows that no sequence uses: NaN.
    std::vector<char> in_use(rows_k, 0);
    const auto row_k = [&](int b) { return c.packed ? int64_t{begin_k[b]} : int64_t{b} * c.sk; };
    const auto row_q = [&](int b) { return c.packed ? int64_t{begin_q[b]} : int64_t{b} * c.sq; };
    for (int b = 0; b < c.batch; ++b) {
        std::fill_n(in_use.begin() + row_k(b), used_k[b], 1);
    }
    for (int64_t row = 0; row < rows_k; ++row) {
        if (!in_use[row]) {
            CUDA_CHECK(cudaMemsetAsync(c_kv.as<T>() + row * p.c_kv_stride_s, 0xff, p.c_kv_stride_s * 2));
            CUDA_CHECK(cudaMemsetAsync(k_rope.as<T>() + row * p.k_rope_stride_s, 0xff, p.k_rope_stride_s * 2));
        }
    }
    const Indices cu_q(begin_q, wide), cu_k(begin_k, wide), d_used_q(used_q, wide), d_used_k(used_k, wide);
    p.q_nope = q_nope.data;
    p.q_rope = c.d_rope ? q_rope.data : nullptr;
    p.c_kv = c_kv.data;
    p.k_rope = c.d_rope ? k_rope.data : nullptr;
    p.w_uk = w_uk.data;
    p.w_uv = w_uv.data;
    p.out = out.data;
    p.lse = lse.as<float>();
    p.cu_seqlens_q = c.packed ? cu_q.buffer.data : nullptr;
    p.cu_seqlens_k = c.packed ? cu_k.buffer.data : nullptr;
    p.seqused_q = c.used == 2 ? d_used_q.buffer.data : nullptr;
    p.seqused_k = c.used ? d_used_k.buffer.data : nullptr;

    std::vector<T> got(out.bytes / 2), again(out.bytes / 2);
    std::vector<float> got_lse(lse.bytes / 4), again_lse(lse.bytes / 4);
    bool repeatable = true;
    if (const int rc = select_mla_prefill_sm90(p)) {
        std::printf("FAIL %-28s refused with %d\n", c.name, rc);
        return false;
    }
    for (int run = 0; run < 3; ++run) {
        CUDA_CHECK(cudaMemset(out.data, 0xff, out.bytes));
        CUDA_CHECK(cudaMemset(lse.data, 0xff, lse.bytes));
        if (const int rc = launch_mla_prefill_sm90(p, nullptr, 0, nullptr)) {
            std::printf("FAIL %-28s status %d %s\n", c.name, rc, cudaGetErrorString(cudaGetLastError()));
            return false;
        }
        CUDA_CHECK(cudaDeviceSynchronize());
        CUDA_CHECK(cudaMemcpy(again.data(), out.data, out.bytes, cudaMemcpyDeviceToHost));
        CUDA_CHECK(cudaMemcpy(again_lse.data(), lse.data, lse.bytes, cudaMemcpyDeviceToHost));
        if (run == 0) {
            got = again;
            got_lse = again_lse;
        }
        repeatable = repeatable && std::memcmp(got.data(), again.data(), out.bytes) == 0 &&
                     std::memcmp(got_lse.data(), again_lse.data(), lse.bytes) == 0;
    }

    const int width = c.d_nope + c.d_v;
    Buffer kv(int64_t{std::max(c.sk, 1)} * width * 8), ref(int64_t{c.sq} * c.d_v * 8), ref_lse(int64_t{c.sq} * 8);
    CUDA_CHECK(cudaFuncSetAttribute(attend<T>, cudaFuncAttributeMaxDynamicSharedMemorySize, 200 * 1024));
    double diff = 0.0, norm = 0.0, lse_error = 0.0;
    int64_t bad = 0, written = 0;
    for (int b = 0; b < c.batch; ++b) {
        for (int h = 0; h < c.heads; ++h) {
            const int rows = (used_q[b] + c.row_step - 1) / c.row_step;
            // Rows that belong to no sequence stay as they were.
            for (int row = used_q[b]; row < len_q[b]; ++row) {
                uint16_t bits;
                std::memcpy(&bits, &got[(row_q(b) + row) * p.out_stride_s + h * p.out_stride_h], 2);
                written += bits != 0xffff;
            }
            if (rows == 0 || h % c.head_step != 0) {
                continue;
            }
            if (used_k[b] > 0) {
                project<T><<<used_k[b], 256>>>(c_kv.as<T>() + row_k(b) * p.c_kv_stride_s, p.c_kv_stride_s,
                                               w_uk.as<T>() + h * p.w_uk_stride_h, w_uv.as<T>() + h * p.w_uv_stride_h,
                                               p.w_uk_stride_r, p.w_uv_stride_r, c.weight_dc, kv.as<double>(), used_k[b],
                                               c.d_nope, c.d_v, c.d_c);
            }
            attend<T><<<rows, 256, std::max(c.sk, 1) * 8>>>(
                q_nope.as<T>() + row_q(b) * p.q_nope_stride_s + h * p.q_nope_stride_h, p.q_nope_stride_s,
                q_rope.as<T>() + row_q(b) * p.q_rope_stride_s + h * p.q_rope_stride_h, p.q_rope_stride_s,
                k_rope.as<T>() + row_k(b) * p.k_rope_stride_s, p.k_rope_stride_s, kv.as<double>(), ref.as<double>(),
                ref_lse.as<double>(), c.row_step, used_q[b], used_k[b], c.d_nope, c.d_v, c.d_rope, p.scale, c.causal);
            std::vector<double> want(int64_t{rows} * c.d_v), want_lse(rows);
            CUDA_CHECK(cudaMemcpy(want.data(), ref.data, want.size() * 8, cudaMemcpyDeviceToHost));
            CUDA_CHECK(cudaMemcpy(want_lse.data(), ref_lse.data, want_lse.size() * 8, cudaMemcpyDeviceToHost));
            for (int i = 0; i < rows; ++i) {
                const int64_t row = row_q(b) + int64_t{i} * c.row_step;
                for (int j = 0; j < c.d_v; ++j) {
                    const double x = static_cast<float>(got[row * p.out_stride_s + h * p.out_stride_h + j]);
                    const double y = want[int64_t{i} * c.d_v + j];
                    bad += std::isfinite(x) ? 0 : 1;
                    diff += (x - y) * (x - y);
                    norm += y * y;
                }
                const int64_t local = int64_t{i} * c.row_step;
                const float l = c.packed ? got_lse[h * p.lse_stride_h + row]
                                         : got_lse[b * p.lse_stride_b + h * p.lse_stride_h + local];
                if (std::isinf(want_lse[i]) || !std::isfinite(l)) {
                    bad += static_cast<double>(l) == want_lse[i] ? 0 : 1;
                } else {
                    lse_error = std::max(lse_error, std::fabs(l - want_lse[i]));
                }
            }
        }
    }
    const double error = norm > 0.0 ? std::sqrt(diff / norm) : std::sqrt(diff);
    const bool pass = bad == 0 && written == 0 && repeatable && error <= out_bound && lse_error <= lse_bound;
    std::printf("%s %-24s %s B=%d Sq=%d Sk=%d H=%d  out %.2e  lse %.2e%s%s%s  %s\n", pass ? "PASS" : "FAIL", c.name,
                std::is_same_v<T, __half> ? "fp16" : "bf16", c.batch, c.sq, c.sk, c.heads, error, lse_error,
                bad ? "  not finite or empty rows wrong" : "", written ? "  wrote unused rows" : "",
                repeatable ? "" : "  runs differ", mla_prefill_sm90_kernel_name(p));
    std::fflush(stdout);
    return pass;
}

Case make(const char* name, int batch, int sq, int sk, int heads) {
    Case c{};
    c.name = name;
    c.batch = batch;
    c.sq = sq;
    c.sk = sk;
    c.heads = heads;
    return c;
}

}  // namespace

int main(int argc, char** argv) {
    std::vector<Case> cases;
    const auto add = [&](const char* name, int batch, int sq, int sk, int heads) -> Case& {
        cases.push_back(make(name, batch, sq, sk, heads));
        return cases.back();
    };
    add("one_key", 1, 1, 1, 1);
    add("one_block", 1, 64, 64, 1);
    add("two_blocks", 1, 128, 128, 2);
    add("one_cluster", 1, 512, 512, 1);
    add("full", 1, 512, 512, 2).causal = 0;
    add("dc_weights", 1, 200, 300, 3).weight_dc = 1;
    for (const int n : {1, 7, 63, 65, 127, 129, 170, 171, 172, 511, 513, 1000}) {
        add("square", 2, n, n, 3);
    }
    add("long_keys", 1, 100, 1000, 5);
    add("long_keys_full", 2, 65, 777, 5).causal = 0;
    add("long_queries", 1, 1000, 100, 3);  // 900 rows without a key
    add("long_queries_full", 1, 700, 1, 3).causal = 0;
    add("no_keys", 2, 70, 0, 2).causal = 0;
    add("many_tiles", 3, 600, 600, 47);
    add("many_heads", 1, 129, 257, 128);
    add("no_rope", 1, 300, 300, 4).d_rope = 0;
    add("rope32", 1, 300, 300, 4).d_rope = 32;
    add("latent256", 1, 300, 300, 4).d_c = 256;
    add("latent448_dc", 1, 300, 300, 4).d_c = 448;
    cases.back().weight_dc = 1;
    add("narrow", 1, 300, 300, 4).d_nope = 64;
    cases.back().d_v = 64;
    cases.back().d_c = 256;
    add("narrow_dc", 1, 300, 300, 4).d_nope = 72;
    cases.back().d_v = 104;
    cases.back().weight_dc = 1;
    add("packed", 8, 700, 900, 3).packed = 1;
    add("packed_full", 8, 700, 900, 3).packed = 1;
    cases.back().causal = 0;
    add("packed_many", 40, 1100, 1100, 5).packed = 1;
    cases.back().row_step = 3;
    add("used", 5, 600, 700, 2).used = 1;
    add("used_index64", 6, 600, 700, 2).used = 2;
    add("packed_used_index64", 8, 700, 900, 3).packed = 1;
    cases.back().used = 2;
    add("loose_strides", 3, 300, 300, 3).loose = 1;
    add("loose_packed_dc", 8, 700, 900, 3).loose = 1;
    cases.back().packed = 1;
    cases.back().weight_dc = 1;
    add("n8192", 1, 8192, 8192, 128).row_step = 97;
    cases.back().head_step = 41;
    int failed = 0;
    int run = 0;
    for (const Case& c : cases) {
        if (argc > 1 && std::string(c.name).find(argv[1]) == std::string::npos) {
            continue;
        }
        failed += run_case<__nv_bfloat16>(c, 6e-3, 2e-3) ? 0 : 1;
        failed += run_case<__half>(c, 1.5e-3, 1e-3) ? 0 : 1;
        run += 2;
    }
    std::printf("%d cases, %d failed\n", run, failed);
    return failed == 0 ? 0 : 1;
}
