// DLPack: round trips of every dtype and kind, ownership by holds and deleters, and every refusal. No GPU is needed: device tensors
// are described, not touched.
#include "cpu_test.h"

#include <algorithm>
#include <atomic>
#include <thread>

#include "api/dlpack.h"

using namespace cpu_test;
namespace dlpack = flare::dlpack;

namespace {

flare_dlpack_tensor tensor_of(void* data, int32_t dtype, std::vector<int64_t> shape, std::vector<int64_t> stride) {
    flare_dlpack_tensor t{};
    t.struct_size = sizeof(t);
    t.device = FLARE_DEVICE_CPU;
    t.dtype = dtype;
    t.rank = static_cast<int32_t>(shape.size());
    t.data = data;
    std::copy(shape.begin(), shape.end(), t.shape);
    std::copy(stride.begin(), stride.end(), t.stride);
    return t;
}

flare_dlpack_tensor blank() {
    flare_dlpack_tensor t{};
    t.struct_size = sizeof(t);
    return t;
}

void test_round_trips() {
    alignas(16) unsigned char data[1024] = {};
    for (const int32_t kind : {FLARE_DLPACK_VERSIONED, FLARE_DLPACK_LEGACY}) {
        for (const int32_t dtype : {FLARE_FP32, FLARE_FP16, FLARE_BF16, FLARE_FP8_E4M3, FLARE_INT32, FLARE_INT64, FLARE_UINT8}) {
            for (const int32_t device : {FLARE_DEVICE_CPU, 0, 3}) {
                flare_dlpack_tensor t = tensor_of(data + 16, dtype, {2, 0, 3}, {7, 3, 1});
                for (int rank : {0, 1, 3}) {
                    t.rank = rank;
                    t.shape[1] = rank == 3 ? 4 : 0;
                    t.device = device;
                    int64_t holds = 0;
                    void* managed = nullptr;
                    EXPECT(flare_dlpack_export(&t, kind, &holds, &managed) == FLARE_OK, "%s", last_error().c_str());
                    EXPECT(holds == 1, "%ld", static_cast<long>(holds));
                    flare_dlpack_tensor back = blank();
                    EXPECT(flare_dlpack_import(managed, kind, &back) == FLARE_OK, "%s", last_error().c_str());
                    EXPECT(std::memcmp(&back, &t, offsetof(flare_dlpack_tensor, shape)) == 0, "dtype %d rank %d", dtype, rank);
                    EXPECT(std::equal(back.shape, back.shape + rank, t.shape), "rank %d", rank);
                    EXPECT(std::equal(back.stride, back.stride + rank, t.stride), "rank %d", rank);
                    EXPECT(flare_dlpack_release(managed, kind) == FLARE_OK, "%s", last_error().c_str());
                    EXPECT(holds == 0, "%ld", static_cast<long>(holds));
                }
            }
        }
    }
}

// What a consumer of the standard sees, field by field.
void test_structs() {
    float data[6] = {};
    flare_dlpack_tensor t = tensor_of(data, FLARE_FP32, {2, 3}, {3, 1});
    t.flags = FLARE_DLPACK_READ_ONLY;
    int64_t holds = 0;
    void* managed = nullptr;
    EXPECT(flare_dlpack_export(&t, FLARE_DLPACK_VERSIONED, &holds, &managed) == FLARE_OK, "%s", last_error().c_str());
    auto* m = static_cast<dlpack::ManagedVersioned*>(managed);
    EXPECT(m->major == 1 && m->flags == dlpack::kReadOnly, "version %u flags %llu", m->major, static_cast<unsigned long long>(m->flags));
    EXPECT(m->tensor.data == data && m->tensor.byte_offset == 0 && m->tensor.rank == 2, "tensor");
    EXPECT(m->tensor.device.type == 1 && m->tensor.device.id == 0, "device");
    EXPECT(m->tensor.dtype.code == 2 && m->tensor.dtype.bits == 32 && m->tensor.dtype.lanes == 1, "dtype");
    EXPECT(m->tensor.shape[1] == 3 && m->tensor.strides[0] == 3, "shape");
    // A consumer's thread of its own calls the deleter.
    std::thread([m] { m->deleter(m); }).join();
    EXPECT(holds == 0, "%ld", static_cast<long>(holds));

    t.flags = FLARE_DLPACK_HOST_PINNED;
    EXPECT(flare_dlpack_export(&t, FLARE_DLPACK_LEGACY, nullptr, &managed) == FLARE_OK, "%s", last_error().c_str());
    auto* legacy = static_cast<dlpack::Managed*>(managed);
    EXPECT(legacy->tensor.device.type == 3, "device type %d", legacy->tensor.device.type);
    legacy->deleter(legacy);
    t.flags = FLARE_DLPACK_MANAGED;
    t.device = 1;
    EXPECT(flare_dlpack_export(&t, FLARE_DLPACK_VERSIONED, nullptr, &managed) == FLARE_OK, "%s", last_error().c_str());
    m = static_cast<dlpack::ManagedVersioned*>(managed);
    EXPECT(m->tensor.device.type == 13 && m->tensor.device.id == 1, "device type %d", m->tensor.device.type);
    m->deleter(m);
}

// Many consumers on many threads: each deleter takes away one hold.
void test_holds() {
    float data[4] = {};
    const flare_dlpack_tensor t = tensor_of(data, FLARE_FP32, {4}, {1});
    int64_t holds = 0;
    std::vector<std::thread> threads;
    for (int i = 0; i < 8; ++i) {
        threads.emplace_back([&] {
            for (int j = 0; j < 1000; ++j) {
                void* managed = nullptr;
                if (flare_dlpack_export(&t, j % 2, &holds, &managed) != FLARE_OK || __atomic_load_n(&holds, __ATOMIC_ACQUIRE) < 1) {
                    ++g_failures;
                    return;
                }
                flare_dlpack_release(managed, j % 2);
            }
        });
    }
    for (std::thread& thread : threads) {
        thread.join();
    }
    EXPECT(holds == 0, "%ld", static_cast<long>(holds));
}

// Another library's tensor.
struct Producer {
    dlpack::ManagedVersioned managed{};
    int64_t shape[9] = {2, 3, 4, 1, 1, 1, 1, 1, 1};
    int64_t stride[9] = {12, 4, 1, 1, 1, 1, 1, 1, 1};
    alignas(16) float data[64] = {};
    int deletions = 0;

