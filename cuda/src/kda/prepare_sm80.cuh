// Prepare: everything of a chunk that does not depend on the state, for all chunks in parallel. K up to kK, the rest
// zeros.
//
// Two warps per chunk, 16 tokens each; two chunks per block. All products run on tensor cores with no bound on the
// gate. For a pair of rows i > j of a 16-row block let s be the level (1, 2, 4, 8) at which i/s and j/s are neighbours
// with i/s odd. With the end of the even half as anchor both exp(G_i - G_anchor) and exp(G_anchor - G_j) are <= 1, and
// no anchor lies behind the row that it serves, so later gates cannot change earlier bits. One m16n8k8 (tf32) per level
// and 8 channels does all pairs of that level: A holds the odd-half rows, of k in rows 0-7 and of q in rows 8-15, B the
// even-half rows of k.
//
// Lane (g, t) owns rows g and 15 - g: their indices are bit complements, so at each level one is the odd-half row and
// the other the even-half row and operands are built from the lane's own registers. Prefix (pre) and suffix (suf) decay
// products double per level with one shuffle per element.
//
// tf32 because rounding L and A's operands to 16 bits is what limits accuracy when keys are nearly collinear; it also
// packs nothing.
//
// The gram matrix of a block's keys gives their norms and tells whether one repeats: then what fp16 leaves of Kr is stored too
// (chunk_sm80.cuh).
//
// Per pair of warps, shared memory: transposed L and A (fp32 32 x 36), decay totals, block 0's restored keys and block
// 1's decayed queries (double-buffered by channel group), norms and beta. The inputs are staged by cp.async, all of a
// chunk in flight at once. Named barrier 1 + pair, 64 threads: after each channel group, after the norms, after L.
#pragma once

#include "kda/chunk_sm80.cuh"
#include "kda/prepare_math.cuh"
#include "ptx/ldst.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/mma_sync.cuh"
#include "ptx/sync.cuh"
#include "tile/fragment.cuh"

