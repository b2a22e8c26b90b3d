// Checks the Hopper attention kernels against a reference on the GPU: size grid, masks, GQA, cross lengths, LSE, NaN in
// the rows next to every sequence, poisoned outputs, repeated runs bitwise equal; with the library launcher also softcap,
// ALiBi, sink and packed sequences. Needs nvcc and one H200:
//   nvcc -std=c++17 -O3 -gencode arch=compute_90a,code=sm_90a -Icuda/include -Icuda/src \
//        cuda/tests/attention_sm90_check.cu cuda/src/attention/*sm90*.cu -o attention_sm90_check && ./attention_sm90_check
// Arguments: --small for a few cases a kernel; a number for one head dimension (of q and k), 8 for e4m3.
#include <cstring>

#include "attention_sm90_common.cuh"

namespace {

using namespace attention_test;

int failures = 0;
int cases = 0;
double worst = 0;  // error, in bounds

template <typename T>
void verify(const FwdParams& p, const char* what, size_t out_bytes, int repeats) {
    const int32_t rc = launch(p);
    CHECK(cudaDeviceSynchronize());
    const Error e = compare_all<T>(p, p.seqlen_q > 4000 ? 37 : 1);
    const bool half = std::is_same_v<T, __half>;
    const bool fp8 = std::is_same_v<T, __nv_fp8_e4m3>;
    // Weights are rounded to T before the second product: e4m3 has 3 bits behind the leading one.
    // Products of e4m3 are accumulated with 14 bits, which shows in lse.
    const double bound = fp8 ? 4e-2 : half ? 1e-3 : 5e-3;
    bool good = rc == FLARE_OK && e.relative < bound && e.lse < (fp8 ? 1e-2 : half ? 1e-3 : 2e-3) && e.bad == 0;
    worst = std::max(worst, std::isnan(e.relative) ? 1e30 : e.relative / bound);
    if (repeats > 0 && out_bytes > 0) {
        std::vector<char> first(out_bytes), again(out_bytes);
        CHECK(cudaMemcpy(first.data(), p.o, out_bytes, cudaMemcpyDeviceToHost));
        for (int i = 0; i < repeats; ++i) {
            launch(p);
            CHECK(cudaMemcpy(again.data(), p.o, out_bytes, cudaMemcpyDeviceToHost));
            good = good && std::memcmp(first.data(), again.data(), out_bytes) == 0;
        }
    }
    ++cases;
    if (!good) {
        if (++failures <= 12) {
            std::printf(
                "FAIL %s %s B=%d H=%d/%d Sq=%d Sk=%d D=%d/%d window=%d,%d rc=%d: error %.2e lse %.2e bad %.0f\n",
                half ? "fp16" : fp8 ? "e4m3" : "bf16", what, p.batch, p.heads_q, p.heads_kv, p.seqlen_q, p.seqlen_k, p.head_dim,
                p.head_dim_v, p.window_left, p.window_right, rc, e.relative, e.lse, e.bad);
        }
    }
}

template <typename T>
void verify_shape(const Shape& s, const char* what, int repeats = 0) {
    const FwdParams p = make_params<T>(s, 0, static_cast<uint64_t>(cases) + 1);
    verify<T>(p, what, size_t(s.batch) * s.seqlen_q * s.heads_q * s.head_dim_v * 2, repeats);
}

template <typename T>
void dense(int d, int dv) {
    const int sizes[] = {1, 7, 63, 64, 65, 127, 128, 129, 176, 192, 255, 353, 1000};
    for (int sq : sizes) {
        for (int sk : sizes) {
            verify_shape<T>({1, 2, 1, sq, sk, d, dv, -1, -1}, "full");
            verify_shape<T>({1, 2, 1, sq, sk, d, dv, -1, 0}, "causal");
        }
        verify_shape<T>({2, 3, 1, sq, 0, d, dv, -1, 0}, "no keys");
        for (int w : {0, 1, 63, 127, 128, 129, 5000}) {
            verify_shape<T>({1, 2, 2, sq, 400, d, dv, w, 0}, "window");
            verify_shape<T>({1, 2, 2, 400, sq, d, dv, w, 17}, "window");
            verify_shape<T>({1, 2, 2, 300, sq, d, dv, -1, w}, "window");
        }
    }
    verify_shape<T>({2, 6, 2, 4097, 4097, d, dv, -1, 0}, "causal", 20);
    verify_shape<T>({2, 6, 2, 4097, 4097, d, dv, -1, -1}, "full", 20);
    verify_shape<T>({2, 6, 2, 2000, 4097, d, dv, 1023, 0}, "window", 20);
    verify_shape<T>({3, 44, 4, 300, 300, d, dv, -1, 0}, "many tiles", 20);  // 396 tiles of 128 rows: three rounds
    verify_shape<T>({133, 1, 1, 64, 100, d, dv, -1, -1}, "133 tiles", 2);
    verify_shape<T>({11, 8, 8, 1500, 1500, d, dv, -1, 0}, "mirrored order", 2);  // four rounds of two tiles, keys beyond L2
    verify_shape<T>({4, 8, 8, 4090, 4090, d, dv, -1, 0}, "two rounds a section", 2);  // of eight heads, keys beyond L2
    verify_shape<T>({2, 10, 5, 2500, 2700, d, dv, 900, 0}, "window, tiles cut short last", 2);
    verify_shape<T>({11, 8, 8, 200, 3000, d, dv, -1, 0}, "few rows, heads one after another", 2);
    verify_shape<T>({11, 64, 8, 20, 3000, d, dv, -1, 0}, "few rows, joined heads one after another", 2);
    verify_shape<T>({1, 2, 1, 300, 2300, d, dv, -1, -1}, "wide", 2);
    verify_shape<T>({1, 2, 1, 300, 4200, d, dv, -1, 0}, "wide", 2);
    verify_shape<T>({1, 2, 1, 2500, 2500, d, dv, 2047, 0}, "wide", 2);
    verify_shape<T>({2, 2, 1, 1025, 4096, d, dv, -1, -1}, "pair", 5);
    verify_shape<T>({1, 3, 3, 8200, 8300, d, dv, -1, 0}, "pair", 5);
    verify_shape<T>({1, 2, 1, 6000, 6000, d, dv, 4000, 150}, "pair", 2);
    verify_shape<T>({1, 72, 8, 1100, 4100, d, dv, -1, -1}, "pair, many tiles", 5);
}

#ifndef FLARE_VARIANT
template <typename T>
T* device_array(int which, const std::vector<T>& host) {
    T* p = static_cast<T*>(slab(which, host.size() * sizeof(T)));
    CHECK(cudaMemcpy(p, host.data(), host.size() * sizeof(T), cudaMemcpyHostToDevice));
    return p;
}

template <typename T>
void extras(int d, int dv, bool small) {
    for (int right : {-1, 0}) {
        FwdParams p = make_params<T>({2, 4, 2, 333, 500, d, dv, -1, right}, 0, 77);
        const size_t bytes = size_t(2) * 333 * 4 * dv * 2;
        p.sink = device_array<float>(5, {0.3f, -2.0f, 200.0f, -INFINITY});
        verify<T>(p, "sink", bytes, 1);
        p.sink = nullptr;
        p.alibi_slopes = device_array<float>(5, {0.5f, 0.25f, 0.125f, 0.01f});
        verify<T>(p, "alibi", bytes, 1);
        p.alibi_slopes = nullptr;
        p.softcap = 5.0f;
        p.scale *= 5.0f;
        verify<T>(p, "softcap", bytes, 1);
        if (std::is_same_v<T, __nv_fp8_e4m3>) {  // [B, Hk], one product negative
            p.q_descale = device_array<float>(5, {0.5f, 1.5f, -0.75f, 2.0f});
            p.k_descale = device_array<float>(6, {0.25f, 1.0f, 0.5f, 3.0f});
            p.v_descale = device_array<float>(7, {2.0f, 0.125f, -1.0f, 0.5f});
            p.descale_batch_stride = 2;
            p.descale_head_stride = 1;
            verify<T>(p, "softcap, descales", bytes, 1);
            p.softcap = 0.0f;
            p.scale /= 5.0f;
            verify<T>(p, "descales", bytes, 1);
        }
    }
    // Heads of a group in one tile: short queries of many heads.
    for (int group : {2, 8, 64}) {
        for (int sq : {1, 3, 17, 49, 63}) {
            if (small && (group != 8 || sq != 17)) {
                continue;
            }
            const int batch = 1 + 280 / (2 * group);
            for (int right : {-1, 0}) {
                const int left = right < 0 && sq == 17 ? 40 : -1;
                FwdParams p = make_params<T>({batch, 2 * group, 2, sq, 77 + sq, d, dv, left, right}, 5, 81);
                std::vector<float> sinks(2 * group);
                for (int i = 0; i < 2 * group; ++i) {
                    sinks[i] = 0.25f * static_cast<float>(i % 16 - 8);
                }
                p.sink = sq == 63 ? device_array(5, sinks) : nullptr;
                verify<T>(p, "heads together", size_t(batch) * (sq + 5) * 2 * group * dv * 2, sq == 3 ? 2 : 0);
                p.sink = nullptr;
                std::vector<int32_t> used_q(batch), used_k(batch);
                for (int b = 0; b < batch; ++b) {
                    used_q[b] = b % 3 == 0 ? sq : b * 5 % (sq + 1);
                    used_k[b] = b % 4 == 0 ? 0 : b * 7 % (77 + sq);
                }
                CHECK(cudaMemset(p.o, 0xFF, size_t(batch) * (sq + 5) * 2 * group * dv * 2));
                p.seqused_q = device_array(6, used_q);
                p.seqused_k = device_array(7, used_k);
                verify<T>(p, "heads together, used", size_t(batch) * (sq + 5) * 2 * group * dv * 2, 0);
            }
        }
    }
    // Packed: a sequence of no keys, one of no rows, ragged tails; the neighbour's rows are real numbers, the last are NaN.
    const std::vector<int32_t> cu_q{0, 130, 130, 137, 500, 628};
    const std::vector<int32_t> cu_k{0, 200, 263, 263, 700, 828};
    const std::vector<int32_t> used_k{200, 63, 0, 301, 127};
    for (int right : {-1, 0}) {
        for (bool used : {false, true}) {
            FwdParams p = make_params<T>({1, 4, 2, 628, 828, d, dv, -1, right}, 9, 78);
            if (used) {  // unused storage between the sequences is NaN
                poison_rows<T><<<64, 256>>>(const_cast<void*>(p.k), 1, 700, 263 + 301, int64_t{2} * d);
                poison_rows<T><<<64, 256>>>(const_cast<void*>(p.v), 1, 700, 263 + 301, int64_t{2} * dv);
            }
            p.total_q = 628;
            p.total_k = 828;
            p.batch = 5;
            p.seqlen_q = 363;
            p.seqlen_k = 437;
            p.cu_seqlens_q = device_array(5, cu_q);
            p.cu_seqlens_k = device_array(6, cu_k);
            p.seqused_k = used ? device_array(7, used_k) : nullptr;
            p.lse_stride = {0, 1, 628};
            verify<T>(p, used ? "packed, used" : "packed", size_t(628) * 4 * dv * 2, 5);
        }
    }
    // Long enough for the instances of long rows; the second sequence is short, the third has no keys.
    {
        FwdParams p = make_params<T>({1, 2, 1, 2500, 9000, d, dv, -1, -1}, 9, 80);
        p.total_q = 2500;
        p.total_k = 9000;
        p.batch = 3;
        p.seqlen_q = 1300;
        p.seqlen_k = 8192;
        p.cu_seqlens_q = device_array<int32_t>(5, {0, 1300, 1400, 2500});
        p.cu_seqlens_k = device_array<int32_t>(6, {0, 8192, 9000, 9000});
        p.lse_stride = {0, 1, 2500};
        verify<T>(p, "packed, long", size_t(2500) * 2 * dv * 2, 5);
        p.window_right = 0;
        verify<T>(p, "packed, long, causal", size_t(2500) * 2 * dv * 2, 5);
        p.softcap = 20.0f;
        verify<T>(p, "packed, long, softcap", size_t(2500) * 2 * dv * 2, 5);
    }
    // Tile orders: more sequences than the table has entries, an odd number of heads, keys beyond L2; empty sequences in each.
    const auto packed = [&](int sequences, int step, int longest, int heads, int kv_heads, const char* what) {
        std::vector<int32_t> starts{0};
        for (int i = 0; i < sequences; ++i) {
            starts.push_back(starts.back() + i * step % (longest + 1));
        }
        const int total = starts.back();
        FwdParams p = make_params<T>({1, heads, kv_heads, total, total, d, dv, -1, -1}, 9, 81);
        p.total_q = p.total_k = total;
        p.batch = sequences;
        p.seqlen_q = p.seqlen_k = longest;
        p.cu_seqlens_q = p.cu_seqlens_k = device_array(5, starts);
        p.lse_stride = {0, 1, total};
        for (int right : {-1, 0}) {
            p.window_right = right;
            CHECK(cudaMemset(p.o, 0xFF, size_t(total) * heads * dv * 2));
            verify<T>(p, what, size_t(total) * heads * dv * 2, 2);
        }
    };
    packed(300, 77, 210, 3, 1, "packed, 300 sequences, 3 heads");
    packed(9, 377, 999, 3, 3, "packed, 3 heads");
    if (!small) {
        packed(700, 77, 210, 4, 2, "packed, 700 sequences");
        packed(14, 719, 2600, 8, 8, "packed, mirrored order");  // four rounds of two tiles, all but full
    }
    // Dense storage longer than what is used; what is not used is NaN.
    FwdParams p = make_params<T>({2, 4, 2, 200, 300, d, dv, -1, 0}, 0, 79);
    poison_rows<T><<<64, 256>>>(const_cast<void*>(p.k), 2, 300, 150, int64_t{2} * d);
    poison_rows<T><<<64, 256>>>(const_cast<void*>(p.v), 2, 300, 150, int64_t{2} * dv);
    p.seqused_k = device_array<int32_t>(7, {150, 1});
    verify<T>(p, "seqused", size_t(2) * 200 * 4 * dv * 2, 5);
}
#endif

// Every element takes the sign given.
template <typename T>
__global__ void set_signs(void* p, int64_t count, float sign) {
    for (int64_t i = blockIdx.x * int64_t{blockDim.x} + threadIdx.x; i < count; i += int64_t{gridDim.x} * blockDim.x) {
        Bits<T>::store(p, i, copysignf(Bits<T>::load(p, i), sign));
    }
}

// The maximum of a row is taken otherwise while it is negative: over all keys, and over those behind the first 300, which
// come first.
template <typename T>
void negative(int d, int dv) {
    for (int64_t first : {0, 300}) {
        for (int64_t keys : {1000, 2700}) {
            const int rows = keys == 1000 ? 250 : 1100;
            const FwdParams p = make_params<T>({1, 2, 1, rows, static_cast<int>(keys), d, dv, -1, -1}, 0, 81);
            set_signs<T><<<64, 256>>>(const_cast<void*>(p.q), int64_t{rows} * 2 * d, 1.0f);
            set_signs<T><<<64, 256>>>(static_cast<T*>(const_cast<void*>(p.k)) + first * d, (keys - first) * d, -1.0f);
            verify<T>(p, "negative scores", size_t(rows) * 2 * dv * 2, 1);
        }
    }
}

// Tiles enough for the instance whose warpgroups see different key blocks.
template <typename T>
void many_tiles(int d, int dv, bool small) {
    if (small) {
        verify_shape<T>({1, 396, 4, 33, 100, d, dv, 30, 0}, "window, many tiles", 2);
        return;
    }
    for (int sq : {1, 64, 255, 256, 321}) {
        for (int sk : {1, 65, 256, 700}) {
            verify_shape<T>({4, 99, 11, sq, sk, d, dv, -1, -1}, "full, many tiles");
            verify_shape<T>({4, 99, 11, sq, sk, d, dv, -1, 0}, "causal, many tiles", 2);
            for (int w : {0, 1, 64, 130}) {
                verify_shape<T>({4, 99, 11, sq, sk, d, dv, w, 0}, "window, many tiles");
                verify_shape<T>({4, 99, 11, sq, sk, d, dv, w, 70}, "window, many tiles");
            }
        }
    }
}

template <typename T>
void padded(int d, int dv) {
    for (int right : {-1, 0}) {
        const Shape s{2, 4, 2, 130, 301, d, dv, -1, right};
        verify<T>(make_params<T>(s, 33, 99), "NaN neighbours", size_t(2) * 163 * 4 * dv * 2, 2);
    }
}

template <typename T>
void all(int d, int dv, bool small) {
    if (!small) {
        dense<T>(d, dv);
    } else {
        verify_shape<T>({1, 2, 1, 200, 333, d, dv, -1, 0}, "causal");
        verify_shape<T>({1, 2, 1, 200, 333, d, dv, 64, 3}, "window");
    }
    padded<T>(d, dv);
    negative<T>(d, dv);
    if (d == 64) {
        many_tiles<T>(d, dv, small);
    }
#ifndef FLARE_VARIANT
    extras<T>(d, dv, small);
#endif
}

}  // namespace

