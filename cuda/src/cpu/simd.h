// Vectors of fp32 for one instruction set. A kernel file defines FLARE_CPU_ISA_AVX512 or FLARE_CPU_ISA_AVX2, or neither
// for plain C++, before it includes this, and puts its code into namespace flare::cpu::FLARE_CPU_NAMESPACE.
//
// Everything lives in that namespace and is forced inline, and no inline function of the standard library is used in
// kernel files: the linker may merge equal inline symbols of different translation units, and must never be able to
// pick an AVX-512 body for the generic path.
#pragma once

#include <cmath>
#include <cstdint>

#include "convert.h"

#if defined(FLARE_CPU_ISA_AVX512)
#define FLARE_CPU_NAMESPACE avx512
// GCC 12 takes the deliberately undefined merge operands of its own intrinsics for uninitialised variables.
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wuninitialized"
#if !defined(__clang__)
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#endif
#include <immintrin.h>
#pragma GCC diagnostic pop
#elif defined(FLARE_CPU_ISA_AVX2)
#define FLARE_CPU_NAMESPACE avx2
#include <immintrin.h>
#else
#define FLARE_CPU_NAMESPACE generic
#endif

#define FLARE_INLINE inline __attribute__((always_inline))

namespace flare::cpu::FLARE_CPU_NAMESPACE {

#if defined(FLARE_CPU_ISA_AVX512)

using Vec = __m512;
using Mask = __mmask16;
constexpr int kLanes = 16;
constexpr int kMaxVecs = 4;  // vectors in a row of a register tile: see gemm.h

FLARE_INLINE Vec vset(float x) {
    return _mm512_set1_ps(x);
}
FLARE_INLINE Vec vload(const float* p) {
    return _mm512_loadu_ps(p);
}
FLARE_INLINE void vstore(float* p, Vec v) {
    _mm512_storeu_ps(p, v);
}
FLARE_INLINE Mask lane_mask(int n) {
    return static_cast<Mask>((1u << n) - 1u);
}  // 0 <= n <= 16
FLARE_INLINE Vec vload_n(const float* p, int n) {
    return _mm512_maskz_loadu_ps(lane_mask(n), p);
}
FLARE_INLINE void vstore_n(float* p, Vec v, int n) {
    _mm512_mask_storeu_ps(p, lane_mask(n), v);
}
FLARE_INLINE Vec vadd(Vec a, Vec b) {
    return _mm512_add_ps(a, b);
}
FLARE_INLINE Vec vsub(Vec a, Vec b) {
    return _mm512_sub_ps(a, b);
}
FLARE_INLINE Vec vmul(Vec a, Vec b) {
    return _mm512_mul_ps(a, b);
}
FLARE_INLINE Vec vdiv(Vec a, Vec b) {
    return _mm512_div_ps(a, b);
}
FLARE_INLINE Vec vfma(Vec a, Vec b, Vec c) {
    return _mm512_fmadd_ps(a, b, c);
}  // a * b + c
FLARE_INLINE Vec vfnma(Vec a, Vec b, Vec c) {
    return _mm512_fnmadd_ps(a, b, c);
}  // c - a * b
FLARE_INLINE Vec vmax(Vec a, Vec b) {
    return _mm512_max_ps(a, b);
}  // b if either is NaN
FLARE_INLINE Vec vmin(Vec a, Vec b) {
    return _mm512_min_ps(a, b);
}  // b if either is NaN
FLARE_INLINE Vec vabs(Vec a) {
    return _mm512_abs_ps(a);
}
FLARE_INLINE Vec vround(Vec a) {
    return _mm512_roundscale_ps(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
}
FLARE_INLINE Mask vlt(Vec a, Vec b) {
    return _mm512_cmp_ps_mask(a, b, _CMP_LT_OQ);
}
FLARE_INLINE Mask vle(Vec a, Vec b) {
    return _mm512_cmp_ps_mask(a, b, _CMP_LE_OQ);
}
FLARE_INLINE Mask veq(Vec a, Vec b) {
    return _mm512_cmp_ps_mask(a, b, _CMP_EQ_OQ);
}
FLARE_INLINE Mask mask_and(Mask a, Mask b) {
    return static_cast<Mask>(a & b);
}
FLARE_INLINE Vec vselect(Mask m, Vec if_true, Vec if_false) {
    return _mm512_mask_blend_ps(m, if_false, if_true);
}
FLARE_INLINE float vreduce_add(Vec a) {
    return _mm512_reduce_add_ps(a);
}
FLARE_INLINE float vreduce_max(Vec a) {
    return _mm512_reduce_max_ps(a);
}
// a * 2^n for integral n; right down to subnormals and zero.
FLARE_INLINE Vec vscale_exp2(Vec a, Vec n) {
    return _mm512_scalef_ps(a, n);
}

FLARE_INLINE Vec vload_bf16(const uint16_t* p) {
    const __m512i wide = _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
    return _mm512_castsi512_ps(_mm512_slli_epi32(wide, 16));
}
FLARE_INLINE Vec vload_fp16(const uint16_t* p) {
    return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
}
FLARE_INLINE Vec vload_e4m3(const uint8_t* p) {
    const __m512i wide = _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
    const __m512i magnitude = _mm512_and_si512(wide, _mm512_set1_epi32(0x7f));
    const __m512i sign = _mm512_slli_epi32(_mm512_and_si512(wide, _mm512_set1_epi32(0x80)), 24);
    const __m512 value = _mm512_mul_ps(_mm512_castsi512_ps(_mm512_slli_epi32(magnitude, 20)),
                                       _mm512_castsi512_ps(_mm512_set1_epi32(0x7b800000)));
    const __mmask16 is_nan = _mm512_cmpeq_epi32_mask(magnitude, _mm512_set1_epi32(0x7f));
    const __m512i result = _mm512_mask_mov_epi32(_mm512_castps_si512(value), is_nan, _mm512_set1_epi32(0x7fc00000));
    return _mm512_castsi512_ps(_mm512_or_si512(result, sign));
}
FLARE_INLINE void vstore_bf16(uint16_t* p, Vec v) {
    const __m512i bits = _mm512_castps_si512(v);
    const __m512i lsb = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
    const __m512i rounded = _mm512_add_epi32(bits, _mm512_add_epi32(lsb, _mm512_set1_epi32(0x7fff)));
    const __mmask16 is_nan = _mm512_cmp_ps_mask(v, v, _CMP_UNORD_Q);
    const __m512i quiet = _mm512_or_si512(bits, _mm512_set1_epi32(0x400000));
    const __m512i result = _mm512_srli_epi32(_mm512_mask_mov_epi32(rounded, is_nan, quiet), 16);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtepi32_epi16(result));
}
FLARE_INLINE void vstore_fp16(uint16_t* p, Vec v) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p),
                        _mm512_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}

