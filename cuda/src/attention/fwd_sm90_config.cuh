// What the roles of the Hopper attention forward kernel share: arguments, compile-time configuration, tile geometry, the
// shared-memory map. The kernel is in fwd_sm90.cuh.
#pragma once

#include <cuda.h>
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>

#include <cstdint>
#include <type_traits>

#include "../pipe/scheduler.cuh"
#include "../ptx/ldst.cuh"
#include "../ptx/mbarrier.cuh"
#include "../ptx/sync.cuh"
#include "../tile/smem_layout.cuh"
#include "mask.cuh"
#include "packed_order_sm90.cuh"
#include "params.h"

namespace flare::attention {

// fp8: warps 1..3 of the producer warpgroup transpose V.
inline constexpr uint32_t kTransposeWarps = 3;

// Of the tiles' records, see Sm90Record.
inline constexpr uint32_t kRecordBytes = 4 * 48;

enum class Sm90Schedule { kOverlap, kPingPong };

struct Sm90Args {
    CUtensorMap map_q;  // {span, Sq, D / span, Hq, B}, box {span, kQRows, D / span, 1, 1}; with heads joined {span, Hq, Sq,
                        // D / span, B}, box {span, heads, kQRows / heads, D / span, 1}
    CUtensorMap map_k;  // {span, Sk, D / span, Hk, B}, box {span, kBlockN, D / span / cluster, 1, 1}
    CUtensorMap map_v;  // as map_k with Dv
    pipe::TileSchedule schedule;  // of dense batches
    PackedOrder packed;           // with lengths on the device
    FwdParams params;      // window bounds already clamped to [0, kUnbounded]
    pipe::FastDivisor heads_per_kv;  // heads of tiles that share a key head
    float unit;            // natural score per unit of the transformed score: scale, or softcap
    float scale_log2;      // unit * log2(e)
    float softcap_in;      // scale / softcap
    float slack;           // by which scores may exceed the running maximum before it follows, in units of scores
};

// One instance of the kernel. kExtended adds softcap and ALiBi; kDeviceLengths adds cu_seqlens and seqused, and joined heads.
template <typename T_, int kHeadDim_, int kHeadDimV_, int kConsumers_, int kBlockN_, int kStages_, Sm90Schedule kSchedule_,
          int kBlocksPerSm_, int kCluster_, bool kExtended_, bool kDeviceLengths_>
struct Sm90Config {
    using T = T_;
    static constexpr int kHeadDim = kHeadDim_;
    static constexpr int kHeadDimV = kHeadDimV_;
    static constexpr int kConsumers = kConsumers_;
    static constexpr int kBlockM = 64 * kConsumers;
    static constexpr int kBlockN = kBlockN_;
    static constexpr int kStages = kStages_;
    static constexpr Sm90Schedule kSchedule = kSchedule_;
    static constexpr int kBlocksPerSm = kBlocksPerSm_;
    // Blocks that take neighbouring tiles of one head together and each load a part of every key block for all of them.
    static constexpr int kCluster = kCluster_;
    static constexpr bool kExtended = kExtended_;
    static constexpr bool kDeviceLengths = kDeviceLengths_;
    static constexpr bool kFp8 = std::is_same_v<T, __nv_fp8_e4m3>;
    static constexpr int kElement = sizeof(T);
    using Out = std::conditional_t<kFp8, __nv_bfloat16, T>;

    static constexpr tile::Swizzle kSwizzle =
        kHeadDim % 64 == 0 && kHeadDimV % 64 == 0 ? tile::Swizzle::k128 : tile::Swizzle::k64;
    static constexpr int kSpan = static_cast<int>(tile::span_bytes(kSwizzle)) / kElement;  // elements of a chunk row