    Producer() {
        managed.major = 1;
        managed.minor = 7;
        managed.context = this;
        managed.deleter = [](dlpack::ManagedVersioned* m) { ++static_cast<Producer*>(m->context)->deletions; };
        managed.tensor = {data, {dlpack::kCpu, 0}, 3, {dlpack::kFloat, 32, 1}, shape, stride, 0};
    }
};

void test_import() {
    Producer p;
    flare_dlpack_tensor t = blank();
    p.managed.flags = dlpack::kCopied | dlpack::kReadOnly;
    p.managed.tensor.strides = nullptr;
    p.managed.tensor.byte_offset = 8;
    EXPECT(flare_dlpack_import(&p.managed, FLARE_DLPACK_VERSIONED, &t) == FLARE_OK, "%s", last_error().c_str());
    EXPECT(t.data == p.data + 2, "byte_offset is added");
    EXPECT(t.stride[0] == 12 && t.stride[1] == 4 && t.stride[2] == 1, "no strides means dense: %ld %ld %ld", static_cast<long>(t.stride[0]),
           static_cast<long>(t.stride[1]), static_cast<long>(t.stride[2]));
    EXPECT(t.flags == (FLARE_DLPACK_READ_ONLY | FLARE_DLPACK_COPIED), "flags %u", t.flags);

    p.managed.tensor.data = nullptr;
    p.shape[1] = 0;
    EXPECT(flare_dlpack_import(&p.managed, FLARE_DLPACK_VERSIONED, &t) == FLARE_OK, "%s", last_error().c_str());
    EXPECT(t.data == nullptr && t.shape[1] == 0, "no elements, no data");

    p.managed.tensor.rank = 0;
    p.managed.tensor.shape = nullptr;
    p.managed.tensor.data = p.data;
    EXPECT(flare_dlpack_import(&p.managed, FLARE_DLPACK_VERSIONED, &t) == FLARE_OK, "a scalar: %s", last_error().c_str());
    EXPECT(p.deletions == 0, "import takes nothing");
    EXPECT(flare_dlpack_release(&p.managed, FLARE_DLPACK_VERSIONED) == FLARE_OK, "%s", last_error().c_str());
    EXPECT(p.deletions == 1, "%d", p.deletions);
    p.managed.deleter = nullptr;
    EXPECT(flare_dlpack_release(&p.managed, FLARE_DLPACK_VERSIONED) == FLARE_OK, "a producer without a deleter");
    EXPECT(flare_dlpack_release(nullptr, FLARE_DLPACK_VERSIONED) == FLARE_OK, "nothing to release");
}

void refuse_import(const char* what, int32_t status, const char* word, void (*change)(Producer&)) {
    Producer p;
    change(p);
    flare_dlpack_tensor t = blank();
    t.rank = 77;
    const int32_t got = flare_dlpack_import(&p.managed, FLARE_DLPACK_VERSIONED, &t);
    EXPECT(got == status, "%s: status %d, want %d", what, got, status);
    EXPECT(last_error().find(word) != std::string::npos, "%s: '%s' has no '%s'", what, last_error().c_str(), word);
    EXPECT(t.rank == 77 && p.deletions == 0, "%s: nothing written, nothing taken", what);
}

void test_refused_imports() {
    refuse_import("major version", FLARE_UNSUPPORTED_FEATURE, "DLPack 2.0", [](Producer& p) {
        p.managed.major = 2;
        p.managed.minor = 0;
    });
    refuse_import("lanes", FLARE_UNSUPPORTED_DTYPE, "4 lanes", [](Producer& p) { p.managed.tensor.dtype.lanes = 4; });
    refuse_import("float64", FLARE_UNSUPPORTED_DTYPE, "64 bits", [](Producer& p) { p.managed.tensor.dtype.bits = 64; });
    refuse_import("complex", FLARE_UNSUPPORTED_DTYPE, "code 5", [](Producer& p) { p.managed.tensor.dtype.code = 5; });
    refuse_import("int8", FLARE_UNSUPPORTED_DTYPE, "8 bits", [](Producer& p) { p.managed.tensor.dtype = {dlpack::kInt, 8, 1}; });
    refuse_import("device", FLARE_UNSUPPORTED_FEATURE, "device type 8", [](Producer& p) {
        p.managed.tensor.device.type = static_cast<dlpack::DeviceType>(8);  // Metal
    });
    refuse_import("CUDA ordinal", FLARE_ERROR_OPTION, "CUDA device -1", [](Producer& p) { p.managed.tensor.device = {dlpack::kCuda, -1}; });
    refuse_import("rank", FLARE_UNSUPPORTED_SHAPE, "9 dimensions", [](Producer& p) { p.managed.tensor.rank = 9; });
    refuse_import("rank", FLARE_UNSUPPORTED_SHAPE, "-1 dimensions", [](Producer& p) { p.managed.tensor.rank = -1; });
    refuse_import("no shape", FLARE_ERROR_NULL, "shape", [](Producer& p) { p.managed.tensor.shape = nullptr; });
    refuse_import("negative size", FLARE_ERROR_SHAPE, "shape[1] is -3", [](Producer& p) { p.shape[1] = -3; });
    refuse_import("negative stride", FLARE_ERROR_STRIDE, "stride[2] is -1", [](Producer& p) { p.stride[2] = -1; });
    refuse_import("no data", FLARE_ERROR_NULL, "data", [](Producer& p) { p.managed.tensor.data = nullptr; });
    refuse_import("misaligned", FLARE_ERROR_ALIGNMENT, "FP32", [](Producer& p) { p.managed.tensor.byte_offset = 2; });
    refuse_import("too far", FLARE_ERROR_OVERFLOW, "2^63", [](Producer& p) { p.stride[0] = INT64_MAX / 4; });
    refuse_import("too large", FLARE_ERROR_OVERFLOW, "2^63", [](Producer& p) {
        p.managed.tensor.strides = nullptr;
        p.shape[0] = p.shape[1] = p.shape[2] = INT64_MAX;
    });
    Producer p;
    flare_dlpack_tensor t = blank();
    EXPECT(flare_dlpack_import(nullptr, FLARE_DLPACK_VERSIONED, &t) == FLARE_ERROR_NULL, "managed");
    EXPECT(flare_dlpack_import(&p.managed, FLARE_DLPACK_VERSIONED, nullptr) == FLARE_ERROR_NULL, "tensor");
    EXPECT(flare_dlpack_import(&p.managed, 2, &t) == FLARE_ERROR_OPTION, "kind");
    EXPECT(flare_dlpack_release(&p.managed, -1) == FLARE_ERROR_OPTION && p.deletions == 0, "kind");
    t.struct_size = 0;
    EXPECT(flare_dlpack_import(&p.managed, FLARE_DLPACK_VERSIONED, &t) == FLARE_ERROR_STRUCT_SIZE, "struct_size");
}

void refuse_export(const char* what, int32_t kind, int32_t status, const char* word, void (*change)(flare_dlpack_tensor&)) {
    alignas(16) static float data[8];
    flare_dlpack_tensor t = tensor_of(data, FLARE_FP32, {2, 4}, {4, 1});
    change(t);
    int64_t holds = 0;
    void* managed = data;
    const int32_t got = flare_dlpack_export(&t, kind, &holds, &managed);
    EXPECT(got == status, "%s: status %d, want %d", what, got, status);
    EXPECT(last_error().find(word) != std::string::npos, "%s: '%s' has no '%s'", what, last_error().c_str(), word);
    EXPECT(holds == 0 && managed == data, "%s: nothing written", what);
}

void test_refused_exports() {
    const int32_t kind = FLARE_DLPACK_VERSIONED;
    using Tensor = flare_dlpack_tensor;
    refuse_export("struct_size", kind, FLARE_ERROR_STRUCT_SIZE, "struct_size", [](Tensor& t) { t.struct_size = 16; });
    refuse_export("flags", kind, FLARE_ERROR_FLAGS, "0x10", [](Tensor& t) { t.flags = 16; });
    refuse_export("copied", kind, FLARE_ERROR_FLAGS, "0x2", [](Tensor& t) { t.flags = FLARE_DLPACK_COPIED; });
    refuse_export("device", kind, FLARE_ERROR_OPTION, "device is -2", [](Tensor& t) { t.device = -2; });
    refuse_export("pinned device", kind, FLARE_ERROR_OPTION, "pinned", [](Tensor& t) {
        t.device = 0;
        t.flags = FLARE_DLPACK_HOST_PINNED;
    });
    refuse_export("managed host", kind, FLARE_ERROR_OPTION, "managed", [](Tensor& t) { t.flags = FLARE_DLPACK_MANAGED; });
    refuse_export("kind", 7, FLARE_ERROR_OPTION, "kind is 7", [](Tensor&) {});
    refuse_export("dtype", kind, FLARE_ERROR_DTYPE, "dtype is 9", [](Tensor& t) { t.dtype = 9; });
    refuse_export("rank", kind, FLARE_UNSUPPORTED_SHAPE, "9 dimensions", [](Tensor& t) { t.rank = 9; });
    refuse_export("shape", kind, FLARE_ERROR_SHAPE, "shape[0]", [](Tensor& t) { t.shape[0] = -1; });
    refuse_export("stride", kind, FLARE_ERROR_STRIDE, "stride[1]", [](Tensor& t) { t.stride[1] = -1; });
    refuse_export("data", kind, FLARE_ERROR_NULL, "data", [](Tensor& t) { t.data = nullptr; });
    refuse_export("read-only", FLARE_DLPACK_LEGACY, FLARE_UNSUPPORTED_FEATURE, "read-only",
                  [](Tensor& t) { t.flags = FLARE_DLPACK_READ_ONLY; });
    void* managed = nullptr;
    const Tensor t = tensor_of(nullptr, FLARE_FP32, {0}, {1});
    EXPECT(flare_dlpack_export(nullptr, kind, nullptr, &managed) == FLARE_ERROR_NULL, "tensor");
    EXPECT(flare_dlpack_export(&t, kind, nullptr, nullptr) == FLARE_ERROR_NULL, "managed");
}

}  // namespace

int main() {
    test_round_trips();
    test_structs();
    test_holds();
    test_import();
    test_refused_imports();
    test_refused_exports();
    std::printf("dlpack_test: %d failures\n", g_failures);
    return g_failures == 0 ? 0 : 1;
}
