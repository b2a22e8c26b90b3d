#include "host/gpu_common.h"

#include <cstdio>

namespace flare::gpu {

int32_t check_alignments(std::initializer_list<Named> tensors) {
    for (const auto& [name, data] : tensors) {
        if (reinterpret_cast<uintptr_t>(data) % 16 != 0) {
            return fail(FLARE_ERROR_ALIGNMENT, "%s: address %p isn't a multiple of 16, which CUDA kernels need", name, data);
        }
    }
    return FLARE_OK;
}

bool fits_int32(std::initializer_list<int64_t> sizes) {
    for (const int64_t size : sizes) {
        if (size > INT32_MAX) {
            return false;
        }
    }
    return true;
}

int32_t no_kernel(const char* operation) {
    return fail(FLARE_UNSUPPORTED_FEATURE, "%s: there is no CUDA kernel for it yet; use device = -1 (CPU)", operation);
}

int32_t only_sm90(const char* operation, int32_t kernel, const DeviceInfo& info) {
    if (kernel == FLARE_KERNEL_PORTABLE) {
        return fail(FLARE_UNSUPPORTED_KERNEL, "kernel: PORTABLE asked for, but %s has only an sm_90a kernel", operation);
    }
    if (!info.runs_sm90a) {
        return fail(FLARE_UNSUPPORTED_ARCH, "%s has only an sm_90a kernel; device %d has compute capability %d.%d%s", operation,
                    info.ordinal, info.compute_major, info.compute_minor,
                    info.compute_major == 9 && info.compute_minor == 0 ? ", but runs compiled PTX (CUDA_FORCE_PTX_JIT?)" : "");
    }
    return FLARE_OK;
}

int32_t refused(const char* operation, int32_t status, const char* reason) {
    return fail(status, "%s: the sm_90a kernel can't run this: %s", operation, reason);
}

int32_t copy_name(const char* from, char* name, uint64_t capacity) {
    std::snprintf(name, capacity, "%s", from);
    return FLARE_OK;
}

int32_t launched(const char* operation, int32_t status) {
    if (status == FLARE_OK) {
        return FLARE_OK;
    }
    const cudaError_t error = cudaPeekAtLastError();
    if (error != cudaSuccess) {
        return check_cuda(error, operation);
    }
    return fail(status, "%s: the launch failed: %s", operation, flare_status_string(status));
}

const char* build_text() {
    static const char* const text = [] {
        static char line[64];
        std::snprintf(line, sizeof(line), "CUDA %d.%d (sm_90a, compute_80)", CUDART_VERSION / 1000, CUDART_VERSION % 1000 / 10);
        return line;
    }();
    return text;
}

}  // namespace flare::gpu
