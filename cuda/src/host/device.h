// CUDA devices as the backend sees them.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

namespace flare::gpu {

// What selection and launchers need to know of a device; read once per process and device.
struct DeviceInfo {
    int32_t ordinal;
    int32_t compute_major;
    int32_t compute_minor;
    int32_t sm_count;
    int32_t shared_bytes;  // of shared memory that a block can ask for
    bool runs_sm90a;  // the sm_90a code of this library, not compute_80 code that the driver compiled
};

// Makes the device's primary context current and gives the caller's context back at the end of the scope. `info` is set when
// status() is FLARE_OK; otherwise the reason is recorded for flare_last_error().
class DeviceScope {
  public:
    explicit DeviceScope(int32_t ordinal);
    ~DeviceScope();
    DeviceScope(const DeviceScope&) = delete;
    DeviceScope& operator=(const DeviceScope&) = delete;

    int32_t status() const { return status_; }
    const DeviceInfo& info() const { return info_; }

  private:
    int32_t enter(int32_t ordinal);

    void* callers_context_ = nullptr;
    bool restore_ = false;
    DeviceInfo info_{};
    int32_t status_;  // last: enter(), which sets it, fills the others
};

// FLARE_OK, or the status and text of a CUDA error met by `what`.
int32_t check_cuda(cudaError_t error, const char* what);

// Implemented in probe_sm90.cu: whether this library's sm_90a code runs on the current device.
bool runs_sm90a_code();

}  // namespace flare::gpu
