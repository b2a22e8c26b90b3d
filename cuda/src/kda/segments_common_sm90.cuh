// Where the segments of a KDA forward lie (segments_sm90.cuh), and the scan over their states.
#pragma once

#include "kda/fused_config_sm90.cuh"

namespace flare::kda::fused {

// Slots of segments: segment i of sequence n has slot first_slot(n) + i, numbered like those of chunks (slots.cuh).
struct Segments {
    int32_t tokens;  // of a segment: a multiple of kChunk
    uint8_t* blocks;
    uint32_t* flags;
    uint32_t* counter;
    float* starts;  // [slot][head][V][K], state before a segment; between the launches E of the segment before it
    float* maps;    // [slot][head][K][K], transposed: M of a segment
};

struct Segment {
    Unit unit;  // its tokens, its first row
    int32_t index;
    int32_t slot;
    int32_t start;   // tokens of the sequence before it
    int32_t length;  // of the sequence

    // Number `order` of all segments: those of equal index are neighbours where sequences are equally long. One more
    // than a sequence has is found, too.
    __device__ __forceinline__ void locate(const KdaParams& p, const Segments& segments, int32_t order, int32_t head) {
        const int32_t tokens = segments.tokens;
        int32_t n, row = 0;
        if (p.cu_seqlens == nullptr) {
            const int32_t sequences = static_cast<int32_t>(p.num_sequences);
            length = static_cast<int32_t>(p.seqlen);
            index = order / sequences;
            n = order - index * sequences;
            slot = n * ((length + tokens - 1) / tokens) + index;
        } else {
            const auto first_slot = [&](int32_t i) {
                return static_cast<int32_t>(load_index(p.cu_seqlens, i, p.index64)) / tokens + i;
            };
            int32_t high = static_cast<int32_t>(p.num_sequences);
            for (n = 0; high - n > 1;) {
                const int32_t middle = (n + high) / 2;
                (first_slot(middle) <= order ? n : high) = middle;
            }
            row = static_cast<int32_t>(load_index(p.cu_seqlens, n, p.index64));
            length = static_cast<int32_t>(load_index(p.cu_seqlens, n + 1, p.index64)) - row;
            slot = order;
            index = order - first_slot(n);
        }
        start = index * tokens;
        unit = {n, head, min(tokens, length - start), row + start};
    }
    __device__ __forceinline__ bool first() const { return index == 0; }
    __device__ __forceinline__ bool last() const { return start + unit.tokens == length; }
    __device__ __forceinline__ bool exists() const { return index == 0 || unit.tokens > 0; }
    // Index of its first operand block in the workspace.
    __device__ __forceinline__ int64_t block(const KdaParams& p) const {
        return block_index(p, {unit.n, unit.head, length, unit.row - start}, start);
    }
    // Of the arrays in the workspace.
    __device__ __forceinline__ int64_t state(const KdaParams& p) const {
        return (slot * p.heads_v + unit.head) * int64_t{128 * 128};
    }
};

// Between the launches: S_in of segment i + 1 is M_i S_in of segment i + E_i. A block has kRows value columns of a
// sequence and value head (rows, of the transposed states), a warp eight of the 128 channels to sum over, a lane four
// columns of M, which come a segment ahead.
inline constexpr int kScanThreads = 512;
inline constexpr int kScanWarps = kScanThreads / 32;
template <int kRows>
inline constexpr uint32_t kScanSharedBytes = (kScanWarps + 1) * kRows * 128 * 4;

template <int kRows>
__global__ void __launch_bounds__(kScanThreads, 1)
    kda_scan_segments_sm90_kernel(const __grid_constant__ KdaParams p, const __grid_constant__ Segments segments) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
    extern __shared__ uint8_t smem_raw[];
    constexpr int kRun = 128 / kScanWarps;               // channels of a warp
    constexpr int kMine = kRows * 128 / kScanThreads;    // elements of a thread, in one column
    float4* const parts = reinterpret_cast<float4*>(smem_raw);                       // [warp][row][32]
    float* const state = reinterpret_cast<float*>(parts + kScanWarps * kRows * 32);  // [channel][row]
    const int warp = static_cast<int>(threadIdx.x / 32);
    const int lane = static_cast<int>(threadIdx.x % 32);
    const int32_t heads = static_cast<int32_t>(p.heads_v);
    const int32_t group = static_cast<int32_t>(blockIdx.x % (128 / kRows));
    const int32_t unit = static_cast<int32_t>(blockIdx.x / (128 / kRows));
    const int32_t n = unit / heads;
    const bool packed = p.cu_seqlens != nullptr;
    const int32_t row = packed ? static_cast<int32_t>(load_index(p.cu_seqlens, n, p.index64)) : 0;
    const int32_t length = packed ? static_cast<int32_t>(load_index(p.cu_seqlens, n + 1, p.index64)) - row
                                  : static_cast<int32_t>(p.seqlen);
    const int32_t count = (length + segments.tokens - 1) / segments.tokens;
    if (count < 3) {
        return;
    }
    constexpr int64_t kState = 128 * 128;
    const int64_t slot = packed ? row / segments.tokens + n : n * count;
    const int64_t second = ((slot + 1) * heads + unit - n * heads) * kState;
    const int64_t step = heads * kState;
    // A thread's elements are rows r0 ... of a column: the state's place in shared memory, and E's and S_in's in device
    // memory.
    const int column = static_cast<int>(threadIdx.x) % 128;
    const int r0 = static_cast<int>(threadIdx.x) / 128 * kMine;
    float* start = segments.starts + second + (group * kRows + r0) * 128 + column;
    const float4* map = reinterpret_cast<const float4*>(segments.maps + second) + warp * kRun * 32 + lane;
    float mine[kMine], e[kMine];
    float4 m[kRun];
#pragma unroll
    for (int i = 0; i < kRun; ++i) {
        m[i] = map[32 * i];
    }
#pragma unroll
    for (int i = 0; i < kMine; ++i) {
        mine[i] = start[i * 128];
        e[i] = start[step + i * 128];
    }
#pragma unroll 1
    for (int32_t left = count - 2; left > 0; --left) {
#pragma unroll
        for (int i = 0; i < kMine; ++i) {
            state[column * kRows + r0 + i] = mine[i];
            mine[i] = e[i];
        }
        start += step;
        map += step / 4;
        float4 next[kRun] = {};
        if (left > 1) {
#pragma unroll
            for (int i = 0; i < kRun; ++i) {
                next[i] = map[32 * i];
            }
#pragma unroll
            for (int i = 0; i < kMine; ++i) {
                e[i] = start[step + i * 128];
            }
        }
        __syncthreads();
        float4 sum[kRows] = {};
#pragma unroll
        for (int j = 0; j < kRun; ++j) {
#pragma unroll
            for (int four = 0; four < kRows; four += 4) {
                const float4 s = *reinterpret_cast<const float4*>(state + (warp * kRun + j) * kRows + four);
                const float rows[4] = {s.x, s.y, s.z, s.w};
#pragma unroll
                for (int r = 0; r < 4; ++r) {
                    float4& to = sum[four + r];
                    to = {fmaf(rows[r], m[j].x, to.x), fmaf(rows[r], m[j].y, to.y), fmaf(rows[r], m[j].z, to.z),
                          fmaf(rows[r], m[j].w, to.w)};
                }
            }
            m[j] = next[j];
        }
#pragma unroll
        for (int r = 0; r < kRows; ++r) {
            parts[(warp * kRows + r) * 32 + lane] = sum[r];
        }
        __syncthreads();
#pragma unroll 8
        for (int w = 0; w < kScanWarps; ++w) {
#pragma unroll
            for (int i = 0; i < kMine; ++i) {
                mine[i] += reinterpret_cast<const float*>(parts)[(w * kRows + r0 + i) * 128 + column];
            }
        }
#pragma unroll
        for (int i = 0; i < kMine; ++i) {
            start[i * 128] = mine[i];
        }
    }
#else
    __trap();
#endif
}

}  // namespace flare::kda::fused
