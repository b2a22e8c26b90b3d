// A kernel that does nothing: its attributes tell which of the library's code the driver chose for this device.
#include "host/device.h"

namespace flare::gpu {
namespace {

__global__ void probe_kernel() {}

}  // namespace

bool runs_sm90a_code() {
    cudaFuncAttributes attributes;
    if (cudaFuncGetAttributes(&attributes, probe_kernel) != cudaSuccess) {
        cudaGetLastError();  // ours: the query failed, nothing was launched
        return false;
    }
    // 80 when the driver compiled the compute_80 PTX, also on a Hopper card under CUDA_FORCE_PTX_JIT.
    return attributes.ptxVersion == 90;
}

}  // namespace flare::gpu
