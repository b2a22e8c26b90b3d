// Attention forward on Hopper: o = softmax(scale q k^T) v, one tile of kBlockM query rows at a time.
//
// Roles (kBlockM = 64 * kConsumers): warpgroup 0 is the producer (one elected thread issues TMA, the others idle),
// warpgroups 1.. are consumers of 64 query rows each. Blocks are persistent and take tiles from TileSchedule.
//
// Schedule of a consumer, S(n) = Q K(n)^T and O += P(n) V(n), blocks from the last key to the first: issue S(n), issue
// PV(n+1), wait S(n), softmax(n), wait PV(n+1), rescale O. A tile ends with its last PV alone; the first S of the next one
// runs under the store of its output. With kPingPong the warpgroups take turns at issuing, so that one's softmax runs under
// the other's products.
//
// Shared memory (bytes), 1024-aligned, in this order; element size 2:
//   q    kQStages * kBlockM * D * 2    tile format of tile/smem_layout.cuh
//   k    kStages * kBlockN * D * 2
//   v    kStages * kBlockN * Dv * 2
//   barriers
// The output needs none: a quad transposes its packed fragment by shuffles into 16-byte pieces.
//
// Barriers    | kind | count           | arrives                                   | waits     | first parity waited
//   q_full[s] | mbar | 1 + tx          | producer, TMA bytes of the tile           | consumers | 0
//   q_empty[s]| mbar | 4 * kConsumers  | lane 0 of each consumer warp, last S waited| producer | 1
//   k_full[s] | mbar | 1 + tx          | producer, TMA bytes of the block          | consumers | 0
//   k_empty[s]| mbar | 4 * kConsumers  | lane 0 of each consumer warp, S waited    | producer  | 1
//   v_full[s] | mbar | 1 + tx (+1)     | producer; with device lengths the scrubber| consumers | 0
//   v_empty[s]| mbar | 4 * kConsumers  | lane 0 of each consumer warp, PV waited   | producer  | 1
//   v_raw[s]  | mbar | 1 + tx          | producer, V of a block cut by seqlen_k    | scrubber  | 0
//   turn[g]   | bar  | 256             | predecessor of warpgroup g                | warpgroup g
//
// Proxies: q, k, v are written by TMA (async proxy) and read by wgmma (async proxy): mbarriers suffice. With device
// lengths the rows of V beyond seqlen_k belong to somebody else and may hold NaN: warp 1 (the scrubber) zeroes them by
// generic stores, then fence.proxy.async, then arrives on v_full. The next TMA write into that stage follows wgmma
// reads that followed the scrubber's arrival.
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

