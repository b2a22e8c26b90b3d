// Scalar conversions between fp32 and the storage types. Rounding is to nearest even; a NaN stays a NaN with its sign
// and becomes quiet; e4m3 saturates at +-448 (infinities too), since it has no infinity.
//
// Everything here is `static`: this header is compiled into translation units with different instruction sets, and a
// shared inline symbol could carry AVX-512 code into the generic path.
#pragma once

#include <cstdint>
#include <cstring>

namespace flare::cpu {

static inline uint32_t float_bits(float value) {
    uint32_t bits;
    std::memcpy(&bits, &value, sizeof(bits));
    return bits;
}

static inline float bits_float(uint32_t bits) {
    float value;
    std::memcpy(&value, &bits, sizeof(value));
    return value;
}

static inline float bf16_to_float(uint16_t value) {
    return bits_float(static_cast<uint32_t>(value) << 16);
}

static inline uint16_t float_to_bf16(float value) {
    const uint32_t bits = float_bits(value);
    if ((bits & 0x7fffffffu) > 0x7f800000u) {
        return static_cast<uint16_t>((bits >> 16) | 0x40u);
    }
    return static_cast<uint16_t>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}

static inline float fp16_to_float(uint16_t value) {
    const uint32_t sign = static_cast<uint32_t>(value & 0x8000u) << 16;
    const uint32_t magnitude = value & 0x7fffu;
    if (magnitude >= 0x7c00u) {
        const uint32_t quiet = magnitude > 0x7c00u ? 0x400000u : 0u;
        return bits_float(sign | 0x7f800000u | (magnitude & 0x3ffu) << 13 | quiet);
    }
    // Exponent re-biased by a multiplication, which also normalises subnormals; exact.
    return bits_float(float_bits(bits_float(magnitude << 13) * bits_float(0x77800000u)) | sign);
}

static inline uint16_t float_to_fp16(float value) {
    const uint32_t bits = float_bits(value);
    const uint32_t sign = (bits >> 16) & 0x8000u;
    const uint32_t magnitude = bits & 0x7fffffffu;
    if (magnitude > 0x7f800000u) {
        return static_cast<uint16_t>(sign | 0x7e00u | ((magnitude >> 13) & 0x3ffu));
    }
    if (magnitude >= 0x47800000u) {  // 2^16 and beyond
        return static_cast<uint16_t>(sign | 0x7c00u);
    }
    if (magnitude < 0x38800000u) {  // subnormal result: adding 0.5 aligns the ulp at 2^-24 and rounds
        const float shifted = bits_float(magnitude) + 0.5f;
        return static_cast<uint16_t>(sign | (float_bits(shifted) - 0x3f000000u));
    }
    const uint32_t rounded = magnitude + 0xfffu + ((magnitude >> 13) & 1u);
    return static_cast<uint16_t>(sign | ((rounded - 0x38000000u) >> 13));
}

static inline float e4m3_to_float(uint8_t value) {
    const uint32_t sign = static_cast<uint32_t>(value & 0x80u) << 24;
    const uint32_t magnitude = value & 0x7fu;
    if (magnitude == 0x7fu) {
        return bits_float(sign | 0x7fc00000u);
    }
    return bits_float(float_bits(bits_float(magnitude << 20) * bits_float(0x7b800000u)) | sign);  // * 2^120, exact
}

static inline uint8_t float_to_e4m3(float value) {
    const uint32_t bits = float_bits(value);
    const uint32_t sign = (bits >> 24) & 0x80u;
    const uint32_t magnitude = bits & 0x7fffffffu;
    if (magnitude > 0x7f800000u) {
        return static_cast<uint8_t>(sign | 0x7fu);
    }
    if (magnitude >= 0x43e00000u) {  // 448 and beyond
        return static_cast<uint8_t>(sign | 0x7eu);
    }
    if (magnitude < 0x3c800000u) {  // below 2^-6: subnormal result, ulp 2^-9, aligned by adding 2^14
        const float shifted = bits_float(magnitude) + 16384.0f;
        return static_cast<uint8_t>(sign | (float_bits(shifted) - 0x46800000u));
    }
    const uint32_t rounded = magnitude + 0x7ffffu + ((magnitude >> 20) & 1u);
    const uint32_t result = (rounded - 0x3c000000u) >> 20;
    return static_cast<uint8_t>(sign | (result > 0x7eu ? 0x7eu : result));
}

}  // namespace flare::cpu
