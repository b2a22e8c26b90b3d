// KDA decode on any CUDA device: one or a few tokens per sequence. Bound by memory: each state is read and written once, so what counts
// is that reads never stop.
//
// A warp works alone: it walks over pieces of 16 value columns of one (sequence, value head), the next kStages of which are on their way
// into its own ring in shared memory (cp.async), while it updates one in registers and writes it back from there. There is no barrier
// wider than a warp. A lane holds K / 8 key channels x 4 value columns, arranged so that every access is wide in either layout:
//   V, K layout: lane = 8 r + j holds columns 4 i + r (i < 4); channels in runs of 4 (fp32) or 8 (bf16) that the 8 lanes j interleave
//   K, V layout: lane = 4 j + r holds columns 4 r + i (i < 4), channels 8 m + j
// Sums over channels are butterflies over the 8 lanes j. Normalised q and k and the decay of a token pass through the warp's shared memory.
#include "kda/token.cuh"

#include "ptx/ldst.cuh"
#include "ptx/mbarrier.cuh"

namespace flare::kda {
namespace {

constexpr int kThreads = 128;
constexpr int kWarps = kThreads / 32;
constexpr int kColumns = 16;  // of a piece

template <int kDim, StateLayout kStateLayout, bool kIsBf16>
struct Config {
    static constexpr int kK = kDim;
    static constexpr StateLayout kLayout = kStateLayout;
    static constexpr bool kBf16 = kIsBf16;
    static constexpr int kChannels = kK / 8;  // of a lane
    static constexpr int kElementBytes = kBf16 ? 2 : 4;
    static constexpr int kPieceBytes = kColumns * kK * kElementBytes;
#ifdef FLARE_DECODE_STAGES
    static constexpr int kStages = FLARE_DECODE_STAGES;
#else
    static constexpr int kStages = 3;
#endif
    static constexpr int kTokenBytes = 3 * 4 * kK;  // q, k and decay of one token
    static constexpr int kWarpBytes = kStages * kPieceBytes + kTokenBytes;
    static constexpr int kSharedBytes = kWarps * kWarpBytes;
    static constexpr int kBlocksPerSm = 227 * 1024 / (kSharedBytes + 1024);
    static_assert(kSharedBytes <= 160 * 1024, "an A100 runs it");
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
struct Piece {
    int64_t n;
    int64_t head;
    int column0;

