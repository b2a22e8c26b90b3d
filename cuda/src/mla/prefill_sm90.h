// Host side of the Hopper MLA prefill kernel. Status codes are those of flare.h.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>

#include "params.h"

namespace flare::mla {

// FLARE_OK when launch_mla_prefill_sm90 takes these params, else the FLARE_UNSUPPORTED_* code that says why not. Pure.
int32_t select_mla_prefill_sm90(const MlaPrefillParams& params);

// Text for flare_kernel_name. Pure.
const char* mla_prefill_sm90_kernel_name(const MlaPrefillParams& params);

// 0: K and V live in shared memory alone.
size_t mla_prefill_sm90_workspace(const MlaPrefillParams& params);

// One launch on the stream, no synchronisation, safe under graph capture.
int32_t launch_mla_prefill_sm90(const MlaPrefillParams& params, void* workspace, size_t bytes, cudaStream_t stream);

}  // namespace flare::mla
