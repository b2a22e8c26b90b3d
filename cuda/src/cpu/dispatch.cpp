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

namespace {

constexpr int64_t kEnoughItems = 64;
constexpr int64_t kKeysWorthASplit = 512;

}  // namespace

int64_t SplitRule::splits(int64_t items, int64_t rows, int64_t max_keys) const {
    if (requested > 0) {
        return requested;
    }
    if (deterministic || items == 0 || rows > largest_rows) {
        return 1;
    }
    const int64_t wanted = kEnoughItems / items;
    const int64_t useful = max_keys / kKeysWorthASplit;
    const int64_t splits = wanted < useful ? wanted : useful;
    return splits > 1 ? splits : 1;
}

int64_t SplitRule::partial_rows(int64_t total_rows, int64_t max_keys) const {
    const int64_t useful = max_keys / kKeysWorthASplit;
    if (requested == 1 || (requested == 0 && (deterministic || useful <= 1))) {
        return 0;
    }
    const double product = static_cast<double>(requested > 0 ? requested : useful) * static_cast<double>(total_rows);
    // splits <= kEnoughItems / items, and the rows are at most items * tile_rows.
    const int64_t most = requested > 0 ? INT64_MAX / 2 : kEnoughItems * tile_rows;
    return product < static_cast<double>(most) ? static_cast<int64_t>(product) : most;
}

uint64_t float_bytes(int64_t rows, int64_t width) {
    if (static_cast<double>(rows) * static_cast<double>(width) > 4e17) {
        return UINT64_MAX / 8;
    }
    return (static_cast<uint64_t>(rows * width) * 4 + 255) / 256 * 256;
}

int choose_threads(int32_t requested, double multiply_adds) {
    constexpr double kWorthWaking = 2e5;  // about 5 microseconds of one core; waking a worker takes longer
    return multiply_adds < kWorthWaking ? 1 : requested;
}

}  // namespace flare::cpu
