// 64 rows x 64 columns of one head a block: four warps of 32 x 32, 32-deep steps, four stages of cp.async.
#include "head_product_sm80.h"

#include <cuda_runtime.h>

#include "../ptx/ldst.cuh"
#include "../ptx/math.cuh"
#include "../ptx/mma_sync.cuh"
#include "absorbed_sm80.cuh"
#include "flare.h"

namespace flare::mla {
namespace {

constexpr int kThreads = 128;
constexpr int kTile = 64;
constexpr int kDepth = 32;
constexpr int kStages = 4;
constexpr int kPitchDepth = kDepth + 8;  // halves; pitches of 80 and 144 bytes are conflict-free for ldmatrix
constexpr int kPitchTile = kTile + 8;

struct Row {
    int64_t batch;
    int64_t token;  // in the sequence, or in the packed tensor
    bool used;
};

__device__ __forceinline__ Row find_row(const HeadProduct& p, int row) {
    Row r{0, row, false};
    int32_t token = row;
    if (p.cu_seqlens_q == nullptr) {
        const int32_t b = row / p.seqlen_q;
        token = row - b * p.seqlen_q;
        r = {b, token, b < p.batch};
    } else {
        // The last sequence that begins at or before the row.
        int32_t low = 0;
        int32_t high = p.batch;
        while (low < high) {
            const int32_t middle = (low + high) / 2;
            if (index_at(p.cu_seqlens_q, p.index_is_64, middle + 1) > row) {
                high = middle;
            } else {
                low = middle + 1;
            }
        }
        r.batch = low;
        const int64_t begin = index_at(p.cu_seqlens_q, p.index_is_64, low < p.batch ? low : 0);
        r.used = low < p.batch && row >= begin;
        token = static_cast<int32_t>(row - begin);
    }
    if (r.used && p.seqused_q != nullptr) {
        r.used = token < index_at(p.seqused_q, p.index_is_64, r.batch);
    }
    return r;
}

template <typename T, bool kBIsNk>
__global__ void __launch_bounds__(kThreads, 4)
    mla_head_product_sm80_kernel(const HeadProduct p, int row_tiles, int column_tiles) {
    __shared__ alignas(16) uint16_t a_smem[kStages][kTile * kPitchDepth];
    __shared__ alignas(16) uint16_t b_smem[kStages][kBIsNk ? kTile * kPitchDepth : kDepth * kPitchTile];
    const int tid = static_cast<int>(threadIdx.x);
    const int lane = tid % 32;
    const int warp = tid / 32;
    const int column0 = static_cast<int>(blockIdx.x) % column_tiles * kTile;
    const int row0 = static_cast<int>(blockIdx.x) / column_tiles % row_tiles * kTile;
    const int head = static_cast<int>(blockIdx.x) / column_tiles / row_tiles;
    const T* const weights = static_cast<const T*>(p.b) + head * p.b_stride_h;

    // This thread copies 16 bytes of rows tid / 4 and tid / 4 + 32 of a, and two pieces of b.
    const T* a_rows[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        const Row r = find_row(p, row0 + tid / 4 + 32 * i);
        a_rows[i] = r.used ? static_cast<const T*>(p.a) + (p.cu_seqlens_q != nullptr ? 0 : r.batch * p.a_stride_b) +
                                 r.token * p.a_stride_s + head * p.a_stride_h
                           : nullptr;
    }
    const auto copy = [&](int step) {
        const int k0 = step * kDepth;
        const uint32_t a_addr = static_cast<uint32_t>(__cvta_generic_to_shared(a_smem[step % kStages]));
        const uint32_t b_addr = static_cast<uint32_t>(__cvta_generic_to_shared(b_smem[step % kStages]));
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const int k = k0 + 8 * (tid % 4);
            const bool valid = a_rows[i] != nullptr && k < p.k;
            ptx::cp_async_16(a_addr + 2 * ((tid / 4 + 32 * i) * kPitchDepth + 8 * (tid % 4)), valid ? a_rows[i] + k : p.a,
                             valid ? 16 : 0);
        }
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const int row = kBIsNk ? tid / 4 + 32 * i : tid / 8 + 16 * i;
            const int column = kBIsNk ? 8 * (tid % 4) : 8 * (tid % 8);
            const int k = k0 + (kBIsNk ? column : row);
            const int n = column0 + (kBIsNk ? row : column);
            const bool valid = k < p.k && n < p.n;
            const T* src = weights + (kBIsNk ? n * p.b_stride_r + k : k * p.b_stride_r + n);
            ptx::cp_async_16(b_addr + 2 * (row * (kBIsNk ? kPitchDepth : kPitchTile) + column), valid ? src : p.b,
                             valid ? 16 : 0);
        }
        ptx::cp_async_commit();
    };

