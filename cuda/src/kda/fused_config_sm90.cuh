// Sizes, shared-memory map and work order of the fused KDA forward (fused_sm90.cuh).
#pragma once

#include "kda/slots.cuh"
#include "pipe/ring.cuh"
#include "ptx/ldst.cuh"

#include <cuda.h>

namespace flare::kda::fused {

struct Args {
    KdaParams p;
    CUtensorMap q, k, v, g;  // boxes of 64 channels by 32 tokens
};

inline constexpr int kThreads = 512;  // four warpgroups: consumers first, prepare teams last
inline constexpr uint32_t kConsumerRegs = 168;
inline constexpr uint32_t kTeamRegs = 88;
static_assert(2 * kConsumerRegs + 2 * kTeamRegs <= 4 * (65536 / kThreads),
              "setmaxnreg would wait for ever: the pool is what the block was launched with");

// An input stage: two column halves of [96 rows][128 bytes], swizzled: k, q, raw gates of 32 tokens. The operands of the
// products take their places: k exp2(G - a), q exp2(G - a), k exp2(a - G).
inline constexpr uint32_t kInputHalf = 96 * 128;
inline constexpr uint32_t kInputQ = 4096;
inline constexpr uint32_t kInputG = 8192;
inline constexpr uint32_t kInputBytes = 2 * kInputHalf;

// An operand block, of normalised keys and queries (the latter times scale). rho_i in [1, 2) is what a power of two leaves of
// the norm of key i: Kr holds keys that were scaled by a power of two only, so that with decays near 1 they keep their bits.
// What it loses in rounding would add up over a long memory, and no later token corrects it. [32][128] tiles as two swizzled
// halves of 128-byte rows, [32][32] tiles as swizzled 64-byte rows.
inline constexpr uint32_t kBlockW = 0;          // -rho X diag(beta) Kd
inline constexpr uint32_t kBlockQd = 8192;      // q exp(G)
inline constexpr uint32_t kBlockKr = 16384;     // k exp(G_C - G) / rho, fp16
inline constexpr uint32_t kBlockX = 24576;      // rho X diag(beta), two 16-bit terms, the second 2048 bytes behind the first
inline constexpr uint32_t kBlockA = 28672;      // q k^T with decay / rho, lower triangle with diagonal, fp16
inline constexpr uint32_t kBlockDecay = 30720;  // exp(G_C), fp32 [128]
inline constexpr uint32_t kOperandBytes = 31232;
inline constexpr uint32_t kBlockV = 31744;  // values; then, warp by warp, the output
inline constexpr uint32_t kBlockBytes = 39936;
inline constexpr uint32_t kHalfTileBytes = 4096;
static_assert(kBlockBytes % 1024 == 0 && kInputBytes % 1024 == 0, "tiles are swizzle-aligned");
// Before w, in its place: the second term of k exp2(a - G), where keys repeat; then fp32 [column][row], beta_i L_ij and the
// inverse. Before X: sums of log2 gates, [warp][channel]. Behind them, up to the end of A: the first half's k exp2(a - G) for
// the second half's anchor, two swizzled halves of [16][128 bytes].
inline constexpr uint32_t kBlockKeysLow = kBlockW;
inline constexpr uint32_t kBlockMatrix = kBlockW;
inline constexpr uint32_t kBlockTotals = kBlockX;
inline constexpr uint32_t kBlockCopy = kBlockX + 2048;
static_assert(kBlockCopy % 1024 == 0 && kBlockCopy + 4096 <= kBlockDecay);
inline constexpr int kMatrixPitch = 36;

// Scratch of a team, fp32.
inline constexpr uint32_t kScratchRepeats = 0;      // rows of each warp whose key repeats an earlier one: bit 4 i, [4]
inline constexpr uint32_t kScratchSecond = 16;      // the second half's anchor as lifted powers of two, bf16 [128]
inline constexpr uint32_t kScratchBetaNext = 272;   // of the next chunk, before its activation, [32]
inline constexpr uint32_t kScratchNorms = 512;      // 1 / |k_i|, scale / |q_i|, 1 / rho_i, rho_i, [32][4]
inline constexpr uint32_t kScratchBeta = 1024;      // [32]
inline constexpr uint32_t kScratchDiagonal = 1152;  // q_i k_i / rho_i, [32]
inline constexpr uint32_t kScratchBias = 1280;      // of the gate, times its factor, [128]
inline constexpr uint32_t kScratchGate = 1792;      // its factors and limit, [4]
inline constexpr uint32_t kScratchWalk = 1808;      // each warp's walk while its registers are short, [4][8]
inline constexpr uint32_t kScratchBytes = 1936;

// Shared memory of a block with prepare teams: [team][stage] inputs, [block] operand blocks, scratch, barriers.
template <int kTeams_, int kInputStages_, int kBlocks_, uint32_t kBlockBytes_>
struct Map {
    static constexpr int kTeams = kTeams_;
    static constexpr int kInputStages = kInputStages_;
    static constexpr int kBlocks = kBlocks_;
    static constexpr uint32_t kBlockBytes = kBlockBytes_;
    static constexpr uint32_t kOffsetBlock = kTeams * kInputStages * kInputBytes;
    static constexpr uint32_t kOffsetScratch = kOffsetBlock + kBlocks * kBlockBytes;
    static constexpr uint32_t kOffsetBlockFull = kOffsetScratch + kTeams * kScratchBytes;
    static constexpr uint32_t kOffsetBlockEmpty = kOffsetBlockFull + 8 * kBlocks;
    static constexpr uint32_t kOffsetInputFull = kOffsetBlockEmpty + 8 * kBlocks;
    static constexpr uint32_t kEnd = kOffsetInputFull + 8 * kTeams * kInputStages;
    static_assert(kBlocks >= kTeams, "every team holds a block");
};
using FusedMap = Map<2, 2, 3, kBlockBytes>;

inline constexpr uint32_t max_of(uint32_t a, uint32_t b) {
    return a > b ? a : b;
}
// Of the fused kernel, behind its map: which units a block takes (Schedule).
inline constexpr int kMaxSorted = 256;  // sequences
inline constexpr uint32_t kRounds = 16;
inline constexpr uint32_t kOffsetRounds = FusedMap::kEnd;                // {round + 1, place}, [kRounds]
inline constexpr uint32_t kOffsetLongest = kOffsetRounds + 8 * kRounds;  // sequences, longest first, [kMaxSorted]
inline constexpr uint32_t kOffsetLengths = kOffsetLongest + 4 * kMaxSorted;
inline constexpr uint32_t kOffsetBusy = kOffsetLengths + 4 * kMaxSorted;
inline constexpr uint32_t kOffsetDealt = kOffsetBusy + 4;  // rounds that have been dealt
inline constexpr uint32_t kFusedSharedBytes = kOffsetDealt + 4 + 1024;  // + alignment of the base
static_assert(kFusedSharedBytes <= 232448, "227 KB of shared memory per block");

// A (sequence, value head).
struct Unit {
    int32_t n;
    int32_t head;
    int32_t tokens;
    int32_t row;  // of the first token, in the batch of the sequence

