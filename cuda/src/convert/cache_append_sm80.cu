// flare_cache_append on any CUDA device: a warp takes one head of one token, turns it, quantises it and writes it to
// its slot.
#include <initializer_list>

#include "convert/element.cuh"
#include "convert/params.h"

namespace flare::convert {
namespace {

constexpr int kThreads = 128;
constexpr int kWarps = kThreads / 32;

__device__ __forceinline__ int64_t load_index(const void* array, int64_t i, int32_t index64) {
    return index64 != 0 ? static_cast<const int64_t*>(array)[i] : static_cast<const int32_t*>(array)[i];
}

// Angles of one token, or none.
struct Rotary {
    const float* cosines;
    const float* sines;
    int half;
    bool interleaved;
};

__device__ __forceinline__ Rotary no_rotary() {
    return {nullptr, nullptr, 0, false};
}

__device__ __forceinline__ Rotary rotary_of(const AppendParams& p, int64_t token) {
    if (p.rotary_cos == nullptr) {
        return no_rotary();
    }
    const int half = p.rotary_dim / 2;
    const int64_t row = load_index(p.positions, token, p.index64) * half;
    return {p.rotary_cos + row, p.rotary_sin + row, half, p.rotary_interleaved != 0};
}

// Channels c .. c + kCount - 1 of a row, turned. Products and sums are rounded one by one, as on the CPU.
template <int kCount>
__device__ __forceinline__ void load_turned(float (&x)[kCount], const void* src, int32_t dtype, int64_t row, int c,
                                            const Rotary& rotary) {
    load_elements<kCount>(x, src, dtype, row + c);
    if (c >= 2 * rotary.half) {
        return;
    }
    if (rotary.interleaved && kCount > 1) {
#pragma unroll
        for (int i = 0; i + 1 < kCount; i += 2) {
            const float cosine = rotary.cosines[(c + i) / 2];
            const float sine = rotary.sines[(c + i) / 2];
            const float first = x[i];
            const float second = x[i + 1];
            x[i] = __fsub_rn(__fmul_rn(first, cosine), __fmul_rn(second, sine));
            x[i + 1] = __fadd_rn(__fmul_rn(second, cosine), __fmul_rn(first, sine));
        }
        return;
    }
    const bool is_second = rotary.interleaved ? c % 2 == 1 : c >= rotary.half;
    const int partner_c = rotary.interleaved ? c ^ 1 : is_second ? c - rotary.half : c + rotary.half;
    const int angle = rotary.interleaved ? c / 2 : is_second ? partner_c : c;
    float partner[kCount];
    load_elements<kCount>(partner, src, dtype, row + partner_c);
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
        const float own = __fmul_rn(x[i], rotary.cosines[angle + i]);
        const float other = __fmul_rn(partner[i], rotary.sines[angle + i]);
        x[i] = is_second ? __fadd_rn(own, other) : __fsub_rn(own, other);
    }
}

template <int kCount>
__device__ __forceinline__ void append_row(const void* src, int32_t dtype, int64_t src_row, int dim,
                                           const Rotary& rotary, const float* descale, int head, void* dst,
                                           int32_t dst_dtype, int64_t dst_row) {
    const int lane = threadIdx.x % 32;
    const float divisor = descale != nullptr ? descale[head] : 1.0f;
    for (int c = lane * kCount; c < dim; c += 32 * kCount) {
        float x[kCount];
        load_turned<kCount>(x, src, dtype, src_row, c, rotary);
        if (descale != nullptr) {
#pragma unroll
            for (int i = 0; i < kCount; ++i) {
                x[i] = divide(x[i], divisor);
            }
        }
        store_elements<kCount>(x, dst, dst_dtype, dst_row + c);
    }
}

// kCount is 4 where every row and slice allows it, else 1.
template <int kCount>
__global__ void __launch_bounds__(kThreads) cache_append_kernel(const __grid_constant__ AppendParams p) {
    const int64_t unit = static_cast<int64_t>(blockIdx.x) * kWarps + threadIdx.x / 32;
    const int64_t token = unit / p.heads;
    if (token >= p.num_tokens) {
        return;
    }
    const int head = static_cast<int>(unit - token * p.heads);
    const int64_t slot = load_index(p.slots, token, p.index64);
    if (slot < 0) {
        return;
    }
    const int64_t page = slot / p.page_size;
    const int64_t offset = slot - page * p.page_size;
    const Rotary rotary = rotary_of(p, token);
    const int64_t k_row = page * p.k_cache_stride_b + offset * p.k_cache_stride_s + head * p.k_cache_stride_h;
    append_row<kCount>(p.k, p.dtype, token * p.k_stride_t + head * p.k_stride_h, p.dim_k,
                       p.rotates_v != 0 ? no_rotary() : rotary, p.k_descale, head, p.k_cache, p.cache_dtype, k_row);
    if (p.v == nullptr) {
        return;
    }
    const bool behind_k = p.v_cache == nullptr;
    const int64_t v_row = behind_k
                              ? k_row + p.dim_k
                              : page * p.v_cache_stride_b + offset * p.v_cache_stride_s + head * p.v_cache_stride_h;
    append_row<kCount>(p.v, p.dtype, token * p.v_stride_t + head * p.v_stride_h, p.dim_v,
                       p.rotates_v != 0 ? rotary : no_rotary(), p.v_descale, head, behind_k ? p.k_cache : p.v_cache,
                       p.cache_dtype, v_row);
}

// 2^ceil(log2(max(largest / 448, 1e-4))), from the bits, without log2 and division: 448 is 1.75 * 2^8, so a mantissa
// beyond .75 goes up to the next power, and 2^-13 is the first one over 1e-4.
__device__ __forceinline__ float group_scale(float largest) {
    const int bits = __float_as_int(largest);
    if (bits == 0x7f800000) {
        return __int_as_float(0x7f000000);  // 2^127, the largest power there is
    }
    return __int_as_float(max(((bits + 0x1fffff) & 0x7f800000) - (8 << 23), (127 - 13) << 23));
}

template <int kCount>
__device__ __forceinline__ void load_four(float (&x)[4], const void* src, int32_t dtype, int64_t row, int c,
                                          const Rotary& rotary) {
    if constexpr (kCount == 4) {
        load_turned<4>(x, src, dtype, row, c, rotary);
    } else {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            float one[1];
            load_turned<1>(one, src, dtype, row, c + i, rotary);
            x[i] = one[0];
        }
    }
}

