// Merges the partial results of requests that decode_sm90.cuh cut: out = sum_s w_s O_s, w_s = 2^(lse_s - lse),
// lse = log2 sum_s 2^lse_s. A fixed grid walks (cut request, row); the cuts come from the decode kernel, so nothing
// here depends on host knowledge of the lengths. Launched with programmatic dependence: it starts while the last decode
// blocks still run and waits for their results.
//
// A warp takes the 512 columns of a row, 16 a lane. Many rows: a row a warp. Few rows (one long request): a row a
// block, warp w adding up partials w, w + 16, .., and the warps' sums meet in shared memory.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <type_traits>

#include "../ptx/ldst.cuh"
#include "../ptx/math.cuh"
#include "../ptx/sync.cuh"
#include "schedule.cuh"

namespace flare::mla {

struct CombineArgs {
    void* out;
    float* lse;
    int64_t out_stride_b, out_stride_s, out_stride_h;
    int64_t lse_stride_b, lse_stride_h;
    RowMap row_map;
    const float* sink;  // [heads]
    int32_t rows;         // of the longest request
    int32_t rows_padded;  // of the partial buffers
    int32_t d_c;
    int32_t num_parts;
    const Cut* cuts;
    const void* o_part;  // in the type of out
    const float* lse_part;
};

inline constexpr int kCombineWarps = 16;
inline constexpr int kCombineThreads = 32 * kCombineWarps;
inline constexpr int kPartCols = 512;
inline constexpr int kBatch = 8;  // partial rows in flight per warp

namespace combine {

template <typename T>
__device__ __forceinline__ float2 unpack2(uint32_t x) {
    if constexpr (std::is_same_v<T, __half>) {
        return __half22float2(*reinterpret_cast<const __half2*>(&x));
    } else {
        return __bfloat1622float2(*reinterpret_cast<const __nv_bfloat162*>(&x));
    }
}

struct Smem {
    Cut cuts[kMaxParts + 1];
    int firsts[kMaxParts];  // cuts that are the first of their request
    int num_firsts;
    float weights[kCombineWarps][kMaxParts];
    float sums[kCombineWarps][kPartCols];
};

// Partial i of the request whose first cut is p0: the piece before p0 for i = 0, else the piece after cut p0 + i - 1.
__device__ __forceinline__ int64_t slot_of(int p0, int i) {
    return 2 * (p0 + i) - (i == 0 ? 1 : 2);
}

// Weights of the partials of one row into `weights`; returns their number. Partials that don't exist, and those without
// a key, weigh 0.
__device__ __forceinline__ int weigh(const CombineArgs& args, const Smem& smem, int p0, int row, float sink_log2, int lane,
                                     float* weights, float& lse) {
    constexpr int kPerLane = kMaxParts / 32;
    const int request = smem.cuts[p0].request;
    float x[kPerLane];
    int count = 0;
#pragma unroll
    for (int k = 0; k < kPerLane; ++k) {
        const int i = lane + 32 * k;
        const int p = p0 + i - 1;
        const bool mine = i == 0 || (p < args.num_parts && smem.cuts[p].request == request);
        const bool there = i == 0 || (mine && smem.cuts[p].block > 0 &&
                                      !(smem.cuts[p + 1].request == request && smem.cuts[p + 1].block == smem.cuts[p].block));
        x[k] = there ? args.lse_part[slot_of(p0, i) * args.rows_padded + row] : -INFINITY;
        count += __popc(__ballot_sync(0xffffffffu, mine));
    }
    weigh_partials(x, sink_log2, lse);
#pragma unroll
    for (int k = 0; k < kPerLane; ++k) {
        if (lane + 32 * k < count) {
            weights[lane + 32 * k] = x[k];
        }
    }
    __syncwarp();
    return count;
}

}  // namespace combine

template <typename T>
__global__ void __launch_bounds__(kCombineThreads, 1) mla_decode_combine_kernel(const CombineArgs args) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    __shared__ combine::Smem smem;
    const int tid = static_cast<int>(threadIdx.x);
    const int lane = tid % 32;
    const int warp = tid / 32;