    // Warpgroups pass over key blocks that only others' rows see. Of two of them hardly any block is such.
    static constexpr bool kPassesBlocks = kConsumers * kCluster > 2;
    // Two warpgroups leave the tensor cores idle unless each one's exponentials run under its own product, too: half of them, so
    // that the weights are packed beside the others. Some run ahead of the maxima, see raise_and_weigh.
    static constexpr bool kSoftmaxUnderOutput = kConsumers * kBlocksPerSm < 3;
    static constexpr int kScoresUnderOutput = kSoftmaxUnderOutput ? kBlockN / 4 / 4 * 4 : kBlockN / 2;
    static constexpr int kScoresAhead = kSoftmaxUnderOutput ? kBlockN / 8 / 4 * 4 : !kFp8 && kHeadDim == 128 ? 4 : 0;
    // Of OnlineSoftmax: maxima are raised, and the output rescaled, seldom. e4m3 ends at 448 = 2^8.8, and begins at 2^-9.
    static constexpr int kSlackQuarters = kFp8 ? 15 : 32;
    static constexpr int kWeightOffset = kFp8 ? 5 : 0;

    // One block an SM: a producer warpgroup, whose registers go to the consumers. More: as few producer warps as do.
    static constexpr int kProducerWarps = kBlocksPerSm == 1 ? 4 : kFp8 ? 1 + kTransposeWarps : kDeviceLengths ? 2 : 1;
    static constexpr int kThreads = 128 * kConsumers + 32 * kProducerWarps;
    static constexpr int kEntryRegs = kConsumers == 1 ? 255 : kConsumers == 2 ? 168 : kConsumers == 3 ? 128 : 96;
    static constexpr int kProducerRegs =
        kConsumers == 1 ? 56 : kConsumers == 2 ? (kFp8 || kCluster > 1 ? 40 : 24) : kConsumers == 3 ? 32 : 24;
    static constexpr int kConsumerRegs =
        kConsumers == 1 ? 256 : kConsumers == 2 ? (kFp8 || kCluster > 1 ? 232 : 240) : kConsumers == 3 ? 160 : 112;

    static constexpr uint32_t kBytesQ = kBlockM * kHeadDim * kElement;
    static constexpr uint32_t kBytesK = kBlockN * kHeadDim * kElement;
    static constexpr uint32_t kBytesV = kBlockN * kHeadDimV * kElement;
    // fp8: V transposed, chunks of 128 keys.
    static constexpr uint32_t kBytesVt = kFp8 ? (kBlockN + 127) / 128 * kHeadDimV * 128 : 0;
    // Tile order of packed batches.
    static constexpr uint32_t kBytesOrder = kDeviceLengths ? PackedTable<kBlockM>::kBytes : 0;
    static constexpr int kSmemLimit = 233472 / kBlocksPerSm - 1024;
    // Two query tiles where they fit: the next one then loads under the current one.
    static constexpr int kQStages = 2 * kBytesQ + kStages * (kBytesK + kBytesV + kBytesVt) + 1024 + kBytesOrder <= kSmemLimit ? 2 : 1;
    // With one query tile each warpgroup's rows are a tile of their own, loaded again as soon as that warpgroup is done.
    static constexpr int kQParts = kQStages == 1 ? kConsumers : 1;
    static constexpr int kQRows = kBlockM / kQParts;
    static constexpr uint32_t kBytesQPart = kBytesQ / kQParts;
    static constexpr uint32_t kQBarriers = kQStages * kQParts;
    static constexpr uint32_t kOffsetK = kQStages * kBytesQ;
    static constexpr uint32_t kOffsetV = kOffsetK + kStages * kBytesK;
    static constexpr uint32_t kOffsetVt = kOffsetV + kStages * kBytesV;
    static constexpr uint32_t kOffsetBarriers = kOffsetVt + kStages * kBytesVt;
    static constexpr uint32_t kOffsetRecords = (kOffsetBarriers + 8 * (2 * kQBarriers + 6 * kStages) + 15) / 16 * 16;
    static constexpr uint32_t kOffsetOrder = kOffsetRecords + kRecordBytes;
    static constexpr uint32_t kSmemBytes = kOffsetOrder + kBytesOrder;

