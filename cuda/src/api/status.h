// Status reporting shared by every layer: a status code plus a text kept per thread.
#pragma once

#include <cstdint>

#include "flare.h"

// Returns from the function around it with the status of a check that fails.
#define FLARE_TRY(expression)                         \
    do {                                              \
        if (const int32_t try_status = (expression)) { \
            return try_status;                        \
        }                                             \
    } while (false)

namespace flare {

// Records the text for flare_last_error() on this thread and returns `status`, so that a check reads `return fail(...)`.
#if defined(__GNUC__)
__attribute__((format(printf, 2, 3)))
#endif
int32_t fail(int32_t status, const char* format, ...);

void clear_error();
const char* last_error();

const char* dtype_name(int32_t dtype);
// Bytes of one element; 0 for an unknown dtype.
int64_t dtype_bytes(int32_t dtype);

}  // namespace flare
