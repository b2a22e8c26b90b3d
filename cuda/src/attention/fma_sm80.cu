// Instances of the fp32-arithmetic kernel.
#include "fma_sm80.cuh"
#include "launch_sm80_table.h"

namespace flare::attention {
namespace {

template <typename T>
cudaError_t launch(const Sm80Args& args, int64_t num_tiles, cudaStream_t stream) {
    return args.params.head_dim_v <= 128 ? launch_fma_sm80<T, 128>(args, num_tiles, stream)
                                         : launch_fma_sm80<T, 512>(args, num_tiles, stream);
}

}  // namespace

cudaError_t launch_sm80_fma(const Sm80Args& args, int64_t num_tiles, cudaStream_t stream) {
    switch (args.params.dtype) {
        case DType::kBf16:
            return launch<__nv_bfloat16>(args, num_tiles, stream);
        case DType::kFp16:
            return launch<__half>(args, num_tiles, stream);
        case DType::kFp8E4m3:
            return launch<__nv_fp8_e4m3>(args, num_tiles, stream);
        default:
            return launch<float>(args, num_tiles, stream);
    }
}

}  // namespace flare::attention
