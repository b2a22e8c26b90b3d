// flare_cast and flare_fill on the CPU.
#include <cstring>

#include "api/status.h"
#include "api/walk.h"
#include "convert.h"
#include "cpu.h"
#include "kernels.h"
#include "thread_pool.h"

namespace flare::cpu {
namespace {

constexpr int64_t kElementsPerItem = 1 << 16;

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
    const int64_t size = encode_element(p.value, p.dtype, bytes);
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
