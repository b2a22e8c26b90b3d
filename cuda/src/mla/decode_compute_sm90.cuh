// Computing role of the Hopper MLA decode kernel: one of the two consumer warpgroups.
#pragma once

#include <cstdint>

#include "../ptx/ldst.cuh"
#include "../ptx/math.cuh"
#include "../ptx/mbarrier.cuh"
#include "../ptx/sync.cuh"
#include "../ptx/wgmma.cuh"
#include "../tile/fragment.cuh"
#include "../tile/smem_desc.cuh"
#include "../tile/smem_layout.cuh"
#include "decode_layout.cuh"
#include "decode_merge_sm90.cuh"

namespace flare::mla::decode {

using tile::Swizzle;

// Four lanes of a quad hold columns 8g + 2q, 8g + 2q + 1 of group g in x[g]; afterwards lane q holds group q in x.
__device__ __forceinline__ void transpose_quad(uint32_t (&x)[4], int lane) {
#pragma unroll
    for (int step = 1; step <= 2; step *= 2) {
        const bool upper = (lane & step) != 0;
#pragma unroll
        for (int j = 0; j < 2; ++j) {
            const int low = step == 1 ? 2 * j : j;
            const int high = low + step;
            const uint32_t sent = upper ? x[low] : x[high];
            const uint32_t got = __shfl_xor_sync(0xffffffffu, sent, step);
            x[low] = upper ? got : x[low];
            x[high] = upper ? x[high] : got;
        }
    }
}

// A thread's scores of two rows and one block of keys: turned over where the scale is negative.
__device__ __forceinline__ void negate_scores(float (&s)[32]) {
#pragma unroll
    for (int i = 0; i < 32; ++i) {
        s[i] = -s[i];
    }
}

// Masked from each row's limit on, for a block whose first key is key0.
__device__ __forceinline__ void mask_keys(float (&s)[32], int key0, int lane, const int (&limit)[2]) {
    const int col0 = key0 + 2 * (lane % 4);
#pragma unroll
    for (int i = 0; i < 32; ++i) {
        if (col0 + 8 * (i / 4) + i % 2 >= limit[(i / 2) % 2]) {
            s[i] = -INFINITY;
        }
    }
}

// And taken into m. a: the factors for O, and for sum, which is multiplied here; base: what is subtracted from scores.
__device__ __forceinline__ void raise_maxima(const float (&s)[32], float scale_log2, float (&m)[2], float (&sum)[2], float (&a)[2],
                                             float (&base)[2]) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        float top = s[2 * r];
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            top = fmaxf(top, fmaxf(s[4 * i + 2 * r], s[4 * i + 2 * r + 1]));
        }
        const float grown = fmaxf(m[r], tile::quad_max(top) * scale_log2);
        const float to = grown - m[r] > kRescaleThreshold ? grown : m[r];
        a[r] = to == m[r] ? 1.0f : ptx::exp2_approx(m[r] - to);
        m[r] = to;
        base[r] = to == -INFINITY ? 0.0f : to;
        sum[r] *= a[r];
    }
}

// ---------------------------------------------------------------------------------------------------------------------
// Consumer: one warpgroup; wg = 0 holds the value columns 0-255, wg = 1 256-511.

template <typename T, Load kLoad>
struct Consumer {
    const DecodeArgs& args;
    SharedStorage& smem;
    uint32_t wg;
    uint32_t warp;  // in the warpgroup
    int lane;

    // Gathered keys come late: O += P_{i-1} V_{i-1} and its half of the buffer don't wait for the first of K_i.
    static constexpr bool kValuesFirst = kLoad == Load::kGather;

    uint32_t g0 = 0;            // key blocks before this piece
    uint32_t pieces_done = 0;   // bit 0: parity of those with keys, bit 1: of all
    uint32_t other_parity = 0;  // of the P hand-offs from the other warpgroup

    float m[2];    // running maxima of the thread's two rows, log2 units
    float sum[2];  // this thread's part of the row sums over its own blocks

    __device__ __forceinline__ void release(uint32_t bar) const {
        if (lane == 0) {
            ptx::mbarrier_arrive(bar);
        }
    }

