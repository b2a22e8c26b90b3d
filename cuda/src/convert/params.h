// Parameters of the conversion kernels, filled by the host from validated flare params.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "api/walk.h"

namespace flare::convert {

// dtypes are FLARE_* constants throughout.
struct CastParams {
    const void* src;
    void* dst;
    int32_t src_dtype;
    int32_t dst_dtype;
    float scale;
    Walk walk;
};

struct FillParams {
    void* dst;
    int64_t element_bytes;  // 1, 2, 4 or 8
    uint64_t pattern;       // the element, repeated over 8 bytes
    Walk walk;              // its dst half
};

struct AppendParams {
    const void* k;  // [T, heads, dim_k]
    const void* v;  // [T, heads, dim_v], or null
    void* k_cache;
    void* v_cache;  // null for latent rows, whose second part (v) goes behind the first
    const void* slots;
    const float* k_descale;  // [heads] or null
    const float* v_descale;
    const float* rotary_cos;  // [positions, rotary_dim / 2] or null
    const float* rotary_sin;
    const void* positions;
    int64_t k_stride_t, k_stride_h;
    int64_t v_stride_t, v_stride_h;
    int64_t k_cache_stride_b, k_cache_stride_s, k_cache_stride_h;
    int64_t v_cache_stride_b, v_cache_stride_s, v_cache_stride_h;
    int64_t num_tokens;
    int64_t page_size;
    int32_t heads;
    int32_t dim_k;
    int32_t dim_v;
    int32_t rotary_dim;
    int32_t rotary_interleaved;
    int32_t rotates_v;  // latent rows: the rope part is v
    int32_t dtype;
    int32_t cache_dtype;  // UINT8: 656-byte rows
    int32_t index64;
};

// A cudaError_t. Nothing is launched for empty tensors.
int32_t launch_cast(const CastParams& params, int32_t sm_count, cudaStream_t stream);
int32_t launch_fill(const FillParams& params, int32_t sm_count, cudaStream_t stream);
int32_t launch_cache_append(const AppendParams& params, cudaStream_t stream);

}  // namespace flare::convert