// One thread. Loads in the order in which consumers need them: Q, K(last), then K(n - 1) ahead of V(n).
template <class Cfg>
__device__ __forceinline__ void sm90_produce(const Sm90Args& args, const Sm90Smem<Cfg>& smem) {
    auto k_state = pipe::PipeState<Cfg::kStages>::producer();
    auto v_state = pipe::PipeState<Cfg::kStages>::producer();
    auto q_state = pipe::PipeState<Cfg::kQStages>::producer();
    pipe::TileCursor cursor;
    for (int idx = cursor.next(args.schedule); idx >= 0; idx = cursor.next(args.schedule)) {
        const Sm90Tile tile = Sm90Tile::make<Cfg>(args, idx);
        if (Cfg::kDeviceLengths && tile.outside()) {
            continue;
        }
        const int kv_head = args.heads_per_kv.quotient(tile.head);
        const int first_row = tile.k_row + tile.keys.first_key;
        const auto load_k = [&](int n) {
            ptx::mbarrier_wait(smem.k_empty(k_state.stage), k_state.phase);
            ptx::mbarrier_arrive_expect_tx(smem.k_full(k_state.stage), Cfg::kBytesK);
            ptx::tma_load_5d(smem.k(k_state.stage), &args.map_k, smem.k_full(k_state.stage), 0,
                             first_row + n * Cfg::kBlockN, 0, kv_head, tile.k_batch, ptx::kL2EvictLast);
            k_state.advance();
        };
        const auto load_v = [&](int n) {
            ptx::mbarrier_wait(smem.v_empty(v_state.stage), v_state.phase);
            uint32_t landing = smem.v_full(v_state.stage);
            if (Cfg::kDeviceLengths && valid_keys<Cfg>(tile, n) < Cfg::kBlockN) {
                ptx::mbarrier_arrive(landing);
                landing = smem.v_raw(v_state.stage);
            }
            ptx::mbarrier_arrive_expect_tx(landing, Cfg::kBytesV);
            ptx::tma_load_5d(smem.v(v_state.stage), &args.map_v, landing, 0, first_row + n * Cfg::kBlockN, 0, kv_head,
                             tile.k_batch, ptx::kL2EvictLast);
            v_state.advance();
        };

        ptx::mbarrier_wait(smem.q_empty(q_state.stage), q_state.phase);
        ptx::mbarrier_arrive_expect_tx(smem.q_full(q_state.stage), Cfg::kBytesQ);
        ptx::tma_load_5d(smem.q(q_state.stage), &args.map_q, smem.q_full(q_state.stage), 0, tile.q_row + tile.m0, 0,
                         tile.head, tile.q_batch, ptx::kL2EvictFirst);
        q_state.advance();
        load_k(tile.keys.num_blocks - 1);
        for (int n = tile.keys.num_blocks - 1; n > 0; --n) {
            load_k(n - 1);
            load_v(n);
        }
        load_v(0);
    }
}

// One warp, with device lengths only: zeroes the rows of V beyond seqlen_k, so that 0 * NaN cannot happen.
template <class Cfg>
__device__ __forceinline__ void sm90_scrub(const Sm90Args& args, const Sm90Smem<Cfg>& smem, uint32_t lane) {
    auto v_state = pipe::PipeState<Cfg::kStages>::producer();
    uint32_t raw_phases = 0;  // one bit per stage
    pipe::TileCursor cursor;
    for (int idx = cursor.next(args.schedule); idx >= 0; idx = cursor.next(args.schedule)) {
        const Sm90Tile tile = Sm90Tile::make<Cfg>(args, idx);
        if (tile.outside()) {
            continue;
        }
        for (int n = tile.keys.num_blocks - 1; n >= 0; --n) {
            const int valid = max(0, valid_keys<Cfg>(tile, n));
            if (valid < Cfg::kBlockN) {
                ptx::mbarrier_wait(smem.v_raw(v_state.stage), (raw_phases >> v_state.stage) & 1);
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
                ptx::mbarrier_wait(smem.v_empty(v_state.stage), v_state.phase);
            }
            if (lane == 0) {
                ptx::mbarrier_arrive(smem.v_full(v_state.stage));
            }
            v_state.advance();
        }
    }
}

// One consumer warpgroup: 64 rows.
template <class Cfg>
struct Sm90Consumer {
    using T = typename Cfg::T;
    static constexpr int kScores = Cfg::kBlockN / 2;
    static constexpr int kOutputs = Cfg::kHeadDimV / 2;
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
    int key_of_row[2];  // position of the row on the key axis, relative to keys.first_key and this thread's column 0
    int keys_end;       // seqlen_k, relative likewise
    KeyRange keys;
    float alibi_slope;

    __device__ __forceinline__ void issue_scores(float (&s)[kScores]) {
        ptx::mbarrier_wait(smem.k_full(k_state.stage), k_state.phase);
        const uint64_t desc_k = tile::make_desc_k<Cfg::kSwizzle>(smem.k(k_state.stage));
        ptx::fence_registers(s);
        ptx::wgmma_fence();
#pragma unroll
        for (int kk = 0; kk < Cfg::kHeadDim / 16; ++kk) {
            ptx::wgmma_ss<T, Cfg::kBlockN>(
                s, tile::advance_desc(desc_q, tile::step_k<Cfg::kSwizzle>(kk, Cfg::kBlockM)),
                tile::advance_desc(desc_k, tile::step_k<Cfg::kSwizzle>(kk, Cfg::kBlockN)), kk > 0);
        }
        ptx::wgmma_commit();
    }

