// Exact probes of the PTX vocabulary but wgmma (see probe_wgmma.cu): one small kernel a primitive, results compared bit by bit.
//   nvcc -std=c++17 -gencode arch=compute_90a,code=sm_90a -Icuda/src cuda/tests/probe_ptx.cu -o probe_ptx
#include <cstdio>
#include <cstdlib>
#include <vector>

#include "pipe/ping_pong.cuh"
#include "pipe/ring.cuh"
#include "pipe/scheduler.cuh"
#include "ptx/ldst.cuh"
#include "ptx/math.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/sync.cuh"
#include "ptx/tma.cuh"
#include "tile/smem_layout.cuh"
#include "tile/tensor_map.h"

namespace {

using flare::tile::Swizzle;
namespace pipe = flare::pipe;
namespace ptx = flare::ptx;
namespace tile = flare::tile;

#define CHECK(call)                                                                 \
    do {                                                                            \
        const cudaError_t rc_ = (call);                                             \
        if (rc_ != cudaSuccess) {                                                   \
            std::printf("%s:%d %s\n", __FILE__, __LINE__, cudaGetErrorString(rc_)); \
            std::exit(1);                                                           \
        }                                                                           \
    } while (0)

int failures = 0;

void report(const char* name, int wrong) {
    if (wrong != 0) {
        std::printf("FAIL %s: %d wrong\n", name, wrong);
        ++failures;
    }
}

template <typename T>
struct Buffer {
    T* device;
    size_t count;
    explicit Buffer(size_t n, int fill = 0xFF) : count(n) {
        CHECK(cudaMalloc(&device, n * sizeof(T)));
        CHECK(cudaMemset(device, fill, n * sizeof(T)));
    }
    ~Buffer() { cudaFree(device); }
    void put(const std::vector<T>& host) { CHECK(cudaMemcpy(device, host.data(), count * sizeof(T), cudaMemcpyHostToDevice)); }
    std::vector<T> get() const {
        std::vector<T> host(count);
        CHECK(cudaMemcpy(host.data(), device, count * sizeof(T), cudaMemcpyDeviceToHost));
        return host;
    }
};

// --- TMA: a tensor [batch][rows][heads][d] of 16-bit numbers, boxes of all columns that start before, in and after the rows --------
constexpr int kRows = 20, kHeads = 3, kBatch = 2, kDim = 128, kBoxRows = 24;

bool make_map(CUtensorMap* map, const void* base, int chunks) {
    const int64_t dims[5] = {64, kRows, kDim / 64, kHeads, kBatch};
    const int64_t strides[4] = {kHeads * kDim * 2, 128, kDim * 2, int64_t{kRows} * kHeads * kDim * 2};
    const uint32_t box[5] = {64, kBoxRows, static_cast<uint32_t>(chunks), 1, 1};
    return tile::make_tensor_map(map, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 5, base, dims, strides, box, Swizzle::k128);
}

uint16_t element(int batch, int row, int head, int column) {
    return static_cast<uint16_t>(1 + ((batch * kRows + row) * kHeads + head) * kDim + column);
}

std::vector<uint16_t> whole_tensor() {
    std::vector<uint16_t> x;
    for (int b = 0; b < kBatch; ++b) {
        for (int r = 0; r < kRows; ++r) {
            for (int h = 0; h < kHeads; ++h) {
                for (int c = 0; c < kDim; ++c) {
                    x.push_back(element(b, r, h, c));
                }
            }
        }
    }
    return x;
}

__device__ uint16_t at_tile(const uint8_t* smem, uint32_t base, int row, int column) {
    const uint32_t piece = tile::tile_addr<Swizzle::k128>(base, kBoxRows, row, column / 8 * 16);
    return *reinterpret_cast<const uint16_t*>(smem + (piece - base) + column % 8 * 2);
}

// Two loads after each other on one barrier: both parities.
__global__ void __launch_bounds__(128) tma_load_kernel(const __grid_constant__ CUtensorMap map, int row, int head, int batch,
                                                       uint16_t* out) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
    extern __shared__ __align__(1024) uint8_t smem[];
    __shared__ __align__(8) uint64_t barrier;
    const uint32_t base = ptx::smem_addr(smem);
    const uint32_t bar = ptx::smem_addr(&barrier);
    if (threadIdx.x == 0) {
        ptx::mbarrier_init(bar, 1);
        ptx::fence_mbarrier_init();
    }
    __syncthreads();
    for (int phase = 0; phase < 2; ++phase) {
        if (threadIdx.x == 0) {
            ptx::mbarrier_arrive_expect_tx(bar, kBoxRows * kDim * 2);
            ptx::tma_load_5d(base, &map, bar, 0, row + phase, 0, head, batch, ptx::kL2EvictLast);
        }
        ptx::mbarrier_wait(bar, phase);
        for (int i = threadIdx.x; i < kBoxRows * kDim; i += 128) {
            out[phase * kBoxRows * kDim + i] = at_tile(smem, base, i / kDim, i % kDim);
        }
        ptx::fence_proxy_async_smem();
        __syncthreads();
    }
#else
    __trap();
#endif
}

