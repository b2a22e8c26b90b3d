// MLA decode, absorbed form, on Hopper:  S = scale Q [C | K_rope]^T,  P = softmax(S),  O = P C.
//
// A block owns 64 query rows (row = query token * heads + head) and a share of the key blocks of 64 latent rows. The
// latent tile is read once from memory: all 576 columns are the key, the first 512 of the same bytes are the value.
// O [64, 512] fp32 takes half of the register file, so two consumer warpgroups hold 256 columns each (L and R); block i
// of a piece is scored by its owner, warpgroup i mod 2, which hands P to the other one through shared memory.
// Two row tiles with the same keys run in decode_cluster_sm90.cuh instead.
//
// Roles: warpgroup 0 loads (one warp by TMA, or all four: small pages, token indices; decode_load_sm90.cuh),
// warpgroups 1 and 2 compute. For each own block i, warpgroup w does
//     rope and own half of S_i | O += P_{i-1} V_{i-1} (P from smem), hand the half back | other half of S_i
//     softmax, publish P_i in halves | O += P_i V_i (P in registers; waited for at the next own block)
// so the other warpgroup's softmax has tensor work beside it, and a half of V goes back for the block after next as
// soon as its last reader is through.
//
// Shared memory (bytes)                          Registers: loading 40, consumers 232 (O 128, S 32, P 16);
//     Q        9 chunks [64][64]       73,728               gathering: 56 and 224
//     K        2 x 9 chunks [64][64]  147,456    chunk c = columns 64c.., 128-byte swizzle; chunk 8 = rope
//     P        [64][64]                 8,192    P_i is read by the warpgroup that writes P_{i+1}: one buffer is enough
//     max      [64] fp32                  256    m_i, published with P_i
//     sums     [2][2][64] fp32          1,024    exchange of row sums, by piece parity
//     page ids [6][4]                   1,024    of the next blocks; with token indices biases [4][64]
//     barriers, share, turns              244
//
// Barrier           count        arrives                                waits
//     q_full        1 + tx       producer                               consumers, once a piece
//     q_empty       8            each consumer warp after its last S    producer
//     k_full[2][5]  1 + tx       producer                               owner of the block: rope, then chunks by two
//                   (128         gathering: each producer thread, for the rope chunk each warp once more)
//     k_empty[2][3] 4            rope: owner's warps after S;           producer
//                                L, R: that warpgroup's warps after PV
//     p_full[2][2]  4            owner's warps after half of P (and m)  the other warpgroup
//     named 1, 2    128          a warpgroup: zeroing the rows beyond the length
//     named 3       256          consumers: row sums at the end of a piece, the merge
//
// Buffer   written by               read by          ordering
//     Q, K     TMA                  wgmma            mbarrier; back: wait_group, arrive
//     K        cp.async (gathering) wgmma            mbarrier, then fence.proxy.async in each reader
//     K tail   st.shared (zeros)    wgmma            fence.proxy.async in each writer, named barrier
//     P        stmatrix             wgmma            fence.proxy.async in each writer, mbarrier
//     Q, K     st.shared, cp.async  ld.shared        the merge, after everything else: named barrier 3
//
// One H200, bf16, 128 sequences of 4,096 keys, 64 heads: 163 us (3.8 TB/s).
// docs/kernels/mla.md.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

#include "../ptx/mbarrier.cuh"
#include "../ptx/sync.cuh"
#include "../ptx/tma.cuh"
#include "decode_compute_sm90.cuh"
#include "decode_layout.cuh"
#include "decode_load_sm90.cuh"

namespace flare::mla {

template <typename T, decode::Load kLoad>
__global__ void __launch_bounds__(decode::kThreads, 1)
    mla_decode_sm90_kernel(const __grid_constant__ DecodeArgs args, const __grid_constant__ CUtensorMap map_q,
                           const __grid_constant__ CUtensorMap map_q_rope, const __grid_constant__ CUtensorMap map_kv,
                           const __grid_constant__ CUtensorMap map_values) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
    using namespace decode;
    extern __shared__ uint8_t smem_bytes[];
    SharedStorage& smem = *reinterpret_cast<SharedStorage*>(smem_bytes);
    using Merger = decode::Merger<T, DecodeArgs, SharedStorage, kTileRows, 128, kBarrierConsumers>;
    const uint32_t warp = ptx::uniform_warp_idx();
    const int lane = static_cast<int>(threadIdx.x % 32);
    const int part = static_cast<int>(blockIdx.x) / args.num_tiles;
    const int tile = static_cast<int>(blockIdx.x) - part * args.num_tiles;

    if (warp == 0) {
        Share share;
        compute_share(args.schedule, part, lane, share);
        if (lane == 0) {
            smem.share = share;
        }
    } else if (warp == 1 && ptx::elect_one()) {
        ptx::prefetch_tensor_map(&map_q);
        ptx::prefetch_tensor_map(&map_q_rope);
        ptx::prefetch_tensor_map(&map_kv);
        ptx::prefetch_tensor_map(&map_values);
        ptx::mbarrier_init(ptx::smem_addr(&smem.q_full), 1);
        ptx::mbarrier_init(ptx::smem_addr(&smem.q_empty), 8);
        for (int buffer = 0; buffer < 2; ++buffer) {
            for (int group = 0; group < kGroups; ++group) {
                const int gathering = group == 0 ? GatherProducer::kRopeArrivals : 128;
                ptx::mbarrier_init(ptx::smem_addr(&smem.k_full[buffer][group]),
                                   kLoad == Load::kGather ? gathering : 1);
            }
            for (int j = 0; j < 3; ++j) {
                ptx::mbarrier_init(ptx::smem_addr(&smem.k_empty[buffer][j]), 4);
            }
            ptx::mbarrier_init(ptx::smem_addr(&smem.p_full[buffer][0]), 4);
            ptx::mbarrier_init(ptx::smem_addr(&smem.p_full[buffer][1]), 4);
        }
        ptx::fence_mbarrier_init();
    } else if (kLoad == Load::kTma && warp == 2 && ptx::elect_one()) {
        prefetch_first_page(args, part);
    }
    __syncthreads();

    if (threadIdx.x == 128) {
        Merger{args, smem, tile}.open();
    }
    if (warp < 4) {
        ptx::setmaxnreg_dec<loader_regs(kLoad)>();
        const Producer producer{{args, &map_q, &map_q_rope, &map_kv, &map_values, smem, lane}};
        if constexpr (kLoad == Load::kGather) {
            const GatherProducer gather{args, producer, smem, static_cast<int>(threadIdx.x)};
            gather.run(tile);
        } else if (warp == 0) {
            producer.run(tile);
        }
    } else {
        ptx::setmaxnreg_inc<consumer_regs(kLoad)>();
        Consumer<T, kLoad> consumer{args, smem, warp / 4 - 1, warp % 4, lane};
        consumer.run(tile);
        Merger{args, smem, static_cast<int>(ptx::block_idx()) % args.num_tiles}.run();
    }
#else
    __trap();
#endif
}

}  // namespace flare::mla