    __device__ __forceinline__ void issue_output(float (&o)[kOutputs], uint32_t (&p)[kScores / 2]) {
        ptx::mbarrier_wait(smem.v_full(v_state.stage), v_state.phase);
        const uint64_t desc_v = tile::make_desc_mn<Cfg::kSwizzle>(smem.v(v_state.stage), Cfg::kBlockN);
        ptx::fence_registers(o);
        ptx::fence_registers(p);
        ptx::wgmma_fence();
#pragma unroll
        for (int kk = 0; kk < Cfg::kBlockN / 16; ++kk) {
            ptx::wgmma_rs<T, Cfg::kHeadDimV, 1>(o, p[4 * kk], p[4 * kk + 1], p[4 * kk + 2], p[4 * kk + 3],
                                                tile::advance_desc(desc_v, tile::step_mn<Cfg::kSwizzle>(kk)), 1);
        }
        ptx::wgmma_commit();
    }

    // After the wait that covers the reads. wgmma is collective over the warpgroup: one lane speaks for its warp.
    __device__ __forceinline__ void release_k() {
        if (lane == 0) {
            ptx::mbarrier_arrive(smem.k_empty(k_state.stage));
        }
        k_state.advance();
    }

    __device__ __forceinline__ void release_v() {
        if (lane == 0) {
            ptx::mbarrier_arrive(smem.v_empty(v_state.stage));
        }
        v_state.advance();
    }

    __device__ __forceinline__ void acquire_q() {
        ptx::mbarrier_wait(smem.q_full(q_state.stage), q_state.phase);
        desc_q = query_desc();
    }

    __device__ __forceinline__ uint64_t query_desc() const {
        const uint32_t rows = smem.q(q_state.stage) + warpgroup * 64 * tile::span_bytes(Cfg::kSwizzle);
        return tile::make_desc_k<Cfg::kSwizzle>(static_cast<uint32_t>(ptx::uniform(static_cast<int32_t>(rows))));
    }

    __device__ __forceinline__ void release_q() {
        if (lane == 0) {
            ptx::mbarrier_arrive(smem.q_empty(q_state.stage));
        }
        q_state.advance();
    }

    __device__ __forceinline__ void begin_tile(const Sm90Tile& tile) {
        const int shift = tile.keys.first_key + 2 * static_cast<int>(lane % 4);
        keys = tile.keys;
        key_of_row[0] = tile.m0 + row_in_tile + tile.seqlen_k - tile.seqlen_q - shift;
        key_of_row[1] = key_of_row[0] + 8;
        keys_end = tile.seqlen_k - shift;
        if constexpr (Cfg::kExtended) {
            const float* slopes = args.params.alibi_slopes;
            alibi_slope =
                slopes == nullptr ? 0.0f : slopes[tile.batch * args.params.alibi_batch_stride + tile.head] / args.unit;
        }
    }

