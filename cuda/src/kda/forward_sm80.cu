// KDA forward on any CUDA device, chunked: prepare, then recurrence. Design and measurements: docs/kernels/kda.md.
#include "kda/prepare_sm80.cuh"
#include "kda/recurrence_sm80.cuh"

namespace flare::kda {

namespace {

bool wide_rows(const Strides& s) {
    return s.batch % 8 == 0 && s.token % 8 == 0 && s.head % 8 == 0;
}

int64_t columns_of(int warps) {
    return int64_t{warps} * sm80::kWarpColumns;
}

// Warps of a recurrence block, each with 16 value columns: as many as share an operand block, but half of that where it
// brings more SMs to work.
int recurrence_warps(const KdaParams& p, int32_t sm_count) {
    const int half = sm80::kMaxWarps / 2;
    const int64_t states = p.num_sequences * p.heads_v;
    const int64_t half_blocks = states * ((p.head_dim_v + columns_of(half) - 1) / columns_of(half));
    return p.head_dim_v <= columns_of(half) || half_blocks <= sm_count ? half : sm80::kMaxWarps;
}

template <typename T, int kK>
int32_t launch_prepare_sm80(const KdaParams& p, uint8_t* workspace, cudaStream_t stream) {
    // The gate's bound lets one product of the whole 16 x 16 block do; two kernels for K = 64 would not pay.
    const bool anchor_free = kK == 128 && p.gate == Gate::kBounded && p.lower_bound >= kAnchorFreeBound;
    const auto kernel =
        anchor_free ? sm80::kda_prepare_sm80_kernel<T, kK, kK == 128> : sm80::kda_prepare_sm80_kernel<T, kK, false>;
    constexpr size_t kBytes = sizeof(sm80::PrepareShared<kK>);
    const cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kBytes);
    if (error != cudaSuccess) {
        return error;
    }
    const int64_t tasks = num_slots(p) * p.heads_v;
    const int64_t blocks = (tasks + sm80::kPreparePairs - 1) / sm80::kPreparePairs;
    kernel<<<static_cast<unsigned>(blocks), sm80::kPrepareThreads, kBytes, stream>>>(p, workspace);
    return cudaPeekAtLastError();
}

template <typename T, int kK>
int32_t launch_recurrence_sm80(const KdaParams& p, int32_t sm_count, const uint8_t* workspace, cudaStream_t stream) {
    const auto kernel = sm80::kda_recurrence_sm80_kernel<T, kK>;
    int device = 0;
    int most = 0;
    cudaError_t error = cudaGetDevice(&device);
    if (error == cudaSuccess) {
        error = cudaDeviceGetAttribute(&most, cudaDevAttrMaxSharedMemoryPerBlockOptin, device);
    }
    sm80::RecurrenceShared<T, kK> shared{recurrence_warps(p, sm_count)};
    while (static_cast<int>(shared.bytes(2)) > most) {  // fp16 and K = 128 where a block gets 99 KiB
        shared.warps /= 2;
    }
    const int stages = static_cast<int>(shared.bytes(3)) <= most ? 3 : 2;
    const uint32_t bytes = shared.bytes(stages);
    if (error == cudaSuccess) {
        error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(bytes));
    }
    if (error != cudaSuccess) {
        return error;
    }
    const int per_state = static_cast<int>((p.head_dim_v + columns_of(shared.warps) - 1) / columns_of(shared.warps));
    const unsigned blocks = static_cast<unsigned>(p.num_sequences * p.heads_v * per_state);
    kernel<<<blocks, 32 * shared.warps, bytes, stream>>>(p, workspace, per_state, stages);
    return cudaPeekAtLastError();
}

template <typename T, int kK>
int32_t launch_forward_sm80(const KdaParams& p, int32_t sm_count, uint8_t* workspace, cudaStream_t stream) {
    if (p.seqlen > 0) {
        if (const int32_t error = launch_prepare_sm80<T, kK>(p, workspace, stream)) {
            return error;
        }
    }
    return launch_recurrence_sm80<T, kK>(p, sm_count, workspace, stream);
}