    // A block of a cluster loads whole chunks of K and V.
    static constexpr int kChunksK = kHeadDim / kSpan / kCluster;
    static constexpr int kChunksV = kHeadDimV / kSpan / kCluster;
    static_assert(kHeadDim % (kSpan * kCluster) == 0 && kHeadDimV % (kSpan * kCluster) == 0, "whole chunks");
    static_assert(kCluster == 1 || (!kFp8 && kBlocksPerSm == 1), "clusters: 16 bits, one block an SM");

    static_assert(kConsumers >= 1 && kConsumers <= 4, "one to four consumer warpgroups");
    static_assert(kBlocksPerSm > 1 || kProducerRegs + kConsumers * kConsumerRegs <= (1 + kConsumers) * (kEntryRegs + 1),
                  "setmaxnreg would wait for ever: the pool is what the block was launched with");
    static_assert(kHeadDim % kSpan == 0 && kHeadDimV % kSpan == 0 && kHeadDimV % 32 == 0, "whole chunks");
    static_assert(kBlockN % 16 == 0 && kBlockN <= 256 && kBlockM <= 256, "k-steps of 16, TMA boxes of at most 256 rows");
    static_assert(!kFp8 || (kHeadDim % 128 == 0 && kHeadDimV == 128 && kBlockN % 32 == 0), "k-steps, transposition units");
    static_assert(kSmemBytes <= kSmemLimit, "shared memory of one block");
    static_assert(!kDeviceLengths || (kCluster == 1 && kThreads >= kPackedEntries), "order of packed batches");
};

// Of PackedOrder. Plain kernels join no heads: shifts at every tile's ends cost them 1 % where tiles are short.
template <class Cfg>
__device__ __forceinline__ int head_bits(const Sm90Args& args) {
    return Cfg::kDeviceLengths ? args.packed.head_bits : 0;
}

// A tile as the cursor numbers it: by TileSchedule, or with lengths on the device by PackedTable. tile < 0: none is left.
using Sm90Place = PackedPlace;

// What every role derives from a place.
struct Sm90Tile {
    int m0;    // first row: its token times the heads joined
    int head;  // query head, or with heads joined key head
    int batch;
    int seqlen_q;
    int seqlen_k;
    int q_batch;  // batch coordinate of q and o, and of k and v: 0 when packed
    int k_batch;
    int q_row;      // first row of the sequence in the maps
    int k_row;
    KeyRange keys;

    template <class Cfg>
    static __device__ __forceinline__ Sm90Tile make(const Sm90Args& args, Sm90Place place) {
        const FwdParams& params = args.params;
        Sm90Tile tile;
        int m;
        if constexpr (Cfg::kDeviceLengths) {
            m = args.packed.heads.quotient(place.tile);
            tile.head = place.tile - m * static_cast<int>(args.packed.heads.divisor);
            tile.batch = place.batch;
            const SequenceLengths lengths = SequenceLengths::load(params, place.batch);
            tile.q_batch = params.cu_seqlens_q != nullptr ? 0 : place.batch;
            tile.k_batch = params.cu_seqlens_k != nullptr ? 0 : place.batch;
            tile.q_row = lengths.q_row;
            tile.k_row = lengths.k_row;
            tile.seqlen_q = lengths.seqlen_q;
            tile.seqlen_k = lengths.seqlen_k;
        } else {
            const pipe::TileCoord coord = args.schedule.coord(place.tile);
            m = coord.m;
            tile.head = coord.head;
            tile.batch = coord.batch;
            tile.q_batch = coord.batch;
            tile.k_batch = coord.batch;
            tile.q_row = 0;
            tile.k_row = 0;
            tile.seqlen_q = params.seqlen_q;
            tile.seqlen_k = params.seqlen_k;
        }
        const int group_m0 = m * (Cfg::kBlockM * Cfg::kCluster);  // of all tiles of the cluster: they share their keys
        tile.m0 = group_m0 + (Cfg::kCluster > 1 ? static_cast<int>(ptx::cluster_cta_rank()) * Cfg::kBlockM : 0);
        const int first = group_m0 >> head_bits<Cfg>(args);
        const int end = min((group_m0 + Cfg::kBlockM * Cfg::kCluster) >> head_bits<Cfg>(args), tile.seqlen_q);
        tile.keys = KeyRange::make<Cfg::kBlockN>(first, end, tile.seqlen_q, tile.seqlen_k, params.window_left,
                                                 params.window_right);
        return tile;
    }
};

// What consumers have to know of a tile, written for them by the producer, since the divisions and 64-bit products behind it
// take a warpgroup long at a tile's boundary, where nothing runs beside them. Rows and keys are counted from the tile's first key.
struct Sm90Record {
    int first_token;  // of the tile, on the key axis
    int seqlen_k;
    int num_blocks;  // 0: there is no further tile
    int tokens;      // of the sequence, from the tile's first
    int head;
    int batch;
    int64_t out;  // elements of o and of lse in front of the tile's first row
    int64_t lse;

