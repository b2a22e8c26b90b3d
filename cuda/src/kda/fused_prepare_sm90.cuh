// A prepare team: the warpgroup that turns k, q, gates and beta of a chunk into the operand block of the recurrence.
//
// Thread: eight rows (those of its warp) of four channels. Gates become prefix sums of log2 decays in registers; the
// warps exchange their totals. With a gate bounded by -5, a sum over 32 tokens lies in [-231, 0]; with the anchor a = -112,
// k exp2(G - a), q exp2(G - a) and k exp2(a - G) stay inside bf16's exponent, so that one chain of wgmma gives k k^T and
// q k^T with decay for all 32 rows. An anchor taken from the gates would let later gates change earlier bits.
//
// Any other gate: the second half of the chunk has an anchor of its own, behind the whole number next to G after the first
// half, and a decay of less than 2^-14 in a token counts as 2^-14. Then sums over half a chunk lie in [-224, 0] and the operands
// inside bf16's exponent again. The second half's rows meet the first half's keys in a copy brought from one anchor to the
// other, by whole powers of two per channel: exact in 16 bits.
#pragma once

#include "kda/fused_config_sm90.cuh"
#include "ptx/ldst.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/mma_sync.cuh"
#include "ptx/sync.cuh"
#include "ptx/tma.cuh"
#include "ptx/wgmma.cuh"
#include "tile/smem_desc.cuh"

namespace flare::kda::fused {

inline constexpr float kBoundedFrom = -5.0f;  // lower_bound that the exponent range allows
inline constexpr float kAnchor = -112.0f;
inline constexpr float kPowerOfAnchor = 0x1p-112f;

// kOne: for the whole chunk. kPerHalf: for any gate.
enum class Anchors { kOne, kPerHalf };
inline constexpr int kLift = 112;
inline constexpr float kLeastLog2 = -14.0f;  // of a token's decay
static_assert(kAnchor == -kLift && 16 * kLeastLog2 >= 2 * kAnchor);

template <class M>
struct Team {
    uint32_t smem;  // base of the block's shared memory
    uint32_t index;
    int warp;  // 0..3
    int lane;

    __device__ __forceinline__ uint32_t input(uint32_t stage) const {
        return smem + (M::kInputStages * index + stage) * kInputBytes;
    }
    __device__ __forceinline__ uint32_t input_full(uint32_t stage) const {
        return smem + M::kOffsetInputFull + 8 * (M::kInputStages * index + stage);
    }
    __device__ __forceinline__ uint32_t scratch() const { return smem + M::kOffsetScratch + index * kScratchBytes; }
    // All of the team; its first two warps.
    __device__ __forceinline__ void sync() const { ptx::named_barrier_sync(1 + index, 128); }
    __device__ __forceinline__ void sync_first() const { ptx::named_barrier_sync(1 + M::kTeams + index, 64); }
    // A team starts when the one before it has made its first tiles: in step, all would want the same units at a time.
    __device__ __forceinline__ void wait_for_start() const { ptx::named_barrier_sync(1 + 2 * M::kTeams + index, 256); }
    __device__ __forceinline__ void start_next() const { ptx::named_barrier_arrive(2 + 2 * M::kTeams + index, 256); }
};

template <class Walk>
__device__ __forceinline__ int chunk_length(const Walk& walk) {
    return min(kChunk, walk.unit.tokens - walk.done);
}

// [32][64] boxes of the tensors. What lies behind the tensor's end arrives as zeros, what behind the sequence's as it is.
__device__ __forceinline__ void load_box(uint32_t to, const CUtensorMap& map, uint32_t bar, int column, const Unit& unit,
                                         int head, int done, const KdaParams& p) {
    ptx::tma_load_4d(to, &map, bar, column, unit.row + done, head, unit.batch(p), ptx::kL2EvictNormal);
}

template <class Walk>
__device__ __forceinline__ void load_inputs(const Args& args, const Walk& walk, uint32_t stage, uint32_t bar) {
    const KdaParams& p = args.p;
    const int head_qk = walk.unit.head / static_cast<int>(p.heads_v / p.heads_qk);
    ptx::mbarrier_arrive_expect_tx(bar, kInputBytes);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        const uint32_t to = stage + half * kInputHalf;
        load_box(to + kInputG, args.g, bar, 64 * half, walk.unit, walk.unit.head, walk.done, p);
        load_box(to, args.k, bar, 64 * half, walk.unit, head_qk, walk.done, p);
        load_box(to + kInputQ, args.q, bar, 64 * half, walk.unit, head_qk, walk.done, p);
    }
}

// Before its activation, which would wait for it.
template <typename T, class Walk>
__device__ __forceinline__ float load_beta(const KdaParams& p, const Walk& walk, int lane) {
    if (lane >= chunk_length(walk)) {
        return 0.0f;
    }
    const int64_t offset = static_cast<int64_t>(walk.unit.batch(p)) * p.beta_stride.batch +
                           static_cast<int64_t>(walk.unit.row + walk.done + lane) * p.beta_stride.token +
                           walk.unit.head * p.beta_stride.head;
    return load_scalar<T>(p.beta, offset, p.beta_dtype == DType::kFp32);
}