void tma_load() {
    Buffer<uint16_t> x(size_t{kBatch} * kRows * kHeads * kDim);
    x.put(whole_tensor());
    CUtensorMap map;
    report("tensor map", make_map(&map, x.device, kDim / 64) ? 0 : 1);
    int wrong = 0;
    for (int row : {-5, 0, 7, kRows - 1, kRows + 3}) {
        Buffer<uint16_t> out(2 * kBoxRows * kDim);
        tma_load_kernel<<<1, 128, kBoxRows * kDim * 2 + 1024>>>(map, row, 1, 1, out.device);
        CHECK(cudaGetLastError());
        const std::vector<uint16_t> got = out.get();
        for (int phase = 0; phase < 2; ++phase) {
            for (int i = 0; i < kBoxRows * kDim; ++i) {
                const int r = row + phase + i / kDim;
                const uint16_t want = r < 0 || r >= kRows ? 0 : element(1, r, 1, i % kDim);
                wrong += got[phase * kBoxRows * kDim + i] != want;
            }
        }
    }
    report("tma_load_5d, zero fill, mbarrier parity", wrong);
}

// Each block of a cluster of two loads one 64-column chunk for both.
__global__ void __cluster_dims__(2, 1, 1) __launch_bounds__(128)
    multicast_kernel(const __grid_constant__ CUtensorMap map, uint16_t* out) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
    extern __shared__ __align__(1024) uint8_t smem[];
    __shared__ __align__(8) uint64_t barriers[2];
    const uint32_t base = ptx::smem_addr(smem);
    const uint32_t full = ptx::smem_addr(&barriers[0]);
    const uint32_t empty = ptx::smem_addr(&barriers[1]);
    const uint32_t rank = ptx::cluster_cta_rank();
    if (threadIdx.x == 0) {
        ptx::mbarrier_init(full, 1);
        ptx::mbarrier_init(empty, 2);
        ptx::fence_mbarrier_init();
    }
    ptx::cluster_arrive();
    ptx::cluster_wait();
    for (int phase = 0; phase < 2; ++phase) {
        if (threadIdx.x == 0) {
            ptx::mbarrier_wait(empty, phase ^ 1);
            ptx::mbarrier_arrive_expect_tx(full, kBoxRows * kDim * 2);
            ptx::tma_load_multicast_5d(base + rank * kBoxRows * 128, &map, full, 3, 0, phase, rank, 2, 0, ptx::kL2EvictLast);
        }
        ptx::mbarrier_wait(full, phase);
        for (int i = threadIdx.x; i < kBoxRows * kDim; i += 128) {
            out[(rank * 2 + phase) * kBoxRows * kDim + i] = at_tile(smem, base, i / kDim, i % kDim);
        }
        ptx::fence_proxy_async_smem();
        __syncthreads();
        if (threadIdx.x < 2) {
            ptx::mbarrier_arrive_remote(empty, threadIdx.x);
        }
    }
    ptx::cluster_arrive();
    ptx::cluster_wait();
#else
    __trap();
#endif
}

void tma_multicast() {
    Buffer<uint16_t> x(size_t{kBatch} * kRows * kHeads * kDim);
    x.put(whole_tensor());
    CUtensorMap map;
    make_map(&map, x.device, 1);
    Buffer<uint16_t> out(4 * kBoxRows * kDim);
    multicast_kernel<<<2, 128, kBoxRows * kDim * 2 + 1024>>>(map, out.device);
    CHECK(cudaGetLastError());
    const std::vector<uint16_t> got = out.get();
    int wrong = 0;
    for (int i = 0; i < 4 * kBoxRows * kDim; ++i) {
        const int phase = i / (kBoxRows * kDim) % 2;
        const int row = phase + i / kDim % kBoxRows;
        wrong += got[i] != (row >= kRows ? 0 : element(0, row, 2, i % kDim));
    }
    report("tma_load_multicast_5d, remote arrival", wrong);
}

