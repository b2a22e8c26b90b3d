// Who attends to which keys in MLA decode. The grid depends on maxima alone; every block works out its own share from
// the lengths on the device, so a captured graph stays valid for all lengths.
//
// A sequence of length len costs ceil(len / 64) key blocks plus kPieceCost (loading q, writing the result). Two modes,
// the same choice in every block because it is a function of the lengths alone:
//   whole   sequence i belongs to part i mod P. Nothing to combine. Taken when it is at most kSplitCost block times
//           slower than an even share (sequences of like length), or when splitting is forbidden.
//   split   the concatenation of all sequences is cut into P even intervals; part p takes interval p. A cut inside a
//           sequence makes partial results, which decode_combine.cuh merges. Cuts closer than kMinPiece blocks to an
//           end of the sequence move to that end. Always taken when a number of splits is asked for.
#pragma once

#include <cmath>
#include <cstdint>

#include "../ptx/math.cuh"
#include "params.h"

namespace flare::mla {

inline constexpr int kBlockKeys = 64;
inline constexpr int kTileRows = 64;

inline constexpr int kPieceCost = 1;
inline constexpr int kSplitCost = 8;
inline constexpr int kMinPiece = 1;
// An interval is at least so long. One H200, 2 requests of 1,024 keys, 16 heads: 19.3 us with 2, 22.6 us with 4.
inline constexpr int kMinPart = 2;

struct Cut {
    int32_t request;
    int32_t block;  // 0: the cut falls between sequences
    int32_t num_blocks;
    int32_t pad;
};

// The share of one part: requests first, first + step, .. up to last; the first starts at block begin_first, the last
// ends before block end_last (0: it isn't part of the share).
struct Share {
    int32_t first;
    int32_t step;
    int32_t begin_first;
    int32_t last;
    int32_t end_last;
};

struct ScheduleParams {
    const void* seqlens_k;
    int64_t length_stride_b, length_stride_s;
    int32_t index_is_64;
    int32_t batch;  // of requests: sequences, or with token indices query tokens
    int32_t tokens_apart;  // requests of a batch entry: 1, or with token indices the query tokens
    int32_t seqlen_k;
    int32_t num_parts;
    int32_t never_split;
    int32_t forced_parts;  // 0: as many as pay
};

// Where the query rows of a request lie; row = token * heads + head.
struct RowMap {
    const void* cu_seqlens_q;  // ragged token counts; null: seqlen_q each
    int32_t index_is_64;
    int32_t seqlen_q;
    int32_t heads;
    int32_t tokens_apart;

    struct Span {
        int32_t batch;
        int32_t first_token;
        int32_t num_tokens;
    };