__device__ __forceinline__ uint2 ld_shared_u2(uint32_t addr) {
    uint2 r;
    asm volatile("ld.shared.v2.b32 {%0, %1}, [%2];" : "=r"(r.x), "=r"(r.y) : "r"(addr) : "memory");
    return r;
}
__device__ __forceinline__ void st_shared_u2(uint32_t addr, uint32_t x, uint32_t y) {
    asm volatile("st.shared.v2.b32 [%0], {%1, %2};" ::"r"(addr), "r"(x), "r"(y) : "memory");
}
__device__ __forceinline__ float4 ld_shared_f4(uint32_t addr) {
    float4 r;
    asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];"
                 : "=f"(r.x), "=f"(r.y), "=f"(r.z), "=f"(r.w)
                 : "r"(addr)
                 : "memory");
    return r;
}
__device__ __forceinline__ void st_shared_f4(uint32_t addr, float x, float y, float z, float w) {
    asm volatile("st.shared.v4.f32 [%0], {%1, %2, %3, %4};" ::"r"(addr), "f"(x), "f"(y), "f"(z), "f"(w) : "memory");
}
__device__ __forceinline__ float ld_shared_f(uint32_t addr) {
    float r;
    asm volatile("ld.shared.f32 %0, [%1];" : "=f"(r) : "r"(addr) : "memory");
    return r;
}
__device__ __forceinline__ void st_shared_f(uint32_t addr, float x) {
    asm volatile("st.shared.f32 [%0], %1;" ::"r"(addr), "f"(x) : "memory");
}
__device__ __forceinline__ void st_shared_u(uint32_t addr, uint32_t x) {
    asm volatile("st.shared.b32 [%0], %1;" ::"r"(addr), "r"(x) : "memory");
}
// Products of packed pairs of bf16; exact when one side is a power of two.
__device__ __forceinline__ uint32_t multiply_bf16x2(uint32_t a, uint32_t b) {
    uint32_t r;
    asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(r) : "r"(a), "r"(b));
    return r;
}

// Packed bf16 powers of two; zeros below the normal numbers.
__device__ __forceinline__ uint32_t powers_bf16x2(int first, int second) {
    return static_cast<uint32_t>(max(first + 127, 0)) << 7 | static_cast<uint32_t>(max(second + 127, 0)) << 23;
}

// The whole number next to x, |x| < 2^22, as it stands in the mantissa of the sum.
struct Whole {
    float shifted;
    __device__ __forceinline__ explicit Whole(float x) : shifted(x + 0x1.8p23f) {}
    __device__ __forceinline__ float value() const { return shifted - 0x1.8p23f; }
    __device__ __forceinline__ int number() const { return __float_as_int(shifted) - __float_as_int(0x1.8p23f); }
};

__device__ __forceinline__ float min_or_nan(float x, float y) {
    float r;
    asm("min.NaN.f32 %0, %1, %2;" : "=f"(r) : "f"(x), "f"(y));
    return r;
}

// log2(1 + 2^-|y|) + max(y, 0). The polynomial is log2(1 + z) / z to a relative 6e-5 on [0, 1], also for small z: what is wrong
// with the decay of a long memory adds up.
__device__ __forceinline__ float softplus_log2(float y) {
    const float z = ptx::exp2_approx(-fabsf(y));
    float p = fmaf(z, 0.059651543f, -0.22711948f);
    p = fmaf(z, p, 0.4418989f);
    p = fmaf(z, p, -0.71698743f);
    p = fmaf(z, p, 1.4426132f);
    return fmaf(z, p, fmaxf(y, 0.0f));
}

// What the gate of a head needs, into the scratch: the factor of its input, the bias times it, the factor of the sigmoid or the
// softplus, and where the latter counts no further. The next sync of the team publishes it.
template <Anchors kAnchors, class M>
__device__ __forceinline__ void put_gate(const KdaParams& p, const Team<M>& team, int head) {
    if (team.warp == 0) {
        const GateConstants c = gate_constants(p, head);
        float factor = -c.a_log2e;
        float outer = c.bound_log2e;
        if (kAnchors == Anchors::kPerHalf && p.gate != Gate::kBounded) {
            factor = p.gate == Gate::kSoftplus ? kLog2e : -kLog2e;
            outer = -c.a_log2e * kLn2;
        }
        float4 bias = {0.0f, 0.0f, 0.0f, 0.0f};
        if (p.dt_bias != nullptr && 4 * team.lane < p.head_dim_k) {
            bias = __ldg(reinterpret_cast<const float4*>(p.dt_bias + static_cast<int64_t>(head) * p.head_dim_k) + team.lane);
        }
        st_shared_f4(team.scratch() + kScratchBias + 16 * team.lane, factor * bias.x, factor * bias.y, factor * bias.z,
                     factor * bias.w);
        if (team.lane == 0) {
            st_shared_f(team.scratch() + kScratchGate, factor);
            st_shared_f(team.scratch() + kScratchGate + 4, outer);
            if constexpr (kAnchors == Anchors::kPerHalf) {
                st_shared_f(team.scratch() + kScratchGate + 8, kLeastLog2 * ptx::rcp_approx(outer));
            }
        }
    }
}

// Zeros in a warp's rows behind the end of the sequence.
__device__ __forceinline__ void clear_rows(uint32_t in, uint32_t column, int valid) {
#pragma unroll 1
    for (int i = max(valid, 0); i < 8; ++i) {
        const uint32_t at = in + i * 128 + (column ^ (i << 4));
        st_shared_u2(at, 0, 0);
        st_shared_u2(at + kInputQ, 0, 0);
        st_shared_u2(at + kInputG, 0, 0);
    }
    __syncwarp();
}

// Norms and q_i k_i of a warp's eight rows, by tensor cores from the rows as they came: the diagonals of q q^T, k q^T and
// k k^T. Lane (g, t) of the quads with t = g / 2 holds those of row g.
template <typename T>
struct Norms {
    float q[4] = {};
    float k[4] = {};

