// MLA prefill, up-projecting form, on Hopper:  K = C W_uk[h],  V = C W_uv[h],  O = softmax(scale (Q K^T + Q_r K_r^T)) V,
// K and V in shared memory only.
//
// A cluster of four blocks takes 512 query rows of one head, 128 a block, and walks the keys in blocks of 64. Each
// block of the cluster projects a quarter of [K | V], 64 of their 256 channels, and copies it to the other three through
// distributed shared memory: 512 rows share every projected key, and each block keeps its quarter of the weights, 64 KB, in
// the registers of the projecting warpgroup for the whole tile. Each block fetches all latents for itself: multicast was
// slower (docs/kernels/mla.md).
//
// Both projections are made transposed, K^T = W_uk^T C^T: the weights are the A operand (from registers), the latents
// the K-major B operand. [64 channels][64 keys] is what the projecting warpgroup stores, K read MN-major by Q K^T,
// V K-major by P V.
//
// With bf16 inputs K and q_nope are held in fp16 for Q K^T (beyond 65504: saturated): K rounded to bf16 put errors of up to
// 5e-3 on the scores of rows with few keys. V, P and the rope parts stay bf16.
//
// Roles: warpgroup 0: warp 0 loads weights and latents, warp 1 queries and rope keys; warpgroup 1 projects;
// warpgroups 2 and 3 attend, 64 rows each: issue S(n), issue P V(n - 1), wait S(n), softmax, wait P V(n - 1), rescale.
//
// Shared memory (bytes)                               Registers: loading 32, projecting 192 (weights 128, K or V 32),
//     Q      3 chunks [128][64]         49,152                   attending 144 (O 64, S 32, P 16)
//     KV     3 x 5 chunks [64][64]     122,880    K 0-63, K 64-127, V 0-63, V 64-127 as [channel][key]; rope [key][channel]
//     ring   7 chunks [64][64]          57,344    latents [key][64 of d_c], weights before the first of a tile
//     barriers
//
// Barrier       count        arrives                                                waits
//     q_full       1 + tx       warp 1                                                attending
//     q_empty      8            attending warps after their last S                    warp 1
//     ring_full    1 + tx       warp 0                                                projecting
//     ring_empty   4            projecting warps after wgmma, ldmatrix                warp 0
//     kv_full      5 + tx       warp 1 (rope), projecting warps (their own rows);     attending
//                               tx: rope and the peers' rows
//     kv_empty     8 * 4        attending warps of all blocks after P V               warp 1 and projecting
//     named 1, 2   128          an attending warpgroup: its queries are converted
//
// Buffer   written by              read by             ordering
//     Q, rope  TMA                     wgmma               mbarrier
//     Q        st.shared (bf16 inputs) wgmma               fence.proxy.async in each writer, named barrier
//     ring     TMA                     wgmma               mbarrier; back: wait_group, arrive
//     ring     TMA (weights)           ldmatrix            mbarrier; back: fence.proxy.async, arrive
//     KV       stmatrix                wgmma, bulk copies  fence.proxy.async in each writer, __syncwarp, mbarrier
//     KV       bulk copies of peers    wgmma               mbarrier; back: wait_group, arrive
#pragma once

#include <cuda_fp16.h>

#include <cstdint>
#include <type_traits>

#include "../attention/mask.cuh"
#include "../attention/softmax.cuh"
#include "../pipe/ring.cuh"
#include "../pipe/scheduler.cuh"
#include "../ptx/ldst.cuh"
#include "../ptx/mbarrier.cuh"
#include "../ptx/sync.cuh"
#include "../ptx/tma.cuh"
#include "../ptx/wgmma.cuh"
#include "../tile/smem_desc.cuh"
#include "schedule.cuh"

namespace flare::mla {

struct PrefillArgs {
    CUtensorMap map_q_nope;  // [B, H, Sq, d_nope], boxes of 128 x 64
    CUtensorMap map_q_rope;
    CUtensorMap map_latent;  // [B or pages, Sk or page size, d_c], boxes of 64 x 64
    CUtensorMap map_k_rope;
    CUtensorMap map_w_uk;  // [H, d_c, d_nope] or [H, d_nope, d_c], boxes of 64 x 64
    CUtensorMap map_w_uv;