    static constexpr uint32_t kBytes = 48;
    static constexpr uint32_t kCount = kRecordBytes / kBytes;  // the fourth tile after this one is begun when all are past this one

    static __device__ __forceinline__ Sm90Record make(const Sm90Tile& tile, const FwdParams& params, int head_bits) {
        const int token = tile.m0 >> head_bits;
        const int64_t row = int64_t{tile.q_row} + token;
        const int64_t head = tile.head << head_bits;
        return {token + tile.seqlen_k - tile.seqlen_q - tile.keys.first_key,
                tile.seqlen_k - tile.keys.first_key,
                tile.keys.num_blocks,
                tile.seqlen_q - token,
                tile.head,
                tile.batch,
                tile.q_batch * params.o_stride.batch + head * params.o_stride.head + row * params.o_stride.row,
                tile.q_batch * params.lse_stride.batch + head * params.lse_stride.head + row * params.lse_stride.row};
    }

    __device__ __forceinline__ void store(uint32_t to) const {
        const auto word = [](int64_t x, int half) { return static_cast<uint32_t>(static_cast<uint64_t>(x) >> (32 * half)); };
        ptx::st_shared_v4(to, {static_cast<uint32_t>(first_token), static_cast<uint32_t>(seqlen_k),
                               static_cast<uint32_t>(num_blocks), static_cast<uint32_t>(tokens)});
        ptx::st_shared_v4(to + 16, {word(out, 0), word(out, 1), word(lse, 0), word(lse, 1)});
        ptx::st_shared_v4(to + 32, {static_cast<uint32_t>(head), static_cast<uint32_t>(batch), 0, 0});
    }

    // Parts that aren't needed cost nothing only if they are loaded apart.
    __device__ __forceinline__ void load_keys(uint32_t from) {
        uint32_t x[4];
        ptx::ld_shared_v4(x, from);
        first_token = static_cast<int>(x[0]);
        seqlen_k = static_cast<int>(x[1]);
        num_blocks = static_cast<int>(x[2]);
        tokens = static_cast<int>(x[3]);
    }

    __device__ __forceinline__ void load_outputs(uint32_t from) {
        uint32_t x[4];
        ptx::ld_shared_v4(x, from + 16);
        out = static_cast<int64_t>(uint64_t{x[1]} << 32 | x[0]);
        lse = static_cast<int64_t>(uint64_t{x[3]} << 32 | x[2]);
    }

    __device__ __forceinline__ void load_head(uint32_t from) {
        head = static_cast<int>(ptx::ld_shared_b32(from + 32));
        batch = static_cast<int>(ptx::ld_shared_b32(from + 36));
    }
};

template <class Cfg>
struct Sm90Smem {
    uint32_t base;

