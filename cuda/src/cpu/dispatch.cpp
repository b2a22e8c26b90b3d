// The kernel table of the active instruction set, and the sizing rules that all operations share.
#include "cpu.h"
#include "isa.h"
#include "kernels.h"
#include "thread_pool.h"

namespace flare::cpu {

const Kernels& active_kernels() {
#if defined(__x86_64__)
    switch (active_isa()) {
        case Isa::kAvx512:
            return avx512::kernels();
        case Isa::kAvx2:
            return avx2::kernels();
        default:
            break;
    }
#endif
    return generic::kernels();
}

const char* isa_name() {
    switch (active_isa()) {
        case Isa::kAvx512:
            return "cpu_avx512";
        case Isa::kAvx2:
            return "cpu_avx2";
        default:
            return "cpu_generic";
    }
}

int64_t choose_splits(int32_t requested, bool deterministic, int64_t items, int64_t max_keys) {
    constexpr int64_t kEnoughItems = 64;
    constexpr int64_t kKeysWorthASplit = 512;
    if (requested > 0) {
        return requested;
    }
    if (deterministic || items == 0 || items >= kEnoughItems) {
        return 1;
    }
    const int64_t wanted = kEnoughItems / items;
    const int64_t useful = max_keys / kKeysWorthASplit;
    const int64_t splits = wanted < useful ? wanted : useful;
    return splits > 1 ? splits : 1;
}

int choose_threads(int32_t requested, double multiply_adds) {
    constexpr double kWorthWaking = 2e5;  // about 5 microseconds of one core; waking a worker takes longer
    return multiply_adds < kWorthWaking ? 1 : requested;
}

}  // namespace flare::cpu