#elif defined(FLARE_CPU_ISA_AVX2)

using Vec = __m256;
using Mask = __m256;
constexpr int kLanes = 8;
constexpr int kMaxVecs = 2;

FLARE_INLINE Vec vset(float x) {
    return _mm256_set1_ps(x);
}
FLARE_INLINE Vec vload(const float* p) {
    return _mm256_loadu_ps(p);
}
FLARE_INLINE void vstore(float* p, Vec v) {
    _mm256_storeu_ps(p, v);
}
FLARE_INLINE __m256i lane_mask_bits(int n) {
    return _mm256_cmpgt_epi32(_mm256_set1_epi32(n), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
}
FLARE_INLINE Mask lane_mask(int n) {
    return _mm256_castsi256_ps(lane_mask_bits(n));
}  // 0 <= n <= 8
FLARE_INLINE Vec vload_n(const float* p, int n) {
    return _mm256_maskload_ps(p, lane_mask_bits(n));
}
FLARE_INLINE void vstore_n(float* p, Vec v, int n) {
    _mm256_maskstore_ps(p, lane_mask_bits(n), v);
}
FLARE_INLINE Vec vadd(Vec a, Vec b) {
    return _mm256_add_ps(a, b);
}
FLARE_INLINE Vec vsub(Vec a, Vec b) {
    return _mm256_sub_ps(a, b);
}
FLARE_INLINE Vec vmul(Vec a, Vec b) {
    return _mm256_mul_ps(a, b);
}
FLARE_INLINE Vec vdiv(Vec a, Vec b) {
    return _mm256_div_ps(a, b);
}
FLARE_INLINE Vec vfma(Vec a, Vec b, Vec c) {
    return _mm256_fmadd_ps(a, b, c);
}
FLARE_INLINE Vec vfnma(Vec a, Vec b, Vec c) {
    return _mm256_fnmadd_ps(a, b, c);
}
FLARE_INLINE Vec vmax(Vec a, Vec b) {
    return _mm256_max_ps(a, b);
}
FLARE_INLINE Vec vmin(Vec a, Vec b) {
    return _mm256_min_ps(a, b);
}
FLARE_INLINE Vec vabs(Vec a) {
    return _mm256_andnot_ps(_mm256_set1_ps(-0.0f), a);
}
FLARE_INLINE Vec vround(Vec a) {
    return _mm256_round_ps(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
}
FLARE_INLINE Mask vlt(Vec a, Vec b) {
    return _mm256_cmp_ps(a, b, _CMP_LT_OQ);
}
FLARE_INLINE Mask vle(Vec a, Vec b) {
    return _mm256_cmp_ps(a, b, _CMP_LE_OQ);
}
FLARE_INLINE Mask veq(Vec a, Vec b) {
    return _mm256_cmp_ps(a, b, _CMP_EQ_OQ);
}
FLARE_INLINE Mask mask_and(Mask a, Mask b) {
    return _mm256_and_ps(a, b);
}
FLARE_INLINE Vec vselect(Mask m, Vec if_true, Vec if_false) {
    return _mm256_blendv_ps(if_false, if_true, m);
}
FLARE_INLINE float vreduce_add(Vec a) {
    const __m128 half = _mm_add_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
    const __m128 pair = _mm_add_ps(half, _mm_movehl_ps(half, half));
    return _mm_cvtss_f32(_mm_add_ss(pair, _mm_movehdup_ps(pair)));
}
FLARE_INLINE float vreduce_max(Vec a) {
    const __m128 half = _mm_max_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
    const __m128 pair = _mm_max_ps(half, _mm_movehl_ps(half, half));
    return _mm_cvtss_f32(_mm_max_ss(pair, _mm_movehdup_ps(pair)));
}
// Two steps of half the exponent each, so that 2^n itself need not be representable.
FLARE_INLINE Vec vscale_exp2(Vec a, Vec n) {
    const __m256i whole = _mm256_cvtps_epi32(n);
    const __m256i half = _mm256_srai_epi32(whole, 1);
    const __m256i rest = _mm256_sub_epi32(whole, half);
    const __m256i bias = _mm256_set1_epi32(127);
    const Vec scale_half = _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(half, bias), 23));
    const Vec scale_rest = _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(rest, bias), 23));
    return _mm256_mul_ps(_mm256_mul_ps(a, scale_half), scale_rest);
}

