// Weak stand-ins until each CPU operation is there; a real definition replaces them at link time.
#include "api/status.h"
#include "cpu/cpu.h"

namespace flare::cpu {

#define FLARE_PENDING(operation, params_type) \
    __attribute__((weak)) int32_t operation(const params_type&) { return fail(FLARE_UNSUPPORTED_FEATURE, #operation ": no CPU kernel"); }
#define FLARE_PENDING_WORKSPACE(operation, params_type) \
    __attribute__((weak)) uint64_t operation(const params_type&) { return 0; }

FLARE_PENDING(attention_forward, flare_attention_params)
FLARE_PENDING(attention_merge, flare_attention_merge_params)
FLARE_PENDING(mla_prefill, flare_mla_prefill_params)
FLARE_PENDING(mla_decode, flare_mla_decode_params)
FLARE_PENDING(kda_forward, flare_kda_forward_params)
FLARE_PENDING(kda_decode, flare_kda_decode_params)
FLARE_PENDING(cast, flare_cast_params)
FLARE_PENDING(fill, flare_fill_params)
FLARE_PENDING(cache_append, flare_cache_append_params)
FLARE_PENDING_WORKSPACE(attention_workspace, flare_attention_params)
FLARE_PENDING_WORKSPACE(mla_prefill_workspace, flare_mla_prefill_params)
FLARE_PENDING_WORKSPACE(mla_decode_workspace, flare_mla_decode_params)
FLARE_PENDING_WORKSPACE(kda_forward_workspace, flare_kda_forward_params)
FLARE_PENDING_WORKSPACE(kda_decode_workspace, flare_kda_decode_params)
__attribute__((weak)) const char* isa_name() { return "cpu_generic"; }

}  // namespace flare::cpu
