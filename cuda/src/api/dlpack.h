// The structs of DLPack 1.x, as its C API page defines them: https://dmlc.github.io/dlpack/latest/c_api.html
#pragma once

#include <cstdint>

namespace flare::dlpack {

constexpr uint32_t kMajorVersion = 1;
constexpr uint32_t kMinorVersion = 0;

enum DeviceType : int32_t { kCpu = 1, kCuda = 2, kCudaHost = 3, kCudaManaged = 13 };

enum TypeCode : uint8_t { kInt = 0, kUInt = 1, kFloat = 2, kBfloat = 4, kFloat8E4M3FN = 10 };

constexpr uint64_t kReadOnly = 1;
constexpr uint64_t kCopied = 2;

struct DataType {
    uint8_t code;
    uint8_t bits;
    uint16_t lanes;
};

struct Device {
    int32_t type;
    int32_t id;
};

struct Tensor {
    void* data;
    Device device;
    int32_t rank;
    DataType dtype;
    int64_t* shape;
    int64_t* strides;  // elements; null means dense rows
    uint64_t byte_offset;
};

struct Managed {
    Tensor tensor;
    void* context;
    void (*deleter)(Managed*);
};

// The fields up to the deleter keep their places in every version.
struct ManagedVersioned {
    uint32_t major;
    uint32_t minor;
    void* context;
    void (*deleter)(ManagedVersioned*);
    uint64_t flags;
    Tensor tensor;
};

static_assert(sizeof(Tensor) == 48 && sizeof(Managed) == 64 && sizeof(ManagedVersioned) == 80);

}  // namespace flare::dlpack
