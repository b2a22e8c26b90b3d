// Host: CUtensorMap of a [B, S, H, D] tensor with arbitrary strides. The driver is reached through the runtime, so the
// library needs no libcuda to load. Maps hold pointer, shape and strides: build one per call (0.2 us), never cache by
// part of them.
#pragma once

#include <cuda.h>
#include <cudaTypedefs.h>
#include <cuda_runtime.h>

#include <cstdint>

#include "smem_layout.cuh"

namespace flare::tile {

inline PFN_cuTensorMapEncodeTiled_v12000 tensor_map_encode() {
    static const PFN_cuTensorMapEncodeTiled_v12000 encode = [] {
        void* entry = nullptr;
        cudaDriverEntryPointQueryResult found = cudaDriverEntryPointSymbolNotFound;
        const cudaError_t rc =
            cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &entry, 12000, cudaEnableDefault, &found);
        const bool usable = rc == cudaSuccess && found == cudaDriverEntryPointSuccess;
        return reinterpret_cast<PFN_cuTensorMapEncodeTiled_v12000>(usable ? entry : nullptr);
    }();
    return encode;
}

constexpr CUtensorMapSwizzle tensor_map_swizzle(Swizzle s) {
    return s == Swizzle::k128  ? CU_TENSOR_MAP_SWIZZLE_128B
           : s == Swizzle::k64 ? CU_TENSOR_MAP_SWIZZLE_64B
           : s == Swizzle::k32 ? CU_TENSOR_MAP_SWIZZLE_32B
                               : CU_TENSOR_MAP_SWIZZLE_NONE;
}

// Rank-n map, dims innermost first; strides in bytes, of dims 1..rank-1. Strides of size-1 dims may hold anything.
// Returns false when TMA cannot take it (alignment, stride not a multiple of 16, empty dims) or without a driver.
// Promotion: with 256 bytes L2 fetches the aligned 256 bytes around what a box reads. Where the pitch of the rows is no
// multiple of that, parts of the neighbouring rows come too early.
inline bool make_tensor_map(CUtensorMap* map, CUtensorMapDataType type, int rank, const void* base, const int64_t* dims,
                            const int64_t* strides_bytes, const uint32_t* box, Swizzle swizzle,
                            CUtensorMapL2promotion promotion = CU_TENSOR_MAP_L2_PROMOTION_L2_256B) {
    const PFN_cuTensorMapEncodeTiled_v12000 encode = tensor_map_encode();
    if (encode == nullptr || rank < 1 || rank > 5 || reinterpret_cast<uintptr_t>(base) % 16 != 0) {
        return false;
    }
    cuuint64_t global_dims[5];
    cuuint64_t global_strides[5];
    cuuint32_t element_strides[5];
    for (int i = 0; i < rank; ++i) {
        if (dims[i] < 1) {
            return false;
        }
        global_dims[i] = static_cast<cuuint64_t>(dims[i]);
        element_strides[i] = 1;
        if (i > 0) {
            // The driver checks the stride even where a single element makes it meaningless.
            const int64_t stride = dims[i] == 1 ? 16 : strides_bytes[i - 1];
            if (stride < 0 || stride % 16 != 0) {
                return false;
            }
            global_strides[i - 1] = static_cast<cuuint64_t>(stride);
        }
    }
    return encode(map, type, static_cast<cuuint32_t>(rank), const_cast<void*>(base), global_dims, global_strides, box,
                  element_strides, CU_TENSOR_MAP_INTERLEAVE_NONE, tensor_map_swizzle(swizzle),
                  promotion, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE) == CUDA_SUCCESS;
}

}  // namespace flare::tile
