// flare_cast, flare_fill and flare_cache_append on CUDA: every byte, written or not, as the CPU backend leaves it.
// Seeded random cases over dtypes, strides, alignments and options. Ends with status 77 (skipped) where there is no
// usable GPU.
#if defined(FLARE_HAVE_CUDA)
#include "gpu_support.h"

#include <algorithm>
#include <numeric>

using namespace gpu_test;

namespace {

// A random strided layout of `shape`: permuted, with gaps; broadcast dimensions where allowed. Returns the elements
// that it spans.
int64_t random_layout(int rank, const int64_t* shape, int64_t* stride, bool may_broadcast) {
    int order[5];
    std::iota(order, order + rank, 0);
    if (integer(0, 1) != 0) {
        std::shuffle(order, order + rank, random_bits);
    }
    const bool dense = integer(0, 2) != 0;
    int64_t next = 1;
    for (int n = rank - 1; n >= 0; --n) {
        const int i = order[n];
        stride[i] = next + (dense ? 0 : integer(0, 8));
        if (may_broadcast && !dense && integer(0, 4) == 0) {
            stride[i] = 0;
            continue;
        }
        next = stride[i] * std::max<int64_t>(shape[i], 1) + (dense ? 0 : integer(0, 3));
    }
    int64_t span = 1;
    for (int i = 0; i < rank; ++i) {
        span += std::max<int64_t>(shape[i] - 1, 0) * stride[i];
    }
    return span;
}

int random_shape(int64_t* shape) {
    const int rank = static_cast<int>(integer(0, 5));
    int64_t left = pick({1, 64, 4096, 200000});
    for (int i = 0; i < rank; ++i) {
        shape[i] = pick({1, 2, 3, 8, 16, integer(1, 40), integer(1, 1000), integer(0, 20)});
        shape[i] = std::min(shape[i], left);
        left = shape[i] > 0 ? std::max<int64_t>(left / shape[i], 1) : left;
    }
    return rank;
}

std::string shape_text(int rank, const int64_t* shape, const int64_t* stride) {
    std::string text = "[";
    for (int i = 0; i < rank; ++i) {
        text += std::to_string(shape[i]) + ":" + std::to_string(stride[i]) + (i + 1 < rank ? ", " : "");
    }
    return text + "]";
}

std::string name_text(int32_t operation, const void* params) {
    char name[128] = "?";
    flare_kernel_name(operation, params, name, sizeof(name));
    return name;
}

// Statuses agree, the kernel is the one expected, and all bytes are equal.
void compare(const std::string& what, int32_t cpu, int32_t gpu, const std::string& kernel, const char* expected,
             const Mirror& out) {
    report(cpu == FLARE_OK && gpu == FLARE_OK, what, std::string(flare_status_string(gpu)) + " " + last_error());
    report(kernel == expected, what, "runs " + kernel + ", expected " + expected);
    check_cuda(cudaDeviceSynchronize(), what.c_str());
    const std::vector<unsigned char> got = out.download();
    for (size_t i = 0; i < got.size(); ++i) {
        if (got[i] != out.host[i]) {
            char text[128];
            std::snprintf(text, sizeof(text), "byte %zu of %zu is %02x, the CPU's %02x", i, got.size(), got[i],
                          out.host[i]);
            report(false, what, text);
            return;
        }
    }
    report(true, what, "");
}

void test_cast() {
    const int32_t types[] = {FLARE_FP32, FLARE_FP16, FLARE_BF16, FLARE_FP8_E4M3};
    const float scales[] = {1.0f, 0.0f, 0.25f, -3.3f, 1e-3f};
    flare_cast_params p;
    std::memset(&p, 0, sizeof(p));
    p.struct_size = sizeof(p);
    p.src_dtype = types[integer(0, 3)];
    p.dst_dtype = types[integer(0, 3)];
    p.scale = scales[integer(0, 4)];  // 0: the default, 1
    p.rank = random_shape(p.shape);
    const int64_t src_skip = pick({0, 0, 1, 4, 8});
    const int64_t dst_skip = pick({0, 0, 1, 4, 8});
    Mirror src(p.src_dtype, src_skip + random_layout(p.rank, p.shape, p.src_stride, true));
    Mirror dst(p.dst_dtype, dst_skip + random_layout(p.rank, p.shape, p.dst_stride, false));
    src.fill_random_bits();  // NaNs, infinities and subnormals too
    p.device = FLARE_DEVICE_CPU;
    p.src = src.on(-1, src_skip);
    p.dst = dst.on(-1, dst_skip);
    const int32_t cpu = flare_cast(&p);
    p.device = 0;
    p.src = src.on(0, src_skip);
    p.dst = dst.on(0, dst_skip);
    const std::string name = name_text(FLARE_OP_CAST, &p);
    const int32_t gpu = flare_cast(&p);
    compare(std::string("cast ") + name_of(p.src_dtype) + shape_text(p.rank, p.shape, p.src_stride) + " -> " +
                name_of(p.dst_dtype) + shape_text(p.rank, p.shape, p.dst_stride),
            cpu, gpu, name, "cast_sm80", dst);
}

void test_fill() {
    const int32_t types[] = {FLARE_FP32, FLARE_FP16, FLARE_BF16, FLARE_FP8_E4M3, FLARE_UINT8, FLARE_INT32, FLARE_INT64};
    const double values[] = {0.0, 1.0, -2.7, 1e30, std::numeric_limits<double>::quiet_NaN(), -1e300, 12345678901.0};
    flare_fill_params p;
    std::memset(&p, 0, sizeof(p));
    p.struct_size = sizeof(p);
    p.dtype = types[integer(0, 6)];
    p.value = values[integer(0, 6)];
    p.rank = random_shape(p.shape);
    const int64_t skip = pick({0, 0, 1, 4, 8});
    Mirror dst(p.dtype, skip + random_layout(p.rank, p.shape, p.dst_stride, false));
    p.device = FLARE_DEVICE_CPU;
    p.dst = dst.on(-1, skip);
    const int32_t cpu = flare_fill(&p);
    p.device = 0;
    p.dst = dst.on(0, skip);
    const std::string name = name_text(FLARE_OP_FILL, &p);
    const int32_t gpu = flare_fill(&p);
    compare(std::string("fill ") + name_of(p.dtype) + shape_text(p.rank, p.shape, p.dst_stride), cpu, gpu, name,
            "fill_sm80", dst);
}

void test_cache_append() {
    flare_cache_append_params p;
    std::memset(&p, 0, sizeof(p));
    p.struct_size = sizeof(p);
    const bool latent = integer(0, 2) == 0;
    const bool odd = integer(0, 3) == 0;  // sizes and strides that are multiples of nothing
    p.layout = latent ? FLARE_CACHE_LATENT : FLARE_CACHE_KV;
    p.dtype = static_cast<int32_t>(pick({FLARE_FP32, FLARE_FP16, FLARE_BF16}));
    const int32_t kv_types[] = {FLARE_FP32, FLARE_FP16, FLARE_BF16, FLARE_FP8_E4M3};
    const int32_t latent_types[] = {FLARE_FP32, FLARE_FP16, FLARE_BF16, FLARE_UINT8};
    p.cache_dtype = (latent ? latent_types : kv_types)[integer(0, 3)];
    p.index_dtype = static_cast<int32_t>(pick({FLARE_INT32, FLARE_INT64}));
    const bool rows656 = p.cache_dtype == FLARE_UINT8;
    p.num_tokens = pick({0, 1, 5, integer(1, 70)});
    p.heads = latent ? 1 : integer(1, 5);
    p.head_dim_k = rows656 || (latent && integer(0, 1) != 0) ? 512 : odd ? integer(1, 150) : 8 * integer(1, 32);
    p.head_dim_v = rows656 ? 64 : odd ? integer(latent ? 0 : 1, 150) : 8 * integer(latent ? 0 : 1, 32);
    p.page_size = pick({1, 16, 64, integer(1, 30)});
    p.num_pages = p.num_tokens / p.page_size + 2;
    const bool has_v = latent ? p.head_dim_v > 0 : integer(0, 3) != 0;
    const int64_t gap = odd ? integer(0, 5) : 8 * integer(0, 2);
    p.k_stride_h = p.head_dim_k + gap;
    p.k_stride_t = p.heads * p.k_stride_h + gap;
    p.v_stride_h = p.head_dim_v + gap;
    p.v_stride_t = p.heads * p.v_stride_h + gap;
    const int64_t k_width = rows656 ? 656 : p.head_dim_k + (latent ? p.head_dim_v : 0);
    const int64_t cache_gap = rows656 ? 16 * integer(0, 2) : gap;
    p.k_cache_stride_h = k_width + cache_gap;
    p.k_cache_stride_s = p.heads * p.k_cache_stride_h;
    p.k_cache_stride_b = p.page_size * p.k_cache_stride_s + cache_gap;
    p.v_cache_stride_h = p.head_dim_v + gap;
    p.v_cache_stride_s = p.heads * p.v_cache_stride_h;
    p.v_cache_stride_b = p.page_size * p.v_cache_stride_s + gap;
    Mirror k(p.dtype, p.num_tokens * p.k_stride_t + 1), v(p.dtype, p.num_tokens * p.v_stride_t + 1);
    const double size = static_cast<double>(pick({1, 1, 300, 10000}));  // fp16 holds all of them
    k.fill_normal(size);
    v.fill_normal(size);
    Mirror k_cache(p.cache_dtype, p.num_pages * p.k_cache_stride_b),
        v_cache(p.cache_dtype, p.num_pages * p.v_cache_stride_b);
    Mirror slots(p.index_dtype, p.num_tokens), positions(p.index_dtype, p.num_tokens);
    std::vector<int64_t> places(static_cast<size_t>(p.num_pages * p.page_size));
    std::iota(places.begin(), places.end(), 0);
    std::shuffle(places.begin(), places.end(), random_bits);
    places.resize(static_cast<size_t>(p.num_tokens));
    std::vector<int64_t> where(places.size());
    p.max_position = 97;
    for (size_t i = 0; i < places.size(); ++i) {
        places[i] = integer(0, 7) == 0 ? -integer(1, 3) : places[i];
        where[i] = integer(0, p.max_position - 1);
    }
    slots.set_indices(places);
    positions.set_indices(where);
    const int64_t turned = latent ? p.head_dim_v : p.head_dim_k;
    const bool rotary = turned >= 2 && integer(0, 2) != 0;
    p.rotary_interleaved = static_cast<int32_t>(integer(0, 1));
    p.rotary_dim = rotary ? 2 * (integer(0, 1) != 0 ? turned / 2 : integer(1, turned / 2)) : 0;
    // Arithmetic doesn't define the sign of a NaN that it makes, so no infinities and NaNs where pairs are turned.
    for (int64_t i = rotary ? 4 : 0; i < 6 && p.num_tokens > 0; ++i) {
        const float strange[] = {HUGE_VALF, -HUGE_VALF, NAN, -NAN, 0.0f, 1e-30f};
        k.set(integer(0, k.count - 1), strange[i]);
        k.upload();
    }
    Mirror cosines(FLARE_FP32, std::max<int64_t>(p.max_position * p.rotary_dim / 2, 1)),
        sines(FLARE_FP32, cosines.count);
    for (int64_t i = 0; i < cosines.count; ++i) {
        const double angle = normal();
        cosines.set(i, std::cos(angle));
        sines.set(i, std::sin(angle));
    }
    cosines.upload();
    sines.upload();
    Mirror k_descale(FLARE_FP32, p.heads), v_descale(FLARE_FP32, p.heads);
    for (int64_t h = 0; h < p.heads; ++h) {
        k_descale.set(h, 0.01 + std::fabs(normal()));
        v_descale.set(h, 0.01 + std::fabs(normal()));
    }
    k_descale.upload();
    v_descale.upload();
    const bool descales = p.cache_dtype == FLARE_FP8_E4M3 && integer(0, 1) != 0;
    const auto point = [&](int32_t device) {
        p.device = device;
        p.k = k.on(device);
        p.v = has_v ? v.on(device) : nullptr;
        p.k_cache = k_cache.on(device);
        p.v_cache = has_v && !latent ? v_cache.on(device) : nullptr;
        p.slots = slots.on(device);
        p.k_descale = descales ? k_descale.floats(device) : nullptr;
        p.v_descale = descales ? v_descale.floats(device) : nullptr;
        p.rotary_cos = rotary ? cosines.floats(device) : nullptr;
        p.rotary_sin = rotary ? sines.floats(device) : nullptr;
        p.positions = rotary ? positions.on(device) : nullptr;
    };
    point(FLARE_DEVICE_CPU);
    const int32_t cpu = flare_cache_append(&p);
    point(0);
    const std::string name = name_text(FLARE_OP_CACHE_APPEND, &p);
    const int32_t gpu = flare_cache_append(&p);
    char what[200];
    std::snprintf(what, sizeof(what), "cache_append %s %s -> %s T%d H%d D%d/%d page %d rotary %d%s",
                  latent ? "latent" : "kv", name_of(p.dtype), name_of(p.cache_dtype), static_cast<int>(p.num_tokens),
                  static_cast<int>(p.heads), static_cast<int>(p.head_dim_k), static_cast<int>(p.head_dim_v),
                  static_cast<int>(p.page_size), static_cast<int>(p.rotary_dim),
                  p.rotary_interleaved != 0 ? " interleaved" : "");
    const char* expected = rows656 ? "cache_append_sm80_latent656" : "cache_append_sm80";
    compare(what, cpu, gpu, name, expected, k_cache);
    if (has_v && !latent) {
        compare(std::string(what) + " v", cpu, gpu, name, expected, v_cache);
    }
}

// More than 2^31 elements, which the CPU would take long for: both ends and the middle.
void test_large_fill() {
    const int64_t count = (int64_t{1} << 31) + 12345;
    void* data = nullptr;
    if (cudaMalloc(&data, static_cast<size_t>(count)) != cudaSuccess) {
        cudaGetLastError();
        return;
    }
    check_cuda(cudaMemset(data, 0, static_cast<size_t>(count)), "cudaMemset");
    flare_fill_params p;
    std::memset(&p, 0, sizeof(p));
    p.struct_size = sizeof(p);
    p.dtype = FLARE_UINT8;
    p.rank = 2;
    p.value = 77;
    p.dst = data;
    p.shape[0] = 3;
    p.shape[1] = count / 3;
    p.dst_stride[0] = count / 3;
    p.dst_stride[1] = 1;
    const int32_t status = flare_fill(&p);
    for (const int64_t at : {int64_t{0}, count / 2, count / 3 * 3 - 1}) {
        unsigned char byte = 0;
        check_cuda(cudaMemcpy(&byte, static_cast<char*>(data) + at, 1, cudaMemcpyDeviceToHost), "cudaMemcpy");
        report(status == FLARE_OK && byte == 77, "fill of 2^31 elements", std::to_string(at));
    }
    cudaFree(data);
}

}  // namespace

// Cases of each operation; 300 without an argument.
int main(int argc, char** argv) {
    if (!has_device()) {
        std::printf("gpu_convert_test: skipped, no CUDA device here\n");
        return kSkipped;
    }
    const int repeats = argc > 1 ? std::atoi(argv[1]) : 300;
    for (int i = 0; i < repeats; ++i) {
        test_cast();
        test_fill();
        test_cache_append();
    }
    if (argc == 1) {
        test_large_fill();
    }
    return finish("gpu_convert_test");
}

#else
#include <cstdio>

int main() {
    std::printf("gpu_convert_test: skipped, built without CUDA\n");
    return 77;
}

#endif