    __device__ __forceinline__ void locate(const KdaParams& p, uint32_t index) {
        const uint32_t heads = static_cast<uint32_t>(p.heads_v);
        const uint32_t sequence = index / heads;
        place(p, static_cast<int32_t>(sequence), static_cast<int32_t>(index - sequence * heads));
    }
    __device__ __forceinline__ void place(const KdaParams& p, int32_t sequence, int32_t value_head) {
        n = sequence;
        head = value_head;
        if (p.cu_seqlens == nullptr) {
            row = 0;
            tokens = static_cast<int32_t>(p.seqlen);
        } else {
            row = static_cast<int32_t>(load_index(p.cu_seqlens, n, p.index64));
            tokens = static_cast<int32_t>(load_index(p.cu_seqlens, n + 1, p.index64)) - row;
        }
    }
    __device__ __forceinline__ int32_t batch(const KdaParams& p) const { return p.cu_seqlens == nullptr ? n : 0; }
};

__device__ __forceinline__ uint32_t num_units(const KdaParams& p) {
    return static_cast<uint32_t>(p.num_sequences * p.heads_v);
}

// Which units a block of the fused kernel takes, round by round. With sequences of different lengths the longest first, each
// by the block that is free: a counter in device memory deals them out. Else, or with more sequences than a block sorts at
// its start, the units blockIdx.x, blockIdx.x + gridDim.x, ...
struct Schedule {
    uint32_t* counter;  // null: fixed rounds
    uint32_t smem;      // of the block