__global__ void __launch_bounds__(128) tma_store_kernel(const __grid_constant__ CUtensorMap map, int row) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
    extern __shared__ __align__(1024) uint8_t smem[];
    const uint32_t base = ptx::smem_addr(smem);
    for (int i = threadIdx.x; i < kBoxRows * kDim; i += 128) {
        const uint32_t piece = tile::tile_addr<Swizzle::k128>(base, kBoxRows, i / kDim, i % kDim / 8 * 16);
        *reinterpret_cast<uint16_t*>(smem + (piece - base) + i % 8 * 2) = static_cast<uint16_t>(i);
    }
    ptx::fence_proxy_async_smem();
    __syncthreads();
    if (threadIdx.x == 0) {
        ptx::tma_store_5d(&map, base, 0, row, 0, 1, 0);
        ptx::bulk_commit_group();
        ptx::bulk_wait_group<0>();
    }
#else
    __trap();
#endif
}

void tma_store() {
    int wrong = 0;
    for (int row : {0, 9, kRows}) {
        Buffer<uint16_t> x(size_t{kBatch} * kRows * kHeads * kDim);
        CUtensorMap map;
        make_map(&map, x.device, kDim / 64);
        tma_store_kernel<<<1, 128, kBoxRows * kDim * 2 + 1024>>>(map, row);
        CHECK(cudaGetLastError());
        const std::vector<uint16_t> got = x.get();
        for (size_t i = 0; i < got.size(); ++i) {
            const int column = static_cast<int>(i % kDim);
            const int head = static_cast<int>(i / kDim % kHeads);
            const int r = static_cast<int>(i / (kDim * kHeads) % kRows);
            const bool inside = i < got.size() / 2 && head == 1 && r >= row;
            wrong += got[i] != (inside ? static_cast<uint16_t>((r - row) * kDim + column) : 0xFFFF);
        }
    }
    report("tma_store_5d, clipped at the end", wrong);
}

// --- Bulk copies, cp.async, 16-byte access --------------------------------------------------------------------------------------
__global__ void __launch_bounds__(32) copies_kernel(const uint32_t* in, uint32_t* out) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
    __shared__ __align__(128) uint32_t memory[256];
    __shared__ __align__(8) uint64_t barrier;
    const uint32_t base = ptx::smem_addr(memory);
    const uint32_t bar = ptx::smem_addr(&barrier);
    if (threadIdx.x == 0) {
        ptx::mbarrier_init(bar, 1);
        ptx::fence_mbarrier_init();
        ptx::mbarrier_arrive_expect_tx(bar, 512);
        ptx::bulk_load(base, in, 512, bar);
    }
    __syncwarp();
    ptx::mbarrier_wait_sleeping(bar, 0);
    ptx::cp_async_16(base + 512 + threadIdx.x * 16, in + 128 + threadIdx.x * 4, threadIdx.x % 17);
    ptx::cp_async_commit();
    ptx::cp_async_wait<0>();
    __syncwarp();
    uint32_t x[4];
    ptx::ld_shared_v4(x, base + 512 + threadIdx.x * 16);
    x[0] += memory[threadIdx.x * 4];
    ptx::st_shared_v4(base + 512 + threadIdx.x * 16, x);
    ptx::fence_proxy_async_smem();
    __syncwarp();
    if (threadIdx.x == 0) {
        ptx::bulk_store(out, base, 1024);
        ptx::bulk_commit_group();
        ptx::bulk_wait_group<0>();
    }
    __syncwarp();
    const uint32_t tail[4] = {threadIdx.x, 1, 2, 3};
    ptx::st_global_v4(out + 256 + threadIdx.x * 4, tail);
#else
    __trap();
#endif
}

void copies() {
    Buffer<uint32_t> in(256), out(384);
    std::vector<uint32_t> x(256);
    for (uint32_t i = 0; i < 256; ++i) {
        x[i] = 0x01020304u * (i + 1);
    }
    in.put(x);
    copies_kernel<<<1, 32>>>(in.device, out.device);
    CHECK(cudaGetLastError());
    const std::vector<uint32_t> got = out.get();
    int wrong = 0;
    for (uint32_t i = 0; i < 128; ++i) {
        wrong += got[i] != x[i];
        const uint32_t lane = i / 4;
        const int bytes = static_cast<int>(lane % 17) - static_cast<int>(i % 4) * 4;
        uint32_t want = bytes >= 4 ? x[128 + i] : bytes <= 0 ? 0 : x[128 + i] & ((1u << (8 * bytes)) - 1);
        want += i % 4 == 0 ? x[i] : 0;
        wrong += got[128 + i] != want;
        wrong += got[256 + i] != (i % 4 == 0 ? lane : i % 4);
    }
    report("bulk_load, bulk_store, cp_async_16 zero fill, 16-byte access", wrong);
}

