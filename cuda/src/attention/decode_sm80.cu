// Instances of the portable decode kernel.
#include "decode_sm80.cuh"
#include "launch_sm80_table.h"

namespace flare::attention {
namespace {

template <typename T>
cudaError_t launch(const Sm80Args& args, int64_t num_tiles, cudaStream_t stream) {
    switch (padded_head_dim(args.params)) {
        case 64:
            return launch_decode_sm80<Sm80DecodeConfig<T, 64, 4, 4, 2>>(args, num_tiles, stream);
        case 128:
            return launch_decode_sm80<Sm80DecodeConfig<T, 128, 4, 3, 2>>(args, num_tiles, stream);
        default:
            return launch_decode_sm80<Sm80DecodeConfig<T, 256, 2, 3, 1>>(args, num_tiles, stream);
    }
}

}  // namespace

cudaError_t launch_sm80_decode(const Sm80Args& args, int64_t num_tiles, cudaStream_t stream) {
    return args.params.dtype == DType::kBf16 ? launch<__nv_bfloat16>(args, num_tiles, stream)
                                             : launch<__half>(args, num_tiles, stream);
}

}  // namespace flare::attention
