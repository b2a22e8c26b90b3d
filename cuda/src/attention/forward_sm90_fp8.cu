// Instances of the Hopper attention forward kernel with e4m3 inputs.
#include "launch_sm90.cuh"

namespace flare::attention {

#define FLARE_SM90_ONLY 8
#define FLARE_ATTENTION_SM90 FLARE_DEFINE_LAUNCH_SM90
#include "forward_sm90_configs.inc"

}  // namespace flare::attention
