// Computing roles of the decode kernel over 656-byte rows for 64 query rows: wgmma on transposed products, whose A operand, keys or
// values, is made in registers from the raw bytes.
//
//     S^T [64 keys, 64 rows] = K Q^T           one warpgroup; a warp has 16 keys
//     O^T [512 channels, 64 rows] = V^T P^T    two warpgroups with 256 channels each; a warp has 16 of every 64
//
// The A fragments of mma.sync and of wgmma are the same, so bytes become fragments as in decode_rows_sm90.cuh: channels in the order
// 4t, 4t + 1 | 4t + 2, 4t + 3 of 16 (Q lies in the same order), even channels as rows 0-7 and odd ones as rows 8-15 of 16.
//
// Two tiles of 32 keys at a time. While O takes up one pair, the first warpgroup is at the scores and the softmax of the next:
// it keeps the scores in registers, a thread two keys of 16 rows, and exchanges only the maxima of its warps.
//
// Barrier           count arrives                                  waits
//     q_full        12    all warps: queries written               scoring warps
//     p_full        4     scoring warps: P and factors written     the other two warpgroups
//     p_empty       8     their warps after O += P V               scoring warps
//     inverse_full  4     scoring warps: 1 / sums written          the other two warpgroups
//     named 2       128   maxima and sums of the warps written     scoring warps
//
// q and p are written by st.shared and stmatrix and read by wgmma: fence.proxy.async in each writer, then the barrier.
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
    static constexpr int kAcc = kRows / 2;  // registers of a product
    static constexpr int kThreadRows = kAcc / 2;  // in the scores: 8j + 2 (lane % 4) + e at 2j + e
    static constexpr int kWeights = kCols / kScaleCols;
    const RowsArgs& args;
    SharedStorage<4>& smem;
    int warp;  // 0 .. 11: 0 to 3 score
    int lane;

    uint32_t g0 = 0;      // tiles before this piece
    uint32_t pairs = 0;   // of tiles, so far
    uint32_t pieces = 0;  // so far
    uint32_t rounds = 0;  // in which the scoring warps have exchanged something

    __device__ __forceinline__ int wg() const { return warp / 4 - 1; }  // of the two with values
    __device__ __forceinline__ int thread() const { return 32 * warp + lane; }

    // Of a warp, after its writes.
    __device__ __forceinline__ void arrive(uint64_t& bar) const {
        __syncwarp();
        if (lane == 0) {
            ptx::mbarrier_arrive(ptx::smem_addr(&bar));
        }
    }

    // By all who compute, 16 channels a thread and step.
    __device__ __forceinline__ void load_q(const RowMap::Span& span, int row_tile) const {
        const uint32_t base = ptx::smem_addr(smem.q[0]);
        constexpr int kSteps = kLatentSteps + kRopeSteps;
        constexpr int kItems = kRows * kSteps / (32 * S::kComputeWarps);
        static_assert(kItems * 32 * S::kComputeWarps == kRows * kSteps);
#pragma unroll 2
        for (int i = 0; i < kItems; ++i) {
            const int item = i * 32 * S::kComputeWarps + thread();
            const int local = item / kSteps;
            const int step = item - local * kSteps;
            const int row = row_tile * kRows + local;
            const int token = row / args.row_map.heads;
            const int head = row - token * args.row_map.heads;
            const int64_t batch = span.batch;
            const int64_t at = span.first_token + token;
            uint4 x = make_uint4(0, 0, 0, 0);
            uint4 y = make_uint4(0, 0, 0, 0);
            if (token < span.num_tokens) {
                const uint16_t* src =
                    step < kLatentSteps
                        ? static_cast<const uint16_t*>(args.q) + batch * args.q_stride_b + at * args.q_stride_s +
                              head * args.q_stride_h + 16 * step
                        : static_cast<const uint16_t*>(args.q_rope) + batch * args.q_rope_stride_b +
                              at * args.q_rope_stride_s + head * args.q_rope_stride_h + 16 * (step - kLatentSteps);
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
        uint32_t base = ptx::smem_addr(smem.q[0]);
        asm volatile("" : "+r"(base));  // made anew for each product: kept, 36 of them would take the registers
        return tile::make_desc_k<kSwizzle>(base + tile::step_k<kSwizzle>(step, kRows));
    }

    // Of keys lane / 4 and lane / 4 + 8 of the warp's 16, from `key` on in `tile`.
    __device__ __forceinline__ void load_scales(float (&scale)[2][kWeights], uint32_t tile, int key) const {
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            uint32_t bits[4];
            ptx::ld_shared_v4(bits, tile + (key + lane / 4 + 8 * r) * kRowBytes + kScaleAt);
#pragma unroll
            for (int k = 0; k < kWeights; ++k) {
                scale[r][k] = __uint_as_float(bits[k]);
            }
        }
    }

    // S^T; `tile` has this warp's keys, from `key` on.
    __device__ __forceinline__ void scores(float (&s)[kAcc], uint32_t tile, int key) const {
        const uint32_t row = tile + (key + lane % 16) * kRowBytes + lane / 16 * 16;
        float scale[2][kWeights];
        load_scales(scale, tile, key);
        // Batches of four steps, the fragments of one made while the products of the one before run. Every 128 channels the
        // sums are brought from their scale to the next; a scale of 0 may not divide.
        uint32_t a[2][4][4];
        constexpr int kBatches = kLatentSteps / 4;
#pragma unroll
        for (int i = 0; i < kBatches; ++i) {
            make_keys(a[i % 2], row, 4 * i);
            if (i > 0 && i % 2 == 0) {
                wait<0>(a[1]);
                rescale(s, ratio(scale[0], i / 2), ratio(scale[1], i / 2));
            }
            issue(s, a[i % 2], 4 * i, i > 0);
            if (i % 2 == 1) {
                wait<1>(a[0]);
            }
        }
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            ptx::ldmatrix_x4(a[0][i], row + kRopeAt + 32 * i);
            if constexpr (std::is_same_v<T, __half>) {  // bf16 in the cache
#pragma unroll
                for (uint32_t& pair : a[0][i]) {
                    pair = bf16_to_fp16(pair);
                }
            }
        }
        wait<0>(a[1]);
        rescale(s, divisor(scale[0][kWeights - 1]), divisor(scale[1][kWeights - 1]));
        ptx::fence_registers(s);
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            ptx::fence_registers(a[0][i]);
        }
        ptx::wgmma_fence();
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            ptx::wgmma_rs<T, kRows, 0>(s, a[0][i][0], a[0][i][1], a[0][i][2], a[0][i][3], q_desc(kLatentSteps + i), 1);
        }
        ptx::wgmma_commit();
        wait<0>(a[0]);
        ptx::fence_registers(s);
    }

    static __device__ __forceinline__ float divisor(float scale) { return fabsf(scale) < 1e-20f ? 1e-20f : scale; }

    static __device__ __forceinline__ float ratio(const float (&scale)[kWeights], int to) {
        return __fdividef(divisor(scale[to - 1]), divisor(scale[to]));
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

    // Folds the x[i] of the lanes with equal lane % 4; afterwards x[0] and x[1] are those of i = lane / 4 * 2 and the next.
    template <int kStep = kThreadRows / 2, typename Op>
    __device__ __forceinline__ void over_keys(float (&x)[kThreadRows], Op op) const {
        constexpr int kBit = 2 * kStep;  // 16, 8, 4
        const bool upper = (lane & kBit) != 0;
#pragma unroll
        for (int i = 0; i < kStep; ++i) {
            const float sent = upper ? x[i] : x[i + kStep];
            const float kept = upper ? x[i + kStep] : x[i];
            x[i] = op(kept, __shfl_xor_sync(0xffffffffu, sent, kBit));
        }
        if constexpr (kStep > 2) {
            over_keys<kStep / 2>(x, op);
        }
    }

    // Hands x[0], x[1] to the other scoring warps; returns the buffer with theirs.
    __device__ __forceinline__ const float (&exchange(const float (&x)[kThreadRows]))[4][4][kThreadRows] {
        float(&buffer)[4][4][kThreadRows] = smem.exchange[rounds++ % 2];
        *reinterpret_cast<float2*>(&buffer[warp][lane % 4][lane / 4 * 2]) = make_float2(x[0], x[1]);
        ptx::named_barrier_sync(kBarrierGroup, 128);
        return buffer;
    }

    // Scores of this thread's keys, key and key + 8 of the pair of tiles, become P, times the scales of the columns.
    __device__ __forceinline__ void softmax(float (&s)[kAcc], float (&top)[kThreadRows], float (&sum)[kThreadRows],
                                            uint32_t tile, int key) {
        float x[kThreadRows];
        bool grown = false;
#pragma unroll
        for (int i = 0; i < kThreadRows; ++i) {
            x[i] = fmaxf(s[at(i, 0)], s[at(i, 1)]);
            grown = grown || x[i] > top[i] + kRescaleThreshold;
        }
        // After the first keys a maximum is hardly ever raised: the warps exchange one bit.
        const bool raised = ptx::named_barrier_or(kBarrierGroup, 128, grown);
        if (raised) {
            over_keys(x, [](float a, float b) { return fmaxf(a, b); });
            const auto& maxima = exchange(x);
            ptx::mbarrier_wait(ptx::smem_addr(&smem.p_empty), (pairs & 1) ^ 1);
#pragma unroll
            for (int i = 0; i < kThreadRows; i += 4) {
                float most[4] = {-INFINITY, -INFINITY, -INFINITY, -INFINITY};
#pragma unroll
                for (int from = 0; from < 4; ++from) {
                    const float4 a = *reinterpret_cast<const float4*>(&maxima[from][lane % 4][i]);
                    most[0] = fmaxf(most[0], a.x);
                    most[1] = fmaxf(most[1], a.y);
                    most[2] = fmaxf(most[2], a.z);
                    most[3] = fmaxf(most[3], a.w);
                }
#pragma unroll
                for (int k = 0; k < 4; ++k) {
                    const float to = most[k] > top[i + k] + kRescaleThreshold ? most[k] : top[i + k];
                    const float alpha = ptx::exp2_approx(top[i + k] - to);
                    top[i + k] = to;
                    sum[i + k] *= alpha;
                    if (warp == 0 && lane < 4) {
                        smem.factor[4 * (i + k - k % 2) + 2 * lane + k % 2] = alpha;
                    }
                }
            }
        } else {
            ptx::mbarrier_wait(ptx::smem_addr(&smem.p_empty), (pairs & 1) ^ 1);
        }
        if (thread() == 0) {
            smem.raised = raised;
        }
#pragma unroll
        for (int i = 0; i < kThreadRows; ++i) {
#pragma unroll
            for (int r = 0; r < 2; ++r) {
                s[at(i, r)] = ptx::exp2_approx(s[at(i, r)] - top[i]);
                sum[i] += s[at(i, r)];
            }
        }
        float scale[2][kWeights];
        load_scales(scale, tile, key);
        // A matrix of stmatrix is 8 keys by 8 rows, and goes to P [row][key].
        const uint32_t to = tile::tile_addr<kSwizzle>(ptx::smem_addr(smem.p[0]), kRows, 8 * (lane / 16) + lane % 8,
                                                      2 * (16 * warp + lane / 8 % 2 * 8));
#pragma unroll
        for (int k = 0; k < kWeights; ++k) {
#pragma unroll
            for (int j = 0; j < kRows / 8; j += 2) {
                uint32_t p[4];
#pragma unroll
                for (int m = 0; m < 4; ++m) {
                    const int r = m % 2;
                    const int i = 2 * (j + m / 2);
                    p[m] = ptx::pack2<__half>(s[at(i, r)] * scale[r][k], s[at(i + 1, r)] * scale[r][k]);
                }
                ptx::stmatrix_x4_trans(to + k * kRows * 128 + 8 * j * 128, p[0], p[1], p[2], p[3]);
            }
        }
        ptx::fence_proxy_async_smem();
        __syncwarp();
        if (lane == 0) {
            ptx::mbarrier_arrive(ptx::smem_addr(&smem.p_full));
        }
    }

    // Where in the scores: row i of the thread's, its key r.
    static __device__ constexpr int at(int i, int r) { return i / 2 * 4 + 2 * r + i % 2; }

    __device__ __forceinline__ void values(float (&o)[kMTiles][kAcc], const uint32_t (&stage)[2]) const {
        constexpr int kBuffers = 2;
        uint32_t a[kBuffers][2][4];  // fragments of a tile's two steps of 16 keys, 64 channels
#pragma unroll
        for (int n = 0; n < 2 * kMTiles; ++n) {
            const int m = n / 2;
            uint32_t(&now)[2][4] = a[n % kBuffers];
            uint32_t raw[4];
            ptx::ldmatrix_x4_trans(raw, ptx::smem_addr(smem.k[stage[n % 2]]) + lane * kRowBytes + 256 * wg() + 64 * m +
                                            16 * (warp % 4));
#pragma unroll
            for (int k = 0; k < 4; ++k) {
                e4m3_to_fp16(ptx::permute_bytes(raw[k], 0, 0x3120), now[k / 2][k % 2 * 2], now[k / 2][k % 2 * 2 + 1]);
            }
            ptx::fence_registers(o[m]);
            ptx::fence_registers(now[0]);
            ptx::fence_registers(now[1]);
            ptx::wgmma_fence();
            const uint32_t p = ptx::smem_addr(smem.p[2 * wg() + m / 2]);
            const uint64_t desc = tile::make_desc_k<kSwizzle>(p + 64 * (n % 2));
#pragma unroll
            for (int k = 0; k < 2; ++k) {
                ptx::wgmma_rs<__half, kRows, 0>(o[m], now[k][0], now[k][1], now[k][2], now[k][3],
                                                tile::advance_desc(desc, 32 * k), 1);
            }
            ptx::wgmma_commit();
            if (n >= kBuffers - 1) {
                ptx::wgmma_wait<kBuffers - 1>();
                ptx::fence_registers(a[(n + 1) % kBuffers][0]);
                ptx::fence_registers(a[(n + 1) % kBuffers][1]);
            }
        }
        ptx::wgmma_wait<0>();
#pragma unroll
        for (int m = 0; m < kMTiles; ++m) {
            ptx::fence_registers(o[m]);
        }
    }

    struct Keys {
        RowMap::Span span;
        int first, last;  // tiles
    };

    // By all who compute, at the start of a piece.
    __device__ __forceinline__ Keys begin(const Piece& piece, int row_tile) const {
        Keys keys;
        keys.span = args.row_map.span(piece.request);
        keys.first = first_tile(piece);
        keys.last = max(keys.first, last_tile(piece));
        load_q(keys.span, row_tile);
        if (thread() < kRows) {
            const int token = (row_tile * kRows + thread()) / args.row_map.heads;
            smem.limit[thread()] =
                args.causal ? min(piece.len, piece.len - (keys.span.num_tokens - 1 - token)) : piece.len;
        }
        arrive(smem.q_full);
        return keys;
    }

    __device__ __forceinline__ void wait_for(const uint32_t (&stage)[2], uint32_t g) const {
        ptx::mbarrier_wait(ptx::smem_addr(&smem.full[stage[0]]), g / S::kStages & 1);
        ptx::mbarrier_wait(ptx::smem_addr(&smem.full[stage[1]]), (g + 1) / S::kStages & 1);
    }

    __device__ __forceinline__ void score_piece(const Piece& piece, int row_tile, int part) {
        const auto [span, first, last] = begin(piece, row_tile);
        ptx::mbarrier_wait(ptx::smem_addr(&smem.q_full), pieces & 1);
        const int full_keys = args.causal ? piece.len - (span.num_tokens - 1) : piece.len;
        float top[kThreadRows];
        float sum[kThreadRows];
#pragma unroll
        for (int i = 0; i < kThreadRows; ++i) {
            top[i] = kLeastMaximum;
            sum[i] = 0.0f;
        }
#pragma unroll 1
        for (int t = first; t < last; t += 2, ++pairs) {
            const uint32_t g = g0 + (t - first);
            const uint32_t stage[2] = {g % S::kStages, (g + 1) % S::kStages};
            wait_for(stage, g);
            float s[kAcc];
            const uint32_t tile = ptx::smem_addr(smem.k[warp < 2 ? stage[0] : stage[1]]);
            scores(s, tile, 16 * (warp % 2));
#pragma unroll
            for (int i = 0; i < kAcc; ++i) {
                s[i] *= args.scale_log2;
            }
            const uint32_t present = smem.present[warp < 2 ? stage[0] : stage[1]];
            if (present != 0xffffffffu || t * kKeys + 2 * kKeys > full_keys) {
#pragma unroll
                for (int i = 0; i < kThreadRows; ++i) {
                    const int limit = smem.limit[4 * (i - i % 2) + 2 * (lane % 4) + i % 2] - t * kKeys;
#pragma unroll
                    for (int r = 0; r < 2; ++r) {
                        const int key = 16 * warp + lane / 4 + 8 * r;  // of the pair of tiles
                        if (!(present >> key % kKeys & 1) || key >= limit) {
                            s[at(i, r)] = -INFINITY;
                        }
                    }
                }
            }
            softmax(s, top, sum, tile, 16 * (warp % 2));
        }
        g0 += (last - first + 1) / 2 * 2;
        finish_scores(top, sum, piece, span, row_tile, part);
    }

    // The sums of the rows: LSE, and what O is to be multiplied by.
    __device__ __forceinline__ void finish_scores(const float (&top)[kThreadRows], float (&sum)[kThreadRows], const Piece& piece,
                                                  const RowMap::Span& span, int row_tile, int part) {
        if (warp == 0 && lane < 4) {
#pragma unroll
            for (int i = 0; i < kThreadRows; ++i) {
                smem.top[lane][i] = top[i];
            }
        }
        over_keys(sum, [](float a, float b) { return a + b; });
        const auto& sums = exchange(sum);
        if (warp < 2) {
            const int local = thread();
            const int t = local / 2 % 4;
            const int i = local / 8 * 2 + local % 2;
            const float most = smem.top[t][i];
            const float total = sums[0][t][i] + sums[1][t][i] + sums[2][t][i] + sums[3][t][i];
            const int row = row_tile * kRows + local;
            const int token = row / args.row_map.heads;
            const int head = row - token * args.row_map.heads;
            const bool inside = token < span.num_tokens;
            float inv;
            if (piece.whole()) {
                const float sink =
                    args.sink != nullptr && inside ? __ldg(args.sink + head) * 1.44269504088896340736f : -INFINITY;
                float lse;
                inv = normaliser(most, total, sink, lse);
                if (inside && args.lse != nullptr) {
                    args.lse[span.batch * args.lse_stride_b + head * args.lse_stride_h + span.first_token + token] = lse;
                }
            } else {
                inv = total > 0.0f ? 1.0f / total : 0.0f;
                if (row < args.rows) {
                    args.lse_part[part_row(piece, row_tile, part) + local] =
                        total > 0.0f ? most + ptx::log2_approx(total) : -INFINITY;
                }
            }
            smem.inverse[local] = inv;
        }
        arrive(smem.inverse_full);
        ++pieces;
    }

    __device__ __forceinline__ int64_t part_row(const Piece& piece, int row_tile, int part) const {
        return (int64_t{2 * part + (piece.begin == 0 ? 1 : 0)} * args.num_tiles + row_tile) * kRows;
    }

    __device__ __forceinline__ void value_piece(const Piece& piece, int row_tile, int part) {
        const auto [span, first, last] = begin(piece, row_tile);
        float o[kMTiles][kAcc];
#pragma unroll
        for (int m = 0; m < kMTiles; ++m) {
#pragma unroll
            for (int i = 0; i < kAcc; ++i) {
                o[m][i] = 0.0f;
            }
        }
#pragma unroll 1
        for (int t = first; t < last; t += 2, ++pairs) {
            const uint32_t g = g0 + (t - first);
            const uint32_t stage[2] = {g % S::kStages, (g + 1) % S::kStages};
            wait_for(stage, g);  // they are there; the copies' bytes become visible here
            ptx::mbarrier_wait(ptx::smem_addr(&smem.p_full), pairs & 1);
            if (smem.raised) {
                float2 alpha[kRows / 8];
#pragma unroll
                for (int j = 0; j < kRows / 8; ++j) {
                    alpha[j] = *reinterpret_cast<const float2*>(&smem.factor[8 * j + 2 * (lane % 4)]);
                }
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
                ptx::mbarrier_arrive(ptx::smem_addr(&smem.p_empty));
            }
        }
        g0 += (last - first + 1) / 2 * 2;
        ptx::mbarrier_wait(ptx::smem_addr(&smem.inverse_full), pieces & 1);
        ++pieces;
        write(o, piece, span, row_tile, part);
    }

    __device__ __forceinline__ void write(const float (&o)[kMTiles][kAcc], const Piece& piece, const RowMap::Span& span,
                                          int row_tile, int part) const {
        const bool whole = piece.whole();
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
                const float inv = smem.inverse[local];
                T* const out = whole ? static_cast<T*>(args.out) + span.batch * args.out_stride_b +
                                           (span.first_token + token) * args.out_stride_s + head * args.out_stride_h
                                     : static_cast<T*>(args.o_part) + (part_row(piece, row_tile, part) + local) * kCols;
#pragma unroll
                for (int m = 0; m < kMTiles; ++m) {
                    *reinterpret_cast<uint32_t*>(out + column + 64 * m) =
                        ptx::pack2<T>(o[m][4 * j + e] * inv, o[m][4 * j + 2 + e] * inv);
                }
            }
        }
    }
};

}  // namespace rows
}  // namespace flare::mla
