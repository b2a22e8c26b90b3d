// Cast, fill and cache append on CUDA.
#include "host/gpu_common.h"

namespace flare::gpu {

int32_t cast(const flare_cast_params& p) { return not_yet(p, "cast"); }
int32_t cast_kernel_name(const flare_cast_params& p, char*, uint64_t) { return not_yet(p, "cast"); }
int32_t fill(const flare_fill_params& p) { return not_yet(p, "fill"); }
int32_t fill_kernel_name(const flare_fill_params& p, char*, uint64_t) { return not_yet(p, "fill"); }
int32_t cache_append(const flare_cache_append_params& p) { return not_yet(p, "cache_append"); }
int32_t cache_append_kernel_name(const flare_cache_append_params& p, char*, uint64_t) { return not_yet(p, "cache_append"); }

}  // namespace flare::gpu