    // kSteps k-steps of S = Q K^T over the chunks from `chunk` on, behind full barrier `group`.
    template <int kSteps>
    __device__ __forceinline__ void scores(float (&s)[32], uint32_t buffer, uint32_t phase, int group, int chunk,
                                           int accumulate) const {
        ptx::mbarrier_wait(ptx::smem_addr(&smem.k_full[buffer][group]), phase);
        if constexpr (kLoad == Load::kGather) {
            ptx::fence_proxy_async_smem();
        }
        ptx::wgmma_fence();
        const uint64_t desc_q = tile::make_desc_k<Swizzle::k128>(ptx::smem_addr(smem.q) + chunk * kChunkBytes);
        const uint64_t desc_k = tile::make_desc_k<Swizzle::k128>(ptx::smem_addr(smem.k[buffer]) + chunk * kChunkBytes);
#pragma unroll
        for (int kk = 0; kk < kSteps; ++kk) {
            const uint32_t offset = tile::step_k<Swizzle::k128>(kk, kBlockKeys);
            ptx::wgmma_ss<T, 64>(s, tile::advance_desc(desc_q, offset), tile::advance_desc(desc_k, offset),
                                 kk != 0 || accumulate);
        }
    }

    __device__ __forceinline__ void scores_rope(float (&s)[32], uint32_t buffer, uint32_t phase) const {
        scores<4>(s, buffer, phase, 0, kRopeChunk, 0);
    }

    __device__ __forceinline__ void scores_half(float (&s)[32], uint32_t buffer, uint32_t phase, uint32_t half) const {
        scores<8>(s, buffer, phase, 1 + 2 * half, 4 * half, 1);
        scores<8>(s, buffer, phase, 2 + 2 * half, 4 * half + 2, 1);
    }

    __device__ __forceinline__ uint64_t value_desc(uint32_t buffer) const {
        return tile::make_desc_mn<Swizzle::k128>(ptx::smem_addr(smem.k[buffer]) + wg * 4 * kChunkBytes, kBlockKeys);
    }

    __device__ __forceinline__ void rescale(float (&o)[128], float a0, float a1) const {
        if (__any_sync(0xffffffffu, a0 != 1.0f || a1 != 1.0f)) {
#pragma unroll
            for (int i = 0; i < 128; i += 4) {
                o[i] *= a0;
                o[i + 1] *= a0;
                o[i + 2] *= a1;
                o[i + 3] *= a1;
            }
        }
    }

    // Masks the scores of a block whose first key is key0 and takes them into m and sum. a: the factors for O, base: what
    // exponentiate() subtracts.
    __device__ __forceinline__ void take_scores(float (&s)[32], float (&a)[2], float (&base)[2], uint32_t g, int key0,
                                                const int (&limit)[2], bool masked) {
        if (args.negate) {
            negate_scores(s);
        }
        if constexpr (kLoad != Load::kTma) {
            if (args.indices != nullptr) {
                const uint32_t bias = ptx::smem_addr(smem.bias[g % kBiasSlots]) + 8 * (lane % 4);
#pragma unroll
                for (int i = 0; i < 32; i += 4) {
                    const float2 x = ptx::ld_shared_f2(bias + 8 * i);
                    s[i] += x.x;
                    s[i + 1] += x.y;
                    s[i + 2] += x.x;
                    s[i + 3] += x.y;
                }
            }
        }
        if (masked) {
            mask_keys(s, key0, lane, limit);
        }
        raise_maxima(s, args.scale_log2, m, sum, a, base);
    }

    // Keys [32 kHalf, +32) of the block: exponentials, their part of the row sums, P.
    template <int kHalf>
    __device__ __forceinline__ void exponentiate(float (&s)[32], const float (&base)[2], uint32_t (&p)[16]) {
#pragma unroll
        for (int i = 16 * kHalf; i < 16 * kHalf + 16; ++i) {
            const int r = (i / 2) % 2;
            s[i] = ptx::exp2_approx(fmaf(s[i], args.scale_log2, -base[r]));
            sum[r] += s[i];
        }
#pragma unroll
        for (int i = 8 * kHalf; i < 8 * kHalf + 8; ++i) {
            p[i] = ptx::pack2<T>(s[2 * i], s[2 * i + 1]);
        }
    }

    // Half of P to shared memory, for the other warpgroup; with the first half the maxima.
    template <int kHalf>
    __device__ __forceinline__ void publish(const uint32_t (&p)[16]) {
        const uint32_t row = warp * 16 + lane % 16;
#pragma unroll
        for (int kk = 2 * kHalf; kk < 2 * kHalf + 2; ++kk) {
            const uint32_t addr =
                tile::tile_addr<Swizzle::k128>(ptx::smem_addr(smem.p), kBlockKeys, row, 32 * kk + 16 * (lane / 16));
            ptx::stmatrix_x4(addr, p[4 * kk], p[4 * kk + 1], p[4 * kk + 2], p[4 * kk + 3]);
        }
        if (kHalf == 0 && lane % 4 == 0) {
            smem.row_max[warp * 16 + lane / 4] = m[0];
            smem.row_max[warp * 16 + lane / 4 + 8] = m[1];
        }
        ptx::fence_proxy_async_smem();
        __syncwarp();
        if (lane == 0) {
            ptx::mbarrier_arrive(ptx::smem_addr(&smem.p_full[wg][kHalf]));
        }
    }