    pipe::TileSchedule schedule;  // of clusters
    void* out;
    float* lse;
    int64_t out_stride_b, out_stride_s, out_stride_h;
    int64_t lse_stride_b, lse_stride_h;
    float scale;
    float scale_log2;
    int32_t causal;
    int32_t seqlen_q;
    int32_t seqlen_k;
    int32_t d_v;
    int32_t rope_column;  // 0, or a column out of bounds (zeros) without a rope part
    const void* cu_seqlens_q;
    const void* cu_seqlens_k;
    const void* seqused_q;
    const void* seqused_k;
    const void* block_table;  // null: keys lie by sequence
    int64_t block_table_stride_b;
    pipe::FastDivisor by_page;  // a multiple of 64 rows
    int32_t index_is_64;
};

namespace prefill {

using tile::Swizzle;

inline constexpr int kCluster = 4;
inline constexpr int kBlockRows = 128;
inline constexpr int kClusterRows = kCluster * kBlockRows;
inline constexpr int kKeys = 64;
inline constexpr int kKvStages = 3;
inline constexpr int kRingUnits = 7;
inline constexpr int kUnitChunks = 1;  // of 64 channels of d_c
inline constexpr int kUnitsPerBlock = 8 / kUnitChunks;
inline constexpr int kPublishUnit = 0;  // of a block, under whose products the block before it is published
inline constexpr int kThreads = 512;
inline constexpr uint32_t kChunkBytes = 64 * 128;
inline constexpr uint32_t kUnitBytes = kUnitChunks * kChunkBytes;
inline constexpr uint32_t kBytesQ = 3 * kBlockRows * 128;
inline constexpr uint32_t kRopeChunk = 4;
inline constexpr uint32_t kKvBytes = 5 * kChunkBytes;
inline constexpr int kValueCols = 128;

inline constexpr uint32_t kLoadRegs = 32;
inline constexpr uint32_t kProjectRegs = 192;
inline constexpr uint32_t kAttendRegs = 144;
static_assert(kLoadRegs + kProjectRegs + 2 * kAttendRegs <= 4 * (65536 / kThreads / 8 * 8),
              "more registers than the launch has");

struct SharedStorage {
    alignas(1024) uint8_t q[kBytesQ];
    alignas(1024) uint8_t kv[kKvStages][kKvBytes];
    alignas(1024) uint8_t ring[kRingUnits][kUnitBytes];
    uint64_t q_full;
    uint64_t q_empty;
    uint64_t ring_full[kRingUnits];
    uint64_t ring_empty[kRingUnits];
    uint64_t kv_full[kKvStages];
    uint64_t kv_empty[kKvStages];
};
static_assert(sizeof(SharedStorage) <= 232448, "shared memory of a Hopper block");

// What a cluster works on. Every role of every block derives the same.
struct Tile {
    int m0;  // first row of the cluster
    int head;
    int batch;
    int seqlen_q, seqlen_k;
    int q_row, k_row;      // where the sequence starts in its map
    int q_batch, k_batch;  // coordinate of the sequence in its map
    int num_blocks;        // of keys that some row of the cluster sees

    __device__ __forceinline__ int position(int row) const { return row + seqlen_k - seqlen_q; }

    // Keys that rows up to `last` see, at least 0.
    __device__ __forceinline__ int keys_up_to(int last, int causal) const {
        return causal ? max(0, min(seqlen_k, position(last) + 1)) : seqlen_k;
    }
};

__device__ __forceinline__ int sequence(const void* cu_seqlens, const void* seqused, int index_is_64, int whole, int batch,
                                        int& begin) {
    begin = 0;
    int length = whole;
    if (cu_seqlens != nullptr) {
        begin = load_index(cu_seqlens, index_is_64, batch);
        length = load_index(cu_seqlens, index_is_64, batch + 1) - begin;
    }
    return seqused != nullptr ? load_index(seqused, index_is_64, batch) : length;
}

__device__ __forceinline__ Tile make_tile(const PrefillArgs& args, int index) {
    const pipe::TileCoord coord = args.schedule.coord(index);
    Tile tile;
    tile.m0 = coord.m * kClusterRows;
    tile.head = coord.head;
    tile.batch = coord.batch;
    tile.seqlen_q =
        sequence(args.cu_seqlens_q, args.seqused_q, args.index_is_64, args.seqlen_q, coord.batch, tile.q_row);
    tile.seqlen_k =
        sequence(args.cu_seqlens_k, args.seqused_k, args.index_is_64, args.seqlen_k, coord.batch, tile.k_row);
    tile.q_batch = args.cu_seqlens_q != nullptr ? 0 : coord.batch;
    tile.k_batch = args.cu_seqlens_k != nullptr ? 0 : coord.batch;
    const int last = min(tile.m0 + kClusterRows, tile.seqlen_q) - 1;
    tile.num_blocks = (tile.keys_up_to(last, args.causal) + kKeys - 1) / kKeys;
    return tile;
}

// Tiles of this cluster, longest first, odd rounds in reverse. Tiles beyond their sequence are skipped.
struct Cursor {
    int round = 0;