    __device__ __forceinline__ uint32_t q(uint32_t stage, uint32_t part) const {
        return base + stage * Cfg::kBytesQ + part * Cfg::kBytesQPart;
    }
    __device__ __forceinline__ uint32_t k(uint32_t stage) const { return base + Cfg::kOffsetK + stage * Cfg::kBytesK; }
    __device__ __forceinline__ uint32_t v(uint32_t stage) const { return base + Cfg::kOffsetV + stage * Cfg::kBytesV; }
    __device__ __forceinline__ uint32_t vt(uint32_t stage) const { return base + Cfg::kOffsetVt + stage * Cfg::kBytesVt; }
    __device__ __forceinline__ uint32_t bar(uint32_t i) const { return base + Cfg::kOffsetBarriers + 8 * i; }
    __device__ __forceinline__ uint32_t q_full(uint32_t stage, uint32_t part) const { return bar(stage * Cfg::kQParts + part); }
    __device__ __forceinline__ uint32_t q_empty(uint32_t stage, uint32_t part) const {
        return bar(Cfg::kQBarriers + stage * Cfg::kQParts + part);
    }
    __device__ __forceinline__ uint32_t k_full(uint32_t stage) const { return kv_bar(0, stage); }
    __device__ __forceinline__ uint32_t k_empty(uint32_t stage) const { return kv_bar(1, stage); }
    __device__ __forceinline__ uint32_t v_full(uint32_t stage) const { return kv_bar(2, stage); }
    __device__ __forceinline__ uint32_t v_empty(uint32_t stage) const { return kv_bar(3, stage); }
    __device__ __forceinline__ uint32_t v_raw(uint32_t stage) const { return kv_bar(4, stage); }
    __device__ __forceinline__ uint32_t v_taken(uint32_t stage) const { return kv_bar(5, stage); }
    __device__ __forceinline__ uint32_t kv_bar(uint32_t kind, uint32_t stage) const {
        return bar(2 * Cfg::kQBarriers + kind * Cfg::kStages + stage);
    }

    // Of the block's tile number `i`.
    __device__ __forceinline__ uint32_t record(uint32_t i) const {
        return base + Cfg::kOffsetRecords + i % Sm90Record::kCount * Sm90Record::kBytes;
    }

    __device__ __forceinline__ PackedTable<Cfg::kBlockM> order() const {
        return PackedTable<Cfg::kBlockM>::at(base + Cfg::kOffsetOrder);
    }

    __device__ __forceinline__ void init() const {
        constexpr uint32_t kReleases = 4 * Cfg::kConsumers;
        constexpr uint32_t kShared = kReleases * Cfg::kCluster;
        for (uint32_t i = 0; i < Cfg::kQBarriers; ++i) {
            ptx::mbarrier_init(bar(i), 1);
            ptx::mbarrier_init(bar(Cfg::kQBarriers + i), kReleases / Cfg::kQParts);
        }
        for (int stage = 0; stage < Cfg::kStages; ++stage) {
            ptx::mbarrier_init(k_full(stage), 1);
            ptx::mbarrier_init(k_empty(stage), kShared);
            ptx::mbarrier_init(v_full(stage), Cfg::kFp8 ? kTransposeWarps : Cfg::kDeviceLengths ? 2 : 1);
            ptx::mbarrier_init(v_empty(stage), kShared);
            ptx::mbarrier_init(v_raw(stage), 1);
            ptx::mbarrier_init(v_taken(stage), kTransposeWarps);
        }
        ptx::fence_mbarrier_init();
    }
};

// Goes through the tiles of this block.
template <class Cfg>
struct Sm90Cursor {
    const Sm90Args& args;
    const Sm90Smem<Cfg>& smem;
    pipe::TileCursor dense;
    int turn = 0;

    __device__ __forceinline__ Sm90Cursor(const Sm90Args& args, const Sm90Smem<Cfg>& smem) : args(args), smem(smem) {}

    __device__ __forceinline__ Sm90Place next() {
        if constexpr (Cfg::kDeviceLengths) {
            return smem.order().next(args.packed, args.params, turn++);
        } else {
            return {dense.next<Cfg::kCluster>(args.schedule), 0};
        }
    }
};

}  // namespace flare::attention
