// KDA decode on any CUDA device: one or a few tokens per sequence. Bound by memory: each state is read and written
// once, so what counts is that reads never stop. Many small independent warps do that best: each takes a piece of a few
// value columns of one (sequence, value head), and is gone after it. With one token a sequence there is no barrier
// wider than a warp; with more, the four warps of a block make one token each ready for all.
//
// All that a piece needs is requested at once, the token's vectors before the state: behind the state they would wait
// for it, and every latency in sequence is paid at the full queue of a busy memory (q, k, v after the state: 350 us
// instead of 276 at 256 sequences).
//
// A lane holds K / 8 key channels x kCols value columns, arranged so that accesses are wide in either layout:
//   V, K layout: lane = 8 r + j holds columns 4 i + r; channels in runs of 4 (fp32) or 8 (bf16) that the 8 lanes j
//   interleave K, V layout: lane = 4 j + r holds columns 4 r + i, channels 8 m + j
// Sums over channels are butterflies over the 8 lanes j. Normalised q and k and the decay of a token pass through the
// warp's shared memory.
#include "kda/token.cuh"

namespace flare::kda {
namespace {

template <int kDim, StateLayout kStateLayout, bool kIsBf16, bool kIsOneToken>
struct Config {
    static constexpr int kK = kDim;  // and V
    static constexpr StateLayout kLayout = kStateLayout;
    static constexpr bool kBf16 = kIsBf16;
    static constexpr bool kOneToken = kIsOneToken;  // of each sequence, dense; else any number of them
    static constexpr int kChannels = kK / 8;        // of a lane
    static constexpr int kCols = 4;                 // of a lane
    static constexpr int kColumns = 4 * kCols;      // of a piece
    static constexpr int kWarps = kOneToken ? 2 : 4;
    static constexpr int kThreads = 32 * kWarps;
    static constexpr int kTokens = kOneToken ? 1 : kWarps;                   // ready at a time
    static constexpr int kGroup = kOneToken ? kColumns : kWarps * kColumns;  // columns that share a token's vectors
    static constexpr int kGroupPerLane = (kGroup + 31) / 32;
    static constexpr int kBlocksPerSm = kOneToken ? 8 : 3;
    static_assert(kK % kGroup == 0, "a group belongs to one state");
};

struct Lane {
    int j;  // which channels
    int r;  // which columns
};

template <typename C>
__device__ __forceinline__ int channel_of(int m, int j) {
    if constexpr (C::kLayout == StateLayout::kKV) {
        return 8 * m + j;
    } else if constexpr (C::kBf16) {
        return 64 * (m / 8) + 8 * j + m % 8;
    } else {
        return 32 * (m / 4) + 4 * j + m % 4;
    }
}

template <typename C>
__device__ __forceinline__ int column_of(int i, int r) {
    return C::kLayout == StateLayout::kKV ? 4 * r + i : 4 * i + r;
}

// Piece number -> which sequence, head and columns.
template <typename C>
struct Piece {
    uint32_t n;
    uint32_t head;
    uint32_t head_qk;
    int column0;
    int group0;  // first column of the group

    __device__ __forceinline__ Piece(const KdaParams& p, uint32_t number) {
        constexpr uint32_t per_state = C::kK / C::kColumns;
        const uint32_t heads = static_cast<uint32_t>(p.heads_v);
        const uint32_t state = number / per_state;
        column0 = static_cast<int>(number - state * per_state) * C::kColumns;
        group0 = column0 / C::kGroup * C::kGroup;
        n = state / heads;
        head = state - n * heads;
        head_qk = head / (heads / static_cast<uint32_t>(p.heads_qk));
    }
};

// A token's vectors as they lie in memory: requested long before they are used. A lane has channels 4 lane .. 4 lane +
// 3, and every 32nd value column of the group.
template <typename C>
struct RawToken {
    uint2 q, k;
    uint4 g;
    uint32_t v[C::kGroupPerLane], beta[C::kGroupPerLane];

