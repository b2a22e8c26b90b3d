// Exact probes of wgmma: integer-valued inputs, every accumulator compared with the host product.
//   nvcc -std=c++17 -gencode arch=compute_90a,code=sm_90a -Icuda/src cuda/tests/probe_wgmma.cu -o probe_wgmma
#include <cstdio>
#include <cstdlib>
#include <vector>

#include "ptx/ldst.cuh"
#include "ptx/math.cuh"
#include "ptx/sync.cuh"
#include "ptx/wgmma.cuh"
#include "ptx/mbarrier.cuh"
#include "tile/fragment.cuh"
#include "tile/smem_desc.cuh"

namespace {

using flare::tile::Swizzle;
namespace ptx = flare::ptx;
namespace tile = flare::tile;

#define CHECK(call)                                                                     \
    do {                                                                                \
        const cudaError_t rc_ = (call);                                                 \
        if (rc_ != cudaSuccess) {                                                       \
            std::printf("%s:%d %s\n", __FILE__, __LINE__, cudaGetErrorString(rc_));     \
            std::exit(1);                                                               \
        }                                                                               \
    } while (0)

// d[64][N] = a[64][K] * op(b): K-major b is [N][K], MN-major b is [K][N].
template <typename T, int N, int K, Swizzle S, bool kTransB, bool kRegisterA>
__global__ void __launch_bounds__(128, 1) probe_kernel(const T* a, const T* b, float* d) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
    extern __shared__ __align__(1024) uint8_t smem[];
    constexpr int rows_b = kTransB ? K : N;
    constexpr int cols_b = kTransB ? N : K;
    const uint32_t a_addr = ptx::smem_addr(smem);
    const uint32_t b_addr = a_addr + 64 * ((K * 2 + 127) / 128) * 128;
    for (int i = threadIdx.x; i < 64 * K; i += 128) {
        const uint32_t at = tile::tile_addr<S>(a_addr, 64, i / K, (i % K) / 8 * 16) - a_addr;
        *reinterpret_cast<T*>(smem + at + (i % 8) * 2) = a[i];
    }
    for (int i = threadIdx.x; i < rows_b * cols_b; i += 128) {
        const uint32_t at = tile::tile_addr<S>(b_addr, rows_b, i / cols_b, (i % cols_b) / 8 * 16) - a_addr;
        *reinterpret_cast<T*>(smem + at + (i % 8) * 2) = b[i];
    }
    ptx::fence_proxy_async_smem();
    __syncthreads();
    float acc[N / 2];
    const uint64_t desc_a = tile::make_desc_k<S>(a_addr);
    const uint64_t desc_b = kTransB ? tile::make_desc_mn<S>(b_addr, rows_b) : tile::make_desc_k<S>(b_addr);
    const uint32_t warp = threadIdx.x / 32;
    const uint32_t lane = threadIdx.x % 32;
    uint32_t fa[K / 16][4];
#pragma unroll
    for (int kk = 0; kk < K / 16; ++kk) {
        if constexpr (kRegisterA) {
            const uint32_t row = 16 * warp + lane % 16;
            ptx::ldmatrix_x4(fa[kk], tile::tile_addr<S>(a_addr, 64, row, kk * 32 + (lane / 16) * 16));
        }
    }
    ptx::wgmma_fence();
#pragma unroll
    for (int kk = 0; kk < K / 16; ++kk) {
        const uint32_t step = kTransB ? tile::step_mn<S>(kk) : tile::step_k<S>(kk, rows_b);
        if constexpr (kRegisterA) {
            ptx::wgmma_rs<T, N, kTransB>(acc, fa[kk][0], fa[kk][1], fa[kk][2], fa[kk][3],
                                         tile::advance_desc(desc_b, step), kk > 0);
        } else {
            ptx::wgmma_ss<T, N, 0, kTransB>(acc, tile::advance_desc(desc_a, tile::step_k<S>(kk, 64)),
                                            tile::advance_desc(desc_b, step), kk > 0);
        }
    }
    ptx::wgmma_commit();
    ptx::wgmma_wait<0>();
    ptx::fence_registers(acc);
#pragma unroll
    for (int i = 0; i < N / 2; ++i) {
        d[tile::acc_row(threadIdx.x, i) * N + tile::acc_col(threadIdx.x, i)] = acc[i];
    }
#else
    __trap();
#endif
}