    __device__ __forceinline__ bool next(const PrefillArgs& args, Tile& tile) {
        const int clusters = static_cast<int>(gridDim.x) / kCluster;
        const int cluster = static_cast<int>(blockIdx.x) / kCluster;
        for (;;) {
            const int index = round * clusters + ((round & 1) != 0 ? clusters - 1 - cluster : cluster);
            ++round;
            if (round * clusters - clusters >= args.schedule.num_tiles) {
                return false;
            }
            if (index < args.schedule.num_tiles) {
                tile = make_tile(args, index);
                if (tile.m0 < tile.seqlen_q) {
                    return true;
                }
            }
        }
    }
};

enum NamedBarrier : uint32_t { kBarrierAttending = 1 };  // and 2: one for each attending warpgroup

using RingState = pipe::PipeState<kRingUnits>;
using KvState = pipe::PipeState<kKvStages>;

// One arrival on the barrier of every block of the cluster. Nothing but wgmma and proxy-fenced reads came before: relaxed.
__device__ __forceinline__ void release_to_cluster(uint32_t bar, int lane) {
    if (lane < kCluster) {
        ptx::mbarrier_arrive_remote_relaxed(bar, lane);
    }
}

// ---------------------------------------------------------------------------------------------------------------------
// Loading: one thread each.

// Coordinates of 64 keys in their maps.
struct KeyBlock {
    int row;
    int batch;  // or page
};

__device__ __forceinline__ KeyBlock key_block(const PrefillArgs& args, const Tile& tile, int block) {
    if (args.block_table == nullptr || block >= tile.num_blocks) {
        return {tile.k_row + block * kKeys, tile.k_batch};
    }
    const int page = args.by_page.quotient(block * kKeys);
    return {block * kKeys - page * static_cast<int>(args.by_page.divisor),
            load_index(args.block_table, args.index_is_64, tile.batch * args.block_table_stride_b + page)};
}

template <bool kWeightRowsLatent>
__device__ __forceinline__ void load_ring(const PrefillArgs& args, SharedStorage& smem, uint32_t rank) {
    RingState ring = RingState::producer();
    Cursor cursor;
    Tile tile;
    const auto arm = [&](uint32_t bytes) {
        ptx::mbarrier_wait(ptx::smem_addr(&smem.ring_empty[ring.stage]), ring.phase);
        const uint32_t full = ptx::smem_addr(&smem.ring_full[ring.stage]);
        ptx::mbarrier_arrive_expect_tx(full, bytes);
        return full;
    };
    while (cursor.next(args, tile)) {
        if (tile.num_blocks == 0) {
            continue;
        }
        const CUtensorMap* weights = rank < 2 ? &args.map_w_uk : &args.map_w_uv;
        const int channel = static_cast<int>(rank % 2) * 64;
        for (int unit = 0; unit < kUnitsPerBlock; ++unit) {
            const uint32_t full = arm(kUnitBytes);
            const uint32_t dst = ptx::smem_addr(smem.ring[ring.stage]);
#pragma unroll
            for (int c = 0; c < kUnitChunks; ++c) {
                const int latent = 64 * (kUnitChunks * unit + c);
                ptx::tma_load_3d(dst + c * kChunkBytes, weights, full, kWeightRowsLatent ? channel : latent,
                                 kWeightRowsLatent ? latent : channel, tile.head, ptx::kL2EvictNormal);
            }
            ring.advance();
        }
        KeyBlock next = key_block(args, tile, 0);
        for (int block = 0; block < tile.num_blocks; ++block) {
            const KeyBlock keys = next;
            next = key_block(args, tile, block + 1);  // a page id arrives while this block is loaded
            for (int unit = 0; unit < kUnitsPerBlock; ++unit) {
                const uint32_t full = arm(kUnitBytes);
                const uint32_t dst = ptx::smem_addr(smem.ring[ring.stage]);
#pragma unroll
                for (int c = 0; c < kUnitChunks; ++c) {
                    ptx::tma_load_3d(dst + c * kChunkBytes, &args.map_latent, full, 64 * (kUnitChunks * unit + c),
                                     keys.row, keys.batch, ptx::kL2EvictLast);
                }
                ring.advance();
            }
        }
    }
}

__device__ __forceinline__ void load_queries_and_rope(const PrefillArgs& args, SharedStorage& smem, uint32_t rank) {
    KvState kv = KvState::producer();
    uint32_t q_phase = 1;
    Cursor cursor;
    Tile tile;
    while (cursor.next(args, tile)) {
        if (tile.num_blocks == 0) {
            continue;
        }
        ptx::mbarrier_wait(ptx::smem_addr(&smem.q_empty), q_phase);
        q_phase ^= 1;
        const uint32_t q_full = ptx::smem_addr(&smem.q_full);
        const uint32_t dst = ptx::smem_addr(smem.q);
        const int row = tile.q_row + tile.m0 + static_cast<int>(rank) * kBlockRows;
        ptx::mbarrier_arrive_expect_tx(q_full, kBytesQ);
#pragma unroll
        for (int c = 0; c < 2; ++c) {
            ptx::tma_load_4d(dst + c * kBlockRows * 128, &args.map_q_nope, q_full, 64 * c, row, tile.head, tile.q_batch,
                             ptx::kL2EvictFirst);
        }
        ptx::tma_load_4d(dst + 2 * kBlockRows * 128, &args.map_q_rope, q_full, args.rope_column, row, tile.head,
                         tile.q_batch, ptx::kL2EvictFirst);
        KeyBlock next = key_block(args, tile, 0);
        for (int block = 0; block < tile.num_blocks; ++block) {
            const KeyBlock keys = next;
            next = key_block(args, tile, block + 1);
            ptx::mbarrier_wait(ptx::smem_addr(&smem.kv_empty[kv.stage]), kv.phase);
            const uint32_t full = ptx::smem_addr(&smem.kv_full[kv.stage]);
            ptx::mbarrier_arrive_expect_tx(full, kChunkBytes * kCluster);  // rope, and three chunks from the peers
            ptx::tma_load_3d(ptx::smem_addr(smem.kv[kv.stage]) + kRopeChunk * kChunkBytes, &args.map_k_rope, full,
                             args.rope_column, keys.row, keys.batch, ptx::kL2EvictLast);
            kv.advance();
        }
    }
}

// ---------------------------------------------------------------------------------------------------------------------
// Projecting: one warpgroup, 64 channels of K or V.

template <typename T, bool kWeightRowsLatent>
struct Projector {
    const PrefillArgs& args;
    SharedStorage& smem;
    uint32_t rank;
    uint32_t warp;  // in the warpgroup
    int lane;

