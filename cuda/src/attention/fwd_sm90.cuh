// Attention forward on Hopper: o = softmax(scale q k^T) v, one tile of kBlockM query rows at a time.
//
// Roles (kBlockM = 64 * kConsumers): a producer (one elected thread issues TMA) and consumer warpgroups of 64 query rows each.
// With one block an SM the producer is warpgroup 0 and gives its registers to the consumers; with several, it is the last warp.
// With lengths on the device a second producer warp zeroes the rows of V beyond the sequence (the scrubber); with e4m3 inputs
// three more transpose V. Blocks are persistent and take tiles from TileSchedule, with lengths on the
// device from PackedTable. A cluster's blocks take neighbouring tiles
// of a head; each loads some chunks of every key block for all.
//
// Schedule of a consumer, S(n) = Q K(n)^T and O += P(n) V(n), blocks from the last key to the first: issue S(n), issue
// PV(n+1), wait S(n), softmax(n), wait PV(n+1), rescale O. A tile's last PV and the next one's first S are issued together, and
// the output is stored under the latter; with kPassesBlocks the last PV runs alone, and the first S under the store. With
// kPingPong the warpgroups take turns at issuing, so that one's softmax runs under the other's products. With kPassesBlocks a
// warpgroup works on the key blocks that its own rows see, and only passes others.
//
// Shared memory (bytes), 1024-aligned, in this order; E = element size:
//   q    kQStages * kBlockM * D * E    tile format of tile/smem_layout.cuh, one of 64 rows a warpgroup if kQStages is 1
//   k    kStages * kBlockN * D * E
//   v    kStages * kBlockN * Dv * E
//   vt   kStages * ceil(kBlockN / 128) * Dv * 128    e4m3 only: V^T in chunks of 128 keys
//   barriers
//   records of four tiles, 192: see Sm90Record
//   with device lengths, the table of PackedTable: 2,056
// The output needs none: a quad exchanges its packed fragment by shuffles into 16-byte pieces.
//
// Barriers    | kind | count                | arrives                                        | waits, first parity
//   q_full[s] | mbar | 1 + tx               | producer, TMA bytes of the tile or a part      | consumers, 0
//   q_empty[s]| mbar | 4 kConsumers         | lane 0 of each consumer warp, last S waited    | producer, 1
//             |      | one stage: 4         | a barrier a warpgroup                          |
//   k_full[s] | mbar | 1 + tx               | producer, TMA bytes of the block               | consumers, 0
//   k_empty[s]| mbar | 4 kConsumers kCluster| a lane of the cluster's consumer warps, S waited | producer, 1
//   v_full[s] | mbar | 1 + tx (+ 1)         | producer; with device lengths the scrubber     | consumers, 0
//             |      | e4m3: 3              | transposers                                    |
//   v_empty[s]| mbar | 4 kConsumers kCluster| a lane of the cluster's consumer warps, PV waited | producer; transposers, 1
//   v_raw[s]  | mbar | 1 + tx               | producer: V cut by seqlen_k; e4m3: every V     | scrubber; transposers, 0
//   v_taken[s]| mbar | 3                    | e4m3: transposers, v read                      | producer, 1
//   turn[g]   | bar  | 256                  | predecessor of warpgroup g                     | warpgroup g
// A tile's record is written ahead of the producer's arrival for the first V of the tile before, that of the first tile ahead of
// its first one on q_full. Its place is used again four tiles later, after a wait for q_empty that tells that all are past it.
//
// Proxies: q, k, v are written by TMA (async proxy) and read by wgmma (async proxy): mbarriers suffice. With device
// lengths the rows of V beyond seqlen_k belong to somebody else and may hold NaN: the scrubber zeroes them by
// generic stores, then fence.proxy.async, then arrives on v_full. The next TMA write into that stage follows wgmma
// reads that followed the scrubber's arrival. e4m3: v is read and vt written by ldmatrix and stmatrix (generic proxy); each
// transposer's fence.proxy.async stands between these and its arrivals on v_taken (the next TMA write) and v_full (wgmma).
#pragma once

#include <cstdint>

#include "../pipe/ping_pong.cuh"
#include "../pipe/ring.cuh"
#include "../ptx/ldst.cuh"
#include "../ptx/mbarrier.cuh"
#include "../ptx/sync.cuh"
#include "../ptx/tma.cuh"
#include "../ptx/wgmma.cuh"
#include "../tile/smem_desc.cuh"
#include "fwd_sm90_config.cuh"
#include "mask.cuh"
#include "softmax.cuh"

