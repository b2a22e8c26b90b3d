// Host side of portable MLA decode: takes everything. Status codes are those of flare.h.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>

#include "params.h"

namespace flare::mla {

const char* mla_decode_sm80_kernel_name(const MlaDecodeParams& params);

// Pure; never more for smaller maxima.
size_t mla_decode_sm80_workspace(const MlaDecodeParams& params);

// Launches on the stream, no synchronisation, safe under graph capture. workspace is 256-byte aligned.
int32_t launch_mla_decode_sm80(const MlaDecodeParams& params, void* workspace, size_t bytes, cudaStream_t stream);

}  // namespace flare::mla
