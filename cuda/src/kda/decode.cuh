// Decode: the recurrence itself, token by token, on the pool of states. Bound by memory: each state is read and written
// once.
//
// A block of 4 warps owns half the value columns of one (sequence, value head), a warp 16 of them. A lane keeps 16 key
// channels x 4 value columns of the state in registers, arranged so that global accesses are wide in either layout:
//   V, K layout: lane = 8 r + j holds columns 4 i + r (i < 4); channels in runs of 4 (fp32) or 8 (bf16) that the 8
//   lanes j interleave K, V layout: lane = 4 j + r holds columns 4 r + i (i < 4), channels 8 m + j (m < 16)
// Sums over channels are butterflies over the 8 lanes j. Normalised q and k, decay and beta of kTokens tokens at a time
// are prepared in shared memory by one warp per token.
#pragma once

#include "kda/common.cuh"

namespace flare::kda {

inline constexpr int kDecodeThreads = 128;
inline constexpr int kDecodeTokens = kDecodeThreads / 32;
inline constexpr int kDecodeDim = 128;
inline constexpr int kDecodeSplits = 2;  // blocks per state, by value columns

struct DecodeShared {
    float q[kDecodeTokens][kDecodeDim];
    float k[kDecodeTokens][kDecodeDim];
    float decay[kDecodeTokens][kDecodeDim];
    float beta[kDecodeTokens];
};

struct DecodeLane {
    int j;  // which channels
    int r;  // which columns
    int column0;
};

template <StateLayout kLayout, bool kBf16>
__device__ __forceinline__ int decode_channel(int m, int j) {
    if constexpr (kLayout == StateLayout::kKV) {
        return 8 * m + j;
    } else if constexpr (kBf16) {
        return 64 * (m / 8) + 8 * j + m % 8;
    } else {
        return 32 * (m / 4) + 4 * j + m % 4;
    }
}

template <StateLayout kLayout>
__device__ __forceinline__ int decode_column(int i, int r) {
    return kLayout == StateLayout::kKV ? 4 * r + i : 4 * i + r;
}

template <StateLayout kLayout, bool kBf16>
__device__ __forceinline__ void decode_load(float (&s)[16][4], const void* pool, int64_t base, const DecodeLane& lane) {
    if constexpr (kLayout == StateLayout::kVK) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const int64_t row = base + (lane.column0 + decode_column<kLayout>(i, lane.r)) * kDecodeDim;
            if constexpr (kBf16) {
#pragma unroll
                for (int m = 0; m < 16; m += 8) {
                    const uint4 u = *reinterpret_cast<const uint4*>(static_cast<const __nv_bfloat16*>(pool) + row +
                                                                    decode_channel<kLayout, kBf16>(m, lane.j));
                    float x[8];
                    unpack8<__nv_bfloat16>(x, u);
#pragma unroll
                    for (int c = 0; c < 8; ++c) {
                        s[m + c][i] = x[c];
                    }
                }
            } else {
#pragma unroll
                for (int m = 0; m < 16; m += 4) {
                    const float4 f = *reinterpret_cast<const float4*>(static_cast<const float*>(pool) + row +
                                                                      decode_channel<kLayout, kBf16>(m, lane.j));
                    s[m][i] = f.x, s[m + 1][i] = f.y, s[m + 2][i] = f.z, s[m + 3][i] = f.w;
                }
            }
        }
    } else {
#pragma unroll
        for (int m = 0; m < 16; ++m) {
            const int64_t offset =
                base + decode_channel<kLayout, kBf16>(m, lane.j) * kDecodeDim + lane.column0 + 4 * lane.r;
            if constexpr (kBf16) {
                const uint2 u = *reinterpret_cast<const uint2*>(static_cast<const __nv_bfloat16*>(pool) + offset);
                const float2 low = unpack2<__nv_bfloat16>(u.x);
                const float2 high = unpack2<__nv_bfloat16>(u.y);
                s[m][0] = low.x, s[m][1] = low.y, s[m][2] = high.x, s[m][3] = high.y;
            } else {
                const float4 f = *reinterpret_cast<const float4*>(static_cast<const float*>(pool) + offset);
                s[m][0] = f.x, s[m][1] = f.y, s[m][2] = f.z, s[m][3] = f.w;
            }
        }
    }
}

