// Instances of the portable attention forward kernel with head dimension 256.
#include "launch_sm80.cuh"

namespace flare::attention {

#define FLARE_SM80_ONLY 256
#define FLARE_ATTENTION_SM80 FLARE_DEFINE_LAUNCH_SM80
#include "forward_sm80_configs.inc"

}  // namespace flare::attention
