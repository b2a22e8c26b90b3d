// Checks of strided tensors: strides, alignment, addressable range, overlap.
#pragma once

#include <cstdint>
#include <initializer_list>

#include "flare.h"

namespace flare {

struct TensorView {
    static constexpr int kMaxRank = 5;

    TensorView(const char* name, const void* data, int64_t element_bytes, std::initializer_list<int64_t> shape,
               std::initializer_list<int64_t> stride);

    bool empty() const;

    const char* name;
    const void* data;
    int64_t element_bytes;
    int rank;
    int64_t shape[kMaxRank];
    int64_t stride[kMaxRank];
};

// Sizes of an input or output: no negative stride, range within 63 bits, pointer given and aligned (when `need_data`).
int32_t check_tensor(const TensorView& view, bool need_data);
// check_tensor, and no two elements share memory.
int32_t check_output(const TensorView& view, bool need_data);
// FLARE_ERROR_OVERLAP if the two provably share memory: equal bases, ranges that meet with one of them gapless, or interleaved
// views of equal strides that collide.
int32_t check_disjoint(const TensorView& output, const TensorView& other);

}  // namespace flare
