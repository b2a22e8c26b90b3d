// Instances of the portable attention forward kernel with every option, head dimensions up to 128.
#include "launch_sm80.cuh"

namespace flare::attention {

FLARE_DEFINE_LAUNCH_SM80_GENERAL(128, 3)

}  // namespace flare::attention
