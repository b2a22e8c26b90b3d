// Instances of the portable attention forward kernel with every option, head dimensions up to 64.
#include "launch_sm80.cuh"

namespace flare::attention {

FLARE_DEFINE_LAUNCH_SM80_GENERAL(64, 4)

}  // namespace flare::attention
