// KDA forward on Hopper: fused, split, in segments, or prepare and recurrence as two kernels. Design and measurements: docs/kernels/kda.md.
#include "kda/params.h"
#include "kda/recurrence_sm90.cuh"
#include "kda/segments_sm90.h"
#include "kda/split_sm90.cuh"
#include "tile/tensor_map.h"

#include <algorithm>

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

// The fused kernels, fused or split: everything in bf16.
bool runs_fused(const KdaParams& p) {
    const auto forwards = [](const Strides& s) { return s.batch >= 0 && s.token >= 0 && s.head >= 0; };  // as TMA walks
    return forwards(p.q_stride) && forwards(p.k_stride) && forwards(p.v_stride) && forwards(p.g_stride) &&
           p.dtype == DType::kBf16 && p.gate_dtype == DType::kBf16;
}

fused::Anchors choose_anchors(const KdaParams& p) {
    return p.gate == Gate::kBounded && p.lower_bound >= fused::kBoundedFrom ? fused::Anchors::kOne : fused::Anchors::kPerHalf;
}

// How a call that runs fused is laid out over the SMs of an H100 or H200. Estimates from measured times of a chunk
// (docs/kernels/kda.md).
struct Layout {
    int groups;   // consumer warpgroups of a recurrence block, 64 value columns each; 0: everything in one block
    bool hosted;  // recurrence blocks have a prepare team, too
    int64_t time;  // ns, estimated
};

// ns a chunk: of a prepare block, of a hosted team, of a fused block; and of a recurrence.
struct ChunkTimes {
    int64_t prepare, hosted, fused;
};
ChunkTimes chunk_times(const KdaParams& p) {
    return choose_anchors(p) == fused::Anchors::kOne ? ChunkTimes{1450, 5400, 2570} : ChunkTimes{1850, 5600, 3000};
}
constexpr int64_t recurrence_step(int groups, bool hosted) {
    return groups == 1 ? 680 : hosted ? 1900 : 1170;
}

// As many prepare blocks as the recurrences follow: what is made far ahead leaves L2 before they come to it. For recurrences on
// 64 columns, with one anchor a chunk, a line through the best of 16, 24 and 32 units (docs/kernels/kda.md).
int enough_prepare(const KdaParams& p, int units, int groups, bool hosted) {
    const int enough = groups == 1 && choose_anchors(p) == fused::Anchors::kOne
                           ? 14 + units * 3 / 2
                           : static_cast<int>(units * chunk_times(p).prepare / recurrence_step(groups, hosted)) + 1;
    return std::max(20, enough);
}

Layout choose_layout(const KdaParams& p) {
    constexpr int64_t kSms = 132;
    constexpr int64_t kSplitStart = 16000;  // ns, rather too much: the flags; the first chunks' way through memory
    const ChunkTimes ns = chunk_times(p);
    const int64_t units = p.num_sequences * p.heads_v;
    const int64_t chunks = mean_tokens(p) / kChunk;
    Layout best{0, false, (units + kSms - 1) / kSms * ns.fused * chunks};
    if (units == 0) {
        return best;
    }
    const auto consider = [&](int groups, bool hosted) {
        const int64_t blocks = units * (64 * groups < p.head_dim_v ? 2 : 1);
        const int64_t prepare = kSms - blocks;
        if (64 * groups > p.head_dim_v || prepare < 8) {
            return;
        }
        // Chunks a ms of all teams.
        const int64_t rate = prepare * 1000000 / ns.prepare + (hosted ? blocks * 1000000 / ns.hosted : 0);
        const int64_t time = std::max(recurrence_step(groups, hosted), units * 1000000 / rate) * chunks + kSplitStart;
        if (time < best.time) {
            best = {groups, hosted, time};
        }
    };
    consider(1, false);
    consider(2, false);
    consider(2, true);
    return best;
}

bool splits_blocks(const KdaParams& p) {
    return choose_layout(p).groups > 0;
}

SegmentPlan choose_segments(const KdaParams& p, const Layout& otherwise) {
    return plan_segments(p, {27000, chunk_times(p).prepare + 1200, 1010}, otherwise.time);
}

// The fused form deals out sequences of different lengths where a block gets more than one, by a counter in the workspace.
bool deals_units(const KdaParams& p) {
    constexpr int64_t kSms = 132;
    return p.cu_seqlens != nullptr && p.num_sequences > 1 && p.num_sequences <= fused::kMaxSorted &&
           p.num_sequences * p.heads_v > kSms;
}

