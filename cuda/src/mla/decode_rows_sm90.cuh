// MLA decode over 656-byte rows on Hopper, for few query rows: mma.sync on fragments made from the raw bytes.
//
// A row is 512 e4m3 latents, four fp32 scales (one for 128 channels) and 64 bf16 rope values. Rows come to shared memory as
// they are, by bulk copies, and stay so: ldmatrix brings e4m3 bytes in pairs and cvt widens them to fp16, which holds them
// exactly, in the registers of the product's operand.
//
//     S = Q K^T     B needs channels c, c + 1 of a key in a register: a pair of bytes. A matrix of 8 keys x 16 bytes is
//                   b0 and b1 of 16 channels in the order 4t, 4t + 1 | 4t + 2, 4t + 3; the fragments of Q have the same order.
//     O = P V       B needs keys k, k + 1 of a channel: ldmatrix.trans brings two channels of two keys, a byte permutation
//                   sorts them by channel. The even channels make one column tile, the odd ones another.
//
// Scores of 128 channels are multiplied by the key's scale before they are added up; P is multiplied by the key's scale of
// the columns it meets. Nothing is rounded but Q (bf16 to fp16) and P.
//
// Warps: 0 to 3 load, 4 to 11 compute. Groups of 2 kTall warps take the key tiles by turns, and a warp has 1 / (2 kTall) of the
// channels and of the columns of O. For each tile of its group a warp does
//     partial scores, handed over | barrier | softmax of eight rows, P | barrier | O += P V, hand the tile back
// The groups drift apart, so that one's products fill another's latencies; at the end of a piece their results are merged.
//
// Barrier           count              arrives                                            waits
//     full[stages]  1 + tx             loading warp; the copies                           the group whose tile it is
//     empty[stages] warps of a group   after O += P V                                     loading warp
//     named 1       256                queries written; sums, slices of O written, read   all who compute
//     named 2-5     a group            partial scores written, P read; P written, partial scores read
//
// Buffer   written by          read by          ordering
//     k    bulk copies         ldmatrix         mbarrier; back: arrive
//     k    st.shared (zeros)   ldmatrix         __syncwarp, mbarrier; before the next copy fence.proxy.async in the writer
//     the rest by ordinary stores and loads
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <type_traits>

#include "../ptx/ldst.cuh"
#include "../ptx/math.cuh"
#include "../ptx/mbarrier.cuh"
#include "../ptx/mma_sync.cuh"
#include "../ptx/sync.cuh"
#include "../tile/fragment.cuh"
#include "decode_merge_sm90.cuh"
#include "decode_rows64_sm90.cuh"
#include "decode_rows_load_sm90.cuh"

namespace flare::mla {
namespace rows {

template <typename T, int kTall>
struct Computer {
    using S = Shape<kTall>;
    const RowsArgs& args;
    SharedStorage<kTall>& smem;
    int warp;  // 0 .. 7
    int lane;

    uint32_t g0 = 0;  // tiles before this piece

    __device__ __forceinline__ int group() const { return warp / S::kGroupWarps; }
    __device__ __forceinline__ int member() const { return warp % S::kGroupWarps; }

    // The fragments of the piece's queries, by all warps.
    __device__ __forceinline__ void load_q(const RowMap::Span& span, int row_tile) const {
        constexpr int kItems = (kLatentSteps + kRopeSteps) * kTall;
        constexpr int kRounds = (kItems + kWarps - 1) / kWarps;
#pragma unroll
        for (int i = 0; i < kRounds; ++i) {
            const int item = i * kWarps + warp;
            const int step = item / kTall;
            const int m = item % kTall;
            if (item >= kItems) {
                break;
            }
            uint32_t x[2][2] = {};
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const int row = row_tile * S::kRows + 16 * m + 8 * half + lane / 4;
                const int token = row / args.row_map.heads;
                const int head = row - token * args.row_map.heads;
                if (token < span.num_tokens) {
                    const int64_t batch = span.batch;
                    const int64_t at = span.first_token + token;
                    if (step < kLatentSteps) {
                        const uint16_t* src = static_cast<const uint16_t*>(args.q) + batch * args.q_stride_b +
                                              at * args.q_stride_s + head * args.q_stride_h + 16 * step + 4 * (lane % 4);
                        const uint2 pairs = __ldg(reinterpret_cast<const uint2*>(src));
                        x[half][0] = pairs.x;
                        x[half][1] = pairs.y;
                    } else {
                        const uint16_t* src = static_cast<const uint16_t*>(args.q_rope) + batch * args.q_rope_stride_b +
                                              at * args.q_rope_stride_s + head * args.q_rope_stride_h +
                                              16 * (step - kLatentSteps) + 2 * (lane % 4);
                        x[half][0] = __ldg(reinterpret_cast<const uint32_t*>(src));
                        x[half][1] = __ldg(reinterpret_cast<const uint32_t*>(src + 8));
                    }
                }
            }
            if (std::is_same_v<T, __nv_bfloat16> && step < kLatentSteps && !args.q_is_fp16) {
#pragma unroll
                for (int k = 0; k < 4; ++k) {
                    x[k / 2][k % 2] = bf16_to_fp16(x[k / 2][k % 2]);
                }
            }
            smem.q[step][m][lane] = make_uint4(x[0][0], x[1][0], x[0][1], x[1][1]);
        }
    }

