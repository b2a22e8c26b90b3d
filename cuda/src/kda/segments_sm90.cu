// KDA forward on Hopper, segments of a sequence side by side. Design and measurements: docs/kernels/kda.md.
#include "kda/segments_sm90.h"

#include "kda/segments_sm90.cuh"

namespace flare::kda {

namespace {

constexpr int64_t kState = 128 * 128;  // floats

size_t round_up(size_t bytes) {
    return (bytes + 255) / 256 * 256;
}

int64_t num_blocks(const KdaParams& p) {
    return num_slots(p) * p.heads_v;
}

int64_t num_states(const KdaParams& p, const SegmentPlan& plan) {
    return segment_slots(p, plan.tokens) * p.heads_v;
}

// S_in and M of all segments, behind the operand blocks.
size_t state_bytes(const KdaParams& p, const SegmentPlan& plan) {
    return 2 * static_cast<size_t>(num_states(p, plan) * kState) * sizeof(float);
}

// Operand blocks and flags of the chunks, as in the split form.
size_t split_bytes(const KdaParams& p) {
    return round_up(static_cast<size_t>(num_blocks(p)) * (fused::kOperandBytes + sizeof(uint32_t)) + sizeof(uint32_t));
}

fused::Segments place_segments(const KdaParams& p, const SegmentPlan& plan, uint8_t* workspace, size_t states_at) {
    fused::Segments segments{};
    segments.tokens = plan.tokens;
    segments.blocks = workspace;
    segments.starts = reinterpret_cast<float*>(workspace + states_at);
    segments.maps = segments.starts + num_states(p, plan) * kState;
    return segments;
}

template <typename Kernel>
cudaError_t allow_shared(Kernel kernel, size_t bytes) {
    return cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(bytes));
}

template <int kColumns>
void launch_scan(const KdaParams& p, const fused::Segments& segments, cudaStream_t stream) {
    const unsigned blocks = static_cast<unsigned>(p.num_sequences * p.heads_v * (128 / kColumns));
    fused::kda_scan_segments_sm90_kernel<kColumns>
        <<<blocks, fused::kScanThreads, fused::kScanSharedBytes<kColumns>, stream>>>(p, segments);
}

cudaError_t launch_scan(const KdaParams& p, const fused::Segments& segments, cudaStream_t stream) {
    if (scan_columns(p) == 4) {
        launch_scan<4>(p, segments, stream);
        return cudaPeekAtLastError();
    }
    const cudaError_t error = allow_shared(fused::kda_scan_segments_sm90_kernel<8>, fused::kScanSharedBytes<8>);
    if (error == cudaSuccess) {
        launch_scan<8>(p, segments, stream);
    }
    return error != cudaSuccess ? error : cudaPeekAtLastError();
}

}  // namespace

size_t kda_segments_sm90_workspace(const KdaParams& p, const SegmentPlan& plan) {
    return split_bytes(p) + state_bytes(p, plan);
}

int32_t launch_kda_segments_sm90(const fused::Args& args, bool one_anchor, const SegmentPlan& plan, uint8_t* workspace,
                                 cudaStream_t stream) {
    using fused::kSplitSharedBytes;
    const KdaParams& p = args.p;
    const auto kernel = one_anchor ? fused::kda_segments_sm90_kernel<__nv_bfloat16, fused::Anchors::kOne>
                                   : fused::kda_segments_sm90_kernel<__nv_bfloat16, fused::Anchors::kPerHalf>;
    fused::Segments segments = place_segments(p, plan, workspace, split_bytes(p));
    segments.flags = reinterpret_cast<uint32_t*>(workspace + num_blocks(p) * fused::kOperandBytes);
    segments.counter = segments.flags + num_blocks(p);
    cudaError_t error = allow_shared(kernel, kSplitSharedBytes<0>);
    if (error == cudaSuccess) {
        error = cudaMemsetAsync(segments.flags, 0, static_cast<size_t>(num_blocks(p) + 1) * sizeof(uint32_t), stream);
    }
    if (error != cudaSuccess) {
        return error;
    }
    const unsigned blocks = static_cast<unsigned>(2 * num_states(p, plan));
    const uint32_t prepare = static_cast<uint32_t>(plan.prepare);
    kernel<<<prepare + blocks, fused::kThreads, kSplitSharedBytes<0>, stream>>>(args, segments, prepare);
    error = launch_scan(p, segments, stream);
    if (error != cudaSuccess) {
        return error;
    }
    kernel<<<blocks, fused::kThreads, kSplitSharedBytes<0>, stream>>>(args, segments, 0);
    return cudaPeekAtLastError();
}

}  // namespace flare::kda
