// When the Hopper KDA forward runs segments of a sequence side by side, and how long they are. Pure host code.
#pragma once

#include "kda/params.h"

#include <algorithm>
#include <cmath>

namespace flare::kda {

struct SegmentPlan {
    int32_t tokens;   // of a segment, a multiple of 32; 0: no segments
    int32_t prepare;  // blocks that prepare chunks
};

// Slots of segments in the workspace: floor(T / tokens) + N when packed, as for chunks (slots.cuh).
inline int64_t segment_slots(const KdaParams& p, int32_t tokens) {
    return p.cu_seqlens != nullptr ? p.seqlen / tokens + p.num_sequences
                                   : p.num_sequences * ((p.seqlen + tokens - 1) / tokens);
}

// Of a sequence; their mean when packed.
inline int64_t mean_tokens(const KdaParams& p) {
    return p.seqlen / (p.cu_seqlens != nullptr ? std::max<int64_t>(p.num_sequences, 1) : 1);
}

// Value columns of a block of the scan. Fewer are quicker until the blocks' copies of M fill the way from L2.
inline int scan_columns(const KdaParams& p) {
    return p.num_sequences * p.heads_v <= 4 ? 4 : 8;
}

// ns, of an H100 or H200: measured times (docs/kernels/kda.md).
struct SegmentCosts {
    int64_t start;    // the launches; the first chunks' way through memory
    int64_t prepare;  // a chunk on an SM: what all SMs prepare, write and read at a time
    int64_t twice;    // a chunk of a segment, in both launches
};

// `otherwise`: ns of the form that runs without segments.
inline SegmentPlan plan_segments(const KdaParams& p, const SegmentCosts& costs, int64_t otherwise) {
    constexpr int64_t kSms = 132;
    const int64_t scan = scan_columns(p) == 4 ? 1030 : 1660;  // a segment
    const int64_t units = p.num_sequences * p.heads_v;
    const int64_t chunks = (mean_tokens(p) + 31) / 32;
    const SegmentPlan none{0, 0};
    if (p.deterministic != 0 || p.head_dim_k != 128 || p.head_dim_v != 128 || units == 0) {
        return none;
    }
    // As many as SMs hold at a time, two blocks for all segments but one of each unit; fewer where the scan would take
    // longer than that saves.
    const int64_t most = kSms / 2 / units + 1;
    const int64_t balanced = static_cast<int64_t>(std::sqrt(static_cast<double>(chunks * scan / costs.twice)));
    const int64_t length = std::max<int64_t>({(chunks + most - 1) / most, balanced, 8});
    const int64_t count = (chunks + length - 1) / length;
    if (count < 3) {
        return none;
    }
    const int64_t time =
        costs.start + units * chunks * costs.prepare / kSms + length * costs.twice + (count - 2) * scan;
    // Only what is clearly faster.
    const bool faster = time < otherwise - otherwise / 10;
    return faster ? SegmentPlan{static_cast<int32_t>(32 * length), static_cast<int32_t>(kSms)} : none;
}

}  // namespace flare::kda
