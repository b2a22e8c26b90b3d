// MLA by its definition in absorbed form, fp32, for what the tensor-core kernels don't take: fp32 tensors, odd widths and
// strides. One block a (token, head); it forms q W_uk^T, walks the keys 32 at a time and applies W_uv to the result.
#include <cuda_runtime.h>

#include "absorbed_sm80.cuh"
#include "flare.h"
#include "normaliser.cuh"

namespace flare::mla {
namespace {

constexpr int kThreads = 128;
constexpr int kKeys = 32;
constexpr int kMaxLatent = 1024;
constexpr int kMaxRope = 512;
constexpr int kMaxNope = 512;
constexpr int kColumns = kMaxLatent / kThreads;  // latent channels of a thread

__device__ __forceinline__ float latent_value(const char* row, DType dtype, int c) {
    if (dtype == DType::kRow656) {
        const float scale = reinterpret_cast<const float*>(row + kRow656Scales)[c / 128];
        return e4m3_to_float(static_cast<uint8_t>(row[c])) * scale;
    }
    return load_element(row, dtype, c);
}

__device__ __forceinline__ float rope_value(const char* latent, const char* rope, DType dtype, int d) {
    return dtype == DType::kRow656 ? load_element(latent + kRow656Rope, DType::kBf16, d) : load_element(rope, dtype, d);
}

__device__ __forceinline__ float weight(const AbsorbedArgs& a, const void* w, int64_t stride_h, int64_t stride_r, int head,
                                        int c, int d) {
    const int64_t at = a.weight_layout == WeightLayout::kCD ? c * stride_r + d : d * stride_r + c;
    return load_element(w, a.dtype, head * stride_h + at);
}

__global__ void __launch_bounds__(kThreads, 4) mla_plain_kernel(const AbsorbedArgs a) {
    __shared__ float q[kMaxLatent + kMaxRope];
    __shared__ float q_nope[kMaxNope];
    __shared__ float scores[kKeys];  // log2 units
    __shared__ const char* latent_rows[kKeys];
    __shared__ const char* rope_rows[kKeys];
    const int tid = static_cast<int>(threadIdx.x);
    const int lane = tid % 32;
    const int warp = tid / 32;
    const int row = static_cast<int>(blockIdx.x) / a.heads;
    const int head = static_cast<int>(blockIdx.x) - row * a.heads;
    const bool sparse = a.indices != nullptr;
    const Sequence s = load_sequence(a, sparse ? row : row / a.seqlen_q);
    const int token = sparse ? s.first_token : row % a.seqlen_q;
    if (!sparse && token >= s.num_tokens) {
        return;
    }
    const int64_t q_at = token_offset(a, s, token, a.q_stride_b, a.q_stride_s) + head * a.q_stride_h;
    const int64_t q_rope_at = token_offset(a, s, token, a.q_rope_stride_b, a.q_rope_stride_s) + head * a.q_rope_stride_h;
    if (a.w_uk != nullptr) {
#pragma unroll 1
        for (int d = tid; d < a.d_nope; d += kThreads) {
            q_nope[d] = load_element(a.q, a.dtype, q_at + d);
        }
        __syncthreads();
    }
    for (int c = tid; c < a.d_c; c += kThreads) {
        float x = 0.0f;
        if (a.w_uk == nullptr) {
            x = load_element(a.q, a.dtype, q_at + c);
        } else {
            for (int d = 0; d < a.d_nope; ++d) {
                x = fmaf(q_nope[d], weight(a, a.w_uk, a.w_uk_stride_h, a.w_uk_stride_r, head, c, d), x);
            }
        }
        q[c] = x;
    }
#pragma unroll 1
    for (int d = tid; d < a.d_rope; d += kThreads) {
        q[a.d_c + d] = load_element(a.q_rope, a.dtype, q_rope_at + d);
    }
    float acc[kColumns] = {};
    float sum = 0.0f;
    float top = -INFINITY;
    const int limit = key_limit(a, s, token);
    for (int first = 0; first < limit; first += kKeys) {
        if (tid < kKeys) {
            const KeyPlace place = first + tid < limit ? key_place(a, s, first + tid) : KeyPlace{0, -1};
            const bool present = place.present();
            latent_rows[tid] = present ? a.latent + place.offset(s, a.latent_stride_b, a.latent_stride_s) : nullptr;
            rope_rows[tid] = present ? a.rope + place.offset(s, a.rope_stride_b, a.rope_stride_s) : nullptr;
        }
        __syncthreads();
        for (int j = warp; j < kKeys; j += kThreads / 32) {
            const char* latent = latent_rows[j];
            float dot = 0.0f;
            if (latent != nullptr) {
#pragma unroll 4
                for (int c = lane; c < a.d_c; c += 32) {
                    dot = fmaf(q[c], latent_value(latent, a.kv_dtype, c), dot);
                }
#pragma unroll 1
                for (int d = lane; d < a.d_rope; d += 32) {
                    dot = fmaf(q[a.d_c + d], rope_value(latent, rope_rows[j], a.kv_dtype, d), dot);
                }
            }
#pragma unroll
            for (int offset = 16; offset > 0; offset /= 2) {
                dot += __shfl_xor_sync(0xffffffffu, dot, offset);
            }
            if (lane == 0) {
                scores[j] = latent != nullptr ? dot * a.scale_log2 : -INFINITY;
            }
        }
        __syncthreads();
        float new_top = top;
        for (int j = 0; j < kKeys; ++j) {
            new_top = fmaxf(new_top, scores[j]);
        }
        const float base = new_top == -INFINITY ? 0.0f : new_top;
        const float alpha = exp2f(top - base);
        top = new_top;
        sum *= alpha;
#pragma unroll
        for (int k = 0; k < kColumns; ++k) {
            acc[k] *= alpha;
        }
#pragma unroll 1
        for (int j = 0; j < kKeys; ++j) {
            const char* latent = latent_rows[j];
            if (latent == nullptr) {
                continue;
            }
            const float p = exp2f(scores[j] - base);
            sum += p;
#pragma unroll
            for (int k = 0; k < kColumns; ++k) {
                const int c = tid + k * kThreads;
                acc[k] = c < a.d_c ? fmaf(p, latent_value(latent, a.kv_dtype, c), acc[k]) : 0.0f;
            }
        }
        __syncthreads();
    }
    // The sink joins the denominator.
    const float sink = a.sink != nullptr ? a.sink[head] * kLog2e : -INFINITY;
    float lse;
    const float inv = normaliser(top, sum, sink, lse);
    __syncthreads();  // q is free: a limit of 0 had no barrier
#pragma unroll
    for (int k = 0; k < kColumns; ++k) {
        const int c = tid + k * kThreads;
        if (c < a.d_c) {
            q[c] = acc[k] * inv;
        }
    }
    __syncthreads();
    const int64_t out_at = token_offset(a, s, token, a.out_stride_b, a.out_stride_s) + head * a.out_stride_h;
    const int width = a.w_uv != nullptr ? a.d_v : a.d_c;
    for (int d = tid; d < width; d += kThreads) {
        float x = 0.0f;
        if (a.w_uv == nullptr) {
            x = q[d];
        } else {
            for (int c = 0; c < a.d_c; ++c) {
                x = fmaf(q[c], weight(a, a.w_uv, a.w_uv_stride_h, a.w_uv_stride_r, head, c, d), x);
            }
        }
        store_element(a.out, a.out_dtype, out_at + d, x);
    }
    if (a.lse != nullptr && tid == 0) {
        a.lse[lse_offset(a, s, token, head)] = lse;
    }
}

}  // namespace

int32_t launch_absorbed_plain(const AbsorbedArgs& a, cudaStream_t stream) {
    const int64_t rows = int64_t{a.batch} * a.seqlen_q * a.heads;
    if (rows == 0) {
        return FLARE_OK;
    }
    mla_plain_kernel<<<static_cast<unsigned>(rows), kThreads, 0, stream>>>(a);
    return cudaPeekAtLastError() == cudaSuccess ? FLARE_OK : FLARE_ERROR_LAUNCH;
}

}  // namespace flare::mla
