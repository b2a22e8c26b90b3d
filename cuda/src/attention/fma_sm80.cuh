// Attention forward in fp32 arithmetic, without tensor cores: any type, any head dimension up to 512, any stride. The plain way
// to compute it, and the kernel of fp32 tensors.
//
// A block of 256 threads (16 x 16) works on 64 rows. For each block of 64 keys: S = Q K^T by slices of 32 of the head dimension
// through shared memory, 4 x 4 scores a thread; online softmax with a row in 16 neighbouring lanes; P to shared memory; O += P
// V by slices of 16 keys, 4 rows x Dv / 16 columns a thread.
#pragma once

#include <cuda_fp8.h>

#include "common_sm80.cuh"
#include "softmax.cuh"

namespace flare::attention {

__device__ __forceinline__ float to_float(float x) {
    return x;
}
__device__ __forceinline__ float to_float(__half x) {
    return __half2float(x);
}
__device__ __forceinline__ float to_float(__nv_bfloat16 x) {
    return __bfloat162float(x);
}
__device__ __forceinline__ float to_float(__nv_fp8_e4m3 x) {
    return static_cast<float>(x);
}

template <typename T, int kMaxDimV>
struct FmaAttention {
    static constexpr int kRows = kFmaRows;
    static constexpr int kKeys = 64;
    static constexpr int kSlice = 32;  // of the head dimension
    static constexpr int kKeySlice = 16;
    static constexpr int kPitch = kRows + 4;
    static constexpr int kColumns = kMaxDimV / 16;  // of O a thread
    static constexpr int kThreads = 256;

    struct Smem {
        float q[kSlice][kPitch];
        float k[kSlice][kPitch];
        float p[kKeys][kPitch];  // [key][row]
        float v[kKeySlice][kMaxDimV];
    };

    const Sm80Args& args;
    const Sm80Tile& tile;
    Smem& smem;
    const ScoreRule& rule;
    KeySource keys_k;
    KeySource keys_v;
    int thread;

    // smem.q or smem.k [d][row] = elements d0.. of 64 rows; zero where the row or the element doesn't exist.
    template <typename Row>
    __device__ __forceinline__ void load_slice(float (&dst)[kSlice][kPitch], int d0, Row row) const {
        const int d = d0 + thread % kSlice;
        for (int i = thread / kSlice; i < kRows; i += kThreads / kSlice) {
            const T* src = row(i);
            dst[thread % kSlice][i] = src != nullptr && d < args.params.head_dim ? to_float(src[d]) : 0.0f;
        }
    }

    __device__ __forceinline__ const T* query_row(int i) const {
        const FwdParams& p = args.params;
        if (i >= tile.count) {
            return nullptr;
        }
        const int token = tile.token(args, tile.row0 + i);
        return static_cast<const T*>(p.q) + tile.q_batch * p.q_stride.batch + (tile.q_row + token) * p.q_stride.row +
               tile.query_head(args, tile.row0 + i, token) * p.q_stride.head;
    }

    __device__ __forceinline__ const T* key_row(const KeySource& source, int key) const {
        return key < tile.last_key ? reinterpret_cast<const T*>(source.row(KeyPlace::find(args, tile.batch, key))) : nullptr;
    }

    __device__ __forceinline__ void multiply_scores(float (&s)[4][4], int first) const {
        const int row = thread / 16 * 4;
        const int column = thread % 16 * 4;
        for (int d0 = 0; d0 < args.params.head_dim; d0 += kSlice) {
            __syncthreads();
            load_slice(smem.q, d0, [&](int i) { return query_row(i); });
            load_slice(smem.k, d0, [&](int i) { return key_row(keys_k, first + i); });
            __syncthreads();
#pragma unroll 8
            for (int d = 0; d < kSlice; ++d) {
                const float4 a = *reinterpret_cast<const float4*>(&smem.q[d][row]);
                const float4 b = *reinterpret_cast<const float4*>(&smem.k[d][column]);
                const float x[4] = {a.x, a.y, a.z, a.w};
                const float y[4] = {b.x, b.y, b.z, b.w};
#pragma unroll
                for (int i = 0; i < 16; ++i) {
                    s[i / 4][i % 4] = fmaf(x[i / 4], y[i % 4], s[i / 4][i % 4]);
                }
            }
        }
    }

    __device__ __forceinline__ void multiply_values(float (&o)[4][kColumns], int first) const {
        const int dim_v = args.params.head_dim_v;
        for (int j0 = 0; j0 < kKeys; j0 += kKeySlice) {
            __syncthreads();
            for (int i = thread; i < kKeySlice * kMaxDimV; i += kThreads) {
                const int d = i % kMaxDimV;
                const T* src = key_row(keys_v, first + j0 + i / kMaxDimV);
                smem.v[i / kMaxDimV][d] = src != nullptr && d < dim_v ? to_float(src[d]) : 0.0f;
            }
            __syncthreads();
#pragma unroll 4
            for (int j = 0; j < kKeySlice; ++j) {
                const float4 a = *reinterpret_cast<const float4*>(&smem.p[j0 + j][thread / 16 * 4]);
                const float x[4] = {a.x, a.y, a.z, a.w};
#pragma unroll
                for (int c = 0; c < kColumns; ++c) {
                    const float v = smem.v[j][thread % 16 + 16 * c];
#pragma unroll
                    for (int r = 0; r < 4; ++r) {
                        o[r][c] = fmaf(x[r], v, o[r][c]);
                    }
                }
            }
        }
    }

