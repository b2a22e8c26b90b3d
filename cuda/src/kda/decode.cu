// KDA decode on any CUDA device: one or a few tokens per sequence. Design and measurements: docs/kernels/kda.md.
#include "kda/decode.cuh"

namespace flare::kda {

namespace {

template <typename T, StateLayout kLayout>
void launch(const KdaParams& p, unsigned blocks, cudaStream_t stream) {
    if (p.final_dtype == DType::kBf16) {
        kda_decode_kernel<T, kLayout, true><<<blocks, kDecodeThreads, 0, stream>>>(p);
    } else {
        kda_decode_kernel<T, kLayout, false><<<blocks, kDecodeThreads, 0, stream>>>(p);
    }
}

template <typename T>
void launch(const KdaParams& p, unsigned blocks, cudaStream_t stream) {
    if (p.state_layout == StateLayout::kKV) {
        launch<T, StateLayout::kKV>(p, blocks, stream);
    } else {
        launch<T, StateLayout::kVK>(p, blocks, stream);
    }
}

}  // namespace

const char* kda_decode_refusal(const KdaParams& p) {
    if (p.head_dim_k != kDecodeDim || p.head_dim_v != kDecodeDim) {
        return "head_dim_k and head_dim_v must be 128";
    }
    if (p.dtype == DType::kFp32) {
        return "dtype must be fp16 or bf16";
    }
    if ((p.gate_dtype != p.dtype && p.gate_dtype != DType::kFp32) ||
        (p.beta_dtype != p.dtype && p.beta_dtype != DType::kFp32)) {
        return "gate_dtype and beta_dtype must be fp32 or the dtype of q";
    }
    if (p.initial_stride_n % 8 != 0 || p.initial_stride_h % 8 != 0 || p.final_stride_n % 8 != 0 ||
        p.final_stride_h % 8 != 0) {
        return "strides of the state must be multiples of 8";
    }
    if (p.num_sequences * p.heads_v * kDecodeSplits > 0x7fffffff) {
        return "more blocks than a grid holds";
    }
    return nullptr;
}

const char* kda_decode_name(const KdaParams& p) {
    return p.final_dtype == DType::kBf16 ? "kda_decode_bf16_state" : "kda_decode_fp32_state";
}

int32_t launch_kda_decode(const KdaParams& p, cudaStream_t stream) {
    const unsigned blocks = static_cast<unsigned>(p.num_sequences * p.heads_v * kDecodeSplits);
    if (blocks == 0) {
        return cudaSuccess;
    }
    if (p.dtype == DType::kBf16) {
        launch<__nv_bfloat16>(p, blocks, stream);
    } else {
        launch<__half>(p, blocks, stream);
    }
    return cudaPeekAtLastError();
}

}  // namespace flare::kda