template <typename T>
int32_t launch_prepare_sm80(const KdaParams& p, uint8_t* workspace, cudaStream_t stream) {
    return p.head_dim_k <= 64 ? launch_prepare_sm80<T, 64>(p, workspace, stream)
                              : launch_prepare_sm80<T, 128>(p, workspace, stream);
}

template <typename T>
int32_t launch_forward_sm80(const KdaParams& p, int32_t sm_count, uint8_t* workspace, cudaStream_t stream) {
    return p.head_dim_k <= 64 ? launch_forward_sm80<T, 64>(p, sm_count, workspace, stream)
                              : launch_forward_sm80<T, 128>(p, sm_count, workspace, stream);
}

template <typename T>
size_t chunk_bytes(const KdaParams& p) {
    return p.head_dim_k <= 64 ? sm80::ChunkLayout<T, 64>::kWorkspaceBytes : sm80::ChunkLayout<T, 128>::kWorkspaceBytes;
}

}  // namespace

const char* kda_forward_sm80_refusal(const KdaParams& p) {
    if (p.head_dim_k > 128 || p.head_dim_k % 8 != 0 || p.head_dim_v % 8 != 0) {
        return "head_dim_k must be a multiple of 8 up to 128, head_dim_v a multiple of 8";
    }
    if (p.beta_per_channel != 0) {
        return "beta_per_channel";
    }
    if (p.dtype == DType::kFp32) {
        return "dtype must be fp16 or bf16";
    }
    if ((p.gate_dtype != p.dtype && p.gate_dtype != DType::kFp32) ||
        (p.beta_dtype != p.dtype && p.beta_dtype != DType::kFp32)) {
        return "gate_dtype and beta_dtype must be fp32 or the dtype of q";
    }
    if (!wide_rows(p.q_stride) || !wide_rows(p.k_stride) || !wide_rows(p.v_stride) || !wide_rows(p.g_stride) ||
        !wide_rows(p.out_stride)) {
        return "strides of q, k, v, g and out must be multiples of 8";
    }
    constexpr int64_t kMaxStride = INT32_MAX / kChunk - 128;  // offsets inside a chunk are 32-bit
    if (p.q_stride.token > kMaxStride || p.k_stride.token > kMaxStride || p.g_stride.token > kMaxStride) {
        return "token strides of q, k and g must be below 2^26";
    }
    const int64_t blocks = (p.head_dim_v + 63) / 64;
    if (p.num_sequences * p.heads_v > INT32_MAX / blocks || num_slots(p) * p.heads_v > INT32_MAX ||
        p.seqlen > INT32_MAX - 64) {
        return "more blocks than a grid holds";
    }
    return nullptr;
}

const char* kda_forward_sm80_name(const KdaParams& p) {
    return p.head_dim_k <= 64 ? "kda_forward_sm80_chunked_k64" : "kda_forward_sm80_chunked_k128";
}

size_t kda_forward_sm80_workspace(const KdaParams& p) {
    const size_t bytes = p.dtype == DType::kFp16 ? chunk_bytes<__half>(p) : chunk_bytes<__nv_bfloat16>(p);
    return p.seqlen > 0 ? static_cast<size_t>(num_slots(p)) * static_cast<size_t>(p.heads_v) * bytes : 0;
}

int32_t launch_kda_prepare_sm80(const KdaParams& p, void* workspace, cudaStream_t stream) {
    uint8_t* const blocks = static_cast<uint8_t*>(workspace);
    return p.dtype == DType::kBf16 ? launch_prepare_sm80<__nv_bfloat16>(p, blocks, stream)
                                   : launch_prepare_sm80<__half>(p, blocks, stream);
}

int32_t launch_kda_forward_sm80(const KdaParams& p, int32_t sm_count, void* workspace, cudaStream_t stream) {
    if (p.num_sequences == 0) {
        return cudaSuccess;
    }
    uint8_t* const blocks = static_cast<uint8_t*>(workspace);
    return p.dtype == DType::kBf16 ? launch_forward_sm80<__nv_bfloat16>(p, sm_count, blocks, stream)
                                   : launch_forward_sm80<__half>(p, sm_count, blocks, stream);
}

}  // namespace flare::kda