    __device__ __forceinline__ void request(const KdaParams& p, const TokenSpan& span, int64_t token,
                                            const Piece<C>& piece, int lane_idx) {
        const int c = 4 * lane_idx;
        q = k = {0, 0};
        g = {0, 0, 0, 0};
        if (c < C::kK) {
            q = load_raw4(p.q, element_offset(p.q_stride, span, token, piece.head_qk) + c);
            k = load_raw4(p.k, element_offset(p.k_stride, span, token, piece.head_qk) + c);
            const int64_t g0 = element_offset(p.g_stride, span, token, piece.head) + c;
            if (p.gate_dtype == DType::kFp32) {
                g = *reinterpret_cast<const uint4*>(static_cast<const float*>(p.g) + g0);
            } else {
                const uint2 half = load_raw4(p.g, g0);
                g.x = half.x, g.y = half.y;
            }
        }
#pragma unroll
        for (int i = 0; i < C::kGroupPerLane; ++i) {
            const int column = piece.group0 + lane_idx + 32 * i;
            v[i] = beta[i] = 0;
            if (lane_idx + 32 * i < C::kGroup) {
                v[i] = static_cast<const uint16_t*>(p.v)[element_offset(p.v_stride, span, token, piece.head) + column];
                beta[i] = load_raw(
                    p.beta,
                    element_offset(p.beta_stride, span, token, piece.head) + (p.beta_per_channel != 0 ? column : 0),
                    p.beta_dtype);
            }
        }
    }
};

// Normalised and scaled q, normalised k, decay, v and beta of a token, in shared memory.
template <typename C>
struct TokenVectors {
    alignas(16) float q[C::kK];
    alignas(16) float k[C::kK];
    alignas(16) float decay[C::kK];
    float v[C::kGroup];
    float beta[C::kGroup];

