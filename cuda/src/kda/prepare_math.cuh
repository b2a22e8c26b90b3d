// Arithmetic of the prepare kernel (prepare_sm80.cuh): decays of a row, the products of a 16-row block with no bound on the
// gate and the cheaper way where it is bounded, and the triangular solve.
#pragma once

#include "kda/slots.cuh"
#include "ptx/ldst.cuh"
#include "ptx/math.cuh"
#include "ptx/mma_sync.cuh"

namespace flare::kda {

inline constexpr int kMatrixPitch = 36;

// Decays of eight channels of a row from its gates: `raw` when they are 16-bit, read here when fp32. 1 for a row past
// the end. kBoundedOnly leaves the other gates out of the code: the instruction cache is a limit here.
template <typename T, bool kBoundedOnly>
__device__ __forceinline__ void decays(float (&decay)[8], const uint4& raw, const float* fp32_gates,
                                       const GateConstants& gate, const float (&bias)[8], bool valid) {
    if (fp32_gates == nullptr) {
        unpack8<T>(decay, raw);
    } else if (valid) {
        const float4 low = __ldg(reinterpret_cast<const float4*>(fp32_gates));
        const float4 high = __ldg(reinterpret_cast<const float4*>(fp32_gates) + 1);
        decay[0] = low.x, decay[1] = low.y, decay[2] = low.z, decay[3] = low.w;
        decay[4] = high.x, decay[5] = high.y, decay[6] = high.z, decay[7] = high.w;
    }
    if (kBoundedOnly || gate.gate == Gate::kBounded) {
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            decay[i] = bounded_gate_log2(gate, decay[i] + bias[i]);
        }
    } else if (gate.gate == Gate::kSoftplus) {
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            decay[i] = softplus_gate_log2(gate, decay[i] + bias[i]);
        }
    } else {
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            decay[i] *= kLog2e;
        }
    }
#pragma unroll
    for (int i = 0; i < 8; ++i) {
        decay[i] = valid ? decay_from_log2(decay[i]) : 1.0f;
    }
}

// pack(x * f) of eight channels.
template <typename T>
__device__ __forceinline__ void scale_pack(uint32_t (&r)[4], const float (&x)[8], const float (&f)[8]) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        r[i] = ptx::pack2<T>(x[2 * i] * f[2 * i], x[2 * i + 1] * f[2 * i + 1]);
    }
}

// Adds one level's products to acc, then doubles the extent of the prefixes and suffixes. kLevel 0..3 is s = 1, 2,
// 4, 8.
template <typename T, int kLevel>
__device__ __forceinline__ void level(float (&acc)[4], float (&pre)[2][8], float (&suf)[2][8], const float (&k)[2][8],
                                      const uint4 (&q)[2], int g) {
    constexpr int s = 1 << kLevel;
    const bool first_odd = s < 8 && (g & s) != 0;  // row r1 = g is the odd-half row; else r2 = 15 - g is
    float odd_q[8];
    unpack8<T>(odd_q, {first_odd ? q[0].x : q[1].x, first_odd ? q[0].y : q[1].y, first_odd ? q[0].z : q[1].z,
                       first_odd ? q[0].w : q[1].w});
#pragma unroll
    for (int i = 0; i < 8; i += 2) {
        uint32_t odd_k[2], odd_q32[2], even_k[2];
#pragma unroll
        for (int c = 0; c < 2; ++c) {
            const float factor = first_odd ? pre[0][i + c] : pre[1][i + c];
            odd_k[c] = ptx::round_tf32((first_odd ? k[0][i + c] : k[1][i + c]) * factor);
            odd_q32[c] = ptx::round_tf32(odd_q[i + c] * factor);
            const float even = first_odd ? k[1][i + c] : k[0][i + c];
            // The suffix of a one-row half is 1, and a 16-bit value needs no rounding.
            even_k[c] = kLevel == 0 ? __float_as_uint(even)
                                    : ptx::round_tf32(even * (first_odd ? suf[1][i + c] : suf[0][i + c]));
        }
        ptx::mma_m16n8k8_tf32(acc, {odd_k[0], odd_q32[0], odd_k[1], odd_q32[1]}, even_k[0], even_k[1]);
    }
#pragma unroll
    for (int i = 0; i < 8; ++i) {
        const float total1 = pre[0][i] * suf[0][i];
        const float total2 = pre[1][i] * suf[1][i];
        if constexpr (s == 8) {
            suf[0][i] *= total2;
            pre[1][i] *= total1;
        } else {
            const float sibling1 = __shfl_xor_sync(0xffffffffu, total1, 4 * s);
            const float sibling2 = __shfl_xor_sync(0xffffffffu, total2, 4 * s);
            if (first_odd) {
                pre[0][i] *= sibling1;
                suf[1][i] *= sibling2;
            } else {
                suf[0][i] *= sibling1;
                pre[1][i] *= sibling2;
            }
        }
    }
}

