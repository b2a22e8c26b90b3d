// Merges the partial results of sequences that decode_sm90.cuh cut: out = sum_s w_s O_s, w_s = 2^(lse_s - lse),
// lse = log2 sum_s 2^lse_s. A fixed grid walks (cut sequence, row); the cuts come from the decode kernel, so nothing
// here depends on host knowledge of the lengths. Launched with programmatic dependence: it starts while the last decode
// blocks still run and waits for their results.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

#include "../ptx/math.cuh"
#include "../ptx/sync.cuh"
#include "schedule.cuh"

namespace flare::mla {

struct CombineArgs {
    void* out;
    float* lse;
    int64_t out_stride_b, out_stride_s, out_stride_h;
    int64_t lse_stride_b, lse_stride_h;
    int32_t heads;
    int32_t rows;
    int32_t rows_padded;  // of the partial buffers
    int32_t d_c;
    int32_t num_parts;
    const Cut* cuts;
    const float* o_part;
    const float* lse_part;
};

inline constexpr int kCombineGroups = 4;  // of 128 threads, four columns each
inline constexpr int kCombineThreads = 128 * kCombineGroups;
inline constexpr int kMaxParts = 256;
inline constexpr int kPartCols = 512;
inline constexpr int kBatch = 8;  // partial rows in flight per thread

// Few rows (one long sequence): the four groups of a block share a row, each taking every fourth partial. Many rows: a
// group takes a row of its own.
template <typename T>
__global__ void __launch_bounds__(kCombineThreads, 2) mla_decode_combine_kernel(const CombineArgs args) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    __shared__ Cut cuts[kMaxParts + 1];
    __shared__ int firsts[kMaxParts];  // cuts that are the first of their sequence
    __shared__ int num_firsts;
    __shared__ int group_slots[kCombineGroups][kMaxParts];
    __shared__ float group_weights[kCombineGroups][kMaxParts];
    __shared__ int group_count[kCombineGroups];
    __shared__ float4 partial[kCombineGroups - 1][kPartCols / 4];
    const int tid = static_cast<int>(threadIdx.x);
    const int lane = tid % 32;
    const int group = tid / 128;
    const int column = 4 * (tid % 128);
    int* const slots = group_slots[group];
    float* const weights = group_weights[group];

