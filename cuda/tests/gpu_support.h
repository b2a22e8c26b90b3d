// What the tests of the CUDA backend share: memory on both sides with the same content, and the count of checks.
#pragma once

#include <cuda_runtime_api.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <mutex>
#include <random>
#include <string>
#include <vector>

#include "cpu/convert.h"
#include "flare.h"

namespace gpu_test {

constexpr int kSkipped = 77;

inline int failures = 0;
inline int checks = 0;
inline std::mutex reporting;  // of the counts, where threads report
inline thread_local std::mt19937_64 random_bits(0x5EED);

inline void check_cuda(cudaError_t error, const char* what) {
    if (error != cudaSuccess) {
        std::printf("FAIL %s: %s\n", what, cudaGetErrorString(error));
        std::exit(1);
    }
}

inline bool has_device() {
    int count = 0;
    return cudaGetDeviceCount(&count) == cudaSuccess && count > 0;
}

inline int64_t integer(int64_t low, int64_t high) {
    return std::uniform_int_distribution<int64_t>(low, high)(random_bits);
}
inline double normal() {
    return std::normal_distribution<double>()(random_bits);
}
inline int64_t pick(std::initializer_list<int64_t> choices) {
    return choices.begin()[integer(0, static_cast<int64_t>(choices.size()) - 1)];
}

inline int64_t bytes_of(int32_t dtype) {
    switch (dtype) {
        case FLARE_FP32:
        case FLARE_INT32:
            return 4;
        case FLARE_INT64:
            return 8;
        case FLARE_FP16:
        case FLARE_BF16:
            return 2;
        default:
            return 1;
    }
}

inline const char* name_of(int32_t dtype) {
    switch (dtype) {
        case FLARE_FP32:
            return "fp32";
        case FLARE_FP16:
            return "fp16";
        case FLARE_BF16:
            return "bf16";
        case FLARE_FP8_E4M3:
            return "e4m3";
        case FLARE_UINT8:
            return "uint8";
        case FLARE_INT32:
            return "int32";
        default:
            return "int64";
    }
}

inline float read_float(const void* data, int32_t dtype, int64_t i) {
    switch (dtype) {
        case FLARE_FP32:
            return static_cast<const float*>(data)[i];
        case FLARE_FP16:
            return flare::cpu::fp16_to_float(static_cast<const uint16_t*>(data)[i]);
        case FLARE_BF16:
            return flare::cpu::bf16_to_float(static_cast<const uint16_t*>(data)[i]);
        default:
            return flare::cpu::e4m3_to_float(static_cast<const uint8_t*>(data)[i]);
    }
}

inline void write_float(void* data, int32_t dtype, int64_t i, float value) {
    switch (dtype) {
        case FLARE_FP32:
            static_cast<float*>(data)[i] = value;
            break;
        case FLARE_FP16:
            static_cast<uint16_t*>(data)[i] = flare::cpu::float_to_fp16(value);
            break;
        case FLARE_BF16:
            static_cast<uint16_t*>(data)[i] = flare::cpu::float_to_bf16(value);
            break;
        default:
            static_cast<uint8_t*>(data)[i] = flare::cpu::float_to_e4m3(value);
            break;
    }
}

// A tensor in host and in device memory. Starts as NaN (all bits set): what nobody writes or may read stays so.
class Mirror {
  public:
    Mirror() = default;
    Mirror(int32_t type, int64_t elements)
        : dtype(type), count(elements), host(static_cast<size_t>(elements > 0 ? elements * bytes_of(type) : 16), 0xff) {
        check_cuda(cudaMalloc(&device_, host.size() + 256), "cudaMalloc");
        check_cuda(cudaMemset(device_, 0xff, host.size() + 256), "cudaMemset");
    }
    ~Mirror() { cudaFree(device_); }
    Mirror(const Mirror&) = delete;
    Mirror& operator=(const Mirror&) = delete;

    // `skip` elements into it: for addresses that are aligned to an element only.
    void* on(int32_t device, int64_t skip = 0) {
        char* base = device < 0 ? reinterpret_cast<char*>(host.data()) : static_cast<char*>(device_);
        return base + skip * bytes_of(dtype);
    }
    float* floats(int32_t device) { return static_cast<float*>(on(device)); }