    __device__ __forceinline__ void release_unit(uint32_t bar) const {
        if (lane == 0) {
            ptx::mbarrier_arrive(bar);
        }
    }

    // The A operand of all 32 k-steps: rows are channels, the reduction runs along the latent.
    __device__ __forceinline__ void load_weights(uint32_t (&w)[128], RingState& ring) const {
#pragma unroll
        for (int unit = 0; unit < kUnitsPerBlock; ++unit) {
            ptx::mbarrier_wait(ptx::smem_addr(&smem.ring_full[ring.stage]), ring.phase);
            const uint32_t base = ptx::smem_addr(smem.ring[ring.stage]);
#pragma unroll
            for (int k = 0; k < 4 * kUnitChunks; ++k) {
                const uint32_t chunk = base + k / 4 * kChunkBytes;
                uint32_t(&fragment)[4] = *reinterpret_cast<uint32_t(*)[4]>(&w[16 * kUnitChunks * unit + 4 * k]);
                if constexpr (kWeightRowsLatent) {
                    const uint32_t row = 16 * (k % 4) + lane % 8 + 8 * (lane / 16);
                    const uint32_t column = 16 * warp + 8 * (lane / 8 % 2);
                    ptx::ldmatrix_x4_trans(fragment, tile::tile_addr<Swizzle::k128>(chunk, 64, row, 2 * column));
                } else {
                    const uint32_t row = 16 * warp + lane % 16;
                    const uint32_t column = 16 * (k % 4) + 8 * (lane / 16);
                    ptx::ldmatrix_x4(fragment, tile::tile_addr<Swizzle::k128>(chunk, 64, row, 2 * column));
                }
            }
            ptx::fence_proxy_async_smem();
            __syncwarp();
            release_unit(ptx::smem_addr(&smem.ring_empty[ring.stage]));
            ring.advance();
        }
    }

