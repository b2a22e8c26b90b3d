// MLA decode on Hopper for two tiles of 64 query rows with the same keys: a cluster of two blocks, one tile each, that
// fetches every latent row once for both by multicast. The maths is that of decode_sm90.cuh.
//
// A block has three warpgroups besides the one that loads: one scores all key blocks, S = scale Q K^T and softmax, two
// hold 256 columns of O each. Scores need no accumulators of O beside them, so most of Q lives in registers: its
// shared memory goes to keys, eleven slots of 64 rows x 128 columns instead of two whole blocks, and a score product
// reads one operand instead of two. While a block's softmax runs, the tensor cores multiply the P of the block before:
// P_{i-1} is handed over only when most of S_i has been issued, else those products would run beside S_i and none
// beside the softmax.
//
// Shared memory (bytes)                          Registers: loading 32, scores 160 (Q 96, S 32), values 160 (O 128)
//     Q        3 chunks [64][64]       24,576    chunks 4, 5 and rope of Q's nine, as in K; 0-5 pass through the ring
//     K        11 pairs [2][64][64]   180,224    ring; pair j of a block = columns 128j.., 128-byte swizzle
//     rope     [64][64]                 8,192
//     P        2 x [64][64]            16,384
//     factors  [2][64] fp32               512    of O, with P
//     maxima, sums [3][64] fp32         1,536    by turns of the pieces
//     page ids, pieces, share, barriers, turns
//
// Barrier           count      arrives                                       waits
//     q_full        1 + tx     loader                                        scoring warpgroup, once a piece
//     q_empty       4          scoring warps after the last S                loader
//     k_full[11]    1 + tx     loader (tx: also the peer's copies)           scoring warpgroup
//     k_empty[11]   8          after its last product, in both blocks: the   loaders of both blocks
//                              warpgroup of the pair's columns; where it
//                              was a part of Q, the scoring one
//     rope_full     1 + tx     loader                                        scoring warpgroup
//     rope_empty    8          scoring warps of both blocks after S          loaders of both blocks
//     p_full[2]     4          scoring warps                                 both value warpgroups
//     p_empty[2]    8          value warps                                   scoring warpgroup
//     named 1, 2    128        a value warpgroup: zeroing the rows beyond the length
//     named 3       256        both: the merge
//
// Buffer   written by           read by     ordering
//     Q, K     TMA              wgmma       mbarrier; back: wait_group, arrive
//     Q        TMA              ldmatrix    mbarrier; back: after the first S, which has read the registers
//     K tail   st.shared        wgmma       fence.proxy.async in each writer, named barrier
//     P        stmatrix         wgmma       fence.proxy.async in each writer, mbarrier
//     factors  st.shared        ld.shared   the mbarriers of P
//     maxima.. st.shared        ld.shared   p_full of a piece's last block; back: p_empty of any later block
//     Q, K     st.shared, ..    ld.shared   the merge, after everything else: named barrier 3
//
// One H200, bf16, 128 sequences of 4,096 keys, 128 heads: 243-249 us (586-600 TFLOP/s); two query tokens: 440-452 us.
// docs/kernels/mla.md.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

#include "../ptx/ldst.cuh"
#include "../ptx/math.cuh"
#include "../ptx/mbarrier.cuh"
#include "../ptx/sync.cuh"
#include "../ptx/tma.cuh"
#include "../ptx/wgmma.cuh"
#include "../tile/fragment.cuh"
#include "../tile/smem_desc.cuh"
#include "../tile/smem_layout.cuh"
#include "decode_compute_sm90.cuh"
#include "decode_layout.cuh"
#include "decode_load_sm90.cuh"
#include "decode_merge_sm90.cuh"