namespace flare::kda::sm80 {

inline constexpr int kPrepareThreads = 128;
inline constexpr int kPreparePairs = 2;

template <int kK>
struct PrepareShared {
    struct Pair {
        // [buffer][block][row r1, r2][four channels][lane], tf32: block 0's k * exp(G_15 - G), block 1's q * exp(G).
        uint4 exchange[2][2][2][2][32];
        float total[2][2][32];  // [buffer][block][channel of the group]
        float norm_k[kChunk];
        float norm_u[kChunk];   // norm_k / ck
        float scale_k[kChunk];  // ck
        float scale_q[kChunk];  // cq
        float beta[kChunk];
        // [block], here because registers are few: where Kr's second term goes, null if no key of the block repeats one
        // before it.
        uint8_t* kr_low[2];
    } pair[kPreparePairs];
    struct Matrices {
        float l_transposed[kChunk][kMatrixPitch];  // [column][row] of beta_i P_ij
        float a[kChunk][kMatrixPitch];
    };
    // k, q and 16-bit gates of the whole chunk, 16 bytes a lane: [warp][channel group][tensor, row][lane]. Each lane
    // copies what it reads. Once both warps are past them, the matrices of a pair take their place.
    uint4 staged[2 * kPreparePairs][kK / 32][6][32];
};
static_assert(sizeof(PrepareShared<64>::Matrices) <= 2 * sizeof(PrepareShared<64>::staged[0]),
              "the matrices fit the staged inputs of a pair");
static_assert(3 * (sizeof(PrepareShared<128>) + 1024) <= 228 * 1024, "three blocks per SM on an H100, two on an A100");

// The power of two that brings the root of `sum_of_squares` into [1, 2).
__device__ __forceinline__ float root_scale(float sum_of_squares) {
    const int exponent = (static_cast<int>(__float_as_uint(sum_of_squares) >> 23) - 127) >> 1;
    return __uint_as_float(static_cast<uint32_t>(127 - exponent) << 23);
}

template <typename T, int kK, bool kAnchorFree>
__global__ void __launch_bounds__(kPrepareThreads, 3)
    kda_prepare_sm80_kernel(const __grid_constant__ KdaParams p, uint8_t* workspace) {
    using Layout = ChunkLayout<T, kK>;
    using Shared = PrepareShared<kK>;
    extern __shared__ __align__(16) uint8_t smem_raw[];
    Shared& shared = *reinterpret_cast<Shared*>(smem_raw);
    const int warp = threadIdx.x / 32;
    const int lane = threadIdx.x % 32;
    const int g = lane / 4;
    const int t = lane % 4;
    const int pair_idx = warp / 2;
    const int block = warp % 2;  // which 16 tokens of the chunk
    typename Shared::Pair& sm = shared.pair[pair_idx];

    const uint32_t task = blockIdx.x * kPreparePairs + pair_idx;
    const uint32_t heads =
        static_cast<uint32_t>(p.heads_v);  // 32-bit: a 64-bit division costs about a hundred instructions
    const uint32_t slot = task / heads;
    const uint32_t head = task - slot * heads;
    if (slot >= num_slots(p)) {
        return;
    }
    const int64_t n = sequence_of_slot(p, slot);
    const Sequence seq = locate_sequence(p, n);
    const int64_t token0 = (slot - seq.first_slot) * kChunk;
    if (token0 >= seq.tokens) {
        return;
    }
    const int length = static_cast<int>(min(static_cast<int64_t>(kChunk), seq.tokens - token0));
    const int64_t row0 = seq.first_token + token0;
    const uint32_t head_qk = head / (heads / static_cast<uint32_t>(p.heads_qk));
    const int64_t index = head * num_slots(p) + slot;
    uint8_t* const out = workspace + index * Layout::kBlockBytes;
    const uint32_t barrier = 1 + pair_idx;

    const int rows[2] = {16 * block + g, 16 * block + 15 - g};
    const bool valid[2] = {rows[0] < length, rows[1] < length};
    // Uniform bases plus 32-bit offsets inside the chunk.
    const T* const k_base =
        static_cast<const T*>(p.k) + seq.batch * p.k_stride.batch + row0 * p.k_stride.token + head_qk * p.k_stride.head;
    const T* const q_base =
        static_cast<const T*>(p.q) + seq.batch * p.q_stride.batch + row0 * p.q_stride.token + head_qk * p.q_stride.head;
    const int64_t g_base = seq.batch * p.g_stride.batch + row0 * p.g_stride.token + head * p.g_stride.head;
    int k_offset[2], q_offset[2], g_offset[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        k_offset[r] = rows[r] * static_cast<int>(p.k_stride.token) + 8 * t;
        q_offset[r] = rows[r] * static_cast<int>(p.q_stride.token) + 8 * t;
        g_offset[r] = rows[r] * static_cast<int>(p.g_stride.token) + 8 * t;
    }
    // beta first: kept in registers through the loop, its address would spill.
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        if (t == 0) {
            const int64_t offset =
                seq.batch * p.beta_stride.batch + (row0 + rows[r]) * p.beta_stride.token + head * p.beta_stride.head;
            sm.beta[rows[r]] = valid[r] ? activate_beta(p.beta_activation,
                                                        load_scalar<T>(p.beta, offset, p.beta_dtype == DType::kFp32))
                                        : 0.0f;
        }
    }
    const GateConstants gate = gate_constants(p, head);

    float acc[4][4] = {};    // per level: k k^T in 0, 1 and q k^T in 2, 3; or as anchor_free leaves it
    float cross[2][4] = {};  // block 1 rows x block 0 columns, by column halves: k k^T in block 1, q k^T in block 0
    float gram[2][4] = {};   // k k^T of the block, by column halves; rows and columns in the order g, 15 - g
    float norm_q[2] = {}, diagonal[2] = {};

#pragma unroll
    for (int group = 0; group < kK / 32; ++group) {
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            const uint32_t staged = ptx::smem_addr(&shared.staged[warp][group][r][lane]);
            // Rows past the end and channels past K become zeros and are not read.
            const bool there = valid[r] && 32 * group + 8 * t < p.head_dim_k;
            const uint32_t bytes = there ? 16 : 0;
            ptx::cp_async_16(staged, there ? k_base + k_offset[r] + 32 * group : p.k, bytes);
            ptx::cp_async_16(staged + 1024, there ? q_base + q_offset[r] + 32 * group : p.q, bytes);
            if (p.gate_dtype != DType::kFp32) {
                ptx::cp_async_16(staged + 2048,
                                 there ? static_cast<const T*>(p.g) + g_base + g_offset[r] + 32 * group : p.g, bytes);
            }
        }
        ptx::cp_async_commit();
    }
    // Norms first: their powers of two go into the operands.