    __device__ __forceinline__ void set(const RawToken<C>& raw, const KdaParams& p, const GateConstants& gate,
                                        const float4& bias, int lane_idx) {
        float q4[4], k4[4], g4[4];
        convert4(q4, raw.q, p.dtype);
        convert4(k4, raw.k, p.dtype);
        if (p.gate_dtype == DType::kFp32) {
            g4[0] = __uint_as_float(raw.g.x), g4[1] = __uint_as_float(raw.g.y);
            g4[2] = __uint_as_float(raw.g.z), g4[3] = __uint_as_float(raw.g.w);
        } else {
            convert4(g4, {raw.g.x, raw.g.y}, p.gate_dtype);
        }
        float sum_q = 0.0f;
        float sum_k = 0.0f;
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            sum_q = fmaf(q4[i], q4[i], sum_q);
            sum_k = fmaf(k4[i], k4[i], sum_k);
        }
#pragma unroll
        for (int step = 16; step > 0; step /= 2) {
            sum_q += __shfl_xor_sync(0xffffffffu, sum_q, step);
            sum_k += __shfl_xor_sync(0xffffffffu, sum_k, step);
        }
        const float norm_q = p.scale * (p.qk_l2norm != 0 ? rsqrtf(sum_q + kNormEpsilon) : 1.0f);
        const float norm_k = p.qk_l2norm != 0 ? rsqrtf(sum_k + kNormEpsilon) : 1.0f;
        if (4 * lane_idx < C::kK) {
            reinterpret_cast<float4*>(q)[lane_idx] = {q4[0] * norm_q, q4[1] * norm_q, q4[2] * norm_q, q4[3] * norm_q};
            reinterpret_cast<float4*>(k)[lane_idx] = {k4[0] * norm_k, k4[1] * norm_k, k4[2] * norm_k, k4[3] * norm_k};
            reinterpret_cast<float4*>(decay)[lane_idx] = {
                decay_from_log2(gate_log2(gate, g4[0] + bias.x)), decay_from_log2(gate_log2(gate, g4[1] + bias.y)),
                decay_from_log2(gate_log2(gate, g4[2] + bias.z)), decay_from_log2(gate_log2(gate, g4[3] + bias.w))};
        }
#pragma unroll
        for (int i = 0; i < C::kGroupPerLane; ++i) {
            if (lane_idx + 32 * i < C::kGroup) {
                v[lane_idx + 32 * i] = convert(raw.v[i], p.dtype);
                beta[lane_idx + 32 * i] = activate_beta(p.beta_activation, convert(raw.beta[i], p.beta_dtype));
            }
        }
    }
};

// This lane's first element of a piece of the pool; the others lie at constant distances.
template <typename C>
__device__ __forceinline__ int64_t lane_offset(int64_t slot, int64_t stride_n, int64_t stride_h, const Piece<C>& piece,
                                               const Lane& lane) {
    const int in_state = C::kLayout == StateLayout::kVK
                             ? (piece.column0 + column_of<C>(0, lane.r)) * C::kK + channel_of<C>(0, lane.j)
                             : channel_of<C>(0, lane.j) * C::kK + piece.column0 + column_of<C>(0, lane.r);
    return slot * stride_n + piece.head * stride_h + in_state;
}

template <typename C>
__device__ __forceinline__ constexpr int distance(int m, int i) {
    return C::kLayout == StateLayout::kVK ? column_of<C>(i, 0) * C::kK + channel_of<C>(m, 0)
                                          : channel_of<C>(m, 0) * C::kK + column_of<C>(i, 0);
}

template <typename C>
__device__ __forceinline__ void read_piece(float (&s)[C::kChannels][C::kCols], const KdaParams& p, int64_t slot,
                                           const Piece<C>& piece, const Lane& lane) {
    const int64_t at = lane_offset<C>(slot, p.initial_stride_n, p.initial_stride_h, piece, lane);
    if constexpr (C::kLayout == StateLayout::kVK && C::kBf16) {
        const __nv_bfloat16* const from = static_cast<const __nv_bfloat16*>(p.initial_state) + at;
#pragma unroll
        for (int i = 0; i < C::kCols; ++i) {
#pragma unroll
            for (int m = 0; m < C::kChannels; m += 8) {
                float x[8];
                unpack8<__nv_bfloat16>(x, *reinterpret_cast<const uint4*>(from + distance<C>(m, i)));
#pragma unroll
                for (int c = 0; c < 8; ++c) {
                    s[m + c][i] = x[c];
                }
            }
        }
    } else if constexpr (C::kLayout == StateLayout::kVK) {
        const float* const from = static_cast<const float*>(p.initial_state) + at;
#pragma unroll
        for (int i = 0; i < C::kCols; ++i) {
#pragma unroll
            for (int m = 0; m < C::kChannels; m += 4) {
                const float4 f = *reinterpret_cast<const float4*>(from + distance<C>(m, i));
                s[m][i] = f.x, s[m + 1][i] = f.y, s[m + 2][i] = f.z, s[m + 3][i] = f.w;
            }
        }
    } else if constexpr (C::kBf16) {
        const __nv_bfloat16* const from = static_cast<const __nv_bfloat16*>(p.initial_state) + at;
#pragma unroll
        for (int m = 0; m < C::kChannels; ++m) {
            const uint2 u = *reinterpret_cast<const uint2*>(from + distance<C>(m, 0));
            const float2 low = unpack2<__nv_bfloat16>(u.x);
            const float2 high = unpack2<__nv_bfloat16>(u.y);
            s[m][0] = low.x, s[m][1] = low.y, s[m][2] = high.x, s[m][3] = high.y;
        }
    } else {
        const float* const from = static_cast<const float*>(p.initial_state) + at;
#pragma unroll
        for (int m = 0; m < C::kChannels; ++m) {
            const float4 f = *reinterpret_cast<const float4*>(from + distance<C>(m, 0));
            s[m][0] = f.x, s[m][1] = f.y, s[m][2] = f.z, s[m][3] = f.w;
        }
    }
}

template <typename C>
__device__ __forceinline__ void write_piece(const float (&s)[C::kChannels][C::kCols], const KdaParams& p, int64_t slot,
                                            const Piece<C>& piece, const Lane& lane) {
    const int64_t at = lane_offset<C>(slot, p.final_stride_n, p.final_stride_h, piece, lane);
    if constexpr (C::kLayout == StateLayout::kVK && C::kBf16) {
        __nv_bfloat16* const to = static_cast<__nv_bfloat16*>(p.final_state) + at;
#pragma unroll
        for (int i = 0; i < C::kCols; ++i) {
#pragma unroll
            for (int m = 0; m < C::kChannels; m += 8) {
                *reinterpret_cast<uint4*>(to + distance<C>(m, i)) = {
                    ptx::pack2<__nv_bfloat16>(s[m][i], s[m + 1][i]),
                    ptx::pack2<__nv_bfloat16>(s[m + 2][i], s[m + 3][i]),
                    ptx::pack2<__nv_bfloat16>(s[m + 4][i], s[m + 5][i]),
                    ptx::pack2<__nv_bfloat16>(s[m + 6][i], s[m + 7][i])};
            }
        }
    } else if constexpr (C::kLayout == StateLayout::kVK) {
        float* const to = static_cast<float*>(p.final_state) + at;
#pragma unroll
        for (int i = 0; i < C::kCols; ++i) {
#pragma unroll
            for (int m = 0; m < C::kChannels; m += 4) {
                *reinterpret_cast<float4*>(to + distance<C>(m, i)) = {s[m][i], s[m + 1][i], s[m + 2][i], s[m + 3][i]};
            }
        }
    } else if constexpr (C::kBf16) {
        __nv_bfloat16* const to = static_cast<__nv_bfloat16*>(p.final_state) + at;
#pragma unroll
        for (int m = 0; m < C::kChannels; ++m) {
            *reinterpret_cast<uint2*>(to + distance<C>(m, 0)) = {ptx::pack2<__nv_bfloat16>(s[m][0], s[m][1]),
                                                                 ptx::pack2<__nv_bfloat16>(s[m][2], s[m][3])};
        }
    } else {
        float* const to = static_cast<float*>(p.final_state) + at;
#pragma unroll
        for (int m = 0; m < C::kChannels; ++m) {
            *reinterpret_cast<float4*>(to + distance<C>(m, 0)) = {s[m][0], s[m][1], s[m][2], s[m][3]};
        }
    }
}

// Sum over the 8 lanes that share columns.
template <typename C>
__device__ __forceinline__ float channel_sum(float x) {
    constexpr int step = C::kLayout == StateLayout::kKV ? 4 : 1;
    x += __shfl_xor_sync(0xffffffffu, x, step);
    x += __shfl_xor_sync(0xffffffffu, x, 2 * step);
    return x + __shfl_xor_sync(0xffffffffu, x, 4 * step);
}

// S <- diag(decay) S;  e = v - S^T k;  S <- S + beta k e^T;  out = S^T q.
template <typename C>
__device__ __forceinline__ void step(float (&s)[C::kChannels][C::kCols], float (&out)[C::kCols],
                                     const TokenVectors<C>& token, const Lane& lane, int in_group) {
    float e[C::kCols] = {};
#pragma unroll
    for (int m = 0; m < C::kChannels; ++m) {
        const int c = channel_of<C>(m, lane.j);
        const float decay = token.decay[c];
        const float k = token.k[c];
#pragma unroll
        for (int i = 0; i < C::kCols; ++i) {
            s[m][i] *= decay;
            e[i] = fmaf(s[m][i], k, e[i]);
        }
    }
#pragma unroll
    for (int i = 0; i < C::kCols; ++i) {
        const int column = in_group + column_of<C>(i, lane.r);
        e[i] = token.beta[column] * (token.v[column] - channel_sum<C>(e[i]));
        out[i] = 0.0f;
    }
    __syncwarp();  // NOTE: makes the compiler read k again instead of keeping it in registers, which don't suffice
#pragma unroll
    for (int m = 0; m < C::kChannels; ++m) {
        const int c = channel_of<C>(m, lane.j);
        const float k = token.k[c];
        const float q = token.q[c];
#pragma unroll
        for (int i = 0; i < C::kCols; ++i) {
            s[m][i] = fmaf(k, e[i], s[m][i]);
            out[i] = fmaf(s[m][i], q, out[i]);
        }
    }
#pragma unroll
    for (int i = 0; i < C::kCols; ++i) {
        out[i] = channel_sum<C>(out[i]);
    }
}

template <typename C>
__global__ void __launch_bounds__(C::kThreads, C::kBlocksPerSm)
    kda_decode_kernel(const __grid_constant__ KdaParams p, uint32_t pieces) {
    __shared__ TokenVectors<C> shared[C::kOneToken ? C::kWarps : C::kTokens];
    const int warp = threadIdx.x / 32;
    const int lane_idx = threadIdx.x % 32;
    const uint32_t number = blockIdx.x * C::kWarps + warp;
    if (number >= pieces) {  // not in a block whose warps meet: they are all of one state
        return;
    }
    Lane lane;
    lane.j = C::kLayout == StateLayout::kKV ? lane_idx / 4 : lane_idx % 8;
    lane.r = C::kLayout == StateLayout::kKV ? lane_idx % 4 : lane_idx / 8;
    const Piece<C> piece(p, number);
    const Slots slots{p, piece.n};
    const int64_t start_slot = slots.start();
    const bool has_state = !slots.is_padding(start_slot);
    const TokenSpan span = C::kOneToken ? TokenSpan{piece.n, 0, 1} : token_span(p, piece.n);

    // With several tokens each warp has its own.
    const int first_token = C::kOneToken ? 0 : warp;
    RawToken<C> raw;
    if (first_token < span.count) {
        raw.request(p, span, first_token, piece, lane_idx);
    }
    float4 bias = {0.0f, 0.0f, 0.0f, 0.0f};
    if (p.dt_bias != nullptr && 4 * lane_idx < C::kK) {
        bias = *reinterpret_cast<const float4*>(p.dt_bias + piece.head * C::kK + 4 * lane_idx);
    }
    const float a_log = p.a_log != nullptr ? p.a_log[piece.head] : 0.0f;
    float s[C::kChannels][C::kCols] = {};
    if (has_state) {
        read_piece<C>(s, p, start_slot, piece, lane);
    }
    const GateConstants gate{p.gate, expf(a_log) * kLog2e, p.lower_bound * kLog2e};

    const auto advance = [&](const TokenVectors<C>& token_vectors, int64_t token) {
        float out[C::kCols];
        step<C>(s, out, token_vectors, lane, piece.column0 - piece.group0);
        const int64_t out0 = element_offset(p.out_stride, span, token, piece.head) + piece.column0;
#pragma unroll
        for (int i = 0; i < C::kCols; ++i) {
            if (lane.j == i) {
                store_any(p.out, out0 + column_of<C>(i, lane.r), p.dtype, out[i]);
            }
        }
    };
    if constexpr (C::kOneToken) {
        shared[warp].set(raw, p, gate, bias, lane_idx);
        __syncwarp();
        advance(shared[warp], 0);
    } else {
#pragma unroll 1
        for (int64_t token0 = 0; token0 < span.count; token0 += C::kTokens) {
            const int count = static_cast<int>(min(int64_t{C::kTokens}, span.count - token0));
            if (token0 > 0 && warp < count) {
                raw.request(p, span, token0 + warp, piece, lane_idx);
            }
            __syncthreads();  // the previous tokens' vectors have been read
            if (warp < count) {
                shared[warp].set(raw, p, gate, bias, lane_idx);
            }
            __syncthreads();
#pragma unroll 1
            for (int t = 0; t < count; ++t) {
                advance(shared[t], token0 + t);
                if (slots.per_token() && token0 + t < p.slots_per_sequence) {
                    const int64_t slot = slots.at(token0 + t);
                    if (!slots.is_padding(slot)) {
                        write_piece<C>(s, p, slot, piece, lane);
                    }
                }
            }
        }
    }
    if ((C::kOneToken || !slots.per_token()) && has_state) {
        write_piece<C>(s, p, start_slot, piece, lane);
    }
}

bool whole_fours(const Strides& s) {
    return s.batch % 4 == 0 && s.token % 4 == 0 && s.head % 4 == 0;
}

template <typename C>
int32_t launch(const KdaParams& p, cudaStream_t stream) {
    const uint32_t pieces = static_cast<uint32_t>(p.num_sequences * p.heads_v * (C::kK / C::kColumns));
    kda_decode_kernel<C><<<(pieces + C::kWarps - 1) / C::kWarps, C::kThreads, 0, stream>>>(p, pieces);
    return cudaPeekAtLastError();
}

template <int kDim, StateLayout kLayout, bool kBf16>
int32_t launch(const KdaParams& p, cudaStream_t stream) {
    const bool one_token = p.cu_seqlens == nullptr && p.seqlen == 1 && p.slots_per_sequence <= 1;
    return one_token ? launch<Config<kDim, kLayout, kBf16, true>>(p, stream)
                     : launch<Config<kDim, kLayout, kBf16, false>>(p, stream);
}

template <int kDim>
int32_t launch(const KdaParams& p, cudaStream_t stream) {
    if (p.state_layout == StateLayout::kKV) {
        return p.final_dtype == DType::kBf16 ? launch<kDim, StateLayout::kKV, true>(p, stream)
                                             : launch<kDim, StateLayout::kKV, false>(p, stream);
    }
    return p.final_dtype == DType::kBf16 ? launch<kDim, StateLayout::kVK, true>(p, stream)
                                         : launch<kDim, StateLayout::kVK, false>(p, stream);
}

}  // namespace