    // Softmax of an own block, in halves: the other warpgroup multiplies the first while this one exponentiates the second.
    __device__ __forceinline__ void softmax(float (&s)[32], uint32_t (&p)[16], float (&a)[2], uint32_t g, int key0,
                                            const int (&limit)[2], bool masked) {
        float base[2];
        take_scores(s, a, base, g, key0, limit, masked);
        exponentiate<0>(s, base, p);
        publish<0>(p);
        exponentiate<1>(s, base, p);
        publish<1>(p);
    }

    // Waits for the first half of the other warpgroup's P and takes over its maxima.
    __device__ __forceinline__ void receive(float (&a)[2]) {
        ptx::mbarrier_wait(ptx::smem_addr(&smem.p_full[wg ^ 1][0]), other_parity);
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            const float to = smem.row_max[warp * 16 + lane / 4 + 8 * r];
            a[r] = to == m[r] ? 1.0f : ptx::exp2_approx(m[r] - to);
            m[r] = to;
            sum[r] *= a[r];
        }
    }

    // After receive().
    __device__ __forceinline__ void values_from_smem(float (&o)[128], uint32_t buffer) {
        const uint64_t desc_p = tile::make_desc_k<Swizzle::k128>(ptx::smem_addr(smem.p));
        const uint64_t desc_v = value_desc(buffer);
#pragma unroll
        for (int kk = 0; kk < 4; ++kk) {
            if (kk == 2) {
                ptx::mbarrier_wait(ptx::smem_addr(&smem.p_full[wg ^ 1][1]), other_parity);
                ptx::wgmma_fence();
            }
            ptx::wgmma_ss<T, kHalfCols, 0, 1>(o, tile::advance_desc(desc_p, 32 * kk),
                                              tile::advance_desc(desc_v, tile::step_mn<Swizzle::k128>(kk)), 1);
        }
        other_parity ^= 1;
    }

    template <int kHalf>
    __device__ __forceinline__ void values_from_registers(float (&o)[128], const uint32_t (&p)[16],
                                                          uint32_t buffer) const {
        const uint64_t desc_v = value_desc(buffer);
#pragma unroll
        for (int kk = 2 * kHalf; kk < 2 * kHalf + 2; ++kk) {
            ptx::wgmma_rs<T, kHalfCols, 1>(o, p[4 * kk], p[4 * kk + 1], p[4 * kk + 2], p[4 * kk + 3],
                                           tile::advance_desc(desc_v, tile::step_mn<Swizzle::k128>(kk)), 1);
        }
    }

    // 0 * NaN = NaN: rows beyond the length must be zero before they meet P = 0. This warpgroup's half of the last
    // block.
    __device__ __forceinline__ void zero_tail(uint32_t buffer, int valid) const {
        const uint32_t base = ptx::smem_addr(smem.k[buffer]) + wg * 4 * kChunkBytes;
        const uint32_t zeros[4] = {0, 0, 0, 0};
        const int pieces = (kBlockKeys - valid) * 8;  // of 16 bytes, per chunk
        for (int i = static_cast<int>(warp) * 32 + lane; i < pieces; i += 128) {
#pragma unroll
            for (int chunk = 0; chunk < 4; ++chunk) {
                ptx::st_shared_v4(base + chunk * kChunkBytes + valid * 128 + i * 16, zeros);
            }
        }
        ptx::fence_proxy_async_smem();
        ptx::named_barrier_sync(kBarrierWarpgroup + wg, 128);
    }

    // Row r of this thread's two, times inv: 16 bytes a store.
    __device__ __forceinline__ void store_row(T* out, const float (&o)[128], int r, float inv, bool inside, int columns) const {
#pragma unroll
        for (int j = 0; j < 8; ++j) {
            uint32_t x[4];
#pragma unroll
            for (int k = 0; k < 4; ++k) {
                const int i = 16 * j + 4 * k + 2 * r;
                x[k] = ptx::pack2<T>(o[i] * inv, o[i + 1] * inv);
            }
            transpose_quad(x, lane);
            const int column = static_cast<int>(wg) * kHalfCols + 32 * j + 8 * (lane % 4);
            if (inside && column < columns) {
                ptx::st_global_v4(out + column, x);
            }
        }
    }

    __device__ __forceinline__ void write_whole(const float (&o)[128], const Piece& piece, int tile) const {
        const RowMap::Span span = args.row_map.span(piece.request);
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            const int row = tile * kTileRows + warp * 16 + lane / 4 + 8 * r;
            const int token = row / args.row_map.heads;
            const int head = row - token * args.row_map.heads;
            const bool inside = token < span.num_tokens;
            const float sink =
                args.sink != nullptr && inside ? __ldg(args.sink + head) * 1.44269504088896340736f : -INFINITY;
            float lse;
            const float inv = normaliser(m[r], sum[r], sink, lse);
            if (args.lse != nullptr && wg == 0 && lane % 4 == 0 && inside) {
                args.lse[span.batch * args.lse_stride_b + head * args.lse_stride_h + span.first_token + token] = lse;
            }
            T* out = static_cast<T*>(args.out) + span.batch * args.out_stride_b +
                     (span.first_token + token) * args.out_stride_s + head * args.out_stride_h;
            store_row(out, o, r, inv, inside, args.d_c);
        }
    }

    __device__ __forceinline__ void write_part(const float (&o)[128], int slot, int tile) const {
        const int64_t rows = int64_t{args.num_tiles} * kTileRows;
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            const int row = tile * kTileRows + warp * 16 + lane / 4 + 8 * r;
            const bool inside = row < args.rows;
            const float inv = sum[r] > 0.0f ? 1.0f / sum[r] : 0.0f;
            if (wg == 0 && lane % 4 == 0 && inside) {
                args.lse_part[slot * rows + row] = sum[r] > 0.0f ? m[r] + ptx::log2_approx(sum[r]) : -INFINITY;
            }
            store_row(static_cast<T*>(args.o_part) + (slot * rows + row) * kValueCols, o, r, inv, inside, kValueCols);
        }
    }

    __device__ __forceinline__ void run_piece(const Piece& piece, int tile) {
        float o[128];
        float s[32];
        uint32_t p[16];
#pragma unroll
        for (int i = 0; i < 128; ++i) {
            o[i] = 0.0f;
        }
        m[0] = m[1] = -INFINITY;
        sum[0] = sum[1] = 0.0f;

        const int n = piece.end - piece.begin;
        const int num_tokens = args.row_map.span(piece.request).num_tokens;
        int limit[2];
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            const int token = (tile * kTileRows + static_cast<int>(warp) * 16 + lane / 4 + 8 * r) / args.row_map.heads;
            limit[r] = args.causal ? min(piece.len, piece.len - (num_tokens - 1 - token)) : piece.len;
        }
        const int full_keys = args.causal ? piece.len - (num_tokens - 1) : piece.len;  // seen by every row
        const int valid_last = piece.len - (piece.num_blocks - 1) * kBlockKeys;
        const bool has_tail = piece.end == piece.num_blocks && valid_last < kBlockKeys;

        if (n > 0) {
            ptx::mbarrier_wait(ptx::smem_addr(&smem.q_full), pieces_done & 1);
            pieces_done ^= 1;
            if (wg == 1 && n == 1) {
                release_q();
            }
        }
        float a[2];
        // Warpgroup 0's first block: nothing to take over yet.
        if (wg == 0 && n > 0) {
            const uint32_t buffer = g0 & 1;
            const uint32_t phase = (g0 >> 1) & 1;
            ptx::wgmma_fence();
            scores_rope(s, buffer, phase);
            scores_half(s, buffer, phase, 0);
            scores_half(s, buffer, phase, 1);
            ptx::wgmma_commit();
            ptx::wgmma_wait<0>();
            ptx::fence_registers(s);
            release(ptx::smem_addr(&smem.k_empty[buffer][0]));
            if (n <= 2) {
                release_q();
            }
            const int key0 = piece.begin * kBlockKeys;
            softmax(s, p, a, g0, key0, limit, key0 + kBlockKeys > full_keys);
            if (has_tail && n == 1) {
                zero_tail(buffer, valid_last);
            }
            ptx::fence_registers(o);
            ptx::fence_registers(p);
            ptx::wgmma_fence();
            values_from_registers<0>(o, p, buffer);
            values_from_registers<1>(o, p, buffer);
            ptx::wgmma_commit();
        }