// --- 8x8 matrices
// Lane t of a matrix holds row t / 4, columns 2 (t % 4) and the next; .trans swaps row and column.
__global__ void __launch_bounds__(32) matrices_kernel(uint16_t* out) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
    __shared__ __align__(128) uint16_t memory[3][4][64];
    for (int i = threadIdx.x; i < 256; i += 32) {
        memory[0][0][i] = static_cast<uint16_t>(i);
    }
    __syncwarp();
    const uint32_t row = threadIdx.x * 16;  // row t % 8 of matrix t / 8
    uint32_t x[4], y[4], z[2];
    ptx::ldmatrix_x4(x, ptx::smem_addr(memory[0]) + row);
    ptx::ldmatrix_x4_trans(y, ptx::smem_addr(memory[0]) + row);
    ptx::ldmatrix_x2(z, ptx::smem_addr(memory[0]) + row % 256);
    ptx::stmatrix_x4(ptx::smem_addr(memory[1]) + row, y[0], y[1], y[2], y[3]);
    ptx::stmatrix_x4_trans(ptx::smem_addr(memory[2]) + row, x[0], x[1], x[2], x[3]);
    __syncwarp();
    for (int m = 0; m < 4; ++m) {
        const int at = (m * 32 + threadIdx.x) * 2;
        reinterpret_cast<uint32_t*>(out)[at / 2] = x[m];
        reinterpret_cast<uint32_t*>(out + 256)[at / 2] = y[m];
        reinterpret_cast<uint32_t*>(out + 1024)[at / 2] = m < 2 ? z[m] : ptx::movmatrix_trans(x[m]);
    }
    for (int i = threadIdx.x; i < 512; i += 32) {
        out[512 + i] = memory[1][0][i];
    }
#else
    __trap();
#endif
}

void matrices() {
    Buffer<uint16_t> out(1280);
    matrices_kernel<<<1, 32>>>(out.device);
    CHECK(cudaGetLastError());
    const std::vector<uint16_t> got = out.get();
    int wrong[5] = {};
    for (int m = 0; m < 4; ++m) {
        for (int t = 0; t < 32; ++t) {
            for (int e = 0; e < 2; ++e) {
                const int at = (m * 32 + t) * 2 + e;
                const int straight = m * 64 + t / 4 * 8 + t % 4 * 2 + e;
                const int across = m * 64 + (t % 4 * 2 + e) * 8 + t / 4;
                wrong[0] += got[at] != straight;
                wrong[1] += got[256 + at] != across;
                wrong[4] += got[1024 + at] != (m < 2 ? straight : across);
            }
        }
        for (int i = 0; i < 64; ++i) {
            const int across = m * 64 + i % 8 * 8 + i / 8;
            wrong[2] += got[512 + m * 64 + i] != across;
            wrong[3] += got[768 + m * 64 + i] != across;
        }
    }
    report("ldmatrix_x4", wrong[0]);
    report("ldmatrix_x4_trans", wrong[1]);
    report("stmatrix_x4", wrong[2]);
    report("stmatrix_x4_trans", wrong[3]);
    report("ldmatrix_x2, movmatrix_trans", wrong[4]);
}

