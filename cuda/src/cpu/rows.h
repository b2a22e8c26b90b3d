// Rows of tensors on one instruction set: conversion to and from fp32, transposition, address of a row.
#pragma once

#include <cstddef>

#include "flare.h"
#include "index.h"
#include "simd.h"

namespace flare::cpu::FLARE_CPU_NAMESPACE {

FLARE_INLINE int64_t round_up(int64_t n, int64_t multiple) {
    return (n + multiple - 1) / multiple * multiple;
}

FLARE_INLINE int64_t min64(int64_t a, int64_t b) {
    return a < b ? a : b;
}

FLARE_INLINE int64_t max64(int64_t a, int64_t b) {
    return a > b ? a : b;
}

FLARE_INLINE int64_t element_bytes(int32_t dtype) {
    switch (dtype) {
        case FLARE_FP32:
            return 4;
        case FLARE_FP16:
        case FLARE_BF16:
            return 2;
        default:
            return 1;
    }
}

FLARE_INLINE float load_element(const void* src, int32_t dtype, int64_t i) {
    switch (dtype) {
        case FLARE_FP32:
            return static_cast<const float*>(src)[i];
        case FLARE_FP16:
            return fp16_to_float(static_cast<const uint16_t*>(src)[i]);
        case FLARE_BF16:
            return bf16_to_float(static_cast<const uint16_t*>(src)[i]);
        default:
            return e4m3_to_float(static_cast<const uint8_t*>(src)[i]);
    }
}

FLARE_INLINE void store_element(void* dst, int32_t dtype, int64_t i, float value) {
    switch (dtype) {
        case FLARE_FP32:
            static_cast<float*>(dst)[i] = value;
            break;
        case FLARE_FP16:
            static_cast<uint16_t*>(dst)[i] = float_to_fp16(value);
            break;
        case FLARE_BF16:
            static_cast<uint16_t*>(dst)[i] = float_to_bf16(value);
            break;
        default:
            static_cast<uint8_t*>(dst)[i] = float_to_e4m3(value);
            break;
    }
}

// dst[0, n) = src[0, n) as fp32. Reads and writes nothing beyond n.
inline void load_row(const void* src, int32_t dtype, int64_t n, float* dst) {
    int64_t i = 0;
    switch (dtype) {
        case FLARE_FP32:
            for (; i + kLanes <= n; i += kLanes) {
                vstore(dst + i, vload(static_cast<const float*>(src) + i));
            }
            break;
        case FLARE_FP16:
            for (; i + kLanes <= n; i += kLanes) {
                vstore(dst + i, vload_fp16(static_cast<const uint16_t*>(src) + i));
            }
            break;
        case FLARE_BF16:
            for (; i + kLanes <= n; i += kLanes) {
                vstore(dst + i, vload_bf16(static_cast<const uint16_t*>(src) + i));
            }
            break;
        default:
            for (; i + kLanes <= n; i += kLanes) {
                vstore(dst + i, vload_e4m3(static_cast<const uint8_t*>(src) + i));
            }
            break;
    }
    for (; i < n; ++i) {
        dst[i] = load_element(src, dtype, i);
    }
}

// dst[0, n) = src[0, n) converted from fp32.
inline void store_row(const float* src, int32_t dtype, int64_t n, void* dst) {
    int64_t i = 0;
    switch (dtype) {
        case FLARE_FP32:
            for (; i + kLanes <= n; i += kLanes) {
                vstore(static_cast<float*>(dst) + i, vload(src + i));
            }
            break;
        case FLARE_FP16:
            for (; i + kLanes <= n; i += kLanes) {
                vstore_fp16(static_cast<uint16_t*>(dst) + i, vload(src + i));
            }
            break;
        case FLARE_BF16:
            for (; i + kLanes <= n; i += kLanes) {
                vstore_bf16(static_cast<uint16_t*>(dst) + i, vload(src + i));
            }
            break;
        default:
            break;
    }
    for (; i < n; ++i) {
        store_element(dst, dtype, i, src[i]);
    }
}

// v[r][c] -> v[c][r]: log2(kLanes) rounds that zip vector r with vector r + kLanes / 2.
FLARE_INLINE void transpose_vectors(Vec v[kLanes]) {
#if defined(FLARE_CPU_ISA_AVX512)
    const __m512i low = _mm512_setr_epi32(0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
    const __m512i high = _mm512_setr_epi32(8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31);
#endif
#pragma GCC unroll 4
    for (int round = 1; round < kLanes; round *= 2) {
        Vec zipped[kLanes];
#pragma GCC unroll 8
        for (int r = 0; r < kLanes / 2; ++r) {
            const Vec a = v[r];
            const Vec b = v[r + kLanes / 2];
#if defined(FLARE_CPU_ISA_AVX512)
            zipped[2 * r] = _mm512_permutex2var_ps(a, low, b);
            zipped[2 * r + 1] = _mm512_permutex2var_ps(a, high, b);
#elif defined(FLARE_CPU_ISA_AVX2)
            const __m256 even = _mm256_unpacklo_ps(a, b);
            const __m256 odd = _mm256_unpackhi_ps(a, b);
            zipped[2 * r] = _mm256_permute2f128_ps(even, odd, 0x20);
            zipped[2 * r + 1] = _mm256_permute2f128_ps(even, odd, 0x31);
#else
            zipped[2 * r] = Vec{a[0], b[0], a[1], b[1]};
            zipped[2 * r + 1] = Vec{a[2], b[2], a[3], b[3]};
#endif
        }
#pragma GCC unroll 16
        for (int r = 0; r < kLanes; ++r) {
            v[r] = zipped[r];
        }
    }
}

// dst[c][r] = src[r][c] for kLanes rows and `columns` columns, a multiple of kLanes. scale [columns] multiplies, if
// given.
inline void transpose_rows(const float* src, int64_t src_stride, int64_t columns, const float* scale, float* dst,
                           int64_t dst_stride) {
    for (int64_t column = 0; column < columns; column += kLanes) {
        Vec block[kLanes];
#pragma GCC unroll 16
        for (int r = 0; r < kLanes; ++r) {
            block[r] = vload(src + r * src_stride + column);
            if (scale != nullptr) {
                block[r] = vmul(block[r], vload(scale + column));
            }
        }
        transpose_vectors(block);
#pragma GCC unroll 16
        for (int r = 0; r < kLanes; ++r) {
            vstore(dst + (column + r) * dst_stride, block[r]);
        }
    }
}

// True if some element of the row is NaN or infinite.
inline bool has_nonfinite(const float* row, int64_t n) {
    Vec sum = vset(0.0f);
    int64_t i = 0;
    for (; i + kLanes <= n; i += kLanes) {
        sum = vfma(vload(row + i), vset(0.0f), sum);
    }
    float rest = vreduce_add(sum);
    for (; i < n; ++i) {
        rest += row[i] * 0.0f;
    }
    return !(rest == 0.0f);
}

// One sequence's rows, contiguous or in pages.
struct RowSource {
    const char* base;         // row 0 of the sequence, or of page 0
    int64_t row_bytes;        // from row to row inside the sequence or page
    const void* block_table;  // nullptr: contiguous
    int64_t table_offset;     // first entry of this sequence in the table
    int32_t index_dtype;
    int64_t page_bytes;
    int64_t page_size;

    const char* row(int64_t i) const {
        if (block_table == nullptr) {
            return base + i * row_bytes;
        }
        const int64_t page = read_index(block_table, index_dtype, table_offset + i / page_size);
        return base + page * page_bytes + i % page_size * row_bytes;
    }
};

// dst[i][0, width) = row first + i, for i in [0, count).
inline void load_rows(const RowSource& source, int32_t dtype, int64_t first, int64_t count, int64_t width, float* dst,
                      int64_t dst_stride) {
    for (int64_t i = 0; i < count; ++i) {
        load_row(source.row(first + i), dtype, width, dst + i * dst_stride);
    }
}

// Bump allocation of 64-byte aligned pieces of a scratch block; with a null base it only counts.
class Carver {
  public:
    explicit Carver(void* base) : base_(static_cast<char*>(base)) {}

    template <class T>
    T* take(int64_t count) {
        char* piece = base_ == nullptr ? nullptr : base_ + used_;
        used_ += static_cast<size_t>(round_up(count * static_cast<int64_t>(sizeof(T)), 64));
        return reinterpret_cast<T*>(piece);
    }

    size_t used() const { return used_; }

  private:
    char* base_;
    size_t used_ = 0;
};

}  // namespace flare::cpu::FLARE_CPU_NAMESPACE