    __device__ __forceinline__ Span span(int request) const;
};

__device__ __forceinline__ int load_index(const void* array, int index_is_64, int64_t i) {
    return index_is_64 ? static_cast<int>(__ldg(static_cast<const long long*>(array) + i))
                       : __ldg(static_cast<const int*>(array) + i);
}

__device__ __forceinline__ int load_length(const ScheduleParams& p, int request) {
    if (p.seqlens_k == nullptr) {
        return p.seqlen_k;
    }
    const int64_t at = p.tokens_apart == 1 ? request * p.length_stride_b
                                           : request / p.tokens_apart * p.length_stride_b +
                                                 request % p.tokens_apart * p.length_stride_s;
    const int len = load_index(p.seqlens_k, p.index_is_64, at);
    return max(0, min(len, p.seqlen_k));
}

__device__ __forceinline__ RowMap::Span RowMap::span(int request) const {
    if (cu_seqlens_q != nullptr) {
        const int begin = load_index(cu_seqlens_q, index_is_64, request);
        return {0, begin, load_index(cu_seqlens_q, index_is_64, request + 1) - begin};
    }
    if (tokens_apart > 1) {
        return {request / tokens_apart, request % tokens_apart, 1};
    }
    return {request, 0, seqlen_q};
}

__device__ __forceinline__ int blocks_of(int len) {
    return (len + kBlockKeys - 1) / kBlockKeys;
}

// One warp. Where position x of the concatenation falls.
__device__ __forceinline__ Cut find_cut(const ScheduleParams& p, int64_t x, int lane) {
    int64_t base = 0;
    for (int start = 0; start < p.batch; start += 32) {
        const int request = start + lane;
        const int blocks = request < p.batch ? blocks_of(load_length(p, request)) : 0;
        const int cost = request < p.batch ? blocks + kPieceCost : 0;
        int sum = cost;  // at most 32 * 2^25
#pragma unroll
        for (int offset = 1; offset < 32; offset *= 2) {
            const int other = __shfl_up_sync(0xffffffffu, sum, offset);
            sum += lane >= offset ? other : 0;
        }
        const int total = __shfl_sync(0xffffffffu, sum, 31);
        if (x < base + total) {
            const int64_t begin = base + sum - cost;
            const uint32_t here = __ballot_sync(0xffffffffu, x >= begin && x < begin + cost);
            const int owner = __ffs(here) - 1;
            const int offset = static_cast<int>(__shfl_sync(0xffffffffu, static_cast<int>(x - begin), owner));
            const int n = __shfl_sync(0xffffffffu, blocks, owner);
            int block = max(0, min(offset - kPieceCost, n));
            block = block < kMinPiece ? 0 : block;
            if (block > 0 && n - block < kMinPiece) {
                return {start + owner + 1, 0, 0, 0};
            }
            return {start + owner, block, n, 0};
        }
        base += total;
    }
    return {p.batch, 0, 0, 0};
}

// One warp. The share of `part` and the cut at its start.
__device__ __forceinline__ void compute_share(const ScheduleParams& p, int part, int lane, Share& share, Cut& cut) {
    int64_t sum = 0;
    int largest = 0;
    if (!p.never_split) {
#pragma unroll 4
        for (int request = lane; request < p.batch; request += 32) {
            const int blocks = blocks_of(load_length(p, request));
            sum += blocks + kPieceCost;
            largest = max(largest, blocks);
        }
#pragma unroll
        for (int offset = 16; offset > 0; offset /= 2) {
            sum += __shfl_xor_sync(0xffffffffu, sum, offset);
            largest = max(largest, __shfl_xor_sync(0xffffffffu, largest, offset));
        }
    }
    const int64_t rounds = (p.batch + p.num_parts - 1) / p.num_parts;
    const bool even = rounds * (largest + kPieceCost) <= sum / p.num_parts + kSplitCost;
    if (p.never_split || (p.forced_parts == 0 && even)) {
        share = {part, p.num_parts, 0, p.batch, 0};
        cut = {part, 0, 0, 0};
        return;
    }
    const int64_t wanted = p.forced_parts != 0 ? p.forced_parts : sum / kMinPart;
    const int64_t parts = max(int64_t{1}, min(int64_t{p.num_parts}, wanted));
    if (part >= parts) {
        share = {p.batch, 1, 0, p.batch, 0};
        cut = {p.batch, 0, 0, 0};
        return;
    }
    cut = part == 0 ? Cut{0, 0, 0, 0} : find_cut(p, part * sum / parts, lane);
    const Cut end = part + 1 == parts ? Cut{p.batch, 0, 0, 0} : find_cut(p, (part + 1) * sum / parts, lane);
    share = {cut.request, 1, cut.block, end.request, end.block};
}

// One run of key blocks of one sequence.
struct Piece {
    int32_t request;
    int32_t len;
    int32_t begin;  // blocks
    int32_t end;
    int32_t num_blocks;  // of the whole sequence

    __device__ __forceinline__ bool whole() const { return begin == 0 && end == num_blocks; }
};

// Factor of O, and lse in natural log, of a row with running maximum m and sum (log2 units); sink_log2 = -inf: none.
__device__ __forceinline__ float normaliser(float m, float sum, float sink_log2, float& lse) {
    constexpr float kLn2 = 0.69314718055994530942f;
    if (sum == 0.0f || sink_log2 == INFINITY) {  // no key, or all weight on the sink
        lse = sink_log2 * kLn2;
        return 0.0f;
    }
    const float top = fmaxf(m, sink_log2);
    const float weight = ptx::exp2_approx(m - top);
    const float total = fmaf(sum, weight, ptx::exp2_approx(sink_log2 - top));
    lse = (top + ptx::log2_approx(total)) * kLn2;
    return weight / total;
}

// Walks the pieces of a share; every role of a block walks the same ones.
struct PieceIterator {
    const Share& share;
    int32_t next;

    __device__ __forceinline__ explicit PieceIterator(const Share& s) : share(s), next(s.first) {}

    __device__ __forceinline__ bool advance(const ScheduleParams& p, Piece& piece) {
        while (next < p.batch && next <= share.last && !(next == share.last && share.end_last == 0)) {
            const int request = next;
            next += share.step;
            const int len = load_length(p, request);
            const int blocks = blocks_of(len);
            piece = {request, len, request == share.first ? share.begin_first : 0,
                     request == share.last ? share.end_last : blocks, blocks};
            if (piece.begin < piece.end || piece.num_blocks == 0) {
                return true;
            }
        }
        return false;
    }
};

}  // namespace flare::mla
