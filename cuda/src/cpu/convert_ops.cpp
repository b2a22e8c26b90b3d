// flare_cast and flare_fill on the CPU.
#include <cmath>
#include <cstring>

#include "api/status.h"
#include "convert.h"
#include "cpu.h"
#include "kernels.h"
#include "thread_pool.h"

namespace flare::cpu {
namespace {

constexpr int kMaxRank = 5;
constexpr int64_t kElementsPerItem = 1 << 16;

// A strided walk with one or two operands: outer dimensions to iterate over, and one inner line.
struct Walk {
    int rank = 0;  // outer dimensions
    int64_t shape[kMaxRank];
    int64_t src_stride[kMaxRank];
    int64_t dst_stride[kMaxRank];
    int64_t line = 1;
    int64_t src_line_stride = 1;
    int64_t dst_line_stride = 1;
    int64_t num_lines = 1;
};

// Drops dimensions of 1, joins neighbours that are contiguous to each other, and makes the last one the line.
Walk make_walk(int rank, const int64_t* shape, const int64_t* src_stride, const int64_t* dst_stride) {
    Walk walk;
    for (int i = 0; i < rank; ++i) {
        if (shape[i] == 1) {
            continue;
        }
        const int last = walk.rank - 1;
        if (last >= 0 && walk.src_stride[last] == src_stride[i] * shape[i] &&
            walk.dst_stride[last] == dst_stride[i] * shape[i]) {
            walk.shape[last] *= shape[i];
            walk.src_stride[last] = src_stride[i];
            walk.dst_stride[last] = dst_stride[i];
            continue;
        }
        walk.shape[walk.rank] = shape[i];
        walk.src_stride[walk.rank] = src_stride[i];
        walk.dst_stride[walk.rank] = dst_stride[i];
        ++walk.rank;
    }
    if (walk.rank > 0) {
        --walk.rank;
        walk.line = walk.shape[walk.rank];
        walk.src_line_stride = walk.src_stride[walk.rank];
        walk.dst_line_stride = walk.dst_stride[walk.rank];
    }
    for (int i = 0; i < walk.rank; ++i) {
        walk.num_lines *= walk.shape[i];
    }
    return walk;
}

// Calls line(src_offset, dst_offset, count) for pieces that cover everything, on the pool.
template <class Line>
void for_each_line(const Walk& walk, int32_t num_threads, const Line& line) {
    const int64_t pieces_per_line = walk.line == 0 ? 0 : (walk.line + kElementsPerItem - 1) / kElementsPerItem;
    const int64_t lines_per_item = walk.line == 0 || walk.line >= kElementsPerItem ? 1 : kElementsPerItem / walk.line;
    const int64_t items = (walk.num_lines + lines_per_item - 1) / lines_per_item * pieces_per_line;
    auto body = [&](int64_t item, void*) {
        const int64_t piece = item % pieces_per_line * kElementsPerItem;
        const int64_t count = walk.line - piece < kElementsPerItem ? walk.line - piece : kElementsPerItem;
        const int64_t first = item / pieces_per_line * lines_per_item;
        const int64_t end = first + lines_per_item < walk.num_lines ? first + lines_per_item : walk.num_lines;
        for (int64_t i = first; i < end; ++i) {
            int64_t src = piece * walk.src_line_stride;
            int64_t dst = piece * walk.dst_line_stride;
            int64_t rest = i;
            for (int d = walk.rank - 1; d >= 0; --d) {
                const int64_t index = rest % walk.shape[d];
                rest /= walk.shape[d];
                src += index * walk.src_stride[d];
                dst += index * walk.dst_stride[d];
            }
            line(src, dst, count);
        }
    };
    parallel_for(items, items == 1 ? 1 : num_threads, 0, body);
}

// One element's bytes.
int64_t encode(double value, int32_t dtype, unsigned char* bytes) {
    const auto put = [&](auto element) {
        std::memcpy(bytes, &element, sizeof(element));
        return static_cast<int64_t>(sizeof(element));
    };
    const auto integer = [&](double low, double high) {
        const double rounded = std::nearbyint(value);
        return std::isnan(value) ? 0.0 : (rounded < low ? low : (rounded > high ? high : rounded));
    };
    const float single = static_cast<float>(value);
    switch (dtype) {
        case FLARE_FP32:
            return put(single);
        case FLARE_FP16:
            return put(float_to_fp16(single));
        case FLARE_BF16:
            return put(float_to_bf16(single));
        case FLARE_FP8_E4M3:
            return put(float_to_e4m3(single));
        case FLARE_UINT8:
            return put(static_cast<uint8_t>(integer(0.0, 255.0)));
        case FLARE_INT32:
            return put(static_cast<int32_t>(integer(-2147483648.0, 2147483647.0)));
        default:
            break;
    }
    // 2^63 itself isn't an int64.
    const double rounded = std::isnan(value) ? 0.0 : std::nearbyint(value);
    if (rounded >= 9223372036854775808.0) {
        return put(INT64_MAX);
    }
    return put(rounded < -9223372036854775808.0 ? INT64_MIN : static_cast<int64_t>(rounded));
}

template <class Element>
void fill_line(void* dst, int64_t first, int64_t count, int64_t stride, const unsigned char* bytes) {
    Element value;
    std::memcpy(&value, bytes, sizeof(value));
    Element* out = static_cast<Element*>(dst) + first;
    for (int64_t i = 0; i < count; ++i) {
        out[i * stride] = value;
    }
}

}  // namespace

int32_t cast(const flare_cast_params& p) {
    const Walk walk = make_walk(p.rank, p.shape, p.src_stride, p.dst_stride);
    const Kernels& kernels = active_kernels();
    const int64_t src_bytes = dtype_bytes(p.src_dtype);
    const int64_t dst_bytes = dtype_bytes(p.dst_dtype);
    for_each_line(walk, p.num_threads, [&](int64_t src, int64_t dst, int64_t count) {
        kernels.cast_line(static_cast<const char*>(p.src) + src * src_bytes, p.src_dtype, walk.src_line_stride,
                          static_cast<char*>(p.dst) + dst * dst_bytes, p.dst_dtype, walk.dst_line_stride, count,
                          p.scale);
    });
    return FLARE_OK;
}

int32_t fill(const flare_fill_params& p) {
    const Walk walk = make_walk(p.rank, p.shape, p.dst_stride, p.dst_stride);
    unsigned char bytes[8];
    const int64_t size = encode(p.value, p.dtype, bytes);
    for_each_line(walk, p.num_threads, [&](int64_t, int64_t dst, int64_t count) {
        switch (size) {
            case 1:
                fill_line<uint8_t>(p.dst, dst, count, walk.dst_line_stride, bytes);
                break;
            case 2:
                fill_line<uint16_t>(p.dst, dst, count, walk.dst_line_stride, bytes);
                break;
            case 4:
                fill_line<uint32_t>(p.dst, dst, count, walk.dst_line_stride, bytes);
                break;
            default:
                fill_line<uint64_t>(p.dst, dst, count, walk.dst_line_stride, bytes);
                break;
        }
    });
    return FLARE_OK;
}

}  // namespace flare::cpu