    // K or V of one block, packed. Meanwhile, once its first products are under way, the block before it is published.
    template <bool kPublish>
    __device__ __forceinline__ void project_block(uint32_t (&packed)[16], const uint32_t (&w)[128], int valid,
                                                  RingState& ring, KvState& kv) const {
        float acc[32];
        uint32_t previous = 0;
        ptx::fence_registers(acc);
#pragma unroll
        for (int unit = 0; unit < kUnitsPerBlock; ++unit) {
            ptx::mbarrier_wait(ptx::smem_addr(&smem.ring_full[ring.stage]), ring.phase);
            const uint64_t desc = tile::make_desc_k<Swizzle::k128>(ptx::smem_addr(smem.ring[ring.stage]));
            ptx::wgmma_fence();
#pragma unroll
            for (int k = 0; k < 4 * kUnitChunks; ++k) {
                const int i = 16 * kUnitChunks * unit + 4 * k;
                ptx::wgmma_rs<T, kKeys>(acc, w[i], w[i + 1], w[i + 2], w[i + 3],
                                        tile::advance_desc(desc, tile::step_k<Swizzle::k128>(k, kKeys)),
                                        unit != 0 || k != 0);
            }
            ptx::wgmma_commit();
            if (kPublish && unit == kPublishUnit) {
                publish(packed, kv);
            }
            if (unit > 0) {
                ptx::wgmma_wait<1>();
                release_unit(previous);
            }
            previous = ptx::smem_addr(&smem.ring_empty[ring.stage]);
            ring.advance();
        }
        ptx::wgmma_wait<0>();
        ptx::fence_registers(acc);
        release_unit(previous);
        // Keys beyond the sequence may be anything; 0 * NaN is NaN.
        const int last = valid - 2 * (lane % 4);
        if (valid < kKeys) {
#pragma unroll
            for (int i = 0; i < 32; ++i) {
                acc[i] = 8 * (i / 4) + i % 2 < last ? acc[i] : 0.0f;
            }
        }
        if (rank < 2) {
#pragma unroll
            for (int i = 0; i < 16; ++i) {
                packed[i] = ptx::pack_f16_saturating(acc[2 * i], acc[2 * i + 1]);
            }
        } else {
#pragma unroll
            for (int i = 0; i < 16; ++i) {
                packed[i] = ptx::pack2<T>(acc[2 * i], acc[2 * i + 1]);
            }
        }
    }

    // This warp's 16 channels to its own block, then to the others.
    __device__ __forceinline__ void publish(const uint32_t (&packed)[16], KvState& kv) const {
        ptx::mbarrier_wait(ptx::smem_addr(&smem.kv_empty[kv.stage]), kv.phase);
        const uint32_t chunk = ptx::smem_addr(smem.kv[kv.stage]) + rank * kChunkBytes;
        const uint32_t row = 16 * warp + lane % 16;
#pragma unroll
        for (int k = 0; k < 4; ++k) {
            ptx::stmatrix_x4(tile::tile_addr<Swizzle::k128>(chunk, 64, row, 32 * k + 16 * (lane / 16)), packed[4 * k],
                             packed[4 * k + 1], packed[4 * k + 2], packed[4 * k + 3]);
        }
        ptx::fence_proxy_async_smem();
        __syncwarp();
        const uint32_t full = ptx::smem_addr(&smem.kv_full[kv.stage]);
        if (lane < kCluster) {
            if (lane == static_cast<int>(rank)) {
                ptx::mbarrier_arrive(full);
            } else {
                constexpr uint32_t kWarpBytes = 16 * 128;
                ptx::bulk_copy_to_peer(chunk + warp * kWarpBytes, chunk + warp * kWarpBytes, kWarpBytes, full, lane);
            }
        }
        __syncwarp();
        kv.advance();
    }

    __device__ __forceinline__ void run() const {
        RingState ring = RingState::consumer();
        KvState kv = KvState::producer();
        Cursor cursor;
        Tile tile;
        while (cursor.next(args, tile)) {
            if (tile.num_blocks == 0) {
                continue;
            }
            uint32_t w[128];
            uint32_t packed[16];
            load_weights(w, ring);
            project_block<false>(packed, w, tile.seqlen_k, ring, kv);
#pragma unroll 1
            for (int block = 1; block < tile.num_blocks; ++block) {
                project_block<true>(packed, w, tile.seqlen_k - block * kKeys, ring, kv);
            }
            publish(packed, kv);
        }
    }
};

// ---------------------------------------------------------------------------------------------------------------------
// Attending: one warpgroup, 64 rows.

// attention::Softmax::update in two steps, so that something can be done between the maxima and the exponentials.
struct Softmax : attention::Softmax {
    float base[2];

