// The CUDA backend of a build without nvcc: every request says so.
#include "api/gpu.h"
#include "api/status.h"

namespace flare::gpu {
namespace {

int32_t no_cuda(int32_t device) {
    return fail(FLARE_ERROR_NO_CUDA,
                "device: asked for CUDA device %d, but this libflare was built without CUDA; use device = -1 (CPU), or build "
                "with nvcc on the PATH",
                device);
}

}  // namespace

#define FLARE_NO_CUDA(operation, params_type)                                     \
    int32_t operation(const params_type& params) { return no_cuda(params.device); } \
    int32_t operation##_kernel_name(const params_type& params, char*, uint64_t) { return no_cuda(params.device); }
#define FLARE_NO_CUDA_WORKSPACE(operation, params_type) \
    int32_t operation(const params_type& params, uint64_t*) { return no_cuda(params.device); }

int32_t attention_forward(const flare_attention_params& params) { return no_cuda(params.device); }
int32_t attention_kernel_name(const flare_attention_params& params, char*, uint64_t) { return no_cuda(params.device); }
FLARE_NO_CUDA(attention_merge, flare_attention_merge_params)
FLARE_NO_CUDA(mla_prefill, flare_mla_prefill_params)
FLARE_NO_CUDA(mla_decode, flare_mla_decode_params)
FLARE_NO_CUDA(kda_forward, flare_kda_forward_params)
FLARE_NO_CUDA(kda_decode, flare_kda_decode_params)
FLARE_NO_CUDA(cast, flare_cast_params)
FLARE_NO_CUDA(fill, flare_fill_params)
FLARE_NO_CUDA(cache_append, flare_cache_append_params)
FLARE_NO_CUDA_WORKSPACE(attention_workspace, flare_attention_params)
FLARE_NO_CUDA_WORKSPACE(mla_prefill_workspace, flare_mla_prefill_params)
FLARE_NO_CUDA_WORKSPACE(mla_decode_workspace, flare_mla_decode_params)
FLARE_NO_CUDA_WORKSPACE(kda_forward_workspace, flare_kda_forward_params)
FLARE_NO_CUDA_WORKSPACE(kda_decode_workspace, flare_kda_decode_params)

const char* build_text() { return "no CUDA (built without nvcc)"; }

}  // namespace flare::gpu
