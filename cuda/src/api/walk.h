// The elements of one or two strided tensors of equal shape as lines along one dimension: what elementwise operations
// walk over.
#pragma once

#include <cstdint>

namespace flare {

struct Walk {
    static constexpr int kMaxRank = 5;

    int rank = 0;  // outer dimensions, slowest first
    int64_t shape[kMaxRank];
    int64_t src_stride[kMaxRank];
    int64_t dst_stride[kMaxRank];
    int64_t line = 1;  // elements of a line
    int64_t src_line_stride = 1;
    int64_t dst_line_stride = 1;
    int64_t num_lines = 1;
};

// Drops dimensions of 1, orders the others by falling dst_stride, joins neighbours that are contiguous to each other,
// and makes the last one the line. Strides in elements; src_stride may be dst_stride.
Walk make_walk(int rank, const int64_t* shape, const int64_t* src_stride, const int64_t* dst_stride);

// `value` as one element of `dtype`, rounded and saturated as flare_fill says; returns its bytes.
int64_t encode_element(double value, int32_t dtype, unsigned char* bytes);

}  // namespace flare