    __device__ __forceinline__ void raise(const float (&s)[32], float (&alpha)[2], float scale_log2) {
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            float even = fmaxf(row_max[r], s[2 * r]);
            float odd = s[2 * r + 1];
#pragma unroll
            for (int i = 4; i < 32; i += 4) {
                even = fmaxf(even, s[i + 2 * r]);
                odd = fmaxf(odd, s[i + 2 * r + 1]);
            }
            const float new_max = tile::quad_max(fmaxf(even, odd));
            // A row that has seen no key keeps -inf; only the subtraction uses 0 in its place.
            base[r] = new_max == -INFINITY ? 0.0f : new_max * scale_log2;
            alpha[r] = ptx::exp2_approx(row_max[r] * scale_log2 - base[r]);
            row_max[r] = new_max;
            row_sum[r] *= alpha[r];
        }
    }

    __device__ __forceinline__ void weigh(float (&s)[32], float scale_log2) {
#pragma unroll
        for (int i = 0; i < 32; ++i) {
            s[i] = ptx::exp2_approx(fmaf(s[i], scale_log2, -base[(i / 2) % 2]));
            row_sum[(i / 2) % 2] += s[i];
        }
    }
};

template <typename T>
struct Attender {
    const PrefillArgs& args;
    SharedStorage& smem;
    uint32_t warp;  // in the warpgroup
    int lane;
    int block_row;  // of this warpgroup in the cluster's rows
    uint32_t q_rows;

    // This warpgroup's rows of q_nope to fp16, in place.
    __device__ __forceinline__ void convert_queries() const {
        const uint32_t base = q_rows + (warp * 32 + lane) * 16;
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            const uint32_t addr = base + i / 4 * kBlockRows * 128 + i % 4 * 2048;
            uint32_t x[4];
            ptx::ld_shared_v4(x, addr);
#pragma unroll
            for (int j = 0; j < 4; ++j) {
                x[j] = ptx::pack_f16_saturating(__uint_as_float(x[j] << 16), __uint_as_float(x[j] & 0xffff0000u));
            }
            ptx::st_shared_v4(addr, x);
        }
        ptx::fence_proxy_async_smem();
        ptx::named_barrier_sync(kBarrierAttending + block_row / 64 % 2, 128);
    }

    __device__ __forceinline__ void issue_scores(float (&s)[32], const KvState& kv) const {
        ptx::mbarrier_wait(ptx::smem_addr(&smem.kv_full[kv.stage]), kv.phase);
        const uint32_t base = ptx::smem_addr(smem.kv[kv.stage]);
        const uint64_t desc_q = tile::make_desc_k<Swizzle::k128>(q_rows);
        const uint64_t desc_k = tile::make_desc_mn<Swizzle::k128>(base, kKeys);
        const uint64_t desc_rope = tile::make_desc_k<Swizzle::k128>(base + kRopeChunk * kChunkBytes);
        ptx::fence_registers(s);
        ptx::wgmma_fence();
#pragma unroll
        for (int k = 0; k < 8; ++k) {
            ptx::wgmma_ss<__half, kKeys, 0, 1>(s, tile::advance_desc(desc_q, tile::step_k<Swizzle::k128>(k, kBlockRows)),
                                          tile::advance_desc(desc_k, tile::step_mn<Swizzle::k128>(k)), k > 0);
        }
#pragma unroll
        for (int k = 0; k < 4; ++k) {
            ptx::wgmma_ss<T, kKeys>(s, tile::advance_desc(desc_q, tile::step_k<Swizzle::k128>(8 + k, kBlockRows)),
                                    tile::advance_desc(desc_rope, tile::step_k<Swizzle::k128>(k, kKeys)), 1);
        }
        ptx::wgmma_commit();
    }

    __device__ __forceinline__ void issue_output(float (&o)[64], uint32_t (&p)[16], const KvState& kv) const {
        const uint64_t desc_v = tile::make_desc_k<Swizzle::k128>(ptx::smem_addr(smem.kv[kv.stage]) + 2 * kChunkBytes);
        ptx::fence_registers(o);
        ptx::fence_registers(p);
        ptx::wgmma_fence();
#pragma unroll
        for (int k = 0; k < 4; ++k) {
            ptx::wgmma_rs<T, kValueCols>(o, p[4 * k], p[4 * k + 1], p[4 * k + 2], p[4 * k + 3],
                                         tile::advance_desc(desc_v, tile::step_k<Swizzle::k128>(k, kValueCols)), 1);
        }
        ptx::wgmma_commit();
    }