namespace flare::mla {
namespace decode::cluster {

using tile::Swizzle;

inline constexpr int kBlocks = 2;  // of a cluster
inline constexpr int kThreads = 512;
inline constexpr int kSlots = 11;
inline constexpr int kPairs = 4;  // of chunks, without rope
inline constexpr uint32_t kPairBytes = 2 * kChunkBytes;
inline constexpr int kPairCols = 128;
inline constexpr int kQRegChunks = 6;  // of Q, in registers of the scoring warpgroup
inline constexpr int kQItems = kQRegChunks / 2;
inline constexpr int kPBuffers = 2;
// Maxima and sums of a piece's rows are read after its last P has been handed back, so scores can be two more pieces
// ahead.
inline constexpr uint32_t kStatistics = kPBuffers + 1;
// P_{i-1} is handed over after so many pairs of S_i have been issued. One H200, 128 x 4,096 keys, 128 heads, two query
// tokens: 488 us after one, 456 after two, 440 after three.
inline constexpr int kHandOver = 3;

inline constexpr uint32_t kLoaderRegs = 32;
inline constexpr uint32_t kScorerRegs = 160;
inline constexpr uint32_t kValueRegs = 160;
static_assert(kLoaderRegs + kScorerRegs + 2 * kValueRegs <= 65536 / 128, "more registers than the launch has");

struct Storage {
    alignas(1024) uint8_t q[(kChunks - kQRegChunks) * kChunkBytes];
    alignas(1024) uint8_t k[kSlots * kPairBytes];
    alignas(1024) uint8_t rope[kChunkBytes];
    alignas(1024) uint8_t p[kPBuffers][kBlockKeys * 128];
    float factor[kPBuffers][kTileRows];
    float row_max[kStatistics][kTileRows];
    float row_sum[kStatistics][kTileRows];
    uint64_t q_full;
    uint64_t q_empty;
    uint64_t k_full[kSlots];
    uint64_t k_empty[kSlots];
    uint64_t rope_full;
    uint64_t rope_empty;
    uint64_t p_full[kPBuffers];
    uint64_t p_empty[kPBuffers];
    Share share;
    alignas(16) int32_t page_ids[kPageIdSlots][kMaxBoxGroups];
    Piece pieces[8];  // of the value warps
    Turn turns[2];
};
static_assert(sizeof(Storage) <= 232448, "shared memory of a Hopper block");

// Position in the ring.
struct Cursor {
    uint32_t slot = 0;
    uint32_t phase = 0;

    __device__ __forceinline__ void advance() {
        if (++slot == kSlots) {
            slot = 0;
            phase ^= 1;
        }
    }
};

// Hands a buffer that wgmma has read back to the loaders of both blocks.
__device__ __forceinline__ void release(uint32_t bar, int lane) {
    if (lane < kBlocks) {
        ptx::mbarrier_arrive_remote_relaxed(bar, lane);
    }
}

// ---------------------------------------------------------------------------------------------------------------------
// One warp. Half of what both blocks want is fetched by each.

struct Loader : BoxLoader<kBlocks, Storage> {
    uint32_t cta_rank;

    template <int kPair>
    __device__ __forceinline__ void load_pair(const Source& source, Cursor& at) const {
        ptx::mbarrier_wait(ptx::smem_addr(&smem.k_empty[at.slot]), at.phase ^ 1);
        const uint32_t bar = ptx::smem_addr(&smem.k_full[at.slot]);
        arm(bar, kPairBytes);
        if (kPair % 2 == cta_rank) {
            load_chunks<2 * kPair, 2>(source, ptx::smem_addr(smem.k) + at.slot * kPairBytes, bar);
        }
        at.advance();
    }