    // One latent step of 16 channels: S += Q K^T over the tile's 32 keys.
    __device__ __forceinline__ void latent_scores(float (&s)[kTall][4][4], uint32_t tile, int step) const {
        uint32_t raw[4];
        ptx::ldmatrix_x4(raw, tile + lane * kRowBytes + 16 * step);
        uint32_t b[4][2];
#pragma unroll
        for (int n = 0; n < 4; ++n) {
            e4m3_to_fp16(raw[n], b[n][0], b[n][1]);
        }
        multiply<__half>(s, step, b);
    }

    // B fragments of 16 channels of 16 bits, 32 keys; both registers of a fragment come from one load, as mma wants them
    // adjacent.
    __device__ __forceinline__ void load_b(uint32_t (&b)[4][2], uint32_t tile, int byte) const {
        const uint32_t addr = tile + (lane / 16 * 8 + lane % 8) * kRowBytes + lane / 8 % 2 * 16 + byte;
#pragma unroll
        for (int i = 0; i < 4; i += 2) {
            uint32_t x[4];
            ptx::ldmatrix_x4(x, addr + 8 * i * kRowBytes);
            b[i][0] = x[0];
            b[i][1] = x[1];
            b[i + 1][0] = x[2];
            b[i + 1][1] = x[3];
        }
    }

    template <typename Type>
    __device__ __forceinline__ void multiply(float (&s)[kTall][4][4], int step, const uint32_t (&b)[4][2]) const {
#pragma unroll
        for (int m = 0; m < kTall; ++m) {
            uint32_t q[4];
            ptx::ld_shared_v4(q, ptx::smem_addr(&smem.q[step][m][lane]));
#pragma unroll
            for (int n = 0; n < 4; ++n) {
                ptx::mma_m16n8k16<Type>(s[m][n], q, b[n][0], b[n][1]);
            }
        }
    }

    // This warp's channels of the scores of a tile.
    __device__ __forceinline__ void scores(float (&s)[kTall][4][4], uint32_t tile) const {
        constexpr int kSteps = kScaleCols / 16;
#pragma unroll
        for (int part = 0; part < S::kScales; ++part) {
            const int scale = member() * S::kScales + part;
            float acc[kTall][4][4] = {};
#pragma unroll
            for (int kk = 0; kk < kSteps; ++kk) {
                latent_scores(acc, tile, scale * kSteps + kk);
            }
#pragma unroll
            for (int n = 0; n < 4; ++n) {
                float by[2];
                key_scales(by, tile, n, scale);
#pragma unroll
                for (int m = 0; m < kTall; ++m) {
#pragma unroll
                    for (int i = 0; i < 4; ++i) {
                        s[m][n][i] = part == 0 ? acc[m][n][i] * by[i % 2] : fmaf(acc[m][n][i], by[i % 2], s[m][n][i]);
                    }
                }
            }
        }
#pragma unroll
        for (int kk = 0; kk < kRopeSteps / S::kGroupWarps; ++kk) {
            const int step = member() * (kRopeSteps / S::kGroupWarps) + kk;
            uint32_t b[4][2];
            load_b(b, tile, kRopeAt + 32 * step);
            if constexpr (std::is_same_v<T, __half>) {  // bf16 in the cache
#pragma unroll
                for (int n = 0; n < 4; ++n) {
                    b[n][0] = bf16_to_fp16(b[n][0]);
                    b[n][1] = bf16_to_fp16(b[n][1]);
                }
            }
            multiply<T>(s, kLatentSteps + step, b);
        }
    }

