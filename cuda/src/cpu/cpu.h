// The CPU backend as the api layer sees it. Params arrive validated and normalised (api/validate.h says what that means), pointers
// checked; entries of index arrays are not: each operation checks those on the calling thread before it writes anything.
#pragma once

#include <cstdint>

#include "flare.h"

namespace flare::cpu {

int32_t attention_forward(const flare_attention_params& params);
int32_t attention_merge(const flare_attention_merge_params& params);
int32_t mla_prefill(const flare_mla_prefill_params& params);
int32_t mla_decode(const flare_mla_decode_params& params);
int32_t kda_forward(const flare_kda_forward_params& params);
int32_t kda_decode(const flare_kda_decode_params& params);
int32_t cast(const flare_cast_params& params);
int32_t fill(const flare_fill_params& params);
int32_t cache_append(const flare_cache_append_params& params);

uint64_t attention_workspace(const flare_attention_params& params);
uint64_t mla_prefill_workspace(const flare_mla_prefill_params& params);
uint64_t mla_decode_workspace(const flare_mla_decode_params& params);
uint64_t kda_forward_workspace(const flare_kda_forward_params& params);
uint64_t kda_decode_workspace(const flare_kda_decode_params& params);

// "cpu_avx512" and the like: the instruction set that the kernels of this machine use.
const char* isa_name();

}  // namespace flare::cpu