namespace flare::attention {

// Keys of block n that belong to the sequence, counted to its end.
template <class Cfg>
__device__ __forceinline__ int valid_keys(const Sm90Tile& tile, int n) {
    return tile.seqlen_k - (tile.keys.first_key + n * Cfg::kBlockN);
}

// One thread. Loads in the order in which buffers fall free and consumers need them: Q, K(last), then K(n - 1) ahead of V(n).
template <class Cfg>
__device__ __forceinline__ void sm90_produce(const Sm90Args& args, const Sm90Smem<Cfg>& smem) {
    auto k_state = pipe::PipeState<Cfg::kStages>::producer();
    auto v_state = pipe::PipeState<Cfg::kStages>::producer();
    auto q_state = pipe::PipeState<Cfg::kQStages>::producer();
    Sm90Cursor<Cfg> cursor(args, smem);
    const auto write_record = [&](Sm90Place place, uint32_t number) {
        Sm90Record record{};
        if (place.tile >= 0) {
            record = Sm90Record::make(Sm90Tile::make<Cfg>(args, place), args.params, head_bits<Cfg>(args));
        }
        record.store(smem.record(number));
    };
    Sm90Place place = cursor.next();
    write_record(place, 0);
    if (place.tile < 0) {  // consumers wait for queries before they look
        for (int part = 0; part < Cfg::kQParts; ++part) {
            ptx::mbarrier_arrive(smem.q_full(0, part));
        }
    }
    for (uint32_t number = 1; place.tile >= 0; ++number) {
        const Sm90Tile tile = Sm90Tile::make<Cfg>(args, place);
        const int kv_head = args.heads_per_kv.quotient(tile.head);
        const int first_row = tile.k_row + tile.keys.first_key;
        // A cluster's blocks load some chunks each, for all: every barrier sees the bytes of the whole block.
        const auto load_keys = [&](uint32_t to, const CUtensorMap* map, uint32_t bar, int row, int chunks) {
            if constexpr (Cfg::kCluster == 1) {
                ptx::tma_load_5d(to, map, bar, 0, row, 0, kv_head, tile.k_batch, ptx::kL2EvictLast);
            } else {
                const int chunk = static_cast<int>(ptx::cluster_cta_rank()) * chunks;
                ptx::tma_load_multicast_5d(to + chunk * Cfg::kBlockN * tile::span_bytes(Cfg::kSwizzle), map, bar,
                                           (1 << Cfg::kCluster) - 1, 0, row, chunk, kv_head, tile.k_batch, ptx::kL2EvictLast);
            }
        };
        const auto load_k = [&](int n) {
            ptx::mbarrier_wait_sleeping(smem.k_empty(k_state.stage), k_state.phase);
            ptx::mbarrier_arrive_expect_tx(smem.k_full(k_state.stage), Cfg::kBytesK);
            load_keys(smem.k(k_state.stage), &args.map_k, smem.k_full(k_state.stage), first_row + n * Cfg::kBlockN,
                      Cfg::kChunksK);
            k_state.advance();
        };
        const auto load_v = [&](int n) {
            ptx::mbarrier_wait_sleeping(Cfg::kFp8 ? smem.v_taken(v_state.stage) : smem.v_empty(v_state.stage), v_state.phase);
            uint32_t landing = Cfg::kFp8 ? smem.v_raw(v_state.stage) : smem.v_full(v_state.stage);
            if (!Cfg::kFp8 && Cfg::kDeviceLengths && valid_keys<Cfg>(tile, n) < Cfg::kBlockN) {
                ptx::mbarrier_arrive(landing);
                landing = smem.v_raw(v_state.stage);
            }
            ptx::mbarrier_arrive_expect_tx(landing, Cfg::kBytesV);
            load_keys(smem.v(v_state.stage), &args.map_v, landing, first_row + n * Cfg::kBlockN, Cfg::kChunksV);
            v_state.advance();
        };

        if constexpr (Cfg::kQStages == 1) {  // then the keys' buffer falls free a step before that of the queries
            load_k(tile.keys.num_blocks - 1);
        }
        const int bits = head_bits<Cfg>(args);
#pragma unroll 1
        for (int part = 0; part < Cfg::kQParts; ++part) {
            ptx::mbarrier_wait_sleeping(smem.q_empty(q_state.stage, part), q_state.phase);
            ptx::mbarrier_arrive_expect_tx(smem.q_full(q_state.stage, part), Cfg::kBytesQPart);
            const int token = tile.q_row + ((tile.m0 + part * Cfg::kQRows) >> bits);
            ptx::tma_load_5d(smem.q(q_state.stage, part), &args.map_q, smem.q_full(q_state.stage, part), 0,
                             bits > 0 ? tile.head << bits : token, bits > 0 ? token : 0, bits > 0 ? 0 : tile.head,
                             tile.q_batch, ptx::kL2EvictFirst);
        }
        q_state.advance();
        if constexpr (Cfg::kQStages > 1) {
            load_k(tile.keys.num_blocks - 1);
        }
        const int last = tile.keys.num_blocks - 1;
        if (last > 0) {
            load_k(last - 1);
        }
        // The next tile's record, ahead of an arrival that all consumers wait for before the end of this tile.
        place = cursor.next();
        write_record(place, number);
        load_v(last);
        for (int n = last - 1; n >= 0; --n) {
            if (n > 0) {
                load_k(n - 1);
            }
            load_v(n);
        }
    }
}

// One warp, with device lengths only: zeroes the rows of V beyond seqlen_k, so that 0 * NaN cannot happen.
template <class Cfg>
__device__ __forceinline__ void sm90_scrub(const Sm90Args& args, const Sm90Smem<Cfg>& smem, uint32_t lane) {
    auto v_state = pipe::PipeState<Cfg::kStages>::producer();
    uint32_t raw_phases = 0;  // one bit per stage
    Sm90Cursor<Cfg> cursor(args, smem);
    for (Sm90Place place = cursor.next(); place.tile >= 0; place = cursor.next()) {
        const Sm90Tile tile = Sm90Tile::make<Cfg>(args, place);
        for (int n = tile.keys.num_blocks - 1; n >= 0; --n) {
            const int valid = max(0, valid_keys<Cfg>(tile, n));
            if (valid < Cfg::kBlockN) {
                ptx::mbarrier_wait_sleeping(smem.v_raw(v_state.stage), (raw_phases >> v_state.stage) & 1);
                raw_phases ^= 1u << v_state.stage;
                const uint32_t zero[4] = {0, 0, 0, 0};
                const int pieces = (Cfg::kBlockN - valid) * (Cfg::kHeadDimV / 8);
                for (int i = static_cast<int>(lane); i < pieces; i += 32) {
                    const int row = valid + i / (Cfg::kHeadDimV / 8);
                    const int piece = i % (Cfg::kHeadDimV / 8);
                    ptx::st_shared_v4(tile::tile_addr<Cfg::kSwizzle>(smem.v(v_state.stage), Cfg::kBlockN, row, piece * 16),
                                      zero);
                }
                ptx::fence_proxy_async_smem();
                __syncwarp();
            } else {
                // One phase ahead of the producer would complete the wrong phase: follow its pace.
                ptx::mbarrier_wait_sleeping(smem.v_empty(v_state.stage), v_state.phase);
            }
            if (lane == 0) {
                ptx::mbarrier_arrive(smem.v_full(v_state.stage));
            }
            v_state.advance();
        }
    }
}

// e4m3, three warps: V [keys][Dv] to V^T [Dv][keys], the K-major operand that e4m3 products take. A unit is 32 keys x 16
// columns: ldmatrix.trans gives a lane two keys of two columns at a time, byte permutes sort them by column, stmatrix writes
// rows of 16 keys. Keys come out in the order of pack_weights, columns as even ones, then odd ones, which the store undoes.
template <class Cfg>
__device__ __forceinline__ void sm90_transpose(const Sm90Args& args, const Sm90Smem<Cfg>& smem, uint32_t lane,
                                               uint32_t worker) {
    constexpr int kBatch = 4;  // units in flight
    constexpr int kBatchesPerKeys = Cfg::kHeadDimV / 16 / kBatch;
    constexpr int kBatches = Cfg::kBlockN / 32 * kBatchesPerKeys;
    static_assert(Cfg::kSwizzle == tile::Swizzle::k128 && Cfg::kHeadDimV == 128, "one chunk of V's columns");
    auto raw = pipe::PipeState<Cfg::kStages>::consumer();
    auto out = pipe::PipeState<Cfg::kStages>::producer();
    Sm90Cursor<Cfg> cursor(args, smem);
    for (Sm90Place place = cursor.next(); place.tile >= 0; place = cursor.next()) {
        const Sm90Tile tile = Sm90Tile::make<Cfg>(args, place);
        for (int n = tile.keys.num_blocks - 1; n >= 0; --n) {
            ptx::mbarrier_wait_sleeping(smem.v_raw(raw.stage), raw.phase);
            ptx::mbarrier_wait_sleeping(smem.v_empty(out.stage), out.phase);
            // With device lengths the keys beyond the sequence may be anybody's, NaN among them.
            const int valid = Cfg::kDeviceLengths ? valid_keys<Cfg>(tile, n) : Cfg::kBlockN;
            for (int batch = static_cast<int>(worker); batch < kBatches; batch += kTransposeWarps) {
                const int key = batch / kBatchesPerKeys * 32;
                const int column = batch % kBatchesPerKeys * (16 * kBatch);
                // Columns 16 u further are an exclusive-or away in a row of V, whole rows away in V^T.
                const uint32_t from = tile::tile_addr<Cfg::kSwizzle>(smem.v(raw.stage), Cfg::kBlockN, key + lane, column);
                const uint32_t to = tile::tile_addr<Cfg::kSwizzle>(smem.vt(out.stage), Cfg::kHeadDimV, column + lane % 16,
                                                                   key + 16 * (lane / 16));
                uint32_t x[kBatch][4];
#pragma unroll
                for (int u = 0; u < kBatch; ++u) {
                    ptx::ldmatrix_x4_trans(x[u], from ^ (16 * u));
                }
                if (Cfg::kDeviceLengths && valid < Cfg::kBlockN) {
#pragma unroll
                    for (int i = 0; i < 4; ++i) {
                        const int first = key + 8 * i + 2 * static_cast<int>(lane % 4);
                        const uint32_t seen = (first < valid ? 0x0000ffffu : 0) | (first + 1 < valid ? 0xffff0000u : 0);
#pragma unroll
                        for (int u = 0; u < kBatch; ++u) {
                            x[u][i] &= seen;
                        }
                    }
                }
#pragma unroll
                for (int u = 0; u < kBatch; ++u) {
                    ptx::stmatrix_x4(to + u * 16 * 128, ptx::permute_bytes(x[u][0], x[u][1], 0x6420),
                                     ptx::permute_bytes(x[u][0], x[u][1], 0x7531), ptx::permute_bytes(x[u][2], x[u][3], 0x6420),
                                     ptx::permute_bytes(x[u][2], x[u][3], 0x7531));
                }
            }
            ptx::fence_proxy_async_smem();  // the stores before wgmma reads them, the loads before TMA overwrites them
            __syncwarp();
            if (lane == 0) {
                ptx::mbarrier_arrive(smem.v_taken(raw.stage));
                ptx::mbarrier_arrive(smem.v_full(out.stage));
            }
            raw.advance();
            out.advance();
        }
    }
}

// One consumer warpgroup: 64 rows.
template <class Cfg>
struct Sm90Consumer {
    using T = typename Cfg::T;
    using Out = typename Cfg::Out;
    static constexpr int kScores = Cfg::kBlockN / 2;
    static constexpr int kWeights = kScores * Cfg::kElement / 4;  // registers
    static constexpr int kOutputs = Cfg::kHeadDimV / 2;
    static constexpr int kStepElements = 32 / Cfg::kElement;  // of the reduction, a wgmma
    using Softmax = OnlineSoftmax<Cfg::kWeightOffset, Cfg::kSlackQuarters, true>;
    using Turn = pipe::PingPong<Cfg::kConsumers, 1>;

