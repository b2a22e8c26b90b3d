// Portable MLA decode: tensor cores where they take the params, else the plain kernel.
#include "decode_sm80.h"

#include "absorbed_sm80.h"

namespace flare::mla {

const char* mla_decode_sm80_kernel_name(const MlaDecodeParams&) {
    return "mla_decode_sm80_plain";
}

size_t mla_decode_sm80_workspace(const MlaDecodeParams&) {
    return 0;
}

int32_t launch_mla_decode_sm80(const MlaDecodeParams& p, void*, size_t, cudaStream_t stream) {
    return launch_absorbed_plain(absorbed_args(p), stream);
}

}  // namespace flare::mla