    template <class M>
    __device__ __forceinline__ void multiply(const Team<M>& team, uint32_t stage) {
        const int lane = team.lane;
        const uint32_t lane_row = stage + (8 * team.warp + lane % 8) * 128 + ((lane / 8) % 2 == 0 ? kInputQ : 0);
        const uint32_t piece = (((lane / 16) ^ (lane % 8)) << 4);
#pragma unroll
        for (int kk = 0; kk < 8; ++kk) {
            uint32_t a[4];
            ptx::ldmatrix_x4(a, lane_row + (kk / 4) * kInputHalf + (piece ^ ((kk % 4) << 5)));
            ptx::mma_m16n8k16<T>(q, a, a[0], a[2]);
            ptx::mma_m16n8k16<T>(k, a, a[1], a[3]);
        }
    }
    // Which rows have a key much like one of the warp's rows before them: row i if any of the bits 4 i to 4 i + 3 is set. Later
    // rows do not count, so that no later token changes earlier bits.
    __device__ __forceinline__ uint32_t repeats(int lane) const {
        const int g = lane / 4;
        const int t = lane % 4;
        const float size = __shfl_sync(0xffffffffu, g % 2 == 0 ? k[2] : k[3], 4 * g + g / 2);
        const float first = 2 * t < g ? fabsf(k[2]) : 0.0f;
        const float second = 2 * t + 1 < g ? fabsf(k[3]) : 0.0f;
        return __ballot_sync(0xffffffffu, fmaxf(first, second) > 0.5f * size);
    }
    // To the scratch.
    template <class M>
    __device__ __forceinline__ void put(const KdaParams& p, const Team<M>& team) const {
        const int lane = team.lane;
        const uint32_t rows = repeats(lane);
        if (lane == 0) {
            st_shared_u(team.scratch() + kScratchRepeats + 4 * team.warp, rows);
        }
        if (lane % 4 == lane / 8) {
            const bool odd = (lane / 4) % 2 != 0;
            const bool norm = p.qk_l2norm != 0;
            const float norm_k = norm ? rsqrtf((odd ? k[3] : k[2]) + kNormEpsilon) : 1.0f;
            const float norm_q = p.scale * (norm ? rsqrtf((odd ? q[1] : q[0]) + kNormEpsilon) : 1.0f);
            const int row = 8 * team.warp + lane / 4;
            const float rho = __int_as_float((__float_as_int(norm_k) & 0x7fffff) | 0x3f800000);
            const float inverse = 1.0f / rho;
            st_shared_f4(team.scratch() + kScratchNorms + 16 * row, norm_k, norm_q, inverse, rho);
            st_shared_f(team.scratch() + kScratchDiagonal + 4 * row, (odd ? q[3] : q[2]) * norm_k * norm_q * inverse);
        }
    }
};

// What 16 bits leave of k exp2(a - G) in the rows whose key repeats an earlier one, zeros in the others.
template <typename T, class M>
__device__ __forceinline__ void put_keys_low(const Team<M>& team, uint32_t in, uint32_t out, uint32_t column,
                                             const float (&sum)[8][4], const float (&start)[4]) {
    const uint32_t rows = __float_as_uint(ld_shared_f(team.scratch() + kScratchRepeats + 4 * team.warp));
#pragma unroll
    for (int i = 0; i < 8; ++i) {
        uint32_t low16[2] = {0, 0};
        if ((rows >> (4 * i)) % 16 != 0) {
            const uint2 raw = ld_shared_u2(in + i * 128 + (column ^ (i << 4)));
            const float2 k01 = unpack2<T>(raw.x), k23 = unpack2<T>(raw.y);
            const float norm = ld_shared_f(team.scratch() + kScratchNorms + 16 * (8 * team.warp + i));
            const float k[4] = {k01.x, k01.y, k23.x, k23.y};
            float low[4];
#pragma unroll
            for (int c = 0; c < 4; ++c) {
                const float exact = k[c] * norm * ptx::exp2_approx(-(sum[i][c] + start[c]));
                low[c] = exact - static_cast<float>(static_cast<T>(exact));
            }
            low16[0] = ptx::pack2<T>(low[0], low[1]);
            low16[1] = ptx::pack2<T>(low[2], low[3]);
        }
        st_shared_u2(out + i * 128 + (column ^ (i << 4)), low16[0], low16[1]);
    }
}

// Sums of log2 decays along a warp's rows, from the gates at `gates`: add(sum, gate, channel, valid).
template <typename T, class Add>
__device__ __forceinline__ void sum_gates(float (&sum)[8][4], uint32_t gates, uint32_t column, int valid, const Add& add) {
    float run[4] = {};
#pragma unroll
    for (int i = 0; i < 8; ++i) {
        const uint2 raw = ld_shared_u2(gates + i * 128 + (column ^ (i << 4)));
        const float2 low = unpack2<T>(raw.x);
        const float2 high = unpack2<T>(raw.y);
        const float g[4] = {low.x, low.y, high.x, high.y};
#pragma unroll
        for (int c = 0; c < 4; ++c) {
            run[c] = add(run[c], g[c], c, i < valid);
            sum[i][c] = run[c];
        }
    }
}