    // Softcap, ALiBi, masks. The masks are needed at the edges only; the branch is uniform over the warpgroup.
    __device__ __forceinline__ void transform_scores(float (&s)[kScores], int n) const {
        const int key0 = n * Cfg::kBlockN;
        if constexpr (Cfg::kExtended) {
            if (args.params.softcap > 0.0f) {
#pragma unroll
                for (int i = 0; i < kScores; ++i) {
                    s[i] = ptx::tanh_approx(s[i] * args.softcap_in);
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
            int hi[2];
#pragma unroll
            for (int r = 0; r < 2; ++r) {
                hi[r] = min(keys_end - 1, key_of_row[r] + args.params.window_right) - key0;
            }
            mask_right(s, hi);
        }
        if (n < keys.left_masked_until) {
            const int lo[2] = {key_of_row[0] - args.params.window_left - key0,
                               key_of_row[1] - args.params.window_left - key0};
            mask_left(s, lo);
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

    // Scores of block n have been waited for: free what they were read from, make them weights.
    __device__ __forceinline__ void scores_to_weights(float (&s)[kScores], float (&alpha)[2], Softmax& softmax, int n) {
        release_k();
        if (n == 0) {
            release_q();
        }
        transform_scores(s, n);
        softmax.update(s, alpha, args.scale_log2);
    }

    // Number of the next tile, made current; -1 after the last. NOTE: without a loop where it can be helped. A loop here
    // makes the compiler take the masks' branch for divergent and the descriptors out of uniform registers.
    __device__ __forceinline__ int next_tile(pipe::TileCursor& cursor) {
        int idx = cursor.next(args.schedule);
        if constexpr (Cfg::kDeviceLengths) {
            while (idx >= 0 && Sm90Tile::make<Cfg>(args, idx).outside()) {
                idx = cursor.next(args.schedule);
            }
        }
        if (idx >= 0) {
            begin_tile(Sm90Tile::make<Cfg>(args, idx));
        }
        return idx;
    }

    // The first S of a tile: nothing runs beside it but the store of the tile before.
    __device__ __forceinline__ void issue_first_scores(float (&s)[kScores]) {
        acquire_q();
        take_turn();
        issue_scores(s);
        pass_turn();
    }

    __device__ __forceinline__ void run() {
        pipe::TileCursor cursor;
        int tile_idx = next_tile(cursor);
        if (tile_idx < 0) {
            return;
        }
        float s[kScores];
        uint32_t p[kScores / 2];
        float o[kOutputs];
        float alpha[2];
        issue_first_scores(s);
        ptx::wgmma_wait<0>();
        ptx::fence_registers(s);
        for (;;) {
            Softmax softmax;
            softmax.reset();
            zero(o);
            scores_to_weights(s, alpha, softmax, keys.num_blocks - 1);
            pack_weights<T>(p, s);
            // NOTE: what the inner loop branches on and builds descriptors from has to be uniform for the compiler, too.
            keys.num_blocks = ptx::uniform(keys.num_blocks);
            keys.right_masked_from = ptx::uniform(keys.right_masked_from);
            keys.left_masked_until = ptx::uniform(keys.left_masked_until);
            desc_q = query_desc();
            for (int n = keys.num_blocks - 2; n >= 0; --n) {
                take_turn();
                issue_scores(s);
                issue_output(o, p);
                pass_turn();
                ptx::wgmma_wait<1>();
                ptx::fence_registers(s);
                scores_to_weights(s, alpha, softmax, n);
                ptx::wgmma_wait<0>();
                ptx::fence_registers(o);
                ptx::fence_registers(p);
                ptx::fence_registers(s);
                release_v();
                pack_weights<T>(p, s);
                rescale(o, alpha);
            }
            issue_output(o, p);
            RowEnd ends[2];
            finish_rows(tile_idx, softmax, ends);
            const int following_idx = next_tile(cursor);
            ptx::wgmma_wait<0>();
            ptx::fence_registers(o);
            ptx::fence_registers(p);
            release_v();
            if (following_idx < 0) {
                store(o, ends);
                return;
            }
            // NOTE: waited for before the loop closes; products in flight across a back edge make ptxas serialise them.
            issue_first_scores(s);
            store(o, ends);
            ptx::wgmma_wait<0>();
            ptx::fence_registers(s);
            tile_idx = following_idx;
        }
    }

    static __device__ __forceinline__ void zero(float (&o)[kOutputs]) {
#pragma unroll
        for (int i = 0; i < kOutputs; ++i) {
            o[i] = 0.0f;
        }
    }

    // Where this thread's two rows go, and by what they are multiplied.
    struct RowEnd {
        T* out;
        float factor;
        bool inside;
    };

    // Ends the softmax of both rows and stores their lse: what of a tile's end needs no output, to run under the last PV.
    __device__ __forceinline__ void finish_rows(int tile_idx, const Softmax& softmax, RowEnd (&ends)[2]) const {
        const FwdParams& params = args.params;
        // Derived anew: keeping it across the loop would cost registers there.
        const Sm90Tile tile = Sm90Tile::make<Cfg>(args, tile_idx);
        const float sink = params.sink != nullptr ? params.sink[tile.head] : -INFINITY;
        const uint32_t t = lane % 4;
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            float lse;
            ends[r].factor = softmax.finish(r, args.unit, sink, lse);
            const int row = tile.m0 + row_in_tile + 8 * r;
            ends[r].inside = row < tile.seqlen_q;
            const int64_t store_row = tile.q_row + row;
            if (ends[r].inside && t == 0 && params.lse != nullptr) {
                params.lse[tile.q_batch * params.lse_stride.batch + tile.head * params.lse_stride.head +
                           store_row * params.lse_stride.row] = lse;
            }
            ends[r].out = static_cast<T*>(params.o) + tile.q_batch * params.o_stride.batch +
                          tile.head * params.o_stride.head + store_row * params.o_stride.row + 8 * t;
        }
    }

    // Normalises and stores 64 rows. A quad holds 32 columns of a row as 4 x 4 packed pairs: transposed, each lane has 8
    // neighbouring columns, one 16-byte store.
    __device__ __forceinline__ void store(float (&o)[kOutputs], const RowEnd (&ends)[2]) const {
        const uint32_t t = lane % 4;
#pragma unroll
        for (int r = 0; r < 2; ++r) {
#pragma unroll
            for (int j = 0; j < Cfg::kHeadDimV / 32; ++j) {
                uint32_t x[4];
#pragma unroll
                for (int g = 0; g < 4; ++g) {
                    const int i = 16 * j + 4 * g + 2 * r;
                    x[g] = ptx::pack2<T>(o[i] * ends[r].factor, o[i + 1] * ends[r].factor);
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
                if (ends[r].inside) {
                    ptx::st_global_v4(ends[r].out + 32 * j, x);
                }
            }
        }
    }
};

template <class Cfg>
__global__ void __launch_bounds__(Cfg::kThreads, 1) attention_fwd_sm90_kernel(const __grid_constant__ Sm90Args args) {
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
    __syncthreads();
    if (warp < 4) {
        ptx::setmaxnreg_dec<Cfg::kProducerRegs>();
        if (warp == 0) {
            if (ptx::elect_one()) {
                sm90_produce<Cfg>(args, smem);
            }
        } else if (Cfg::kDeviceLengths && warp == 1) {
            sm90_scrub<Cfg>(args, smem, lane);
        }
    } else {
        ptx::setmaxnreg_inc<Cfg::kConsumerRegs>();
        const uint32_t warpgroup = warp / 4 - 1;
        Sm90Consumer<Cfg> consumer{args, smem};
        consumer.lane = lane;
        consumer.row_in_tile = static_cast<int>(warpgroup * 64 + (warp % 4) * 16 + lane / 4);
        consumer.warpgroup = warpgroup;
        consumer.turn = Sm90Consumer<Cfg>::Turn::make(warpgroup);
        consumer.k_state = pipe::PipeState<Cfg::kStages>::consumer();
        consumer.v_state = consumer.k_state;
        consumer.q_state = pipe::PipeState<Cfg::kQStages>::consumer();
        if (Cfg::kSchedule == Sm90Schedule::kPingPong && warpgroup + 1 == Cfg::kConsumers) {
            consumer.turn.prime();
        }
        consumer.run();
    }
#else
    __trap();
#endif
}

}  // namespace flare::attention