// --- Barriers, roles
// One producer warp fills a ring of two buffers, two consumer warpgroups take turns: every number arrives once, in
// order, and the turns alternate.
__global__ void __launch_bounds__(384, 1) roles_kernel(int rounds, int* log, int* sums) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
    __shared__ int buffer[2];
    __shared__ int turns;
    __shared__ __align__(8) uint64_t barriers[4];
    const auto full = [&](uint32_t stage) { return ptx::smem_addr(&barriers[stage]); };
    const auto empty = [&](uint32_t stage) { return ptx::smem_addr(&barriers[2 + stage]); };
    if (threadIdx.x == 0) {
        turns = 0;
        for (uint32_t stage = 0; stage < 2; ++stage) {
            ptx::mbarrier_init(full(stage), 1);
            ptx::mbarrier_init(empty(stage), 8);
        }
        ptx::fence_mbarrier_init();
    }
    __syncthreads();
    const uint32_t warp = ptx::uniform_warp_idx();
    if (warp < 4) {
        ptx::setmaxnreg_dec<24>();
        if (warp == 0 && ptx::elect_one()) {
            auto state = pipe::PipeState<2>::producer();
            for (int i = 0; i < rounds; ++i) {
                ptx::mbarrier_wait_sleeping(empty(state.stage), state.phase);
                buffer[state.stage] = i * i + 1;
                ptx::mbarrier_arrive(full(state.stage));
                state.advance();
            }
        }
    } else {
        ptx::setmaxnreg_inc<240>();
        const uint32_t warpgroup = warp / 4 - 1;
        const auto turn = pipe::PingPong<2, 1>::make(warpgroup);
        if (warpgroup == 1) {
            turn.prime();
        }
        auto state = pipe::PipeState<2>::consumer();
        int sum = 0;
        for (int i = 0; i < rounds; ++i) {
            turn.wait_turn();
            ptx::mbarrier_wait(full(state.stage), state.phase);
            sum += buffer[state.stage];
            if (threadIdx.x % 128 == 0) {
                log[turns] = static_cast<int>(warpgroup);
                ++turns;
            }
            turn.pass_turn();
            __syncwarp();
            if (threadIdx.x % 32 == 0) {
                ptx::mbarrier_arrive(empty(state.stage));
            }
            state.advance();
        }
        sums[threadIdx.x - 128] = sum + ptx::uniform(static_cast<int>(warpgroup));
        if (warpgroup == 0) {  // the last hand-over is still pending
            turn.wait_turn();
        }
    }
#else
    __trap();
#endif
}

void roles() {
    constexpr int kRounds = 200;
    Buffer<int> log(2 * kRounds), sums(256);
    roles_kernel<<<1, 384>>>(kRounds, log.device, sums.device);
    CHECK(cudaGetLastError());
    CHECK(cudaDeviceSynchronize());
    int want = 0;
    for (int i = 0; i < kRounds; ++i) {
        want += i * i + 1;
    }
    int wrong = 0;
    const std::vector<int> turns = log.get(), got = sums.get();
    for (int i = 0; i < 2 * kRounds; ++i) {
        wrong += turns[i] != i % 2;
    }
    for (int i = 0; i < 256; ++i) {
        wrong += got[i] != want + i / 128;
    }
    report("setmaxnreg, elect_one, mbarrier ring, named barriers, turns", wrong);
}

// --- Arithmetic
__global__ void arithmetic_kernel(uint32_t* out) {
    out[0] = ptx::pack2<__nv_bfloat16>(1.0f, -2.0f);
    out[1] = ptx::pack2<__half>(1.0f, -2.0f);
    out[2] = ptx::pack4_e4m3(1.0f, -2.0f, 1e9f, 0.0f);
    out[3] = ptx::permute_bytes(0x03020100u, 0x07060504u, 0x6420);
    out[4] = __float_as_uint(ptx::exp2_approx(-INFINITY));
    out[5] = __float_as_uint(ptx::exp2_approx(3.0f));
}

void arithmetic() {
    Buffer<uint32_t> out(6);
    arithmetic_kernel<<<1, 1>>>(out.device);
    CHECK(cudaGetLastError());
    const uint32_t want[6] = {0xC0003F80u, 0xC0003C00u, 0x007EC038u, 0x06040200u, 0, 0x41000000u};
    const std::vector<uint32_t> got = out.get();
    int wrong = 0;
    for (int i = 0; i < 6; ++i) {
        wrong += got[i] != want[i];
    }
    report("pack2, pack4_e4m3, permute_bytes, exp2_approx", wrong);
}

// --- Host: divisions and tile numbers
void divisors() {
    int wrong = 0;
    uint32_t x = 1;
    for (uint32_t divisor : {1u, 2u, 3u, 5u, 7u, 31u, 132u, 1000u, 65537u, 1u << 30}) {
        const pipe::FastDivisor d = pipe::FastDivisor::make(divisor);
        for (int i = 0; i < 2000; ++i) {
            x = x * 1664525u + 1013904223u;
            const uint32_t n = i < 1000 ? static_cast<uint32_t>(i) * (divisor > 1000 ? divisor / 7 : 1) & 0x7fffffffu : x >> 1;
            const uint64_t quotient = ((uint64_t{n} * d.multiplier >> 32) + n) >> d.shift;
            wrong += quotient != n / divisor;
        }
    }
    report("FastDivisor", wrong);
}

}  // namespace

int main() {
    tma_load();
    tma_multicast();
    tma_store();
    copies();
    matrices();
    roles();
    arithmetic();
    divisors();
    std::printf("probe_ptx: %s\n", failures == 0 ? "PASS" : "FAIL");
    return failures != 0;
}