    // By all threads of the block at its start.
    __device__ __forceinline__ void open(const KdaParams& p) const {
        if (counter == nullptr) {
            return;
        }
        const int count = static_cast<int>(p.num_sequences);
        const int i = static_cast<int>(threadIdx.x);
        int32_t length = 0;
        if (i < count) {
            length =
                static_cast<int32_t>(load_index(p.cu_seqlens, i + 1, p.index64) - load_index(p.cu_seqlens, i, p.index64));
            ptx::st_shared_b32(smem + kOffsetLengths + 4 * i, static_cast<uint32_t>(length));
        }
        if (i < static_cast<int>(kRounds)) {
            put(static_cast<uint32_t>(i), i == 0 ? 1 : 0, blockIdx.x);
        }
        const int busy = __syncthreads_count(length > 0);
        if (i < count) {
            uint32_t rank = 0;
            for (int j = 0; j < count; ++j) {
                const int32_t other = static_cast<int32_t>(ptx::ld_shared_b32(smem + kOffsetLengths + 4 * j));
                rank += other > length || (other == length && j < i) ? 1 : 0;
            }
            ptx::st_shared_b32(smem + kOffsetLongest + 4 * rank, static_cast<uint32_t>(i));
        }
        if (i == 0) {
            ptx::st_shared_b32(smem + kOffsetBusy, static_cast<uint32_t>(busy * p.heads_v));
            ptx::st_shared_b32(smem + kOffsetDealt, 1);
        }
        __syncthreads();
    }
    // Units to take in rounds: with the counter those that have tokens, which come first in its order.
    __device__ __forceinline__ uint32_t busy(const KdaParams& p) const {
        return counter == nullptr ? num_units(p) : ptx::ld_shared_b32(smem + kOffsetBusy);
    }
    __device__ __forceinline__ uint32_t take(uint32_t round) const {
        if (counter == nullptr) {
            return blockIdx.x + round * gridDim.x;
        }
        // The first who asks deals. The ring of operand blocks keeps all roles within eight chunks, so within eight units, of
        // each other: all have left a round when its slot is taken again.
        if (threadIdx.x % 32 == 0) {
            uint32_t dealt;
            asm volatile("atom.shared.cas.b32 %0, [%1], %2, %3;"
                         : "=r"(dealt)
                         : "r"(smem + kOffsetDealt), "r"(round), "r"(round + 1)
                         : "memory");
            if (dealt == round) {
                put(round % kRounds, round + 1, gridDim.x + atomicAdd(counter, 1u));
            }
        }
        __syncwarp();
        uint32_t tag, place;
        do {
            asm volatile("ld.volatile.shared.v2.b32 {%0, %1}, [%2];"
                         : "=r"(tag), "=r"(place)
                         : "r"(smem + kOffsetRounds + 8 * (round % kRounds))
                         : "memory");
        } while (tag != round + 1);
        return place;
    }
    __device__ __forceinline__ void locate(Unit& unit, const KdaParams& p, uint32_t place) const {
        if (counter == nullptr) {
            unit.locate(p, place);
            return;
        }
        const uint32_t heads = static_cast<uint32_t>(p.heads_v);
        const uint32_t rank = place / heads;
        unit.place(p, static_cast<int32_t>(ptx::ld_shared_b32(smem + kOffsetLongest + 4 * rank)),
                   static_cast<int32_t>(place - rank * heads));
    }

private:
    __device__ __forceinline__ void put(uint32_t slot, uint32_t tag, uint32_t place) const {
        asm volatile("st.volatile.shared.v2.b32 [%0], {%1, %2};" ::"r"(smem + kOffsetRounds + 8 * slot), "r"(tag),
                     "r"(place)
                     : "memory");
    }
};

// The chunks of a block's units in order. Both teams walk all of them.
struct UnitWalk {
    Unit unit;
    int32_t done;  // tokens of the unit before the chunk
    uint32_t round;
    uint32_t more;

    __device__ __forceinline__ UnitWalk(const KdaParams& p, const Schedule& schedule) : done(0), round(0) {
        settle(p, schedule);
    }
    __device__ __forceinline__ bool valid(const KdaParams&, const Schedule&) const { return more != 0; }
    __device__ __forceinline__ void advance(const KdaParams& p, const Schedule& schedule) {
        done += kChunk;
        if (done >= unit.tokens) {
            done = 0;
            ++round;
            settle(p, schedule);
        }
    }

private:
    // Goes to the first unit from here on that has tokens.
    __device__ __forceinline__ void settle(const KdaParams& p, const Schedule& schedule) {
        const uint32_t busy = schedule.busy(p);
        for (;; ++round) {
            const uint32_t place = schedule.take(round);
            more = place < busy ? 1 : 0;
            if (more == 0) {
                return;
            }
            schedule.locate(unit, p, place);
            if (unit.tokens > 0) {
                return;
            }
        }
    }
};

// Index of a chunk's operand block in the workspace: by head, then by time, so that a recurrence reads on and on.
__device__ __forceinline__ int64_t block_index(const KdaParams& p, const Unit& unit, int32_t done) {
    const int64_t slot = p.cu_seqlens == nullptr ? unit.n * chunks_of(p.seqlen) : unit.row / kChunk + unit.n;
    return unit.head * num_slots(p) + slot + done / kChunk;
}

}  // namespace flare::kda::fused
