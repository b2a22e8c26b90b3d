// The CUDA backend as the api layer sees it; api/no_gpu.cpp stands in for it in builds without nvcc. Params arrive validated and
// normalised (api/validate.h).
#pragma once

#include <cstddef>
#include <cstdint>

#include "flare.h"

namespace flare::gpu {

int32_t attention_forward(const flare_attention_params& params);
int32_t attention_merge(const flare_attention_merge_params& params);
int32_t mla_prefill(const flare_mla_prefill_params& params);
int32_t mla_decode(const flare_mla_decode_params& params);
int32_t kda_forward(const flare_kda_forward_params& params);
int32_t kda_decode(const flare_kda_decode_params& params);
int32_t cast(const flare_cast_params& params);
int32_t fill(const flare_fill_params& params);
int32_t cache_append(const flare_cache_append_params& params);

int32_t attention_workspace(const flare_attention_params& params, uint64_t* bytes);
int32_t mla_prefill_workspace(const flare_mla_prefill_params& params, uint64_t* bytes);
int32_t mla_decode_workspace(const flare_mla_decode_params& params, uint64_t* bytes);
int32_t kda_forward_workspace(const flare_kda_forward_params& params, uint64_t* bytes);
int32_t kda_decode_workspace(const flare_kda_decode_params& params, uint64_t* bytes);

// Each writes the name of the kernel that would run.
int32_t attention_kernel_name(const flare_attention_params& params, char* name, uint64_t capacity);
int32_t attention_merge_kernel_name(const flare_attention_merge_params& params, char* name, uint64_t capacity);
int32_t mla_prefill_kernel_name(const flare_mla_prefill_params& params, char* name, uint64_t capacity);
int32_t mla_decode_kernel_name(const flare_mla_decode_params& params, char* name, uint64_t capacity);
int32_t kda_forward_kernel_name(const flare_kda_forward_params& params, char* name, uint64_t capacity);
int32_t kda_decode_kernel_name(const flare_kda_decode_params& params, char* name, uint64_t capacity);
int32_t cast_kernel_name(const flare_cast_params& params, char* name, uint64_t capacity);
int32_t fill_kernel_name(const flare_fill_params& params, char* name, uint64_t capacity);
int32_t cache_append_kernel_name(const flare_cache_append_params& params, char* name, uint64_t capacity);

// "CUDA 13.0, sm_90a + compute_80", or why there is none.
const char* build_text();

}  // namespace flare::gpu
