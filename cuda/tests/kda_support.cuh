// Inputs, float64 reference and error measures on the GPU, shared by the KDA test and bench.
#pragma once

#include "kda/params.h"

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <string>
#include <vector>

namespace kda_test {

using namespace flare::kda;

inline void check(cudaError_t error, const char* what) {
    if (error != cudaSuccess) {
        std::printf("FAIL %s: %s\n", what, cudaGetErrorString(error));
        std::exit(2);
    }
}

struct Buffer {
    void* data = nullptr;
    size_t bytes = 0;
    Buffer() = default;
    explicit Buffer(size_t size) : bytes(size) { check(cudaMalloc(&data, size > 0 ? size : 16), "cudaMalloc"); }
    ~Buffer() { cudaFree(data); }
    Buffer(const Buffer&) = delete;
    Buffer& operator=(const Buffer&) = delete;
    void poison() { check(cudaMemset(data, 0xff, bytes), "poison"); }
};
using BufferPtr = std::unique_ptr<Buffer>;
inline BufferPtr make_buffer(size_t bytes) {
    return std::make_unique<Buffer>(bytes);
}

inline size_t element_bytes(DType t) {
    return t == DType::kFp32 ? 4 : 2;
}

__device__ inline double read_element(const void* x, int64_t i, DType t) {
    return t == DType::kFp32   ? static_cast<const float*>(x)[i]
           : t == DType::kFp16 ? __half2float(static_cast<const __half*>(x)[i])
                               : __bfloat162float(static_cast<const __nv_bfloat16*>(x)[i]);
}

__device__ inline void write_element(void* x, int64_t i, DType t, float value) {
    if (t == DType::kFp32) {
        static_cast<float*>(x)[i] = value;
    } else if (t == DType::kFp16) {
        static_cast<__half*>(x)[i] = __float2half(value);
    } else {
        static_cast<__nv_bfloat16*>(x)[i] = __float2bfloat16(value);
    }
}

__device__ inline uint32_t hash(uint64_t x) {
    x ^= x >> 33;
    x *= 0xff51afd7ed558ccdull;
    x ^= x >> 33;
    x *= 0xc4ceb9fe1a85ec53ull;
    x ^= x >> 33;
    return static_cast<uint32_t>(x);
}

enum class Draw { kNormal, kUniform, kSharedNormal, kSpikes, kSparse };

// kSharedNormal: the same row for all tokens of a head, plus `spread` * noise; kSpikes: `mean` + `spread` * noise, or
// -1000 with probability 1/4; kSparse: every third row is zeros.
static __global__ void fill_kernel(void* x, DType t, int64_t rows, int64_t heads, int64_t dim, int64_t stride_t,
                                   int64_t stride_h, Draw draw, float mean, float spread, uint64_t seed) {
    for (int64_t i = blockIdx.x * int64_t{blockDim.x} + threadIdx.x; i < rows * heads * dim;
         i += int64_t{gridDim.x} * blockDim.x) {
        const int64_t d = i % dim;
        const int64_t h = i / dim % heads;
        const int64_t row = i / dim / heads;
        const auto uniform = [&](uint64_t key) {
            return (hash(key + seed * 0x9e3779b97f4a7c15ull) + 0.5f) * 2.3283064e-10f;
        };
        const auto normal = [&](uint64_t key) {
            return sqrtf(-2.0f * logf(uniform(2 * key) + 1e-12f)) * cospif(2.0f * uniform(2 * key + 1));
        };
        float value = 0.0f;
        if (draw == Draw::kNormal) {
            value = mean + spread * normal(i);
        } else if (draw == Draw::kUniform) {
            value = mean + spread * uniform(i);
        } else if (draw == Draw::kSharedNormal) {
            value = mean + normal((uint64_t{1} << 50) + h * dim + d) + spread * normal(i);
        } else if (draw == Draw::kSparse) {
            value = row % 3 == 0 ? 0.0f : mean + spread * normal(i);
        } else {
            value = uniform((uint64_t{1} << 51) + i) < 0.25f ? -1000.0f : mean + spread * normal(i);
        }
        write_element(x, row * stride_t + h * stride_h + d, t, value);
    }
}

// One block per (sequence, value head); thread v owns column v of the state in shared memory. Output and final state as
// doubles, dense [rows, HV, V] and [N, HV, V, K].
static __global__ void reference_kernel(const __grid_constant__ KdaParams p, double* out, double* final_state) {
    extern __shared__ double state[];  // [K][V]
    __shared__ double q[128], k[128], decay[128];
    const int dim = p.head_dim_k;  // K = V
    const int v = threadIdx.x;
    const int64_t n = blockIdx.x / p.heads_v;
    const int64_t head = blockIdx.x % p.heads_v;
    const int64_t head_qk = head / (p.heads_v / p.heads_qk);
    const auto index = [&](const void* x, int64_t i) {
        return p.index64 ? static_cast<const int64_t*>(x)[i] : int64_t{static_cast<const int32_t*>(x)[i]};
    };
    const int64_t first = p.cu_seqlens != nullptr ? index(p.cu_seqlens, n) : 0;
    const int64_t tokens = p.cu_seqlens != nullptr ? index(p.cu_seqlens, n + 1) - first : p.seqlen;
    const int64_t batch = p.cu_seqlens != nullptr ? 0 : n;
    const int64_t row_base = p.cu_seqlens != nullptr ? first : n * p.seqlen;
    int64_t slot = p.state_slots != nullptr ? index(p.state_slots, n) : n;
    const bool padding = p.state_slots != nullptr && slot == p.padding_slot;
    for (int c = 0; c < dim; ++c) {
        const int64_t offset = slot * p.initial_stride_n + head * p.initial_stride_h +
                               (p.state_layout == StateLayout::kVK ? v * dim + c : c * dim + v);
        state[c * dim + v] =
            p.initial_state != nullptr && !padding ? read_element(p.initial_state, offset, p.initial_dtype) : 0.0;
    }
    const double a = p.a_log != nullptr ? exp(static_cast<double>(p.a_log[head])) : 1.0;
    for (int64_t t = 0; t < tokens; ++t) {
        const int64_t row = first + t;
        __syncthreads();
        q[v] = read_element(p.q, batch * p.q_stride.batch + row * p.q_stride.token + head_qk * p.q_stride.head + v,
                            p.dtype);
        k[v] = read_element(p.k, batch * p.k_stride.batch + row * p.k_stride.token + head_qk * p.k_stride.head + v,
                            p.dtype);
        double y = read_element(p.g, batch * p.g_stride.batch + row * p.g_stride.token + head * p.g_stride.head + v,
                                p.gate_dtype);
        if (p.gate != Gate::kLog) {
            y += p.dt_bias != nullptr ? p.dt_bias[head * dim + v] : 0.0;
            y = p.gate == Gate::kBounded ? p.lower_bound / (1.0 + exp(-a * y))
                                         : -a * (fmax(y, 0.0) + log1p(exp(-fabs(y))));
        }
        decay[v] = exp(y);
        __syncthreads();
        double norm_q = p.scale;
        double norm_k = 1.0;
        if (p.qk_l2norm != 0) {
            double sum_q = 1e-6, sum_k = 1e-6;
            for (int c = 0; c < dim; ++c) {
                sum_q += q[c] * q[c];
                sum_k += k[c] * k[c];
            }
            norm_q /= sqrt(sum_q);
            norm_k /= sqrt(sum_k);
        }
        double beta = read_element(
            p.beta, batch * p.beta_stride.batch + row * p.beta_stride.token + head * p.beta_stride.head, p.beta_dtype);
        if (p.beta_activation != BetaActivation::kRaw) {
            beta = (p.beta_activation == BetaActivation::kSigmoid2 ? 2.0 : 1.0) / (1.0 + exp(-beta));
        }
        double e =
            read_element(p.v, batch * p.v_stride.batch + row * p.v_stride.token + head * p.v_stride.head + v, p.dtype);
        for (int c = 0; c < dim; ++c) {
            state[c * dim + v] *= decay[c];
            e -= state[c * dim + v] * k[c] * norm_k;
        }
        double o = 0.0;
        for (int c = 0; c < dim; ++c) {
            state[c * dim + v] += beta * norm_k * k[c] * e;
            o += state[c * dim + v] * q[c];
        }
        out[((row_base + t) * p.heads_v + head) * dim + v] = o * norm_q;
    }
    for (int c = 0; c < dim; ++c) {
        final_state[((n * p.heads_v + head) * dim + v) * dim + c] = state[c * dim + v];
    }
}

// sums[0] += |x - ref|^2, sums[1] += |ref|^2, sums[2] += number of non-finite x. x row r, column c at r * stride + c.
static __global__ void error_kernel(const void* x, DType t, const double* ref, int64_t rows, int64_t columns,
                                    int64_t stride, double* sums) {
    double error = 0.0, norm = 0.0, bad = 0.0;
    for (int64_t i = blockIdx.x * int64_t{blockDim.x} + threadIdx.x; i < rows * columns;
         i += int64_t{gridDim.x} * blockDim.x) {
        const double value = read_element(x, i / columns * stride + i % columns, t);
        if (!isfinite(value)) {
            bad += 1.0;
            continue;
        }
        error += (value - ref[i]) * (value - ref[i]);
        norm += ref[i] * ref[i];
    }
    atomicAdd(&sums[0], error);
    atomicAdd(&sums[1], norm);
    atomicAdd(&sums[2], bad);
}

inline double relative_error(const void* x, DType t, const double* ref, int64_t rows, int64_t columns, int64_t stride) {
    Buffer sums(24);
    check(cudaMemset(sums.data, 0, 24), "memset");
    if (rows > 0) {
        error_kernel<<<264, 256>>>(x, t, ref, rows, columns, stride, static_cast<double*>(sums.data));
    }
    double host[3];
    check(cudaMemcpy(host, sums.data, 24, cudaMemcpyDeviceToHost), "error");
    return host[2] > 0.0 ? INFINITY : host[1] > 0.0 ? std::sqrt(host[0] / host[1]) : std::sqrt(host[0]);
}

static __global__ void transpose_kernel(const double* in, double* out, int64_t matrices, int64_t dim) {
    for (int64_t i = blockIdx.x * int64_t{blockDim.x} + threadIdx.x; i < matrices * dim * dim;
         i += int64_t{gridDim.x} * blockDim.x) {
        const int64_t m = i / (dim * dim);
        const int64_t r = i % (dim * dim) / dim;
        const int64_t c = i % dim;
        out[m * dim * dim + c * dim + r] = in[i];
    }
}

struct Case {
    std::string name;
    std::vector<int64_t> lengths;  // of the packed sequences; empty: dense
    int64_t batch = 1, tokens = 256, heads_qk = 2, heads_v = 2;
    DType dtype = DType::kBf16, gate_dtype = DType::kBf16, beta_dtype = DType::kBf16;
    Gate gate = Gate::kBounded;
    BetaActivation beta = BetaActivation::kSigmoid;
    bool l2norm = true, a_log = true, dt_bias = true, index64 = false, deterministic = false;
    float lower_bound = -5.0f;
    Draw draw_q = Draw::kNormal, draw_k = Draw::kNormal, draw_g = Draw::kNormal;
    float mean_qk = 0.0f, spread_q = 1.0f, spread_k = 1.0f, spread_v = 1.0f, mean_g = 0.0f, spread_g = 1.0f, mean_beta = 0.0f,
          spread_beta = 1.0f;
    float mean_a_log = 0.0f, spread_a_log = 1.0f;
    StateLayout layout = StateLayout::kVK;
    DType initial_dtype = DType::kFp32, final_dtype = DType::kFp32;
    bool initial = true, final = true;
    int64_t dim = 128;      // K = V
    int64_t pad = 0;        // extra elements between tokens
    int64_t poisoned = -1;  // packed sequence whose tokens are NaN
    double out_bound = 4.5e-3, state_bound = 3.5e-3;
    uint64_t seed = 1;