FLARE_INLINE Vec vload_bf16(const uint16_t* p) {
    const __m256i wide = _mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
    return _mm256_castsi256_ps(_mm256_slli_epi32(wide, 16));
}
FLARE_INLINE Vec vload_fp16(const uint16_t* p) {
    return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
}
FLARE_INLINE Vec vload_e4m3(const uint8_t* p) {
    const __m256i wide = _mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)));
    const __m256i magnitude = _mm256_and_si256(wide, _mm256_set1_epi32(0x7f));
    const __m256i sign = _mm256_slli_epi32(_mm256_and_si256(wide, _mm256_set1_epi32(0x80)), 24);
    const __m256 value = _mm256_mul_ps(_mm256_castsi256_ps(_mm256_slli_epi32(magnitude, 20)),
                                       _mm256_castsi256_ps(_mm256_set1_epi32(0x7b800000)));
    const __m256 is_nan = _mm256_castsi256_ps(_mm256_cmpeq_epi32(magnitude, _mm256_set1_epi32(0x7f)));
    const __m256 result = _mm256_blendv_ps(value, _mm256_castsi256_ps(_mm256_set1_epi32(0x7fc00000)), is_nan);
    return _mm256_or_ps(result, _mm256_castsi256_ps(sign));
}
FLARE_INLINE void vstore_bf16(uint16_t* p, Vec v) {
    const __m256i bits = _mm256_castps_si256(v);
    const __m256i lsb = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
    const __m256i rounded = _mm256_add_epi32(bits, _mm256_add_epi32(lsb, _mm256_set1_epi32(0x7fff)));
    const __m256i is_nan = _mm256_castps_si256(_mm256_cmp_ps(v, v, _CMP_UNORD_Q));
    const __m256i quiet = _mm256_or_si256(bits, _mm256_set1_epi32(0x400000));
    const __m256i result = _mm256_srli_epi32(_mm256_blendv_epi8(rounded, quiet, is_nan), 16);
    const __m256i packed = _mm256_permute4x64_epi64(_mm256_packus_epi32(result, result), 0x08);
    _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm256_castsi256_si128(packed));
}
FLARE_INLINE void vstore_fp16(uint16_t* p, Vec v) {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm256_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}

