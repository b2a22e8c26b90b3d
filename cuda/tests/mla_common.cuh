// Shared by mla_decode_check.cu and mla_bench.cu: device buffers, random inputs, a float64 reference, case set-up.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <random>
#include <string>
#include <vector>

#include "mla/decode_sm90.h"

#define CUDA_CHECK(call)                                                                        \
    do {                                                                                        \
        const cudaError_t rc_ = (call);                                                         \
        if (rc_ != cudaSuccess) {                                                               \
            std::printf("%s:%d: %s: %s\n", __FILE__, __LINE__, #call, cudaGetErrorString(rc_)); \
            std::exit(2);                                                                       \
        }                                                                                       \
    } while (0)

namespace flare::mla::testing {

struct Buffer {
    void* data = nullptr;
    size_t bytes = 0;

    explicit Buffer(size_t n) : bytes(n) { CUDA_CHECK(cudaMalloc(&data, n == 0 ? 16 : n)); }
    ~Buffer() { cudaFree(data); }
    Buffer(const Buffer&) = delete;
    Buffer& operator=(const Buffer&) = delete;

    template <typename T>
    T* as() const {
        return static_cast<T*>(data);
    }
};

__device__ inline uint32_t hash(uint64_t x) {
    x ^= x >> 33;
    x *= 0xff51afd7ed558ccdull;
    x ^= x >> 33;
    x *= 0xc4ceb9fe1a85ec53ull;
    return static_cast<uint32_t>(x >> 32);
}

// Standard normal, by Box-Muller on two hashes of the index.
template <typename T>
__global__ void fill_normal(T* data, int64_t n, uint64_t seed, float stddev) {
    for (int64_t i = blockIdx.x * int64_t{blockDim.x} + threadIdx.x; i < n; i += int64_t{gridDim.x} * blockDim.x) {
        const float u = (hash(seed + 2 * i) + 1.0f) * 2.3283064e-10f;
        const float v = hash(seed + 2 * i + 1) * 2.3283064e-10f;
        data[i] = static_cast<T>(stddev * sqrtf(-2.0f * logf(fminf(u, 1.0f))) * cospif(2.0f * v));
    }
}

// Gives key rows their values; every other row of the pool keeps its NaN.
template <typename T>
__global__ void scatter_rows(const T* dense, T* pool, const int64_t* row_of, int64_t rows, int width, int64_t stride) {
    const int64_t row = blockIdx.x;
    if (row < rows && row_of[row] >= 0) {
        for (int c = threadIdx.x; c < width; c += blockDim.x) {
            pool[row_of[row] * stride + c] = dense[row * width + c];
        }
    }
}

// to[i] = from[row_of[i]], rows of `width` elements; nothing where row_of is negative.
template <typename T>
__global__ void gather_rows(const T* from, T* to, const int64_t* row_of, int width) {
    const int64_t row = row_of[blockIdx.x];
    if (row >= 0) {
        for (int c = threadIdx.x; c < width; c += blockDim.x) {
            to[int64_t{blockIdx.x} * width + c] = from[row * width + c];
        }
    }
}

// One block per (sequence, token, head): softmax in float64 over the visible keys. keys [B][max_len][d].
template <typename T>
__global__ void reference(const T* q, const T* keys, double* out, double* lse, const int* lens, int max_len, int sq,
                          int heads, int d_c, int d, double scale, int causal) {
    extern __shared__ double scores[];
    __shared__ double reduce[256];
    const int head = blockIdx.x % heads;
    const int token = blockIdx.x / heads % sq;
    const int b = blockIdx.x / heads / sq;
    const int visible = max(0, causal ? lens[b] - (sq - 1 - token) : lens[b]);
    const T* row = q + int64_t{blockIdx.x} * d;
    const T* kv = keys + int64_t{b} * max_len * d;
    double top = -INFINITY;
    const int warp = threadIdx.x / 32;
    const int lane = threadIdx.x % 32;
    for (int j = warp; j < visible; j += blockDim.x / 32) {
        double dot = 0.0;
        for (int c = lane; c < d; c += 32) {
            dot += static_cast<double>(static_cast<float>(row[c])) *
                   static_cast<double>(static_cast<float>(kv[int64_t{j} * d + c]));
        }
        for (int offset = 16; offset > 0; offset /= 2) {
            dot += __shfl_xor_sync(0xffffffffu, dot, offset);
        }
        scores[j] = dot * scale;
        top = fmax(top, dot * scale);
    }
    reduce[threadIdx.x] = top;
    __syncthreads();
    for (int half = 128; half > 0; half /= 2) {
        if (threadIdx.x < half) {
            reduce[threadIdx.x] = fmax(reduce[threadIdx.x], reduce[threadIdx.x + half]);
        }
        __syncthreads();
    }
    top = reduce[0];
    __syncthreads();
    double sum = 0.0;
    for (int j = threadIdx.x; j < visible; j += blockDim.x) {
        scores[j] = exp(scores[j] - top);
        sum += scores[j];
    }
    reduce[threadIdx.x] = sum;
    __syncthreads();
    for (int half = 128; half > 0; half /= 2) {
        if (threadIdx.x < half) {
            reduce[threadIdx.x] += reduce[threadIdx.x + half];
        }
        __syncthreads();
    }
    sum = reduce[0];
    for (int c = threadIdx.x; c < d_c; c += blockDim.x) {
        double acc = 0.0;
        for (int j = 0; j < visible; ++j) {
            acc += scores[j] * static_cast<double>(static_cast<float>(kv[int64_t{j} * d + c]));
        }
        out[int64_t{blockIdx.x} * d_c + c] = sum > 0.0 ? acc / sum : 0.0;
    }
    if (threadIdx.x == 0) {
        lse[(int64_t{b} * heads + head) * sq + token] = sum > 0.0 ? top + log(sum) : -INFINITY;
    }
}

inline int sm_count() {
    int device = 0;
    int count = 0;
    CUDA_CHECK(cudaGetDevice(&device));
    CUDA_CHECK(cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, device));
    return count;
}

}  // namespace flare::mla::testing