    const Sm90Args& args;
    Sm90Smem<Cfg> smem;
    uint32_t lane;
    int row_in_tile;  // of this thread's first row; its second is 8 below
    uint32_t warpgroup;
    uint64_t desc_q;  // of this warpgroup's rows in the current query stage
    Turn turn;
    pipe::PipeState<Cfg::kStages> k_state;
    pipe::PipeState<Cfg::kStages> v_state;
    pipe::PipeState<Cfg::kQStages> q_state;

    // Rows and transforms of the tile at hand.
    uint32_t number;  // counts the block's tiles
    int key_of_row[2];  // position of the row on the key axis, relative to keys.first_key and this thread's column 0
    int keys_end;       // seqlen_k, relative likewise
    KeyRange keys;
    int own_begin;  // of the tile's key blocks, those that this warpgroup works on
    int own_end;
    float alibi_slope;
    // fp8: descales of q and k in the factors of Sm90Args, and whether they make scores negative.
    float unit;
    float scale_log2;
    float slack;  // e4m3: of Sm90Args, with the descales
    float softcap_in;
    bool negate;

    __device__ __forceinline__ void issue_scores(float (&s)[kScores]) {
        ptx::mbarrier_wait(smem.k_full(k_state.stage), k_state.phase);
        const uint64_t desc_k = tile::make_desc_k<Cfg::kSwizzle>(smem.k(k_state.stage));
        ptx::fence_registers(s);
        ptx::wgmma_fence();
#pragma unroll
        for (int kk = 0; kk < Cfg::kHeadDim / kStepElements; ++kk) {
            ptx::wgmma_ss<T, Cfg::kBlockN>(
                s, tile::advance_desc(desc_q, tile::step_k<Cfg::kSwizzle>(kk, Cfg::kQRows)),
                tile::advance_desc(desc_k, tile::step_k<Cfg::kSwizzle>(kk, Cfg::kBlockN)), kk > 0);
        }
        ptx::wgmma_commit();
    }

