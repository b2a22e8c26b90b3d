// The exported operations: copy the versioned struct, validate, choose the backend, run.
#include <cstddef>
#include <cstdio>
#include <cstring>
#include <string>

#include "api/gpu.h"
#include "api/guarded.h"
#include "api/status.h"
#include "api/validate.h"
#include "cpu/cpu.h"

namespace flare {
namespace {

// Copies a caller's struct of any accepted size into a zeroed one of ours.
template <typename Params>
int32_t read_params(const Params* caller, Params& params) {
    if (caller == nullptr) {
        return fail(FLARE_ERROR_NULL, "params is NULL");
    }
    const uint32_t size = caller->struct_size;
    // Shorter structs end at a field boundary of an earlier version; this is the first, so the whole struct is the least.
    constexpr uint32_t kLeast = sizeof(Params);
    if (size < kLeast) {
        return fail(FLARE_ERROR_STRUCT_SIZE, "struct_size is %u; this library needs at least %u: set it to sizeof the params struct", size,
                    kLeast);
    }
    const auto* bytes = reinterpret_cast<const unsigned char*>(caller);
    for (uint32_t i = sizeof(Params); i < size; ++i) {
        if (bytes[i] != 0) {
            return fail(FLARE_ERROR_STRUCT_SIZE,
                        "struct_size is %u, and byte %u beyond the %zu that this library knows isn't 0: the caller is newer than the "
                        "library",
                        size, i, sizeof(Params));
        }
    }
    std::memcpy(&params, caller, sizeof(Params));
    return FLARE_OK;
}

template <typename Params>
int32_t run(const Params* caller, int32_t (*cpu)(const Params&), int32_t (*gpu)(const Params&)) noexcept {
    return guarded([&] {
        Params params;
        if (const int32_t status = read_params(caller, params)) {
            return status;
        }
        if (const int32_t status = validate(params, Check::kRun)) {
            return status;
        }
        return params.device == FLARE_DEVICE_CPU ? cpu(params) : gpu(params);
    });
}

// The CUDA backend checks the workspace itself: what it needs depends on the device, which it enters once.
template <typename Params>
int32_t run_with_workspace(const Params* caller, int32_t (*cpu)(const Params&), uint64_t (*cpu_workspace)(const Params&),
                           int32_t (*gpu)(const Params&)) noexcept {
    return guarded([&] {
        Params params;
        if (const int32_t status = read_params(caller, params)) {
            return status;
        }
        if (const int32_t status = validate(params, Check::kRun)) {
            return status;
        }
        if (params.device != FLARE_DEVICE_CPU) {
            return gpu(params);
        }
        if (const int32_t status = check_workspace(params.workspace, params.workspace_bytes, cpu_workspace(params))) {
            return status;
        }
        return cpu(params);
    });
}

template <typename Params>
int32_t workspace(const Params* caller, uint64_t* bytes, uint64_t (*cpu)(const Params&),
                  int32_t (*gpu)(const Params&, uint64_t*)) noexcept {
    return guarded([&] {
        if (bytes == nullptr) {
            return fail(FLARE_ERROR_NULL, "bytes is NULL; it takes the answer");
        }
        Params params;
        if (const int32_t status = read_params(caller, params)) {
            return status;
        }
        if (const int32_t status = validate(params, Check::kQuery)) {
            return status;
        }
        if (params.device != FLARE_DEVICE_CPU) {
            return gpu(params, bytes);
        }
        *bytes = cpu(params);
        return static_cast<int32_t>(FLARE_OK);
    });
}

template <typename Params>
int32_t kernel_name(const void* caller, const char* operation, char* name, uint64_t capacity,
                    int32_t (*gpu)(const Params&, char*, uint64_t)) {
    Params params;
    if (const int32_t status = read_params(static_cast<const Params*>(caller), params)) {
        return status;
    }
    if (const int32_t status = validate(params, Check::kQuery)) {
        return status;
    }
    if (params.device != FLARE_DEVICE_CPU) {
        return gpu(params, name, capacity);
    }
    std::snprintf(name, capacity, "%s_%s", cpu::isa_name(), operation);
    return FLARE_OK;
}

}  // namespace
}  // namespace flare

