// In which order persistent blocks take the tiles of a batch whose lengths lie on the device. Every block sorts the sequences
// into a table in its shared memory, once; then every role derives the same static sequence of tiles from it, so that there
// is neither a workspace nor a tile outside a sequence.
//
// Without a causal mask (kPlain) the tiles of a sequence are equal: sequences with the most keys first, in each the heads that
// share keys together. With one, either a unit is tile i of two heads from the front and tile i from the back (kMirrored),
// together as long as any other two of the sequence, and sequences with the most keys come first; or tiles of the same row
// block of all sequences and heads are neighbours, from the last row block to the first (kByRow). Blocks take units round by
// round, odd rounds in reverse.
#pragma once

#include <cstdint>

#include "../pipe/scheduler.cuh"
#include "params.h"

namespace flare::attention {

inline constexpr int kPackedEntries = 256;

// The host's part.
struct PackedOrder {
    int32_t group;     // neighbouring sequences that share an entry of the table
    int32_t entries;   // at most kPackedEntries
    bool causal;
    bool mirrored;     // wanted, provided that it balances
    uint8_t head_bits;  // log2 of the query heads that a tile joins: its rows are tokens times these, the heads the fast index
    pipe::FastDivisor heads;          // of tiles: query heads, or with heads joined key heads
    pipe::FastDivisor heads_per_kv;

    static PackedOrder make(int32_t batch, int32_t heads, int32_t heads_per_kv, int32_t head_bits, bool causal,
                            bool mirrored) {
        const int32_t group = (batch + kPackedEntries - 1) / kPackedEntries;
        return {group,
                (batch + group - 1) / group,
                causal,
                mirrored,
                static_cast<uint8_t>(head_bits),
                pipe::FastDivisor::make(static_cast<uint32_t>(heads)),
                pipe::FastDivisor::make(static_cast<uint32_t>(heads_per_kv))};
    }
};

// Where a sequence of the batch lies and how long it is.
struct SequenceLengths {
    int q_row;  // of the packed tensor, else 0
    int k_row;
    int seqlen_q;
    int seqlen_k;

    static __device__ __forceinline__ SequenceLengths load(const FwdParams& params, int batch) {
        SequenceLengths lengths{0, 0, params.seqlen_q, params.seqlen_k};
        if (params.cu_seqlens_q != nullptr) {
            lengths.q_row = params.cu_seqlens_q[batch];
            lengths.seqlen_q = params.cu_seqlens_q[batch + 1] - lengths.q_row;
        }
        if (params.cu_seqlens_k != nullptr) {
            lengths.k_row = params.cu_seqlens_k[batch];
            lengths.seqlen_k = params.cu_seqlens_k[batch + 1] - lengths.k_row;
        }
        if (params.seqused_q != nullptr) {
            lengths.seqlen_q = params.seqused_q[batch];
        }
        if (params.seqused_k != nullptr) {
            lengths.seqlen_k = params.seqused_k[batch];
        }
        return lengths;
    }
};

// A tile of a batch; tile < 0: there is none left.
struct PackedPlace {
    int tile;  // row block * heads + head
    int batch;
};

template <int kBlockM>
struct PackedTable {
    enum Mode : int { kPlain, kMirrored, kByRow };

    struct Entry {
        int first;  // unit
        int index;  // of the group of sequences; of the entry behind the last, the mode
    };

    static constexpr uint32_t kBytes = (kPackedEntries + 1) * sizeof(Entry);

    Entry* entries;

    static __device__ __forceinline__ PackedTable at(uint32_t smem_addr) {
        return {static_cast<Entry*>(__cvta_shared_to_generic(smem_addr))};
    }

    static __device__ __forceinline__ int row_blocks(const PackedOrder& order, const FwdParams& params, int batch) {
        const int rows = max(0, SequenceLengths::load(params, batch).seqlen_q) << order.head_bits;
        return (rows + kBlockM - 1) / kBlockM;
    }