#else

// The compiler's vector extension: SSE2 on x86-64, NEON on aarch64, scalar code elsewhere.
typedef float Vec __attribute__((vector_size(16)));
typedef int32_t Mask __attribute__((vector_size(16)));
constexpr int kLanes = 4;
constexpr int kMaxVecs = 2;

FLARE_INLINE Vec vset(float x) {
    return Vec{x, x, x, x};
}
FLARE_INLINE Vec vload(const float* p) {
    Vec v;
    __builtin_memcpy(&v, p, sizeof(v));
    return v;
}
FLARE_INLINE void vstore(float* p, Vec v) {
    __builtin_memcpy(p, &v, sizeof(v));
}
FLARE_INLINE Mask lane_mask(int n) {
    return Mask{0, 1, 2, 3} < Mask{n, n, n, n};
}  // 0 <= n <= 4
FLARE_INLINE Vec vload_n(const float* p, int n) {
    Vec v = {0.0f, 0.0f, 0.0f, 0.0f};
    for (int i = 0; i < n; ++i) {
        v[i] = p[i];
    }
    return v;
}
FLARE_INLINE void vstore_n(float* p, Vec v, int n) {
    for (int i = 0; i < n; ++i) {
        p[i] = v[i];
    }
}
FLARE_INLINE Vec vadd(Vec a, Vec b) {
    return a + b;
}
FLARE_INLINE Vec vsub(Vec a, Vec b) {
    return a - b;
}
FLARE_INLINE Vec vmul(Vec a, Vec b) {
    return a * b;
}
FLARE_INLINE Vec vdiv(Vec a, Vec b) {
    return a / b;
}
FLARE_INLINE Vec vfma(Vec a, Vec b, Vec c) {
    return a * b + c;
}
FLARE_INLINE Vec vfnma(Vec a, Vec b, Vec c) {
    return c - a * b;
}
FLARE_INLINE Vec vmax(Vec a, Vec b) {
    return a > b ? a : b;
}
FLARE_INLINE Vec vmin(Vec a, Vec b) {
    return a < b ? a : b;
}
FLARE_INLINE Vec vabs(Vec a) {
    return (Vec)((Mask)a & Mask{0x7fffffff, 0x7fffffff, 0x7fffffff, 0x7fffffff});
}
// To nearest even for |a| < 2^22, which is all that vexp2 needs.
FLARE_INLINE Vec vround(Vec a) {
    const Vec magic = vset(12582912.0f);  // 1.5 * 2^23
    return (a + magic) - magic;
}
FLARE_INLINE Mask vlt(Vec a, Vec b) {
    return a < b;
}
FLARE_INLINE Mask vle(Vec a, Vec b) {
    return a <= b;
}
FLARE_INLINE Mask veq(Vec a, Vec b) {
    return a == b;
}
FLARE_INLINE Mask mask_and(Mask a, Mask b) {
    return a & b;
}
FLARE_INLINE Vec vselect(Mask m, Vec if_true, Vec if_false) {
    return m ? if_true : if_false;
}
FLARE_INLINE float vreduce_add(Vec a) {
    return (a[0] + a[2]) + (a[1] + a[3]);
}
FLARE_INLINE float vreduce_max(Vec a) {
    const float even = a[0] > a[2] ? a[0] : a[2];
    const float odd = a[1] > a[3] ? a[1] : a[3];
    return even > odd ? even : odd;
}
FLARE_INLINE Vec vscale_exp2(Vec a, Vec n) {
    // The magic number leaves the integer in the low mantissa bits; NaN gives a finite scale, and a stays NaN.
    const Mask whole = (Mask)(n + vset(12582912.0f)) - Mask{0x4b400000, 0x4b400000, 0x4b400000, 0x4b400000};
    const Mask half = whole >> 1;
    const Mask rest = whole - half;
    const Mask bias = {127, 127, 127, 127};
    return a * (Vec)((half + bias) << 23) * (Vec)((rest + bias) << 23);
}

