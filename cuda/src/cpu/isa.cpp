#include "isa.h"

#include <atomic>

namespace flare::cpu {
namespace {

Isa best_isa() {
#if defined(__x86_64__)
    // __builtin_cpu_supports also checks that the operating system saves the wide registers.
    __builtin_cpu_init();
    const bool has_avx2 =
        __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
    const bool has_avx512 = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                            __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
    if (has_avx2 && has_avx512) {
        return Isa::kAvx512;
    }
    if (has_avx2) {
        return Isa::kAvx2;
    }
#endif
    return Isa::kGeneric;
}

std::atomic<int> g_override{-1};

}  // namespace

Isa active_isa() {
    static const Isa best = best_isa();
    const int wanted = g_override.load(std::memory_order_relaxed);
    return wanted >= 0 && wanted < static_cast<int>(best) ? static_cast<Isa>(wanted) : best;
}

const char* isa_name(Isa isa) {
    switch (isa) {
        case Isa::kAvx512:
            return "avx512";
        case Isa::kAvx2:
            return "avx2";
        default:
            return "generic";
    }
}

void override_isa(Isa isa) {
    g_override.store(static_cast<int>(isa), std::memory_order_relaxed);
}

}  // namespace flare::cpu
