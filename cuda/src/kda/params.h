// Parameters of the KDA kernels, filled by the API after validation and shared by every kernel. Plain data, passed by
// value. Symbols as in the paper: per token t, on a K x V state S of one value head,
//   S <- diag(exp(gate_t)) S;  e = v_t - S^T k_t;  S <- S + beta_t k_t e^T;  o_t = scale S^T q_t.
#pragma once

#include <cstddef>
#include <cstdint>

#include <cuda_runtime_api.h>

namespace flare::kda {

enum class DType : int32_t { kFp32 = 0, kFp16 = 1, kBf16 = 2 };
enum class Gate : int32_t { kLog = 0, kSoftplus = 1, kBounded = 2 };
enum class BetaActivation : int32_t { kRaw = 0, kSigmoid = 1, kSigmoid2 = 2 };
enum class StateLayout : int32_t { kKV = 1, kVK = 2 };

// Strides in elements; the last dimension is contiguous. With cu_seqlens the batch stride is unused.
struct Strides {
    int64_t batch;
    int64_t token;
    int64_t head;
};

struct KdaParams {
    const void* q;         // [B, T, H, K]
    const void* k;         // [B, T, H, K]
    const void* v;         // [B, T, HV, V]
    const void* g;         // [B, T, HV, K]
    const void* beta;      // [B, T, HV], or [B, T, HV, V] if beta_per_channel
    const float* a_log;    // [HV]; null: exp(a_log) = 1
    const float* dt_bias;  // [HV, K] dense; null: 0
    void* out;             // [B, T, HV, V]
    Strides q_stride, k_stride, v_stride, g_stride, beta_stride, out_stride;

    DType dtype;       // of q, k, v, out
    DType gate_dtype;  // dtype or fp32
    DType beta_dtype;  // dtype or fp32
    Gate gate;
    BetaActivation beta_activation;
    int32_t qk_l2norm;
    int32_t beta_per_channel;
    int32_t deterministic;  // forward: bits don't depend on where a sequence is cut or extended, nor on batch mates
    float lower_bound;
    float scale;

    int64_t num_sequences;  // N; B when dense
    int64_t seqlen;         // T: tokens of each sequence, or of all together with cu_seqlens
    int64_t heads_qk;       // H
    int64_t heads_v;        // HV, a multiple of H
    int32_t head_dim_k;
    int32_t head_dim_v;
    const void* cu_seqlens;  // [N + 1], null when dense
    int32_t index64;         // index arrays are int64 (else int32)

    // States [rows, HV, K, V] or [rows, HV, V, K], inner block dense. Row of sequence n: state_slots[n], or n without
    // slots. A sequence whose slot is padding_slot starts from zeros and stores no state.
    const void* initial_state;  // null: zeros
    void* final_state;          // null: not wanted
    int64_t initial_stride_n, initial_stride_h;
    int64_t final_stride_n, final_stride_h;
    DType initial_dtype;  // fp32 or bf16
    DType final_dtype;
    StateLayout state_layout;
    const void* state_slots;
    int64_t padding_slot;

    // Forward only: the state after every checkpoint_interval tokens, dense rows [.., HV, K x V]. Row of the j-th
    // checkpoint of sequence n: n * floor(T / interval) + j, or cu_checkpoints[n] + j.
    void* checkpoints;
    const void* cu_checkpoints;
    int64_t checkpoint_interval;  // a multiple of 64; 0: none
    DType checkpoint_dtype;

    // state_slots [N, slots_per_sequence]. More than one, in decode: see launch_kda_decode_sm80.
    int64_t slots_stride_n;
    int64_t slots_per_sequence;
    const void* num_accepted;
};

// 0, or a cudaError_t. The caller has checked *_supported and the workspace size.
int32_t launch_kda_forward_sm90(const KdaParams& params, void* workspace, size_t bytes, cudaStream_t stream);
size_t kda_forward_sm90_workspace(const KdaParams& params);
// Null when the kernel can run these params, else the first reason why not. Pure host code.
const char* kda_forward_sm90_refusal(const KdaParams& params);
const char* kda_forward_sm90_name(const KdaParams& params);

// Forward on any card, chunked: K a multiple of 8 up to 128, V a multiple of 8, 16-bit q, k, v. The same conventions as above.
int32_t launch_kda_forward_sm80(const KdaParams& params, int32_t sm_count, void* workspace, cudaStream_t stream);
size_t kda_forward_sm80_workspace(const KdaParams& params);
const char* kda_forward_sm80_refusal(const KdaParams& params);
const char* kda_forward_sm80_name(const KdaParams& params);
// The first half of it: the operand blocks of chunk_sm80.cuh into the workspace. There are some: seqlen > 0.
int32_t launch_kda_prepare_sm80(const KdaParams& params, void* workspace, cudaStream_t stream);

// One or a few tokens per sequence on a pool of states (final_state; initial_state is read, and may be the same
// memory). slots_per_sequence = 1: the state is read before the first and written after the last token. Otherwise it is
// written after every token t to slots[n][t], and the start state is slots[n][num_accepted[n] - 1] (slots[n][0] without
// num_accepted). K = V = 64 or 128.
int32_t launch_kda_decode_sm80(const KdaParams& params, cudaStream_t stream);
const char* kda_decode_sm80_refusal(const KdaParams& params);
const char* kda_decode_sm80_name(const KdaParams& params);

// The recurrence token by token for everything else: forward and decode, K <= 512, every dtype, stride, alignment and option.
int32_t launch_kda_recurrent_sm80(const KdaParams& params, cudaStream_t stream);
const char* kda_recurrent_sm80_refusal(const KdaParams& params);

}  // namespace flare::kda