    // Scales of this thread's two keys of column tile n.
    __device__ __forceinline__ void key_scales(float (&by)[2], uint32_t tile, int n, int scale) const {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const uint32_t at = tile + (8 * n + 2 * (lane % 4) + i) * kRowBytes + kScaleAt + 4 * scale;
            by[i] = __uint_as_float(ptx::ld_shared_b32(at));
        }
    }

    // Hands each warp of the group the partial scores of its eight rows.
    __device__ __forceinline__ void hand_over(const float (&s)[kTall][4][4]) const {
        float4 (*const all)[S::kGroupWarps][2][32] = smem.exchange.scores[group()];
#pragma unroll
        for (int to = 0; to < S::kGroupWarps; ++to) {
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                const float(&a)[4] = s[to / 2][2 * i];
                const float(&b)[4] = s[to / 2][2 * i + 1];
                const int r = to % 2 * 2;
                all[to][member()][i][lane] = make_float4(a[r], a[r + 1], b[r], b[r + 1]);
            }
        }
    }

    // The sums of what was handed to this warp: row lane / 4, keys 8n + 2 (lane % 4) and the next in x[2n], x[2n + 1].
    __device__ __forceinline__ void add_up(float (&x)[8]) const {
        const float4 (*const mine)[2][32] = smem.exchange.scores[group()][member()];
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            x[i] = 0.0f;
        }
#pragma unroll
        for (int from = 0; from < S::kGroupWarps; ++from) {
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                const float4 y = mine[from][i][lane];
                x[4 * i] += y.x;
                x[4 * i + 1] += y.y;
                x[4 * i + 2] += y.z;
                x[4 * i + 3] += y.w;
            }
        }
    }

    __device__ __forceinline__ void group_barrier() const {
        ptx::named_barrier_sync(kBarrierGroup + group(), 32 * S::kGroupWarps);
    }

    // P of the warp's eight rows to shared memory, times the scales of the keys.
    __device__ __forceinline__ void publish(const float (&x)[8], uint32_t tile) const {
        constexpr int kWeights = kCols / kScaleCols;
        uint32_t p[kWeights][4];
#pragma unroll
        for (int n = 0; n < 4; ++n) {
            uint32_t by[2][4];
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                ptx::ld_shared_v4(by[i], tile + (8 * n + 2 * (lane % 4) + i) * kRowBytes + kScaleAt);
            }
#pragma unroll
            for (int k = 0; k < kWeights; ++k) {
                p[k][n] = ptx::pack2<__half>(x[2 * n] * __uint_as_float(by[0][k]), x[2 * n + 1] * __uint_as_float(by[1][k]));
            }
        }
        const uint32_t to = ptx::smem_addr(smem.exchange.p[group()][0][8 * member() + lane % 8]) + lane / 8 * 16;
#pragma unroll
        for (int k = 0; k < kWeights; ++k) {
            ptx::stmatrix_x4(to + k * S::kRows * kWeightPitch, p[k][0], p[k][1], p[k][2], p[k][3]);
        }
    }

    __device__ __forceinline__ void load_p(uint32_t (&p)[S::kScales][kTall][2][4]) const {
#pragma unroll
        for (int k = 0; k < S::kScales; ++k) {
            const uint32_t from =
                ptx::smem_addr(smem.exchange.p[group()][member() * S::kScales + k][lane % 16]) + lane / 16 * 16;
#pragma unroll
            for (int m = 0; m < kTall; ++m) {
#pragma unroll
                for (int kk = 0; kk < 2; ++kk) {
                    ptx::ldmatrix_x4(p[k][m][kk], from + m * 16 * kWeightPitch + 32 * kk);
                }
            }
        }
    }

    // O += P V over this warp's columns.
    __device__ __forceinline__ void values(float (&o)[kTall][S::kWarpCols / 8][4],
                                           const uint32_t (&p)[S::kScales][kTall][2][4], uint32_t tile) const {
        const uint32_t row = tile + lane * kRowBytes + member() * S::kWarpCols;
#pragma unroll
        for (int j = 0; j < S::kWarpCols / 16; ++j) {
            uint32_t v[2][4];  // of the even and of the odd channels, 8 keys each
            uint32_t raw[4];
            ptx::ldmatrix_x4_trans(raw, row + 16 * j);
#pragma unroll
            for (int k = 0; k < 4; ++k) {
                e4m3_to_fp16(ptx::permute_bytes(raw[k], 0, 0x3120), v[0][k], v[1][k]);
            }
#pragma unroll
            for (int kk = 0; kk < 2; ++kk) {
#pragma unroll
                for (int m = 0; m < kTall; ++m) {
                    const uint32_t(&a)[4] = p[16 * j / kScaleCols][m][kk];
                    ptx::mma_m16n8k16<__half>(o[m][2 * j], a, v[0][2 * kk], v[0][2 * kk + 1]);
                    ptx::mma_m16n8k16<__half>(o[m][2 * j + 1], a, v[1][2 * kk], v[1][2 * kk + 1]);
                }
            }
        }
    }

    // Of this warp's eight rows: P and the factors of O to shared memory, the row's maximum and this lane's share of its sum.
    __device__ __forceinline__ void softmax(float& top, float& sum, uint32_t tile, uint32_t present, int key0, int limit,
                                            int full_keys) const {
        float x[8];
        add_up(x);
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            x[i] *= args.scale_log2;
        }
        if (present != 0xffffffffu || key0 + kKeys > full_keys) {
#pragma unroll
            for (int i = 0; i < 8; ++i) {
                const int key = 8 * (i / 2) + 2 * (lane % 4) + i % 2;
                if (!(present >> key & 1) || key0 + key >= limit) {
                    x[i] = -INFINITY;
                }
            }
        }
        float most = x[0];