    __device__ __forceinline__ void release(KvState& kv) const {
        release_to_cluster(ptx::smem_addr(&smem.kv_empty[kv.stage]), lane);
        kv.advance();
    }

    __device__ __forceinline__ void mask(float (&s)[32], const Tile& tile, int row0, int block) const {
        int hi[2];
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            hi[r] = tile.keys_up_to(row0 + 8 * r, args.causal) - 1 - block * kKeys - 2 * (lane % 4);
        }
        attention::mask_right(s, hi);
    }

    __device__ __forceinline__ void run() {
        KvState kv = KvState::consumer();  // the block whose scores come next
        KvState values = kv;
        uint32_t q_phase = 0;
        Cursor cursor;
        Tile tile;
        while (cursor.next(args, tile)) {
            float s[32];
            uint32_t p[16];
            float o[64];
            float alpha[2];
            Softmax softmax;
            softmax.reset();
#pragma unroll
            for (int i = 0; i < 64; ++i) {
                o[i] = 0.0f;
            }
            const int row0 = tile.m0 + block_row + static_cast<int>(warp) * 16 + lane / 4;
            const int first = tile.m0 + block_row;
            const int last = min(first + 64, tile.seqlen_q) - 1;
            // Blocks that some row of this warpgroup sees; those that every row sees in full.
            const int own = first < tile.seqlen_q ? (tile.keys_up_to(last, args.causal) + kKeys - 1) / kKeys : 0;
            const int num_blocks = ptx::uniform(own);
            const int masked_from = ptx::uniform(tile.keys_up_to(first, args.causal) / kKeys);
            if (tile.num_blocks > 0) {
                ptx::mbarrier_wait(ptx::smem_addr(&smem.q_full), q_phase);
                q_phase ^= 1;
            }
            if (num_blocks > 0) {
                if constexpr (!std::is_same_v<T, __half>) {
                    convert_queries();
                }
                issue_scores(s, kv);
                ptx::wgmma_wait<0>();
                ptx::fence_registers(s);
                if (masked_from <= 0) {
                    mask(s, tile, row0, 0);
                }
                softmax.raise(s, alpha, args.scale_log2);
                softmax.weigh(s, args.scale_log2);
                attention::pack_weights<T>(p, s);
                kv.advance();
#pragma unroll 1
                for (int block = 1; block < num_blocks; ++block) {
                    issue_scores(s, kv);
                    issue_output(o, p, values);
                    ptx::wgmma_wait<1>();
                    ptx::fence_registers(s);
                    if (block >= masked_from) {
                        mask(s, tile, row0, block);
                    }
                    softmax.raise(s, alpha, args.scale_log2);
                    // The stage goes back before the exponentials, a third of a block earlier.
                    ptx::wgmma_wait<0>();
                    ptx::fence_registers(o);
                    ptx::fence_registers(p);
                    release(values);
                    softmax.weigh(s, args.scale_log2);
                    attention::pack_weights<T>(p, s);
                    attention::rescale(o, alpha);
                    kv.advance();
                }
                issue_output(o, p, values);
                release_q();
                ptx::wgmma_wait<0>();
                ptx::fence_registers(o);
                ptx::fence_registers(p);
                release(values);
            } else if (tile.num_blocks > 0) {
                release_q();
            }
            store(tile, o, softmax, row0);
            for (int block = num_blocks; block < tile.num_blocks; ++block) {  // for the peers' rows only
                ptx::mbarrier_wait(ptx::smem_addr(&smem.kv_full[values.stage]), values.phase);
                release(values);
            }
            kv = values;
        }
    }

    __device__ __forceinline__ void release_q() const {
        if (lane == 0) {
            ptx::mbarrier_arrive(ptx::smem_addr(&smem.q_empty));
        }
    }

    // A quad holds 32 columns of a row as 4 x 4 packed pairs: transposed, each lane has 8 neighbouring columns.
    __device__ __forceinline__ void store(const Tile& tile, const float (&o)[64], const attention::Softmax& softmax,
                                          int row0) const {
        const int t = lane % 4;
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            float lse;
            const float factor = softmax.finish(r, args.scale, -INFINITY, lse);
            const int row = row0 + 8 * r;
            const bool inside = row < tile.seqlen_q;
            const int64_t store_row = tile.q_row + row;
            if (inside && t == 0 && args.lse != nullptr) {
                args.lse[tile.q_batch * args.lse_stride_b + tile.head * args.lse_stride_h + store_row] = lse;
            }
            T* out = static_cast<T*>(args.out) + tile.q_batch * args.out_stride_b + tile.head * args.out_stride_h +
                     store_row * args.out_stride_s + 8 * t;
#pragma unroll
            for (int j = 0; j < 4; ++j) {
                uint32_t x[4];
#pragma unroll
                for (int g = 0; g < 4; ++g) {
                    const int i = 16 * j + 4 * g + 2 * r;
                    x[g] = ptx::pack2<T>(o[i] * factor, o[i + 1] * factor);
                }
#pragma unroll
                for (int step = 1; step <= 2; step *= 2) {
#pragma unroll
                    for (int g = 0; g < 4; ++g) {
                        if ((g & step) == 0) {
                            const bool upper = (t & step) != 0;
                            const uint32_t got = __shfl_xor_sync(0xffffffffu, upper ? x[g] : x[g | step], step);
                            x[g] = upper ? got : x[g];
                            x[g | step] = upper ? x[g | step] : got;
                        }
                    }
                }
                if (inside && 32 * j + 8 * t < args.d_v) {
                    ptx::st_global_v4(out + 32 * j, x);
                }
            }
        }
    }
};

}  // namespace prefill

