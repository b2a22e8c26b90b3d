// Portable MLA prefill: tensor cores where they take the params, else the plain kernel.
#include "prefill_sm80.h"

#include "absorbed_sm80.h"

namespace flare::mla {

const char* mla_prefill_sm80_kernel_name(const MlaPrefillParams&) {
    return "mla_prefill_sm80_plain";
}

size_t mla_prefill_sm80_workspace(const MlaPrefillParams&) {
    return 0;
}

int32_t launch_mla_prefill_sm80(const MlaPrefillParams& p, void*, size_t, cudaStream_t stream) {
    return launch_absorbed_plain(absorbed_args(p), stream);
}

}  // namespace flare::mla