    __device__ __forceinline__ void run(int tile) const {
        PieceIterator it(smem.share);
        Piece piece;
        Cursor at;
        uint32_t q_phase = 1;
        uint32_t rope_phase = 1;
        while (it.advance(args.schedule, piece)) {
            if (piece.begin == piece.end) {
                continue;
            }
#pragma unroll
            for (int j = 0; j < 4; ++j) {
                request_pages(piece, piece.begin + j);
            }
#pragma unroll 1
            for (int item = 0; item < kQItems; ++item) {
                ptx::mbarrier_wait(ptx::smem_addr(&smem.k_empty[at.slot]), at.phase ^ 1);
                load_q(piece.request, tile, 2 * item, 2 * item + 2,
                       ptx::smem_addr(smem.k) + at.slot * kPairBytes, ptx::smem_addr(&smem.k_full[at.slot]));
                at.advance();
            }
            ptx::mbarrier_wait(ptx::smem_addr(&smem.q_empty), q_phase);
            q_phase ^= 1;
            load_q(piece.request, tile, kQRegChunks, kChunks, ptx::smem_addr(smem.q), ptx::smem_addr(&smem.q_full));
#pragma unroll 1
            for (int block = piece.begin; block < piece.end; ++block) {
                request_pages(piece, block + 4);
                ptx::cp_async_wait<4>();  // the entries of this block
                const Source source = locate(piece, block);
                load_pair<0>(source, at);
                load_pair<1>(source, at);
                load_pair<2>(source, at);
                load_pair<3>(source, at);
                ptx::mbarrier_wait(ptx::smem_addr(&smem.rope_empty), rope_phase);
                rope_phase ^= 1;
                arm(ptx::smem_addr(&smem.rope_full), kChunkBytes);
                if (rope_phase == cta_rank) {
                    load_chunks<kRopeChunk, 1>(source, ptx::smem_addr(smem.rope), ptx::smem_addr(&smem.rope_full));
                }
            }
        }
    }
};

// ---------------------------------------------------------------------------------------------------------------------
// One warpgroup: scores and softmax of all key blocks.

template <typename T>
struct Scorer {
    const DecodeArgs& args;
    Storage& smem;
    uint32_t warp;  // in the warpgroup
    int lane;

    Cursor at;
    uint32_t blocks = 0;
    uint32_t q_parity = 0;
    uint32_t turn = 0;  // of the statistics

    float m[2];
    float sum[2];

    __device__ __forceinline__ void hand_over(uint32_t block) const {
        if (lane == 0) {
            ptx::mbarrier_arrive(ptx::smem_addr(&smem.p_full[block % kPBuffers]));
        }
    }

    __device__ __forceinline__ void run_piece(const Piece& piece, int tile) {
        const int n = piece.end - piece.begin;
        if (n == 0) {
            return;
        }
        const int num_tokens = args.row_map.span(piece.request).num_tokens;
        int limit[2];
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            const int token = (tile * kTileRows + static_cast<int>(warp) * 16 + lane / 4 + 8 * r) / args.row_map.heads;
            limit[r] = args.causal ? min(piece.len, piece.len - (num_tokens - 1 - token)) : piece.len;
        }
        const int full_keys = args.causal ? piece.len - (num_tokens - 1) : piece.len;
        m[0] = m[1] = -INFINITY;
        sum[0] = sum[1] = 0.0f;

        uint32_t q[4 * kQRegChunks][4];
        const uint32_t first_slot = at.slot;
#pragma unroll
        for (int item = 0; item < kQItems; ++item) {
            ptx::mbarrier_wait(ptx::smem_addr(&smem.k_full[at.slot]), at.phase);
            const uint32_t base = ptx::smem_addr(smem.k) + at.slot * kPairBytes;
#pragma unroll
            for (int kk = 0; kk < 8; ++kk) {
                ptx::ldmatrix_x4(q[8 * item + kk], tile::tile_addr<Swizzle::k128>(base, kBlockKeys, warp * 16 + lane % 16,
                                                                                 32 * kk + 16 * (lane / 16)));
            }
            at.advance();
        }
        ptx::mbarrier_wait(ptx::smem_addr(&smem.q_full), q_parity);
        q_parity ^= 1;