// Gates to sums, and with them the operand tiles. `block` is the operand block, `stage` the inputs; wait_for_block() comes
// before the block is written. Returns whether keys repeat: then there are second terms of k exp2(a - G) too, zeros in the
// rows whose key is new.
template <typename T, Anchors kAnchors, class M, class Wait>
__device__ __forceinline__ bool prepare_tiles(const KdaParams& p, const Team<M>& team, uint32_t stage, uint32_t block,
                                              int length, const Wait& wait_for_block) {
    const int lane = team.lane;
    const int row0 = 8 * team.warp;
    // Byte of the lane's channels in a row, before the swizzle.
    const uint32_t column = ((lane % 16) / 2) * 16 + (lane % 2) * 8;
    const uint32_t in = stage + (lane / 16) * kInputHalf + row0 * 128;
    const uint32_t out = block + (lane / 16) * 4096 + row0 * 128;

    if (row0 + 8 > length) {
        clear_rows(in, column, length - row0);
    }
    Norms<T> norms;
    if constexpr (kAnchors == Anchors::kOne) {
        norms.multiply(team, stage);  // in flight during the gates
    }
    float sum[8][4];
    const float4 gate = ld_shared_f4(team.scratch() + kScratchGate);  // factor, outer factor, limit
    const float4 biases = ld_shared_f4(team.scratch() + kScratchBias + 16 * lane);
    const float bias[4] = {biases.x, biases.y, biases.z, biases.w};
    const int valid = length - row0;
    if constexpr (kAnchors == Anchors::kOne) {
        sum_gates<T>(sum, in + kInputG, column, valid, [&](float run, float g, int c, bool inside) {
            const float sigmoid = ptx::rcp_approx(1.0f + ptx::exp2_approx(fmaf(g, gate.x, bias[c])));
            return fmaf(sigmoid, inside ? gate.y : 0.0f, run);
        });
    } else if (p.gate == Gate::kSoftplus) {
        sum_gates<T>(sum, in + kInputG, column, valid, [&](float run, float g, int c, bool inside) {
            return fmaf(min_or_nan(softplus_log2(fmaf(g, gate.x, bias[c])), gate.z), inside ? gate.y : 0.0f, run);
        });
    } else if (p.gate == Gate::kLog) {
        sum_gates<T>(sum, in + kInputG, column, valid,
                     [&](float run, float g, int, bool) { return run - min_or_nan(g * gate.x, -kLeastLog2); });
    } else {
        sum_gates<T>(sum, in + kInputG, column, valid, [&](float run, float g, int c, bool inside) {
            const float sigmoid = ptx::rcp_approx(1.0f + ptx::exp2_approx(fmaf(g, gate.x, bias[c])));
            return fmaf(min_or_nan(sigmoid, gate.z), inside ? gate.y : 0.0f, run);
        });
    }
    if constexpr (kAnchors == Anchors::kPerHalf) {
        norms.multiply(team, stage);  // the branches above let nothing fly, and the fused form is short of registers
    }
    norms.put(p, team);
    wait_for_block();
    const uint32_t totals = block + kBlockTotals + lane * 16;
    st_shared_f4(totals + team.warp * 512, sum[7][0], sum[7][1], sum[7][2], sum[7][3]);
    team.sync();

    // G - a = sum + start, lifted; exp2(G_C - a).
    float start[4], rest[4];
    // Packed bf16: from the anchor to the start of the chunk; of the first half's keys to the second half's anchor, lifted.
    uint32_t to_start[2];
    [[maybe_unused]] uint32_t to_second[2];
    {
        const float4 total0 = ld_shared_f4(totals);
        const float4 total1 = ld_shared_f4(totals + 512);
        const float4 total2 = ld_shared_f4(totals + 1024);
        const float4 total3 = ld_shared_f4(totals + 1536);
        const float t[4][4] = {{total0.x, total0.y, total0.z, total0.w},
                               {total1.x, total1.y, total1.z, total1.w},
                               {total2.x, total2.y, total2.z, total2.w},
                               {total3.x, total3.y, total3.z, total3.w}};
        float all[4];
        [[maybe_unused]] int second[4];
#pragma unroll
        for (int c = 0; c < 4; ++c) {
            const float half = t[0][c] + t[1][c];
            const float three = half + t[2][c];
            all[c] = three + t[3][c];
            float anchor = kAnchor;
            if constexpr (kAnchors == Anchors::kPerHalf) {
                const Whole whole(half);
                second[c] = whole.number();
                anchor += team.warp < 2 ? 0.0f : whole.value();
            }
            start[c] = (team.warp == 0 ? 0.0f : team.warp == 1 ? t[0][c] : team.warp == 2 ? half : three) - anchor;
            rest[c] = ptx::exp2_approx(all[c] - anchor);
        }
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            to_start[h] = ptx::pack2<T>(kPowerOfAnchor, kPowerOfAnchor);
            if constexpr (kAnchors == Anchors::kPerHalf) {
                to_second[h] = powers_bf16x2(second[2 * h] + kLift, second[2 * h + 1] + kLift);
                if (team.warp >= 2) {
                    to_start[h] = powers_bf16x2(second[2 * h] - kLift, second[2 * h + 1] - kLift);
                }
            }
        }
        if constexpr (kAnchors == Anchors::kPerHalf) {
            if (team.warp == 2) {
                st_shared_u2(team.scratch() + kScratchSecond + 8 * lane, to_second[0], to_second[1]);
            }
        }
        if (team.warp == 0) {
            st_shared_f4(block + kBlockDecay + lane * 16, decay_from_log2(all[0]), decay_from_log2(all[1]),
                         decay_from_log2(all[2]), decay_from_log2(all[3]));
        }
    }
    const float4 repeats = ld_shared_f4(team.scratch() + kScratchRepeats);
    const bool any_repeats = (__float_as_uint(repeats.x) | __float_as_uint(repeats.y) | __float_as_uint(repeats.z) |
                              __float_as_uint(repeats.w)) != 0;
    if (any_repeats) {
        put_keys_low<T>(team, in, out + kBlockKeysLow, column, sum, start);
    }
    [[maybe_unused]] const uint32_t copy = block + kBlockCopy + (lane / 16) * 2048 + row0 * 128;
    // Two rows at a time: the stores take the places of what they were made from, so no load moves ahead of them.
    const auto address = [&](int row) { return in + row * 128 + (column ^ (row << 4)); };
#pragma unroll
    for (int i0 = 0; i0 < 8; i0 += 2) {
        uint2 k_raw[2], q_raw[2];
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            k_raw[r] = ld_shared_u2(address(i0 + r));
            q_raw[r] = ld_shared_u2(address(i0 + r) + kInputQ);
        }
        uint32_t kd16[2][2], qd16[2][2], ki16[2][2], kr16[2][2];
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            const float2 k01 = unpack2<T>(k_raw[r].x), k23 = unpack2<T>(k_raw[r].y);
            const float2 q01 = unpack2<T>(q_raw[r].x), q23 = unpack2<T>(q_raw[r].y);
            const float4 norm = ld_shared_f4(team.scratch() + kScratchNorms + 16 * (row0 + i0 + r));
            const float k[4] = {k01.x * norm.x, k01.y * norm.x, k23.x * norm.x, k23.y * norm.x};
            const float q[4] = {q01.x * norm.y, q01.y * norm.y, q23.x * norm.y, q23.y * norm.y};
            float kd[4], qd[4], ki[4], kr[4];
