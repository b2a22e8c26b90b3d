#include "host/device.h"

#include <cuda.h>
#include <cudaTypedefs.h>

#include <atomic>
#include <mutex>
#include <utility>

#include "api/status.h"

namespace flare::gpu {
namespace {

constexpr int kMaxDevices = 64;
// cuCtxGetCurrent and cuCtxSetCurrent through the runtime: libflare doesn't link libcuda.
constexpr unsigned kDriverEntryVersion = 12000;

template <typename Function>
Function driver_entry(const char* name) {
    void* entry = nullptr;
    cudaDriverEntryPointQueryResult found = cudaDriverEntryPointSymbolNotFound;
    const cudaError_t error = cudaGetDriverEntryPointByVersion(name, &entry, kDriverEntryVersion, cudaEnableDefault, &found);
    return error == cudaSuccess && found == cudaDriverEntryPointSuccess ? reinterpret_cast<Function>(entry) : nullptr;
}

PFN_cuCtxGetCurrent_v4000 ctx_get_current() {
    static const auto entry = driver_entry<PFN_cuCtxGetCurrent_v4000>("cuCtxGetCurrent");
    return entry;
}

PFN_cuCtxSetCurrent_v4000 ctx_set_current() {
    static const auto entry = driver_entry<PFN_cuCtxSetCurrent_v4000>("cuCtxSetCurrent");
    return entry;
}

struct CachedInfo {
    std::atomic<bool> ready{false};
    std::mutex filling;
    DeviceInfo info;
};

CachedInfo& cached_info(int32_t ordinal) {
    static CachedInfo cache[kMaxDevices];
    return cache[ordinal];
}

int32_t read_attribute(cudaDeviceAttr attribute, int32_t ordinal, int32_t* value) {
    return check_cuda(cudaDeviceGetAttribute(value, attribute, ordinal), "cudaDeviceGetAttribute");
}

int32_t read_info(int32_t ordinal, DeviceInfo* info) {
    CachedInfo& cached = cached_info(ordinal);
    if (!cached.ready.load(std::memory_order_acquire)) {
        const std::lock_guard<std::mutex> lock(cached.filling);
        DeviceInfo fresh{};
        fresh.ordinal = ordinal;
        for (const auto& [attribute, value] : {std::pair{cudaDevAttrComputeCapabilityMajor, &fresh.compute_major},
                                               std::pair{cudaDevAttrComputeCapabilityMinor, &fresh.compute_minor},
                                               std::pair{cudaDevAttrMultiProcessorCount, &fresh.sm_count},
                                               std::pair{cudaDevAttrMaxSharedMemoryPerBlockOptin, &fresh.shared_bytes}}) {
            if (const int32_t status = read_attribute(attribute, ordinal, value)) {
                return status;
            }
        }
        fresh.runs_sm90a = fresh.compute_major == 9 && fresh.compute_minor == 0 && runs_sm90a_code();
        cached.info = fresh;
        cached.ready.store(true, std::memory_order_release);
    }
    *info = cached.info;
    return FLARE_OK;
}

}  // namespace

int32_t check_cuda(cudaError_t error, const char* what) {
    switch (error) {
        case cudaSuccess:
            return FLARE_OK;
        case cudaErrorInsufficientDriver:
        case cudaErrorInitializationError:
            return fail(FLARE_ERROR_NO_DRIVER, "%s: no usable NVIDIA driver: %s; install or update the driver, or use device = -1 (CPU)",
                        what, cudaGetErrorString(error));
        case cudaErrorNoDevice:
        case cudaErrorInvalidDevice:
            return fail(FLARE_ERROR_NO_DEVICE, "%s: %s", what, cudaGetErrorString(error));
        case cudaErrorIllegalAddress:
        case cudaErrorIllegalInstruction:
        case cudaErrorMisalignedAddress:
        case cudaErrorInvalidPc:
        case cudaErrorHardwareStackError:
        case cudaErrorLaunchFailure:
        case cudaErrorLaunchTimeout:
        case cudaErrorECCUncorrectable:
            return fail(FLARE_ERROR_CONTEXT, "%s: %s (%s): an earlier kernel of this process lost the CUDA context; restart the process",
                        what, cudaGetErrorName(error), cudaGetErrorString(error));
        default:
            return fail(FLARE_ERROR_LAUNCH, "%s: %s (%s)", what, cudaGetErrorName(error), cudaGetErrorString(error));
    }
}

DeviceScope::DeviceScope(int32_t ordinal) : status_(enter(ordinal)) {}

int32_t DeviceScope::enter(int32_t ordinal) {
    int count = 0;
    if (const int32_t status = check_cuda(cudaGetDeviceCount(&count), "device")) {
        return status;
    }
    if (ordinal >= count || ordinal >= kMaxDevices) {
        return fail(FLARE_ERROR_NO_DEVICE, "device is %d; there are %d CUDA devices here", ordinal, count);
    }
    if (ctx_get_current() == nullptr || ctx_set_current() == nullptr) {
        return fail(FLARE_ERROR_NO_DRIVER, "the NVIDIA driver lacks cuCtxGetCurrent; update it");
    }
    CUcontext current = nullptr;
    restore_ = ctx_get_current()(&current) == CUDA_SUCCESS;
    callers_context_ = current;
    if (const int32_t status = check_cuda(cudaSetDevice(ordinal), "cudaSetDevice")) {
        return status;
    }
    return read_info(ordinal, &info_);
}

DeviceScope::~DeviceScope() {
    if (restore_) {
        ctx_set_current()(static_cast<CUcontext>(callers_context_));
    }
}

}  // namespace flare::gpu