        const uint64_t desc_q = tile::make_desc_k<Swizzle::k128>(ptx::smem_addr(smem.q));
        float s[32];
#pragma unroll 1
        for (int i = 0; i < n; ++i) {
            ptx::fence_registers(s);
#pragma unroll
            for (int pair = 0; pair < kPairs; ++pair) {
                ptx::mbarrier_wait(ptx::smem_addr(&smem.k_full[at.slot]), at.phase);
                ptx::wgmma_fence();
                const uint64_t desc_k = tile::make_desc_k<Swizzle::k128>(ptx::smem_addr(smem.k) + at.slot * kPairBytes);
#pragma unroll
                for (int kk = 0; kk < 8; ++kk) {
                    const int step = 8 * pair + kk;
                    const uint64_t b = tile::advance_desc(desc_k, tile::step_k<Swizzle::k128>(kk, kBlockKeys));
                    if (step < 4 * kQRegChunks) {
                        ptx::wgmma_rs<T, 64>(s, q[step][0], q[step][1], q[step][2], q[step][3], b, step != 0);
                    } else {
                        ptx::wgmma_ss<T, 64>(
                            s, tile::advance_desc(desc_q, tile::step_k<Swizzle::k128>(step - 4 * kQRegChunks, kBlockKeys)), b, 1);
                    }
                }
                if (pair + 1 == kHandOver && i > 0) {
                    hand_over(blocks - 1);
                }
                at.advance();
            }
            ptx::mbarrier_wait(ptx::smem_addr(&smem.rope_full), blocks & 1);
            ptx::wgmma_fence();
            {
                const uint64_t desc_k = tile::make_desc_k<Swizzle::k128>(ptx::smem_addr(smem.rope));
#pragma unroll
                for (int kk = 0; kk < 4; ++kk) {
                    ptx::wgmma_ss<T, 64>(
                        s, tile::advance_desc(desc_q, tile::step_k<Swizzle::k128>(4 * (kRopeChunk - kQRegChunks) + kk, kBlockKeys)),
                        tile::advance_desc(desc_k, tile::step_k<Swizzle::k128>(kk, kBlockKeys)), 1);
                }
            }
            ptx::wgmma_commit();
            ptx::wgmma_wait<0>();
            ptx::fence_registers(s);
            release(ptx::smem_addr(&smem.rope_empty), lane);
            if (i == 0) {
                uint32_t slot = first_slot;
#pragma unroll 1
                for (int item = 0; item < kQItems; ++item) {
                    release(ptx::smem_addr(&smem.k_empty[slot]), lane);
                    slot = slot + 1 == kSlots ? 0 : slot + 1;
                }
            }
            const bool last = i + 1 == n;
            if (last && lane == 0) {
                ptx::mbarrier_arrive(ptx::smem_addr(&smem.q_empty));
            }

            const int key0 = (piece.begin + i) * kBlockKeys;
            float a[2];
            float base[2];
            if (args.negate) {
                negate_scores(s);
            }
            if (key0 + kBlockKeys > full_keys) {
                mask_keys(s, key0, lane, limit);
            }
            raise_maxima(s, args.scale_log2, m, sum, a, base);
            uint32_t p[16];
#pragma unroll
            for (int j = 0; j < 32; ++j) {
                const int r = (j / 2) % 2;
                s[j] = ptx::exp2_approx(fmaf(s[j], args.scale_log2, -base[r]));
                sum[r] += s[j];
            }
#pragma unroll
            for (int j = 0; j < 16; ++j) {
                p[j] = ptx::pack2<T>(s[2 * j], s[2 * j + 1]);
            }
            const uint32_t buffer = blocks % kPBuffers;
            ptx::mbarrier_wait(ptx::smem_addr(&smem.p_empty[buffer]), (blocks / kPBuffers & 1) ^ 1);
            const uint32_t row = warp * 16 + lane % 16;
#pragma unroll
            for (int kk = 0; kk < 4; ++kk) {
                const uint32_t addr =
                    tile::tile_addr<Swizzle::k128>(ptx::smem_addr(smem.p[buffer]), kBlockKeys, row, 32 * kk + 16 * (lane / 16));
                ptx::stmatrix_x4(addr, p[4 * kk], p[4 * kk + 1], p[4 * kk + 2], p[4 * kk + 3]);
            }
            const uint32_t my_row = warp * 16 + lane / 4;
            if (lane % 4 == 0) {
                smem.factor[buffer][my_row] = a[0];
                smem.factor[buffer][my_row + 8] = a[1];
            }
            if (last) {
                sum[0] = tile::quad_sum(sum[0]);
                sum[1] = tile::quad_sum(sum[1]);
                if (lane % 4 == 0) {
                    smem.row_max[turn][my_row] = m[0];
                    smem.row_max[turn][my_row + 8] = m[1];
                    smem.row_sum[turn][my_row] = sum[0];
                    smem.row_sum[turn][my_row + 8] = sum[1];
                }
            }
            ptx::fence_proxy_async_smem();
            __syncwarp();
            if (last) {
                hand_over(blocks);
            }
            ++blocks;
        }
        turn = turn + 1 == kStatistics ? 0 : turn + 1;
    }