    __device__ __forceinline__ void run() const {
        const FwdParams& p = args.params;
        float o[4][kColumns] = {};
        float row_max[4];
        float row_sum[4];
        int position[4];
        float slope[4];
        int head[4];
        int token[4];
#pragma unroll
        for (int r = 0; r < 4; ++r) {
            const int row = tile.row0 + min(thread / 16 * 4 + r, tile.count - 1);
            token[r] = tile.token(args, row);
            head[r] = tile.query_head(args, row, token[r]);
            position[r] = token[r] + tile.seqlen_k - tile.seqlen_q;
            slope[r] = alibi_slope(p, tile.batch, head[r]);
            row_max[r] = -INFINITY;
            row_sum[r] = 0.0f;
        }
        for (int n = 0; n < tile.num_blocks; ++n) {
            const int first = tile.first_key + n * kKeys;
            float s[4][4] = {};
            multiply_scores(s, first);
#pragma unroll
            for (int r = 0; r < 4; ++r) {
                float max = row_max[r];
#pragma unroll
                for (int c = 0; c < 4; ++c) {
                    const int key = first + thread % 16 * 4 + c;
                    float score = s[r][c] * rule.prescale;
                    score = rule.softcap ? p.softcap * tanhf(score * rule.softcap_in) : score * rule.unit;
                    if (p.alibi_slopes != nullptr) {
                        score -= slope[r] * fabsf(static_cast<float>(position[r] - key));
                    }
                    const int hi = min(tile.last_key - 1, position[r] + p.window_right);
                    s[r][c] = key <= hi && key >= position[r] - p.window_left ? score : -INFINITY;
                    max = fmaxf(max, s[r][c]);
                }
#pragma unroll
                for (int lanes = 1; lanes < 16; lanes *= 2) {
                    max = fmaxf(max, __shfl_xor_sync(0xffffffffu, max, lanes));
                }
                const float base = max == -INFINITY ? 0.0f : max;
                const float alpha = expf(row_max[r] - base);
                row_max[r] = max;
                row_sum[r] *= alpha;
#pragma unroll
                for (int c = 0; c < kColumns; ++c) {
                    o[r][c] *= alpha;
                }
#pragma unroll
                for (int c = 0; c < 4; ++c) {
                    const float weight = expf(s[r][c] - base);
                    row_sum[r] += weight;
                    smem.p[thread % 16 * 4 + c][thread / 16 * 4 + r] = weight;
                }
            }
            multiply_values(o, first);
        }
        finish(o, row_max, row_sum, token, head);
    }

    __device__ __forceinline__ void finish(const float (&o)[4][kColumns], const float (&row_max)[4], const float (&row_sum)[4],
                                           const int (&token)[4], const int (&head)[4]) const {
        const FwdParams& p = args.params;
        const bool split = args.partial_out != nullptr;
        const float descale = rule.value_descale(args, tile);
        float* lse_base = split ? args.partial_lse : p.lse;
#pragma unroll
        for (int r = 0; r < 4; ++r) {
            float sum = row_sum[r];
#pragma unroll
            for (int lanes = 1; lanes < 16; lanes *= 2) {
                sum += __shfl_xor_sync(0xffffffffu, sum, lanes);
            }
            const float sink = p.sink != nullptr && !split ? p.sink[head[r]] : -INFINITY;
            const float max = fmaxf(row_max[r], sink);
            float factor = sum;  // no visible key: 0, or NaN when a NaN was seen
            float lse = sum == 0.0f ? -INFINITY : sum;
            if (max != -INFINITY) {
                const float weight = expf(row_max[r] - max);
                const float total = sum * weight + (sink == INFINITY ? INFINITY : expf(sink - max));
                factor = weight / total;
                lse = max + logf(total);
            }
            if (thread / 16 * 4 + r >= tile.count) {
                continue;
            }
            const OutputRow at = OutputRow::make(args, tile, token[r], head[r]);
            if (lse_base != nullptr && thread % 16 == 0) {
                lse_base[at.lse] = lse;
            }
#pragma unroll
            for (int c = 0; c < kColumns; ++c) {
                const int column = thread % 16 + 16 * c;
                if (column < p.head_dim_v) {
                    const float x = o[r][c] * factor * descale;
                    if (split) {
                        args.partial_out[at.out + column] = x;
                    } else {
                        store_1(p.o, p.out_dtype, at.out + column, x);
                    }
                }
            }
        }
    }
};

template <typename T, int kMaxDimV>
__global__ void __launch_bounds__(256, 1) attention_fma_sm80_kernel(const __grid_constant__ Sm80Args args) {
    using Fma = FmaAttention<T, kMaxDimV>;
    extern __shared__ __align__(16) uint8_t smem[];
    const Sm80Tile tile = Sm80Tile::make<Fma::kRows, Fma::kKeys>(args, static_cast<int>(blockIdx.x));
    if (tile.count <= 0) {
        return;
    }
    const ScoreRule rule = ScoreRule::make(args, tile);
    const Fma fma{args,
                  tile,
                  *reinterpret_cast<typename Fma::Smem*>(smem),
                  rule,
                  KeySource::make(args, tile, args.params.k, args.k),
                  KeySource::make(args, tile, args.params.v, args.v),
                  static_cast<int>(threadIdx.x)};
    fma.run();
}

template <typename T, int kMaxDimV>
cudaError_t launch_fma_sm80(const Sm80Args& args, int64_t num_tiles, cudaStream_t stream) {
    const auto kernel = attention_fma_sm80_kernel<T, kMaxDimV>;
    constexpr int kBytes = sizeof(typename FmaAttention<T, kMaxDimV>::Smem);
    if (const cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kBytes)) {
        return error;
    }
    kernel<<<static_cast<unsigned>(num_tiles), 256, kBytes, stream>>>(args);
    return cudaPeekAtLastError();
}

}  // namespace flare::attention