    float acc[2][4][4] = {};
    const int warp_row = 32 * (warp / 2);
    const int warp_column = 32 * (warp % 2);
    const int steps = (p.k + kDepth - 1) / kDepth;
    // Steps beyond the last copy nothing: their k is too large.
#pragma unroll
    for (int step = 0; step < kStages - 1; ++step) {
        copy(step);
    }
    for (int step = 0; step < steps; ++step) {
        ptx::cp_async_wait<kStages - 2>();
        __syncthreads();
        copy(step + kStages - 1);
        const uint16_t* const a = a_smem[step % kStages];
        const uint16_t* const b = b_smem[step % kStages];
#pragma unroll
        for (int kk = 0; kk < kDepth; kk += 16) {
            uint32_t af[2][4];
#pragma unroll
            for (int m = 0; m < 2; ++m) {
                const uint16_t* at = a + (warp_row + 16 * m + lane % 16) * kPitchDepth + kk + 8 * (lane / 16);
                ptx::ldmatrix_x4(af[m], static_cast<uint32_t>(__cvta_generic_to_shared(at)));
            }
#pragma unroll
            for (int n = 0; n < 4; n += 2) {
                uint32_t bf[4];
                if constexpr (kBIsNk) {
                    const uint16_t* at =
                        b + (warp_column + 8 * n + 8 * (lane / 16) + lane % 8) * kPitchDepth + kk + 8 * (lane / 8 % 2);
                    ptx::ldmatrix_x4(bf, static_cast<uint32_t>(__cvta_generic_to_shared(at)));
                } else {
                    const uint16_t* at = b + (kk + lane % 16) * kPitchTile + warp_column + 8 * n + 8 * (lane / 16);
                    ptx::ldmatrix_x4_trans(bf, static_cast<uint32_t>(__cvta_generic_to_shared(at)));
                }
#pragma unroll
                for (int m = 0; m < 2; ++m) {
                    ptx::mma_m16n8k16<T>(acc[m][n], af[m], bf[0], bf[1]);
                    ptx::mma_m16n8k16<T>(acc[m][n + 1], af[m], bf[2], bf[3]);
                }
            }
        }
        // The stage just read is written again in the next step, after its barrier.
    }
#pragma unroll
    for (int m = 0; m < 2; ++m) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const Row r = find_row(p, row0 + warp_row + 16 * m + 8 * half + lane / 4);
            if (!r.used) {
                continue;
            }
            const int64_t at =
                (p.cu_seqlens_q != nullptr ? 0 : r.batch * p.c_stride_b) + r.token * p.c_stride_s + head * p.c_stride_h;
#pragma unroll
            for (int n = 0; n < 4; ++n) {
                const int column = column0 + warp_column + 8 * n + 2 * (lane % 4);
                if (column < p.n) {
                    store_pair(p.c, p.c_dtype, at + column, acc[m][n][2 * half], acc[m][n][2 * half + 1]);
                }
            }
        }
    }
}

template <typename T>
void launch(const HeadProduct& p, unsigned grid, int row_tiles, int column_tiles, cudaStream_t stream) {
    if (p.b_is_nk) {
        mla_head_product_sm80_kernel<T, true><<<grid, kThreads, 0, stream>>>(p, row_tiles, column_tiles);
    } else {
        mla_head_product_sm80_kernel<T, false><<<grid, kThreads, 0, stream>>>(p, row_tiles, column_tiles);
    }
}

}  // namespace

int32_t launch_head_product_sm80(const HeadProduct& p, cudaStream_t stream) {
    const int64_t rows = p.cu_seqlens_q != nullptr ? p.total_q : int64_t{p.batch} * p.seqlen_q;
    const int64_t row_tiles = (rows + kTile - 1) / kTile;
    const int64_t column_tiles = (p.n + kTile - 1) / kTile;
    const int64_t grid = row_tiles * column_tiles * p.heads;
    if (grid == 0) {
        return FLARE_OK;
    }
    if (grid > INT32_MAX) {
        return FLARE_UNSUPPORTED_SHAPE;
    }
    if (p.dtype == DType::kBf16) {
        launch<__nv_bfloat16>(p, static_cast<unsigned>(grid), static_cast<int>(row_tiles), static_cast<int>(column_tiles),
                              stream);
    } else {
        launch<__half>(p, static_cast<unsigned>(grid), static_cast<int>(row_tiles), static_cast<int>(column_tiles), stream);
    }
    return cudaPeekAtLastError() == cudaSuccess ? FLARE_OK : FLARE_ERROR_LAUNCH;
}

}  // namespace flare::mla