    __device__ __forceinline__ void run(int tile) {
        PieceIterator it(smem.share);
        Piece piece;
        while (it.advance(args.schedule, piece)) {
            run_piece(piece, tile);
        }
    }
};

// ---------------------------------------------------------------------------------------------------------------------
// Two warpgroups: O += P V, warpgroup wg the value columns of pairs wg and wg + 2.

template <typename T>
struct Accumulator {
    const DecodeArgs& args;
    Storage& smem;
    uint32_t wg;

    uint32_t slot = 0;  // first of the next block, or queries
    uint32_t blocks = 0;
    uint32_t turn = 0;  // of the statistics

    // Read anew: there is no register to keep them in.
    static __device__ __forceinline__ uint32_t thread() { return ptx::thread_idx() % 128; }
    __device__ __forceinline__ int tile() const { return static_cast<int>(ptx::block_idx()) % args.num_tiles; }

    __device__ __forceinline__ uint32_t later(uint32_t by) const {
        const uint32_t x = slot + by;
        return x >= kSlots ? x - kSlots : x;
    }

    __device__ __forceinline__ void rescale(float (&o)[64], float a0, float a1) const {
#pragma unroll
        for (int i = 0; i < 64; i += 4) {
            o[i] *= a0;
            o[i + 1] *= a0;
            o[i + 2] *= a1;
            o[i + 3] *= a1;
        }
    }

    __device__ __forceinline__ void multiply(float (&o)[64], uint32_t buffer, uint32_t at) const {
        const uint64_t desc_p = tile::make_desc_k<Swizzle::k128>(ptx::smem_addr(smem.p[buffer]));
        const uint64_t desc_v = tile::make_desc_mn<Swizzle::k128>(ptx::smem_addr(smem.k) + at * kPairBytes, kBlockKeys);
#pragma unroll
        for (int kk = 0; kk < 4; ++kk) {
            ptx::wgmma_ss<T, kPairCols, 0, 1>(o, tile::advance_desc(desc_p, 32 * kk),
                                              tile::advance_desc(desc_v, tile::step_mn<Swizzle::k128>(kk)), 1);
        }
        ptx::wgmma_commit();
    }

    // 0 * NaN = NaN: rows beyond the length must be zero before they meet P = 0.
    __device__ __forceinline__ void zero_tail(uint32_t at0, uint32_t at1, int valid) const {
        const uint32_t zeros[4] = {0, 0, 0, 0};
        const int pieces = (kBlockKeys - valid) * 8;  // of 16 bytes, per chunk
        for (int i = static_cast<int>(thread()); i < pieces; i += 128) {
#pragma unroll
            for (int chunk = 0; chunk < 4; ++chunk) {
                ptx::st_shared_v4(ptx::smem_addr(smem.k) + (chunk < 2 ? at0 : at1) * kPairBytes + chunk % 2 * kChunkBytes +
                                      valid * 128 + i * 16,
                                  zeros);
            }
        }
        ptx::fence_proxy_async_smem();
        ptx::named_barrier_sync(kBarrierWarpgroup + wg, 128);
    }

    // Row r of this thread's two, times inv: 16 bytes a store.
    __device__ __forceinline__ void store_row(T* out, const float (&o0)[64], const float (&o1)[64], int r, float inv,
                                              bool inside, int columns) const {
        const int lane = static_cast<int>(thread() % 32);
#pragma unroll
        for (int j = 0; j < 8; ++j) {
            uint32_t x[4];
#pragma unroll
            for (int k = 0; k < 4; ++k) {
                const int i = 16 * (j % 4) + 4 * k + 2 * r;
                x[k] = j < 4 ? ptx::pack2<T>(o0[i] * inv, o0[i + 1] * inv) : ptx::pack2<T>(o1[i] * inv, o1[i + 1] * inv);
            }
            transpose_quad(x, lane);
            const int column = static_cast<int>(j / 4 * 2 + wg) * kPairCols + 32 * (j % 4) + 8 * (lane % 4);
            if (inside && column < columns) {
                ptx::st_global_v4(out + column, x);
            }
        }
    }