template <typename T, int N, int K, Swizzle S, bool kTransB, bool kRegisterA>
int probe() {
    std::vector<T> a(64 * K), b(N * K);
    std::vector<float> got(64 * N, 1e30f);
    for (T& x : a) {
        x = T(static_cast<float>(std::rand() % 17 - 8));
    }
    for (T& x : b) {
        x = T(static_cast<float>(std::rand() % 17 - 8));
    }
    T *da, *db;
    float* dd;
    CHECK(cudaMalloc(&da, a.size() * sizeof(T)));
    CHECK(cudaMalloc(&db, b.size() * sizeof(T)));
    CHECK(cudaMalloc(&dd, got.size() * sizeof(float)));
    CHECK(cudaMemcpy(da, a.data(), a.size() * sizeof(T), cudaMemcpyHostToDevice));
    CHECK(cudaMemcpy(db, b.data(), b.size() * sizeof(T), cudaMemcpyHostToDevice));
    CHECK(cudaMemset(dd, 0xFF, got.size() * sizeof(float)));
    const auto kernel = probe_kernel<T, N, K, S, kTransB, kRegisterA>;
    CHECK(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, 200 * 1024));
    kernel<<<1, 128, 200 * 1024>>>(da, db, dd);
    CHECK(cudaGetLastError());
    CHECK(cudaMemcpy(got.data(), dd, got.size() * sizeof(float), cudaMemcpyDeviceToHost));
    CHECK(cudaFree(da));
    CHECK(cudaFree(db));
    CHECK(cudaFree(dd));
    int wrong = 0;
    for (int m = 0; m < 64; ++m) {
        for (int n = 0; n < N; ++n) {
            float want = 0;
            for (int k = 0; k < K; ++k) {
                want += static_cast<float>(a[m * K + k]) * static_cast<float>(kTransB ? b[k * N + n] : b[n * K + k]);
            }
            wrong += !(got[m * N + n] == want);
        }
    }
    if (wrong != 0) {
        std::printf("FAIL wgmma N=%d K=%d span=%u trans_b=%d register_a=%d: %d wrong\n", N, K, tile::span_bytes(S), kTransB,
                    kRegisterA, wrong);
    }
    return wrong != 0;
}

template <typename T, int N>
int probe_n() {
    int failures = 0;
    failures += probe<T, N, 128, Swizzle::k128, false, false>();
    failures += probe<T, N, 96, Swizzle::k64, false, true>();
    if constexpr (N % 64 == 0) {
        failures += probe<T, N, 128, Swizzle::k128, true, false>();
        failures += probe<T, N, 80, Swizzle::k128, true, true>();
    }
    if constexpr (N % 32 == 0) {
        failures += probe<T, N, 48, Swizzle::k64, true, true>();
    }
    return failures;
}

template <typename T>
int probe_type() {
    return probe_n<T, 8>() + probe_n<T, 16>() + probe_n<T, 32>() + probe_n<T, 64>() + probe_n<T, 80>() +
           probe_n<T, 96>() + probe_n<T, 112>() + probe_n<T, 128>() + probe_n<T, 176>() + probe_n<T, 192>() +
           probe_n<T, 256>();
}

}  // namespace

int main() {
    const int failures = probe_type<__nv_bfloat16>() + probe_type<__half>();
    std::printf("probe_wgmma: %s\n", failures == 0 ? "PASS" : "FAIL");
    return failures != 0;
}
