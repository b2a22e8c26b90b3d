// The CPU backend's conversions, flare_cast, flare_fill, flare_cache_append and thread pool.
#include "cpu_test.h"

#include <algorithm>
#include <atomic>
#include <thread>

#include "cpu/thread_pool.h"

using namespace cpu_test;

namespace {

int32_t cast(const void* src, int32_t src_dtype, void* dst, int32_t dst_dtype, int64_t count, float scale = 0) {
    flare_cast_params p{};
    p.struct_size = sizeof(p);
    p.device = FLARE_DEVICE_CPU;
    p.src_dtype = src_dtype;
    p.dst_dtype = dst_dtype;
    p.rank = 1;
    p.scale = scale;
    p.src = src;
    p.dst = dst;
    p.shape[0] = count;
    p.src_stride[0] = p.dst_stride[0] = 1;
    return flare_cast(&p);
}

float float_of(uint32_t bits) {
    float value;
    std::memcpy(&value, &bits, 4);
    return value;
}

// All finite values of a storage type in ascending order of magnitude, with their bit patterns.
std::vector<double> magnitudes(int32_t dtype) {
    std::vector<double> values;
    const uint32_t end = dtype == FLARE_FP8_E4M3 ? 0x7f : dtype == FLARE_FP16 ? 0x7c00 : 0x7f80;
    for (uint64_t bits = 0; bits < end; ++bits) {
        values.push_back(read(&bits, dtype, 0));
    }
    return values;
}

// Round to nearest even, by search: the definition.
uint32_t nearest(const std::vector<double>& values, int32_t dtype, float value) {
    const uint32_t sign = std::signbit(value) ? (dtype == FLARE_FP8_E4M3 ? 0x80u : 0x8000u) : 0u;
    const double magnitude = std::fabs(static_cast<double>(value));
    const double last = values.back();
    const double step = last - values[values.size() - 2];
    if (dtype == FLARE_FP8_E4M3 && magnitude >= last) {
        return sign | static_cast<uint32_t>(values.size() - 1);  // saturates
    }
    if (magnitude >= last + step / 2) {
        return sign | static_cast<uint32_t>(values.size());  // infinity
    }
    const size_t above =
        static_cast<size_t>(std::lower_bound(values.begin(), values.end(), magnitude) - values.begin());
    if (above == values.size()) {
        return sign | static_cast<uint32_t>(above - 1);
    }
    if (above == 0 || values[above] == magnitude) {
        return sign | static_cast<uint32_t>(above);
    }
    const double up = values[above] - magnitude;
    const double down = magnitude - values[above - 1];
    const size_t chosen = up < down ? above : down < up ? above - 1 : above % 2 == 0 ? above : above - 1;
    return sign | static_cast<uint32_t>(chosen);
}

void test_conversions() {
    std::vector<float> samples;
    Random random(1);
    for (int i = 0; i < 40000; ++i) {
        samples.push_back(float_of(static_cast<uint32_t>(random.integer(0, UINT32_MAX))));
        samples.push_back(static_cast<float>(std::ldexp(random.normal(), static_cast<int>(random.integer(-30, 20)))));
    }
    for (const int32_t dtype : {FLARE_FP16, FLARE_BF16, FLARE_FP8_E4M3}) {
        const std::vector<double> values = magnitudes(dtype);
        std::vector<float> inputs = samples;
        for (size_t i = 0; i + 1 < values.size(); i += values.size() > 1000 ? 7 : 1) {  // ties, and their neighbours
            const float tie = static_cast<float>((values[i] + values[i + 1]) / 2);
            for (const float x : {tie, std::nextafter(tie, 0.0f), std::nextafter(tie, HUGE_VALF), -tie,
                                  static_cast<float>(values[i])}) {
                inputs.push_back(x);
            }
        }
        for (const float x :
             {0.0f, -0.0f, HUGE_VALF, -HUGE_VALF, 448.0f, 463.9f, 464.0f, 480.0f, 65519.9f, 65520.0f, 3.4e38f}) {
            inputs.push_back(x);
        }
        for (const flare::cpu::Isa isa : kIsas) {
            flare::cpu::override_isa(isa);
            std::vector<uint16_t> narrow(inputs.size() + 8);
            EXPECT(
                cast(inputs.data(), FLARE_FP32, narrow.data(), dtype, static_cast<int64_t>(inputs.size())) == FLARE_OK,
                "%s", last_error().c_str());
            for (size_t i = 0; i < inputs.size(); ++i) {
                const uint32_t got =
                    dtype == FLARE_FP8_E4M3 ? reinterpret_cast<const uint8_t*>(narrow.data())[i] : narrow[i];
                if (std::isnan(inputs[i])) {
                    const uint32_t sign_bit = dtype == FLARE_FP8_E4M3 ? 0x80 : 0x8000;
                    const uint32_t quiet = dtype == FLARE_FP8_E4M3 ? 0x7f : dtype == FLARE_FP16 ? 0x7e00 : 0x7fc0;
                    EXPECT((got & quiet) == quiet && ((got & sign_bit) != 0) == std::signbit(inputs[i]),
                           "dtype %d: NaN became %x", dtype, got);
                    continue;
                }
                EXPECT(got == nearest(values, dtype, inputs[i]), "dtype %d: %.9g became %x, want %x", dtype,
                       static_cast<double>(inputs[i]), got, nearest(values, dtype, inputs[i]));
            }
            // And back, every bit pattern.
            const int64_t patterns = dtype == FLARE_FP8_E4M3 ? 256 : 65536;
            std::vector<uint16_t> all(static_cast<size_t>(patterns));
            for (int64_t i = 0; i < patterns; ++i) {
                if (dtype == FLARE_FP8_E4M3) {
                    reinterpret_cast<uint8_t*>(all.data())[i] = static_cast<uint8_t>(i);
                } else {
                    all[static_cast<size_t>(i)] = static_cast<uint16_t>(i);
                }
            }
            std::vector<float> wide(static_cast<size_t>(patterns));
            EXPECT(cast(all.data(), dtype, wide.data(), FLARE_FP32, patterns) == FLARE_OK, "%s", last_error().c_str());
            for (int64_t i = 0; i < patterns; ++i) {
                const double want = read(all.data(), dtype, i);
                const double got = static_cast<double>(wide[static_cast<size_t>(i)]);
                EXPECT((std::isnan(want) && std::isnan(got)) || want == got, "dtype %d: %llx became %g, want %g", dtype,
                       static_cast<unsigned long long>(i), got, want);
            }
        }
    }
    flare::cpu::override_isa(flare::cpu::Isa::kAvx512);
}

void test_cast_strides() {
    Random random(2);
    for (int repeat = 0; repeat < 60; ++repeat) {
        flare_cast_params p{};
        p.struct_size = sizeof(p);
        p.device = FLARE_DEVICE_CPU;
        p.src_dtype = static_cast<int32_t>(random.pick({FLARE_FP32, FLARE_FP16, FLARE_BF16, FLARE_FP8_E4M3}));
        p.dst_dtype = static_cast<int32_t>(random.pick({FLARE_FP32, FLARE_FP16, FLARE_BF16, FLARE_FP8_E4M3}));
        p.rank = static_cast<int32_t>(random.integer(0, 5));
        p.scale = random.chance(0.5) ? 0.0f : 0.5f;
        const double scale = p.scale == 0.0f ? 1.0 : 0.5;
        int64_t order[5] = {0, 1, 2, 3, 4};
        std::shuffle(order, order + p.rank, std::mt19937(static_cast<unsigned>(repeat)));
        int64_t src_size = 1;
        int64_t dst_size = 1;
        for (int i = 0; i < p.rank; ++i) {
            p.shape[i] = repeat == 0 && i == 0 ? 0 : random.integer(1, repeat % 3 == 0 ? 40 : 6);
        }
        for (int i = p.rank - 1; i >= 0; --i) {  // the source permuted, the destination with gaps
            const int64_t dimension = order[i];
            p.src_stride[dimension] = src_size;
            src_size *= std::max<int64_t>(1, p.shape[dimension]);
            p.dst_stride[i] = dst_size;
            dst_size = dst_size * std::max<int64_t>(1, p.shape[i]) + random.integer(0, 2);
        }
        Data src(p.src_dtype, src_size);
        src.set_random(0, src_size, random);
        Output dst(p.dst_dtype, dst_size);
        int64_t count = 1;
        for (int i = 0; i < p.rank; ++i) {
            count *= p.shape[i];
        }
        for (int64_t n = 0; n < count; ++n) {
            int64_t rest = n;
            int64_t from = 0;
            int64_t to = 0;
            for (int i = p.rank - 1; i >= 0; --i) {
                from += rest % p.shape[i] * p.src_stride[i];
                to += rest % p.shape[i] * p.dst_stride[i];
                rest /= p.shape[i];
            }
            const double value = read(src.data(), p.src_dtype, from) * scale;
            const double bound =
                p.dst_dtype == FLARE_FP8_E4M3 && std::fabs(value) > 448 ? std::copysign(448, value) : value;
            dst.expect(to, bound);
        }
        p.src = src.data();
        p.dst = dst.data();
        EXPECT(flare_cast(&p) == FLARE_OK, "%s", last_error().c_str());
        dst.check_relative(p.dst_dtype == FLARE_FP8_E4M3 ? 0.07
                           : p.dst_dtype == FLARE_BF16   ? 4e-3
                           : p.dst_dtype == FLARE_FP16   ? 1e-3
                                                         : 1e-7,
                           "cast");
    }
}

void test_fill() {
    const auto fill = [](int32_t dtype, double value, void* dst) {
        flare_fill_params p{};
        p.struct_size = sizeof(p);
        p.device = FLARE_DEVICE_CPU;
        p.dtype = dtype;
        p.rank = 2;
        p.value = value;
        p.dst = dst;
        p.shape[0] = 3;
        p.shape[1] = 5;
        p.dst_stride[0] = 7;
        p.dst_stride[1] = 1;
        EXPECT(flare_fill(&p) == FLARE_OK, "%s", last_error().c_str());
    };
    struct FillCase {
        int32_t dtype;
        double value;
        double want;
    };
    const FillCase cases[] = {{FLARE_FP32, 1.1, static_cast<double>(1.1f)},
                              {FLARE_FP16, 2.0, 2.0},
                              {FLARE_BF16, -3.0, -3.0},
                              {FLARE_FP8_E4M3, 1000.0, 448.0},
                              {FLARE_UINT8, 300.0, 255.0},
                              {FLARE_UINT8, 2.5, 2.0},
                              {FLARE_INT32, -3.5, -4.0},
                              {FLARE_INT32, 1e10, 2147483647.0},
                              {FLARE_INT64, 1e30, 9223372036854775807.0},
                              {FLARE_INT64, -7.0, -7.0},
                              {FLARE_FP32, NAN, NAN}};
    for (const FillCase& c : cases) {
        Output out(c.dtype, 21);
        for (int64_t i = 0; i < 21; ++i) {
            if (i % 7 < 5 && c.dtype != FLARE_UINT8) {
                out.expect(i, c.want);
            }
        }
        fill(c.dtype, c.value, out.data());
        if (c.dtype != FLARE_UINT8) {
            out.check_relative(1e-12, "fill");
        } else {
            const std::vector<char> bytes = out.snapshot();
            for (size_t i = 0; i < 21; ++i) {
                const int want = i % 7 < 5 ? static_cast<int>(c.want) : 0xa5;
                EXPECT(static_cast<unsigned char>(bytes[i]) == want, "byte %zu", i);
            }
        }
    }
}

void test_append_kv() {
    Random random(3);
    for (int repeat = 0; repeat < 40; ++repeat) {
        const int32_t dtype = static_cast<int32_t>(random.pick({FLARE_FP32, FLARE_FP16, FLARE_BF16}));
        const int32_t cache_dtype = static_cast<int32_t>(random.pick({0, FLARE_FP32, FLARE_BF16, FLARE_FP8_E4M3}));
        const int32_t stored = cache_dtype == 0 ? dtype : cache_dtype;
        const int64_t tokens = random.pick({0, 1, 17, 40});
        const int64_t heads = random.integer(1, 3);
        const int64_t d = random.pick({4, 16, 40});
        const int64_t dv = random.pick({3, 16});
        flare_cache_append_params p{};
        p.struct_size = sizeof(p);
        p.device = FLARE_DEVICE_CPU;
        p.layout = FLARE_CACHE_KV;
        p.dtype = dtype;
        p.cache_dtype = cache_dtype;
        p.num_tokens = tokens;
        p.heads = heads;
        p.head_dim_k = d;
        p.head_dim_v = dv;
        p.page_size = 3;
        p.num_pages = 20;
        p.k_stride_h = d;
        p.k_stride_t = heads * d + 1;
        p.v_stride_h = dv;
        p.v_stride_t = heads * dv;
        p.k_cache_stride_h = d;
        p.k_cache_stride_s = heads * d;
        p.k_cache_stride_b = 3 * heads * d + 5;
        p.v_cache_stride_h = dv;
        p.v_cache_stride_s = heads * dv;
        p.v_cache_stride_b = 3 * heads * dv;
        Data k(dtype, tokens * p.k_stride_t + 1);
        Data v(dtype, tokens * p.v_stride_t + 1);
        k.set_random(0, tokens * p.k_stride_t, random);
        v.set_random(0, tokens * p.v_stride_t, random);
        Output k_cache(stored, 20 * p.k_cache_stride_b);
        Output v_cache(stored, 20 * p.v_cache_stride_b);
        std::vector<int64_t> slots;
        for (int64_t i = 0; i < 60; ++i) {
            slots.push_back(i);
        }
        std::shuffle(slots.begin(), slots.end(), std::mt19937(static_cast<unsigned>(repeat)));
        slots.resize(static_cast<size_t>(tokens + 1));
        std::vector<float> cosines, sines;
        std::vector<int64_t> positions;
        const bool rotary = random.chance(0.6);
        p.rotary_interleaved = static_cast<int32_t>(random.integer(0, 1));
        p.rotary_dim = rotary ? random.pick({2, 4}) : 0;
        p.max_position = 9;
        for (int64_t i = 0; i < 9 * p.rotary_dim / 2; ++i) {
            cosines.push_back(static_cast<float>(std::cos(0.3 * static_cast<double>(i))));
            sines.push_back(static_cast<float>(std::sin(0.3 * static_cast<double>(i))));
        }
        for (int64_t t = 0; t <= tokens; ++t) {
            positions.push_back(random.integer(0, 8));
            if (random.chance(0.15)) {
                slots[static_cast<size_t>(t)] = -1;
                positions.back() = 1000;  // not looked at
            }
        }
        std::vector<float> k_descale(static_cast<size_t>(heads), 0.25f);
        const bool scaled = stored == FLARE_FP8_E4M3 && random.chance(0.5);
        Indices slot_array(FLARE_INT32, slots);
        Indices position_array(FLARE_INT32, positions);
        p.k = k.data();
        p.v = v.data();
        p.k_cache = k_cache.data();
        p.v_cache = v_cache.data();
        p.slots = slot_array.data();
        p.k_descale = scaled ? k_descale.data() : nullptr;
        p.rotary_cos = rotary ? cosines.data() : nullptr;
        p.rotary_sin = rotary ? sines.data() : nullptr;
        p.positions = rotary ? position_array.data() : nullptr;
        for (int64_t t = 0; t < tokens; ++t) {
            const int64_t slot = slots[static_cast<size_t>(t)];
            if (slot < 0) {
                continue;
            }
            for (int64_t h = 0; h < heads; ++h) {
                std::vector<double> row;
                for (int64_t i = 0; i < d; ++i) {
                    row.push_back(read(k.data(), dtype, t * p.k_stride_t + h * d + i));
                }
                for (int64_t i = 0; i < p.rotary_dim / 2; ++i) {
                    const size_t a = static_cast<size_t>(p.rotary_interleaved != 0 ? 2 * i : i);
                    const size_t b = static_cast<size_t>(p.rotary_interleaved != 0 ? 2 * i + 1 : i + p.rotary_dim / 2);
                    const size_t at = static_cast<size_t>(positions[static_cast<size_t>(t)] * p.rotary_dim / 2 + i);
                    const double x = row[a];
                    const double y = row[b];
                    row[a] = x * static_cast<double>(cosines[at]) - y * static_cast<double>(sines[at]);
                    row[b] = x * static_cast<double>(sines[at]) + y * static_cast<double>(cosines[at]);
                }
                for (int64_t i = 0; i < d; ++i) {
                    k_cache.expect(slot / 3 * p.k_cache_stride_b + slot % 3 * p.k_cache_stride_s + h * d + i,
                                   row[static_cast<size_t>(i)] / (scaled ? 0.25 : 1.0));
                }
                for (int64_t i = 0; i < dv; ++i) {
                    v_cache.expect(slot / 3 * p.v_cache_stride_b + slot % 3 * p.v_cache_stride_s + h * dv + i,
                                   read(v.data(), dtype, t * p.v_stride_t + h * dv + i));
                }
            }
        }
        EXPECT(flare_cache_append(&p) == FLARE_OK, "%s", last_error().c_str());
        const double bound = stored == FLARE_FP8_E4M3 ? 0.05
                             : stored == FLARE_BF16   ? 4e-3
                             : stored == FLARE_FP16   ? 1e-3
                                                      : 3e-7;
        k_cache.check_relative(bound, "k_cache");
        v_cache.check_relative(bound, "v_cache");
        if (tokens > 0) {
            slots[0] = 60;
            slot_array = Indices(FLARE_INT32, slots);
            p.slots = slot_array.data();
            EXPECT(flare_cache_append(&p) == FLARE_ERROR_INDEX, "slot beyond the cache");
            EXPECT(last_error().find("slots[0] is 60, allowed are 0..59") != std::string::npos, "%s",
                   last_error().c_str());
        }
    }
}

void test_append_latent() {
    Random random(4);
    for (const int32_t cache_dtype : {FLARE_UINT8, FLARE_BF16}) {
        const int64_t tokens = 21;
        Data c(FLARE_FP32, tokens * 512);
        Data rope(FLARE_FP32, tokens * 64);
        c.set_random(0, tokens * 512, random);
        rope.set_random(0, tokens * 64, random);
        for (int64_t i = 0; i < 512; ++i) {
            c.set(i, 0.0);                                        // a row of zeros: the smallest scale
            c.set(512 + i, (i == 7 ? 1.0 : 0.25) * 448.0 * 8.0);  // amax exactly 448 * 2^3: scale 8, nothing lost
        }
        const bool rows656 = cache_dtype == FLARE_UINT8;
        std::vector<unsigned char> cache(static_cast<size_t>(6 * 4 * (rows656 ? 656 : 576 * 2)) + 16, 0xa5);
        unsigned char* base = cache.data() + (16 - reinterpret_cast<uintptr_t>(cache.data()) % 16) % 16;
        std::vector<int64_t> slots;
        for (int64_t t = 0; t < tokens; ++t) {
            slots.push_back(23 - t);
        }
        Indices slot_array(FLARE_INT64, slots);
        flare_cache_append_params p{};
        p.struct_size = sizeof(p);
        p.device = FLARE_DEVICE_CPU;
        p.layout = FLARE_CACHE_LATENT;
        p.dtype = FLARE_FP32;
        p.cache_dtype = cache_dtype;
        p.index_dtype = FLARE_INT64;
        p.num_tokens = tokens;
        p.heads = 1;
        p.head_dim_k = 512;
        p.head_dim_v = 64;
        p.num_pages = 6;
        p.page_size = 4;
        p.k = c.data();
        p.v = rope.data();
        p.k_stride_t = 512;
        p.k_stride_h = 512;
        p.v_stride_t = 64;
        p.v_stride_h = 64;
        p.k_cache = base;
        p.k_cache_stride_s = rows656 ? 656 : 576;
        p.k_cache_stride_h = p.k_cache_stride_s;
        p.k_cache_stride_b = 4 * p.k_cache_stride_s;
        p.slots = slot_array.data();
        EXPECT(flare_cache_append(&p) == FLARE_OK, "%s", last_error().c_str());
        for (int64_t t = 0; t < tokens; ++t) {
            const unsigned char* row = base + (23 - t) * (rows656 ? 656 : 576 * 2);
            for (int64_t i = 0; i < 576; ++i) {
                const double want =
                    i < 512 ? read(c.data(), FLARE_FP32, t * 512 + i) : read(rope.data(), FLARE_FP32, t * 64 + i - 512);
                double got;
                double allowed = std::fabs(want) * 0.004;
                if (!rows656) {
                    got = read(row, FLARE_BF16, i);
                } else if (i >= 512) {
                    got = read(row + 528, FLARE_BF16, i - 512);
                } else {
                    const double scale = read(row + 512, FLARE_FP32, i / 128);
                    double largest = 0;
                    for (int64_t j = i / 128 * 128; j < i / 128 * 128 + 128; ++j) {
                        largest = std::max(largest, std::fabs(read(c.data(), FLARE_FP32, t * 512 + j)));
                    }
                    const double wanted_scale = std::exp2(std::ceil(std::log2(std::max(largest / 448.0, 1e-4))));
                    EXPECT(scale == wanted_scale, "scale %g, want %g", scale, wanted_scale);
                    got = read(row, FLARE_FP8_E4M3, i) * scale;
                    allowed = std::max(std::fabs(want) / 16, scale * 0.001);
                    EXPECT(t != 1 || got == want, "exact row: %g, want %g", got, want);
                }
                EXPECT(std::fabs(got - want) <= allowed, "token %lld channel %lld: %g, want %g",
                       static_cast<long long>(t), static_cast<long long>(i), got, want);
            }
        }
    }
}

// Several callers at once, nested calls, all indices exactly once, scratch private.
void test_thread_pool() {
    std::atomic<int> wrong{0};
    const auto job = [&](int64_t count) {
        std::vector<std::atomic<int>> seen(static_cast<size_t>(count));
        auto body = [&](int64_t index, void* scratch) {
            *static_cast<int64_t*>(scratch) = index;
            if (index % 50 == 0) {
                std::atomic<int64_t> sum{0};
                auto inner = [&](int64_t i, void*) { sum += i; };
                flare::cpu::parallel_for(20, 0, 0, inner);
                wrong += sum != 190;
            }
            ++seen[static_cast<size_t>(index)];
            wrong += *static_cast<int64_t*>(scratch) != index;
        };
        flare::cpu::parallel_for(count, 0, 64 + static_cast<size_t>(count), body);
        for (const std::atomic<int>& times : seen) {
            wrong += times != 1;
        }
    };
    std::vector<std::thread> callers;
    for (int caller = 0; caller < 8; ++caller) {
        callers.emplace_back([&, caller] {
            for (int repeat = 0; repeat < 100; ++repeat) {
                job(1 + (caller * 37 + repeat * 11) % 300);
            }
        });
    }
    for (std::thread& caller : callers) {
        caller.join();
    }
    EXPECT(wrong == 0, "%d wrong", wrong.load());
    EXPECT(flare::cpu::num_threads() >= 1, "no threads");
}

}  // namespace

int main() {
    test_conversions();
    test_cast_strides();
    test_fill();
    test_append_kv();
    test_append_latent();
    test_thread_pool();
    return finish("cpu_ops_test");
}
