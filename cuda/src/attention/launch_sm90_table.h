// One launcher a line of forward_sm90_configs.inc.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "params.h"

namespace flare::attention {

// Positions, and their sums with a window bound, stay within int32.
inline constexpr int32_t kMaxSeqlen = 1 << 28;

#define FLARE_ATTENTION_SM90(id, elements, d, dv, consumers, block_n, stages, schedule, blocks_per_sm, cluster) \
    int32_t launch_sm90_##id(const FwdParams& p, cudaStream_t stream);
#include "forward_sm90_configs.inc"
#undef FLARE_ATTENTION_SM90

}  // namespace flare::attention