// A warp per row: 512 e4m3 values in groups of 128, 4 fp32 scales, 64 bf16 values.
template <int kCount>
__global__ void __launch_bounds__(kThreads, 8) cache_append_656_kernel(const __grid_constant__ AppendParams p) {
    const int64_t token = static_cast<int64_t>(blockIdx.x) * kWarps + threadIdx.x / 32;
    if (token >= p.num_tokens) {
        return;
    }
    const int64_t slot = load_index(p.slots, token, p.index64);
    if (slot < 0) {
        return;
    }
    const int lane = threadIdx.x % 32;
    const int64_t page = slot / p.page_size;
    uint8_t* const out =
        static_cast<uint8_t*>(p.k_cache) + page * p.k_cache_stride_b + (slot - page * p.page_size) * p.k_cache_stride_s;
    for (int group = 0; group < 4; ++group) {
        const int c = 128 * group + 4 * lane;
        float x[4];
        load_four<kCount>(x, p.k, p.dtype, token * p.k_stride_t, c, no_rotary());
        float largest = fmaxf(fmaxf(fabsf(x[0]), fabsf(x[1])), fmaxf(fabsf(x[2]), fabsf(x[3])));
#pragma unroll
        for (int step = 16; step > 0; step /= 2) {
            largest = fmaxf(largest, __shfl_xor_sync(0xffffffffu, largest, step));
        }
        if (is_nan(largest)) {  // all 128 are: NaNs don't count
            largest = 0.0f;
        }
        const float scale = group_scale(largest);
        const uint32_t scale_bits =
            __float_as_uint(scale);  // of a power of two: its inverse is exact, if subnormal at 2^127
        const float inverse = __uint_as_float(scale_bits == 0x7f000000u ? 0x00400000u : 0x7f000000u - scale_bits);
        uint32_t packed = 0;
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            packed |= float_to_e4m3(multiply(x[i], inverse)) << (8 * i);
        }
        *reinterpret_cast<uint32_t*>(out + c) = packed;
        if (lane == 0) {
            *reinterpret_cast<float*>(out + 512 + 4 * group) = scale;
        }
    }
    if (lane < 16) {
        float x[4];
        load_four<kCount>(x, p.v, p.dtype, token * p.v_stride_t, 4 * lane, rotary_of(p, token));
        store_elements<4>(x, out + 528, FLARE_BF16, 4 * lane);
    }
}

// Whether rows can be read and written four channels at a time.
bool in_fours(const AppendParams& p) {
    const auto aligned = [](const void* data, int bytes) {
        return reinterpret_cast<uintptr_t>(data) % (4 * bytes) == 0;
    };
    const auto four = [](std::initializer_list<int64_t> sizes) {
        for (const int64_t size : sizes) {
            if (size % 4 != 0) {
                return false;
            }
        }
        return true;
    };
    const int element = element_bytes(p.dtype);
    const int cache_element = element_bytes(p.cache_dtype);
    if (!aligned(p.k, element) || !aligned(p.v, element) || !aligned(p.k_cache, cache_element) ||
        !aligned(p.v_cache, cache_element) ||
        !four({p.k_stride_t, p.k_stride_h, p.dim_k, p.k_cache_stride_b, p.k_cache_stride_s, p.k_cache_stride_h})) {
        return false;
    }
    if (p.v != nullptr && !four({p.v_stride_t, p.v_stride_h, p.dim_v})) {
        return false;
    }
    if (p.v_cache != nullptr && !four({p.v_cache_stride_b, p.v_cache_stride_s, p.v_cache_stride_h})) {
        return false;
    }
    return p.rotary_cos == nullptr || four({p.rotary_interleaved != 0 ? p.rotary_dim : p.rotary_dim / 2});
}

}  // namespace

int32_t launch_cache_append(const AppendParams& p, cudaStream_t stream) {
    const int64_t units = p.num_tokens * p.heads;
    if (units == 0) {
        return cudaSuccess;
    }
    const int64_t blocks = (units + kWarps - 1) / kWarps;
    if (blocks > INT32_MAX) {
        return cudaErrorInvalidConfiguration;
    }
    const unsigned grid = static_cast<unsigned>(blocks);
    const bool fours = in_fours(p);
    if (p.cache_dtype == FLARE_UINT8) {
        fours ? cache_append_656_kernel<4><<<grid, kThreads, 0, stream>>>(p)
              : cache_append_656_kernel<1><<<grid, kThreads, 0, stream>>>(p);
    } else {
        fours ? cache_append_kernel<4><<<grid, kThreads, 0, stream>>>(p)
              : cache_append_kernel<1><<<grid, kThreads, 0, stream>>>(p);
    }
    return cudaPeekAtLastError();
}

}  // namespace flare::convert
