// The frame of every exported function: no exception leaves the library, and each call starts without an error text.
#pragma once

#include <cstdint>
#include <exception>
#include <new>

#include "api/status.h"

namespace flare {

template <typename Body>
int32_t guarded(Body body) noexcept {
    try {
        clear_error();
        return body();
    } catch (const std::bad_alloc&) {
        return fail(FLARE_ERROR_MEMORY, "the host is out of memory");
    } catch (const std::exception& error) {
        return fail(FLARE_ERROR_INTERNAL, "internal error: %s", error.what());
    } catch (...) {
        return fail(FLARE_ERROR_INTERNAL, "internal error");
    }
}

}  // namespace flare