    ptx::griddepcontrol_wait();
    for (int p = tid; p <= args.num_parts; p += kCombineThreads) {
        smem.cuts[p] = p < args.num_parts ? args.cuts[p] : Cut{-1, 0, 0, 0};
    }
    __syncthreads();
    if (warp == 0) {
        int count = 0;
        for (int start = 0; start < args.num_parts; start += 32) {
            const int p = start + lane;
            const bool first = p > 0 && p < args.num_parts && smem.cuts[p].block > 0 &&
                               (smem.cuts[p - 1].request != smem.cuts[p].request || smem.cuts[p - 1].block == 0);
            const uint32_t ballot = __ballot_sync(0xffffffffu, first);
            if (first) {
                smem.firsts[count + __popc(ballot & ((1u << lane) - 1))] = p;
            }
            count += __popc(ballot);
        }
        if (lane == 0) {
            smem.num_firsts = count;
        }
    }
    __syncthreads();
    const int num_firsts = smem.num_firsts;
    const int items = num_firsts * args.rows;
    if (items == 0) {
        return;
    }
    // Rounds of loads, each one latency: a row a block, or a row a warp.
    const int grid = static_cast<int>(gridDim.x);
    const int partials = args.num_parts / num_firsts + 1;
    const int by_block = (items + grid - 1) / grid * (2 + partials / (kCombineWarps * kBatch));
    const int by_warp = (items + grid * kCombineWarps - 1) / (grid * kCombineWarps) * (1 + (partials + kBatch - 1) / kBatch);
    const bool shared = by_block <= by_warp;
    const int first = shared ? warp : 0;
    const int step = shared ? kCombineWarps : 1;
    const int item_step = shared ? grid : grid * kCombineWarps;
    for (int item = shared ? static_cast<int>(blockIdx.x) : static_cast<int>(blockIdx.x) * kCombineWarps + warp; item < items;
         item += item_step) {
        const int which = item / args.rows;
        const int row = item - which * args.rows;
        const int p0 = smem.firsts[which];
        const int request = smem.cuts[p0].request;
        const int token = row / args.row_map.heads;
        const int head = row - token * args.row_map.heads;
        const RowMap::Span span = args.row_map.span(request);
        if (token >= span.num_tokens) {
            continue;  // the same for the whole block where it shares a row
        }
        const float sink = args.sink != nullptr ? __ldg(args.sink + head) * 1.44269504088896340736f : -INFINITY;
        float lse;
        const int count = combine::weigh(args, smem, p0, row, sink, lane, smem.weights[warp], lse);
        float acc[16];
#pragma unroll
        for (int c = 0; c < 16; ++c) {
            acc[c] = 0.0f;
        }
        const T* base = static_cast<const T*>(args.o_part) + int64_t{row} * kPartCols + 8 * lane;
#pragma unroll 1
        for (int from = first; from < count; from += kBatch * step) {
            uint4 x[kBatch][2];
#pragma unroll
            for (int k = 0; k < kBatch; ++k) {
                const int i = from + k * step;
                if (i < count) {
                    const uint4* src = reinterpret_cast<const uint4*>(
                        base + combine::slot_of(p0, i) * args.rows_padded * kPartCols);
                    x[k][0] = src[0];
                    x[k][1] = src[32];
                }
            }
#pragma unroll
            for (int k = 0; k < kBatch; ++k) {
                const int i = from + k * step;
                const float w = i < count ? smem.weights[warp][i] : 0.0f;
                if (w != 0.0f) {  // what weighs nothing may be anything
#pragma unroll
                    for (int c = 0; c < 2; ++c) {
                        const uint32_t words[4] = {x[k][c].x, x[k][c].y, x[k][c].z, x[k][c].w};
#pragma unroll
                        for (int j = 0; j < 4; ++j) {
                            const float2 v = combine::unpack2<T>(words[j]);
                            acc[8 * c + 2 * j] = fmaf(w, v.x, acc[8 * c + 2 * j]);
                            acc[8 * c + 2 * j + 1] = fmaf(w, v.y, acc[8 * c + 2 * j + 1]);
                        }
                    }
                }
            }
        }
        __syncwarp();  // the weights are free again
        T* out = static_cast<T*>(args.out) + span.batch * args.out_stride_b + (span.first_token + token) * args.out_stride_s +
                 head * args.out_stride_h;
        if ((!shared || warp == 0) && lane == 0 && args.lse != nullptr) {
            args.lse[span.batch * args.lse_stride_b + head * args.lse_stride_h + span.first_token + token] = lse;
        }
        if (!shared) {
#pragma unroll
            for (int c = 0; c < 2; ++c) {
                if (256 * c + 8 * lane < args.d_c) {
                    const float(&x)[8] = *reinterpret_cast<const float(*)[8]>(&acc[8 * c]);
                    const uint32_t packed[4] = {ptx::pack2<T>(x[0], x[1]), ptx::pack2<T>(x[2], x[3]), ptx::pack2<T>(x[4], x[5]),
                                                ptx::pack2<T>(x[6], x[7])};
                    ptx::st_global_v4(out + 256 * c + 8 * lane, packed);
                }
            }
            continue;
        }
        // Column 256 h + 8 lane + c lies at [64 c + 32 h + lane], free of bank conflicts; then a thread adds up two columns.
#pragma unroll
        for (int c = 0; c < 16; ++c) {
            smem.sums[warp][64 * (c % 8) + 32 * (c / 8) + lane] = acc[c];
        }
        __syncthreads();
        if (tid < kPartCols / 2 && 2 * tid < args.d_c) {
            const int at = 64 * (2 * tid % 8) + 32 * (tid / 128) + tid / 4 % 32;
            float x = 0.0f;
            float y = 0.0f;
#pragma unroll
            for (int w = 0; w < kCombineWarps; ++w) {
                x += smem.sums[w][at];
                y += smem.sums[w][at + 64];
            }
            *reinterpret_cast<uint32_t*>(out + 2 * tid) = ptx::pack2<T>(x, y);
        }
        __syncthreads();
    }
#else
    __trap();
#endif
}

}  // namespace flare::mla
