// KDA forward on Hopper: prepare, then recurrence. Design and measurements: docs/kernels/kda.md.
#include "kda/params.h"
#include "kda/prepare_sm90.cuh"
#include "kda/recurrence_sm90.cuh"

namespace flare::kda {

namespace {

bool multiple_of_8(const Strides& s) {
    return s.batch % 8 == 0 && s.token % 8 == 0 && s.head % 8 == 0;
}

// Values split over two blocks of one consumer warpgroup, or one block of two. A chunk takes about 0.74 us in the first
// and 1.19 us in the second (docs/kernels/kda.md), one block an SM, so what counts is waves over the SMs of an H100 or
// H200.
bool split_values(const KdaParams& p) {
    constexpr int64_t kSms = 132;
    const int64_t units = p.num_sequences * p.heads_v;
    return (2 * units + kSms - 1) / kSms * 74 <= (units + kSms - 1) / kSms * 119;
}

bool anchor_free_gate(const KdaParams& p) {
    return p.gate == Gate::kBounded && p.lower_bound >= kAnchorFreeBound;
}

template <typename T, int kGroups>
int32_t launch_recurrence(const KdaParams& p, const uint8_t* workspace, cudaStream_t stream) {
    using Config = RecurrenceConfig<kGroups>;
    const auto kernel = kda_recurrence_sm90_kernel<T, kGroups>;
    const cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                                   static_cast<int>(Config::kSharedBytes));
    if (error != cudaSuccess) {
        return error;
    }
    const int64_t blocks = p.num_sequences * p.heads_v * (kDim / Config::kColumns);
    kernel<<<static_cast<unsigned>(blocks), Config::kThreads, Config::kSharedBytes, stream>>>(p, workspace);
    return cudaPeekAtLastError();
}

template <typename T>
int32_t launch_prepare(const KdaParams& p, uint8_t* workspace, cudaStream_t stream) {
    const auto kernel = anchor_free_gate(p) ? kda_prepare_sm90_kernel<T, true> : kda_prepare_sm90_kernel<T, false>;
    const cudaError_t error =
        cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, sizeof(PrepareShared));
    if (error != cudaSuccess) {
        return error;
    }
    const int64_t tasks = num_slots(p) * p.heads_v;
    kernel<<<static_cast<unsigned>((tasks + kPreparePairs - 1) / kPreparePairs), kPrepareThreads, sizeof(PrepareShared),
             stream>>>(p, workspace);
    return cudaPeekAtLastError();
}

template <typename T>
int32_t launch(const KdaParams& p, uint8_t* workspace, cudaStream_t stream) {
    if (num_slots(p) > 0 && p.seqlen > 0) {
        const int32_t error = launch_prepare<T>(p, workspace, stream);
        if (error != cudaSuccess) {
            return error;
        }
    }
    return split_values(p) ? launch_recurrence<T, 1>(p, workspace, stream)
                           : launch_recurrence<T, 2>(p, workspace, stream);
}

}  // namespace

const char* kda_forward_sm90_refusal(const KdaParams& p) {
    if (p.head_dim_k != kDim || p.head_dim_v != kDim) {
        return "head_dim_k and head_dim_v must be 128";
    }
    if (p.dtype == DType::kFp32) {
        return "dtype must be fp16 or bf16";
    }
    if ((p.gate_dtype != p.dtype && p.gate_dtype != DType::kFp32) ||
        (p.beta_dtype != p.dtype && p.beta_dtype != DType::kFp32)) {
        return "gate_dtype and beta_dtype must be fp32 or the dtype of q";
    }
    if (!multiple_of_8(p.q_stride) || !multiple_of_8(p.k_stride) || !multiple_of_8(p.v_stride) ||
        !multiple_of_8(p.g_stride) || !multiple_of_8(p.out_stride)) {
        return "strides of q, k, v, g and out must be multiples of 8";
    }
    constexpr int64_t kMaxStride = INT32_MAX / kChunk - kDim;  // offsets inside a chunk are 32-bit
    if (p.q_stride.token > kMaxStride || p.k_stride.token > kMaxStride || p.g_stride.token > kMaxStride) {
        return "token strides of q, k and g must be below 2^26";
    }
    if (2 * p.num_sequences * p.heads_v > 0x7fffffff || num_slots(p) * p.heads_v > 0x7fffffff) {
        return "more blocks than a grid holds";
    }
    return nullptr;
}

const char* kda_forward_sm90_name(const KdaParams& p) {
    return split_values(p) ? "kda_forward_sm90_v64" : "kda_forward_sm90_v128";
}

size_t kda_forward_sm90_workspace(const KdaParams& p) {
    return p.seqlen > 0 ? static_cast<size_t>(num_slots(p)) * static_cast<size_t>(p.heads_v) * kBlockBytes : 0;
}

int32_t launch_kda_forward_sm90(const KdaParams& p, void* workspace, size_t bytes, cudaStream_t stream) {
    if (bytes < kda_forward_sm90_workspace(p)) {
        return cudaErrorInvalidValue;
    }
    if (p.num_sequences == 0) {
        return cudaSuccess;
    }
    uint8_t* const blocks = static_cast<uint8_t*>(workspace);
    return p.dtype == DType::kBf16 ? launch<__nv_bfloat16>(p, blocks, stream) : launch<__half>(p, blocks, stream);
}

}  // namespace flare::kda
