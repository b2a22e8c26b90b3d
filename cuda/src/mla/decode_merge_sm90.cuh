// Merges the partial results of a request that the schedule cut, inside the decode kernel:
// out = sum_i w_i O_i, w_i = 2^(lse_i - lse), lse = log2 sum_i 2^lse_i.
//
// The blocks that share a request and a row tile meet at one 64-bit word of the workspace. A block that has written its
// partial result arrives there; if it has nothing else to do it waits for the others and then merges a share of the rows.
// A wait ends after kPatience cycles: blocks that aren't resident yet may need this multiprocessor. Then, and where nobody
// waits, the last block to arrive merges everything, so progress depends on no other block being resident. Which block
// merges a row has no influence on its bits.
//
// The workspace holds anything at first. A word counts from zero once it carries this launch's tag, which the first block
// of the request writes over whatever was there. The last block to arrive marks the word as done: a captured graph repeats
// its tag, and then starts over.
//
// The code is small rather than unrolled: every line of it is fetched for the first time when all wait for it. Partial results
// come to shared memory by cp.async; bulk copies took 26 ns each to issue.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <type_traits>

#include "../ptx/ldst.cuh"
#include "../ptx/math.cuh"
#include "../ptx/sync.cuh"
#include "schedule.cuh"

namespace flare::mla::decode {

// Fields of a meeting word, above them the tag.
inline constexpr uint64_t kArrived = 1;
inline constexpr uint64_t kWaiting = 1 << 8;
inline constexpr uint64_t kDone = 1 << 16;
inline constexpr uint64_t kGivenUp = 1 << 17;
static_assert(kMaxParts < 256 && (kMeetingTag & (2 * kGivenUp - 1)) == 0, "fields of a meeting word");

#ifndef FLARE_MLA_MERGE_PATIENCE
#define FLARE_MLA_MERGE_PATIENCE 100000  // some 55 us
#endif
inline constexpr int64_t kPatience = FLARE_MLA_MERGE_PATIENCE;

template <typename T>
__device__ __forceinline__ float2 unpack2(uint32_t x) {
    if constexpr (std::is_same_v<T, __half>) {
        return __half22float2(*reinterpret_cast<const __half2*>(&x));
    } else {
        return __bfloat1622float2(*reinterpret_cast<const __nv_bfloat162*>(&x));
    }
}

// 256 threads from kFirstThread on, after the last piece of the block's share; they meet at named barrier kBarrier. The buffers
// of Q and K are theirs then.
template <typename T, typename Args, typename Smem, int kTileRows, int kFirstThread, uint32_t kBarrier>
struct Merger {
    const Args& args;
    Smem& smem;
    const int tile;
    const int thread = static_cast<int>(ptx::thread_idx()) - kFirstThread;  // of the 256

    static constexpr int kValueCols = 512;
    static constexpr int kThreadCols = 8;  // 16 bytes
    static constexpr int kRowThreads = kValueCols / kThreadCols;
    static constexpr uint32_t kRowBytes = kValueCols * 2;
    static constexpr int kBufferRows = sizeof(Smem::k) / kRowBytes;  // in the buffers of K
    static constexpr int kManyPieces = 40;

    // In the buffer of Q.
    struct Scratch {
        float weights[kBufferRows + kMaxParts];  // [row][piece]
        float sums[2048];
        int64_t out[kTileRows];  // element offset of a row, -1: there is no such row
    };
    static_assert(sizeof(Scratch) <= sizeof(Smem::q), "scratch of the merge");
    static_assert(kMaxParts / 2 <= kBufferRows, "pieces of a row that is merged in two slices");

    __device__ __forceinline__ Scratch& scratch() const { return *reinterpret_cast<Scratch*>(smem.q); }

    __device__ __forceinline__ unsigned long long* word(const Pieces& pieces) const {
        return reinterpret_cast<unsigned long long*>(args.meetings) + pieces.first * args.num_tiles + tile;
    }

    static __device__ __forceinline__ uint64_t peek(const unsigned long long* at) {
        return *static_cast<const volatile unsigned long long*>(at);
    }

    // One thread: zero under this launch's tag, unless that is there. A failed exchange means that another block did it.
    __device__ __forceinline__ void open(const Pieces& pieces) const {
        unsigned long long* const at = word(pieces);
        const unsigned long long old = peek(at);
        if ((old & kMeetingTag) != args.meeting_tag || (old & kDone) != 0) {
            atomicCAS(at, old, static_cast<unsigned long long>(args.meeting_tag));
        }
    }

    static __device__ __forceinline__ int arrived(uint64_t word) { return static_cast<int>(word & 0xff); }
    static __device__ __forceinline__ int waiting(uint64_t word) { return static_cast<int>(word / kWaiting & 0xff); }