int main(int argc, char** argv) {
    bool small = false;
    int only = 0;
    for (int i = 1; i < argc; ++i) {
        if (std::strcmp(argv[i], "--small") == 0) {
            small = true;
        } else {
            only = std::atoi(argv[i]);
        }
    }
#ifdef FLARE_VARIANT
    const int v[] = {V_D, V_DV};
    all<__nv_bfloat16>(v[0], v[1], small);
#else
    const int dims[][2] = {{64, 64}, {96, 96}, {128, 128}, {192, 128}, {192, 192}, {256, 256}};
    for (const auto& d : dims) {
        if (only != 0 && only != d[0]) {
            continue;
        }
        all<__nv_bfloat16>(d[0], d[1], small);
        all<__half>(d[0], d[1], small);
        if (small) {
            CHECK(cudaDeviceSynchronize());
        }
    }
    std::printf("16-bit: worst error %.2f of its bound\n", worst);
    worst = 0;
    if (only == 0 || only == 8) {
        all<__nv_fp8_e4m3>(128, 128, small);
    }
    std::printf("e4m3: worst error %.2f of its bound\n", worst);
#endif
    std::printf("attention_sm90_check: %d cases, %d failed: %s\n", cases, failures, failures == 0 ? "PASS" : "FAIL");
    return failures != 0;
}
