// What kda.cpp hands to the kernels of kda_kernel.h: one item of a call.
#pragma once

#include <cstdint>

namespace flare::cpu {

// One K x V state block in the caller's memory; data = nullptr where there is none.
struct KdaState {
    void* data = nullptr;
    int32_t dtype = 0;  // FLARE_FP32 or FLARE_BF16
};

// The work of one (sequence, value head) on a range of value columns. Pointers stand at token 0 of the sequence and at its head;
// strides are in elements.
struct KdaTask {
    int64_t num_tokens;
    int64_t head_dim_k, head_dim_v;
    const void* q;  // [T, K]
    const void* k;  // [T, K]
    const void* v;  // [T, V]
    const void* g;  // [T, K]
    const void* beta;  // [T], or [T, V] if beta_per_channel
    void* out;      // [T, V]
    int64_t q_stride_t, k_stride_t, v_stride_t, g_stride_t, beta_stride_t, out_stride_t;
    int32_t dtype, gate_dtype, beta_dtype;

    int32_t gate, beta_activation;
    bool qk_l2norm, beta_per_channel;
    float gate_factor;     // exp(a_log)
    float lower_bound;
    const float* dt_bias;  // [K] or nullptr
    float scale;

    int32_t state_layout;
    KdaState initial, final;

    // Forward: the state after every checkpoint_interval tokens, checkpoint_stride elements apart.
    KdaState checkpoints;
    int64_t checkpoint_interval, checkpoint_stride;

    // Decode with one slot per token: the state after token t goes to token_states + slot(t) * token_state_stride (elements).
    KdaState token_states;
    int64_t token_state_stride;
    const void* token_slots;  // nullptr: none
    int64_t token_slots_offset;  // of token 0 in token_slots
    int32_t index_dtype;
    int64_t padding_slot;

    int64_t panel_begin, panel_end;  // panels of Kernels::kda_panel value columns
};

// Tokens of one chunk. Cutting a sequence at a multiple of it and carrying an fp32 state changes no bit.
constexpr int64_t kKdaChunk = 16;

}  // namespace flare::cpu