    ptx::griddepcontrol_wait();
    for (int p = tid; p < args.num_parts; p += kCombineThreads) {
        cuts[p] = args.cuts[p];
    }
    if (tid == 0) {
        cuts[args.num_parts] = {-1, 0, 0, 0};
    }
    __syncthreads();
    if (tid < 32) {
        int count = 0;
        for (int start = 0; start < args.num_parts; start += 32) {
            const int p = start + lane;
            const bool first = p > 0 && p < args.num_parts && cuts[p].block > 0 &&
                               (cuts[p - 1].request != cuts[p].request || cuts[p - 1].block == 0);
            const uint32_t ballot = __ballot_sync(0xffffffffu, first);
            if (first) {
                firsts[count + __popc(ballot & ((1u << lane) - 1))] = p;
            }
            count += __popc(ballot);
        }
        if (lane == 0) {
            num_firsts = count;
        }
    }
    __syncthreads();
    const int items = num_firsts * args.rows;
    const bool shared = items <= static_cast<int>(gridDim.x);
    const int item_step = static_cast<int>(gridDim.x) * (shared ? 1 : kCombineGroups);
    for (int item = shared ? static_cast<int>(blockIdx.x) : static_cast<int>(blockIdx.x) * kCombineGroups + group;
         item < items; item += item_step) {
        const int which = item / args.rows;
        const int row = item - which * args.rows;
        const int p0 = firsts[which];
        const int request = cuts[p0].request;
        if (tid % 128 < 32) {
            // The piece before cut p0 lies in slot 2 (p0 - 1) + 1, the one after cut p in slot 2 p unless cut p + 1
            // equals it.
            int count = 1;
            if (lane == 0) {
                slots[0] = 2 * p0 - 1;
            }
            for (int start = p0; start < args.num_parts && cuts[start].request == request; start += 32) {
                const int p = start + lane;
                const bool has = p < args.num_parts && cuts[p].request == request && cuts[p].block > 0 &&
                                 !(cuts[p + 1].request == request && cuts[p + 1].block == cuts[p].block);
                const uint32_t ballot = __ballot_sync(0xffffffffu, has);
                if (has) {
                    slots[count + __popc(ballot & ((1u << lane) - 1))] = 2 * p;
                }
                count += __popc(ballot);
            }
            if (lane == 0) {
                group_count[group] = count;
            }
        }
        ptx::named_barrier_sync(1 + group, 128);
        const int count = group_count[group];
        const int first = shared ? group : 0;
        const int step = shared ? kCombineGroups : 1;
        float4 x[kBatch];
        const auto fetch = [&](int from) {
#pragma unroll
            for (int k = 0; k < kBatch; ++k) {
                const int j = from + k * step;
                if (j < count) {
                    x[k] = *reinterpret_cast<const float4*>(
                        args.o_part + (int64_t{slots[j]} * args.rows_padded + row) * kPartCols + column);
                }
            }
        };
        fetch(first);  // in flight while the weights are worked out
        if (tid % 128 < 32) {
            float lse[kMaxParts / 32];
            float top = -INFINITY;
#pragma unroll
            for (int k = 0; k < kMaxParts / 32; ++k) {
                const int j = lane + 32 * k;
                lse[k] = j < count ? args.lse_part[int64_t{slots[j]} * args.rows_padded + row] : -INFINITY;
            }
#pragma unroll
            for (int k = 0; k < kMaxParts / 32; ++k) {
                top = fmaxf(top, lse[k]);
            }
#pragma unroll
            for (int offset = 16; offset > 0; offset /= 2) {
                top = fmaxf(top, __shfl_xor_sync(0xffffffffu, top, offset));
            }
            const float base = top == -INFINITY ? 0.0f : top;
            float sum = 0.0f;
#pragma unroll
            for (int k = 0; k < kMaxParts / 32; ++k) {
                lse[k] = ptx::exp2_approx(lse[k] - base);
                sum += lse[k];
            }
#pragma unroll
            for (int offset = 16; offset > 0; offset /= 2) {
                sum += __shfl_xor_sync(0xffffffffu, sum, offset);
            }
            const float inv = sum > 0.0f ? 1.0f / sum : 0.0f;
#pragma unroll
            for (int k = 0; k < kMaxParts / 32; ++k) {
                if (lane + 32 * k < count) {
                    weights[lane + 32 * k] = lse[k] * inv;
                }
            }
            if (lane == 0 && args.lse != nullptr && (!shared || group == 0)) {
                constexpr float kLn2 = 0.69314718055994530942f;
                const int token = row / args.heads;
                const int head = row - token * args.heads;
                args.lse[request * args.lse_stride_b + head * args.lse_stride_h + token] =
                    sum > 0.0f ? (base + ptx::log2_approx(sum)) * kLn2 : -INFINITY;
            }
        }
        ptx::named_barrier_sync(1 + group, 128);
        float4 acc = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
        for (int from = first; from < count; from += kBatch * step) {
            if (from != first) {
                fetch(from);
            }
#pragma unroll
            for (int k = 0; k < kBatch; ++k) {
                const int j = from + k * step;
                if (j < count) {
                    const float w = weights[j];
                    acc.x = fmaf(w, x[k].x, acc.x);
                    acc.y = fmaf(w, x[k].y, acc.y);
                    acc.z = fmaf(w, x[k].z, acc.z);
                    acc.w = fmaf(w, x[k].w, acc.w);
                }
            }
        }
        if (shared) {  // the same for the whole block
            if (group > 0) {
                partial[group - 1][tid % 128] = acc;
            }
            __syncthreads();
            if (group == 0) {
#pragma unroll
                for (int k = 0; k < kCombineGroups - 1; ++k) {
                    const float4 other = partial[k][tid];
                    acc.x += other.x;
                    acc.y += other.y;
                    acc.z += other.z;
                    acc.w += other.w;
                }
            }
            __syncthreads();
        }
        if ((!shared || group == 0) && column < args.d_c) {
            const int token = row / args.heads;
            const int head = row - token * args.heads;
            T* out = static_cast<T*>(args.out) + request * args.out_stride_b + token * args.out_stride_s +
                     head * args.out_stride_h + column;
            *reinterpret_cast<uint2*>(out) = make_uint2(ptx::pack2<T>(acc.x, acc.y), ptx::pack2<T>(acc.z, acc.w));
        }
        ptx::named_barrier_sync(1 + group, 128);  // slots and weights are free again
    }
#else
    __trap();
#endif
}

}  // namespace flare::mla