#pragma unroll
            for (int c = 0; c < 4; ++c) {
                const float x = sum[i0 + r][c] + start[c];
                const float decay = ptx::exp2_approx(x);
                kd[c] = k[c] * decay;
                qd[c] = q[c] * decay;
                ki[c] = k[c] * ptx::exp2_approx(-x);
                kr[c] = ki[c] * norm.z * rest[c];
            }
#pragma unroll
            for (int h = 0; h < 2; ++h) {
                kd16[r][h] = ptx::pack2<T>(kd[2 * h], kd[2 * h + 1]);
                qd16[r][h] = ptx::pack2<T>(qd[2 * h], qd[2 * h + 1]);
                ki16[r][h] = ptx::pack2<T>(ki[2 * h], ki[2 * h + 1]);
                kr16[r][h] = ptx::pack2<__half>(kr[2 * h], kr[2 * h + 1]);
            }
        }
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            const int i = i0 + r;
            const uint32_t at = address(i);
            const uint32_t to = out + i * 128 + (column ^ (i << 4));
            st_shared_u2(at, kd16[r][0], kd16[r][1]);
            st_shared_u2(at + kInputQ, qd16[r][0], qd16[r][1]);
            st_shared_u2(at + kInputG, ki16[r][0], ki16[r][1]);
            if constexpr (kAnchors == Anchors::kPerHalf) {
                if (team.warp < 2) {
                    st_shared_u2(copy + i * 128 + (column ^ (i << 4)), multiply_bf16x2(ki16[r][0], to_second[0]),
                                 multiply_bf16x2(ki16[r][1], to_second[1]));
                }
            }
            st_shared_u2(to + kBlockQd, multiply_bf16x2(qd16[r][0], to_start[0]), multiply_bf16x2(qd16[r][1], to_start[1]));
            st_shared_u2(to + kBlockKr, kr16[r][0], kr16[r][1]);
        }
    }
    return any_repeats;
}

// [Kd; Qd] (k exp2(a - G))^T, the keys in one or two terms.
template <typename T, bool kTwoTerms>
__device__ __forceinline__ void multiply_keys(float (&acc)[16], uint64_t rows, uint64_t columns, uint64_t columns_low) {
    ptx::wgmma_fence();
#pragma unroll
    for (int kk = 0; kk < 8; ++kk) {
        const uint32_t step = tile::step_k<tile::Swizzle::k128>(kk, 96);
        ptx::wgmma_ss<T, 32>(acc, tile::advance_desc(rows, step), tile::advance_desc(columns, step), kk > 0);
        if constexpr (kTwoTerms) {
            ptx::wgmma_ss<T, 32>(acc, tile::advance_desc(rows, step),
                                 tile::advance_desc(columns_low, tile::step_k<tile::Swizzle::k128>(kk, kChunk)), 1);
        }
    }
    ptx::wgmma_commit();
}

// The same times the copy of the first half's keys.
template <typename T>
__device__ __forceinline__ void multiply_copy(float (&acc)[8], uint64_t rows, uint32_t block, bool add) {
    const uint64_t columns = tile::make_desc_k<tile::Swizzle::k128>(block + kBlockCopy);
    ptx::wgmma_fence();
#pragma unroll
    for (int kk = 0; kk < 8; ++kk) {
        ptx::wgmma_ss<T, 16>(acc, tile::advance_desc(rows, tile::step_k<tile::Swizzle::k128>(kk, 96)),
                             tile::advance_desc(columns, tile::step_k<tile::Swizzle::k128>(kk, 16)), add || kk > 0);
    }
    ptx::wgmma_commit();
}

// Second terms of the first half's keys in the places of the copy, by the warps that made them.
template <class M>
__device__ __forceinline__ void copy_keys_low(const Team<M>& team, uint32_t block) {
    if (team.warp < 2) {
        const uint2 to_second = ld_shared_u2(team.scratch() + kScratchSecond + 8 * team.lane);
        const uint32_t column = ((team.lane % 16) / 2) * 16 + (team.lane % 2) * 8;
#pragma unroll 1
        for (int i = 0; i < 8; ++i) {
            const uint32_t at = 1024 * team.warp + i * 128 + (column ^ (i << 4));
            const uint2 low = ld_shared_u2(block + kBlockKeysLow + (team.lane / 16) * kHalfTileBytes + at);
            st_shared_u2(block + kBlockCopy + (team.lane / 16) * 2048 + at, multiply_bf16x2(low.x, to_second.x),
                         multiply_bf16x2(low.y, to_second.y));
        }
    }
}

// The second half's rows of k exp2(G - a), behind all products with them: now from the start of the chunk, lifted.
template <typename T, class M>
__device__ __forceinline__ void bring_keys_to_start(const Team<M>& team, uint32_t stage) {
    if (team.warp >= 2) {
        const uint2 to_second = ld_shared_u2(team.scratch() + kScratchSecond + 8 * team.lane);
        const uint32_t unlift = ptx::pack2<T>(kPowerOfAnchor, kPowerOfAnchor);
        const uint2 factor = {multiply_bf16x2(to_second.x, unlift), multiply_bf16x2(to_second.y, unlift)};
        const uint32_t in = stage + (team.lane / 16) * kInputHalf + 1024 * team.warp;
        const uint32_t column = ((team.lane % 16) / 2) * 16 + (team.lane % 2) * 8;
#pragma unroll 4
        for (int i = 0; i < 8; ++i) {
            const uint32_t at = in + i * 128 + (column ^ (i << 4));
            const uint2 keys = ld_shared_u2(at);
            st_shared_u2(at, multiply_bf16x2(keys.x, factor.x), multiply_bf16x2(keys.y, factor.y));
        }
    }
}