#pragma unroll
    for (int group = 0; group < kK / 32; ++group) {
        const int pending = kK / 32 - 1 - group;
        if (pending == 3) {
            ptx::cp_async_wait<3>();
        } else if (pending == 2) {
            ptx::cp_async_wait<2>();
        } else if (pending == 1) {
            ptx::cp_async_wait<1>();
        } else {
            ptx::cp_async_wait<0>();
        }
        const uint4 k0 = shared.staged[warp][group][0][lane];
        const uint4 k1 = shared.staged[warp][group][1][lane];
        const uint32_t low[4] = {k0.x, k1.x, k0.y, k1.y};
        const uint32_t high[4] = {k0.z, k1.z, k0.w, k1.w};
        ptx::mma_m16n8k16<T>(gram[0], low, k0.x, k0.y);
        ptx::mma_m16n8k16<T>(gram[1], low, k1.x, k1.y);
        ptx::mma_m16n8k16<T>(gram[0], high, k0.z, k0.w);
        ptx::mma_m16n8k16<T>(gram[1], high, k1.z, k1.w);
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            float qf[8];
            unpack8<T>(qf, shared.staged[warp][group][2 + r][lane]);
#pragma unroll
            for (int i = 0; i < 8; ++i) {
                norm_q[r] = fmaf(qf[i], qf[i], norm_q[r]);
            }
        }
    }
    // The diagonal: |k|^2 of both rows is in one lane of the four.
    const float sums_k[2] = {__shfl_sync(0xffffffffu, g % 2 == 0 ? gram[0][0] : gram[0][1], 4 * g + g / 2),
                             __shfl_sync(0xffffffffu, g % 2 == 0 ? gram[1][2] : gram[1][3], 4 * g + g / 2)};
    if constexpr (Layout::kMayRepeat) {
        // A key repeats one before it if that one's projection on it is more than three quarters as long as it is. (Kr touches
        // the state behind the chunk alone: later tokens may decide.)
        const float upper = fmaxf(2 * t < g ? fabsf(gram[0][0]) : 0.0f, 2 * t + 1 < g ? fabsf(gram[0][1]) : 0.0f);
        const float lower = fmaxf(fmaxf(fabsf(gram[0][2]), fabsf(gram[0][3])),
                                  fmaxf(2 * t > g ? fabsf(gram[1][2]) : 0.0f, 2 * t + 1 > g ? fabsf(gram[1][3]) : 0.0f));
        const bool repeats = __any_sync(0xffffffffu, upper > 0.75f * sums_k[0] || lower > 0.75f * sums_k[1]) != 0;
        if (lane == 0) {
            sm.kr_low[block] = repeats ? repeat_tile<Layout>(p, workspace, index) : nullptr;
            repeat_flags<Layout>(p, workspace, index)[block] = repeats ? 1 : 0;
        }
    }
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        const float sum_k = sums_k[r];
        const float sum_q = tile::quad_sum(norm_q[r]);
        if (t == 0) {
            const float scale_k = root_scale(sum_k);
            const float scale_q = root_scale(sum_q);
            const float nk = p.qk_l2norm != 0 ? rsqrtf(sum_k + kNormEpsilon) : 1.0f;
            const float nq = p.scale * (p.qk_l2norm != 0 ? rsqrtf(sum_q + kNormEpsilon) : 1.0f);
            sm.norm_k[rows[r]] = nk;
            sm.norm_u[rows[r]] = __fdividef(nk, scale_k);
            sm.scale_k[rows[r]] = scale_k;
            sm.scale_q[rows[r]] = scale_q;
            reinterpret_cast<float*>(out + Layout::kOffsetNormK)[rows[r]] = nk;
            reinterpret_cast<float*>(out + Layout::kOffsetNormQ)[rows[r]] = __fdividef(nq, scale_q);
        }
    }
    __syncwarp();