    // One thread, after the block's partial result has been written.
    __device__ __forceinline__ Turn meet(const Pieces& pieces, bool may_wait) const {
        unsigned long long* const at = word(pieces);
        __threadfence();
        const uint64_t mine = may_wait ? kArrived + kWaiting : kArrived;
        const uint64_t old = atomicAdd(at, static_cast<unsigned long long>(mine));
        uint64_t now = old + mine;
        const bool last = arrived(now) == pieces.count;
        if (last) {
            atomicOr(at, static_cast<unsigned long long>(kDone));
        } else if (may_wait) {
            const int64_t start = clock64();
            bool given_up = false;
            while (arrived(now) < pieces.count && !given_up) {
                if (clock64() - start > kPatience) {
                    const uint64_t seen = atomicCAS(at, static_cast<unsigned long long>(now),
                                                    static_cast<unsigned long long>(now | kGivenUp));
                    given_up = seen == now;
                    now = seen;
                } else {
                    now = peek(at);
                }
            }
            if (given_up) {
                return {0, 0};
            }
        } else {
            return {0, 0};
        }
        __threadfence();
        if (waiting(now) == 0 || (now & kGivenUp) != 0) {
            return {0, last ? 1 : 0};
        }
        return {waiting(old), may_wait ? waiting(now) : 0};
    }

    __device__ __forceinline__ float partial_lse(const Pieces& pieces, int i, int row) const {
        return __ldcg(args.lse_part + pieces.slot(i) * (int64_t{args.num_tiles} * kTileRows) + row);
    }

    // One warp: the weights of a row's pieces, where the row goes, its LSE.
    __device__ __forceinline__ void weigh(const Pieces& pieces, int request, int row, float* weights, int64_t& out,
                                          bool write_lse) const {
        constexpr int kPerLane = kMaxParts / 32;
        const int lane = thread % 32;
        float x[kPerLane];
#pragma unroll
        for (int k = 0; k < kPerLane; ++k) {
            const int i = lane + 32 * k;
            x[k] = i < pieces.count ? partial_lse(pieces, i, row) : -INFINITY;
        }
        const RowMap::Span span = args.row_map.span(request);
        const int token = row / args.row_map.heads;
        const int head = row - token * args.row_map.heads;
        const bool exists = token < span.num_tokens;
        const float sink = args.sink != nullptr ? __ldg(args.sink + head) * 1.44269504088896340736f : -INFINITY;
        float lse;
        weigh_partials(x, sink, lse);
#pragma unroll
        for (int k = 0; k < kPerLane; ++k) {
            if (lane + 32 * k < pieces.count) {
                weights[lane + 32 * k] = x[k];
            }
        }
        if (lane == 0) {
            out = exists ? span.batch * args.out_stride_b + (span.first_token + token) * args.out_stride_s +
                               head * args.out_stride_h
                         : -1;
            if (write_lse && exists && args.lse != nullptr) {
                args.lse[span.batch * args.lse_stride_b + head * args.lse_stride_h + span.first_token + token] = lse;
            }
        }
    }