    // All threads of the block, at least kPackedEntries; ends before the last barrier, which the caller owes.
    __device__ __forceinline__ void build(const PackedOrder& order, const FwdParams& params) const {
        const int t = static_cast<int>(threadIdx.x);
        const int heads = static_cast<int>(order.heads.divisor);
        int keys = 0;
        int tiles = 0;  // of one head
        if (t < order.entries) {
            for (int batch = t * order.group; batch < min(params.batch, (t + 1) * order.group); ++batch) {
                keys = max(keys, SequenceLengths::load(params, batch).seqlen_k);
                tiles += row_blocks(order, params, batch);
            }
            entries[t] = {tiles, keys};
        }
        __syncthreads();
        int total = 0;
        int rank_by_tiles = 0;
        int rank_by_keys = 0;
        if (t < order.entries) {
            for (int i = 0; i < order.entries; ++i) {
                const Entry other = entries[i];
                total += other.first;
                rank_by_tiles += other.first > tiles || (other.first == tiles && i < t) ? 1 : 0;
                rank_by_keys += other.index > keys || (other.index == keys && i < t) ? 1 : 0;
            }
        }
        __syncthreads();
        if (t < order.entries) {
            const int grid = static_cast<int>(gridDim.x);
            const int pairs = total * heads / 2;
            const bool balanced = 10ll * pairs >= 9ll * ((pairs + grid - 1) / grid * grid);
            const Mode mode = !order.causal ? kPlain
                              : heads % 2 == 0 && (order.group > 1 || (order.mirrored && balanced)) ? kMirrored
                              : order.group == 1                                                     ? kByRow
                                                                                                     : kPlain;
            entries[mode == kByRow ? rank_by_tiles : rank_by_keys] = {tiles, t};
            if (t == 0) {
                entries[order.entries].index = mode;
            }
        }
        __syncthreads();
        if (t < 32) {
            constexpr int kPerLane = kPackedEntries / 32;
            const Mode mode = static_cast<Mode>(entries[order.entries].index);
            int counts[kPerLane];
            int sum = 0;
#pragma unroll
            for (int i = 0; i < kPerLane; ++i) {
                const int at = t * kPerLane + i;
                counts[i] = at < order.entries ? entries[at].first : 0;
                sum += counts[i];
            }
            int before = 0;  // of the lanes below
            for (int lane = 0; lane < 31; ++lane) {
                const int x = __shfl_sync(0xffffffffu, sum, lane);
                before += lane < t ? x : 0;
            }
#pragma unroll
            for (int i = 0; i < kPerLane; ++i) {
                const int at = t * kPerLane + i;
                // kByRow: what the entries before have above this one's last row block.
                const int first = mode == kByRow ? (before - at * counts[i]) * heads
                                  : mode == kMirrored ? before * (heads / 2)
                                                      : before * heads;
                if (at <= order.entries) {
                    entries[at].first = first;
                }
                before += counts[i];
            }
            if (t == 31 && order.entries == kPackedEntries) {
                entries[kPackedEntries].first = mode == kMirrored ? before * (heads / 2) : before * heads;
            }
        }
    }

    // The last entry that begins at the unit or before.
    __device__ __forceinline__ int find(const PackedOrder& order, int unit) const {
        int at = 0;
#pragma unroll
        for (int step = kPackedEntries / 2; step > 0; step /= 2) {
            const int next = at + step;
            at = next < order.entries && entries[next].first <= unit ? next : at;
        }
        return at;
    }

    __device__ __forceinline__ PackedPlace place(const PackedOrder& order, const FwdParams& params, Mode mode, int unit,
                                                 bool back) const {
        const int heads = static_cast<int>(order.heads.divisor);
        const int at = find(order, unit);
        const Entry entry = entries[at];
        int within = unit - entry.first;
        if (mode == kByRow) {
            const int active = (at + 1) * heads;
            const int row = within / active;
            within -= row * active;
            const int rank = order.heads.quotient(within);
            const int m = row_blocks(order, params, entry.index) - 1 - row;
            return {m * heads + within - rank * heads, entries[rank].index};
        }
        int batch = entry.index * order.group;
        int num_m = row_blocks(order, params, batch);
        const int units_of_heads = mode == kMirrored ? heads / 2 : heads;
        for (int i = 1; i < order.group && within >= num_m * units_of_heads; ++i) {
            within -= num_m * units_of_heads;
            num_m = row_blocks(order, params, ++batch);
        }
        const int section_heads = mode == kMirrored ? 2 : static_cast<int>(order.heads_per_kv.divisor);
        const int section_units = mode == kMirrored ? num_m : num_m * section_heads;
        const int section = within / section_units;
        within -= section * section_units;
        within = back ? 2 * num_m - 1 - within : within;
        const int row = mode == kMirrored ? within / 2 : order.heads_per_kv.quotient(within);
        const int head = section * section_heads + within - row * section_heads;
        return {(num_m - 1 - row) * heads + head, batch};
    }

    // The block's place number `turn`.
    __device__ __forceinline__ PackedPlace next(const PackedOrder& order, const FwdParams& params, int turn) const {
        const Entry end = entries[order.entries];
        const Mode mode = static_cast<Mode>(end.index);
        const int grid = static_cast<int>(gridDim.x);
        const int cta = static_cast<int>(blockIdx.x);
        const int round = mode == kMirrored ? turn / 2 : turn;
        const int unit = round * grid + (round % 2 != 0 ? grid - 1 - cta : cta);
        if (unit >= end.first) {
            return {-1, 0};
        }
        return place(order, params, mode, unit, mode == kMirrored && turn % 2 != 0);
    }
};

}  // namespace flare::attention
