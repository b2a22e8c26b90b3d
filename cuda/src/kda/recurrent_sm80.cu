// The recurrence itself, token by token, for whatever the chunked and the decode kernels don't take: fp32, odd sizes
// and strides, beta per channel. A block owns 16 value columns of one (sequence, value head), a warp four of them; a
// lane keeps every 32nd key channel of these in registers. Sums over channels are butterflies over the warp.
#include "kda/token.cuh"

namespace flare::kda {
namespace {

constexpr int kThreads = 128;
constexpr int kWarps = kThreads / 32;
constexpr int kTokens = kWarps;  // prepared at a time, one by each warp
constexpr int kWarpColumns = 4;
constexpr int kColumns = kWarps * kWarpColumns;

template <int kSteps>
struct Shared {
    float q[kTokens][32 * kSteps];
    float k[kTokens][32 * kSteps];
    float decay_less_1[kTokens][32 * kSteps];
    float v[kTokens][kColumns];
    float beta[kTokens][kColumns];
};

// The state's element (channel c, column v).
__device__ __forceinline__ int64_t state_offset(const KdaParams& p, int c, int v) {
    return p.state_layout == StateLayout::kVK ? static_cast<int64_t>(v) * p.head_dim_k + c
                                              : static_cast<int64_t>(c) * p.head_dim_v + v;
}

template <int kSteps>
__device__ __forceinline__ void store(const float (&s)[kSteps][kWarpColumns], const KdaParams& p, void* state,
                                      DType dtype, int64_t base, int column0, int lane) {
#pragma unroll
    for (int m = 0; m < kSteps; ++m) {
        const int c = lane + 32 * m;
#pragma unroll
        for (int i = 0; i < kWarpColumns; ++i) {
            if (c < p.head_dim_k && column0 + i < p.head_dim_v) {
                store_state(state, base + state_offset(p, c, column0 + i), dtype == DType::kBf16, s[m][i]);
            }
        }
    }
}

template <int kSteps>
__global__ void __launch_bounds__(kThreads, kSteps == 16 ? 3 : 4)
    kda_recurrent_kernel(const __grid_constant__ KdaParams p, int blocks_per_state, int64_t checkpoints_per_sequence) {
    __shared__ Shared<kSteps> sm;
    const int warp = threadIdx.x / 32;
    const int lane = threadIdx.x % 32;
    // No 64-bit division anywhere here: it is a function call, whose convention spills.
    const uint32_t unit = blockIdx.x / static_cast<uint32_t>(blocks_per_state);
    const int block_column0 = static_cast<int>(blockIdx.x - unit * static_cast<uint32_t>(blocks_per_state)) * kColumns;
    const int column0 = block_column0 + warp * kWarpColumns;
    const uint32_t heads = static_cast<uint32_t>(p.heads_v);
    const int64_t n = unit / heads;
    const int64_t head = unit % heads;
    const int64_t head_qk = (unit % heads) / (heads / static_cast<uint32_t>(p.heads_qk));
    const TokenSpan span = token_span(p, n);
    const Slots slots{p, n};
    const int64_t start_slot = slots.start();
    const bool has_state = !slots.is_padding(start_slot);

    float s[kSteps][kWarpColumns];
#pragma unroll
    for (int m = 0; m < kSteps; ++m) {
        const int c = lane + 32 * m;
#pragma unroll
        for (int i = 0; i < kWarpColumns; ++i) {
            const bool inside =
                c < p.head_dim_k && column0 + i < p.head_dim_v && has_state && p.initial_state != nullptr;
            s[m][i] = inside ? load_state(p.initial_state,
                                          start_slot * p.initial_stride_n + head * p.initial_stride_h +
                                              state_offset(p, c, column0 + i),
                                          p.initial_dtype == DType::kBf16)
                             : 0.0f;
        }
    }
    int64_t checkpoint_row = 0;
    int64_t tokens_to_checkpoint = -1;
    if (p.checkpoints != nullptr) {
        tokens_to_checkpoint = p.checkpoint_interval;
        checkpoint_row =
            p.cu_checkpoints != nullptr ? load_index(p.cu_checkpoints, n, p.index64) : n * checkpoints_per_sequence;
    }

    const GateConstants gate = gate_constants(p, head);
    for (int64_t token0 = 0; token0 < span.count; token0 += kTokens) {
        const int count = static_cast<int>(min(static_cast<int64_t>(kTokens), span.count - token0));
        __syncthreads();
        if (warp < count) {
            const int64_t token = token0 + warp;
            prepare_token<kSteps>(sm.q[warp], sm.k[warp], sm.decay_less_1[warp], p, gate, span, token, head, head_qk,
                                  lane);
            const int column = block_column0 + lane % kColumns;
            if (lane < kColumns) {
                const bool inside = column < p.head_dim_v;
                sm.v[warp][lane] =
                    inside ? load_any(p.v, element_offset(p.v_stride, span, token, head) + column, p.dtype) : 0.0f;
                sm.beta[warp][lane] = inside ? token_beta(p, span, token, head, column) : 0.0f;
            }
        }
        __syncthreads();
        for (int t = 0; t < count; ++t) {
            float dot[kWarpColumns] = {}, out[kWarpColumns] = {};
#pragma unroll
            for (int m = 0; m < kSteps; ++m) {
                const float decay_less_1 = sm.decay_less_1[t][lane + 32 * m];
                const float k = sm.k[t][lane + 32 * m];
#pragma unroll
                for (int i = 0; i < kWarpColumns; ++i) {
                    s[m][i] = fmaf(s[m][i], decay_less_1, s[m][i]);
                    dot[i] = fmaf(s[m][i], k, dot[i]);
                }
            }
#pragma unroll
            for (int step = 16; step > 0; step /= 2) {
#pragma unroll
                for (int i = 0; i < kWarpColumns; ++i) {
                    dot[i] += __shfl_xor_sync(0xffffffffu, dot[i], step);
                }
            }
#pragma unroll
            for (int i = 0; i < kWarpColumns; ++i) {
                const int column = warp * kWarpColumns + i;
                dot[i] = sm.beta[t][column] * (sm.v[t][column] - dot[i]);
            }
#pragma unroll
            for (int m = 0; m < kSteps; ++m) {
                const float k = sm.k[t][lane + 32 * m];
                const float q = sm.q[t][lane + 32 * m];
#pragma unroll
                for (int i = 0; i < kWarpColumns; ++i) {
                    s[m][i] = fmaf(k, dot[i], s[m][i]);
                    out[i] = fmaf(s[m][i], q, out[i]);
                }
            }
#pragma unroll
            for (int step = 16; step > 0; step /= 2) {
#pragma unroll
                for (int i = 0; i < kWarpColumns; ++i) {
                    out[i] += __shfl_xor_sync(0xffffffffu, out[i], step);
                }
            }
#pragma unroll
            for (int i = 0; i < kWarpColumns; ++i) {
                if (lane == i && column0 + i < p.head_dim_v) {
                    store_any(p.out, element_offset(p.out_stride, span, token0 + t, head) + column0 + i, p.dtype,
                              out[i]);
                }
            }
            if (slots.per_token() && token0 + t < p.slots_per_sequence) {
                const int64_t slot = slots.at(token0 + t);
                if (!slots.is_padding(slot)) {
                    store(s, p, p.final_state, p.final_dtype, slot * p.final_stride_n + head * p.final_stride_h,
                          column0, lane);
                }
            }
            if (--tokens_to_checkpoint == 0) {
                store(s, p, p.checkpoints, p.checkpoint_dtype,
                      (checkpoint_row * p.heads_v + head) * p.head_dim_k * p.head_dim_v, column0, lane);
                ++checkpoint_row;
                tokens_to_checkpoint = p.checkpoint_interval;
            }
        }
    }
    if (p.final_state != nullptr && !slots.per_token() && has_state) {
        store(s, p, p.final_state, p.final_dtype, start_slot * p.final_stride_n + head * p.final_stride_h, column0,
              lane);
    }
}

int64_t blocks_per_state(const KdaParams& p) {
    return (p.head_dim_v + kColumns - 1) / kColumns;
}

}  // namespace

const char* kda_recurrent_sm80_refusal(const KdaParams& p) {
    if (p.num_sequences * p.heads_v > INT32_MAX / blocks_per_state(p)) {
        return "more blocks than a grid holds";
    }
    return nullptr;
}

int32_t launch_kda_recurrent_sm80(const KdaParams& p, cudaStream_t stream) {
    const int per_state = static_cast<int>(blocks_per_state(p));
    const unsigned blocks = static_cast<unsigned>(p.num_sequences * p.heads_v * per_state);
    if (blocks == 0) {
        return cudaSuccess;
    }
    const int64_t checkpoints = p.checkpoints != nullptr ? p.seqlen / p.checkpoint_interval : 0;
    if (p.head_dim_k <= 128) {
        kda_recurrent_kernel<4><<<blocks, kThreads, 0, stream>>>(p, per_state, checkpoints);
    } else if (p.head_dim_k <= 256) {
        kda_recurrent_kernel<8><<<blocks, kThreads, 0, stream>>>(p, per_state, checkpoints);
    } else {
        kda_recurrent_kernel<16><<<blocks, kThreads, 0, stream>>>(p, per_state, checkpoints);
    }
    return cudaPeekAtLastError();
}

}  // namespace flare::kda
