// Exchange of tensors by DLPack. The deleters are plain C functions, so that a consumer may call them from any thread.
#include "api/dlpack.h"

#include <cinttypes>
#include <cstddef>
#include <cstring>
#include <memory>

#include "api/guarded.h"
#include "api/status.h"
#include "flare.h"

namespace flare {
namespace {

constexpr int kMaxRank = FLARE_DLPACK_MAX_RANK;
constexpr uint32_t kExportFlags = FLARE_DLPACK_READ_ONLY | FLARE_DLPACK_HOST_PINNED | FLARE_DLPACK_MANAGED;

void add_hold(int64_t* holds) {
    if (holds != nullptr) {
        __atomic_fetch_add(holds, 1, __ATOMIC_RELAXED);
    }
}

// What the consumer did with the data happens before what its owner does on seeing 0.
void drop_hold(int64_t* holds) {
    if (holds != nullptr) {
        __atomic_fetch_sub(holds, 1, __ATOMIC_RELEASE);
    }
}

// A managed tensor with the arrays that it points to.
template <typename ManagedTensor>
struct Exported {
    ManagedTensor managed{};
    int64_t shape[kMaxRank];
    int64_t stride[kMaxRank];
    int64_t* holds;

    static void destroy(ManagedTensor* managed) {
        if (managed == nullptr) {
            return;
        }
        auto* self = static_cast<Exported*>(managed->context);
        int64_t* holds = self->holds;
        delete self;
        drop_hold(holds);
    }
};

int32_t type_of(int32_t dtype, dlpack::DataType& type) {
    type.lanes = 1;
    type.bits = static_cast<uint8_t>(8 * dtype_bytes(dtype));
    switch (dtype) {
        case FLARE_FP32:
        case FLARE_FP16:
            type.code = dlpack::kFloat;
            return FLARE_OK;
        case FLARE_BF16:
            type.code = dlpack::kBfloat;
            return FLARE_OK;
        case FLARE_FP8_E4M3:
            type.code = dlpack::kFloat8E4M3FN;
            return FLARE_OK;
        case FLARE_INT32:
        case FLARE_INT64:
            type.code = dlpack::kInt;
            return FLARE_OK;
        case FLARE_UINT8:
            type.code = dlpack::kUInt;
            return FLARE_OK;
        default:
            return fail(FLARE_ERROR_DTYPE, "dtype is %d; want one of the FLARE_ dtypes", dtype);
    }
}

int32_t dtype_of(const dlpack::DataType& type, int32_t& dtype) {
    dtype = 0;
    if (type.lanes == 1) {
        switch (type.code) {
            case dlpack::kFloat:
                dtype = type.bits == 32 ? FLARE_FP32 : type.bits == 16 ? FLARE_FP16 : 0;
                break;
            case dlpack::kBfloat:
                dtype = type.bits == 16 ? FLARE_BF16 : 0;
                break;
            case dlpack::kFloat8E4M3FN:
                dtype = type.bits == 8 ? FLARE_FP8_E4M3 : 0;
                break;
            case dlpack::kInt:
                dtype = type.bits == 32 ? FLARE_INT32 : type.bits == 64 ? FLARE_INT64 : 0;
                break;
            case dlpack::kUInt:
                dtype = type.bits == 8 ? FLARE_UINT8 : 0;
                break;
            default:
                break;
        }
    }
    return dtype != 0 ? FLARE_OK
                      : fail(FLARE_UNSUPPORTED_DTYPE,
                             "DLPack type code %u with %u bits and %u lanes; flare takes float32, float16, bfloat16, float8_e4m3fn, "
                             "int32, int64 and uint8, one lane each",
                             type.code, type.bits, type.lanes);
}

// Sizes and strides, and that the bytes from the first to past the last element can be counted.
int32_t check_shape(const flare_dlpack_tensor& t) {
    if (t.rank < 0 || t.rank > kMaxRank) {
        return fail(FLARE_UNSUPPORTED_SHAPE, "the tensor has %d dimensions; flare exchanges 0 to %d", t.rank, kMaxRank);
    }
    bool empty = false;
    for (int i = 0; i < t.rank; ++i) {
        if (t.shape[i] < 0) {
            return fail(FLARE_ERROR_SHAPE, "shape[%d] is %" PRId64 "; want 0 or more", i, t.shape[i]);
        }
        empty |= t.shape[i] == 0;
    }
    if (empty) {
        return FLARE_OK;
    }
    __int128 extent = 1;
    for (int i = 0; i < t.rank; ++i) {
        if (t.shape[i] > 1 && t.stride[i] < 0) {
            return fail(FLARE_ERROR_STRIDE, "stride[%d] is %" PRId64 "; flare has no negative strides: make a contiguous copy first", i,
                        t.stride[i]);
        }
        if (t.shape[i] > 1) {
            extent += static_cast<__int128>(t.shape[i] - 1) * t.stride[i];
        }
        if (extent > INT64_MAX / dtype_bytes(t.dtype)) {
            return fail(FLARE_ERROR_OVERFLOW, "shape and strides address more than 2^63 bytes");
        }
    }
    if (t.data == nullptr) {
        return fail(FLARE_ERROR_NULL, "data is NULL, and the tensor has elements");
    }
    if (reinterpret_cast<uintptr_t>(t.data) % static_cast<uintptr_t>(dtype_bytes(t.dtype)) != 0) {
        return fail(FLARE_ERROR_ALIGNMENT, "data is at %p, which isn't a multiple of the %" PRId64 " bytes of %s", t.data, dtype_bytes(t.dtype),
                    dtype_name(t.dtype));
    }
    return FLARE_OK;
}

int32_t check_kind(int32_t kind) {
    if (kind != FLARE_DLPACK_VERSIONED && kind != FLARE_DLPACK_LEGACY) {
        return fail(FLARE_ERROR_OPTION, "kind is %d; want FLARE_DLPACK_VERSIONED (0) or FLARE_DLPACK_LEGACY (1)", kind);
    }
    return FLARE_OK;
}

template <typename ManagedTensor>
std::unique_ptr<Exported<ManagedTensor>> make_export(const flare_dlpack_tensor& t, const dlpack::DataType& type, int64_t* holds) {
    using Export = Exported<ManagedTensor>;
    auto made = std::make_unique<Export>();
    std::memcpy(made->shape, t.shape, sizeof(made->shape));
    std::memcpy(made->stride, t.stride, sizeof(made->stride));
    made->holds = holds;
    dlpack::Tensor& tensor = made->managed.tensor;
    tensor.data = t.data;
    const bool host = t.device < 0;
    tensor.device.type = host ? ((t.flags & FLARE_DLPACK_HOST_PINNED) != 0 ? dlpack::kCudaHost : dlpack::kCpu)
                              : ((t.flags & FLARE_DLPACK_MANAGED) != 0 ? dlpack::kCudaManaged : dlpack::kCuda);
    tensor.device.id = host ? 0 : t.device;
    tensor.rank = t.rank;
    tensor.dtype = type;
    tensor.shape = made->shape;
    tensor.strides = made->stride;
    tensor.byte_offset = 0;
    made->managed.context = made.get();
    made->managed.deleter = &Export::destroy;
    return made;
}

int32_t export_tensor(const flare_dlpack_tensor* t, int32_t kind, int64_t* holds, void** managed) {
    if (t == nullptr || managed == nullptr) {
        return fail(FLARE_ERROR_NULL, "%s is NULL", t == nullptr ? "tensor" : "managed");
    }
    if (t->struct_size < sizeof(flare_dlpack_tensor)) {
        return fail(FLARE_ERROR_STRUCT_SIZE, "struct_size is %u; want %zu", t->struct_size, sizeof(flare_dlpack_tensor));
    }
    if ((t->flags & ~kExportFlags) != 0) {
        return fail(FLARE_ERROR_FLAGS, "flags is 0x%x; an export knows 0x%x", t->flags, kExportFlags);
    }
    if (t->device < FLARE_DEVICE_CPU) {
        return fail(FLARE_ERROR_OPTION, "device is %d; want -1 for host memory, or a CUDA ordinal", t->device);
    }
    if ((t->device >= 0 && (t->flags & FLARE_DLPACK_HOST_PINNED) != 0) || (t->device < 0 && (t->flags & FLARE_DLPACK_MANAGED) != 0)) {
        return fail(FLARE_ERROR_OPTION, "flags is 0x%x with device %d; pinned memory is the host's, managed memory a GPU's", t->flags,
                    t->device);
    }
    dlpack::DataType type{};
    FLARE_TRY(check_kind(kind));
    FLARE_TRY(type_of(t->dtype, type));
    FLARE_TRY(check_shape(*t));
    if (kind == FLARE_DLPACK_LEGACY) {
        if ((t->flags & FLARE_DLPACK_READ_ONLY) != 0) {
            return fail(FLARE_UNSUPPORTED_FEATURE, "a DLManagedTensor can't say that its memory is read-only: export DLPACK_VERSIONED");
        }
        *managed = &make_export<dlpack::Managed>(*t, type, holds).release()->managed;
    } else {
        auto made = make_export<dlpack::ManagedVersioned>(*t, type, holds);
        made->managed.major = dlpack::kMajorVersion;
        made->managed.minor = dlpack::kMinorVersion;
        made->managed.flags = (t->flags & FLARE_DLPACK_READ_ONLY) != 0 ? dlpack::kReadOnly : 0;
        *managed = &made.release()->managed;
    }
    add_hold(holds);
    return FLARE_OK;
}

int32_t device_of(const dlpack::Device& device, flare_dlpack_tensor& t) {
    switch (device.type) {
        case dlpack::kCpu:
            t.device = FLARE_DEVICE_CPU;
            return FLARE_OK;
        case dlpack::kCudaHost:
            t.device = FLARE_DEVICE_CPU;
            t.flags |= FLARE_DLPACK_HOST_PINNED;
            return FLARE_OK;
        case dlpack::kCudaManaged:
            t.flags |= FLARE_DLPACK_MANAGED;
            [[fallthrough]];
        case dlpack::kCuda:
            t.device = device.id;
            return device.id >= 0 ? FLARE_OK : fail(FLARE_ERROR_OPTION, "the tensor lies on CUDA device %d; want 0 or more", device.id);
        default:
            return fail(FLARE_UNSUPPORTED_FEATURE,
                        "DLPack device type %d; flare takes kDLCPU (1), kDLCUDA (2), kDLCUDAHost (3) and kDLCUDAManaged (13)", device.type);
    }
}

int32_t import_tensor(const void* managed, int32_t kind, flare_dlpack_tensor* t) {
    if (managed == nullptr || t == nullptr) {
        return fail(FLARE_ERROR_NULL, "%s is NULL", managed == nullptr ? "managed" : "tensor");
    }
    if (t->struct_size < sizeof(flare_dlpack_tensor)) {
        return fail(FLARE_ERROR_STRUCT_SIZE, "struct_size is %u; want %zu", t->struct_size, sizeof(flare_dlpack_tensor));
    }
    FLARE_TRY(check_kind(kind));
    flare_dlpack_tensor found{};
    found.struct_size = t->struct_size;
    const dlpack::Tensor* source;
    if (kind == FLARE_DLPACK_LEGACY) {
        source = &static_cast<const dlpack::Managed*>(managed)->tensor;
    } else {
        const auto* versioned = static_cast<const dlpack::ManagedVersioned*>(managed);
        if (versioned->major != dlpack::kMajorVersion) {
            return fail(FLARE_UNSUPPORTED_FEATURE, "the tensor is of DLPack %u.%u; flare reads %u.x", versioned->major, versioned->minor,
                        dlpack::kMajorVersion);
        }
        source = &versioned->tensor;
        found.flags = ((versioned->flags & dlpack::kReadOnly) != 0 ? FLARE_DLPACK_READ_ONLY : 0) |
                      ((versioned->flags & dlpack::kCopied) != 0 ? FLARE_DLPACK_COPIED : 0);
    }
    FLARE_TRY(dtype_of(source->dtype, found.dtype));
    FLARE_TRY(device_of(source->device, found));
    found.rank = source->rank;
    if (found.rank >= 0 && found.rank <= kMaxRank) {
        if (found.rank > 0 && source->shape == nullptr) {
            return fail(FLARE_ERROR_NULL, "shape is NULL, and the tensor has %d dimensions", found.rank);
        }
        uint64_t step = 1;
        for (int i = found.rank - 1; i >= 0; --i) {
            found.shape[i] = source->shape[i];
            // Unsigned: a product that doesn't fit is found by check_shape, or belongs to a tensor without elements.
            found.stride[i] = source->strides != nullptr ? source->strides[i] : static_cast<int64_t>(step);
            if (source->strides == nullptr && source->shape[i] > 1 &&
                __builtin_mul_overflow(step, static_cast<uint64_t>(source->shape[i]), &step)) {
                step = INT64_MAX;
            }
        }
    }
    if (source->data != nullptr) {
        found.data = static_cast<unsigned char*>(source->data) + source->byte_offset;
    }
    FLARE_TRY(check_shape(found));
    *t = found;
    return FLARE_OK;
}

template <typename ManagedTensor>
void release(void* managed) {
    auto* tensor = static_cast<ManagedTensor*>(managed);
    if (tensor->deleter != nullptr) {
        tensor->deleter(tensor);
    }
}

}  // namespace
}  // namespace flare

extern "C" {

int32_t flare_dlpack_export(const flare_dlpack_tensor* tensor, int32_t kind, int64_t* holds, void** managed) {
    return flare::guarded([&] { return flare::export_tensor(tensor, kind, holds, managed); });
}

int32_t flare_dlpack_import(const void* managed, int32_t kind, flare_dlpack_tensor* tensor) {
    return flare::guarded([&] { return flare::import_tensor(managed, kind, tensor); });
}

int32_t flare_dlpack_release(void* managed, int32_t kind) {
    return flare::guarded([&] {
        if (managed == nullptr) {
            return FLARE_OK;
        }
        FLARE_TRY(flare::check_kind(kind));
        if (kind == FLARE_DLPACK_LEGACY) {
            flare::release<flare::dlpack::Managed>(managed);
        } else {
            flare::release<flare::dlpack::ManagedVersioned>(managed);
        }
        return FLARE_OK;
    });
}

}  // extern "C"
