// What the operations of the CUDA backend share: entering the device, refusals, checks of addresses and workspace.
#pragma once

#include <cstdint>
#include <initializer_list>
#include <utility>

#include "api/gpu.h"
#include "api/status.h"
#include "api/validate.h"
#include "host/device.h"

namespace flare::gpu {

using Named = std::pair<const char*, const void*>;

// All kernels load 16 bytes at a time.
int32_t check_alignments(std::initializer_list<Named> tensors);

bool fits_int32(std::initializer_list<int64_t> sizes);

int32_t no_kernel(const char* operation);

// Whether an operation with nothing but a Hopper kernel may run it: the forced kernel allows it and the device has it.
int32_t only_sm90(const char* operation, int32_t kernel, const DeviceInfo& info);

int32_t refused(const char* operation, int32_t status, const char* reason);

int32_t copy_name(const char* from, char* name, uint64_t capacity);

// The status of a launcher that answers with a flare status; a CUDA error that it left says more.
int32_t launched(const char* operation, int32_t status);

// Enters the device and runs `body(info)` there.
template <typename Params, typename Body>
int32_t on_device(const Params& p, Body body) {
    const DeviceScope scope(p.device);
    return scope.status() != FLARE_OK ? scope.status() : body(scope.info());
}

// An operation without a CUDA kernel: a device that isn't there is still the first thing to say.
template <typename Params>
int32_t not_yet(const Params& p, const char* operation) {
    return on_device(p, [&](const DeviceInfo&) { return no_kernel(operation); });
}

}  // namespace flare::gpu