    // V of the block that `state` points at is in shared memory.
    __device__ __forceinline__ void acquire_v(const pipe::PipeState<Cfg::kStages>& state) const {
        ptx::mbarrier_wait(smem.v_full(state.stage), state.phase);
    }

    __device__ __forceinline__ void issue_output(float (&o)[kOutputs], uint32_t (&p)[kWeights]) {
        if constexpr (!Cfg::kSoftmaxUnderOutput) {
            acquire_v(v_state);
        }
        const uint64_t desc_v = Cfg::kFp8 ? tile::make_desc_k<Cfg::kSwizzle>(smem.vt(v_state.stage))
                                          : tile::make_desc_mn<Cfg::kSwizzle>(smem.v(v_state.stage), Cfg::kBlockN);
        ptx::fence_registers(o);
        ptx::fence_registers(p);
        ptx::wgmma_fence();
#pragma unroll
        for (int kk = 0; kk < Cfg::kBlockN / kStepElements; ++kk) {
            const uint32_t step =
                Cfg::kFp8 ? tile::step_k<Cfg::kSwizzle>(kk, Cfg::kHeadDimV) : tile::step_mn<Cfg::kSwizzle>(kk);
            ptx::wgmma_rs<T, Cfg::kHeadDimV, Cfg::kFp8 ? 0 : 1>(o, p[4 * kk], p[4 * kk + 1], p[4 * kk + 2], p[4 * kk + 3],
                                                                tile::advance_desc(desc_v, step), 1);
        }
        ptx::wgmma_commit();
    }

    // After the wait that covers the reads. wgmma is collective over the warpgroup: one lane speaks for its warp.
    __device__ __forceinline__ void release_k() {
        release(smem.k_empty(k_state.stage));
        k_state.advance();
    }

