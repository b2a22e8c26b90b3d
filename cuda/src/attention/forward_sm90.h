// The Hopper attention forward kernels as the dispatch sees them.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "params.h"

namespace flare::attention {

// What an instance is built for: bf16 and fp16, or e4m3 with bf16 out.
enum class Sm90Elements { k16Bit, kE4m3 };

// Whether these kernels can run the parameters: FLARE_OK or the unsupported status. Pure: no device is asked.
int32_t select_attention_sm90(const FwdParams& p);

// "attention_sm90_d128_128x176" and the like; only after select_attention_sm90 said FLARE_OK.
const char* attention_sm90_kernel_name(const FwdParams& p);

// Current device, CC 9.0; only after select_attention_sm90 said FLARE_OK. p.sm_count is the device's.
int32_t launch_attention_sm90(const FwdParams& p, cudaStream_t stream);

}  // namespace flare::attention
