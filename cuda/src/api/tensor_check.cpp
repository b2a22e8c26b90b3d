#include "api/tensor_check.h"

#include <algorithm>
#include <cinttypes>

#include "api/status.h"

namespace flare {
namespace {

struct Dim {
    int64_t shape;
    int64_t stride;
};

// Dimensions of more than one element, outermost (largest stride) first.
int sorted_dims(const TensorView& view, Dim dims[TensorView::kMaxRank]) {
    int count = 0;
    for (int i = 0; i < view.rank; ++i) {
        if (view.shape[i] > 1) {
            dims[count++] = {view.shape[i], view.stride[i]};
        }
    }
    std::sort(dims, dims + count, [](const Dim& a, const Dim& b) { return a.stride > b.stride; });
    return count;
}

// Bytes from the first to past the last element; the caller has checked that it fits.
int64_t extent_bytes(const TensorView& view) {
    if (view.empty()) {
        return 0;
    }
    int64_t last = 0;
    for (int i = 0; i < view.rank; ++i) {
        last += (view.shape[i] - 1) * view.stride[i];
    }
    return (last + 1) * view.element_bytes;
}

bool gapless(const TensorView& view) {
    int64_t elements = 1;
    for (int i = 0; i < view.rank; ++i) {
        elements *= view.shape[i];
    }
    return elements * view.element_bytes == extent_bytes(view);
}

// Two views of equal shape and strides, `distance` elements apart, nested strides: do they share an element?
bool collide(const TensorView& view, int64_t distance) {
    Dim dims[TensorView::kMaxRank];
    const int count = sorted_dims(view, dims);
    for (int i = 0; i < count; ++i) {
        // Nearest multiple of this stride; nested strides leave at most one more candidate below it.
        const int64_t steps = std::min(distance / dims[i].stride, dims[i].shape - 1);
        distance -= steps * dims[i].stride;
    }
    return distance == 0;
}

}  // namespace

TensorView::TensorView(const char* view_name, const void* view_data, int64_t bytes, std::initializer_list<int64_t> shapes,
                       std::initializer_list<int64_t> strides)
    : name(view_name), data(view_data), element_bytes(bytes), rank(static_cast<int>(shapes.size())) {
    std::copy(shapes.begin(), shapes.end(), shape);
    std::copy(strides.begin(), strides.end(), stride);
}

bool TensorView::empty() const {
    for (int i = 0; i < rank; ++i) {
        if (shape[i] == 0) {
            return true;
        }
    }
    return false;
}

int32_t check_tensor(const TensorView& view, bool need_data) {
    __int128 last = 0;
    for (int i = 0; i < view.rank; ++i) {
        if (view.stride[i] < 0) {
            return fail(FLARE_ERROR_STRIDE, "%s: stride of dimension %d is %" PRId64 "; strides must be >= 0", view.name, i,
                        view.stride[i]);
        }
        if (view.shape[i] > 0) {
            last += static_cast<__int128>(view.shape[i] - 1) * view.stride[i];
        }
    }
    if (!view.empty() && (last + 1) * view.element_bytes > static_cast<__int128>(INT64_MAX)) {
        return fail(FLARE_ERROR_OVERFLOW, "%s: sizes and strides address more than 2^63 bytes", view.name);
    }
    if (!need_data || view.empty()) {
        return FLARE_OK;
    }
    if (view.data == nullptr) {
        return fail(FLARE_ERROR_NULL, "%s is NULL; it must point to the tensor", view.name);
    }
    if (reinterpret_cast<uintptr_t>(view.data) % static_cast<uintptr_t>(view.element_bytes) != 0) {
        return fail(FLARE_ERROR_ALIGNMENT, "%s: address %p isn't a multiple of its element size, %" PRId64, view.name, view.data,
                    view.element_bytes);
    }
    return FLARE_OK;
}

int32_t check_output(const TensorView& view, bool need_data) {
    if (const int32_t status = check_tensor(view, need_data)) {
        return status;
    }
    if (view.empty()) {
        return FLARE_OK;
    }
    Dim dims[TensorView::kMaxRank];
    const int count = sorted_dims(view, dims);
    int64_t inner = 1;  // elements from the first to past the last of the dimensions inside
    for (int i = count - 1; i >= 0; --i) {
        if (dims[i].stride < inner) {
            return fail(FLARE_ERROR_STRIDE,
                        "%s: a stride of %" PRId64 " lets its elements overlap (dimensions inside span %" PRId64
                        " elements); an output needs a place for each element",
                        view.name, dims[i].stride, inner);
        }
        inner += (dims[i].shape - 1) * dims[i].stride;
    }
    return FLARE_OK;
}

int32_t check_disjoint(const TensorView& output, const TensorView& other) {
    if (output.data == nullptr || other.data == nullptr || output.empty() || other.empty()) {
        return FLARE_OK;
    }
    const auto a = reinterpret_cast<uintptr_t>(output.data);
    const auto b = reinterpret_cast<uintptr_t>(other.data);
    if (a >= b + static_cast<uintptr_t>(extent_bytes(other)) || b >= a + static_cast<uintptr_t>(extent_bytes(output))) {
        return FLARE_OK;
    }
    bool shared = a == b || gapless(output) || gapless(other);
    if (!shared && output.rank == other.rank && output.element_bytes == other.element_bytes) {
        bool equal = true;
        for (int i = 0; i < output.rank; ++i) {
            equal = equal && output.shape[i] == other.shape[i] && output.stride[i] == other.stride[i];
        }
        const int64_t distance = static_cast<int64_t>(a > b ? a - b : b - a);
        shared = equal && distance % output.element_bytes == 0 && collide(output, distance / output.element_bytes);
    }
    if (shared) {
        return fail(FLARE_ERROR_OVERLAP, "%s overlaps %s; give it memory of its own", output.name, other.name);
    }
    return FLARE_OK;
}

}  // namespace flare