    __device__ __forceinline__ void release_v() {
        release(smem.v_empty(v_state.stage));
        v_state.advance();
    }

    // To the producer of every block of the cluster, since each of them writes here.
    __device__ __forceinline__ void release(uint32_t empty) const {
        if constexpr (Cfg::kCluster == 1) {
            if (lane == 0) {
                ptx::mbarrier_arrive(empty);
            }
        } else if (lane < Cfg::kCluster) {
            ptx::mbarrier_arrive_remote_relaxed(empty, lane);  // only wgmma has read the buffer
        }
    }

    __device__ __forceinline__ void acquire_q() {
        ptx::mbarrier_wait(smem.q_full(q_state.stage, q_part()), q_state.phase);
        desc_q = query_desc();
    }

    __device__ __forceinline__ uint32_t q_part() const { return Cfg::kQParts == 1 ? 0 : warpgroup; }

    __device__ __forceinline__ uint64_t query_desc() const {
        const uint32_t first_row = Cfg::kQParts == 1 ? warpgroup * 64 : 0;
        const uint32_t rows = smem.q(q_state.stage, q_part()) + first_row * tile::span_bytes(Cfg::kSwizzle);
        return tile::make_desc_k<Cfg::kSwizzle>(static_cast<uint32_t>(ptx::uniform(static_cast<int32_t>(rows))));
    }

    __device__ __forceinline__ void release_q() {
        if (lane == 0) {
            ptx::mbarrier_arrive(smem.q_empty(q_state.stage, q_part()));
        }
        q_state.advance();
    }

    // Makes tile `number` current; false after the last.
    __device__ __forceinline__ bool begin_tile() {
        Sm90Record record;
        record.load_keys(smem.record(number));
        if (ptx::uniform(record.num_blocks) == 0) {
            return false;
        }
        const int shift = 2 * static_cast<int>(lane % 4);
        const int window_left = args.params.window_left;
        const int window_right = args.params.window_right;
        const int bits = head_bits<Cfg>(args);
        const int first_token = record.first_token + (static_cast<int>(warpgroup * 64) >> bits);
        const int end_token = record.first_token + (static_cast<int>(warpgroup * 64 + 64) >> bits);
        keys = {0, record.num_blocks, 0, 0};
        keys.mask_edges<Cfg::kBlockN>(first_token, end_token, record.seqlen_k, record.seqlen_k, window_left, window_right);
        own_begin = 0;
        own_end = keys.num_blocks;
        if constexpr (Cfg::kPassesBlocks) {
            keys.own_blocks<Cfg::kBlockN>(first_token, min(end_token, record.first_token + record.tokens), record.seqlen_k,
                                          record.seqlen_k, window_left, window_right, own_begin, own_end);
        }
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            key_of_row[r] = record.first_token + ((row_in_tile + 8 * r) >> bits) - shift;
        }
        keys_end = record.seqlen_k - shift;
        unit = args.unit;
        scale_log2 = args.scale_log2;
        softcap_in = args.softcap_in;
        if constexpr (Cfg::kFp8 || Cfg::kExtended) {
            record.load_head(smem.record(number));
        }
        if constexpr (Cfg::kFp8) {
            slack = args.slack;
            const float descale = descale_of(args.params.q_descale, record) * descale_of(args.params.k_descale, record);
            negate = descale < 0.0f;
            softcap_in *= fabsf(descale);
            if (args.params.softcap == 0.0f) {
                const float factor = fmaxf(fabsf(descale), 1e-30f);  // 0 would make NaN of -inf
                unit *= factor;
                scale_log2 *= factor;
                slack = fminf(slack / factor, 1e30f);
            }
        }
        if constexpr (Cfg::kExtended) {
            const float* slopes = args.params.alibi_slopes;
            alibi_slope = slopes == nullptr ? 0.0f : slopes[record.batch * args.params.alibi_batch_stride + record.head] / unit;
        }
        return true;
    }

    __device__ __forceinline__ float descale_of(const float* descales, const Sm90Record& record) const {
        return descales == nullptr ? 1.0f
                                   : descales[record.batch * args.params.descale_batch_stride +
                                              args.heads_per_kv.quotient(record.head) * args.params.descale_head_stride];
    }

