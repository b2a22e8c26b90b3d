// Launch of the KDA forward in segments (segments_sm90.cu).
#pragma once

#include "kda/segments_plan.h"

namespace flare::kda {

namespace fused {
struct Args;
}

size_t kda_segments_sm90_workspace(const KdaParams& p, const SegmentPlan& plan);
// one_anchor: as in the fused and split forms (fused::Anchors).
int32_t launch_kda_segments_sm90(const fused::Args& args, bool one_anchor, const SegmentPlan& plan, uint8_t* workspace,
                                 cudaStream_t stream);

}  // namespace flare::kda
