// What launching costs the host from C on a GPU: the twins of `flare bench --group host`. Prints the JSON that `--peers` reads.
//   nvcc -O2 -Icuda/include -o launch_device_bench cuda/bench/launch_device_bench.cu build/native/libflare.so
//   LD_LIBRARY_PATH=build/native ./launch_device_bench > launches.json
#include <cuda_runtime.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <vector>

#include "flare.h"

namespace {

constexpr int kRounds = 31;
constexpr int kLaunches = 256;

void print_median(int64_t batch, cudaStream_t stream, void* memory, bool last) {
    flare_attention_params p{};
    p.struct_size = sizeof(p);
    p.device = 0;
    p.stream = stream;
    p.dtype = FLARE_BF16;
    p.batch = batch;
    p.seqlen_q = p.seqlen_k = 1;
    p.heads_q = p.heads_kv = 1;
    p.head_dim_qk = p.head_dim_v = 64;
    p.mask = FLARE_MASK_CAUSAL;
    p.q = p.k = p.v = memory;
    p.out = static_cast<char*>(memory) + 4096;
    for (int64_t* stride : {&p.q_stride_b, &p.k_stride_b, &p.v_stride_b, &p.out_stride_b, &p.q_stride_s, &p.k_stride_s,
                            &p.v_stride_s, &p.out_stride_s, &p.q_stride_h, &p.k_stride_h, &p.v_stride_h, &p.out_stride_h}) {
        *stride = 64;
    }
    uint64_t bytes = 0;
    flare_attention_workspace(&p, &bytes);
    if (bytes > 0) {
        cudaMalloc(&p.workspace, bytes);
        p.workspace_bytes = bytes;
    }
    std::vector<double> times;
    for (int round = -3; round < kRounds; ++round) {
        const auto start = std::chrono::steady_clock::now();
        for (int i = 0; i < kLaunches; ++i) {
            if (flare_attention_forward(&p) != FLARE_OK) {
                char text[512];
                flare_last_error(text, sizeof(text));
                std::fprintf(stderr, "%s\n", text);
                std::exit(1);
            }
        }
        const std::chrono::duration<double, std::micro> time = std::chrono::steady_clock::now() - start;
        cudaStreamSynchronize(stream);
        if (round >= 0) {
            times.push_back(time.count() / kLaunches);
        }
    }
    std::sort(times.begin(), times.end());
    std::printf(" {\"row\": \"host: plan.launch, %s\", \"peer\": \"the call from C\", \"median_us\": %.4f}%s\n",
                batch == 0 ? "batch 0" : "one query and key", times[times.size() / 2], last ? "" : ",");
}

}  // namespace

int main() {
    cudaStream_t stream;
    void* memory;
    if (cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking) != cudaSuccess || cudaMalloc(&memory, 8192) != cudaSuccess) {
        std::fprintf(stderr, "no usable GPU\n");
        return 1;
    }
    std::printf("{\"results\": [\n");
    print_median(0, stream, memory, false);
    print_median(1, stream, memory, true);
    std::printf("]}\n");
    return 0;
}