    // Where row r of this thread's two goes and what to multiply it by; its LSE. Null: nowhere.
    __device__ __forceinline__ T* finish_row(const Piece& piece, int r, float m, float sum, float& inv) const {
        const int row = tile() * kTileRows + static_cast<int>(thread() / 32 * 16 + thread() % 32 / 4) + 8 * r;
        const bool writes_lse = wg == 0 && thread() % 4 == 0;
        if (piece.whole()) {
            const RowMap::Span span = args.row_map.span(piece.request);
            const int token = row / args.row_map.heads;
            const int head = row - token * args.row_map.heads;
            if (token >= span.num_tokens) {
                return nullptr;
            }
            const float sink = args.sink != nullptr ? __ldg(args.sink + head) * 1.44269504088896340736f : -INFINITY;
            float lse;
            inv = normaliser(m, sum, sink, lse);
            if (args.lse != nullptr && writes_lse) {
                args.lse[span.batch * args.lse_stride_b + head * args.lse_stride_h + span.first_token + token] = lse;
            }
            return static_cast<T*>(args.out) + span.batch * args.out_stride_b + (span.first_token + token) * args.out_stride_s +
                   head * args.out_stride_h;
        }
        if (row >= args.rows) {
            return nullptr;
        }
        const int part = static_cast<int>(ptx::block_idx()) / args.num_tiles;
        const int64_t at = (2 * part + (piece.begin > 0 ? 0 : 1)) * (int64_t{args.num_tiles} * kTileRows) + row;
        inv = sum > 0.0f ? 1.0f / sum : 0.0f;
        if (writes_lse) {
            args.lse_part[at] = sum > 0.0f ? m + ptx::log2_approx(sum) : -INFINITY;
        }
        return static_cast<T*>(args.o_part) + at * kValueCols;
    }

    __device__ __forceinline__ void run_piece(const Piece& piece_in) {
        float o0[64];
        float o1[64];
#pragma unroll
        for (int i = 0; i < 64; ++i) {
            o0[i] = o1[i] = 0.0f;
        }
        const int n = ptx::uniform(piece_in.end - piece_in.begin);
        const int valid_last = piece_in.len - (piece_in.num_blocks - 1) * kBlockKeys;
        const int valid = ptx::uniform(piece_in.end == piece_in.num_blocks ? valid_last : kBlockKeys);
        Piece& kept = smem.pieces[ptx::thread_idx() / 32 - 4];
        if (ptx::thread_idx() % 32 == 0) {
            kept = piece_in;
        }
        if (n > 0) {
            slot = later(kQItems);
        }
#pragma unroll 1
        for (int i = 0; i < n; ++i) {
            const uint32_t thread = this->thread();
            const uint32_t buffer = blocks % kPBuffers;
            ptx::mbarrier_wait(ptx::smem_addr(&smem.p_full[buffer]), blocks / kPBuffers & 1);
            ++blocks;
            const float* const factor = smem.factor[buffer] + thread / 32 * 16 + thread % 32 / 4;
            const float a0 = factor[0];
            const float a1 = factor[8];
            if (__any_sync(0xffffffffu, a0 != 1.0f || a1 != 1.0f)) {
                rescale(o0, a0, a1);
                rescale(o1, a0, a1);
            }
            const uint32_t first = later(wg);
            const uint32_t second = later(wg + 2);
            if (valid < kBlockKeys && i + 1 == n) {
                zero_tail(first, second, valid);
            }
            ptx::fence_registers(o0);
            ptx::fence_registers(o1);
            ptx::wgmma_fence();
            multiply(o0, buffer, first);
            multiply(o1, buffer, second);
            ptx::wgmma_wait<1>();
            release(ptx::smem_addr(&smem.k_empty[first]), thread % 32);
            ptx::wgmma_wait<0>();
            ptx::fence_registers(o0);
            ptx::fence_registers(o1);
            release(ptx::smem_addr(&smem.k_empty[second]), thread % 32);
            __syncwarp();  // every lane has read its factors
            if (thread % 32 == 0) {
                ptx::mbarrier_arrive(ptx::smem_addr(&smem.p_empty[buffer]));
            }
            slot = later(kPairs);
        }
        __syncwarp();
        const Piece piece = kept;
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            const uint32_t row = thread() / 32 * 16 + thread() % 32 / 4 + 8 * r;
            const float m = n > 0 ? smem.row_max[turn][row] : -INFINITY;
            const float sum = n > 0 ? smem.row_sum[turn][row] : 0.0f;
            float inv = 0.0f;
            T* const out = finish_row(piece, r, m, sum, inv);
            store_row(out, o0, o1, r, inv, out != nullptr, piece.whole() ? args.d_c : kValueCols);
        }
        if (n > 0) {
            turn = turn + 1 == kStatistics ? 0 : turn + 1;
        }
        __syncwarp();
    }

