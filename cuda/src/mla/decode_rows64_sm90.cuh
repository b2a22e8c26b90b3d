// Computing role of the decode kernel over 656-byte rows for 64 query rows: wgmma on transposed products, whose A operand, keys or
// values, is made in registers from the raw bytes.
//
//     S^T [64 keys, 64 rows] = K Q^T       each of the two warpgroups over half of the channels; a warp has 16 keys
//     O^T [512 channels, 64 rows] = V^T P^T    each warpgroup 256 channels; a warp has 16 of every 64
//
// The A fragments of mma.sync and of wgmma are the same, so bytes become fragments as in decode_rows_sm90.cuh: channels in the order
// 4t, 4t + 1 | 4t + 2, 4t + 3 of 16 (Q lies in the same order), even channels as rows 0-7 and odd ones as rows 8-15 of 16.
//
// Two tiles of 32 keys at a time:
//     partial scores to shared memory | barrier | softmax, four threads a row; P, times the scales | barrier | O += P V
//
// q and p are written by st.shared and read by wgmma: fence.proxy.async in each writer, then the named barrier.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <type_traits>

#include "../ptx/wgmma.cuh"
#include "../tile/smem_desc.cuh"
#include "../tile/smem_layout.cuh"
#include "decode_rows_load_sm90.cuh"

namespace flare::mla {
namespace rows {

template <typename T>
struct WgmmaComputer {
    using S = Shape<4>;
    static constexpr auto kSwizzle = tile::Swizzle::k128;
    static constexpr int kRows = S::kRows;
    static constexpr int kMTiles = 4;  // of 64 channels, of a warpgroup
    static constexpr int kRowThreads = 32 * kWarps / kRows;
    static constexpr int kThreadKeys = 2 * kKeys / kRowThreads;
    static constexpr int kAcc = kRows / 2;  // registers of a product
    const RowsArgs& args;
    SharedStorage<4>& smem;
    int warp;  // 0 .. 7
    int lane;

    uint32_t g0 = 0;  // tiles before this piece

    __device__ __forceinline__ int wg() const { return warp / 4; }
    __device__ __forceinline__ int thread() const { return 32 * warp + lane; }
    __device__ __forceinline__ void barrier() const { ptx::named_barrier_sync(kBarrierCompute, 32 * kWarps); }

    // The threads of a row share out the steps of 16 channels.
    __device__ __forceinline__ void load_q(const RowMap::Span& span, int row_tile) const {
        const int local = thread() / kRowThreads;
        const int row = row_tile * kRows + local;
        const int token = row / args.row_map.heads;
        const int head = row - token * args.row_map.heads;
        const bool inside = token < span.num_tokens;
        const int64_t batch = span.batch;
        const int64_t at = span.first_token + token;
        const uint16_t* latent = static_cast<const uint16_t*>(args.q) + batch * args.q_stride_b + at * args.q_stride_s +
                                 head * args.q_stride_h;
        const uint16_t* rope = static_cast<const uint16_t*>(args.q_rope) + batch * args.q_rope_stride_b +
                               at * args.q_rope_stride_s + head * args.q_rope_stride_h;
        const uint32_t base = ptx::smem_addr(smem.q[0]);
        constexpr int kSteps = kLatentSteps + kRopeSteps;
#pragma unroll
        for (int i = 0; i < (kSteps + kRowThreads - 1) / kRowThreads; ++i) {
            const int step = i * kRowThreads + thread() % kRowThreads;
            if (step >= kSteps) {
                break;
            }
            uint4 x = make_uint4(0, 0, 0, 0);
            uint4 y = make_uint4(0, 0, 0, 0);
            if (inside) {
                const uint16_t* src = step < kLatentSteps ? latent + 16 * step : rope + 16 * (step - kLatentSteps);
                x = __ldg(reinterpret_cast<const uint4*>(src));
                y = __ldg(reinterpret_cast<const uint4*>(src) + 1);
            }
            uint32_t a[8] = {x.x, x.y, x.z, x.w, y.x, y.y, y.z, y.w};
            const uint32_t to0 = tile::tile_addr<kSwizzle>(base, kRows, local, 32 * step);
            const uint32_t to1 = tile::tile_addr<kSwizzle>(base, kRows, local, 32 * step + 16);
            if (step >= kLatentSteps) {
                ptx::st_shared_v4(to0, {a[0], a[1], a[2], a[3]});
                ptx::st_shared_v4(to1, {a[4], a[5], a[6], a[7]});
                continue;
            }
            if (std::is_same_v<T, __nv_bfloat16> && !args.q_is_fp16) {
#pragma unroll
                for (uint32_t& pair : a) {
                    pair = bf16_to_fp16(pair);
                }
            }
            ptx::st_shared_v4(to0, {a[0], a[2], a[4], a[6]});
            ptx::st_shared_v4(to1, {a[1], a[3], a[5], a[7]});
        }
        ptx::fence_proxy_async_smem();
    }