#pragma unroll 1
    for (int group = 0; group < kK / 32; ++group) {
        const int channel = 32 * group + 8 * t;
        const bool inside = channel < p.head_dim_k;  // channels beyond are zeros that never decay
        float kf[2][8];
        uint4 q[2];
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            unpack8<T>(kf[r], shared.staged[warp][group][r][lane]);
            q[r] = shared.staged[warp][group][2 + r][lane];
        }
        float bias[8] = {};
        if (p.dt_bias != nullptr && inside) {
            const float4* source = reinterpret_cast<const float4*>(p.dt_bias + head * p.head_dim_k + channel);
            const float4 low = __ldg(source);
            const float4 high = __ldg(source + 1);
            bias[0] = low.x, bias[1] = low.y, bias[2] = low.z, bias[3] = low.w;
            bias[4] = high.x, bias[5] = high.y, bias[6] = high.z, bias[7] = high.w;
        }
        float pre[2][8], suf[2][8];
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            decays<T, kAnchorFree>(
                pre[r], shared.staged[warp][group][4 + r][lane],
                p.gate_dtype == DType::kFp32
                    ? static_cast<const float*>(p.g) + g_base + rows[r] * static_cast<int>(p.g_stride.token) + channel
                    : nullptr,
                gate, bias, valid[r] && inside);
#pragma unroll
            for (int i = 0; i < 8; ++i) {
                suf[r][i] = 1.0f;
            }
        }
        float total[8];
        if constexpr (kAnchorFree) {
            anchor_free<T>(acc, pre, suf, total, kf, q, g);
        } else {
            level<T, 0>(acc[0], pre, suf, kf, q, g);
            level<T, 1>(acc[1], pre, suf, kf, q, g);
            level<T, 2>(acc[2], pre, suf, kf, q, g);
            level<T, 3>(acc[3], pre, suf, kf, q, g);
#pragma unroll
            for (int i = 0; i < 8; ++i) {
                total[i] = pre[0][i] * suf[0][i];
            }
        }

        // Hand the block's total decay and its operand of the cross product to the other warp.
        const int buffer = group % 2;
        if (g == 0) {
            float4* own = reinterpret_cast<float4*>(&sm.total[buffer][block][8 * t]);
            own[0] = {total[0], total[1], total[2], total[3]};
            own[1] = {total[4], total[5], total[6], total[7]};
        }
        float qf[2][8];
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            unpack8<T>(qf[r], q[r]);
#pragma unroll
            for (int i = 0; i < 8; ++i) {
                diagonal[r] = fmaf(qf[r][i], kf[r][i], diagonal[r]);
            }
        }
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            uint32_t rounded[8];
#pragma unroll
            for (int i = 0; i < 8; ++i) {
                rounded[i] = ptx::round_tf32(block == 0 ? kf[r][i] * suf[r][i] : qf[r][i] * pre[r][i]);
            }
            sm.exchange[buffer][block][r][0][lane] = {rounded[0], rounded[1], rounded[2], rounded[3]};
            sm.exchange[buffer][block][r][1][lane] = {rounded[4], rounded[5], rounded[6], rounded[7]};
        }
        ptx::named_barrier_sync(barrier, 64);

        float other[8];
        {
            const float4* source = reinterpret_cast<const float4*>(&sm.total[buffer][1 - block][8 * t]);
            const float4 low = source[0];
            const float4 high = source[1];
            other[0] = low.x, other[1] = low.y, other[2] = low.z, other[3] = low.w;
            other[4] = high.x, other[5] = high.y, other[6] = high.z, other[7] = high.w;
        }
        // Rows of block 1 against columns of block 0: block 1's warp does k k^T, block 0's q k^T.
