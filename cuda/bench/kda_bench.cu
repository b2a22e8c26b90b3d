// KDA on one GPU: median times with L2 flushed, next to the compulsory bytes. Includes the kernels to time prepare and
// recurrence apart.
//   nvcc -std=c++17 -O3 -Isrc -Itests -gencode arch=compute_90a,code=sm_90a bench/kda_bench.cu src/kda/*_sm80.cu
//   src/kda/segments_sm90.cu -o kda_bench
#include "../src/kda/forward_sm90.cu"
#include "kda_support.cuh"

#include <algorithm>

using namespace kda_test;

namespace {

Buffer* flush = nullptr;

int32_t sm_count() {
    int count = 0;
    check(cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, 0), "attribute");
    return count;
}

template <typename F>
double median_ms(const F& launch, int repeats = 11) {
    cudaEvent_t start, stop;
    check(cudaEventCreate(&start), "event");
    check(cudaEventCreate(&stop), "event");
    std::vector<float> times;
    for (int i = 0; i < repeats + 2; ++i) {
        check(cudaMemsetAsync(flush->data, i, flush->bytes), "flush");
        check(cudaEventRecord(start), "event");
        launch();
        check(cudaEventRecord(stop), "event");
        check(cudaEventSynchronize(stop), "launch");
        float ms = 0.0f;
        check(cudaEventElapsedTime(&ms, start, stop), "event");
        if (i >= 2) {
            times.push_back(ms);
        }
    }
    check(cudaEventDestroy(start), "event");
    check(cudaEventDestroy(stop), "event");
    std::sort(times.begin(), times.end());
    return times[times.size() / 2];
}

void bench_forward(const char* name, const Case& c) {
    Inputs in(c);
    const KdaParams& p = in.p;
    KdaParams whole_sequences = p;  // not in segments
    whole_sequences.deterministic = 1;
    const size_t bytes = std::max({kda_forward_sm80_workspace(p), split_workspace(p), kda_forward_sm90_workspace(p)});
    Buffer workspace(bytes);
    uint8_t* const blocks = static_cast<uint8_t*>(workspace.data);
    const double whole = median_ms(
        [&] { check(static_cast<cudaError_t>(launch_kda_forward_sm90(p, blocks, bytes, nullptr)), "forward"); });
    const double serial = !runs_fused(p) || choose_segments(p, choose_layout(p)).tokens == 0
                              ? 0.0
                              : median_ms([&] { launch_kda_forward_sm90(whole_sequences, blocks, bytes, nullptr); }, 5);
    double fused = 0.0, split[4] = {}, prepare = 0.0, recurrence = 0.0;
    const auto time_fused = [&](auto anchors) {
        constexpr fused::Anchors kAnchors = decltype(anchors)::value;
        fused = median_ms([&] { launch_fused<__nv_bfloat16, kAnchors>(p, blocks, nullptr); }, 5);
        const int64_t units = c.sequences() * c.heads_v;
        for (int groups = 1; groups <= 2; ++groups) {  // without, with a hosted team
            if (units <= 60 * groups) {
                split[2 * groups - 2] =
                    median_ms([&] { launch_split<__nv_bfloat16, 0, kAnchors>(p, groups, blocks, nullptr); }, 5);
                split[2 * groups - 1] =
                    median_ms([&] { launch_split<__nv_bfloat16, 1, kAnchors>(p, groups, blocks, nullptr); }, 5);
            }
        }
    };
    if (runs_fused(p)) {
        if (choose_anchors(p) == fused::Anchors::kOne) {
            time_fused(std::integral_constant<fused::Anchors, fused::Anchors::kOne>());
        } else {
            time_fused(std::integral_constant<fused::Anchors, fused::Anchors::kPerHalf>());
        }
    }
    if (!runs_fused(p) || p.gate == Gate::kSoftplus) {  // the latter for comparison
        prepare = median_ms([&] { launch_kda_prepare_sm80(p, blocks, nullptr); }, 5);
        recurrence = median_ms([&] { launch_recurrence<__nv_bfloat16, 2>(p, blocks, nullptr); }, 5);
    }
    const double gigabytes = 1e-9 * (c.rows() * c.heads_v * 1282.0 + c.sequences() * c.heads_v * 131072.0);
    std::printf("%-22s %7.3f ms %-30s without segments %.3f fused %.3f split v64 %.3f %.3f v128 %.3f %.3f | prepare %.3f recurrence %.3f | %.2f TB/s, floor %.3f ms\n", name,
                whole, kda_forward_sm90_name(p), serial, fused, split[0], split[1], split[2], split[3], prepare, recurrence, gigabytes / whole, gigabytes / 4.27);
}

// The kernels for any card, on the same inputs.
void bench_portable(const char* name, const Case& c) {
    Inputs in(c);
    Buffer workspace(kda_forward_sm80_workspace(in.p));
    const double ms = median_ms([&] {
        check(static_cast<cudaError_t>(launch_kda_forward_sm80(in.p, sm_count(), workspace.data, nullptr)), "portable");
    });
    std::printf("portable %-25s %7.3f ms\n", name, ms);
}