    // Rows [from, to), or slice `slice` of 2^log_slices of one row. One row is spread over all threads, by pieces; of several
    // rows 64 threads take one.
    __device__ __forceinline__ void merge_rows(const Pieces& pieces, int request, int from, int to, int slice, int log_slices,
                                               bool spread) const {
        const int rows = to - from;
        const uint32_t row_bytes = kRowBytes >> log_slices;
        const uint32_t buffer = ptx::smem_addr(smem.k);
        const int width = kRowThreads >> log_slices;  // threads across the columns
        const int column = thread & (width - 1);
        const int group = thread >> (6 - log_slices);
        const int groups = 4 << log_slices;
        const char* const src =
            static_cast<const char*>(args.o_part) + int64_t{from} * kRowBytes + slice * row_bytes + column * 16;
        int piece = 0;
        int row = group;
#pragma unroll 4
        for (int i = group; i < pieces.count * rows; i += groups) {
            if (spread) {
                piece = i;
                row = 0;
            }
            while (row >= rows) {
                row -= rows;
                ++piece;
            }
            ptx::cp_async_16(buffer + i * row_bytes + column * 16,
                             src + pieces.slot(piece) * (int64_t{args.num_tiles} * kTileRows * kRowBytes) + row * kRowBytes,
                             16);
            row += groups;  // 4 where there are several rows
        }
        ptx::cp_async_commit();
#pragma unroll 1
        for (int r = thread / 32; r < rows; r += 8) {
            weigh(pieces, request, from + r, scratch().weights + r * pieces.count, scratch().out[r], slice == 0);
        }
        ptx::cp_async_wait<0>();
        ptx::named_barrier_sync(kBarrier, 256);
#pragma unroll 1
        for (int r = spread ? 0 : group; r < rows; r += 4) {
            float acc[kThreadCols] = {};
            const int step = spread ? groups : 1;
#pragma unroll 4
            for (int i = spread ? group : 0; i < pieces.count; i += step) {
                uint32_t x[4];
                ptx::ld_shared_v4(x, buffer + (i * rows + r) * row_bytes + column * 16);
                const float weight = scratch().weights[r * pieces.count + i];
#pragma unroll
                for (int j = 0; j < 4; ++j) {
                    const float2 v = unpack2<T>(x[j]);  // what weighs nothing may be anything
                    acc[2 * j] = weight != 0.0f ? fmaf(weight, v.x, acc[2 * j]) : acc[2 * j];
                    acc[2 * j + 1] = weight != 0.0f ? fmaf(weight, v.y, acc[2 * j + 1]) : acc[2 * j + 1];
                }
            }
            const int64_t out = scratch().out[r];
            T* const to_row = static_cast<T*>(args.out) + out + slice * width * kThreadCols;
            if (!spread) {
                if (out >= 0 && column * kThreadCols < args.d_c) {
                    const uint32_t packed[4] = {ptx::pack2<T>(acc[0], acc[1]), ptx::pack2<T>(acc[2], acc[3]),
                                                ptx::pack2<T>(acc[4], acc[5]), ptx::pack2<T>(acc[6], acc[7])};
                    ptx::st_global_v4(to_row + column * kThreadCols, packed);
                }
                continue;
            }
            float* const sums = scratch().sums;
#pragma unroll
            for (int c = 0; c < kThreadCols; ++c) {
                sums[c * 256 + thread] = acc[c];
            }
            ptx::named_barrier_sync(kBarrier, 256);
            const int at = 2 * thread % kThreadCols * 256 + 2 * thread / kThreadCols;
            if (thread < width * kThreadCols / 2 && slice * width * kThreadCols + 2 * thread < args.d_c && out >= 0) {
                float a = 0.0f;
                float b = 0.0f;
#pragma unroll 4
                for (int g = 0; g < 256; g += width) {
                    a += sums[at + g];
                    b += sums[at + 256 + g];
                }
                *reinterpret_cast<uint32_t*>(to_row + 2 * thread) = ptx::pack2<T>(a, b);
            }
        }
        ptx::named_barrier_sync(kBarrier, 256);  // buffers and scratch are free again
    }

    __device__ __forceinline__ void merge(const Turn& turn, const Pieces& pieces, int request) const {
        const int row0 = tile * kTileRows;
        const int rows = min(kTileRows, args.rows - row0);
        const bool spread = pieces.count >= kManyPieces;
        int log_slices = 0;
        while (spread && log_slices < 3 &&
               ((rows << (log_slices + 1)) <= pieces.count || kBufferRows << log_slices < pieces.count)) {
            ++log_slices;
        }
        // Units of a row's slice by turns, or a run of rows in as many steps as the buffer asks for.
        const int begin = spread ? turn.index : rows * turn.index / turn.count;
        const int end = spread ? rows << log_slices : rows * (turn.index + 1) / turn.count;
        const int step = spread ? turn.count : kBufferRows / pieces.count;
#pragma unroll 1
        for (int at = begin; at < end; at += step) {
            const int from = row0 + (at >> log_slices);
            merge_rows(pieces, request, from, spread ? from + 1 : row0 + min(end, at + step), at & ((1 << log_slices) - 1),
                       log_slices, spread);
        }
    }

    __device__ __forceinline__ bool cut_at_last() const { return smem.share.end_last > 0; }

    // Not where the whole share lies inside one request.
    __device__ __forceinline__ bool cut_at_first() const {
        return smem.share.begin_first > 0 && !(cut_at_last() && smem.share.first == smem.share.last);
    }

    // One thread, at the start of the block.
    __device__ __forceinline__ void open() const {
        if (cut_at_first()) {
            open(smem.share.first_pieces);
        }
        if (cut_at_last()) {
            open(smem.share.last_pieces);
        }
    }

    // Arrives at the two requests that the block may have cut, waits for the last one's pieces.
    __device__ __forceinline__ void run() const {
        if (!cut_at_first() && !cut_at_last()) {
            return;
        }
        ptx::named_barrier_sync(kBarrier, 256);
        if (thread == 0) {
            smem.turns[1] = cut_at_last() ? meet(smem.share.last_pieces, true) : Turn{0, 0};
        } else if (thread == 32) {
            smem.turns[0] = cut_at_first() ? meet(smem.share.first_pieces, false) : Turn{0, 0};
        }
        ptx::named_barrier_sync(kBarrier, 256);
#pragma unroll 1
        for (int which = 0; which < 2; ++which) {
            const Turn turn = smem.turns[which];
            if (turn.count > 0) {
                merge(turn, which == 0 ? smem.share.first_pieces : smem.share.last_pieces,
                      which == 0 ? smem.share.first : smem.share.last);
            }
        }
    }
};

}  // namespace flare::mla::decode
