#include "api/status.h"

#include <cstdarg>
#include <cstdio>
#include <cstring>

namespace flare {
namespace {

constexpr int kErrorCapacity = 1024;
thread_local char error_text[kErrorCapacity];

}  // namespace

int32_t fail(int32_t status, const char* format, ...) {
    va_list arguments;
    va_start(arguments, format);
    std::vsnprintf(error_text, kErrorCapacity, format, arguments);
    va_end(arguments);
    return status;
}

void clear_error() { error_text[0] = '\0'; }

const char* last_error() { return error_text; }

const char* dtype_name(int32_t dtype) {
    switch (dtype) {
        case FLARE_FP32:
            return "FP32";
        case FLARE_FP16:
            return "FP16";
        case FLARE_BF16:
            return "BF16";
        case FLARE_FP8_E4M3:
            return "FP8_E4M3";
        case FLARE_UINT8:
            return "UINT8";
        case FLARE_INT32:
            return "INT32";
        case FLARE_INT64:
            return "INT64";
        default:
            return "unknown";
    }
}

int64_t dtype_bytes(int32_t dtype) {
    switch (dtype) {
        case FLARE_FP32:
        case FLARE_INT32:
            return 4;
        case FLARE_FP16:
        case FLARE_BF16:
            return 2;
        case FLARE_FP8_E4M3:
        case FLARE_UINT8:
            return 1;
        case FLARE_INT64:
            return 8;
        default:
            return 0;
    }
}

}  // namespace flare

extern "C" {

uint64_t flare_last_error(char* text, uint64_t capacity) {
    const char* error = flare::last_error();
    const uint64_t length = std::strlen(error);
    if (text != nullptr && capacity > 0) {
        const uint64_t copied = length < capacity ? length : capacity - 1;
        std::memcpy(text, error, copied);
        text[copied] = '\0';
    }
    return length;
}

const char* flare_status_string(int32_t status) {
#define FLARE_STATUS(name) \
    case name:             \
        return #name;
    switch (status) {
        FLARE_STATUS(FLARE_OK)
        FLARE_STATUS(FLARE_ERROR_NULL)
        FLARE_STATUS(FLARE_ERROR_STRUCT_SIZE)
        FLARE_STATUS(FLARE_ERROR_FLAGS)
        FLARE_STATUS(FLARE_ERROR_SHAPE)
        FLARE_STATUS(FLARE_ERROR_STRIDE)
        FLARE_STATUS(FLARE_ERROR_DTYPE)
        FLARE_STATUS(FLARE_ERROR_ALIGNMENT)
        FLARE_STATUS(FLARE_ERROR_OPTION)
        FLARE_STATUS(FLARE_ERROR_INDEX)
        FLARE_STATUS(FLARE_ERROR_OVERLAP)
        FLARE_STATUS(FLARE_ERROR_OVERFLOW)
        FLARE_STATUS(FLARE_UNSUPPORTED_DTYPE)
        FLARE_STATUS(FLARE_UNSUPPORTED_SHAPE)
        FLARE_STATUS(FLARE_UNSUPPORTED_ARCH)
        FLARE_STATUS(FLARE_UNSUPPORTED_FEATURE)
        FLARE_STATUS(FLARE_UNSUPPORTED_KERNEL)
        FLARE_STATUS(FLARE_ERROR_WORKSPACE)
        FLARE_STATUS(FLARE_ERROR_MEMORY)
        FLARE_STATUS(FLARE_ERROR_NO_DRIVER)
        FLARE_STATUS(FLARE_ERROR_NO_DEVICE)
        FLARE_STATUS(FLARE_ERROR_NO_CUDA)
        FLARE_STATUS(FLARE_ERROR_LAUNCH)
        FLARE_STATUS(FLARE_ERROR_CONTEXT)
        FLARE_STATUS(FLARE_ERROR_INTERNAL)
        default:
            return "unknown status";
    }
#undef FLARE_STATUS
}

}  // extern "C"