    // Softcap, ALiBi, masks. The masks are needed at the edges only; the branch is uniform over the warpgroup.
    __device__ __forceinline__ void transform_scores(float (&s)[kScores], int n) const {
        const int key0 = n * Cfg::kBlockN;
        if constexpr (Cfg::kFp8) {
            if (negate) {
#pragma unroll
                for (int i = 0; i < kScores; ++i) {
                    s[i] = -s[i];
                }
            }
        }
        if constexpr (Cfg::kExtended) {
            if (args.params.softcap > 0.0f) {
#pragma unroll
                for (int i = 0; i < kScores; ++i) {
                    s[i] = ptx::tanh_approx(s[i] * softcap_in);
                }
            }
            if (args.params.alibi_slopes != nullptr) {
#pragma unroll
                for (int i = 0; i < kScores; ++i) {
                    const int distance = key_of_row[(i / 2) % 2] - key0 - (8 * (i / 4) + i % 2);
                    s[i] -= alibi_slope * fabsf(static_cast<float>(distance));
                }
            }
        }
        if (n >= keys.right_masked_from) {
            uint32_t seen[2];
#pragma unroll
            for (int r = 0; r < 2; ++r) {
                seen[r] = columns_until(min(keys_end - 1, key_of_row[r] + args.params.window_right) - key0);
            }
            mask_columns(s, seen);
        }
        if (n < keys.left_masked_until) {
            uint32_t seen[2];
#pragma unroll
            for (int r = 0; r < 2; ++r) {
                seen[r] = ~columns_until(key_of_row[r] - args.params.window_left - key0 - 1);
            }
            mask_columns(s, seen);
        }
    }

    // The tensor cores are handed round: whoever has the turn issues its products.
    __device__ __forceinline__ void take_turn() const {
        if constexpr (Cfg::kSchedule == Sm90Schedule::kPingPong) {
            turn.wait_turn();
        }
    }

    __device__ __forceinline__ void pass_turn() const {
        if constexpr (Cfg::kSchedule == Sm90Schedule::kPingPong) {
            turn.pass_turn();
        }
    }

    // Takes part in the hand-over of key blocks, and of turns, without work on them.
    __device__ __forceinline__ void pass_blocks(int count) {
        if constexpr (Cfg::kPassesBlocks) {
            for (int i = 0; i < count; ++i) {
                take_turn();
                pass_turn();
                ptx::mbarrier_wait(smem.k_full(k_state.stage), k_state.phase);
                release_k();
                acquire_v(v_state);
                release_v();
            }
            // Uniform for the compiler, too, in spite of the loop.
            k_state.stage = static_cast<uint32_t>(ptx::uniform(static_cast<int32_t>(k_state.stage)));
            v_state.stage = static_cast<uint32_t>(ptx::uniform(static_cast<int32_t>(v_state.stage)));
        }
    }

    // Scores of block n have been waited for: free what they were read from.
    __device__ __forceinline__ void take_scores(float (&s)[kScores], int n) {
        release_k();
        if (n == own_begin) {
            release_q();
        }
        transform_scores(s, n);
    }

    // The first S of a tile: nothing runs beside it but the store of the tile before.
    __device__ __forceinline__ void issue_first_scores(float (&s)[kScores]) {
        pass_blocks(keys.num_blocks - own_end);
        acquire_q();
        take_turn();
        issue_scores(s);
        pass_turn();
    }

    __device__ __forceinline__ void run() {
        acquire_q();
        if (!begin_tile()) {
            return;
        }
        float s[kScores];
        uint32_t p[kWeights];
        float o[kOutputs];
        float alpha[2];
        issue_first_scores(s);
        ptx::wgmma_wait<0>();
        ptx::fence_registers(s);
        for (;;) {
            Softmax softmax;
            softmax.reset();
            zero(o);
            take_scores(s, own_end - 1);
            softmax.update(s, alpha, scale_log2);
            if constexpr (Cfg::kSoftmaxUnderOutput) {
                acquire_v(v_state);
            }
            pack_weights<T>(p, s);
            // NOTE: what the inner loop branches on and builds descriptors from has to be uniform for the compiler, too.
            own_begin = ptx::uniform(own_begin);
            own_end = ptx::uniform(own_end);
            keys.right_masked_from = ptx::uniform(keys.right_masked_from);
            keys.left_masked_until = ptx::uniform(keys.left_masked_until);
            desc_q = query_desc();
            for (int n = own_end - 2; n >= own_begin; --n) {
                take_turn();
                issue_scores(s);
                issue_output(o, p);
                pass_turn();
                ptx::wgmma_wait<1>();
                ptx::fence_registers(s);
                take_scores(s, n);
                float base[2];
                const bool grown = softmax.template raise_and_weigh<Cfg::kScoresAhead>(s, alpha, base, scale_log2,
                                                                                       Cfg::kFp8 ? slack : args.slack);
                softmax.template weigh<Cfg::kScoresAhead, Cfg::kScoresUnderOutput>(s, base, scale_log2);
                if constexpr (Cfg::kSoftmaxUnderOutput) {
                    // NOTE: the next V is waited for here, not before its product: a loop between the exponentials and the
                    // wait for O keeps ptxas from moving that wait ahead of them.
                    ptx::fence_registers(s);
                    auto next_v = v_state;
                    next_v.advance();
                    acquire_v(next_v);
                }
                ptx::wgmma_wait<0>();
                ptx::fence_registers(o);
                ptx::fence_registers(p);
                ptx::fence_registers(s);
                release_v();
                softmax.template weigh<Cfg::kScoresUnderOutput, kScores>(s, base, scale_log2);
                pack_weights<T>(p, s);
                if (grown) {
                    rescale(o, alpha);
                }
            }
            float factor[2];
            if constexpr (Cfg::kPassesBlocks) {
                issue_output(o, p);
                finish_rows(softmax, factor);
                const int unseen = own_begin;
                ++number;
                // NOTE: without a loop; one here makes the compiler take the masks' branch for divergent and the descriptors out of
                // uniform registers.
                const bool more = begin_tile();
                ptx::wgmma_wait<0>();
                ptx::fence_registers(o);
                ptx::fence_registers(p);
                release_v();
                pass_blocks(unseen);
                if (!more) {
                    store(o, factor, number - 1);
                    return;
                }
                // NOTE: waited for before the loop closes; products in flight across a back edge make ptxas serialise them.
                issue_first_scores(s);
                store(o, factor, number - 1);
                ptx::wgmma_wait<0>();
                ptx::fence_registers(s);
            } else {
                if constexpr (!Cfg::kSoftmaxUnderOutput) {
                    acquire_v(v_state);  // of a single block: the next record comes ahead of it
                }
                Sm90Record following;
                following.load_keys(smem.record(number + 1));
                if (ptx::uniform(following.num_blocks) == 0) {
                    issue_output(o, p);
                    finish_rows(softmax, factor);
                    ptx::wgmma_wait<0>();
                    ptx::fence_registers(o);
                    ptx::fence_registers(p);
                    store(o, factor, number);
                    return;
                }
                // The next tile's first S under the same turn, so that the tensor cores have work until the output is stored.
                take_turn();
                issue_output(o, p);
                acquire_q();
                issue_scores(s);
                pass_turn();
                finish_rows(softmax, factor);
                ptx::wgmma_wait<1>();
                ptx::fence_registers(o);
                ptx::fence_registers(p);
                release_v();
                store(o, factor, number);
                ++number;
                begin_tile();
                // NOTE: waited for before the loop closes; products in flight across a back edge make ptxas serialise them.
                ptx::wgmma_wait<0>();
                ptx::fence_registers(s);
            }
        }
    }