// The cheaper way where the gate is bounded, lower_bound >= kAnchorFreeBound: one product for the whole 16 x 16 block
// with its first row as anchor. exp(-G) of the columns that count (0..14) stays below e^75, so keys up to 9e5 fit; tf32
// has the exponent of fp32. acc[0..1] is k k^T and acc[2..3] q k^T, by column halves as in `cross`. Leaves the suffixes
// in suf and the block's decay in total.
inline constexpr float kAnchorFreeBound = -5.0f;

template <typename T>
__device__ __forceinline__ void anchor_free(float (&acc)[4][4], float (&pre)[2][8], float (&suf)[2][8],
                                            float (&total)[8], const float (&k)[2][8], const uint4 (&q)[2], int g) {
    constexpr int kStep = 4;
    // Four channels at a time: all eight would keep too many registers alive.
#pragma unroll
    for (int i0 = 0; i0 < 8; i0 += kStep) {
        float sum[2][kStep];
#pragma unroll
        for (int i = 0; i < kStep; ++i) {
            sum[0][i] = pre[0][i0 + i];
            sum[1][i] = pre[1][i0 + i];
        }
#pragma unroll
        for (int s = 1; s < 8; s *= 2) {
            const bool first_odd = (g & s) != 0;
#pragma unroll
            for (int i = 0; i < kStep; ++i) {
                const float sibling1 = __shfl_xor_sync(0xffffffffu, sum[0][i], 4 * s);
                const float sibling2 = __shfl_xor_sync(0xffffffffu, sum[1][i], 4 * s);
                pre[0][i0 + i] *= first_odd ? sibling1 : 1.0f;
                pre[1][i0 + i] *= first_odd ? 1.0f : sibling2;
                sum[0][i] *= sibling1;
                sum[1][i] *= sibling2;
            }
        }
#pragma unroll
        for (int i = 0; i < kStep; ++i) {
            pre[1][i0 + i] *= sum[0][i];
            total[i0 + i] = sum[0][i] * sum[1][i];
        }
    }
    const uint32_t q_words[2][4] = {{q[0].x, q[0].y, q[0].z, q[0].w}, {q[1].x, q[1].y, q[1].z, q[1].w}};
#pragma unroll
    for (int i = 0; i < 8; i += 2) {
        const float2 q0 = unpack2<T>(q_words[0][i / 2]);
        const float2 q1 = unpack2<T>(q_words[1][i / 2]);
        const uint32_t ak[4] = {ptx::round_tf32(k[0][i] * pre[0][i]), ptx::round_tf32(k[1][i] * pre[1][i]),
                                ptx::round_tf32(k[0][i + 1] * pre[0][i + 1]),
                                ptx::round_tf32(k[1][i + 1] * pre[1][i + 1])};
        const uint32_t aq[4] = {ptx::round_tf32(q0.x * pre[0][i]), ptx::round_tf32(q1.x * pre[1][i]),
                                ptx::round_tf32(q0.y * pre[0][i + 1]), ptx::round_tf32(q1.y * pre[1][i + 1])};
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const float inverse0 = ptx::rcp_approx(pre[half][i]);
            const float inverse1 = ptx::rcp_approx(pre[half][i + 1]);
            const uint32_t b0 = ptx::round_tf32(k[half][i] * inverse0);
            const uint32_t b1 = ptx::round_tf32(k[half][i + 1] * inverse1);
            ptx::mma_m16n8k8_tf32(acc[half], ak, b0, b1);
            ptx::mma_m16n8k8_tf32(acc[2 + half], aq, b0, b1);
            suf[half][i] = inverse0 * total[i];
            suf[half][i + 1] = inverse1 * total[i + 1];
        }
    }
}

// Column `lane` of (I + L)^-1 by forward substitution in fp32, right-looking so that the updates of one step are
// independent.
__device__ __forceinline__ void solve_column(float (&x)[kChunk], const float (&l_transposed)[kChunk][kMatrixPitch],
                                             int lane) {
#pragma unroll
    for (int i = 0; i < kChunk; ++i) {
        x[i] = i == lane ? 1.0f : 0.0f;
    }
#pragma unroll
    for (int m = 0; m < kChunk - 1; ++m) {
#pragma unroll
        for (int i4 = (m + 1) / 4; i4 < kChunk / 4; ++i4) {
            const float4 l = *reinterpret_cast<const float4*>(&l_transposed[m][4 * i4]);
            const float lv[4] = {l.x, l.y, l.z, l.w};
#pragma unroll
            for (int r = 0; r < 4; ++r) {
                if (4 * i4 + r > m) {
                    x[4 * i4 + r] = fmaf(-lv[r], x[m], x[4 * i4 + r]);
                }
            }
        }
    }
}

}  // namespace flare::kda