const char* kda_decode_sm80_refusal(const KdaParams& p) {
    if (p.head_dim_k != p.head_dim_v || (p.head_dim_k != 64 && p.head_dim_k != 128)) {
        return "head_dim_k and head_dim_v must both be 64 or 128";
    }
    if (p.dtype == DType::kFp32) {
        return "dtype must be fp16 or bf16";
    }
    if (p.initial_stride_n % 8 != 0 || p.initial_stride_h % 8 != 0) {
        return "strides of the state must be multiples of 8";
    }
    if (!whole_fours(p.q_stride) || !whole_fours(p.k_stride) || !whole_fours(p.g_stride)) {
        return "strides of q, k and g must be multiples of 4";
    }
    if (p.num_sequences * p.heads_v > INT32_MAX / (p.head_dim_v / 4)) {
        return "more than 2^31 pieces of states";
    }
    return nullptr;
}

const char* kda_decode_sm80_name(const KdaParams& p) {
    return p.head_dim_k == 64
               ? (p.final_dtype == DType::kBf16 ? "kda_decode_sm80_k64_bf16_state" : "kda_decode_sm80_k64_fp32_state")
               : (p.final_dtype == DType::kBf16 ? "kda_decode_sm80_k128_bf16_state"
                                                : "kda_decode_sm80_k128_fp32_state");
}

int32_t launch_kda_decode_sm80(const KdaParams& p, cudaStream_t stream) {
    if (p.num_sequences == 0) {
        return cudaSuccess;
    }
    return p.head_dim_k == 64 ? launch<64>(p, stream) : launch<128>(p, stream);
}

}  // namespace flare::kda
