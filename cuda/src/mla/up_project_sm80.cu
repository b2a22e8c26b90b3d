// Launcher of the portable up-projecting prefill.
#include <cuda_runtime.h>

#include "flare.h"
#include "up_project_sm80.cuh"

namespace flare::mla {
namespace {

template <typename T, bool kWeightsNk>
int32_t launch(const AbsorbedArgs& a, unsigned grid, int num_row_tiles, cudaStream_t stream) {
    const auto kernel = mla_up_project_sm80_kernel<T, kWeightsNk>;
    constexpr int kSmemBytes = sizeof(up_project::SharedStorage);
    if (cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kSmemBytes) != cudaSuccess) {
        return FLARE_ERROR_LAUNCH;
    }
    kernel<<<grid, up_project::kThreads, kSmemBytes, stream>>>(a, num_row_tiles);
    return cudaPeekAtLastError() == cudaSuccess ? FLARE_OK : FLARE_ERROR_LAUNCH;
}

}  // namespace

bool up_project_takes(const AbsorbedArgs& a, int shared_bytes) {
    if (!absorbed_mma_takes(a) || a.kv_dtype == DType::kRow656 || a.d_nope > up_project::kNope || a.d_v > up_project::kValue ||
        shared_bytes < static_cast<int>(sizeof(up_project::SharedStorage))) {
        return false;
    }
    // FLOP a pair as the kernels pad: 640 + 512 d_c / R here, 2,176 absorbed. A block of fewer than 129 rows would be half
    // empty.
    const int channels = (a.d_c + up_project::kDepth - 1) / up_project::kDepth * up_project::kDepth;
    return a.seqlen_q > up_project::kRows / 2 && 3 * int64_t{a.seqlen_q} > channels;
}

int32_t launch_up_project(const AbsorbedArgs& a, cudaStream_t stream) {
    const int num_row_tiles = (a.seqlen_q + up_project::kRows - 1) / up_project::kRows;
    const int64_t grid = int64_t{num_row_tiles} * a.batch * a.heads;
    if (grid == 0) {
        return FLARE_OK;
    }
    const bool nk = a.weight_layout == WeightLayout::kDC;
    const auto bf16 = nk ? launch<__nv_bfloat16, true> : launch<__nv_bfloat16, false>;
    const auto fp16 = nk ? launch<__half, true> : launch<__half, false>;
    return (a.dtype == DType::kBf16 ? bf16 : fp16)(a, static_cast<unsigned>(grid), num_row_tiles, stream);
}

}  // namespace flare::mla
