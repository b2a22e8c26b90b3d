// Shared by the checks and the bench of the Hopper attention kernels: inputs, poison, a reference on the GPU, errors.
// The launcher under test is the library's, or one instance: -DFLARE_VARIANT -DV_D= -DV_DV= -DV_WG= -DV_BN= -DV_STAGES= -DV_SCHEDULE=
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>
#include <cuda_runtime.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <type_traits>
#include <vector>

#include "attention/forward_sm90.h"
#include "attention/params.h"
#include "flare.h"
#ifdef FLARE_VARIANT
#include "attention/launch_sm90.cuh"
#endif

#define CHECK(call)                                                                     \
    do {                                                                                \
        const cudaError_t rc_ = (call);                                                 \
        if (rc_ != cudaSuccess) {                                                       \
            std::printf("%s:%d %s\n", __FILE__, __LINE__, cudaGetErrorString(rc_));     \
            std::exit(1);                                                               \
        }                                                                               \
    } while (0)

namespace attention_test {

using flare::attention::DType;
using flare::attention::FwdParams;
using flare::attention::Strides;

#ifdef FLARE_VARIANT
using namespace flare::attention;
constexpr Sm90Schedule kOverlap = Sm90Schedule::kOverlap, kPingPong = Sm90Schedule::kPingPong;
template <typename T, int D, int Dv, int kConsumers, int kBlockN, int kStages, Sm90Schedule kSchedule>
int32_t launch_variant(const FwdParams& p) {
    if (p.softcap > 0.0f || p.alibi_slopes != nullptr || p.cu_seqlens_q != nullptr || p.cu_seqlens_k != nullptr ||
        p.seqused_q != nullptr || p.seqused_k != nullptr || p.head_dim != D || p.head_dim_v != Dv) {
        return FLARE_UNSUPPORTED_SHAPE;
    }
    return launch_sm90<Sm90Config<T, D, Dv, kConsumers, kBlockN, kStages, kSchedule, 1, 1, false, false>>(p, nullptr);
}
inline int32_t launch(const FwdParams& p) {
    return p.dtype == DType::kBf16 ? launch_variant<__nv_bfloat16, V_D, V_DV, V_WG, V_BN, V_STAGES, V_SCHEDULE>(p)
                                   : launch_variant<__half, V_D, V_DV, V_WG, V_BN, V_STAGES, V_SCHEDULE>(p);
}
#else
inline int32_t launch(const FwdParams& p) {
    const int32_t rc = flare::attention::select_attention_sm90(p);
    return rc != FLARE_OK ? rc : flare::attention::launch_attention_sm90(p, nullptr);
}
#endif

template <typename T>
struct Bits;
template <>
struct Bits<__nv_bfloat16> {
    static __device__ float load(const void* p, int64_t i) { return __bfloat162float(static_cast<const __nv_bfloat16*>(p)[i]); }
    static __device__ void store(void* p, int64_t i, float x) { static_cast<__nv_bfloat16*>(p)[i] = __float2bfloat16(x); }
};
template <>
struct Bits<__half> {
    static __device__ float load(const void* p, int64_t i) { return __half2float(static_cast<const __half*>(p)[i]); }
    static __device__ void store(void* p, int64_t i, float x) { static_cast<__half*>(p)[i] = __float2half(x); }
};

template <>
struct Bits<__nv_fp8_e4m3> {
    static __device__ float load(const void* p, int64_t i) { return static_cast<float>(static_cast<const __nv_fp8_e4m3*>(p)[i]); }
    static __device__ void store(void* p, int64_t i, float x) { static_cast<__nv_fp8_e4m3*>(p)[i] = __nv_fp8_e4m3(x); }
};

template <typename T>
using OutOf = std::conditional_t<std::is_same_v<T, __nv_fp8_e4m3>, __nv_bfloat16, T>;

__device__ inline uint32_t mix(uint64_t x) {
    x ^= x >> 33;
    x *= 0xff51afd7ed558ccdull;
    x ^= x >> 33;
    x *= 0xc4ceb9fe1a85ec53ull;
    x ^= x >> 33;
    return static_cast<uint32_t>(x);
}

// Standard normal by Box-Muller from a hash of the index.
template <typename T>
__global__ void fill_normal(void* p, int64_t count, uint64_t seed) {
    for (int64_t i = blockIdx.x * int64_t{blockDim.x} + threadIdx.x; i < count; i += int64_t{gridDim.x} * blockDim.x) {
        const float u = (mix(2 * i + (seed << 40)) + 1.0f) * 2.3283064e-10f;
        const float w = mix(2 * i + 1 + (seed << 40)) * 2.3283064e-10f;
        Bits<T>::store(p, i, sqrtf(-2.0f * logf(u)) * cospif(2.0f * w));
    }
}

// Rows [valid, rows) of every [rows, row_elements] slice become NaN.
template <typename T>
__global__ void poison_rows(void* p, int64_t slices, int64_t rows, int64_t valid, int64_t row_elements) {
    const int64_t count = slices * (rows - valid) * row_elements;
    for (int64_t i = blockIdx.x * int64_t{blockDim.x} + threadIdx.x; i < count; i += int64_t{gridDim.x} * blockDim.x) {
        const int64_t slice = i / ((rows - valid) * row_elements);
        const int64_t rest = i % ((rows - valid) * row_elements);
        Bits<T>::store(p, (slice * rows + valid) * row_elements + rest, NAN);
    }
}

__device__ inline float block_sum(float x) {
    __shared__ float part[4];
    for (int d = 16; d > 0; d /= 2) {
        x += __shfl_xor_sync(~0u, x, d);
    }
    __syncthreads();
    if (threadIdx.x % 32 == 0) {
        part[threadIdx.x / 32] = x;
    }
    __syncthreads();
    return part[0] + part[1] + part[2] + part[3];
}

// One block of 128 threads a (row, head, batch); rows taken every `row_step`. fp32 throughout; scores in shared memory.
// err[0] += |out - ref|^2, err[1] += |ref|^2 (double), err[2] = max |lse - ref|, err[3] = NaN count, rows with mismatched
// infinities of lse counted there too.
template <typename T>
__global__ void __launch_bounds__(128) compare(FwdParams p, int row_step, double* err) {
    extern __shared__ float score[];
    const int row = blockIdx.x * row_step;
    const int head = blockIdx.y;
    const int batch = blockIdx.z;
    int64_t q_row = row, k_row = 0, bq = batch, bk = batch;
    int sq = p.seqlen_q, sk = p.seqlen_k;
    if (p.cu_seqlens_q != nullptr) {
        q_row = p.cu_seqlens_q[batch] + row;
        sq = p.cu_seqlens_q[batch + 1] - p.cu_seqlens_q[batch];
        bq = 0;
    }
    if (p.cu_seqlens_k != nullptr) {
        k_row = p.cu_seqlens_k[batch];
        sk = p.cu_seqlens_k[batch + 1] - p.cu_seqlens_k[batch];
        bk = 0;
    }
    if (p.seqused_q != nullptr) {
        sq = p.seqused_q[batch];
    }
    if (p.seqused_k != nullptr) {
        sk = p.seqused_k[batch];
    }
    if (row >= sq) {
        return;
    }
    const int kv_head = head / (p.heads_q / p.heads_kv);
    const int64_t pos = int64_t{row} + sk - sq;
    const int lo = static_cast<int>(p.window_left < 0 ? 0 : max(int64_t{0}, pos - p.window_left));
    const int hi = static_cast<int>(p.window_right < 0 ? sk - 1 : min(int64_t{sk} - 1, pos + p.window_right));
    const int64_t q_at = bq * p.q_stride.batch + q_row * p.q_stride.row + head * p.q_stride.head;
    const int64_t k_at = bk * p.k_stride.batch + k_row * p.k_stride.row + kv_head * p.k_stride.head;
    const int64_t v_at = bk * p.v_stride.batch + k_row * p.v_stride.row + kv_head * p.v_stride.head;
    const int64_t o_at = bq * p.o_stride.batch + q_row * p.o_stride.row + head * p.o_stride.head;
    const int64_t descale_at = batch * p.descale_batch_stride + kv_head * p.descale_head_stride;
    const auto descale = [&](const float* x) { return x == nullptr ? 1.0f : x[descale_at]; };
    const float score_scale = p.scale * descale(p.q_descale) * descale(p.k_descale);
    __shared__ float query[256];
    for (int d = threadIdx.x; d < p.head_dim; d += 128) {
        query[d] = Bits<T>::load(p.q, q_at + d);
    }
    __syncthreads();
    float best = -INFINITY;
    for (int j = lo + static_cast<int>(threadIdx.x); j <= hi; j += 128) {
        float dot = 0.0f;
        for (int d = 0; d < p.head_dim; ++d) {
            dot += query[d] * Bits<T>::load(p.k, k_at + j * p.k_stride.row + d);
        }
        dot *= score_scale;
        if (p.softcap > 0.0f) {
            dot = p.softcap * tanhf(dot / p.softcap);
        }
        if (p.alibi_slopes != nullptr) {
            dot -= p.alibi_slopes[batch * p.alibi_batch_stride + head] * fabsf(static_cast<float>(pos - j));
        }
        score[j - lo] = dot;
        best = fmaxf(best, dot);
    }
    __shared__ float best_part[128];
    best_part[threadIdx.x] = best;
    __syncthreads();
    for (int i = 0; i < 128; ++i) {
        best = fmaxf(best, best_part[i]);
    }
    const float sink = p.sink != nullptr ? p.sink[head] : -INFINITY;
    best = fmaxf(best, sink);
    float sum = 0.0f;
    for (int j = lo + static_cast<int>(threadIdx.x); j <= hi; j += 128) {
        score[j - lo] = expf(score[j - lo] - best);
        sum += score[j - lo];
    }
    sum = block_sum(sum) + (p.sink != nullptr ? expf(sink - best) : 0.0f);
    for (int d = threadIdx.x; d < p.head_dim_v; d += 128) {
        float ref = 0.0f;
        for (int j = lo; j <= hi; ++j) {
            ref += score[j - lo] * Bits<T>::load(p.v, v_at + j * p.v_stride.row + d);
        }
        ref = sum > 0.0f ? ref / sum * descale(p.v_descale) : 0.0f;
        const float got = Bits<OutOf<T>>::load(p.o, o_at + d);
        if (isnan(got)) {
            atomicAdd(err + 3, 1.0);
        } else {
            atomicAdd(err, static_cast<double>(got - ref) * (got - ref));
            atomicAdd(err + 1, static_cast<double>(ref) * ref);
        }
    }
    if (threadIdx.x == 0 && p.lse != nullptr) {
        const float want = sum > 0.0f ? best + logf(sum) : -INFINITY;
        const float got = p.lse[bq * p.lse_stride.batch + head * p.lse_stride.head + q_row * p.lse_stride.row];
        if (isnan(got) || isinf(want) != isinf(got) || (isinf(want) && want != got)) {
            atomicAdd(err + 3, 1.0);
        } else if (!isinf(want)) {
            atomicMax(reinterpret_cast<unsigned long long*>(err + 2),
                      static_cast<unsigned long long>(__double_as_longlong(fabs(static_cast<double>(got) - want))));
        }
    }
}

struct Error {
    double relative;
    double lse;
    double bad;
};

template <typename T>
Error compare_all(const FwdParams& p, int row_step) {
    static double* err = nullptr;
    if (err == nullptr) {
        CHECK(cudaMalloc(&err, 4 * sizeof(double)));
    }
    CHECK(cudaFuncSetAttribute(compare<T>, cudaFuncAttributeMaxDynamicSharedMemorySize, 200 * 1024));
    CHECK(cudaMemset(err, 0, 4 * sizeof(double)));
    const dim3 grid((p.seqlen_q + row_step - 1) / row_step, p.heads_q, p.batch);
    if (p.seqlen_q > 0) {
        const bool window = p.window_left >= 0 && p.window_right >= 0;
        const int span = window ? std::min(p.seqlen_k, p.window_left + p.window_right + 1) : p.seqlen_k;
        compare<T><<<grid, 128, (span + 1) * sizeof(float)>>>(p, row_step, err);
        CHECK(cudaGetLastError());
    }
    double host[4];
    CHECK(cudaMemcpy(host, err, sizeof(host), cudaMemcpyDeviceToHost));
    return {host[1] > 0 ? std::sqrt(host[0] / host[1]) : std::sqrt(host[0]), host[2], host[3]};
}

// Device memory reused by every case.
inline void* slab(int which, size_t bytes) {
    static void* memory[8] = {};
    static size_t size[8] = {};
    if (size[which] < bytes) {
        CHECK(cudaDeviceSynchronize());
        CHECK(cudaFree(memory[which]));
        CHECK(cudaMalloc(&memory[which], bytes));
        size[which] = bytes;
    }
    return memory[which];
}

inline int sm_count() {
    int count = 0;
    CHECK(cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, 0));
    return count;
}

