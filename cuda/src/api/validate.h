// Argument checks, one function an operation. Each checks everything that the host can know and then normalises its params:
//   - every dtype default is resolved (out_dtype, index_dtype, gate_dtype, ...);
//   - `scale` holds the effective scale and FLARE_FLAG_SCALE is set;
//   - attention: window_left and window_right describe the mask whatever `mask` says (-1 = unbounded; causal = (-1, 0)), and bounds
//     that no length within the maxima can reach have become -1;
//   - state strides of 0 have become dense ones; slots_per_sequence 0 has become 1.
#pragma once

#include <cstdint>

#include "flare.h"

namespace flare {

enum class Check {
    kQuery,  // workspace or kernel name: data pointers may be NULL
    kRun,    // the call itself
};

int32_t validate(flare_attention_params& params, Check check);
int32_t validate(flare_attention_merge_params& params, Check check);
int32_t validate(flare_mla_prefill_params& params, Check check);
int32_t validate(flare_mla_decode_params& params, Check check);
int32_t validate(flare_kda_forward_params& params, Check check);
int32_t validate(flare_kda_decode_params& params, Check check);
int32_t validate(flare_cast_params& params, Check check);
int32_t validate(flare_fill_params& params, Check check);
int32_t validate(flare_cache_append_params& params, Check check);

// The workspace that a call brings must be what the backend needs.
int32_t check_workspace(const void* workspace, uint64_t given, uint64_t needed);

}  // namespace flare