#pragma unroll
        for (int i = 1; i < 8; ++i) {
            most = fmaxf(most, x[i]);
        }
        const float grown = fmaxf(top, tile::quad_max(most));
        const float base = grown == -INFINITY ? 0.0f : grown;
        const float alpha = grown == top ? 1.0f : ptx::exp2_approx(top - base);
        top = grown;
        sum *= alpha;
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            x[i] = ptx::exp2_approx(x[i] - base);
            sum += x[i];
        }
        publish(x, tile);
        if (lane % 4 == 0) {
            smem.factor[group()][8 * member() + lane / 4] = alpha;
        }
    }

    __device__ __forceinline__ void run_piece(const Piece& piece, int row_tile, int part) {
        const RowMap::Span span = args.row_map.span(piece.request);
        const int first = first_tile(piece);
        const int last = max(first, last_tile(piece));
        load_q(span, row_tile);

        float o[kTall][S::kWarpCols / 8][4] = {};
        // Of this thread's row in the softmax, the same in four lanes but for sum, which is this lane's share.
        const int my_row = row_tile * S::kRows + 8 * member() + lane / 4;
        const int limit =
            args.causal ? min(piece.len, piece.len - (span.num_tokens - 1 - my_row / args.row_map.heads)) : piece.len;
        float top = -INFINITY;
        float sum = 0.0f;
        const int full_keys = args.causal ? piece.len - (span.num_tokens - 1) : piece.len;  // seen by every row
        ptx::named_barrier_sync(kBarrierCompute, 32 * kWarps);                              // queries are there

#pragma unroll 1
        for (int t = first + group(); t < last; t += S::kGroups) {
            const uint32_t g = g0 + (t - first);
            const uint32_t stage = g % S::kStages;
            const uint32_t tile = ptx::smem_addr(smem.k[stage]);
            ptx::mbarrier_wait(ptx::smem_addr(&smem.full[stage]), g / S::kStages & 1);
            float s[kTall][4][4];
            scores(s, tile);
            hand_over(s);
            group_barrier();  // also: P of the tile before has been read
            softmax(top, sum, tile, smem.present[stage], t * kKeys, limit, full_keys);
            group_barrier();  // also: the partial scores have been read
            uint32_t p[S::kScales][kTall][2][4];
            load_p(p);
#pragma unroll
            for (int m = 0; m < kTall; ++m) {
                const float alpha0 = smem.factor[group()][16 * m + lane / 4];
                const float alpha1 = smem.factor[group()][16 * m + 8 + lane / 4];
                if (__any_sync(0xffffffffu, alpha0 != 1.0f || alpha1 != 1.0f)) {
#pragma unroll
                    for (int n = 0; n < S::kWarpCols / 8; ++n) {
                        o[m][n][0] *= alpha0;
                        o[m][n][1] *= alpha0;
                        o[m][n][2] *= alpha1;
                        o[m][n][3] *= alpha1;
                    }
                }
            }
            values(o, p, tile);
            __syncwarp();
            if (lane == 0) {
                ptx::mbarrier_arrive(ptx::smem_addr(&smem.empty[stage]));
            }
        }
        g0 += last - first;
        finish(o, top, sum, piece, span, row_tile, part);
    }

    // Merges the groups' results and writes them.
    __device__ __forceinline__ void finish(float (&o)[kTall][S::kWarpCols / 8][4], float top, float sum, const Piece& piece,
                                           const RowMap::Span& span, int row_tile, int part) const {
        sum = tile::quad_sum(sum);
        if (lane % 4 == 0) {
            smem.top[group()][8 * member() + lane / 4] = top;
            smem.sum[group()][8 * member() + lane / 4] = sum;
        }
        ptx::named_barrier_sync(kBarrierCompute, 32 * kWarps);  // also: the tiles are through
        const bool whole = piece.whole();
        const int slot = 2 * part + (piece.begin == 0 ? 1 : 0);
        const int64_t part_row = (int64_t{slot} * args.num_tiles + row_tile) * S::kRows;
        float factor[kTall][2];
#pragma unroll
        for (int m = 0; m < kTall; ++m) {
#pragma unroll
            for (int r = 0; r < 2; ++r) {
                const int local = 16 * m + 8 * r + lane / 4;
                const int row = row_tile * S::kRows + local;
                const int token = row / args.row_map.heads;
                const int head = row - token * args.row_map.heads;
                const bool inside = token < span.num_tokens;
                float most = -INFINITY;
#pragma unroll
                for (int i = 0; i < S::kGroups; ++i) {
                    most = fmaxf(most, smem.top[i][local]);
                }
                const float base = most == -INFINITY ? 0.0f : most;
                float total = 0.0f;
#pragma unroll
                for (int i = 0; i < S::kGroups; ++i) {
                    total = fmaf(smem.sum[i][local], ptx::exp2_approx(smem.top[i][local] - base), total);
                }
                const bool writes = warp == 0 && lane % 4 == 0;
                float inv;
                if (whole) {
                    const float sink =
                        args.sink != nullptr && inside ? __ldg(args.sink + head) * 1.44269504088896340736f : -INFINITY;
                    float lse;
                    inv = normaliser(most, total, sink, lse);
                    if (writes && inside && args.lse != nullptr) {
                        args.lse[span.batch * args.lse_stride_b + head * args.lse_stride_h + span.first_token + token] = lse;
                    }
                } else {
                    inv = total > 0.0f ? 1.0f / total : 0.0f;
                    if (writes && row < args.rows) {
                        args.lse_part[part_row + local] = total > 0.0f ? most + ptx::log2_approx(total) : -INFINITY;
                    }
                }
                factor[m][r] = inv * ptx::exp2_approx(smem.top[group()][local] - base);
            }
        }
#pragma unroll
        for (int slice = 0; slice < kCols / kSliceCols; ++slice) {
            constexpr int kSlices = S::kWarpCols / kSliceCols;  // of a warp
            if (slice / kSlices == member()) {
#pragma unroll
                for (int m = 0; m < kTall; ++m) {
#pragma unroll
                    for (int r = 0; r < 2; ++r) {
                        const int row = 16 * m + 8 * r + lane / 4;
#pragma unroll
                        for (int j = 0; j < kSliceCols / 16; ++j) {
                            const int n = 2 * (slice % kSlices * (kSliceCols / 16) + j);
                            const float f = factor[m][r];
                            // Channels 4t .. 4t + 3 of 16, from an even and an odd column tile.
                            const int column = 16 * j + 4 * (lane % 4);
                            *reinterpret_cast<float4*>(&smem.o[group()][row][swizzled(row, column)]) =
                                make_float4(o[m][n][2 * r] * f, o[m][n + 1][2 * r] * f, o[m][n][2 * r + 1] * f,
                                            o[m][n + 1][2 * r + 1] * f);
                        }
                    }
                }
            }
            ptx::named_barrier_sync(kBarrierCompute, 32 * kWarps);
#pragma unroll
            for (int i = 0; i < S::kRows / kWarps; ++i) {
                const int local = i * kWarps + warp;
                const int row = row_tile * S::kRows + local;
                float4 x = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
#pragma unroll
                for (int k = 0; k < S::kGroups; ++k) {
                    const float4 y = *reinterpret_cast<const float4*>(&smem.o[k][local][swizzled(local, 4 * lane)]);
                    x.x += y.x;
                    x.y += y.y;
                    x.z += y.z;
                    x.w += y.w;
                }
                const int column = slice * kSliceCols + 4 * lane;
                const uint2 packed = make_uint2(ptx::pack2<T>(x.x, x.y), ptx::pack2<T>(x.z, x.w));
                const int token = row / args.row_map.heads;
                if (!whole) {
                    if (row < args.rows) {
                        *reinterpret_cast<uint2*>(static_cast<T*>(args.o_part) + (part_row + local) * kCols + column) = packed;
                    }
                } else if (token < span.num_tokens) {
                    const int head = row - token * args.row_map.heads;
                    T* const out = static_cast<T*>(args.out) + span.batch * args.out_stride_b +
                                   (span.first_token + token) * args.out_stride_s + head * args.out_stride_h;
                    *reinterpret_cast<uint2*>(out + column) = packed;
                }
            }
            ptx::named_barrier_sync(kBarrierCompute, 32 * kWarps);
        }
    }

    // Eight lanes of a 16-byte store, two rows by four, fall on different banks.
    static __device__ __forceinline__ int swizzled(int row, int column) {
        return column ^ (row & 1) << 4;
    }
};

}  // namespace rows

