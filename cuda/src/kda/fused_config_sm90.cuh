// Sizes, shared-memory map and work order of the fused KDA forward (fused_sm90.cuh).
#pragma once

#include "kda/chunk.cuh"
#include "pipe/ring.cuh"

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
// Once the products are done, in the places of q and g of the first half, fp32 [column][row]: beta_i L_ij, then the inverse.
inline constexpr int kMatrixPitch = 36;
inline constexpr uint32_t kInputMatrix = kInputQ;

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
inline constexpr uint32_t kBlockTotals = kBlockW;  // before w: sums of log2 gates, [warp][channel]

// Scratch of a team, fp32.
inline constexpr uint32_t kScratchAnchor = 0;      // exp2(a), [128]
inline constexpr uint32_t kScratchNorms = 512;      // 1 / |k_i|, scale / |q_i|, 1 / rho_i, rho_i, [32][4]
inline constexpr uint32_t kScratchBeta = 1024;      // [32]
inline constexpr uint32_t kScratchDiagonal = 1152;  // q_i k_i / rho_i, [32]
inline constexpr uint32_t kScratchBias = 1280;      // of the gate, times its factor, [128]
inline constexpr uint32_t kScratchGate = 1792;      // its factor and bound, [2]
inline constexpr uint32_t kScratchWalk = 1808;      // each warp's walk while its registers are short, [4][8]
inline constexpr uint32_t kScratchBytes = 1936;

// Shared memory of a block with prepare teams: [team][stage] inputs, [block] operand blocks, scratch, barriers.
template <int kTeams_, int kInputStages_, int kBlocks_, uint32_t kBlockBytes_>
struct Map {
    static constexpr int kTeams = kTeams_;
    static constexpr int kInputStages = kInputStages_;
    static constexpr int kBlocks = kBlocks_;
    static constexpr uint32_t kBlockBytes = kBlockBytes_;
    static constexpr bool kValues = kBlockBytes_ > kBlockV;
    static constexpr uint32_t kOffsetBlock = kTeams * kInputStages * kInputBytes;
    static constexpr uint32_t kOffsetScratch = kOffsetBlock + kBlocks * kBlockBytes;
    static constexpr uint32_t kOffsetBlockFull = kOffsetScratch + kTeams * kScratchBytes;
    static constexpr uint32_t kOffsetBlockEmpty = kOffsetBlockFull + 8 * kBlocks;
    static constexpr uint32_t kOffsetInputFull = kOffsetBlockEmpty + 8 * kBlocks;
    static constexpr uint32_t kEnd = kOffsetInputFull + 8 * kTeams * kInputStages;
    static_assert(kBlocks >= kTeams, "every team holds a block");
};
using FusedMap = Map<2, 2, 3, kBlockBytes>;

// Split over blocks: prepare blocks have three teams and no values, recurrence blocks a ring of operand blocks.
using PrepareMap = Map<3, 1, 4, kBlockV>;
inline constexpr int kSplitStages = 5;
inline constexpr uint32_t kSplitOffsetBarriers = kSplitStages * kBlockBytes;
inline constexpr uint32_t kSplitEnd = kSplitOffsetBarriers + 16 * kSplitStages;

inline constexpr uint32_t max_of(uint32_t a, uint32_t b) {
    return a > b ? a : b;
}
inline constexpr uint32_t kFusedSharedBytes = FusedMap::kEnd + 1024;  // + alignment of the base
inline constexpr uint32_t kSplitSharedBytes = max_of(PrepareMap::kEnd, kSplitEnd) + 1024;
static_assert(kFusedSharedBytes <= 232448 && kSplitSharedBytes <= 232448, "227 KB of shared memory per block");

// A (sequence, value head).
struct Unit {
    int32_t n;
    int32_t head;
    int32_t tokens;
    int32_t row;  // of the first token, in the batch of the sequence

    __device__ __forceinline__ void locate(const KdaParams& p, uint32_t index) {
        const uint32_t heads = static_cast<uint32_t>(p.heads_v);
        n = static_cast<int32_t>(index / heads);
        head = static_cast<int32_t>(index - n * heads);
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

// The chunks of the units blockIdx.x, blockIdx.x + gridDim.x, ... in order. Every role of a block walks all of them.
struct UnitWalk {
    Unit unit;
    int32_t done;  // tokens of the unit before the chunk
    uint32_t index;

    __device__ __forceinline__ explicit UnitWalk(const KdaParams& p) : done(0), index(blockIdx.x) { settle(p); }
    __device__ __forceinline__ bool valid(const KdaParams& p) const { return index < num_units(p); }
    __device__ __forceinline__ void advance(const KdaParams& p) {
        done += kChunk;
        if (done >= unit.tokens) {
            done = 0;
            index += gridDim.x;
            settle(p);
        }
    }

private:
    // Goes to the first unit from here on that has tokens.
    __device__ __forceinline__ void settle(const KdaParams& p) {
        for (; index < num_units(p); index += gridDim.x) {
            unit.locate(p, index);
            if (unit.tokens > 0) {
                return;
            }
        }
    }
};

// Every gridDim-th chunk of all units, the first chunks of all units first: what the recurrences wait for next.
struct TimeWalk {
    Unit unit;
    int32_t done;
    uint32_t index;  // chunk * units + unit
    uint32_t step;   // prepare blocks

    __device__ __forceinline__ TimeWalk(const KdaParams& p, uint32_t prepare_blocks)
        : done(0), index(blockIdx.x), step(prepare_blocks) {
        settle(p);
    }
    __device__ __forceinline__ bool valid(const KdaParams& p) const { return index < end(p); }
    __device__ __forceinline__ void advance(const KdaParams& p) {
        index += step;
        settle(p);
    }

private:
    static __device__ __forceinline__ uint32_t end(const KdaParams& p) {
        return num_units(p) * static_cast<uint32_t>((p.seqlen + kChunk - 1) / kChunk);
    }
    __device__ __forceinline__ void settle(const KdaParams& p) {
        for (; index < end(p); index += step) {
            const uint32_t chunk = index / num_units(p);
            unit.locate(p, index - chunk * num_units(p));
            done = static_cast<int32_t>(chunk * kChunk);
            if (done < unit.tokens) {
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