// Token by token, as fp32 inputs run.
void bench_recurrent(const char* name, Case c) {
    c.dtype = c.gate_dtype = c.beta_dtype = DType::kFp32;
    Inputs in(c);
    const double ms =
        median_ms([&] { check(static_cast<cudaError_t>(launch_kda_recurrent_sm80(in.p, nullptr)), "recurrent"); }, 5);
    std::printf("recurrent %-24s %7.3f ms, fp32\n", name, ms);
}

void bench_decode(int64_t batch, int64_t tokens, DType state, StateLayout layout) {
    Case c;
    c.batch = batch;
    c.tokens = tokens;
    c.heads_qk = c.heads_v = 32;
    c.layout = layout;
    c.initial_dtype = c.final_dtype = state;
    Inputs in(c);
    KdaParams p = in.p;
    p.final_state = in.initial->data;
    const double ms =
        median_ms([&] { check(static_cast<cudaError_t>(launch_kda_decode_sm80(p, nullptr)), "decode"); }, 21);
    const double gigabytes = 1e-9 * batch * 32 * (32768.0 * element_bytes(state) + tokens * 1282.0);
    std::printf("decode B=%-4ld T=%ld %s %s  %8.1f us  %.2f TB/s\n", static_cast<long>(batch),
                static_cast<long>(tokens), state == DType::kFp32 ? "fp32" : "bf16",
                layout == StateLayout::kVK ? "V,K" : "K,V", 1e3 * ms, gigabytes / ms);
}

}  // namespace

// With an argument: one launch of the first row for a profiler.
int main(int argc, char**) {
    Buffer flush_buffer(size_t{256} << 20);
    flush = &flush_buffer;
    const auto row = [](int64_t batch, int64_t tokens, int64_t heads, std::vector<int64_t> lengths = {}) {
        Case c;
        c.batch = batch;
        c.tokens = tokens;
        c.heads_qk = c.heads_v = heads;
        c.lengths = std::move(lengths);
        return c;
    };
    const std::vector<int64_t> mixed{1300, 547, 2048, 963, 271, 3063};
    if (argc > 1) {
        Inputs in(row(1, 8192, 96));
        const size_t bytes = kda_forward_sm90_workspace(in.p);
        Buffer workspace(bytes);
        check(static_cast<cudaError_t>(launch_kda_forward_sm90(in.p, workspace.data, bytes, nullptr)), "forward");
        check(cudaDeviceSynchronize(), "forward");
        return 0;
    }
    bench_forward("8192, 96, 1", row(1, 8192, 96));
    bench_forward("8192, 96, 6 mixed", row(1, 8192, 96, mixed));
    bench_forward("8192, 96, 8x1024", row(1, 8192, 96, std::vector<int64_t>(8, 1024)));
    bench_forward("8192, 64, 1", row(1, 8192, 64));
    bench_forward("8192, 64, 6 mixed", row(1, 8192, 64, mixed));
    bench_forward("8192, 64, 8x1024", row(1, 8192, 64, std::vector<int64_t>(8, 1024)));
    bench_forward("8192, 32, 1", row(1, 8192, 32));
    bench_forward("8192, 16, 1", row(1, 8192, 16));
    bench_forward("8192, 32, 8x1024", row(1, 8192, 32, std::vector<int64_t>(8, 1024)));
    bench_forward("B=8 x 2048, 32", row(8, 2048, 32));
    bench_forward("B=64 x 512, 32", row(64, 512, 32));
    bench_forward("65536, 32, 1", row(1, 65536, 32));
    bench_forward("65536, 32, 16x4096", row(1, 65536, 32, std::vector<int64_t>(16, 4096)));
    Case soft = row(1, 8192, 96);
    soft.gate = Gate::kSoftplus;
    bench_forward("8192, 96, 1, softplus", soft);
    for (const int64_t heads : {1, 2, 4, 8, 16}) {
        const std::string name = ", " + std::to_string(heads) + ", 1";
        bench_forward(("65536" + name).c_str(), row(1, 65536, heads));
        bench_forward(("8192" + name).c_str(), row(1, 8192, heads));
        soft = row(1, 65536, heads);
        soft.gate = Gate::kSoftplus;
        bench_forward(("65536" + name + ", softplus").c_str(), soft);
    }
    soft = row(1, 8192, 96);
    soft.gate = Gate::kSoftplus;
    bench_portable("8192, 96, 1", row(1, 8192, 96));
    bench_portable("8192, 96, 6 mixed", row(1, 8192, 96, mixed));
    bench_portable("8192, 96, 8x1024", row(1, 8192, 96, std::vector<int64_t>(8, 1024)));
    bench_portable("8192, 64, 1", row(1, 8192, 64));
    bench_portable("8192, 16, 1", row(1, 8192, 16));
    bench_portable("64 x 512, 32", row(64, 512, 32));
    bench_portable("8192, 96, 1, softplus", soft);
    bench_recurrent("8192, 96, 1", row(1, 8192, 96));
    bench_recurrent("64 x 512, 32", row(64, 512, 32));
    for (int64_t batch : {1, 64, 256}) {
        bench_decode(batch, 1, DType::kFp32, StateLayout::kVK);
    }
    bench_decode(256, 1, DType::kFp32, StateLayout::kKV);
    bench_decode(256, 1, DType::kBf16, StateLayout::kVK);
    bench_decode(256, 1, DType::kBf16, StateLayout::kKV);
    bench_decode(256, 4, DType::kFp32, StateLayout::kVK);
    return 0;
}
