// Who attends to which keys in MLA decode. The grid depends on maxima alone; every block works out its own share from
// the lengths on the device, so a captured graph stays valid for all lengths.
//
// A sequence of length len costs ceil(len / 64) key blocks plus kPieceCost (loading q, writing the result). Two modes,
// the same choice in every block because it is a function of the lengths alone:
//   whole   sequence i belongs to part i mod P. Nothing to combine. Taken when it is at most kSplitCost block times
//           slower than an even share (sequences of like length), or when splitting is forbidden.
//   split   the concatenation of all sequences is cut into P even intervals; part p takes interval p. A cut inside a
//           sequence makes partial results, which decode_merge_sm90.cuh merges. Always taken when a number of splits is asked
//           for.
#pragma once

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cmath>
#include <cstdint>

#include "normaliser.cuh"
#include "../ptx/tma.cuh"
#include "params.h"

namespace flare::mla {

inline constexpr int kBlockKeys = 64;
inline constexpr int kTileRows = 64;

inline constexpr int kPieceCost = 1;
inline constexpr int kSplitCost = 8;
// An interval is at least so long. One H200, 2 requests of 1,024 keys, 16 heads: 19.3 us with 2, 22.6 us with 4.
inline constexpr int kMinPart = 2;
inline constexpr int kMaxParts = 160;

// The pieces of a cut request: the end of part first - 1, all of parts first, .., and the beginning of the last one.
struct Pieces {
    int32_t first;  // the first part that begins inside the request
    int32_t count;