    void upload() { check_cuda(cudaMemcpy(device_, host.data(), host.size(), cudaMemcpyHostToDevice), "upload"); }
    std::vector<unsigned char> download() const {
        std::vector<unsigned char> result(host.size());
        check_cuda(cudaMemcpy(result.data(), device_, host.size(), cudaMemcpyDeviceToHost), "download");
        return result;
    }

    void set(int64_t i, double value) { write_float(host.data(), dtype, i, static_cast<float>(value)); }
    float get(int64_t i) const { return read_float(host.data(), dtype, i); }
    void fill_normal(double factor = 1.0, double mean = 0.0) {
        for (int64_t i = 0; i < count; ++i) {
            set(i, mean + factor * normal());
        }
        upload();
    }
    void fill_random_bits() {
        for (unsigned char& byte : host) {
            byte = static_cast<unsigned char>(random_bits());
        }
        upload();
    }
    void set_index(int64_t i, int64_t value) {
        const int32_t narrow = static_cast<int32_t>(value);
        std::memcpy(on(-1, i), dtype == FLARE_INT64 ? static_cast<const void*>(&value) : &narrow,
                    static_cast<size_t>(bytes_of(dtype)));
    }
    void set_indices(const std::vector<int64_t>& values) {
        for (size_t i = 0; i < values.size(); ++i) {
            set_index(static_cast<int64_t>(i), values[i]);
        }
        upload();
    }

    int32_t dtype = FLARE_FP32;
    int64_t count = 0;
    std::vector<unsigned char> host;

  private:
    void* device_ = nullptr;
};

struct Difference {
    double relative;  // ||gpu - cpu|| / ||cpu||; infinite where something isn't finite on one side only
    double largest;
};

// The GPU's result `got` against the CPU's on the host. What neither wrote is equal.
inline Difference compare(const Mirror& cpu, const std::vector<unsigned char>& got) {
    double error = 0.0;
    double norm = 0.0;
    double largest = 0.0;
    for (int64_t i = 0; i < cpu.count; ++i) {
        const double want = static_cast<double>(cpu.get(i));
        const double have = static_cast<double>(read_float(got.data(), cpu.dtype, i));
        if (want == have || (std::isnan(want) && std::isnan(have))) {
            norm += std::isfinite(want) ? want * want : 0.0;
            continue;
        }
        if (!std::isfinite(want - have)) {
            return {HUGE_VAL, HUGE_VAL};
        }
        error += (have - want) * (have - want);
        norm += want * want;
        largest = std::max(largest, std::fabs(have - want));
    }
    return {error == 0.0 ? 0.0 : std::sqrt(error / norm), largest};
}

inline Difference compare(const Mirror& x) {
    return compare(x, x.download());
}

// Runs on the GPU with the workspace that is asked for, poisoned. Returns the status.
template <typename Params>
int32_t run_gpu(int32_t operation, Params& p, int32_t (*call)(const Params*), int32_t (*workspace)(const Params*, uint64_t*),
                std::string* kernel) {
    char name[128] = "?";
    if (const int32_t status = flare_kernel_name(operation, &p, name, sizeof(name))) {
        return status;
    }
    *kernel = name;
    uint64_t bytes = 0;
    if (const int32_t status = workspace(&p, &bytes)) {
        return status;
    }
    void* scratch = nullptr;
    check_cuda(cudaMalloc(&scratch, bytes + 256), "cudaMalloc");
    check_cuda(cudaMemset(scratch, 0xff, bytes + 256), "cudaMemset");
    p.workspace = scratch;
    p.workspace_bytes = bytes;
    const int32_t status = call(&p);
    check_cuda(cudaDeviceSynchronize(), name);
    cudaFree(scratch);
    p.workspace = nullptr;
    p.workspace_bytes = 0;
    return status;
}

inline std::string last_error() {
    char text[512];
    flare_last_error(text, sizeof(text));
    return text;
}

inline void report(bool ok, const std::string& what, const std::string& detail) {
    const std::lock_guard<std::mutex> lock(reporting);
    ++checks;
    if (!ok) {
        ++failures;
        std::printf("FAIL %s: %s\n", what.c_str(), detail.c_str());
    }
}

inline int finish(const char* name) {
    std::printf("%s: %d checks, %d failures\n", name, checks, failures);
    return failures != 0;
}

}  // namespace gpu_test
