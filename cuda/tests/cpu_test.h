// What the tests of the CPU backend share: checks, seeded data, storage types decoded independently of the library, and
// output buffers that tell every byte that was written.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include "cpu/isa.h"
#include "flare.h"

namespace cpu_test {

inline int g_failures = 0;

#define EXPECT(condition, ...)                                              \
    do {                                                                    \
        if (!(condition)) {                                                 \
            if (++cpu_test::g_failures <= 20) {                             \
                std::printf("%s:%d: %s: ", __FILE__, __LINE__, #condition); \
                std::printf(__VA_ARGS__);                                   \
                std::printf("\n");                                          \
            }                                                               \
        }                                                                   \
    } while (0)

inline std::string last_error() {
    char text[1024];
    flare_last_error(text, sizeof(text));
    return text;
}

class Random {
  public:
    explicit Random(uint64_t seed) : engine_(seed) {}
    int64_t integer(int64_t low, int64_t high) { return std::uniform_int_distribution<int64_t>(low, high)(engine_); }
    bool chance(double probability) { return std::uniform_real_distribution<double>(0, 1)(engine_) < probability; }
    double normal() { return std::normal_distribution<double>(0, 1)(engine_); }
    int64_t pick(std::initializer_list<int64_t> choices) {
        return choices.begin()[integer(0, static_cast<int64_t>(choices.size()) - 1)];
    }

  private:
    std::mt19937_64 engine_;
};

inline int64_t bytes_of(int32_t dtype) {
    switch (dtype) {
        case FLARE_FP32:
        case FLARE_INT32:
            return 4;
        case FLARE_INT64:
            return 8;
        case FLARE_FP16:
        case FLARE_BF16:
            return 2;
        default:
            return 1;
    }
}

// Sign, exponent field, mantissa field -> value; `exponent_bits` and `mantissa_bits` describe the format.
inline double decode(uint32_t bits, int exponent_bits, int mantissa_bits) {
    const int bias = (1 << (exponent_bits - 1)) - 1;
    const uint32_t mantissa = bits & ((1u << mantissa_bits) - 1);
    const int exponent = static_cast<int>(bits >> mantissa_bits) & ((1 << exponent_bits) - 1);
    const double sign = (bits >> (mantissa_bits + exponent_bits)) & 1 ? -1.0 : 1.0;
    if (exponent_bits == 4 ? (exponent == 15 && mantissa == 7) : exponent == (1 << exponent_bits) - 1) {
        return exponent_bits != 4 && mantissa == 0 ? sign * HUGE_VAL : std::numeric_limits<double>::quiet_NaN();
    }
    if (exponent == 0) {
        return sign * std::ldexp(static_cast<double>(mantissa), 1 - bias - mantissa_bits);
    }
    return sign * std::ldexp(static_cast<double>(mantissa + (1u << mantissa_bits)), exponent - bias - mantissa_bits);
}

inline double read(const void* data, int32_t dtype, int64_t i) {
    const char* at = static_cast<const char*>(data) + i * bytes_of(dtype);
    if (dtype == FLARE_FP32) {
        float value;
        std::memcpy(&value, at, 4);
        return value;
    }
    if (dtype == FLARE_INT32 || dtype == FLARE_INT64) {
        int64_t value = 0;
        int32_t narrow;
        if (dtype == FLARE_INT32) {
            std::memcpy(&narrow, at, 4);
            value = narrow;
        } else {
            std::memcpy(&value, at, 8);
        }
        return static_cast<double>(value);
    }
    uint16_t half = 0;
    std::memcpy(&half, at, static_cast<size_t>(bytes_of(dtype)));
    return dtype == FLARE_FP16   ? decode(half, 5, 10)
           : dtype == FLARE_BF16 ? decode(half, 8, 7)
                                 : decode(half & 0xff, 4, 3);
}

// A value near `value` in the storage type: truncated towards zero in its mantissa, which is as good as any for inputs.
inline void write(void* data, int32_t dtype, int64_t i, double value) {
    char* at = static_cast<char*>(data) + i * bytes_of(dtype);
    if (dtype == FLARE_FP32) {
        const float single = static_cast<float>(value);
        std::memcpy(at, &single, 4);
        return;
    }
    const int exponent_bits = dtype == FLARE_FP16 ? 5 : dtype == FLARE_BF16 ? 8 : 4;
    const int mantissa_bits = dtype == FLARE_FP16 ? 10 : dtype == FLARE_BF16 ? 7 : 3;
    uint32_t bits = std::signbit(value) ? 1u << (exponent_bits + mantissa_bits) : 0;
    if (std::isnan(value)) {
        bits |= (1u << (exponent_bits + mantissa_bits)) - 1;
    } else if (value != 0) {
        const int bias = (1 << (exponent_bits - 1)) - 1;
        int exponent;
        const double fraction = std::frexp(std::fabs(value), &exponent);  // [0.5, 1)
        const int field = exponent - 1 + bias;
        if (field >= 1) {
            bits |= static_cast<uint32_t>(field) << mantissa_bits |
                    static_cast<uint32_t>(std::ldexp(fraction * 2 - 1, mantissa_bits));
        }
    }
    std::memcpy(at, &bits, static_cast<size_t>(bytes_of(dtype)));
}

// Memory for a tensor, filled with NaN (all bits set) so that nothing unused may matter.
class Data {
  public:
    Data() = default;
    Data(int32_t dtype, int64_t count)
        : dtype_(dtype), count_(count), bytes_(static_cast<size_t>(count * bytes_of(dtype)) + 64) {
        std::memset(bytes_.data(), 0xff, bytes_.size());
    }
    char* data() { return bytes_.data() + (64 - reinterpret_cast<uintptr_t>(bytes_.data()) % 64) % 64; }
    void set(int64_t i, double value) { write(data(), dtype_, i, value); }
    void set_random(int64_t first, int64_t count, Random& random) {
        for (int64_t i = first; i < first + count; ++i) {
            set(i, random.normal());
        }
    }
    int64_t count() const { return count_; }
    int64_t bytes() const { return count_ * bytes_of(dtype_); }

  private:
    int32_t dtype_ = FLARE_FP32;
    int64_t count_ = 0;
    std::vector<char> bytes_;
};

// Index arrays in either width.
class Indices {
  public:
    Indices() = default;
    Indices(int32_t dtype, const std::vector<int64_t>& values)
        : wide_(values), narrow_(values.begin(), values.end()), dtype_(dtype) {}
    const void* data() const {
        return dtype_ == FLARE_INT64 ? static_cast<const void*>(wide_.data())
                                     : static_cast<const void*>(narrow_.data());
    }
    int64_t bytes() const { return static_cast<int64_t>(wide_.size()) * (dtype_ == FLARE_INT64 ? 8 : 4); }

  private:
    std::vector<int64_t> wide_;
    std::vector<int32_t> narrow_;
    int32_t dtype_ = FLARE_INT32;
};

// An output: poisoned, with the list of elements that ought to be written and what they ought to be.
class Output {
  public:
    Output() = default;
    Output(int32_t dtype, int64_t count) : dtype_(dtype), data_(dtype, count), written_(static_cast<size_t>(count)) {
        poison();
    }
    char* data() { return data_.data(); }
    int32_t dtype() const { return dtype_; }
    int64_t count() const { return data_.count(); }
    int64_t bytes() const { return data_.bytes(); }
    void poison() { std::memset(data(), 0xa5, static_cast<size_t>(data_.count() * bytes_of(dtype_))); }
    void expect(int64_t i, double value) {
        written_[static_cast<size_t>(i)] = true;
        expected_.push_back({i, value});
    }
    std::vector<char> snapshot() { return std::vector<char>(data(), data() + data_.count() * bytes_of(dtype_)); }

    // Relative error over the whole tensor; NaN and infinities must stand where they are expected.
    void check_relative(double bound, const char* what) {
        check_untouched(what);
        double difference = 0;
        double norm = 0;
        for (const Expected& e : expected_) {
            const double got = read(data(), dtype_, e.index);
            if (!std::isfinite(e.value) || !std::isfinite(got)) {
                EXPECT((std::isnan(e.value) && std::isnan(got)) || e.value == got, "%s[%lld]: got %g, want %g", what,
                       static_cast<long long>(e.index), got, e.value);
                continue;
            }
            difference += (got - e.value) * (got - e.value);
            norm += e.value * e.value;
        }
        const double error = std::sqrt(difference) / (norm > 0 ? std::sqrt(norm) : 1.0);
        worst_ = std::max(worst_, error / bound);
        EXPECT(error <= bound, "%s: relative error %.3g, allowed %.3g", what, error, bound);
    }

    void check_absolute(double bound, const char* what) {
        check_untouched(what);
        for (const Expected& e : expected_) {
            const double got = read(data(), dtype_, e.index);
            const bool same = (std::isnan(e.value) && std::isnan(got)) || e.value == got ||
                              std::fabs(got - e.value) <= bound * std::max(1.0, std::fabs(e.value) / 8);
            EXPECT(same, "%s[%lld]: got %.9g, want %.9g", what, static_cast<long long>(e.index), got, e.value);
        }
    }

    double worst() const { return worst_; }

  private:
    struct Expected {
        int64_t index;
        double value;
    };

    void check_untouched(const char* what) {
        for (int64_t i = 0; i < data_.count(); ++i) {
            if (written_[static_cast<size_t>(i)]) {
                continue;
            }
            for (int64_t byte = 0; byte < bytes_of(dtype_); ++byte) {
                EXPECT(data()[i * bytes_of(dtype_) + byte] == static_cast<char>(0xa5), "%s[%lld] was written", what,
                       static_cast<long long>(i));
            }
        }
    }

    int32_t dtype_ = FLARE_FP32;
    Data data_;
    std::vector<bool> written_;
    std::vector<Expected> expected_;
    double worst_ = 0;
};

// The backend's workspace, poisoned.
class Workspace {
  public:
    template <class Params>
    void give(Params& params, uint64_t bytes) {
        memory_.assign(bytes + 256, static_cast<char>(0xff));
        params.workspace = memory_.data() + (256 - reinterpret_cast<uintptr_t>(memory_.data()) % 256) % 256;
        params.workspace_bytes = bytes;
    }

  private:
    std::vector<char> memory_;
};

inline const flare::cpu::Isa kIsas[] = {flare::cpu::Isa::kAvx512, flare::cpu::Isa::kAvx2, flare::cpu::Isa::kGeneric};

inline double out_bound(int32_t dtype, int32_t out_dtype, double fp32, double fp16, double bf16) {
    double bound = fp32;
    for (const int32_t type : {dtype, out_dtype}) {
        bound = std::max(bound, type == FLARE_FP16 ? fp16 : type == FLARE_FP32 ? fp32 : bf16);
    }
    return bound;
}

inline int finish(const char* name) {
    std::printf("%s: %s (%d failures)\n", name, g_failures == 0 ? "PASS" : "FAIL", g_failures);
    return g_failures == 0 ? 0 : 1;
}

}  // namespace cpu_test