size_t fused_workspace(const KdaParams& p) {
    return deals_units(p) ? sizeof(uint32_t) : 0;
}

int64_t num_blocks(const KdaParams& p) {
    return num_slots(p) * p.heads_v;
}

cudaError_t count_sms(int* sms) {
    int device = 0;
    const cudaError_t error = cudaGetDevice(&device);
    return error != cudaSuccess ? error : cudaDeviceGetAttribute(sms, cudaDevAttrMultiProcessorCount, device);
}

template <typename Kernel>
cudaError_t allow_shared(Kernel kernel, size_t bytes) {
    return cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(bytes));
}

bool make_map(CUtensorMap* map, const KdaParams& p, const void* base, const Strides& s, int64_t heads, int64_t dim) {
    const bool packed = p.cu_seqlens != nullptr;
    const int64_t dims[4] = {dim, p.seqlen, heads, packed ? 1 : p.num_sequences};
    const int64_t strides[3] = {2 * s.token, 2 * s.head, 2 * s.batch};
    const uint32_t box[4] = {64, kChunk, 1, 1};
    // Without tokens no load is issued: the map may stay empty.
    return p.seqlen == 0 || tile::make_tensor_map(map, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 4, base, dims, strides, box,
                                                  tile::Swizzle::k128);
}

bool make_args(fused::Args* args, const KdaParams& p) {
    args->p = p;
    return make_map(&args->q, p, p.q, p.q_stride, p.heads_qk, p.head_dim_k) &&
           make_map(&args->k, p, p.k, p.k_stride, p.heads_qk, p.head_dim_k) &&
           make_map(&args->v, p, p.v, p.v_stride, p.heads_v, p.head_dim_v) &&
           make_map(&args->g, p, p.g, p.g_stride, p.heads_v, p.head_dim_k);
}

template <typename T, fused::Anchors kAnchors>
int32_t launch_fused(const KdaParams& p, uint8_t* workspace, cudaStream_t stream) {
    const auto kernel = fused::kda_fused_sm90_kernel<T, kAnchors>;
    int sms = 0;
    cudaError_t error = count_sms(&sms);
    if (error == cudaSuccess) {
        error = allow_shared(kernel, fused::kFusedSharedBytes);
    }
    uint32_t* const counter = deals_units(p) ? reinterpret_cast<uint32_t*>(workspace) : nullptr;
    if (error == cudaSuccess && counter != nullptr) {
        error = cudaMemsetAsync(counter, 0, sizeof(uint32_t), stream);
    }
    if (error != cudaSuccess) {
        return error;
    }
    fused::Args args{};
    if (!make_args(&args, p)) {
        return cudaErrorInvalidValue;
    }
    const int64_t units = p.num_sequences * p.heads_v;
    kernel<<<static_cast<unsigned>(units < sms ? units : sms), fused::kThreads, fused::kFusedSharedBytes, stream>>>(args,
                                                                                                                       counter);
    return cudaPeekAtLastError();
}

size_t split_workspace(const KdaParams& p) {
    return static_cast<size_t>(num_blocks(p)) * (fused::kOperandBytes + sizeof(uint32_t)) + sizeof(uint32_t);
}

template <typename T, int kHosted, fused::Anchors kAnchors>
int32_t launch_split(const KdaParams& p, int groups, uint8_t* workspace, cudaStream_t stream) {
    const auto kernel = fused::kda_split_sm90_kernel<T, kHosted, kAnchors>;
    constexpr size_t kShared = fused::kSplitSharedBytes<kHosted>;
    uint32_t* const flags = reinterpret_cast<uint32_t*>(workspace + num_blocks(p) * fused::kOperandBytes);
    int sms = 0;
    cudaError_t error = count_sms(&sms);
    if (error == cudaSuccess) {
        error = allow_shared(kernel, kShared);
    }
    if (error == cudaSuccess) {
        error = cudaMemsetAsync(flags, 0, static_cast<size_t>(num_blocks(p) + 1) * sizeof(uint32_t), stream);
    }
    if (error != cudaSuccess) {
        return error;
    }
    fused::Args args{};
    if (!make_args(&args, p)) {
        return cudaErrorInvalidValue;
    }
    const int units = static_cast<int>(p.num_sequences * p.heads_v);
    const int recurrences = units * (64 * groups < p.head_dim_v ? 2 : 1);
    const int prepare = std::max(8, std::min(sms - recurrences, enough_prepare(p, units, groups, kHosted > 0)));
    kernel<<<static_cast<unsigned>(prepare + recurrences), fused::kThreads, kShared, stream>>>(
        args, workspace, flags, flags + num_blocks(p), static_cast<uint32_t>(prepare), groups);
    return cudaPeekAtLastError();
}