    __device__ __forceinline__ uint64_t q_desc(int step) const {
        return tile::advance_desc(tile::make_desc_k<kSwizzle>(ptx::smem_addr(smem.q[0])), tile::step_k<kSwizzle>(step, kRows));
    }

    // This warpgroup's channels of S^T; `tile` has this warp's keys, from `key` on.
    __device__ __forceinline__ void scores(float (&s)[kAcc], uint32_t tile, int key) const {
        const uint32_t row = tile + (key + lane % 16) * kRowBytes + lane / 16 * 16;
        // Scales of rows lane / 4 and lane / 4 + 8 of the fragment. The first group's products are brought to the second
        // group's scale; a scale of 0 may not divide.
        float scale[2][2];
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            const float2 x = ptx::ld_shared_f2(tile + (key + lane / 4 + 8 * r) * kRowBytes + kScaleAt + 8 * wg());
            scale[r][1] = fabsf(x.y) < 1e-20f ? 1e-20f : x.y;
            scale[r][0] = x.x / scale[r][1];
        }
        // Batches of four steps, the fragments of one made while the products of the one before run.
        uint32_t a[2][4][4];
        make_keys(a[0], row, 16 * wg());
        issue(s, a[0], 16 * wg(), 0);
        make_keys(a[1], row, 16 * wg() + 4);
        issue(s, a[1], 16 * wg() + 4, 1);
        wait<1>(a[0]);
        make_keys(a[0], row, 16 * wg() + 8);
        wait<0>(a[1]);
        rescale(s, scale[0][0], scale[1][0]);
        issue(s, a[0], 16 * wg() + 8, 1);
        make_keys(a[1], row, 16 * wg() + 12);
        issue(s, a[1], 16 * wg() + 12, 1);
        wait<1>(a[0]);
        uint32_t rope[2][4];
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            ptx::ldmatrix_x4(rope[i], row + kRopeAt + 32 * (2 * wg() + i));
            if constexpr (std::is_same_v<T, __half>) {  // bf16 in the cache
#pragma unroll
                for (uint32_t& pair : rope[i]) {
                    pair = bf16_to_fp16(pair);
                }
            }
        }
        wait<0>(a[1]);
        rescale(s, scale[0][1], scale[1][1]);
        ptx::fence_registers(s);
        ptx::fence_registers(rope[0]);
        ptx::fence_registers(rope[1]);
        ptx::wgmma_fence();
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            ptx::wgmma_rs<T, kRows, 0>(s, rope[i][0], rope[i][1], rope[i][2], rope[i][3],
                                       q_desc(kLatentSteps + 2 * wg() + i), 1);
        }
        ptx::wgmma_commit();
        ptx::wgmma_wait<0>();
        ptx::fence_registers(s);
        ptx::fence_registers(rope[0]);
        ptx::fence_registers(rope[1]);
    }

    // A fragments of four steps from `first` on.
    __device__ __forceinline__ void make_keys(uint32_t (&a)[4][4], uint32_t row, int first) const {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            uint32_t raw[4];
            ptx::ldmatrix_x4(raw, row + 16 * (first + 2 * i));
            e4m3_to_fp16(raw[0], a[2 * i][0], a[2 * i][2]);
            e4m3_to_fp16(raw[1], a[2 * i][1], a[2 * i][3]);
            e4m3_to_fp16(raw[2], a[2 * i + 1][0], a[2 * i + 1][2]);
            e4m3_to_fp16(raw[3], a[2 * i + 1][1], a[2 * i + 1][3]);
        }
    }

    __device__ __forceinline__ void issue(float (&s)[kAcc], uint32_t (&a)[4][4], int first, int accumulate) const {
        ptx::fence_registers(s);
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            ptx::fence_registers(a[i]);
        }
        ptx::wgmma_fence();
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            ptx::wgmma_rs<__half, kRows, 0>(s, a[i][0], a[i][1], a[i][2], a[i][3], q_desc(first + i), accumulate | i);
        }
        ptx::wgmma_commit();
        ptx::fence_registers(s);
    }

    template <int kPending>
    static __device__ __forceinline__ void wait(uint32_t (&a)[4][4]) {
        ptx::wgmma_wait<kPending>();
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            ptx::fence_registers(a[i]);
        }
    }

    static __device__ __forceinline__ void rescale(float (&s)[kAcc], float upper, float lower) {
        ptx::fence_registers(s);
#pragma unroll
        for (int i = 0; i < kAcc; ++i) {
            s[i] *= i / 2 % 2 == 0 ? upper : lower;
        }
    }

    __device__ __forceinline__ void hand_over(const float (&s)[kAcc]) const {
        const int key = 16 * (warp % 4) + lane / 4;
#pragma unroll
        for (int j = 0; j < kRows / 8; ++j) {
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                smem.scores[wg()][8 * j + 2 * (lane % 4) + i % 2][key + 8 * (i / 2)] = s[4 * j + i];
            }
        }
    }

    template <typename Op>
    static __device__ __forceinline__ float over_row(float x, Op op) {
#pragma unroll
        for (int offset = 1; offset < kRowThreads; offset *= 2) {
            x = op(x, __shfl_xor_sync(0xffffffffu, x, offset));
        }
        return x;
    }

    // Row thread() / kRowThreads; the threads of a row take four keys each by turns, whose scales fall on different banks. key0 is
    // the first key of the two tiles.
    __device__ __forceinline__ void softmax(float& top, float& sum, const uint32_t (&stage)[2], int key0, int limit,
                                            int full_keys) const {
        constexpr int kQuads = kThreadKeys / 4;
        const int row = thread() / kRowThreads;
        const int first = 4 * (thread() % kRowThreads);
        const auto key_of = [&](int i) { return first + i / 4 * 4 * kRowThreads + i % 4; };
        float x[kThreadKeys];
        bool masked = key0 + 2 * kKeys > full_keys;
#pragma unroll
        for (int i = 0; i < kThreadKeys; i += 4) {
            const float4 a = *reinterpret_cast<const float4*>(&smem.scores[0][row][key_of(i)]);
            const float4 b = *reinterpret_cast<const float4*>(&smem.scores[1][row][key_of(i)]);
            x[i] = (a.x + b.x) * args.scale_log2;
            x[i + 1] = (a.y + b.y) * args.scale_log2;
            x[i + 2] = (a.z + b.z) * args.scale_log2;
            x[i + 3] = (a.w + b.w) * args.scale_log2;
        }
        const uint32_t present[2] = {smem.present[stage[0]], smem.present[stage[1]]};
        masked = masked || (present[0] & present[1]) != 0xffffffffu;
        if (masked) {
#pragma unroll
            for (int i = 0; i < kThreadKeys; ++i) {
                const int key = key_of(i);
                if (!((key < kKeys ? present[0] : present[1]) >> key % kKeys & 1) || key0 + key >= limit) {
                    x[i] = -INFINITY;
                }
            }
        }
        float most = x[0];
#pragma unroll
        for (int i = 1; i < kThreadKeys; ++i) {
            most = fmaxf(most, x[i]);
        }
        const float grown = fmaxf(top, over_row(most, [](float a, float b) { return fmaxf(a, b); }));
        const float base = grown == -INFINITY ? 0.0f : grown;
        const float alpha = grown == top ? 1.0f : ptx::exp2_approx(top - base);
        top = grown;
        sum *= alpha;
#pragma unroll
        for (int i = 0; i < kThreadKeys; ++i) {
            x[i] = ptx::exp2_approx(x[i] - base);
            sum += x[i];
        }
        if (first == 0) {
            smem.factor[row] = alpha;
        }
#pragma unroll
        for (int quad = 0; quad < kQuads; ++quad) {
            const int key = key_of(4 * quad);
            const uint32_t scales =
                ptx::smem_addr(smem.k[key < kKeys ? stage[0] : stage[1]]) + key % kKeys * kRowBytes + kScaleAt;
            float by[4][4];
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                uint32_t bits[4];
                ptx::ld_shared_v4(bits, scales + i * kRowBytes);
#pragma unroll
                for (int k = 0; k < 4; ++k) {
                    by[i][k] = __uint_as_float(bits[k]);
                }
            }
#pragma unroll
            for (int k = 0; k < kCols / kScaleCols; ++k) {
                const uint32_t to =
                    tile::tile_addr<kSwizzle>(ptx::smem_addr(smem.p[k]), kRows, row, 2 * key / 16 * 16) + 2 * key % 16;
                ptx::st_shared_v2(to, ptx::pack2<__half>(x[4 * quad] * by[0][k], x[4 * quad + 1] * by[1][k]),
                                  ptx::pack2<__half>(x[4 * quad + 2] * by[2][k], x[4 * quad + 3] * by[3][k]));
            }
        }
        ptx::fence_proxy_async_smem();
    }

    __device__ __forceinline__ void values(float (&o)[kMTiles][kAcc], const uint32_t (&stage)[2]) const {
        uint32_t a[2][4][4];
#pragma unroll
        for (int m = 0; m < kMTiles; ++m) {
            uint32_t(&now)[4][4] = a[m % 2];
            const uint32_t column = lane * kRowBytes + 256 * wg() + 64 * m + 16 * (warp % 4);
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                uint32_t raw[4];
                ptx::ldmatrix_x4_trans(raw, ptx::smem_addr(smem.k[stage[i]]) + column);
#pragma unroll
                for (int k = 0; k < 4; ++k) {
                    e4m3_to_fp16(ptx::permute_bytes(raw[k], 0, 0x3120), now[2 * i + k / 2][k % 2 * 2],
                                 now[2 * i + k / 2][k % 2 * 2 + 1]);
                }
            }
            ptx::fence_registers(o[m]);
#pragma unroll
            for (int k = 0; k < 4; ++k) {
                ptx::fence_registers(now[k]);
            }
            ptx::wgmma_fence();
            const uint64_t desc = tile::make_desc_k<kSwizzle>(ptx::smem_addr(smem.p[2 * wg() + m / 2]));
#pragma unroll
            for (int k = 0; k < 4; ++k) {
                ptx::wgmma_rs<__half, kRows, 0>(o[m], now[k][0], now[k][1], now[k][2], now[k][3],
                                                tile::advance_desc(desc, 32 * k), 1);
            }
            ptx::wgmma_commit();
            if (m > 0) {
                ptx::wgmma_wait<1>();
#pragma unroll
                for (int k = 0; k < 4; ++k) {
                    ptx::fence_registers(a[(m + 1) % 2][k]);
                }
            }
        }
        ptx::wgmma_wait<0>();