    int64_t sequences() const { return lengths.empty() ? batch : static_cast<int64_t>(lengths.size()); }
    int64_t packed_tokens() const {
        int64_t total = 0;
        for (int64_t l : lengths) {
            total += l;
        }
        return lengths.empty() ? tokens : total;
    }
    int64_t rows() const { return lengths.empty() ? batch * tokens : packed_tokens(); }
};

inline constexpr int64_t kSlackRows = 64;  // NaN rows behind every token tensor

// Device tensors of a case; token tensors are followed by NaN rows.
struct Inputs {
    BufferPtr q, k, v, g, beta, out, a_log, dt_bias, initial, final, cu;
    KdaParams p;

    explicit Inputs(const Case& c) {
        const int64_t rows = c.rows();
        std::memset(static_cast<void*>(&p), 0, sizeof(p));
        const auto tensor = [&](BufferPtr& b, DType t, int64_t heads, int64_t dim, Strides& strides, Draw draw,
                                float mean, float spread, uint64_t salt) {
            const int64_t pad = dim > 1 ? c.pad : 0;
            const int64_t stride = heads * dim + pad;
            b = make_buffer(static_cast<size_t>(rows + kSlackRows) * stride * element_bytes(t));
            b->poison();
            if (rows > 0) {
                fill_kernel<<<528, 256>>>(b->data, t, rows, heads, dim, stride, dim, draw, mean, spread,
                                          c.seed * 16 + salt);
            }
            strides = {c.tokens * stride, stride, dim};
            return b->data;
        };
        p.q = tensor(q, c.dtype, c.heads_qk, c.dim, p.q_stride, c.draw_q, c.mean_qk, c.spread_q, 1);
        p.k = tensor(k, c.dtype, c.heads_qk, c.dim, p.k_stride, c.draw_k, c.mean_qk, c.spread_k, 2);
        p.v = tensor(v, c.dtype, c.heads_v, c.dim, p.v_stride, Draw::kNormal, 0.0f, c.spread_v, 3);
        p.g = tensor(g, c.gate_dtype, c.heads_v, c.dim, p.g_stride, c.draw_g, c.mean_g, c.spread_g, 4);
        p.beta = tensor(beta, c.beta_dtype, c.heads_v, 1, p.beta_stride,
                        c.beta == BetaActivation::kRaw ? Draw::kUniform : Draw::kNormal, c.mean_beta, c.spread_beta, 5);
        p.out = tensor(out, c.dtype, c.heads_v, c.dim, p.out_stride, Draw::kNormal, 0.0f, 1.0f, 6);
        const auto vector = [&](BufferPtr& b, int64_t count, float mean, float spread, uint64_t salt) {
            b = make_buffer(static_cast<size_t>(count) * 4);
            fill_kernel<<<64, 256>>>(b->data, DType::kFp32, 1, 1, count, count, count, Draw::kUniform, mean, spread,
                                     c.seed * 16 + salt);
            return static_cast<const float*>(b->data);
        };
        if (c.a_log) {
            p.a_log = vector(a_log, c.heads_v, c.mean_a_log, c.spread_a_log, 7);
        }
        if (c.dt_bias) {
            p.dt_bias = vector(dt_bias, c.heads_v * c.dim, 0.0f, 1.0f, 8);
        }
        const int64_t states = c.sequences() * c.heads_v;
        initial = make_buffer(static_cast<size_t>(states) * c.dim * c.dim * element_bytes(c.initial_dtype));
        fill_kernel<<<264, 256>>>(initial->data, c.initial_dtype, states, 1, c.dim * c.dim, c.dim * c.dim, 0,
                                  Draw::kNormal, 0.0f, 0.3f, c.seed * 16 + 9);
        final = make_buffer(static_cast<size_t>(states) * c.dim * c.dim * element_bytes(c.final_dtype));
        final->poison();
        p.initial_state = c.initial ? initial->data : nullptr;
        p.final_state = c.final ? final->data : nullptr;
        p.initial_stride_n = p.final_stride_n = c.heads_v * c.dim * c.dim;
        p.initial_stride_h = p.final_stride_h = c.dim * c.dim;
        p.initial_dtype = c.initial_dtype;
        p.final_dtype = c.final_dtype;
        p.state_layout = c.layout;
        p.dtype = c.dtype;
        p.gate_dtype = c.gate_dtype;
        p.beta_dtype = c.beta_dtype;
        p.gate = c.gate;
        p.beta_activation = c.beta;
        p.qk_l2norm = c.l2norm ? 1 : 0;
        p.deterministic = c.deterministic ? 1 : 0;
        p.lower_bound = c.lower_bound;
        p.scale = 0.08838834764831845f;
        p.num_sequences = c.sequences();
        p.seqlen = c.packed_tokens();
        p.heads_qk = c.heads_qk;
        p.heads_v = c.heads_v;
        p.head_dim_k = p.head_dim_v = static_cast<int32_t>(c.dim);
        p.index64 = c.index64 ? 1 : 0;
        if (!c.lengths.empty()) {
            std::vector<int64_t> starts{0};
            for (int64_t l : c.lengths) {
                starts.push_back(starts.back() + l);
            }
            const std::vector<int32_t> narrow(starts.begin(), starts.end());
            cu = make_buffer(starts.size() * 8);
            if (c.index64) {
                check(cudaMemcpy(cu->data, starts.data(), starts.size() * 8, cudaMemcpyHostToDevice), "cu_seqlens");
            } else {
                check(cudaMemcpy(cu->data, narrow.data(), narrow.size() * 4, cudaMemcpyHostToDevice), "cu_seqlens");
            }
            p.cu_seqlens = cu->data;
            if (c.poisoned >= 0) {
                const auto spoil = [&](const BufferPtr& b, DType t, const Strides& s) {
                    check(cudaMemset(static_cast<char*>(b->data) + starts[c.poisoned] * s.token * element_bytes(t),
                                     0xff, c.lengths[c.poisoned] * s.token * element_bytes(t)),
                          "spoil");
                };
                spoil(q, c.dtype, p.q_stride);
                spoil(k, c.dtype, p.k_stride);
                spoil(v, c.dtype, p.v_stride);
                spoil(g, c.gate_dtype, p.g_stride);
                spoil(beta, c.beta_dtype, p.beta_stride);
            }
        }
        out->poison();
        check(cudaGetLastError(), "inputs");
    }
};

}  // namespace kda_test