// From k k^T and q k^T in a warpgroup's accumulators (rows 0..31 and 32..63): beta L to shared memory, A to the block.
template <class M>
__device__ __forceinline__ void put_matrices(const Team<M>& team, const float (&acc)[16], uint32_t block) {
    const int g = team.lane / 4;
    const int t = team.lane % 4;
    if (team.warp < 2) {
        const int row = 16 * team.warp + g;
        const float first = ld_shared_f(team.scratch() + kScratchBeta + 4 * row);
        const float second = ld_shared_f(team.scratch() + kScratchBeta + 4 * row + 32);
        const uint32_t matrix = block + kBlockMatrix + 4 * row;
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            if (j < 2 || team.warp == 1) {  // what lies above the diagonal isn't read
                const uint32_t at = matrix + 4 * kMatrixPitch * (8 * j + 2 * t);
                st_shared_f(at, acc[4 * j] * first);
                st_shared_f(at + 4 * kMatrixPitch, acc[4 * j + 1] * first);
                st_shared_f(at + 32, acc[4 * j + 2] * second);
                st_shared_f(at + 4 * kMatrixPitch + 32, acc[4 * j + 3] * second);
            }
        }
    } else {
        const uint32_t diagonals = team.scratch() + kScratchDiagonal + 4 * (16 * (team.warp - 2) + g);
        const float diagonal[2] = {ld_shared_f(diagonals), ld_shared_f(diagonals + 32)};
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            const int column = 8 * j + 2 * t;
            const uint32_t norms = team.scratch() + kScratchNorms + 16 * column + 8;
            const float scale[2] = {ld_shared_f(norms), ld_shared_f(norms + 16)};
#pragma unroll
            for (int h = 0; h < 2; ++h) {
                const int row = 16 * (team.warp - 2) + g + 8 * h;
                const float x = column < row ? acc[4 * j + 2 * h] * scale[0] : column == row ? diagonal[h] : 0.0f;
                const float y =
                    column + 1 < row ? acc[4 * j + 2 * h + 1] * scale[1] : column + 1 == row ? diagonal[h] : 0.0f;
                st_shared_u(block + kBlockA + row * 64 + ((j ^ (g / 2)) << 4) + 4 * t, ptx::pack2<__half>(x, y));
            }
        }
    }
}

// One warp: the inverse of I + L. Lane l solves for column l % 16 of diagonal block l / 16 by forward substitution in
// fp32; the block below them is -X11 L10 X00 by tf32 products. The inverse takes the places of L, [column][row].
__device__ __forceinline__ void invert(uint32_t matrix, int lane) {
    constexpr uint32_t kPitch = 4 * kMatrixPitch;
    const uint32_t diagonal = matrix + (lane / 16) * 16 * (kPitch + 4);
    float x[16];
#pragma unroll
    for (int i = 0; i < 16; ++i) {
        x[i] = i == lane % 16 ? 1.0f : 0.0f;
    }
#pragma unroll
    for (int m = 0; m < 15; ++m) {
#pragma unroll
        for (int i4 = (m + 1) / 4; i4 < 4; ++i4) {
            const float4 l = ld_shared_f4(diagonal + m * kPitch + 16 * i4);
            const float lv[4] = {l.x, l.y, l.z, l.w};
#pragma unroll
            for (int r = 0; r < 4; ++r) {
                if (4 * i4 + r > m) {
                    x[4 * i4 + r] = fmaf(-lv[r], x[m], x[4 * i4 + r]);
                }
            }
        }
    }
    __syncwarp();
#pragma unroll
    for (int i4 = 0; i4 < 4; ++i4) {
        st_shared_f4(diagonal + (lane % 16) * kPitch + 16 * i4, x[4 * i4], x[4 * i4 + 1], x[4 * i4 + 2], x[4 * i4 + 3]);
    }
    __syncwarp();
    const int g = lane / 4;
    const int t = lane % 4;
    float product[2][4] = {};
#pragma unroll
    for (int step = 0; step < 2; ++step) {
        // A = X11, rows of the product; B = L10.
        const uint32_t a = matrix + (16 + 8 * step + t) * kPitch + 4 * (16 + g);
        const uint32_t fragment[4] = {ptx::round_tf32(ld_shared_f(a)), ptx::round_tf32(ld_shared_f(a + 32)),
                                      ptx::round_tf32(ld_shared_f(a + 4 * kPitch)),
                                      ptx::round_tf32(ld_shared_f(a + 4 * kPitch + 32))};
#pragma unroll
        for (int n = 0; n < 2; ++n) {
            const uint32_t b = matrix + (8 * n + g) * kPitch + 4 * (16 + 8 * step + t);
            ptx::mma_m16n8k8_tf32(product[n], fragment, ptx::round_tf32(ld_shared_f(b)), ptx::round_tf32(ld_shared_f(b + 16)));
        }
    }
    float below[2][4] = {};
#pragma unroll
    for (int step = 0; step < 2; ++step) {
        // The accumulator is the next A operand with the reduction in the order 0, 2, 4, 6, 1, 3, 5, 7.
        const uint32_t fragment[4] = {ptx::round_tf32(product[step][0]), ptx::round_tf32(product[step][2]),
                                      ptx::round_tf32(product[step][1]), ptx::round_tf32(product[step][3])};
#pragma unroll
        for (int n = 0; n < 2; ++n) {
            const float2 b = ptx::ld_shared_f2(matrix + (8 * n + g) * kPitch + 4 * (8 * step + 2 * t));
            ptx::mma_m16n8k8_tf32(below[n], fragment, ptx::round_tf32(b.x), ptx::round_tf32(b.y));
        }
    }
    __syncwarp();
#pragma unroll
    for (int n = 0; n < 2; ++n) {
        const uint32_t at = matrix + (8 * n + 2 * t) * kPitch + 4 * (16 + g);
        st_shared_f(at, -below[n][0]);
        st_shared_f(at + kPitch, -below[n][1]);
        st_shared_f(at + 32, -below[n][2]);
        st_shared_f(at + kPitch + 32, -below[n][3]);
    }
}

