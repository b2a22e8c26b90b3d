// The portable attention forward kernels as the dispatch sees them.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "params.h"
#include "plan_sm80.h"

namespace flare::attention {

// FLARE_OK or the unsupported status: only sizes beyond 32-bit positions or the grid are refused. Pure: no device is asked.
int32_t select_attention_sm80(const FwdParams& p);

// "attention_sm80_d128_128x64", "attention_sm80_decode_d128" and the like.
const char* attention_sm80_kernel_name(const FwdParams& p);

// Current device; only after select_attention_sm80 said FLARE_OK. workspace: sm80_workspace(p) bytes.
int32_t launch_attention_sm80(const FwdParams& p, void* workspace, cudaStream_t stream);

}  // namespace flare::attention