#pragma unroll
        for (int quarter = 0; quarter < 2; ++quarter) {
            const uint4 b0 = sm.exchange[buffer][0][0][quarter][lane];
            const uint4 b1 = sm.exchange[buffer][0][1][quarter][lane];
            uint4 a0, a1;
            if (block == 1) {
                const int i = 4 * quarter;
                a0 = {ptx::round_tf32(kf[0][i] * pre[0][i]), ptx::round_tf32(kf[0][i + 1] * pre[0][i + 1]),
                      ptx::round_tf32(kf[0][i + 2] * pre[0][i + 2]), ptx::round_tf32(kf[0][i + 3] * pre[0][i + 3])};
                a1 = {ptx::round_tf32(kf[1][i] * pre[1][i]), ptx::round_tf32(kf[1][i + 1] * pre[1][i + 1]),
                      ptx::round_tf32(kf[1][i + 2] * pre[1][i + 2]), ptx::round_tf32(kf[1][i + 3] * pre[1][i + 3])};
            } else {
                a0 = sm.exchange[buffer][1][0][quarter][lane];
                a1 = sm.exchange[buffer][1][1][quarter][lane];
            }
            ptx::mma_m16n8k8_tf32(cross[0], {a0.x, a1.x, a0.y, a1.y}, b0.x, b0.y);
            ptx::mma_m16n8k8_tf32(cross[1], {a0.x, a1.x, a0.y, a1.y}, b1.x, b1.y);
            ptx::mma_m16n8k8_tf32(cross[0], {a0.z, a1.z, a0.w, a1.w}, b0.z, b0.w);
            ptx::mma_m16n8k8_tf32(cross[1], {a0.z, a1.z, a0.w, a1.w}, b1.z, b1.w);
        }
        if (block == 1) {
            if (g == 0) {
                float4* decay = reinterpret_cast<float4*>(out + Layout::kOffsetDecay + 4 * channel);
                decay[0] = {total[0] * other[0], total[1] * other[1], total[2] * other[2], total[3] * other[3]};
                decay[1] = {total[4] * other[4], total[5] * other[5], total[6] * other[6], total[7] * other[7]};
            }
        }
        // Factors over the whole chunk: block 1's prefixes start at the chunk, block 0's suffixes reach its end.
#pragma unroll
        for (int r = 0; r < 2; ++r) {
#pragma unroll
            for (int i = 0; i < 8; ++i) {
                if (block == 1) {
                    pre[r][i] *= other[i];
                } else {
                    suf[r][i] *= other[i];
                }
            }
            const uint32_t piece = ((group % 2) * 4 + t) ^ (rows[r] & 7);
            uint8_t* const row = out + (group / 2) * 4096 + rows[r] * 128 + piece * 16;
            uint32_t packed[4];
            scale_pack<T>(packed, kf[r], pre[r]);
            ptx::st_global_v4(row + Layout::kOffsetKd, packed);
            const float scale_q = sm.scale_q[rows[r]];
            const float scale_k = sm.scale_k[rows[r]];
#pragma unroll
            for (int i = 0; i < 8; ++i) {
                pre[r][i] *= scale_q;
                suf[r][i] *= scale_k;
            }
            scale_pack<T>(packed, qf[r], pre[r]);
            ptx::st_global_v4(row + Layout::kOffsetQd, packed);
            scale_pack<__half>(packed, kf[r], suf[r]);
            ptx::st_global_v4(row + Layout::kOffsetKr, packed);
        }
        // What fp16 leaves of Kr, of the whole chunk if a key repeats in either block.
        uint8_t* kr_low = out + Layout::kOffsetKr + Layout::kTileBytes;
        if constexpr (Layout::kMayRepeat) {
            kr_low = sm.kr_low[0] != nullptr ? sm.kr_low[0] : sm.kr_low[1];
        }
        if (Layout::kTerms == 2 || (Layout::kMayRepeat && kr_low != nullptr)) {
#pragma unroll
            for (int r = 0; r < 2; ++r) {
                uint32_t packed[4];
                scale_pack<__half>(packed, kf[r], suf[r]);
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    const float2 high = unpack2<__half>(packed[i]);
                    packed[i] = ptx::pack2<__half>(fmaf(kf[r][2 * i], suf[r][2 * i], -high.x),
                                                   fmaf(kf[r][2 * i + 1], suf[r][2 * i + 1], -high.y));
                }
                const uint32_t piece = ((group % 2) * 4 + t) ^ (rows[r] & 7);
                ptx::st_global_v4(kr_low + (group / 2) * 4096 + rows[r] * 128 + piece * 16, packed);
            }
        }
    }

#pragma unroll
    for (int r = 0; r < 2; ++r) {
        diagonal[r] = tile::quad_sum(diagonal[r]);
    }
    ptx::named_barrier_sync(barrier, 64);

    typename Shared::Matrices& matrices = *reinterpret_cast<typename Shared::Matrices*>(&shared.staged[2 * pair_idx]);
    if (t == 0) {
        matrices.a[rows[0]][rows[0]] = diagonal[0];
        matrices.a[rows[1]][rows[1]] = diagonal[1];
    }
    // Entry (i, j) of both matrices.
    const auto put = [&](int i, int j, float kk, float qk) {
        matrices.l_transposed[j][i] = sm.beta[i] * sm.norm_k[i] * sm.norm_k[j] * kk;
        matrices.a[i][j] = qk;
    };
    if constexpr (kAnchorFree) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