    __device__ __forceinline__ Piece(const KdaParams& p, uint32_t piece) {
        const uint32_t per_state = static_cast<uint32_t>(p.head_dim_v) / kColumns;
        const uint32_t heads = static_cast<uint32_t>(p.heads_v);
        const uint32_t state = piece / per_state;
        const uint32_t sequence = state / heads;
        column0 = static_cast<int>(piece - state * per_state) * kColumns;
        n = sequence;
        head = state - sequence * heads;
    }
};

// Requests a piece of the pool into shared memory: there as [16][K] or [K][16], dense.
template <typename C>
__device__ __forceinline__ void request(uint32_t smem, const KdaParams& p, uint32_t number, int lane) {
    const Piece piece(p, number);
    const Slots slots{p, piece.n};
    const int64_t slot = slots.start();
    if (slots.is_padding(slot)) {
        return;
    }
    const int64_t base = slot * p.initial_stride_n + piece.head * p.initial_stride_h;
    const char* const pool = static_cast<const char*>(p.initial_state);
    constexpr int kWide = 16 / C::kElementBytes;  // elements of 16 bytes
    if constexpr (C::kLayout == StateLayout::kVK) {
        const char* const from = pool + (base + static_cast<int64_t>(piece.column0) * C::kK + lane * kWide) * C::kElementBytes;
#pragma unroll
        for (int i = 0; i < C::kPieceBytes / 512; ++i) {
            ptx::cp_async_16(smem + 512 * i + 16 * lane, from + 512 * i, 16);
        }
    } else {
        constexpr int kPerRow = kColumns / kWide;
        constexpr int kRows = 32 / kPerRow;
        const int64_t pitch = static_cast<int64_t>(p.head_dim_v) * C::kElementBytes;
        const char* const from = pool + (base + piece.column0 + lane % kPerRow * kWide) * C::kElementBytes + lane / kPerRow * pitch;
#pragma unroll
        for (int i = 0; i < C::kPieceBytes / 512; ++i) {
            ptx::cp_async_16(smem + 512 * i + 16 * lane, from + kRows * i * pitch, 16);
        }
    }
}

template <typename C>
__device__ __forceinline__ void read_piece(float (&s)[C::kChannels][4], uint32_t smem, const Lane& lane) {
    if constexpr (C::kLayout == StateLayout::kVK) {
        constexpr int kRun = C::kBf16 ? 8 : 4;
#pragma unroll
        for (int i = 0; i < 4; ++i) {
#pragma unroll
            for (int m = 0; m < C::kChannels; m += kRun) {
                uint32_t u[4];
                ptx::ld_shared_v4(u, smem + (column_of<C>(i, lane.r) * C::kK + channel_of<C>(m, lane.j)) * C::kElementBytes);
                if constexpr (C::kBf16) {
                    float x[8];
                    unpack8<__nv_bfloat16>(x, {u[0], u[1], u[2], u[3]});
#pragma unroll
                    for (int c = 0; c < 8; ++c) {
                        s[m + c][i] = x[c];
                    }
                } else {
#pragma unroll
                    for (int c = 0; c < 4; ++c) {
                        s[m + c][i] = __uint_as_float(u[c]);
                    }
                }
            }
        }
    } else {
#pragma unroll
        for (int m = 0; m < C::kChannels; ++m) {
            const uint32_t at = smem + (channel_of<C>(m, lane.j) * kColumns + 4 * lane.r) * C::kElementBytes;
            if constexpr (C::kBf16) {
                const float2 u = ptx::ld_shared_f2(at);
                const float2 low = unpack2<__nv_bfloat16>(__float_as_uint(u.x));
                const float2 high = unpack2<__nv_bfloat16>(__float_as_uint(u.y));
                s[m][0] = low.x, s[m][1] = low.y, s[m][2] = high.x, s[m][3] = high.y;
            } else {
                uint32_t u[4];
                ptx::ld_shared_v4(u, at);
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    s[m][i] = __uint_as_float(u[i]);
                }
            }
        }
    }
}

template <typename C>
__device__ __forceinline__ void write_piece(const float (&s)[C::kChannels][4], const KdaParams& p, int64_t slot, const Piece& piece,
                                            const Lane& lane) {
    const int64_t base = slot * p.final_stride_n + piece.head * p.final_stride_h;
    if constexpr (C::kLayout == StateLayout::kVK) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const int64_t row = base + static_cast<int64_t>(piece.column0 + column_of<C>(i, lane.r)) * C::kK;
            if constexpr (C::kBf16) {
#pragma unroll
                for (int m = 0; m < C::kChannels; m += 8) {
                    *reinterpret_cast<uint4*>(static_cast<__nv_bfloat16*>(p.final_state) + row + channel_of<C>(m, lane.j)) = {
                        ptx::pack2<__nv_bfloat16>(s[m][i], s[m + 1][i]), ptx::pack2<__nv_bfloat16>(s[m + 2][i], s[m + 3][i]),
                        ptx::pack2<__nv_bfloat16>(s[m + 4][i], s[m + 5][i]), ptx::pack2<__nv_bfloat16>(s[m + 6][i], s[m + 7][i])};
                }
            } else {
#pragma unroll
                for (int m = 0; m < C::kChannels; m += 4) {
                    *reinterpret_cast<float4*>(static_cast<float*>(p.final_state) + row + channel_of<C>(m, lane.j)) = {
                        s[m][i], s[m + 1][i], s[m + 2][i], s[m + 3][i]};
                }
            }
        }
    } else {
        const int64_t column = base + piece.column0 + 4 * lane.r;
#pragma unroll
        for (int m = 0; m < C::kChannels; ++m) {
            const int64_t offset = column + static_cast<int64_t>(channel_of<C>(m, lane.j)) * p.head_dim_v;
            if constexpr (C::kBf16) {
                *reinterpret_cast<uint2*>(static_cast<__nv_bfloat16*>(p.final_state) + offset) = {
                    ptx::pack2<__nv_bfloat16>(s[m][0], s[m][1]), ptx::pack2<__nv_bfloat16>(s[m][2], s[m][3])};
            } else {
                *reinterpret_cast<float4*>(static_cast<float*>(p.final_state) + offset) = {s[m][0], s[m][1], s[m][2], s[m][3]};
            }
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
__device__ __forceinline__ void step(float (&s)[C::kChannels][4], float (&out)[4], const float (&v)[4], const float (&beta)[4],
                                     const float* q, const float* k, const float* decay, int j) {
    float e[4] = {};
#pragma unroll
    for (int m = 0; m < C::kChannels; ++m) {
        const int c = channel_of<C>(m, j);
        const float decay_c = decay[c];
        const float k_c = k[c];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            s[m][i] *= decay_c;
            e[i] = fmaf(s[m][i], k_c, e[i]);
        }
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        e[i] = beta[i] * (v[i] - channel_sum<C>(e[i]));
        out[i] = 0.0f;
    }
#pragma unroll
    for (int m = 0; m < C::kChannels; ++m) {
        const int c = channel_of<C>(m, j);
        const float k_c = k[c];
        const float q_c = q[c];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            s[m][i] = fmaf(k_c, e[i], s[m][i]);
            out[i] = fmaf(s[m][i], q_c, out[i]);
        }
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        out[i] = channel_sum<C>(out[i]);
    }
}

template <typename C>
__global__ void __launch_bounds__(kThreads, 2) kda_decode_kernel(const __grid_constant__ KdaParams p, uint32_t pieces) {
    extern __shared__ __align__(16) char smem_raw[];
    const int lane_idx = threadIdx.x % 32;
    char* const own = smem_raw + threadIdx.x / 32 * C::kWarpBytes;
    const uint32_t ring = ptx::smem_addr(own);
    float* const q = reinterpret_cast<float*>(own + C::kStages * C::kPieceBytes);
    float* const k = q + C::kK;
    float* const decay = k + C::kK;
    Lane lane;
    lane.j = C::kLayout == StateLayout::kKV ? lane_idx / 4 : lane_idx % 8;
    lane.r = C::kLayout == StateLayout::kKV ? lane_idx % 4 : lane_idx / 8;

    const uint32_t first = blockIdx.x * kWarps + threadIdx.x / 32;
    const uint32_t stride = gridDim.x * kWarps;
    // One group a piece, empty ones behind the end included, so that the count of groups tells which have landed.
#pragma unroll 1
    for (int stage = 0; stage < C::kStages; ++stage) {
        const uint64_t number = first + static_cast<uint64_t>(stage) * stride;
        if (number < pieces) {
            request<C>(ring + stage * C::kPieceBytes, p, static_cast<uint32_t>(number), lane_idx);
        }
        ptx::cp_async_commit();
    }
    int stage = 0;
    for (uint64_t number = first; number < pieces; number += stride) {
        const Piece piece(p, static_cast<uint32_t>(number));
        const Slots slots{p, piece.n};
        const int64_t start_slot = slots.start();
        const bool has_state = !slots.is_padding(start_slot);
        const TokenSpan span = token_span(p, piece.n);
        const int64_t head_qk = static_cast<uint32_t>(piece.head) / (static_cast<uint32_t>(p.heads_v) / static_cast<uint32_t>(p.heads_qk));
        const GateConstants gate = gate_constants(p, piece.head);

        ptx::cp_async_wait<C::kStages - 1>();
        __syncwarp();
        float s[C::kChannels][4];
        read_piece<C>(s, ring + stage * C::kPieceBytes, lane);
        if (!has_state) {
#pragma unroll
            for (int m = 0; m < C::kChannels; ++m) {
                s[m][0] = s[m][1] = s[m][2] = s[m][3] = 0.0f;
            }
        }
        __syncwarp();
        const uint64_t next = number + static_cast<uint64_t>(C::kStages) * stride;
        if (next < pieces) {
            request<C>(ring + stage * C::kPieceBytes, p, static_cast<uint32_t>(next), lane_idx);
        }
        ptx::cp_async_commit();
        stage = stage + 1 == C::kStages ? 0 : stage + 1;

        for (int64_t token = 0; token < span.count; ++token) {
            float v[4], beta[4], out[4];
            const int64_t v0 = element_offset(p.v_stride, span, token, piece.head) + piece.column0;
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                v[i] = load_any(p.v, v0 + column_of<C>(i, lane.r), p.dtype);
                beta[i] = p.beta_per_channel != 0 || i == 0
                              ? token_beta(p, span, token, piece.head, piece.column0 + column_of<C>(i, lane.r))
                              : beta[0];
            }
            prepare_token<C::kK / 32>(q, k, decay, p, gate, span, token, piece.head, head_qk, lane_idx);
            __syncwarp();
            step<C>(s, out, v, beta, q, k, decay, lane.j);
            __syncwarp();
            const int64_t out0 = element_offset(p.out_stride, span, token, piece.head) + piece.column0;
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                if (lane.j == i) {
                    store_any(p.out, out0 + column_of<C>(i, lane.r), p.dtype, out[i]);
                }
            }
            if (slots.per_token() && token < p.slots_per_sequence) {
                const int64_t slot = slots.at(token);
                if (!slots.is_padding(slot)) {
                    write_piece<C>(s, p, slot, piece, lane);
                }
            }
        }
        if (!slots.per_token() && has_state) {
            write_piece<C>(s, p, start_slot, piece, lane);
        }
    }
}

