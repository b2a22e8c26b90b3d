// Run-time choice of the instruction set. The kernels' source is compiled once per set, each in a namespace of its own
// (simd.h); this is how a caller picks one.
#pragma once

namespace flare::cpu {

enum class Isa {
    kGeneric = 0,  // plain C++, whatever the compiler's baseline is
    kAvx2 = 1,     // AVX2, FMA, F16C
    kAvx512 = 2,   // AVX-512 F, BW, DQ, VL on top of the above
};

// The best set that this machine and operating system support, or what override_isa asked for.
Isa active_isa();

// "generic", "avx2" or "avx512".
const char* isa_name(Isa isa);

// Makes active_isa() return `isa`, or the best supported one if the machine lacks it. For tests; not thread-safe
// against running operations.
void override_isa(Isa isa);

}  // namespace flare::cpu
