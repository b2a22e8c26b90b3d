// The merge of partial results: a warp for each row (sequence, token, head). Weights are computed from the lse of all partials;
// a partial with lse = -inf has weight 0 and is not read.
#include "merge_sm80.h"

#include "common_sm80.cuh"

namespace flare::attention {
namespace {

constexpr int kWarps = 4;

__device__ __forceinline__ float load_value(const void* data, DType dtype, int64_t at) {
    if (dtype == DType::kFp32) {
        return static_cast<const float*>(data)[at];
    }
    return dtype == DType::kBf16 ? __bfloat162float(static_cast<const __nv_bfloat16*>(data)[at])
                                 : __half2float(static_cast<const __half*>(data)[at]);
}

__device__ __forceinline__ float4 load_4(const void* data, DType dtype, int64_t at) {
    if (dtype == DType::kFp32) {
        return *reinterpret_cast<const float4*>(static_cast<const float*>(data) + at);
    }
    return make_float4(load_value(data, dtype, at), load_value(data, dtype, at + 1), load_value(data, dtype, at + 2),
                       load_value(data, dtype, at + 3));
}

__device__ __forceinline__ float warp_max(float x) {
    for (int lanes = 16; lanes > 0; lanes /= 2) {
        x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, lanes));
    }
    return x;
}

__device__ __forceinline__ float warp_sum(float x) {
    for (int lanes = 16; lanes > 0; lanes /= 2) {
        x += __shfl_xor_sync(0xffffffffu, x, lanes);
    }
    return x;
}

template <int kWidth>
__global__ void __launch_bounds__(32 * kWarps) attention_merge_kernel(const __grid_constant__ MergeParams p) {
    const int lane = static_cast<int>(threadIdx.x) % 32;
    const int64_t item = int64_t{blockIdx.x} * kWarps + threadIdx.x / 32;
    const int64_t head = item % p.heads;
    const int64_t token = item / p.heads % p.seqlen;
    const int64_t batch = item / p.heads / p.seqlen;
    if (batch >= p.batch) {
        return;
    }
    int64_t length = p.seqlen;
    int64_t out_batch = batch;
    int64_t out_row = token;
    if (p.cu_seqlens != nullptr) {
        const int64_t begin = read_index(p.cu_seqlens, batch, p.index64);
        length = read_index(p.cu_seqlens, batch + 1, p.index64) - begin;
        out_batch = 0;
        out_row = begin + token;
    }
    if (p.seqused != nullptr) {
        length = read_index(p.seqused, batch, p.index64);
    }
    if (token >= length) {
        return;
    }
    const float* lse = p.partial_lse + batch * p.partial_lse_stride.batch + token * p.partial_lse_stride.row +
                       head * p.partial_lse_stride.head;
    const int64_t partial =
        batch * p.partial_out_stride.batch + token * p.partial_out_stride.row + head * p.partial_out_stride.head;
    const float sink = p.sink != nullptr ? p.sink[head] : -INFINITY;
    float max = sink;
    for (int64_t i = lane; i < p.num_partials; i += 32) {
        max = fmaxf(max, lse[i * p.partial_lse_stride_p]);
    }
    max = warp_max(max);
    const float base = max == -INFINITY ? 0.0f : max;
    float total = 0.0f;
    for (int64_t i = lane; i < p.num_partials; i += 32) {
        total += expf(lse[i * p.partial_lse_stride_p] - base);
    }
    total = warp_sum(total) + (sink == INFINITY ? INFINITY : expf(sink - base));
    const float inverse = total == 0.0f ? 0.0f : 1.0f / total;
    const int64_t out = out_batch * p.out_stride.batch + out_row * p.out_stride.row + head * p.out_stride.head;
    for (int64_t d = int64_t{lane} * kWidth; d < p.head_dim; d += 32 * kWidth) {
        float sum[kWidth] = {};
#pragma unroll 4
        for (int64_t i = 0; i < p.num_partials; ++i) {
            const float part_lse = lse[i * p.partial_lse_stride_p];
            if (part_lse == -INFINITY) {
                continue;  // its out may be anything, NaN too
            }
            const float weight = expf(part_lse - base) * inverse;
            const int64_t at = partial + i * p.partial_out_stride_p + d;
            if constexpr (kWidth == 4) {
                const float4 x = load_4(p.partial_out, p.dtype, at);
                sum[0] += weight * x.x;
                sum[1] += weight * x.y;
                sum[2] += weight * x.z;
                sum[3] += weight * x.w;
            } else {
                sum[0] += weight * load_value(p.partial_out, p.dtype, at);
            }
        }
        if constexpr (kWidth == 4) {
            store_4(p.out, p.out_dtype, out + d, make_float4(sum[0], sum[1], sum[2], sum[3]));
        } else {
            store_1(p.out, p.out_dtype, out + d, sum[0]);
        }
    }
    if (p.lse != nullptr && lane == 0) {
        p.lse[out_batch * p.lse_stride.batch + out_row * p.lse_stride.row + head * p.lse_stride.head] =
            total == 0.0f ? -INFINITY : max + logf(total);
    }
}

bool suits_4(const void* data, DType dtype, const Strides& stride, int64_t stride_p) {
    const uintptr_t bytes = dtype == DType::kFp32 ? 16 : 8;
    return reinterpret_cast<uintptr_t>(data) % bytes == 0 && aligned_strides(stride, 4) && stride_p % 4 == 0;
}

}  // namespace

cudaError_t launch_merge_sm80(const MergeParams& p, cudaStream_t stream) {
    const int64_t rows = p.batch * p.seqlen * p.heads;
    if (rows == 0) {
        return cudaSuccess;
    }
    const unsigned blocks = static_cast<unsigned>((rows + kWarps - 1) / kWarps);
    const bool wide = p.head_dim % 4 == 0 && suits_4(p.partial_out, p.dtype, p.partial_out_stride, p.partial_out_stride_p) &&
                      suits_4(p.out, p.out_dtype, p.out_stride, 0);
    if (wide) {
        attention_merge_kernel<4><<<blocks, 32 * kWarps, 0, stream>>>(p);
    } else {
        attention_merge_kernel<1><<<blocks, 32 * kWarps, 0, stream>>>(p);
    }
    return cudaPeekAtLastError();
}

}  // namespace flare::attention
