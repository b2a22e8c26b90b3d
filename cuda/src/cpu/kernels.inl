// The kernels of one instruction set: included by kernels_generic.cpp, kernels_avx2.cpp and kernels_avx512.cpp.
#include "kda_kernel.h"
#include "kernels.h"
#include "mla_kernel.h"

namespace flare::cpu::FLARE_CPU_NAMESPACE {
namespace {

template <int32_t kSrcDtype, int32_t kDstDtype>
void cast_strided(const void* src, int64_t src_stride, void* dst, int64_t dst_stride, int64_t count, float scale) {
    for (int64_t i = 0; i < count; ++i) {
        store_element(dst, kDstDtype, i * dst_stride, load_element(src, kSrcDtype, i * src_stride) * scale);
    }
}

template <int32_t kSrcDtype>
void cast_strided_from(const void* src, int64_t src_stride, void* dst, int32_t dst_dtype, int64_t dst_stride,
                       int64_t count, float scale) {
    switch (dst_dtype) {
        case FLARE_FP32:
            return cast_strided<kSrcDtype, FLARE_FP32>(src, src_stride, dst, dst_stride, count, scale);
        case FLARE_FP16:
            return cast_strided<kSrcDtype, FLARE_FP16>(src, src_stride, dst, dst_stride, count, scale);
        case FLARE_BF16:
            return cast_strided<kSrcDtype, FLARE_BF16>(src, src_stride, dst, dst_stride, count, scale);
        default:
            return cast_strided<kSrcDtype, FLARE_FP8_E4M3>(src, src_stride, dst, dst_stride, count, scale);
    }
}

// Contiguous lines go through fp32 in cache-sized pieces, strided ones element by element.
void cast_line(const void* src, int32_t src_dtype, int64_t src_stride, void* dst, int32_t dst_dtype, int64_t dst_stride,
               int64_t count, float scale) {
    if (src_stride != 1 || dst_stride != 1) {
        switch (src_dtype) {
            case FLARE_FP32:
                return cast_strided_from<FLARE_FP32>(src, src_stride, dst, dst_dtype, dst_stride, count, scale);
            case FLARE_FP16:
                return cast_strided_from<FLARE_FP16>(src, src_stride, dst, dst_dtype, dst_stride, count, scale);
            case FLARE_BF16:
                return cast_strided_from<FLARE_BF16>(src, src_stride, dst, dst_dtype, dst_stride, count, scale);
            default:
                return cast_strided_from<FLARE_FP8_E4M3>(src, src_stride, dst, dst_dtype, dst_stride, count, scale);
        }
    }
    const int64_t src_bytes = element_bytes(src_dtype);
    const int64_t dst_bytes = element_bytes(dst_dtype);
    constexpr int64_t kPiece = 1024;
    float buffer[kPiece];
    for (int64_t first = 0; first < count; first += kPiece) {
        const int64_t n = min64(kPiece, count - first);
        load_row(static_cast<const char*>(src) + first * src_bytes, src_dtype, n, buffer);
        for (int64_t i = 0; i < n; ++i) {
            buffer[i] *= scale;
        }
        store_row(buffer, dst_dtype, n, static_cast<char*>(dst) + first * dst_bytes);
    }
}

void load_row_entry(const void* src, int32_t dtype, int64_t n, float* dst) {
    load_row(src, dtype, n, dst);
}

void store_row_entry(const float* src, int32_t dtype, int64_t n, void* dst) {
    store_row(src, dtype, n, dst);
}

}  // namespace

const Kernels& kernels() {
    static constexpr Kernels table = {
        kPanel,
        attention_scratch,
        attention_item,
        mla_prefill_scratch,
        mla_prefill_item,
        mla_decode_scratch,
        mla_decode_item,
        head_product_scratch,
        head_product_item,
        merge_scratch,
        merge_item,
        kda::kWidth,
        kda::scratch_bytes,
        kda::forward,
        kda::decode,
        cast_line,
        load_row_entry,
        store_row_entry,
    };
    return table;
}

}  // namespace flare::cpu::FLARE_CPU_NAMESPACE