FLARE_INLINE Vec vload_bf16(const uint16_t* p) {
    return Vec{bf16_to_float(p[0]), bf16_to_float(p[1]), bf16_to_float(p[2]), bf16_to_float(p[3])};
}
FLARE_INLINE Vec vload_fp16(const uint16_t* p) {
    return Vec{fp16_to_float(p[0]), fp16_to_float(p[1]), fp16_to_float(p[2]), fp16_to_float(p[3])};
}
FLARE_INLINE Vec vload_e4m3(const uint8_t* p) {
    return Vec{e4m3_to_float(p[0]), e4m3_to_float(p[1]), e4m3_to_float(p[2]), e4m3_to_float(p[3])};
}
FLARE_INLINE void vstore_bf16(uint16_t* p, Vec v) {
    for (int i = 0; i < kLanes; ++i) {
        p[i] = float_to_bf16(v[i]);
    }
}
FLARE_INLINE void vstore_fp16(uint16_t* p, Vec v) {
    for (int i = 0; i < kLanes; ++i) {
        p[i] = float_to_fp16(v[i]);
    }
}

#endif

// The widest row of a register tile, in floats: the unit that column panels are packed in.
constexpr int kPanel = kMaxVecs * kLanes;

// 2^x, within 1.5 ulp; NaN stays NaN, -inf and anything below -150 give 0, large values +inf.
FLARE_INLINE Vec vexp2(Vec x) {
    x = vmin(vset(130.0f), vmax(vset(-160.0f), x));  // operand order keeps a NaN
    const Vec n = vround(x);
    const Vec f = vsub(x, n);  // in [-0.5, 0.5]
    // Minimax polynomial of 2^f on that interval with constant term 1; relative error 2e-9 + rounding.
    Vec p = vset(1.535335909e-4f);
    p = vfma(p, f, vset(1.339887542e-3f));
    p = vfma(p, f, vset(9.618437377e-3f));
    p = vfma(p, f, vset(5.550332468e-2f));
    p = vfma(p, f, vset(2.402264791e-1f));
    p = vfma(p, f, vset(6.931472029e-1f));
    p = vfma(p, f, vset(1.0f));
    return vscale_exp2(p, n);
}

// e^x with a split log2(e), so that the error does not grow with |x|.
FLARE_INLINE Vec vexp(Vec x) {
    x = vmin(vset(90.0f), vmax(vset(-110.0f), x));
    const Vec n = vround(vmul(x, vset(1.44269504f)));
    Vec f = vfnma(n, vset(0.693359375f), x);  // ln 2 in two parts; the first is exact in 10 bits
    f = vfnma(n, vset(-2.12194440e-4f), f);
    Vec p = vset(1.9875691500e-4f);
    p = vfma(p, f, vset(1.3981999507e-3f));
    p = vfma(p, f, vset(8.3334519073e-3f));
    p = vfma(p, f, vset(4.1665795894e-2f));
    p = vfma(p, f, vset(1.6666665459e-1f));
    p = vfma(p, f, vset(5.0000001201e-1f));
    p = vfma(vmul(p, f), f, vadd(f, vset(1.0f)));
    return vscale_exp2(p, n);
}

// tanh within 2 ulp: an odd polynomial near zero, where 1 - 2 / (e^2x + 1) would cancel.
FLARE_INLINE Vec vtanh(Vec x) {
    const Vec magnitude = vabs(x);
    const Vec square = vmul(x, x);
    Vec p = vset(-5.70498872745e-3f);
    p = vfma(p, square, vset(2.06390887954e-2f));
    p = vfma(p, square, vset(-5.37397155531e-2f));
    p = vfma(p, square, vset(1.33314422036e-1f));
    p = vfma(p, square, vset(-3.33332819422e-1f));
    const Vec small = vfma(vmul(p, square), x, x);
    const Vec tail = vdiv(vset(2.0f), vadd(vexp(vadd(magnitude, magnitude)), vset(1.0f)));
    const Vec large = vsub(vset(1.0f), tail);
    const Vec signed_large = vselect(vlt(x, vset(0.0f)), vsub(vset(0.0f), large), large);
    return vselect(vlt(magnitude, vset(0.625f)), small, signed_large);
}

}  // namespace flare::cpu::FLARE_CPU_NAMESPACE
