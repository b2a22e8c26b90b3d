// Cast, fill and cache append on CUDA: validated params -> kernel params -> launch. One portable kernel family serves
// every card; any alignment of an element will do, wide accesses are chosen where the addresses allow them.
#include "convert/params.h"

#include <cstring>

#include "host/gpu_common.h"

namespace flare::gpu {
namespace {

// Enters the device and runs `body(info)` if a portable kernel is allowed.
template <typename Params, typename Body>
int32_t portable(const Params& p, const char* operation, Body body) {
    return on_device(p, [&](const DeviceInfo& info) -> int32_t {
        if (p.kernel == FLARE_KERNEL_SM90) {
            return fail(FLARE_UNSUPPORTED_KERNEL,
                        "kernel: SM90 asked for, but %s has one kernel for all cards; use kernel = 0", operation);
        }
        return body(info);
    });
}

template <typename Params>
int32_t portable_name(const Params& p, const char* operation, const char* kernel, char* name, uint64_t capacity) {
    return portable(p, operation, [&](const DeviceInfo&) { return copy_name(kernel, name, capacity); });
}

convert::AppendParams translate(const flare_cache_append_params& p) {
    convert::AppendParams a{};
    const bool latent = p.layout == FLARE_CACHE_LATENT;
    a.k = p.k;
    a.v = p.head_dim_v > 0 ? p.v : nullptr;
    a.k_cache = p.k_cache;
    a.v_cache = p.v_cache;
    a.slots = p.slots;
    a.k_descale = p.k_descale;
    a.v_descale = p.v_descale;
    a.rotary_cos = p.rotary_cos;
    a.rotary_sin = p.rotary_sin;
    a.positions = p.positions;
    a.k_stride_t = p.k_stride_t;
    a.k_stride_h = latent ? 0 : p.k_stride_h;
    a.v_stride_t = p.v_stride_t;
    a.v_stride_h = latent ? 0 : p.v_stride_h;
    a.k_cache_stride_b = p.k_cache_stride_b;
    a.k_cache_stride_s = p.k_cache_stride_s;
    a.k_cache_stride_h = latent ? 0 : p.k_cache_stride_h;
    a.v_cache_stride_b = p.v_cache_stride_b;
    a.v_cache_stride_s = p.v_cache_stride_s;
    a.v_cache_stride_h = p.v_cache_stride_h;
    a.num_tokens = p.num_tokens;
    a.page_size = p.page_size;
    a.heads = static_cast<int32_t>(p.heads);
    a.dim_k = static_cast<int32_t>(p.head_dim_k);
    a.dim_v = static_cast<int32_t>(p.head_dim_v);
    a.rotary_dim = static_cast<int32_t>(p.rotary_dim);
    a.rotary_interleaved = p.rotary_interleaved;
    a.rotates_v = latent ? 1 : 0;
    a.dtype = p.dtype;
    a.cache_dtype = p.cache_dtype;
    a.index64 = p.index_dtype == FLARE_INT64 ? 1 : 0;
    return a;
}

int32_t check_append(const flare_cache_append_params& p) {
    return fits_int32({p.heads, p.head_dim_k, p.head_dim_v, p.rotary_dim})
               ? FLARE_OK
               : fail(FLARE_UNSUPPORTED_SHAPE,
                      "cache_append: heads, head_dim_k, head_dim_v or rotary_dim is over 2^31");
}

}  // namespace

int32_t cast(const flare_cast_params& p) {
    return portable(p, "cast", [&](const DeviceInfo& info) {
        const convert::CastParams c{p.src,       p.dst,   p.src_dtype,
                                    p.dst_dtype, p.scale, make_walk(p.rank, p.shape, p.src_stride, p.dst_stride)};
        return check_cuda(
            static_cast<cudaError_t>(convert::launch_cast(c, info.sm_count, static_cast<cudaStream_t>(p.stream))),
            "cast");
    });
}

int32_t cast_kernel_name(const flare_cast_params& p, char* name, uint64_t capacity) {
    return portable_name(p, "cast", "cast_sm80", name, capacity);
}

int32_t fill(const flare_fill_params& p) {
    return portable(p, "fill", [&](const DeviceInfo& info) {
        unsigned char element[8];
        unsigned char repeated[8];
        const int64_t bytes = encode_element(p.value, p.dtype, element);
        for (int64_t i = 0; i < 8; ++i) {
            repeated[i] = element[i % bytes];
        }
        convert::FillParams f{p.dst, bytes, 0, make_walk(p.rank, p.shape, p.dst_stride, p.dst_stride)};
        std::memcpy(&f.pattern, repeated, sizeof(f.pattern));
        return check_cuda(
            static_cast<cudaError_t>(convert::launch_fill(f, info.sm_count, static_cast<cudaStream_t>(p.stream))),
            "fill");
    });
}

int32_t fill_kernel_name(const flare_fill_params& p, char* name, uint64_t capacity) {
    return portable_name(p, "fill", "fill_sm80", name, capacity);
}

int32_t cache_append(const flare_cache_append_params& p) {
    return portable(p, "cache_append", [&](const DeviceInfo&) -> int32_t {
        if (const int32_t status = check_append(p)) {
            return status;
        }
        return check_cuda(
            static_cast<cudaError_t>(convert::launch_cache_append(translate(p), static_cast<cudaStream_t>(p.stream))),
            "cache_append");
    });
}

int32_t cache_append_kernel_name(const flare_cache_append_params& p, char* name, uint64_t capacity) {
    return portable_name(p, "cache_append",
                         p.cache_dtype == FLARE_UINT8 ? "cache_append_sm80_latent656" : "cache_append_sm80", name,
                         capacity);
}

}  // namespace flare::gpu
