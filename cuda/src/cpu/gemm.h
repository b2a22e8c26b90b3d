// Register-blocked fp32 products on one instruction set.
//
//     C[m, n] (=, +=, or C * scale[n] +)  A[m, k] B[k, n]
//
// Columns are vectorised: B is a row-major panel of up to kPanel columns, C the same; A is broadcast element by
// element, so it needs no packing and comes in either orientation. A register tile holds rows_of(vecs) x vecs
// accumulators: AVX-512 6 x 64, 8 x 48, 12 x 32 or 12 x 16 floats (24 accumulators, up to 4 columns of B and a
// broadcast in 32 registers). Each C element is a sum in k order that starts from zero, whatever m and n: results do
// not depend on how a caller tiles rows or columns.
#pragma once

#include "simd.h"

namespace flare::cpu::FLARE_CPU_NAMESPACE {

enum class Update {
    kStore,       // C = A B
    kAccumulate,  // C = C + A B
    kRescale,     // C = C * scale[column] + A B
};

// A's element (row, k) is a[row * stride + k], or a[k * stride + row] when transposed.
enum class Orientation { kRowMajor, kTransposed };

constexpr int rows_of(int vecs) {
#if defined(FLARE_CPU_ISA_AVX512)
    return vecs == 4 ? 6 : vecs == 3 ? 8 : 12;
#elif defined(FLARE_CPU_ISA_AVX2)
    return vecs == 2 ? 6 : 8;
#else
    return vecs == 2 ? 4 : 6;
#endif
}

template <int kRows, int kVecs, Orientation kOrientation>
FLARE_INLINE void gemm_tile(int64_t k, const float* a, int64_t a_stride, const float* b, int64_t b_stride, float* c,
                            int64_t c_stride, Update update, const float* scale) {
    Vec acc[kRows][kVecs];
#pragma GCC unroll 16
    for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 4
        for (int v = 0; v < kVecs; ++v) {
            acc[r][v] = vset(0.0f);
        }
    }
    for (int64_t i = 0; i < k; ++i) {
        Vec columns[kVecs];
#pragma GCC unroll 4
        for (int v = 0; v < kVecs; ++v) {
            columns[v] = vload(b + i * b_stride + v * kLanes);
        }
#pragma GCC unroll 16
        for (int r = 0; r < kRows; ++r) {
            const Vec element =
                vset(kOrientation == Orientation::kRowMajor ? a[r * a_stride + i] : a[i * a_stride + r]);
#pragma GCC unroll 4
            for (int v = 0; v < kVecs; ++v) {
                acc[r][v] = vfma(element, columns[v], acc[r][v]);
            }
        }
    }
#pragma GCC unroll 16
    for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 4
        for (int v = 0; v < kVecs; ++v) {
            float* out = c + r * c_stride + v * kLanes;
            if (update == Update::kAccumulate) {
                acc[r][v] = vadd(vload(out), acc[r][v]);
            } else if (update == Update::kRescale) {
                acc[r][v] = vfma(vload(out), vload(scale + v * kLanes), acc[r][v]);
            }
            vstore(out, acc[r][v]);
        }
    }
}

// The last m < rows_of(kVecs) rows.
template <int kRows, int kVecs, Orientation kOrientation>
inline void gemm_tail(int64_t m, int64_t k, const float* a, int64_t a_stride, const float* b, int64_t b_stride,
                      float* c, int64_t c_stride, Update update, const float* scale) {
    if constexpr (kRows > 0) {
        if (m == kRows) {
            gemm_tile<kRows, kVecs, kOrientation>(k, a, a_stride, b, b_stride, c, c_stride, update, scale);
        } else {
            gemm_tail<kRows - 1, kVecs, kOrientation>(m, k, a, a_stride, b, b_stride, c, c_stride, update, scale);
        }
    }
}

template <int kVecs, Orientation kOrientation>
__attribute__((noinline)) void gemm_rows(int64_t m, int64_t k, const float* a, int64_t a_stride, const float* b,
                                         int64_t b_stride, float* c, int64_t c_stride, Update update,
                                         const float* scale) {
    constexpr int kRows = rows_of(kVecs);
    int64_t row = 0;
    for (; row + kRows <= m; row += kRows) {
        gemm_tile<kRows, kVecs, kOrientation>(k, a, a_stride, b, b_stride, c, c_stride, update, scale);
        a += kOrientation == Orientation::kRowMajor ? kRows * a_stride : kRows;
        c += kRows * c_stride;
    }
    gemm_tail<kRows - 1, kVecs, kOrientation>(m - row, k, a, a_stride, b, b_stride, c, c_stride, update, scale);
}

// One panel: vecs * kLanes columns, 1 <= vecs <= kMaxVecs. `scale` [vecs * kLanes] only for Update::kRescale.
template <Orientation kOrientation>
inline void gemm_panel(int vecs, int64_t m, int64_t k, const float* a, int64_t a_stride, const float* b,
                       int64_t b_stride, float* c, int64_t c_stride, Update update, const float* scale = nullptr) {
    switch (vecs) {
        case 1:
            gemm_rows<1, kOrientation>(m, k, a, a_stride, b, b_stride, c, c_stride, update, scale);
            break;
        case 2:
            gemm_rows<2, kOrientation>(m, k, a, a_stride, b, b_stride, c, c_stride, update, scale);
            break;
        case 3:
            if constexpr (kMaxVecs >= 3) {
                gemm_rows<3, kOrientation>(m, k, a, a_stride, b, b_stride, c, c_stride, update, scale);
            }
            break;
        case 4:
            if constexpr (kMaxVecs >= 4) {
                gemm_rows<4, kOrientation>(m, k, a, a_stride, b, b_stride, c, c_stride, update, scale);
            }
            break;
        default:
            break;
    }
}

// Any number of columns n, a multiple of kLanes, B and C row-major and unpacked: panel by panel.
template <Orientation kOrientation>
inline void gemm(int64_t m, int64_t n, int64_t k, const float* a, int64_t a_stride, const float* b, int64_t b_stride,
                 float* c, int64_t c_stride, Update update) {
    for (int64_t column = 0; column < n; column += kPanel) {
        const int64_t rest = (n - column) / kLanes;
        const int vecs = rest < kMaxVecs ? static_cast<int>(rest) : kMaxVecs;
        gemm_panel<kOrientation>(vecs, m, k, a, a_stride, b + column, b_stride, c + column, c_stride, update);
    }
}

}  // namespace flare::cpu::FLARE_CPU_NAMESPACE