#pragma unroll
            for (int c = 0; c < 4; ++c) {
                const int i = rows[c / 2];
                const int j = 16 * block + (half == 0 ? 2 * t + c % 2 : 15 - (2 * t + c % 2));
                if (i > j) {
                    put(i, j, acc[half][c], acc[2 + half][c]);
                }
            }
        }
    } else {
#pragma unroll
        for (int level_idx = 0; level_idx < 4; ++level_idx) {
            const int s = 1 << level_idx;
            const int odd = s < 8 && (g & s) != 0 ? g : 15 - g;
#pragma unroll
            for (int c = 0; c < 2; ++c) {
                const int column = 2 * t + c;
                const int even = s < 8 && (column & s) != 0 ? 15 - column : column;
                if (odd / (2 * s) == even / (2 * s)) {
                    put(16 * block + odd, 16 * block + even, acc[level_idx][c], acc[level_idx][2 + c]);
                }
            }
        }
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
#pragma unroll
        for (int c = 0; c < 4; ++c) {
            const int i = 16 + (c / 2 == 0 ? g : 15 - g);
            const int j = half == 0 ? 2 * t + c % 2 : 15 - (2 * t + c % 2);
            if (block == 1) {
                matrices.l_transposed[j][i] = sm.beta[i] * sm.norm_k[i] * sm.norm_k[j] * cross[half][c];
            } else {
                matrices.a[i][j] = cross[half][c];
            }
        }
    }
    ptx::named_barrier_sync(barrier, 64);

    if (block == 0) {
        float x[kChunk];
        solve_column(x, matrices.l_transposed, lane);
        const uint32_t place = 8 * (lane / 8) + 4 * (lane % 2) + (lane % 8) / 2;
        const float beta = sm.beta[lane];
#pragma unroll
        for (int i = 0; i < kChunk; ++i) {
            const float exact = i >= lane ? x[i] * (sm.norm_u[i] * beta) : 0.0f;
            const uint32_t rounded = ptx::convert_tf32(exact) & 0xffffe000u;
            uint32_t* const at = reinterpret_cast<uint32_t*>(out + Layout::kOffsetX + i * 128) +
                                 ((place / 4) ^ (i % 8)) * 4 + place % 4;
            at[0] = rounded;
            if constexpr (Layout::kTerms == 2) {
                at[kChunk * kChunk] = ptx::convert_tf32(exact - __uint_as_float(rounded));
            }
        }
    } else {
        uint4* const row = reinterpret_cast<uint4*>(out + Layout::kOffsetA + lane * 64);
        const float scale_q = sm.scale_q[lane];
#pragma unroll
        for (int piece = 0; piece < 4; ++piece) {
            uint32_t packed[4], low[4];
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const int column = 8 * piece + 4 * half;
                const float4 values = *reinterpret_cast<const float4*>(&matrices.a[lane][column]);
                const float4 scale_k = *reinterpret_cast<const float4*>(&sm.scale_k[column]);
                const float exact[4] = {column <= lane ? values.x * scale_q * scale_k.x : 0.0f,
                                        column + 1 <= lane ? values.y * scale_q * scale_k.y : 0.0f,
                                        column + 2 <= lane ? values.z * scale_q * scale_k.z : 0.0f,
                                        column + 3 <= lane ? values.w * scale_q * scale_k.w : 0.0f};
#pragma unroll
                for (int c = 0; c < 2; ++c) {
                    packed[2 * half + c] = ptx::pack2<__half>(exact[2 * c], exact[2 * c + 1]);
                    const float2 high = unpack2<__half>(packed[2 * half + c]);
                    low[2 * half + c] = ptx::pack2<__half>(exact[2 * c] - high.x, exact[2 * c + 1] - high.y);
                }
            }
            row[piece ^ ((lane / 2) % 4)] = {packed[0], packed[1], packed[2], packed[3]};
            if constexpr (Layout::kTerms == 2) {
                row[Layout::kSquareBytes / 16 + (piece ^ ((lane / 2) % 4))] = {low[0], low[1], low[2], low[3]};
            }
        }
    }
}

}  // namespace flare::kda::sm80
