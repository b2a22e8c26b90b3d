// Portable MLA decode: tensor cores where they take the params, else the plain kernel.
#include "decode_sm80.h"

#include "absorbed_sm80.h"

namespace flare::mla {

const char* mla_decode_sm80_kernel_name(const MlaDecodeParams& p) {
    const AbsorbedArgs a = absorbed_args(p);
    return absorbed_mma_takes(a) ? absorbed_mma_kernel_name(a, false) : "mla_decode_sm80_plain";
}

size_t mla_decode_sm80_workspace(const MlaDecodeParams& p) {
    const AbsorbedArgs a = absorbed_args(p);
    return absorbed_mma_takes(a) ? absorbed_mma_workspace(a) : 0;
}

int32_t launch_mla_decode_sm80(const MlaDecodeParams& p, void* workspace, size_t bytes, cudaStream_t stream) {
    const AbsorbedArgs a = absorbed_args(p);
    return absorbed_mma_takes(a) ? launch_absorbed_mma(a, workspace, bytes, stream) : launch_absorbed_plain(a, stream);
}

}  // namespace flare::mla
