// c[row, h] = a[row, h] B[h]: the products with W_uk and W_uv around absorbed attention.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "params.h"

namespace flare::mla {

// Rows are tokens: row = b * seqlen_q + s, or packed by cu_seqlens_q, where only the rows it covers are written. 16-byte
// strides; k and n multiples of 8.
struct HeadProduct {
    const void* a;  // [B, Sq, H, k] of dtype; a_stride_b is unused when packed
    int64_t a_stride_b, a_stride_s, a_stride_h;
    const void* b;  // [H, k, n], or [H, n, k] with b_is_nk; of dtype
    int64_t b_stride_h, b_stride_r;
    bool b_is_nk;
    void* c;  // [B, Sq, H, n]
    int64_t c_stride_b, c_stride_s, c_stride_h;
    DType dtype;
    DType c_dtype;
    int32_t heads;
    int32_t k;
    int32_t n;
    int32_t batch;
    int32_t seqlen_q;
    int32_t index_is_64;
    const void* cu_seqlens_q;
    const void* seqused_q;
    int64_t total_q;
};

int32_t launch_head_product_sm80(const HeadProduct& product, cudaStream_t stream);

}  // namespace flare::mla