#pragma unroll
        for (int m = 0; m < kMTiles; ++m) {
            ptx::fence_registers(o[m]);
        }
    }

    __device__ __forceinline__ void run_piece(const Piece& piece, int row_tile, int part) {
        const RowMap::Span span = args.row_map.span(piece.request);
        const int first = first_tile(piece);
        const int last = max(first, last_tile(piece));
        load_q(span, row_tile);
        float o[kMTiles][kAcc];
#pragma unroll
        for (int m = 0; m < kMTiles; ++m) {
#pragma unroll
            for (int i = 0; i < kAcc; ++i) {
                o[m][i] = 0.0f;
            }
        }
        const int my_token = (row_tile * kRows + thread() / kRowThreads) / args.row_map.heads;
        const int limit = args.causal ? min(piece.len, piece.len - (span.num_tokens - 1 - my_token)) : piece.len;
        const int full_keys = args.causal ? piece.len - (span.num_tokens - 1) : piece.len;
        float top = -INFINITY;
        float sum = 0.0f;
        barrier();  // queries are there
#pragma unroll 1
        for (int t = first; t < last; t += 2) {
            const uint32_t g = g0 + (t - first);
            const uint32_t stage[2] = {g % S::kStages, (g + 1) % S::kStages};
            const uint32_t phase = g / S::kStages & 1;
            ptx::mbarrier_wait(ptx::smem_addr(&smem.full[stage[0]]), phase);
            ptx::mbarrier_wait(ptx::smem_addr(&smem.full[stage[1]]), phase);
            float s[kAcc];
            scores(s, ptx::smem_addr(smem.k[warp % 4 < 2 ? stage[0] : stage[1]]), 16 * (warp % 2));
            hand_over(s);
            barrier();
            softmax(top, sum, stage, t * kKeys, limit, full_keys);
            barrier();
            float2 alpha[kRows / 8];
            bool grown = false;
#pragma unroll
            for (int j = 0; j < kRows / 8; ++j) {
                alpha[j] = *reinterpret_cast<const float2*>(&smem.factor[8 * j + 2 * (lane % 4)]);
                grown = grown || alpha[j].x != 1.0f || alpha[j].y != 1.0f;
            }
            if (__any_sync(0xffffffffu, grown)) {
#pragma unroll
                for (int m = 0; m < kMTiles; ++m) {
#pragma unroll
                    for (int j = 0; j < kRows / 8; ++j) {
                        o[m][4 * j] *= alpha[j].x;
                        o[m][4 * j + 1] *= alpha[j].y;
                        o[m][4 * j + 2] *= alpha[j].x;
                        o[m][4 * j + 3] *= alpha[j].y;
                    }
                }
            }
            values(o, stage);
            __syncwarp();
            if (lane == 0) {
                ptx::mbarrier_arrive(ptx::smem_addr(&smem.empty[stage[0]]));
                ptx::mbarrier_arrive(ptx::smem_addr(&smem.empty[stage[1]]));
            }
        }
        g0 += (last - first + 1) / 2 * 2;
        finish(o, top, over_row(sum, [](float a, float b) { return a + b; }), piece, span, row_tile, part);
    }

    __device__ __forceinline__ void finish(const float (&o)[kMTiles][kAcc], float top, float sum, const Piece& piece,
                                           const RowMap::Span& span, int row_tile, int part) const {
        const bool whole = piece.whole();
        const int slot = 2 * part + (piece.begin == 0 ? 1 : 0);
        const int64_t part_row = (int64_t{slot} * args.num_tiles + row_tile) * kRows;
        barrier();  // factors have been read
        {
            const int local = thread() / kRowThreads;
            const int row = row_tile * kRows + local;
            const int token = row / args.row_map.heads;
            const int head = row - token * args.row_map.heads;
            const bool inside = token < span.num_tokens;
            const bool writes = thread() % kRowThreads == 0;
            float inv;
            if (whole) {
                const float sink =
                    args.sink != nullptr && inside ? __ldg(args.sink + head) * 1.44269504088896340736f : -INFINITY;
                float lse;
                inv = normaliser(top, sum, sink, lse);
                if (writes && inside && args.lse != nullptr) {
                    args.lse[span.batch * args.lse_stride_b + head * args.lse_stride_h + span.first_token + token] = lse;
                }
            } else {
                inv = sum > 0.0f ? 1.0f / sum : 0.0f;
                if (writes && row < args.rows) {
                    args.lse_part[part_row + local] = sum > 0.0f ? top + ptx::log2_approx(sum) : -INFINITY;
                }
            }
            if (writes) {
                smem.factor[local] = inv;
            }
        }
        barrier();
        const int column = 256 * wg() + 16 * (warp % 4) + 2 * (lane / 4);
#pragma unroll
        for (int j = 0; j < kRows / 8; ++j) {
#pragma unroll
            for (int e = 0; e < 2; ++e) {
                const int local = 8 * j + 2 * (lane % 4) + e;
                const int row = row_tile * kRows + local;
                const int token = row / args.row_map.heads;
                const int head = row - token * args.row_map.heads;
                if (whole ? token >= span.num_tokens : row >= args.rows) {
                    continue;
                }
                const float inv = smem.factor[local];
                T* const out = whole ? static_cast<T*>(args.out) + span.batch * args.out_stride_b +
                                           (span.first_token + token) * args.out_stride_s + head * args.out_stride_h
                                     : static_cast<T*>(args.o_part) + (part_row + local) * kCols;
#pragma unroll
                for (int m = 0; m < kMTiles; ++m) {
                    *reinterpret_cast<uint32_t*>(out + column + 64 * m) =
                        ptx::pack2<T>(o[m][4 * j + e] * inv, o[m][4 * j + 2 + e] * inv);
                }
            }
        }
        barrier();  // factors and queries are free again
    }
};

}  // namespace rows
}  // namespace flare::mla