template <StateLayout kLayout, bool kBf16>
__device__ __forceinline__ void decode_store(const float (&s)[16][4], void* pool, int64_t base,
                                             const DecodeLane& lane) {
    if constexpr (kLayout == StateLayout::kVK) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const int64_t row = base + (lane.column0 + decode_column<kLayout>(i, lane.r)) * kDecodeDim;
            if constexpr (kBf16) {
#pragma unroll
                for (int m = 0; m < 16; m += 8) {
                    *reinterpret_cast<uint4*>(static_cast<__nv_bfloat16*>(pool) + row +
                                              decode_channel<kLayout, kBf16>(m, lane.j)) = {
                        ptx::pack2<__nv_bfloat16>(s[m][i], s[m + 1][i]),
                        ptx::pack2<__nv_bfloat16>(s[m + 2][i], s[m + 3][i]),
                        ptx::pack2<__nv_bfloat16>(s[m + 4][i], s[m + 5][i]),
                        ptx::pack2<__nv_bfloat16>(s[m + 6][i], s[m + 7][i])};
                }
            } else {
#pragma unroll
                for (int m = 0; m < 16; m += 4) {
                    *reinterpret_cast<float4*>(static_cast<float*>(pool) + row +
                                               decode_channel<kLayout, kBf16>(m, lane.j)) = {s[m][i], s[m + 1][i],
                                                                                             s[m + 2][i], s[m + 3][i]};
                }
            }
        }
    } else {
#pragma unroll
        for (int m = 0; m < 16; ++m) {
            const int64_t offset =
                base + decode_channel<kLayout, kBf16>(m, lane.j) * kDecodeDim + lane.column0 + 4 * lane.r;
            if constexpr (kBf16) {
                *reinterpret_cast<uint2*>(static_cast<__nv_bfloat16*>(pool) + offset) = {
                    ptx::pack2<__nv_bfloat16>(s[m][0], s[m][1]), ptx::pack2<__nv_bfloat16>(s[m][2], s[m][3])};
            } else {
                *reinterpret_cast<float4*>(static_cast<float*>(pool) + offset) = {s[m][0], s[m][1], s[m][2], s[m][3]};
            }
        }
    }
}

// Sum over the 8 lanes that share columns.
template <StateLayout kLayout>
__device__ __forceinline__ float channel_sum(float x) {
    constexpr int step = kLayout == StateLayout::kKV ? 4 : 1;
    x += __shfl_xor_sync(0xffffffffu, x, step);
    x += __shfl_xor_sync(0xffffffffu, x, 2 * step);
    return x + __shfl_xor_sync(0xffffffffu, x, 4 * step);
}

// One warp: q, k, decay and beta of one token into shared memory; a lane has 4 channels.
template <typename T>
__device__ __forceinline__ void decode_prepare(DecodeShared& sm, const KdaParams& p, const GateConstants& gate,
                                               int slot, int64_t batch, int64_t row, int64_t head, int lane) {
    const int64_t head_qk = head / (p.heads_v / p.heads_qk);
    const int64_t q0 = batch * p.q_stride.batch + row * p.q_stride.token + head_qk * p.q_stride.head;
    const int64_t k0 = batch * p.k_stride.batch + row * p.k_stride.token + head_qk * p.k_stride.head;
    const int64_t g0 = batch * p.g_stride.batch + row * p.g_stride.token + head * p.g_stride.head;
    float q[4], k[4];
    float sum_q = 0.0f;
    float sum_k = 0.0f;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        const int c = lane + 32 * i;
        q[i] = load_scalar<T>(p.q, q0 + c, false);
        k[i] = load_scalar<T>(p.k, k0 + c, false);
        sum_q = fmaf(q[i], q[i], sum_q);
        sum_k = fmaf(k[i], k[i], sum_k);
        float x = load_scalar<T>(p.g, g0 + c, p.gate_dtype == DType::kFp32);
        if (gate.gate != Gate::kLog && p.dt_bias != nullptr) {
            x += p.dt_bias[head * kDecodeDim + c];
        }
        sm.decay[slot][c] = decay_from_log2(gate_log2(gate, x));
    }
#pragma unroll
    for (int step = 16; step > 0; step /= 2) {
        sum_q += __shfl_xor_sync(0xffffffffu, sum_q, step);
        sum_k += __shfl_xor_sync(0xffffffffu, sum_k, step);
    }
    const float norm_q = p.scale * (p.qk_l2norm != 0 ? rsqrtf(sum_q + kNormEpsilon) : 1.0f);
    const float norm_k = p.qk_l2norm != 0 ? rsqrtf(sum_k + kNormEpsilon) : 1.0f;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        sm.q[slot][lane + 32 * i] = q[i] * norm_q;
        sm.k[slot][lane + 32 * i] = k[i] * norm_k;
    }
    if (lane == 0) {
        const int64_t offset = batch * p.beta_stride.batch + row * p.beta_stride.token + head * p.beta_stride.head;
        sm.beta[slot] = activate_beta(p.beta_activation, load_scalar<T>(p.beta, offset, p.beta_dtype == DType::kFp32));
    }
}