// From the operand tiles to the inverse; `meanwhile` runs while the products do, by all threads.
template <typename T, Anchors kAnchors, class M, class Meanwhile>
__device__ __forceinline__ void multiply_chunk(const Team<M>& team, uint32_t stage, uint32_t block, bool two_terms,
                                               const Meanwhile& meanwhile) {
    float acc[16];
    [[maybe_unused]] float across[8];
    const uint64_t rows = tile::make_desc_k<tile::Swizzle::k128>(stage);
    const uint64_t columns = tile::make_desc_k<tile::Swizzle::k128>(stage + kInputG);
    if (two_terms) {
        multiply_keys<T, true>(acc, rows, columns, tile::make_desc_k<tile::Swizzle::k128>(block + kBlockKeysLow));
    } else {
        multiply_keys<T, false>(acc, rows, columns, 0);
    }
    if constexpr (kAnchors == Anchors::kPerHalf) {
        multiply_copy<T>(across, rows, block, false);
    }
    meanwhile();
    ptx::wgmma_wait<0>();
    ptx::fence_registers(acc);
    if constexpr (kAnchors == Anchors::kPerHalf) {
        ptx::fence_registers(across);
        if (two_terms) {
            team.sync();
            copy_keys_low(team, block);
            ptx::fence_proxy_async_smem();
            team.sync();
            multiply_copy<T>(across, rows, block, true);
            ptx::wgmma_wait<0>();
            ptx::fence_registers(across);
        }
        if (team.warp % 2 == 1) {
#pragma unroll
            for (int i = 0; i < 8; ++i) {
                acc[i] = across[i] * kPowerOfAnchor;
            }
        }
    }
    if (two_terms || kAnchors == Anchors::kPerHalf) {
        team.sync();  // all products have read second terms and copy, whose places L and A take
    }
    put_matrices(team, acc, block);
    if constexpr (kAnchors == Anchors::kPerHalf) {
        bring_keys_to_start<T>(team, stage);
    }
    if (team.warp < 2) {
        team.sync_first();
        if (team.warp == 0) {
            invert(block + kBlockMatrix, team.lane);
        }
    }
}

// Row `lane`, eight columns of each warp: rho X diag(beta) to the block.
template <typename T, class M>
__device__ __forceinline__ void put_inverse(const Team<M>& team, uint32_t block) {
    const int lane = team.lane;
    const float rho = ld_shared_f(team.scratch() + kScratchNorms + 16 * lane + 12);
    uint32_t high[4], low[4];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        const float4 b = ld_shared_f4(team.scratch() + kScratchBeta + 32 * team.warp + 16 * half);
        const float beta[4] = {b.x, b.y, b.z, b.w};
        float x[4];
#pragma unroll
        for (int c = 0; c < 4; ++c) {
            const int j = 8 * team.warp + 4 * half + c;
            const float inverse = ld_shared_f(block + kBlockMatrix + 4 * (j * kMatrixPitch + lane));
            x[c] = lane >= j ? inverse * (rho * beta[c]) : 0.0f;
        }
#pragma unroll
        for (int pair = 0; pair < 2; ++pair) {
            const int i = 2 * half + pair;
            high[i] = ptx::pack2<T>(x[2 * pair], x[2 * pair + 1]);
            const float2 rounded = unpack2<T>(high[i]);
            low[i] = ptx::pack2<T>(x[2 * pair] - rounded.x, x[2 * pair + 1] - rounded.y);
        }
    }
    const uint32_t at = block + kBlockX + lane * 64 + ((team.warp ^ ((lane / 2) % 4)) << 4);
    ptx::st_shared_v4(at, high);
    ptx::st_shared_v4(at + 2048, low);
}

// w transposed, channels x tokens, by wgmma: the decayed keys as a transposed A operand.
template <typename T, class M>
__device__ __forceinline__ void put_w(const Team<M>& team, uint32_t stage, uint32_t block) {
    const int lane = team.lane;
    const int token = lane % 8 + 8 * (lane / 16);
    const uint32_t to =
        block + kBlockW + token * 128 + (((2 * team.warp + (lane / 8) % 2) ^ (lane % 8)) << 4);
    const uint64_t x = tile::make_desc_k<tile::Swizzle::k64>(block + kBlockX);
    float w[2][16];
    ptx::wgmma_fence();
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        const uint64_t keys = tile::make_desc_mn<tile::Swizzle::k128>(stage + half * kInputHalf, kChunk);
#pragma unroll
        for (int step = 0; step < 2; ++step) {
            const uint64_t a = tile::advance_desc(keys, tile::step_mn<tile::Swizzle::k128>(step));
            ptx::wgmma_ss<T, 32, 1, 0>(w[half], a, tile::advance_desc(x, 32 * step), step > 0);
            ptx::wgmma_ss<T, 32, 1, 0>(w[half], a, tile::advance_desc(x, 2048 + 32 * step), 1);
        }
    }
    ptx::wgmma_commit();
    ptx::wgmma_wait<0>();
    ptx::fence_registers(w[0]);
    ptx::fence_registers(w[1]);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
