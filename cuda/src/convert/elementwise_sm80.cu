// flare_cast and flare_fill on any CUDA device: bound by memory, so wide accesses and enough threads are all there is
// to it.
#include <algorithm>

#include "convert/element.cuh"
#include "convert/params.h"

namespace flare::convert {
namespace {

constexpr int kThreads = 256;

// A grid that fills the card; threads stride over the rest.
unsigned grid_for(int64_t units, int32_t sm_count) {
    return static_cast<unsigned>(std::min<int64_t>((units + kThreads - 1) / kThreads, int64_t{sm_count} * 16));
}

// Offsets of the line `line_idx`. kDst alone is enough for a fill.
template <typename Index>
__device__ __forceinline__ void line_offsets(const Walk& walk, Index line_idx, int64_t* src, int64_t* dst) {
    for (int d = walk.rank - 1; d >= 0; --d) {
        const Index extent = static_cast<Index>(walk.shape[d]);
        const Index rest = line_idx / extent;
        const int64_t index = static_cast<int64_t>(line_idx - rest * extent);
        line_idx = rest;
        *src += index * walk.src_stride[d];
        *dst += index * walk.dst_stride[d];
    }
}

// A unit is kCount neighbours of a line; every line has line / kCount of them. Index is 32-bit where all units fit: a
// 64-bit division costs about a hundred instructions.
template <int kCount, typename Index>
__global__ void __launch_bounds__(kThreads) cast_kernel(const __grid_constant__ CastParams p, Index units) {
    const Index units_per_line = static_cast<Index>(p.walk.line / kCount);
    const Index step = static_cast<Index>(gridDim.x) * kThreads;
    for (Index unit = static_cast<Index>(blockIdx.x) * kThreads + threadIdx.x; unit < units; unit += step) {
        int64_t src = 0;
        int64_t dst = 0;
        Index in_line = unit;
        if (p.walk.rank > 0) {
            const Index line_idx = unit / units_per_line;
            in_line = unit - line_idx * units_per_line;
            line_offsets(p.walk, line_idx, &src, &dst);
        }
        src += static_cast<int64_t>(in_line) * kCount * p.walk.src_line_stride;
        dst += static_cast<int64_t>(in_line) * kCount * p.walk.dst_line_stride;
        float x[kCount];
        load_elements<kCount>(x, p.src, p.src_dtype, src);
#pragma unroll
        for (int i = 0; i < kCount; ++i) {
            x[i] = multiply(x[i], p.scale);
        }
        store_elements<kCount>(x, p.dst, p.dst_dtype, dst);
    }
}

// A unit is one element, or 16 bytes of a line (Element = uint4).
template <typename Element, typename Index>
__global__ void __launch_bounds__(kThreads) fill_kernel(const __grid_constant__ FillParams p, Index units) {
    const int64_t count = sizeof(Element) == 16 ? 16 / p.element_bytes : 1;
    const Index units_per_line = static_cast<Index>(p.walk.line / count);
    const Index step = static_cast<Index>(gridDim.x) * kThreads;
    Element value;
    if constexpr (sizeof(Element) == 16) {
        value.x = value.z = static_cast<uint32_t>(p.pattern);
        value.y = value.w = static_cast<uint32_t>(p.pattern >> 32);
    } else {
        value = static_cast<Element>(p.pattern);
    }
    for (Index unit = static_cast<Index>(blockIdx.x) * kThreads + threadIdx.x; unit < units; unit += step) {
        int64_t src = 0;
        int64_t dst = 0;
        Index in_line = unit;
        if (p.walk.rank > 0) {
            const Index line_idx = unit / units_per_line;
            in_line = unit - line_idx * units_per_line;
            line_offsets(p.walk, line_idx, &src, &dst);
        }
        dst += static_cast<int64_t>(in_line) * count * p.walk.dst_line_stride;
        *reinterpret_cast<Element*>(static_cast<char*>(p.dst) + dst * p.element_bytes) = value;
    }
}

// Whether every unit of `count` elements lies together and at a multiple of its own size (at most 16 bytes).
bool in_whole_units(const Walk& walk, const void* data, const int64_t* stride, int64_t line_stride, int64_t count,
                    int64_t bytes) {
    const int64_t alignment = std::min<int64_t>(16, count * bytes);
    if (line_stride != 1 || walk.line % count != 0 ||
        reinterpret_cast<uintptr_t>(data) % static_cast<uintptr_t>(alignment) != 0) {
        return false;
    }
    for (int d = 0; d < walk.rank; ++d) {
        if (stride[d] * bytes % alignment != 0) {
            return false;
        }
    }
    return true;
}

template <int kCount>
int32_t launch_cast_units(const CastParams& p, int32_t sm_count, cudaStream_t stream) {
    const int64_t units = p.walk.num_lines * (p.walk.line / kCount);
    const unsigned blocks = grid_for(units, sm_count);
    if (units < INT32_MAX) {  // leaves room for a step beyond the end
        cast_kernel<kCount, uint32_t><<<blocks, kThreads, 0, stream>>>(p, static_cast<uint32_t>(units));
    } else {
        cast_kernel<kCount, int64_t><<<blocks, kThreads, 0, stream>>>(p, units);
    }
    return cudaPeekAtLastError();
}

template <typename Element>
int32_t launch_fill_units(const FillParams& p, int32_t sm_count, cudaStream_t stream) {
    const int64_t count = sizeof(Element) == 16 ? 16 / p.element_bytes : 1;
    const int64_t units = p.walk.num_lines * (p.walk.line / count);
    const unsigned blocks = grid_for(units, sm_count);
    if (units < INT32_MAX) {
        fill_kernel<Element, uint32_t><<<blocks, kThreads, 0, stream>>>(p, static_cast<uint32_t>(units));
    } else {
        fill_kernel<Element, int64_t><<<blocks, kThreads, 0, stream>>>(p, units);
    }
    return cudaPeekAtLastError();
}

int32_t launch_fill_elements(const FillParams& p, int32_t sm_count, cudaStream_t stream) {
    switch (p.element_bytes) {
        case 1:
            return launch_fill_units<uint8_t>(p, sm_count, stream);
        case 2:
            return launch_fill_units<uint16_t>(p, sm_count, stream);
        case 4:
            return launch_fill_units<uint32_t>(p, sm_count, stream);
        default:
            return launch_fill_units<uint64_t>(p, sm_count, stream);
    }
}

// One contiguous line is cut into whole units and a rest of single elements; `launch(walk, offset, whole)` does a part.
template <typename Launch>
int32_t launch_parts(const Walk& walk, int64_t count, const Launch& launch) {
    Walk part = walk;
    const int64_t whole = walk.line / count * count;
    if (whole > 0) {
        part.line = whole;
        if (const int32_t error = launch(part, 0, true)) {
            return error;
        }
    }
    if (whole == walk.line) {
        return cudaSuccess;
    }
    part.line = walk.line - whole;
    return launch(part, whole, false);
}

}  // namespace

int32_t launch_cast(const CastParams& p, int32_t sm_count, cudaStream_t stream) {
    constexpr int kCount = 8;
    const Walk& walk = p.walk;
    if (walk.num_lines == 0 || walk.line == 0) {
        return cudaSuccess;
    }
    const int64_t src_bytes = element_bytes(p.src_dtype);
    const int64_t dst_bytes = element_bytes(p.dst_dtype);
    const auto wide = [&](const Walk& w) {
        return in_whole_units(w, p.src, w.src_stride, w.src_line_stride, kCount, src_bytes) &&
               in_whole_units(w, p.dst, w.dst_stride, w.dst_line_stride, kCount, dst_bytes);
    };
    if (walk.rank > 0) {
        return wide(walk) ? launch_cast_units<kCount>(p, sm_count, stream) : launch_cast_units<1>(p, sm_count, stream);
    }
    return launch_parts(walk, kCount, [&](const Walk& part, int64_t offset, bool whole) {
        CastParams q = p;
        q.walk = part;
        q.src = static_cast<const char*>(p.src) + offset * walk.src_line_stride * src_bytes;
        q.dst = static_cast<char*>(p.dst) + offset * walk.dst_line_stride * dst_bytes;
        return whole && wide(part) ? launch_cast_units<kCount>(q, sm_count, stream)
                                   : launch_cast_units<1>(q, sm_count, stream);
    });
}

int32_t launch_fill(const FillParams& p, int32_t sm_count, cudaStream_t stream) {
    const Walk& walk = p.walk;
    if (walk.num_lines == 0 || walk.line == 0) {
        return cudaSuccess;
    }
    const int64_t count = 16 / p.element_bytes;
    const auto wide = [&](const Walk& w) {
        return in_whole_units(w, p.dst, w.dst_stride, w.dst_line_stride, count, p.element_bytes);
    };
    if (walk.rank > 0) {
        return wide(walk) ? launch_fill_units<uint4>(p, sm_count, stream) : launch_fill_elements(p, sm_count, stream);
    }
    return launch_parts(walk, count, [&](const Walk& part, int64_t offset, bool whole) {
        FillParams q = p;
        q.walk = part;
        q.dst = static_cast<char*>(p.dst) + offset * walk.dst_line_stride * p.element_bytes;
        return whole && wide(part) ? launch_fill_units<uint4>(q, sm_count, stream)
                                   : launch_fill_elements(q, sm_count, stream);
    });
}

}  // namespace flare::convert