extern "C" {

int32_t flare_attention_forward(const flare_attention_params* params) {
    return flare::run_with_workspace(params, flare::cpu::attention_forward, flare::cpu::attention_workspace,
                                     flare::gpu::attention_forward);
}

int32_t flare_attention_merge(const flare_attention_merge_params* params) {
    return flare::run(params, flare::cpu::attention_merge, flare::gpu::attention_merge);
}

int32_t flare_mla_prefill(const flare_mla_prefill_params* params) {
    return flare::run_with_workspace(params, flare::cpu::mla_prefill, flare::cpu::mla_prefill_workspace, flare::gpu::mla_prefill);
}

int32_t flare_mla_decode(const flare_mla_decode_params* params) {
    return flare::run_with_workspace(params, flare::cpu::mla_decode, flare::cpu::mla_decode_workspace, flare::gpu::mla_decode);
}

int32_t flare_kda_forward(const flare_kda_forward_params* params) {
    return flare::run_with_workspace(params, flare::cpu::kda_forward, flare::cpu::kda_forward_workspace, flare::gpu::kda_forward);
}

int32_t flare_kda_decode(const flare_kda_decode_params* params) {
    return flare::run_with_workspace(params, flare::cpu::kda_decode, flare::cpu::kda_decode_workspace, flare::gpu::kda_decode);
}

int32_t flare_cast(const flare_cast_params* params) { return flare::run(params, flare::cpu::cast, flare::gpu::cast); }

int32_t flare_fill(const flare_fill_params* params) { return flare::run(params, flare::cpu::fill, flare::gpu::fill); }

int32_t flare_cache_append(const flare_cache_append_params* params) {
    return flare::run(params, flare::cpu::cache_append, flare::gpu::cache_append);
}

int32_t flare_attention_workspace(const flare_attention_params* params, uint64_t* bytes) {
    return flare::workspace(params, bytes, flare::cpu::attention_workspace, flare::gpu::attention_workspace);
}

int32_t flare_mla_prefill_workspace(const flare_mla_prefill_params* params, uint64_t* bytes) {
    return flare::workspace(params, bytes, flare::cpu::mla_prefill_workspace, flare::gpu::mla_prefill_workspace);
}

int32_t flare_mla_decode_workspace(const flare_mla_decode_params* params, uint64_t* bytes) {
    return flare::workspace(params, bytes, flare::cpu::mla_decode_workspace, flare::gpu::mla_decode_workspace);
}

int32_t flare_kda_forward_workspace(const flare_kda_forward_params* params, uint64_t* bytes) {
    return flare::workspace(params, bytes, flare::cpu::kda_forward_workspace, flare::gpu::kda_forward_workspace);
}

int32_t flare_kda_decode_workspace(const flare_kda_decode_params* params, uint64_t* bytes) {
    return flare::workspace(params, bytes, flare::cpu::kda_decode_workspace, flare::gpu::kda_decode_workspace);
}

int32_t flare_kernel_name(int32_t operation, const void* params, char* name, uint64_t capacity) {
    return flare::guarded([&]() -> int32_t {
        if (name == nullptr || capacity == 0) {
            return flare::fail(FLARE_ERROR_NULL, "name is NULL or capacity 0; they take the answer");
        }
        switch (operation) {
            case FLARE_OP_ATTENTION_FORWARD:
                return flare::kernel_name<flare_attention_params>(params, "attention_forward", name, capacity,
                                                                  flare::gpu::attention_kernel_name);
            case FLARE_OP_ATTENTION_MERGE:
                return flare::kernel_name<flare_attention_merge_params>(params, "attention_merge", name, capacity,
                                                                        flare::gpu::attention_merge_kernel_name);
            case FLARE_OP_MLA_PREFILL:
                return flare::kernel_name<flare_mla_prefill_params>(params, "mla_prefill_up_project", name, capacity,
                                                                    flare::gpu::mla_prefill_kernel_name);
            case FLARE_OP_MLA_DECODE:
                return flare::kernel_name<flare_mla_decode_params>(params, "mla_decode", name, capacity,
                                                                   flare::gpu::mla_decode_kernel_name);
            case FLARE_OP_KDA_FORWARD:
                return flare::kernel_name<flare_kda_forward_params>(params, "kda_forward", name, capacity,
                                                                    flare::gpu::kda_forward_kernel_name);
            case FLARE_OP_KDA_DECODE:
                return flare::kernel_name<flare_kda_decode_params>(params, "kda_decode", name, capacity,
                                                                   flare::gpu::kda_decode_kernel_name);
            case FLARE_OP_CAST:
                return flare::kernel_name<flare_cast_params>(params, "cast", name, capacity, flare::gpu::cast_kernel_name);
            case FLARE_OP_FILL:
                return flare::kernel_name<flare_fill_params>(params, "fill", name, capacity, flare::gpu::fill_kernel_name);
            case FLARE_OP_CACHE_APPEND:
                return flare::kernel_name<flare_cache_append_params>(params, "cache_append", name, capacity,
                                                                     flare::gpu::cache_append_kernel_name);
            default:
                return flare::fail(FLARE_ERROR_OPTION, "operation is %d; it must be one of FLARE_OP_*", operation);
        }
    });
}

const char* flare_build_info(void) {
    static const std::string text = [] {
        char line[256];
        std::snprintf(line, sizeof(line), "flare %d.%d.%d, %s, %s, built with %s", FLARE_VERSION >> 16, FLARE_VERSION >> 8 & 0xff,
                      FLARE_VERSION & 0xff, flare::cpu::isa_name(), flare::gpu::build_text(),
#if defined(__clang__)
                      "clang " __clang_version__
#else
                      "gcc " __VERSION__
#endif
        );
        return std::string(line);
    }();
    return text.c_str();
}

uint32_t flare_version(void) { return FLARE_VERSION; }

}  // extern "C"