template <typename T, bool kWeightRowsLatent>
__global__ void __launch_bounds__(prefill::kThreads, 1)
    mla_prefill_sm90_up_project_kernel(const __grid_constant__ PrefillArgs args) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
    using namespace prefill;
    extern __shared__ uint8_t smem_bytes[];
    SharedStorage& smem = *reinterpret_cast<SharedStorage*>(smem_bytes);
    const uint32_t warp = ptx::uniform_warp_idx();
    const int lane = static_cast<int>(threadIdx.x % 32);
    const uint32_t rank = ptx::cluster_cta_rank();
    if (warp == 0 && ptx::elect_one()) {
        ptx::prefetch_tensor_map(&args.map_q_nope);
        ptx::prefetch_tensor_map(&args.map_q_rope);
        ptx::prefetch_tensor_map(&args.map_latent);
        ptx::prefetch_tensor_map(&args.map_k_rope);
        ptx::mbarrier_init(ptx::smem_addr(&smem.q_full), 1);
        ptx::mbarrier_init(ptx::smem_addr(&smem.q_empty), 8);
        for (int i = 0; i < kRingUnits; ++i) {
            ptx::mbarrier_init(ptx::smem_addr(&smem.ring_full[i]), 1);
            ptx::mbarrier_init(ptx::smem_addr(&smem.ring_empty[i]), 4);
        }
        for (int i = 0; i < kKvStages; ++i) {
            ptx::mbarrier_init(ptx::smem_addr(&smem.kv_full[i]), 5);
            ptx::mbarrier_init(ptx::smem_addr(&smem.kv_empty[i]), 8 * kCluster);
        }
        ptx::fence_mbarrier_init();
    }
    __syncthreads();
    ptx::cluster_arrive();
    ptx::cluster_wait();

    if (warp < 4) {
        ptx::setmaxnreg_dec<kLoadRegs>();
        if (warp == 0 && ptx::elect_one()) {
            load_ring<kWeightRowsLatent>(args, smem, rank);
        } else if (warp == 1 && ptx::elect_one()) {
            load_queries_and_rope(args, smem, rank);
        }
        __syncwarp();
    } else if (warp < 8) {
        ptx::setmaxnreg_inc<kProjectRegs>();
        const Projector<T, kWeightRowsLatent> projector{args, smem, rank, warp % 4, lane};
        projector.run();
    } else {
        ptx::setmaxnreg_inc<kAttendRegs>();
        const uint32_t warpgroup = warp / 4 - 2;
        Attender<T> attender{args, smem, warp % 4, lane, static_cast<int>(rank * kBlockRows + warpgroup * 64),
                             ptx::smem_addr(smem.q) + warpgroup * 64 * 128};
        attender.run();
    }
    // The peers still copy into this block and arrive on its barriers.
    __syncthreads();
    ptx::cluster_arrive();
    ptx::cluster_wait();
#else
    __trap();
#endif
}

}  // namespace flare::mla