    static __device__ __forceinline__ void zero(float (&o)[kOutputs]) {
#pragma unroll
        for (int i = 0; i < kOutputs; ++i) {
            o[i] = 0.0f;
        }
    }

    // Of 32, where this lane's 8 stored columns begin.
    __device__ __forceinline__ uint32_t first_column() const {
        const uint32_t t = lane % 4;
        return Cfg::kFp8 ? 16 * (t % 2) + 8 * (t / 2) : 8 * t;
    }

    // Of row r of this thread, which of the joined heads.
    __device__ __forceinline__ int joined_head(int r) const {
        return (row_in_tile + 8 * r) & ((1 << head_bits<Cfg>(args)) - 1);
    }

    // And which token, counted from the tile's first.
    __device__ __forceinline__ int token_in_tile(int r) const { return (row_in_tile + 8 * r) >> head_bits<Cfg>(args); }

    // Ends the softmax of both rows of the tile at hand and stores their lse: what of its end needs no output, to run under the
    // last PV. `factor` is what the output is to be multiplied with.
    __device__ __forceinline__ void finish_rows(const Softmax& softmax, float (&factor)[2]) const {
        const FwdParams& params = args.params;
        // Read anew: keeping it across the loop would cost registers there.
        Sm90Record record;
        record.load_keys(smem.record(number));
        record.load_outputs(smem.record(number));
        if (Cfg::kFp8 || params.sink != nullptr) {
            record.load_head(smem.record(number));
        }
        float lse[2];
        if (params.sink != nullptr) {
#pragma unroll
            for (int r = 0; r < 2; ++r) {
                const int head = (record.head << head_bits<Cfg>(args)) + joined_head(r);
                factor[r] = softmax.finish(r, unit, params.sink[head], lse[r]);
            }
        } else {
#pragma unroll
            for (int r = 0; r < 2; ++r) {
                factor[r] = softmax.finish_quickly(r, unit, lse[r]);
            }
        }
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            if constexpr (Cfg::kFp8) {
                factor[r] *= descale_of(params.v_descale, record);
            }
            if (token_in_tile(r) < record.tokens && lane % 4 == 0 && params.lse != nullptr) {
                params.lse[record.lse + joined_head(r) * params.lse_stride.head + token_in_tile(r) * params.lse_stride.row] =
                    lse[r];
            }
        }
    }

    // Normalises and stores 64 rows of tile `of`, 16 bytes a lane and 32 columns.
    __device__ __forceinline__ void store(float (&o)[kOutputs], const float (&factor)[2], uint32_t of) const {
        const FwdParams& params = args.params;
        Sm90Record record;
        record.load_keys(smem.record(of));
        record.load_outputs(smem.record(of));
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            Out* const out = static_cast<Out*>(params.o) + record.out + joined_head(r) * params.o_stride.head +
                             token_in_tile(r) * params.o_stride.row + first_column();
#pragma unroll
            for (int j = 0; j < Cfg::kHeadDimV / 32; ++j) {
                uint32_t x[4];
                if constexpr (Cfg::kFp8) {
                    gather_deinterleaved(x, o, 16 * j + 2 * r, factor[r]);
                } else {
                    gather(x, o, 16 * j + 2 * r, factor[r]);
                }
                if (token_in_tile(r) < record.tokens) {
                    ptx::st_global_v4(out + 32 * j, x);
                }
            }
        }
    }

    // A quad holds 32 columns of a row as 4 x 4 packed pairs: transposed, lane t has columns 8 t to 8 t + 7.
    __device__ __forceinline__ void gather(uint32_t (&x)[4], const float (&o)[kOutputs], int at, float factor) const {
        const uint32_t t = lane % 4;
#pragma unroll
        for (int g = 0; g < 4; ++g) {
            x[g] = ptx::pack2<Out>(o[at + 4 * g] * factor, o[at + 4 * g + 1] * factor);
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
    }

    // The columns of sm90_transpose: of each 16, lane t holds 4 t to 4 t + 3, even ones in one fragment, odd ones in the next.
    // An even lane takes 8 of the first 16 columns, an odd lane 8 of the second.
    __device__ __forceinline__ void gather_deinterleaved(uint32_t (&x)[4], const float (&o)[kOutputs], int at,
                                                         float factor) const {
        const bool odd = lane % 2 != 0;
        uint32_t y[2][2];
#pragma unroll
        for (int half = 0; half < 2; ++half) {
#pragma unroll
            for (int e = 0; e < 2; ++e) {
                const int i = at + 8 * half + e;
                y[half][e] = ptx::pack2<Out>(o[i] * factor, o[i + 4] * factor);
            }
        }
#pragma unroll
        for (int e = 0; e < 2; ++e) {
            const uint32_t got = __shfl_xor_sync(0xffffffffu, odd ? y[0][e] : y[1][e], 1);
            x[e] = odd ? got : y[0][e];
            x[2 + e] = odd ? y[1][e] : got;
        }
    }
};