uint64_t num_pieces(const KdaParams& p) {
    return static_cast<uint64_t>(p.num_sequences) * static_cast<uint64_t>(p.heads_v) * static_cast<uint64_t>(p.head_dim_v / kColumns);
}

template <typename C>
int32_t launch(const KdaParams& p, int32_t sm_count, cudaStream_t stream) {
    const auto kernel = kda_decode_kernel<C>;
    const cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, C::kSharedBytes);
    if (error != cudaSuccess) {
        return error;
    }
    const uint64_t pieces = num_pieces(p);
    const uint64_t wanted = (pieces + kWarps - 1) / kWarps;
    const uint64_t resident = static_cast<uint64_t>(sm_count) * C::kBlocksPerSm;
    kernel<<<static_cast<unsigned>(wanted < resident ? wanted : resident), kThreads, C::kSharedBytes, stream>>>(
        p, static_cast<uint32_t>(pieces));
    return cudaPeekAtLastError();
}

template <int kDim, StateLayout kLayout>
int32_t launch(const KdaParams& p, int32_t sm_count, cudaStream_t stream) {
    return p.final_dtype == DType::kBf16 ? launch<Config<kDim, kLayout, true>>(p, sm_count, stream)
                                         : launch<Config<kDim, kLayout, false>>(p, sm_count, stream);
}

