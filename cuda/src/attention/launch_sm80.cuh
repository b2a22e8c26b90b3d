// Launchers of the portable kernel's instances by element type.
#pragma once

#include "fwd_sm80.cuh"
#include "launch_sm80_table.h"

#define FLARE_DEFINE_LAUNCH_SM80(id, d, dv, block_m, block_n, warps, stages, blocks_per_sm, most_keys)                        \
    cudaError_t launch_sm80_##id(const Sm80Args& args, int64_t num_tiles, cudaStream_t stream) {                              \
        return args.params.dtype == DType::kBf16                                                                              \
                   ? launch_sm80<Sm80Config<__nv_bfloat16, d, dv, block_m, block_n, warps, stages, blocks_per_sm, false>>(    \
                         args, num_tiles, stream)                                                                             \
                   : launch_sm80<Sm80Config<__half, d, dv, block_m, block_n, warps, stages, blocks_per_sm, false>>(           \
                         args, num_tiles, stream);                                                                            \
    }

#define FLARE_DEFINE_LAUNCH_SM80_GENERAL(d, blocks_per_sm)                                                                    \
    cudaError_t launch_sm80_general_d##d(const Sm80Args& args, int64_t num_tiles, cudaStream_t stream) {                      \
        return args.params.dtype == DType::kBf16                                                                              \
                   ? launch_sm80<Sm80Config<__nv_bfloat16, d, d, kGeneralRows, 64, 4, 1, blocks_per_sm, true>>(args,          \
                                                                                                               num_tiles,     \
                                                                                                               stream)        \
                   : launch_sm80<Sm80Config<__half, d, d, kGeneralRows, 64, 4, 1, blocks_per_sm, true>>(args, num_tiles,      \
                                                                                                        stream);              \
    }
