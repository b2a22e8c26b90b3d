// Host side of portable MLA prefill: takes everything. Status codes are those of flare.h.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>

#include "params.h"

namespace flare::mla {

const char* mla_prefill_sm80_kernel_name(const MlaPrefillParams& params);

// Pure; never more for smaller maxima. 0 for the up-projecting kernel: K and V live in shared memory alone.
size_t mla_prefill_sm80_workspace(const MlaPrefillParams& params);

int32_t launch_mla_prefill_sm80(const MlaPrefillParams& params, void* workspace, size_t bytes, cudaStream_t stream);

}  // namespace flare::mla