#pragma unroll 1
        for (int i = 2 - static_cast<int>(wg); i < n; i += 2) {
            const uint32_t g = g0 + i;
            const uint32_t buffer = g & 1;
            const uint32_t phase = (g >> 1) & 1;
            ptx::wgmma_wait<0>();  // P_{i-2} V_{i-2}
            ptx::fence_registers(o);
            ptx::fence_registers(p);
            if (i >= 2) {
                release(ptx::smem_addr(&smem.k_empty[buffer][1 + wg]));
            }
            ptx::fence_registers(s);
            if constexpr (!kValuesFirst) {
                ptx::wgmma_fence();
                scores_rope(s, buffer, phase);
                scores_half(s, buffer, phase, wg);
                ptx::wgmma_commit();
            }

            receive(a);
            rescale(o, a[0], a[1]);
            ptx::fence_registers(o);
            ptx::wgmma_fence();
            values_from_smem(o, buffer ^ 1);
            ptx::wgmma_commit();
            ptx::wgmma_wait<0>();  // P_{i-1} V_{i-1}: hand its half back before waiting for the rest of K_i
            ptx::fence_registers(o);
            ptx::fence_registers(s);
            release(ptx::smem_addr(&smem.k_empty[buffer ^ 1][1 + wg]));

            ptx::wgmma_fence();
            if constexpr (kValuesFirst) {
                scores_rope(s, buffer, phase);
                scores_half(s, buffer, phase, wg);
            }
            scores_half(s, buffer, phase, wg ^ 1);
            ptx::wgmma_commit();
            ptx::wgmma_wait<0>();
            ptx::fence_registers(s);
            release(ptx::smem_addr(&smem.k_empty[buffer][0]));
            if (i + 2 >= n) {
                release_q();
            }

            const int key0 = (piece.begin + i) * kBlockKeys;
            float base[2];
            take_scores(s, a, base, g, key0, limit, key0 + kBlockKeys > full_keys);
            exponentiate<0>(s, base, p);
            rescale(o, a[0], a[1]);
            if (has_tail && i + 1 == n) {
                zero_tail(buffer, valid_last);
            }
            ptx::fence_registers(o);
            ptx::fence_registers(p);
            ptx::wgmma_fence();
            values_from_registers<0>(o, p, buffer);
            publish<0>(p);
            exponentiate<1>(s, base, p);
            publish<1>(p);
            ptx::wgmma_fence();
            values_from_registers<1>(o, p, buffer);
            ptx::wgmma_commit();
        }
        ptx::wgmma_wait<0>();
        ptx::fence_registers(o);
        ptx::fence_registers(p);
        if (n > 0) {
            const uint32_t last_buffer = (g0 + n - 1) & 1;
            const bool own_last = ((n - 1) & 1) == static_cast<int>(wg);
            if (own_last) {
                release(ptx::smem_addr(&smem.k_empty[last_buffer][1 + wg]));
            } else {
                if (n > 1) {
                    release(ptx::smem_addr(&smem.k_empty[last_buffer ^ 1][1 + wg]));
                }
                receive(a);
                rescale(o, a[0], a[1]);
                if (has_tail) {
                    zero_tail(last_buffer, valid_last);
                }
                ptx::fence_registers(o);
                ptx::wgmma_fence();
                values_from_smem(o, last_buffer);
                ptx::wgmma_commit();
                ptx::wgmma_wait<0>();
                ptx::fence_registers(o);
                release(ptx::smem_addr(&smem.k_empty[last_buffer][1 + wg]));
            }
        }
        g0 += n;

        // Each warpgroup has summed its own blocks.
        float* mine = smem.row_sum[pieces_done / 2][wg];
        const float* theirs = smem.row_sum[pieces_done / 2][wg ^ 1];
        pieces_done ^= 2;
        const int row = warp * 16 + lane / 4;
        sum[0] = tile::quad_sum(sum[0]);
        sum[1] = tile::quad_sum(sum[1]);
        if (lane % 4 == 0) {
            mine[row] = sum[0];
            mine[row + 8] = sum[1];
        }
        ptx::named_barrier_sync(kBarrierConsumers, 256);
        sum[0] = wg == 0 ? sum[0] + theirs[row] : theirs[row] + sum[0];
        sum[1] = wg == 0 ? sum[1] + theirs[row + 8] : theirs[row + 8] + sum[1];
        if (piece.whole()) {
            write_whole(o, piece, tile);
        } else {
            const int part = static_cast<int>(ptx::block_idx()) / args.num_tiles;
            write_part(o, 2 * part + (piece.begin > 0 ? 0 : 1), tile);
        }
    }

    __device__ __forceinline__ void release_q() const {
        if (lane == 0) {
            ptx::mbarrier_arrive(ptx::smem_addr(&smem.q_empty));
        }
    }

    __device__ __forceinline__ void run(int tile) {
        PieceIterator it(smem.share);
        Piece piece;
        while (it.advance(args.schedule, piece)) {
            run_piece(piece, tile);
        }
    }
};

}  // namespace flare::mla::decode
