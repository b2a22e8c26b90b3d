#include "api/walk.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "cpu/convert.h"
#include "flare.h"

namespace flare {

Walk make_walk(int rank, const int64_t* shape, const int64_t* src_stride, const int64_t* dst_stride) {
    int order[Walk::kMaxRank];
    int count = 0;
    for (int i = 0; i < rank; ++i) {
        if (shape[i] != 1) {
            order[count++] = i;
        }
    }
    std::stable_sort(order, order + count, [&](int a, int b) { return dst_stride[a] > dst_stride[b]; });
    Walk walk;
    for (int n = 0; n < count; ++n) {
        const int i = order[n];
        const int last = walk.rank - 1;
        if (last >= 0 && walk.src_stride[last] == src_stride[i] * shape[i] &&
            walk.dst_stride[last] == dst_stride[i] * shape[i]) {
            walk.shape[last] *= shape[i];
            walk.src_stride[last] = src_stride[i];
            walk.dst_stride[last] = dst_stride[i];
            continue;
        }
        walk.shape[walk.rank] = shape[i];
        walk.src_stride[walk.rank] = src_stride[i];
        walk.dst_stride[walk.rank] = dst_stride[i];
        ++walk.rank;
    }
    if (walk.rank > 0) {
        --walk.rank;
        walk.line = walk.shape[walk.rank];
        walk.src_line_stride = walk.src_stride[walk.rank];
        walk.dst_line_stride = walk.dst_stride[walk.rank];
    }
    for (int i = 0; i < walk.rank; ++i) {
        walk.num_lines *= walk.shape[i];
    }
    return walk;
}

int64_t encode_element(double value, int32_t dtype, unsigned char* bytes) {
    const auto put = [&](auto element) {
        std::memcpy(bytes, &element, sizeof(element));
        return static_cast<int64_t>(sizeof(element));
    };
    const auto integer = [&](double low, double high) {
        const double rounded = std::nearbyint(value);
        return std::isnan(value) ? 0.0 : (rounded < low ? low : (rounded > high ? high : rounded));
    };
    const float single = static_cast<float>(value);
    switch (dtype) {
        case FLARE_FP32:
            return put(single);
        case FLARE_FP16:
            return put(cpu::float_to_fp16(single));
        case FLARE_BF16:
            return put(cpu::float_to_bf16(single));
        case FLARE_FP8_E4M3:
            return put(cpu::float_to_e4m3(single));
        case FLARE_UINT8:
            return put(static_cast<uint8_t>(integer(0.0, 255.0)));
        case FLARE_INT32:
            return put(static_cast<int32_t>(integer(-2147483648.0, 2147483647.0)));
        default:
            break;
    }
    // 2^63 itself isn't an int64.
    const double rounded = std::isnan(value) ? 0.0 : std::nearbyint(value);
    if (rounded >= 9223372036854775808.0) {
        return put(INT64_MAX);
    }
    return put(rounded < -9223372036854775808.0 ? INT64_MIN : static_cast<int64_t>(rounded));
}

}  // namespace flare
