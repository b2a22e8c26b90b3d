// Portable MLA prefill: up-projecting where a key serves enough rows, else absorbed, both on tensor cores; else the plain
// kernel.
#include "prefill_sm80.h"

#include "absorbed_sm80.h"

namespace flare::mla {

const char* mla_prefill_sm80_kernel_name(const MlaPrefillParams& p) {
    const AbsorbedArgs a = absorbed_args(p);
    if (up_project_takes(a, p.shared_bytes)) {
        return "mla_prefill_sm80_up_project";
    }
    return absorbed_mma_takes(a) ? absorbed_mma_kernel_name(a, true) : "mla_prefill_sm80_plain";
}

size_t mla_prefill_sm80_workspace(const MlaPrefillParams& p) {
    const AbsorbedArgs a = absorbed_args(p);
    return !up_project_takes(a, p.shared_bytes) && absorbed_mma_takes(a) ? absorbed_mma_workspace(a) : 0;
}

int32_t launch_mla_prefill_sm80(const MlaPrefillParams& p, void* workspace, size_t bytes, cudaStream_t stream) {
    const AbsorbedArgs a = absorbed_args(p);
    if (up_project_takes(a, p.shared_bytes)) {
        return launch_up_project(a, stream);
    }
    return absorbed_mma_takes(a) ? launch_absorbed_mma(a, workspace, bytes, stream) : launch_absorbed_plain(a, stream);
}

}  // namespace flare::mla