template <typename T, fused::Anchors kAnchors>
int32_t launch_chosen(const KdaParams& p, uint8_t* workspace, cudaStream_t stream) {
    const Layout layout = choose_layout(p);
    const SegmentPlan segments = choose_segments(p, layout);
    if (segments.tokens > 0) {
        fused::Args args{};
        return make_args(&args, p) ? launch_kda_segments_sm90(args, kAnchors == fused::Anchors::kOne, segments, workspace, stream)
                                   : cudaErrorInvalidValue;
    }
    return layout.groups == 0 ? launch_fused<T, kAnchors>(p, workspace, stream)
           : layout.hosted    ? launch_split<T, 1, kAnchors>(p, layout.groups, workspace, stream)
                              : launch_split<T, 0, kAnchors>(p, layout.groups, workspace, stream);
}

template <typename T, int kGroups>
int32_t launch_recurrence(const KdaParams& p, const uint8_t* workspace, cudaStream_t stream) {
    using Config = RecurrenceConfig<T, kGroups, false>;
    constexpr uint32_t kBytes = recurrence_shared_bytes<T, kGroups>();
    const auto kernel = kda_recurrence_sm90_kernel<T, kGroups>;
    const cudaError_t error =
        cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(kBytes));
    if (error != cudaSuccess) {
        return error;
    }
    const int64_t blocks = p.num_sequences * p.heads_v * (kDim / Config::kColumns);
    kernel<<<static_cast<unsigned>(blocks), Config::kThreads, kBytes, stream>>>(p, workspace);
    return cudaPeekAtLastError();
}

template <typename T>
int32_t launch(const KdaParams& p, uint8_t* workspace, cudaStream_t stream) {
    if (p.seqlen > 0) {
        if (const int32_t error = launch_kda_prepare_sm80(p, workspace, stream)) {
            return error;
        }
    }
    return split_values(p) ? launch_recurrence<T, 1>(p, workspace, stream)
                           : launch_recurrence<T, 2>(p, workspace, stream);
}

}  // namespace

const char* kda_forward_sm90_refusal(const KdaParams& p) {
    const bool small = p.head_dim_k == 64 && p.head_dim_v == 64 && runs_fused(p);
    if (!small && (p.head_dim_k != kDim || p.head_dim_v != kDim)) {
        return "head_dim_k and head_dim_v must be 128 (or both 64 in bf16)";
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
    if (runs_fused(p)) {
        return choose_segments(p, choose_layout(p)).tokens > 0 ? "kda_forward_sm90_segments"
               : splits_blocks(p)            ? "kda_forward_sm90_split"
                                             : "kda_forward_sm90_fused";
    }
    return split_values(p) ? "kda_forward_sm90_v64" : "kda_forward_sm90_v128";
}

size_t kda_forward_sm90_workspace(const KdaParams& p) {
    if (runs_fused(p)) {
        const SegmentPlan segments = choose_segments(p, choose_layout(p));
        return segments.tokens > 0 ? kda_segments_sm90_workspace(p, segments)
               : splits_blocks(p)  ? split_workspace(p)
                                   : fused_workspace(p);
    }
    return kda_forward_sm80_workspace(p);
}

int32_t launch_kda_forward_sm90(const KdaParams& p, void* workspace, size_t bytes, cudaStream_t stream) {
    if (bytes < kda_forward_sm90_workspace(p)) {
        return cudaErrorInvalidValue;
    }
    if (p.num_sequences == 0) {
        return cudaSuccess;
    }
    uint8_t* const blocks = static_cast<uint8_t*>(workspace);
    if (runs_fused(p)) {
        return choose_anchors(p) == fused::Anchors::kOne ? launch_chosen<__nv_bfloat16, fused::Anchors::kOne>(p, blocks, stream)
                                                         : launch_chosen<__nv_bfloat16, fused::Anchors::kPerHalf>(p, blocks, stream);
    }
    return p.dtype == DType::kBf16 ? launch<__nv_bfloat16>(p, blocks, stream) : launch<__half>(p, blocks, stream);
}

}  // namespace flare::kda