template <int kDim>
int32_t launch(const KdaParams& p, int32_t sm_count, cudaStream_t stream) {
    return p.state_layout == StateLayout::kKV ? launch<kDim, StateLayout::kKV>(p, sm_count, stream)
                                              : launch<kDim, StateLayout::kVK>(p, sm_count, stream);
}

}  // namespace

const char* kda_decode_sm80_refusal(const KdaParams& p) {
    if ((p.head_dim_k != 64 && p.head_dim_k != 128) || p.head_dim_v % kColumns != 0) {
        return "head_dim_k must be 64 or 128, head_dim_v a multiple of 16";
    }
    if (p.initial_stride_n % 8 != 0 || p.initial_stride_h % 8 != 0) {
        return "strides of the state must be multiples of 8";
    }
    if (num_pieces(p) > INT32_MAX || p.num_sequences > INT32_MAX || p.heads_v > INT32_MAX) {
        return "more than 2^31 pieces of states";
    }
    return nullptr;
}

const char* kda_decode_sm80_name(const KdaParams& p) {
    return p.head_dim_k == 64 ? (p.final_dtype == DType::kBf16 ? "kda_decode_sm80_k64_bf16_state" : "kda_decode_sm80_k64_fp32_state")
                              : (p.final_dtype == DType::kBf16 ? "kda_decode_sm80_k128_bf16_state" : "kda_decode_sm80_k128_fp32_state");
}

int32_t launch_kda_decode_sm80(const KdaParams& p, int32_t sm_count, cudaStream_t stream) {
    if (num_pieces(p) == 0) {
        return cudaSuccess;
    }
    return p.head_dim_k == 64 ? launch<64>(p, sm_count, stream) : launch<128>(p, sm_count, stream);
}

}  // namespace flare::kda
