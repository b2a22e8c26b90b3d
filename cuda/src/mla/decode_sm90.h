// Host side of the Hopper MLA decode kernels. Status codes are those of flare.h.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>

#include "params.h"

namespace flare::mla {

// FLARE_OK when launch_mla_decode_sm90 takes these params, else the FLARE_UNSUPPORTED_* code that says why not. Pure.
int32_t select_mla_decode_sm90(const MlaDecodeParams& params);

// Text for flare_kernel_name. Pure.
const char* mla_decode_sm90_kernel_name(const MlaDecodeParams& params);

// Pure; depends on the device's multiprocessor count, Sq and H alone.
size_t mla_decode_sm90_workspace(const MlaDecodeParams& params);

// One launch on the stream, no synchronisation, safe under graph capture. workspace is 256-byte aligned and may hold anything.
int32_t launch_mla_decode_sm90(const MlaDecodeParams& params, void* workspace, size_t bytes, cudaStream_t stream);

}  // namespace flare::mla