#pragma unroll
        for (int j = 0; j < 4; j += 2) {
            uint32_t r[4];
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const int at = 4 * (j + i / 2) + 2 * (i % 2);
                r[i] = ptx::pack2<T>(w[half][at] * -kPowerOfAnchor, w[half][at + 1] * -kPowerOfAnchor);
            }
            ptx::stmatrix_x4_trans(to + 4096 * half + 8 * j * 128, r[0], r[1], r[2], r[3]);
        }
    }
}

// A warp's walk to shared memory and back: the tiles need the registers.
template <class Walk>
__device__ __forceinline__ void park(const Walk& walk, uint32_t at) {
    static_assert(sizeof(Walk) % 4 == 0 && sizeof(Walk) <= 28, "a warp parks eight words, the last one a flag");
    const auto& words = reinterpret_cast<const uint32_t(&)[sizeof(Walk) / 4]>(walk);
#pragma unroll
    for (int i = 0; i < static_cast<int>(sizeof(Walk) / 4); ++i) {
        st_shared_u(at + 4 * i, words[i]);
    }
}

template <class Walk>
__device__ __forceinline__ void unpark(Walk& walk, uint32_t at) {
    auto& words = reinterpret_cast<uint32_t(&)[sizeof(Walk) / 4]>(walk);
#pragma unroll
    for (int i = 0; i < static_cast<int>(sizeof(Walk) / 4); ++i) {
        words[i] = __float_as_uint(ld_shared_f(at + 4 * i));
    }
}

// The walk's chunks team.index, team.index + kTeams, ...
template <typename T, Anchors kAnchors, class M, class Walk, class Order>
__device__ __forceinline__ void run_team(const Args& args, const Team<M>& team, Walk next, const Order& order) {
    const KdaParams& p = args.p;
    const auto advance = [&](int count) {
        for (int i = 0; i < count && next.valid(p, order); ++i) {
            next.advance(p, order);
        }
    };
    advance(static_cast<int>(team.index));
    if (!next.valid(p, order)) {
        return;
    }
    const bool loader = team.warp == 3 && ptx::elect_one();
    pipe::PipeState<M::kBlocks> state = pipe::PipeState<M::kBlocks>::producer();
    for (uint32_t i = 0; i < team.index; ++i) {
        state.advance();
    }
    pipe::PipeState<M::kInputStages> input = pipe::PipeState<M::kInputStages>::consumer();
    if (loader) {
        load_inputs(args, next, team.input(0), team.input_full(0));
    }
    // The next chunk's beta waits in the scratch: the tiles need the registers.
    const uint32_t waiting = team.scratch() + kScratchBetaNext + 4 * team.lane;
    if (team.warp == 2) {
        st_shared_f(waiting, load_beta<T>(p, next, team.lane));
    }
    int head = next.unit.head;
    put_gate<kAnchors>(p, team, head);
    const uint32_t parked = team.scratch() + kScratchWalk + 32 * team.warp;
    if (team.index > 0) {
        team.wait_for_start();
    }
    {  // whether the next team has anything to begin with, and waits
        Walk after = next;
        after.advance(p, order);
        st_shared_u(parked + 28, team.index + 1 < M::kTeams && after.valid(p, order) ? 0x3f800000 : 0);
    }
    bool more = true;
#pragma unroll 1
    while (more) {
        const uint32_t stage = team.input(input.stage);
        const uint32_t block = team.smem + M::kOffsetBlock + state.stage * M::kBlockBytes;
        const uint32_t full = team.smem + M::kOffsetBlockFull + 8 * state.stage;
        const int length = chunk_length(next);
        if (next.unit.head != head) {
            head = next.unit.head;
            put_gate<kAnchors>(p, team, head);
        }
        team.sync();  // all have left the other stage, and the block of the last round
        if (team.warp == 2) {
            st_shared_f(team.scratch() + kScratchBeta + 4 * team.lane,
                        team.lane < length ? activate_beta(p.beta_activation, ld_shared_f(waiting)) : 0.0f);
        }
        ptx::mbarrier_wait(team.smem + M::kOffsetBlockEmpty + 8 * state.stage, state.phase);
        ptx::mbarrier_wait(team.input_full(input.stage), input.phase);

        park(next, parked);
        const bool two_terms = prepare_tiles<T, kAnchors>(p, team, stage, block, length, [] {});
        if (ld_shared_f(parked + 28) != 0.0f) {
            team.start_next();
            st_shared_u(parked + 28, 0);
        }
        ptx::fence_proxy_async_smem();
        team.sync();
        float beta_next = 0.0f;
        // What comes next, while the products run and warps 2 and 3 have the time to begin the copies.
        multiply_chunk<T, kAnchors>(team, stage, block, two_terms, [&] {
            unpark(next, parked);
            if (loader) {
                ptx::mbarrier_arrive_expect_tx(full, 2 * kHalfTileBytes);
                load_box(block + kBlockV, args.v, full, 0, next.unit, head, next.done, p);
                load_box(block + kBlockV + kHalfTileBytes, args.v, full, 64, next.unit, head, next.done, p);
            }
            advance(M::kTeams);
            more = next.valid(p, order);
            if (more && loader) {
                load_inputs(args, next, team.input(1 - input.stage), team.input_full(1 - input.stage));
            }
            if (team.warp == 2 && more) {
                beta_next = load_beta<T>(p, next, team.lane);
            }
        });
        team.sync();
        put_inverse<T>(team, block);
        ptx::fence_proxy_async_smem();
        team.sync();
        put_w<T>(team, stage, block);
        if (team.warp == 2) {
            st_shared_f(waiting, beta_next);
        }
        ptx::fence_proxy_async_smem();  // also: the stage goes back to the copies
        __syncwarp();
        if (team.lane == 0) {
            ptx::mbarrier_arrive(full);
        }
        input.advance();
        for (int i = 0; i < M::kTeams; ++i) {
            state.advance();
        }
    }
}

}  // namespace flare::kda::fused
