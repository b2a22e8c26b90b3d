// Partial results over disjoint keys -> one: lse = ln sum_p exp(lse_p), out = sum_p exp(lse_p - lse) out_p.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "params.h"

namespace flare::attention {

struct MergeParams {
    const void* partial_out;   // [P, B, S, H, D], last dimension contiguous
    const float* partial_lse;  // [P, B, S, H]
    int64_t partial_out_stride_p;
    int64_t partial_lse_stride_p;
    Strides partial_out_stride;
    Strides partial_lse_stride;
    DType dtype;
    void* out;   // [B, S, H, D]
    float* lse;  // null when not wanted
    Strides out_stride;
    Strides lse_stride;
    DType out_dtype;
    int64_t num_partials;
    int64_t batch;
    int64_t seqlen;
    int64_t heads;
    int64_t head_dim;
    const float* sink;  // [H] or null
    // Lengths of the rows that are written, as in FwdParams; out and lse are packed with cu_seqlens. Null = all.
    const int32_t* cu_seqlens;
    const int32_t* seqused;
    int32_t index64;
};

cudaError_t launch_merge_sm80(const MergeParams& p, cudaStream_t stream);

}  // namespace flare::attention