template <class Cfg>
__global__ void __launch_bounds__(Cfg::kThreads, Cfg::kBlocksPerSm)
    attention_fwd_sm90_kernel(const __grid_constant__ Sm90Args args) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
    extern __shared__ __align__(1024) uint8_t smem_bytes[];
    const Sm90Smem<Cfg> smem{ptx::smem_addr(smem_bytes)};
    const uint32_t warp = ptx::uniform_warp_idx();
    const uint32_t lane = threadIdx.x % 32;
    if (threadIdx.x == 0) {
        ptx::prefetch_tensor_map(&args.map_q);
        ptx::prefetch_tensor_map(&args.map_k);
        ptx::prefetch_tensor_map(&args.map_v);
        smem.init();
    }
    if constexpr (Cfg::kDeviceLengths) {
        smem.order().build(args.packed, args.params);
    }
    if constexpr (Cfg::kCluster > 1) {
        ptx::cluster_arrive();
        ptx::cluster_wait();
    } else {
        __syncthreads();
    }
    // wgmma wants a warpgroup's first warp at a multiple of 4: a producer of fewer than 4 warps stands last.
    constexpr uint32_t kFirstConsumerWarp = Cfg::kBlocksPerSm == 1 ? 4 : 0;
    constexpr uint32_t kFirstProducerWarp = Cfg::kBlocksPerSm == 1 ? 0 : 4 * Cfg::kConsumers;
    const bool producer = kFirstConsumerWarp > 0 ? warp < kFirstConsumerWarp : warp >= kFirstProducerWarp;
    if (producer) {
        if constexpr (Cfg::kBlocksPerSm == 1) {
            ptx::setmaxnreg_dec<Cfg::kProducerRegs>();
        }
        const uint32_t worker = warp - kFirstProducerWarp;
        if (worker == 0) {
            if (ptx::elect_one()) {
                sm90_produce<Cfg>(args, smem);
            }
        } else if constexpr (Cfg::kFp8) {
            sm90_transpose<Cfg>(args, smem, lane, worker - 1);
        } else if (Cfg::kDeviceLengths && worker == 1) {
            sm90_scrub<Cfg>(args, smem, lane);
        }
    } else {
        if constexpr (Cfg::kBlocksPerSm == 1) {
            ptx::setmaxnreg_inc<Cfg::kConsumerRegs>();
        }
        const uint32_t warpgroup = (warp - kFirstConsumerWarp) / 4;
        Sm90Consumer<Cfg> consumer{args, smem};
        consumer.lane = lane;
        consumer.row_in_tile = static_cast<int>(warpgroup * 64 + (warp % 4) * 16 + lane / 4);
        consumer.warpgroup = warpgroup;
        consumer.number = 0;
        consumer.turn = Sm90Consumer<Cfg>::Turn::make(warpgroup);
        consumer.k_state = pipe::PipeState<Cfg::kStages>::consumer();
        consumer.v_state = consumer.k_state;
        consumer.q_state = pipe::PipeState<Cfg::kQStages>::consumer();
        if (Cfg::kSchedule == Sm90Schedule::kPingPong && warpgroup + 1 == Cfg::kConsumers) {
            consumer.turn.prime();
        }
        consumer.run();
    }
    if constexpr (Cfg::kCluster > 1) {  // the others still write and arrive here
        __syncwarp();
        ptx::cluster_arrive();
        ptx::cluster_wait();
    }
#else
    __trap();
#endif
}

}  // namespace flare::attention