template <typename T, StateLayout kLayout, bool kBf16>
__global__ void __launch_bounds__(kDecodeThreads, 4) kda_decode_kernel(const __grid_constant__ KdaParams p) {
    __shared__ DecodeShared sm;
    const int warp = threadIdx.x / 32;
    const int lane_idx = threadIdx.x % 32;
    const unsigned unit = blockIdx.x / kDecodeSplits;
    const int64_t n = unit / static_cast<unsigned>(p.heads_v);
    const int64_t head = unit % static_cast<unsigned>(p.heads_v);
    DecodeLane lane;
    lane.j = kLayout == StateLayout::kKV ? lane_idx / 4 : lane_idx % 8;
    lane.r = kLayout == StateLayout::kKV ? lane_idx % 4 : lane_idx / 8;
    lane.column0 = static_cast<int>(blockIdx.x % kDecodeSplits) * (kDecodeDim / kDecodeSplits) + 16 * warp;

    int64_t first_row = 0;
    int64_t tokens = p.seqlen;
    int64_t batch = n;
    if (p.cu_seqlens != nullptr) {
        first_row = load_index(p.cu_seqlens, n, p.index64);
        tokens = load_index(p.cu_seqlens, n + 1, p.index64) - first_row;
        batch = 0;
    }
    const bool per_token = p.state_slots != nullptr && p.slots_per_sequence > 1;
    const auto slot_of = [&](int64_t column) {
        return p.state_slots != nullptr ? load_index(p.state_slots, n * p.slots_stride_n + column, p.index64) : n;
    };
    const auto is_padding = [&](int64_t slot) { return p.state_slots != nullptr && slot == p.padding_slot; };

    int64_t start_column = 0;
    if (per_token && p.num_accepted != nullptr) {
        start_column = load_index(p.num_accepted, n, p.index64) - 1;
    }
    const int64_t start_slot = slot_of(start_column);
    float s[16][4];
    if (is_padding(start_slot)) {
#pragma unroll
        for (int m = 0; m < 16; ++m) {
            s[m][0] = s[m][1] = s[m][2] = s[m][3] = 0.0f;
        }
    } else {
        decode_load<kLayout, kBf16>(s, p.initial_state, start_slot * p.initial_stride_n + head * p.initial_stride_h,
                                    lane);
    }

    const GateConstants gate = gate_constants(p, head);
    for (int64_t token0 = 0; token0 < tokens; token0 += kDecodeTokens) {
        const int count = static_cast<int>(min(static_cast<int64_t>(kDecodeTokens), tokens - token0));
        __syncthreads();
        if (warp < count) {
            decode_prepare<T>(sm, p, gate, warp, batch, first_row + token0 + warp, head, lane_idx);
        }
        __syncthreads();
        for (int token = 0; token < count; ++token) {
            const int64_t row = first_row + token0 + token;
            const T* const v = static_cast<const T*>(p.v) + batch * p.v_stride.batch + row * p.v_stride.token +
                               head * p.v_stride.head + lane.column0;
            float value[4], dot[4] = {}, out[4] = {};
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                value[i] = static_cast<float>(v[decode_column<kLayout>(i, lane.r)]);
            }
#pragma unroll
            for (int m = 0; m < 16; ++m) {
                const int c = decode_channel<kLayout, kBf16>(m, lane.j);
                const float decay = sm.decay[token][c];
                const float k = sm.k[token][c];
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    s[m][i] *= decay;
                    dot[i] = fmaf(s[m][i], k, dot[i]);
                }
            }
            const float beta = sm.beta[token];
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                value[i] = beta * (value[i] - channel_sum<kLayout>(dot[i]));
            }
#pragma unroll
            for (int m = 0; m < 16; ++m) {
                const int c = decode_channel<kLayout, kBf16>(m, lane.j);
                const float k = sm.k[token][c];
                const float q = sm.q[token][c];
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    s[m][i] = fmaf(k, value[i], s[m][i]);
                    out[i] = fmaf(s[m][i], q, out[i]);
                }
            }
            T* const o = static_cast<T*>(p.out) + batch * p.out_stride.batch + row * p.out_stride.token +
                         head * p.out_stride.head + lane.column0;
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                out[i] = channel_sum<kLayout>(out[i]);
                if (lane.j == i) {
                    o[decode_column<kLayout>(i, lane.r)] = static_cast<T>(out[i]);
                }
            }
            if (per_token && token0 + token < p.slots_per_sequence) {
                const int64_t slot = slot_of(token0 + token);
                if (!is_padding(slot)) {
                    decode_store<kLayout, kBf16>(s, p.final_state, slot * p.final_stride_n + head * p.final_stride_h,
                                                 lane);
                }
            }
        }
    }
    if (!per_token && !is_padding(start_slot)) {
        decode_store<kLayout, kBf16>(s, p.final_state, start_slot * p.final_stride_n + head * p.final_stride_h, lane);
    }
}

}  // namespace flare::kda