template <typename T, int kTall>
__global__ void __launch_bounds__(rows::Shape<kTall>::kThreads, 1) mla_decode_rows_sm90_kernel(const __grid_constant__ RowsArgs args) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
    using namespace rows;
    using S = Shape<kTall>;
    extern __shared__ uint8_t smem_bytes[];
    SharedStorage<kTall>& smem = *reinterpret_cast<SharedStorage<kTall>*>(smem_bytes);
    const int warp = static_cast<int>(ptx::uniform_warp_idx());
    const int lane = static_cast<int>(threadIdx.x % 32);
    const int part = static_cast<int>(blockIdx.x) / args.num_tiles;
    const int row_tile = static_cast<int>(blockIdx.x) - part * args.num_tiles;

    if (warp == 0) {
        Share share;
        compute_share(args.schedule, part, lane, share);
        if (lane == 0) {
            smem.share = share;
        }
    } else if (warp == 1 && lane == 0) {
        for (int i = 0; i < S::kStages; ++i) {
            ptx::mbarrier_init(ptx::smem_addr(&smem.full[i]), 1);
            ptx::mbarrier_init(ptx::smem_addr(&smem.empty[i]), S::kGroupWarps);
        }
        if constexpr (kTall == 4) {
            ptx::mbarrier_init(ptx::smem_addr(&smem.q_full), S::kComputeWarps);
            ptx::mbarrier_init(ptx::smem_addr(&smem.inverse_full), 4);
            ptx::mbarrier_init(ptx::smem_addr(&smem.p_full), 4);
            ptx::mbarrier_init(ptx::smem_addr(&smem.p_empty), 8);
        }
        ptx::fence_mbarrier_init();
    }
    __syncthreads();

    using Merger = decode::Merger<T, RowsArgs, SharedStorage<kTall>, S::kRows, S::kThreads - 256, kBarrierMerge>;
    if (threadIdx.x == 128) {
        Merger{args, smem, row_tile}.open();
    }
    if (warp < 4) {
        ptx::setmaxnreg_dec<kLoaderRegs>();
        if (warp < S::kLoaders) {
            const Loader<kTall> loader{args, smem, warp, lane};
            loader.run();
        }
        return;
    }
    using Role = std::conditional_t<kTall == 4, WgmmaComputer<T>, Computer<T, kTall>>;
    Role computer{args, smem, warp - 4, lane};
    const auto run = [&](auto run_piece) {
        PieceIterator it(smem.share);
        Piece piece;
        while (it.advance(args.schedule, piece)) {
            run_piece(piece);
        }
    };
    if constexpr (kTall != 4) {
        ptx::setmaxnreg_inc<kComputeRegs>();
        run([&](const Piece& piece) { computer.run_piece(piece, row_tile, part); });
        Merger{args, smem, row_tile}.run();
    } else if (warp < 8) {
        ptx::setmaxnreg_inc<kScoreRegs>();
        run([&](const Piece& piece) { computer.score_piece(piece, row_tile, part); });
    } else {
        ptx::setmaxnreg_inc<kValueRegs>();
        run([&](const Piece& piece) { computer.value_piece(piece, row_tile, part); });
        Merger{args, smem, row_tile}.run();
    }
#else
    __trap();
#endif
}

}  // namespace flare::mla