    __device__ __forceinline__ void run() {
        PieceIterator it(smem.share);
        Piece piece;
        while (it.advance(args.schedule, piece)) {
            run_piece(piece);
        }
    }
};

}  // namespace decode::cluster

template <typename T>
__global__ void __launch_bounds__(decode::cluster::kThreads, 1)
    mla_decode_cluster_sm90_kernel(const __grid_constant__ DecodeArgs args, const __grid_constant__ CUtensorMap map_q,
                                const __grid_constant__ CUtensorMap map_q_rope, const __grid_constant__ CUtensorMap map_kv,
                                const __grid_constant__ CUtensorMap map_values) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
    using namespace decode;
    extern __shared__ uint8_t smem_bytes[];
    cluster::Storage& smem = *reinterpret_cast<cluster::Storage*>(smem_bytes);
    using Merger = decode::Merger<T, DecodeArgs, cluster::Storage, kTileRows, 128, kBarrierConsumers>;
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
        ptx::mbarrier_init(ptx::smem_addr(&smem.q_empty), 4);
        for (int slot = 0; slot < cluster::kSlots; ++slot) {
            ptx::mbarrier_init(ptx::smem_addr(&smem.k_full[slot]), 1);
            ptx::mbarrier_init(ptx::smem_addr(&smem.k_empty[slot]), 4 * cluster::kBlocks);
        }
        ptx::mbarrier_init(ptx::smem_addr(&smem.rope_full), 1);
        ptx::mbarrier_init(ptx::smem_addr(&smem.rope_empty), 4 * cluster::kBlocks);
        for (int i = 0; i < cluster::kPBuffers; ++i) {
            ptx::mbarrier_init(ptx::smem_addr(&smem.p_full[i]), 4);
            ptx::mbarrier_init(ptx::smem_addr(&smem.p_empty[i]), 8);
        }
        ptx::fence_mbarrier_init();
    } else if (warp == 2 && ptx::elect_one()) {
        prefetch_first_page(args, part);
    }
    __syncthreads();
    ptx::cluster_arrive();
    ptx::cluster_wait();

    if (threadIdx.x == 128) {
        Merger{args, smem, tile}.open();
    }
    if (warp < 4) {
        ptx::setmaxnreg_dec<cluster::kLoaderRegs>();
        if (warp == 0) {
            const cluster::Loader loader{{args, &map_q, &map_q_rope, &map_kv, &map_values, smem, lane},
                                         ptx::cluster_cta_rank()};
            loader.run(tile);
        }
    } else if (warp < 12) {
        ptx::setmaxnreg_inc<cluster::kValueRegs>();
        cluster::Accumulator<T> accumulator{args, smem, warp / 4 - 1};
        accumulator.run();
        Merger{args, smem, static_cast<int>(ptx::block_idx()) % args.num_tiles}.run();
    } else {
        ptx::setmaxnreg_inc<cluster::kScorerRegs>();
        cluster::Scorer<T> scorer{args, smem, warp % 4, lane};
        scorer.run(tile);
    }
    __syncthreads();  // the peer still multicasts into this block and arrives on its barriers
    ptx::cluster_arrive();
    ptx::cluster_wait();
#else
    __trap();
#endif
}

}  // namespace flare::mla
