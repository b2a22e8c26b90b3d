// Launchers of the portable kernels' instances, built by forward_d*_sm80.cu, decode_sm80.cu and fma_sm80.cu.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "params.h"

namespace flare::attention {

struct Sm80Args;
using Sm80Launch = cudaError_t(const Sm80Args& args, int64_t num_tiles, cudaStream_t stream);

#define FLARE_ATTENTION_SM80(id, d, dv, block_m, block_n, warps, stages, blocks_per_sm, most_keys) \
    Sm80Launch launch_sm80_##id;
#include "forward_sm80_configs.inc"
#undef FLARE_ATTENTION_SM80

Sm80Launch launch_sm80_general_d64;
Sm80Launch launch_sm80_general_d128;
Sm80Launch launch_sm80_general_d256;
Sm80Launch launch_sm80_decode;
Sm80Launch launch_sm80_fma;

}  // namespace flare::attention