struct Shape {
    int batch, heads_q, heads_kv, seqlen_q, seqlen_k, head_dim, head_dim_v, left, right;
};

// [B, S, H, D] tensors of fresh random values; `pad` extra rows of NaN follow every sequence of k, v and q.
template <typename T>
FwdParams make_params(const Shape& s, int pad, uint64_t seed) {
    FwdParams p{};
    const int64_t rows_q = s.seqlen_q + pad;
    const int64_t rows_k = s.seqlen_k + pad;
    const int64_t nq = s.batch * rows_q * s.heads_q * s.head_dim;
    const int64_t nk = s.batch * rows_k * s.heads_kv * s.head_dim;
    const int64_t nv = s.batch * rows_k * s.heads_kv * s.head_dim_v;
    const int64_t no = s.batch * rows_q * s.heads_q * s.head_dim_v;
    const int64_t nl = int64_t{s.batch} * s.heads_q * s.seqlen_q;
    void* q = slab(0, nq * sizeof(T) + 16);
    void* k = slab(1, nk * sizeof(T) + 16);
    void* v = slab(2, nv * sizeof(T) + 16);
    p.o = slab(3, no * 2 + 16);
    p.lse = static_cast<float*>(slab(4, nl * 4 + 16));
    fill_normal<T><<<1024, 256>>>(q, nq, 3 * seed);
    fill_normal<T><<<1024, 256>>>(k, nk, 3 * seed + 1);
    fill_normal<T><<<1024, 256>>>(v, nv, 3 * seed + 2);
    if (pad > 0) {
        poison_rows<T><<<256, 256>>>(q, s.batch, rows_q, s.seqlen_q, int64_t{s.heads_q} * s.head_dim);
        poison_rows<T><<<256, 256>>>(k, s.batch, rows_k, s.seqlen_k, int64_t{s.heads_kv} * s.head_dim);
        poison_rows<T><<<256, 256>>>(v, s.batch, rows_k, s.seqlen_k, int64_t{s.heads_kv} * s.head_dim_v);
    }
    CHECK(cudaMemset(p.o, 0xFF, no * 2));
    CHECK(cudaMemset(p.lse, 0xFF, nl * 4));
    p.q = q;
    p.k = k;
    p.v = v;
    p.q_stride = {rows_q * s.heads_q * s.head_dim, int64_t{s.heads_q} * s.head_dim, s.head_dim};
    p.k_stride = {rows_k * s.heads_kv * s.head_dim, int64_t{s.heads_kv} * s.head_dim, s.head_dim};
    p.v_stride = {rows_k * s.heads_kv * s.head_dim_v, int64_t{s.heads_kv} * s.head_dim_v, s.head_dim_v};
    p.o_stride = {rows_q * s.heads_q * s.head_dim_v, int64_t{s.heads_q} * s.head_dim_v, s.head_dim_v};
    p.lse_stride = {int64_t{s.heads_q} * s.seqlen_q, 1, s.seqlen_q};
    p.dtype = std::is_same_v<T, __half> ? DType::kFp16 : std::is_same_v<T, __nv_bfloat16> ? DType::kBf16 : DType::kFp8E4m3;
    p.batch = s.batch;
    p.heads_q = s.heads_q;
    p.heads_kv = s.heads_kv;
    p.seqlen_q = s.seqlen_q;
    p.seqlen_k = s.seqlen_k;
    p.head_dim = s.head_dim;
    p.head_dim_v = s.head_dim_v;
    p.window_left = s.left;
    p.window_right = s.right;
    p.scale = 1.0f / std::sqrt(static_cast<float>(s.head_dim));
    p.sm_count = sm_count();
    return p;
}

}  // namespace attention_test