    // Of partial result i: a part has two, first the one of the request that it begins inside.
    __device__ __forceinline__ int slot(int i) const { return 2 * (first + i) - (i == 0 ? 1 : 2); }
};

// The share of one part: requests first, first + step, .. up to last; the first starts at block begin_first, the last
// ends before block end_last (0: it isn't part of the share).
struct Share {
    int32_t first;
    int32_t step;
    int32_t begin_first;
    int32_t last;
    int32_t end_last;
    Pieces first_pieces;  // if begin_first > 0
    Pieces last_pieces;   // if end_last > 0
};

// Which share of a merge falls to a block: share `index` of `count`; none of 0.
struct Turn {
    int32_t index;
    int32_t count;
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

// L2 policy of the cache rows: each is read once by one block. Evicted first they leave alone what lies in L2, which pays until
// some 300 MB are read; then it costs more than it gives (docs/kernels/mla.md).
inline uint64_t keys_policy(const MlaDecodeParams& p) {
    constexpr int64_t kMost = int64_t{240} << 20;
    const int64_t row_bytes = p.kv_dtype == DType::kRow656 ? 656 : 2 * (int64_t{p.d_c} + p.d_rope);
    return p.indices == nullptr && int64_t{p.batch} * p.seqlen_k * row_bytes <= kMost ? ptx::kL2EvictFirst : ptx::kL2EvictNormal;
}

// With token indices a request is a query token, else a sequence.
inline ScheduleParams make_schedule(const MlaDecodeParams& p, int32_t num_requests, int32_t num_parts) {
    const bool sparse = p.indices != nullptr;
    ScheduleParams schedule{};
    schedule.seqlens_k = sparse ? p.topk_length : p.seqlens_k;
    schedule.length_stride_b = sparse ? p.topk_length_stride_b : 1;
    schedule.length_stride_s = p.topk_length_stride_s;
    schedule.index_is_64 = p.index_is_64;
    schedule.batch = num_requests;
    schedule.tokens_apart = sparse ? p.seqlen_q : 1;
    schedule.seqlen_k = sparse ? p.topk : p.seqlen_k;
    schedule.num_parts = num_parts;
    schedule.never_split = p.deterministic != 0 || p.num_splits == 1;
    if (p.num_splits > 1) {  // of requests of like length
        const int64_t wanted = int64_t{p.num_splits} * num_requests;
        schedule.forced_parts = static_cast<int32_t>(std::min<int64_t>(num_parts, wanted));
    }
    return schedule;
}

inline RowMap make_row_map(const MlaDecodeParams& p) {
    const bool sparse = p.indices != nullptr;
    return {p.cu_seqlens_q, p.index_is_64, sparse ? 1 : p.seqlen_q, p.heads, sparse ? p.seqlen_q : 1};
}

// Of the words at which the blocks of a cut request meet (decode_merge_sm90.cuh): a launch's own in the upper 46 bits, which hardly
// recurs and which no plain fill of the workspace shows.
inline constexpr uint64_t kMeetingTag = ~uint64_t{0} << 18;

inline uint64_t next_meeting_tag() {
    static std::atomic<uint64_t> count{static_cast<uint64_t>(std::chrono::system_clock::now().time_since_epoch().count())};
    uint64_t tag = 0;
    while (tag == 0 || tag == kMeetingTag) {
        uint64_t x = count.fetch_add(0x9e3779b97f4a7c15u);
        x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9u;
        x = (x ^ x >> 27) * 0x94d049bb133111ebu;
        tag = (x ^ x >> 31) & kMeetingTag;
    }
    return tag;
}

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

// One warp. The share of `part`. On the way to the first key of every launch: one scan of the
// lengths for both cuts, and divisions by lanes.
__device__ __forceinline__ void compute_share(const ScheduleParams& p, int part, int lane, Share& share) {
    constexpr uint32_t kAll = 0xffffffffu;
    int64_t sum = 0;
    int largest = 0;
    if (!p.never_split) {
#pragma unroll 4
        for (int request = lane; request < p.batch; request += 32) {
            const int blocks = blocks_of(load_length(p, request));
            sum += blocks + kPieceCost;
            largest = max(largest, blocks);
        }
        // Below 2^48, so neither half of 32 lanes overflows.
        const uint32_t low = __reduce_add_sync(kAll, static_cast<uint32_t>(sum) & 0xffff);
        const uint32_t high = __reduce_add_sync(kAll, static_cast<uint32_t>(sum >> 16));
        sum = (int64_t{high} << 16) + low;
        largest = __reduce_max_sync(kAll, largest);
    }
    const int64_t rounds = static_cast<uint32_t>(p.batch + p.num_parts - 1) / static_cast<uint32_t>(p.num_parts);
    const bool even = (rounds * (largest + kPieceCost) - kSplitCost) * p.num_parts <= sum;
    if (p.never_split || (p.forced_parts == 0 && even)) {
        share = {part, p.num_parts, 0, p.batch, 0, {0, 0}, {0, 0}};
        return;
    }
    const int64_t wanted = p.forced_parts != 0 ? min(int64_t{p.forced_parts}, sum) : sum / kMinPart;
    const int64_t parts = max(int64_t{1}, min(int64_t{p.num_parts}, wanted));
    if (part >= parts) {
        share = {p.batch, 1, 0, p.batch, 0, {0, 0}, {0, 0}};
        return;
    }
    // Cut p lies at x = floor(p sum / parts), in block x - at - kPieceCost of the request that begins at `at`.
    const auto divide = [](int64_t n, int64_t by) {
        return (n | by) >> 32 == 0 ? int64_t{static_cast<uint32_t>(n) / static_cast<uint32_t>(by)} : n / by;
    };
    const int64_t mine = divide((part + lane % 2) * sum, parts);
    int64_t x[2];
    int64_t at[2] = {sum, sum};
    struct Cut {
        int request;
        int block;  // 0: the cut falls between sequences
        int num_blocks;
    } cuts[2];
#pragma unroll
    for (int k = 0; k < 2; ++k) {
        x[k] = __shfl_sync(kAll, mine, k);
        cuts[k] = {p.batch, 0, 0};
    }
    int64_t base = 0;
#pragma unroll 1
    for (int start = 0; start < p.batch && base <= x[1]; start += 32) {
        const int request = start + lane;
        const int blocks = request < p.batch ? blocks_of(load_length(p, request)) : 0;
        const int cost = request < p.batch ? blocks + kPieceCost : 0;
        int scan = cost;  // at most 32 * 2^25
#pragma unroll
        for (int offset = 1; offset < 32; offset *= 2) {
            const int other = __shfl_up_sync(kAll, scan, offset);
            scan += lane >= offset ? other : 0;
        }
        const int64_t end = base + scan;
#pragma unroll
        for (int k = 0; k < 2; ++k) {
            const uint32_t here = __ballot_sync(kAll, x[k] >= end - cost && x[k] < end);
            if (here != 0) {
                const int owner = __ffs(here) - 1;
                const int offset = static_cast<int>(x[k] - __shfl_sync(kAll, end - cost, owner));
                at[k] = x[k] - offset;
                cuts[k] = {start + owner, max(0, offset - kPieceCost), __shfl_sync(kAll, blocks, owner)};
            }
        }
        base = __shfl_sync(kAll, end, 31);
    }
    // Lanes 0 and 1 find the first cuts inside the two requests, lanes 2 and 3 the first ones behind them.
    const int blocks = lane % 2 == 0 ? cuts[0].num_blocks : cuts[1].num_blocks;
    const int64_t from = (lane % 2 == 0 ? at[0] : at[1]) + kPieceCost + (lane < 2 ? 1 : blocks);
    const int index = static_cast<int>(divide(from * parts + sum - 1, sum));
    int found[4];
#pragma unroll
    for (int k = 0; k < 4; ++k) {
        found[k] = __shfl_sync(kAll, index, k);
    }
    share = {cuts[0].request, 1, cuts[0].block, cuts[1].request, cuts[1].block,
             {found[0], found[2] - found[0] + 1}, {found[1], found[3] - found[1] + 1}};
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
