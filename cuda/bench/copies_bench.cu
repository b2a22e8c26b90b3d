// Rates of cudaMemcpyAsync from C, the yardstick of `flare bench --group copies`: 256 MiB both ways, pinned and pageable memory,
// medians of event times. Prints the JSON that `flare bench --peers` reads.
//   nvcc -O2 -o copies_bench cuda/bench/copies_bench.cu && ./copies_bench > copies.json
#include <cuda_runtime.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <vector>

namespace {

constexpr size_t kBytes = size_t{256} << 20;
constexpr int kCopies = 21;

void check(cudaError_t error, const char* what) {
    if (error != cudaSuccess) {
        std::fprintf(stderr, "%s: %s\n", what, cudaGetErrorString(error));
        std::exit(1);
    }
}

double median_us(void* to, const void* from, cudaMemcpyKind kind, cudaStream_t stream) {
    cudaEvent_t begin, end;
    check(cudaEventCreate(&begin), "event");
    check(cudaEventCreate(&end), "event");
    std::vector<float> times;
    for (int i = -3; i < kCopies; ++i) {
        check(cudaEventRecord(begin, stream), "record");
        check(cudaMemcpyAsync(to, from, kBytes, kind, stream), "copy");
        check(cudaEventRecord(end, stream), "record");
        check(cudaEventSynchronize(end), "wait");
        float ms;
        check(cudaEventElapsedTime(&ms, begin, end), "elapsed");
        if (i >= 0) {
            times.push_back(ms);
        }
    }
    check(cudaEventDestroy(begin), "event");
    check(cudaEventDestroy(end), "event");
    std::sort(times.begin(), times.end());
    return 1e3 * times[times.size() / 2];
}

}  // namespace

int main() {
    cudaStream_t stream;
    check(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "stream");
    void* device;
    void* pinned;
    check(cudaMalloc(&device, kBytes), "device memory");
    check(cudaMallocHost(&pinned, kBytes), "pinned memory");
    void* pageable = std::malloc(kBytes);
    std::memset(pageable, 1, kBytes);
    std::memset(pinned, 2, kBytes);
    cudaDeviceProp properties;
    check(cudaGetDeviceProperties(&properties, 0), "device");
    std::printf("{\"environment\": {\"gpu\": \"%s\"}, \"results\": [\n", properties.name);
    const auto row = [](const char* name, double us, const char* rest) {
        std::printf(" {\"row\": \"copies %s\", \"peer\": \"cudaMemcpyAsync in C\", \"median_us\": %.3f}%s\n", name, us, rest);
    };
    row("host to device, pinned", median_us(device, pinned, cudaMemcpyHostToDevice, stream), ",");
    row("device to host, pinned", median_us(pinned, device, cudaMemcpyDeviceToHost, stream), ",");
    row("host to device, pageable", median_us(device, pageable, cudaMemcpyHostToDevice, stream), ",");
    row("device to host, pageable", median_us(pageable, device, cudaMemcpyDeviceToHost, stream), "");
    std::printf("]}\n");
    return 0;
}
