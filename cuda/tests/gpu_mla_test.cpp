// MLA on CUDA against the CPU backend, through flare.h: random mixtures of all options, forced portable and automatic. Outputs
// and workspace are poisoned, unused input is NaN, each call runs twice and must give equal bits. Ends with status 77 (skipped)
// where there is no usable GPU.
//
//   gpu_mla_test [mixtures [seed]]
#include "mla_cases.h"

#if defined(FLARE_HAVE_CUDA)
#include <cuda_runtime_api.h>

#include <cstdlib>

using namespace mla_cases;

namespace {

double g_worst = 0;
int g_cases = 0;

void check_cuda(cudaError_t error, const char* what) {
    if (error != cudaSuccess) {
        std::printf("FAIL %s: %s\n", what, cudaGetErrorString(error));
        std::exit(1);
    }
}

// Device copies of one problem's memory.
class Copies {
  public:
    Copies() = default;
    Copies(const Copies&) = delete;
    Copies& operator=(const Copies&) = delete;
    ~Copies() {
        for (void* memory : memories_) {
            cudaFree(memory);
        }
    }

    void* make(const void* host, int64_t bytes) {
        void* memory = nullptr;
        check_cuda(cudaMalloc(&memory, static_cast<size_t>(bytes) + 256), "cudaMalloc");
        memories_.push_back(memory);
        if (host != nullptr && bytes > 0) {
            check_cuda(cudaMemcpy(memory, host, static_cast<size_t>(bytes), cudaMemcpyHostToDevice), "upload");
        }
        return memory;
    }

    // Replaces a host pointer, if there is one.
    template <typename T>
    void move(const T*& field, int64_t bytes) {
        field = field != nullptr ? static_cast<const T*>(make(field, bytes)) : nullptr;
    }

  private:
    std::vector<void*> memories_;
};

void move_inputs(Prefill& x, flare_mla_prefill_params& p, Copies& copies) {
    copies.move(p.q_nope, x.q_nope.bytes());
    copies.move(p.q_rope, x.q_rope.bytes());
    copies.move(p.c_kv, x.c_kv.bytes());
    copies.move(p.k_rope, x.k_rope.bytes());
    copies.move(p.w_uk, x.w_uk.bytes());
    copies.move(p.w_uv, x.w_uv.bytes());
    copies.move(p.cu_seqlens_q, x.cu_q.bytes());
    copies.move(p.cu_seqlens_k, x.cu_k.bytes());
    copies.move(p.seqused_q, x.used_q.bytes());
    copies.move(p.seqused_k, x.used_k.bytes());
    copies.move(p.block_table, x.table.bytes());
}

void move_inputs(Decode& x, flare_mla_decode_params& p, Copies& copies) {
    copies.move(p.q, x.q.bytes());
    copies.move(p.q_rope, x.q_rope.bytes());
    copies.move(p.kv, x.kv.bytes());
    copies.move(p.w_uk, x.w_uk.bytes());
    copies.move(p.w_uv, x.w_uv.bytes());
    copies.move(p.cu_seqlens_q, x.cu_q.bytes());
    copies.move(p.seqlens_k, x.lengths_k.bytes());
    copies.move(p.block_table, x.table.bytes());
    copies.move(p.indices, x.indices.bytes());
    copies.move(p.topk_length, x.topk_length.bytes());
    copies.move(p.sink, static_cast<int64_t>(x.sink.size()) * 4);
}

constexpr int32_t operation_of(const Prefill&) {
    return FLARE_OP_MLA_PREFILL;
}
constexpr int32_t operation_of(const Decode&) {
    return FLARE_OP_MLA_DECODE;
}
int32_t call(const flare_mla_prefill_params& p) {
    return flare_mla_prefill(&p);
}
int32_t call(const flare_mla_decode_params& p) {
    return flare_mla_decode(&p);
}
int32_t workspace_of(const flare_mla_prefill_params& p, uint64_t* bytes) {
    return flare_mla_prefill_workspace(&p, bytes);
}
int32_t workspace_of(const flare_mla_decode_params& p, uint64_t* bytes) {
    return flare_mla_decode_workspace(&p, bytes);
}

bool multiples_of_8(std::initializer_list<int64_t> sizes) {
    return std::all_of(sizes.begin(), sizes.end(), [](int64_t x) { return x % 8 == 0; });
}

// The portable kernel that a problem has to run.
bool on_tensor_cores(const flare_mla_prefill_params& p) {
    return p.dtype != FLARE_FP32 && p.d_c <= 512 && p.d_rope <= 64 &&
           multiples_of_8({p.d_nope, p.d_rope, p.d_c, p.d_v, p.q_nope_stride_h, p.out_stride_h, p.w_uk_stride_r,
                           p.w_uv_stride_r, p.latent_dtype == FLARE_UINT8 ? 0 : p.c_kv_stride_s,
                           p.d_rope > 0 ? p.q_rope_stride_h : 0, p.k_rope != nullptr ? p.k_rope_stride_s : 0});
}
const char* portable_kernel(const flare_mla_prefill_params& p) {
    if (!on_tensor_cores(p)) {
        return "mla_prefill_sm80_plain";
    }
    const bool tall = p.seqlen_q > 128 && 3 * p.seqlen_q > (p.d_c + 31) / 32 * 32 && p.d_nope <= 128 && p.d_v <= 128 &&
                      p.latent_dtype != FLARE_UINT8;
    return tall                         ? "mla_prefill_sm80_up_project"
           : p.seqlen_q * p.heads <= 16 ? "mla_prefill_sm80_absorbed_r16"
                                        : "mla_prefill_sm80_absorbed_r32";
}
const char* portable_kernel(const flare_mla_decode_params& p) {
    const bool sparse = p.indices != nullptr;
    const bool good = p.dtype != FLARE_FP32 && p.d_c <= 512 && p.d_rope <= 64 &&
                      multiples_of_8({p.d_rope, p.d_c, p.w_uk != nullptr ? p.d_nope : 0, p.w_uv != nullptr ? p.d_v : 0,
                                      p.q_stride_h, p.out_stride_h, p.kv_dtype == FLARE_UINT8 ? 0 : p.kv_stride_s,
                                      p.w_uk != nullptr ? p.w_uk_stride_r : 0, p.w_uv != nullptr ? p.w_uv_stride_r : 0});
    return !good                                       ? "mla_decode_sm80_plain"
           : (sparse ? 1 : p.seqlen_q) * p.heads <= 16 ? "mla_decode_sm80_r16"
                                                       : "mla_decode_sm80_r32";
}

// What the CPU wrote must be there within the bound; what it left alone must be untouched.
double compare(Output& cpu, const std::vector<char>& gpu, bool relative, const std::string& what) {
    const int32_t dtype = cpu.dtype();
    const int64_t size = bytes_of(dtype);
    double difference = 0;
    double norm = 0;
    double worst = 0;
    for (int64_t i = 0; i < cpu.count(); ++i) {
        const char* element = cpu.data() + i * size;
        const double want = read(cpu.data(), dtype, i);
        const double got = read(gpu.data(), dtype, i);
        // In fp16 the poison is -0.022, which a result may be.
        if (std::all_of(element, element + size, [](char byte) { return byte == static_cast<char>(0xa5); }) &&
            !(std::fabs(got - want) <= 0.1 * std::fabs(want))) {
            EXPECT(false, "%s[%lld] was written", what.c_str(), static_cast<long long>(i));
            continue;
        }
        if (got == want) {
            norm += std::isfinite(want) ? want * want : 0;
            continue;
        }
        const double d = std::fabs(got - want);
        worst = std::isfinite(d) ? std::max(worst, d / std::max(1.0, std::fabs(want) / 8)) : HUGE_VAL;
        difference += d * d;
        norm += want * want;
    }
    if (!std::isfinite(difference) || worst == HUGE_VAL) {
        return HUGE_VAL;
    }
    return relative ? std::sqrt(difference) / (norm > 0 ? std::sqrt(norm) : 1.0) : worst;
}

template <class Problem>
void check(Problem& problem, int32_t kernel, const std::string& name) {
    auto p = problem.p;
    Copies copies;
    move_inputs(problem, p, copies);
    p.device = 0;
    p.kernel = kernel;
    p.out = copies.make(nullptr, problem.out.bytes());
    p.lse = p.lse != nullptr ? static_cast<float*>(copies.make(nullptr, problem.lse.bytes())) : nullptr;
    char running[128] = "?";
    EXPECT(flare_kernel_name(operation_of(problem), &p, running, sizeof(running)) == FLARE_OK, "%s: %s", name.c_str(),
           last_error().c_str());
    const std::string what = name + " [" + running + "]";
    if (kernel == FLARE_KERNEL_PORTABLE) {
        EXPECT(std::string(running) == portable_kernel(problem.p), "%s: want %s", what.c_str(), portable_kernel(problem.p));
    }
    uint64_t bytes = 0;
    EXPECT(workspace_of(p, &bytes) == FLARE_OK, "%s: %s", what.c_str(), last_error().c_str());
    p.workspace_bytes = bytes;
    p.workspace = copies.make(nullptr, static_cast<int64_t>(bytes));
    std::vector<char> out(static_cast<size_t>(problem.out.bytes()));
    std::vector<char> lse(p.lse != nullptr ? static_cast<size_t>(problem.lse.bytes()) : 0);
    for (int run = 0; run < 2; ++run) {
        check_cuda(cudaMemset(p.workspace, 0xff, bytes + 256), "cudaMemset");
        check_cuda(cudaMemset(p.out, 0xa5, out.size()), "cudaMemset");
        if (!lse.empty()) {
            check_cuda(cudaMemset(p.lse, 0xa5, lse.size()), "cudaMemset");
        }
        EXPECT(call(p) == FLARE_OK, "%s: %s", what.c_str(), last_error().c_str());
        check_cuda(cudaDeviceSynchronize(), what.c_str());
        std::vector<char> again(out.size());
        check_cuda(cudaMemcpy(again.data(), p.out, out.size(), cudaMemcpyDeviceToHost), "download");
        EXPECT(run == 0 || again == out, "%s: bits differ between two calls", what.c_str());
        out = again;
    }
    if (!lse.empty()) {
        check_cuda(cudaMemcpy(lse.data(), p.lse, lse.size(), cudaMemcpyDeviceToHost), "download");
    }
    const int32_t out_dtype = problem.p.out_dtype != 0 ? problem.p.out_dtype : problem.p.dtype;
    const double bound = out_bound(problem.p.dtype, out_dtype, 5e-6, 1.5e-3, 6e-3);
    const double error = compare(problem.out, out, true, what);
    EXPECT(error <= bound, "%s: relative error %.3g, allowed %.3g", what.c_str(), error, bound);
    g_worst = std::max(g_worst, error / bound);
    if (!lse.empty()) {
        const double lse_bound = out_bound(problem.p.dtype, problem.p.dtype, 1e-5, 1e-3, 2e-3);
        const double lse_error = compare(problem.lse, lse, false, what + " lse");
        EXPECT(lse_error <= lse_bound, "%s: lse error %.3g, allowed %.3g", what.c_str(), lse_error, lse_bound);
    }
    ++g_cases;
    if (std::getenv("FLARE_TEST_VERBOSE") != nullptr) {
        std::printf("%.2f %s\n", error / bound, what.c_str());
    }
}

// 656-byte rows, 64 heads, two requests of which one is cut into some 110 pieces: more than rows of a piece's width fit into a
// block's buffers at a time.
std::unique_ptr<Decode> many_pieces(Random& random) {
    auto problem = std::make_unique<Decode>();
    flare_mla_decode_params& p = problem->p;
    p.struct_size = sizeof(p);
    p.device = FLARE_DEVICE_CPU;
    p.dtype = FLARE_BF16;
    p.kv_dtype = FLARE_UINT8;
    p.batch = 2;
    p.heads = 64;
    p.seqlen_q = 1;
    p.seqlen_k = 220 * 64;
    p.d_c = 512;
    p.d_rope = 64;
    p.d_nope = 128;
    problem->lengths_k = Indices(0, {p.seqlen_k, 44 * 64 - 5});
    p.seqlens_k = problem->lengths_k.data();
    p.kv_stride_s = kRow;
    p.kv_stride_b = p.seqlen_k * kRow;
    p.q_stride_h = p.d_c + p.d_rope;
    p.q_stride_s = p.q_stride_b = p.heads * p.q_stride_h;
    p.out_stride_h = p.d_c;
    p.out_stride_s = p.out_stride_b = p.heads * p.d_c;
    p.lse_stride_h = 1;
    p.lse_stride_b = p.heads;
    problem->q = Data(p.dtype, p.batch * p.q_stride_b);
    problem->q_rope = Data(p.dtype, 1);
    problem->q.set_random(0, p.batch * p.q_stride_b, random);
    problem->kv = Data(FLARE_UINT8, p.batch * p.kv_stride_b);
    for (int64_t b = 0; b < p.batch; ++b) {
        for (const int64_t row : problem->visible(b, 0, 1)) {
            fill656(problem->kv.data() + row, random);
        }
    }
    problem->out = Output(p.dtype, p.batch * p.out_stride_b);
    problem->lse = Output(FLARE_FP32, p.batch * p.lse_stride_b);
    p.q = problem->q.data();
    p.kv = problem->kv.data();
    p.out = problem->out.data();
    p.lse = reinterpret_cast<float*>(problem->lse.data());
    return problem;
}

template <class Problem>
void check_both(Problem& problem, const std::string& name) {
    problem.run(0, name);
    check(problem, FLARE_KERNEL_PORTABLE, name);
    check(problem, FLARE_KERNEL_AUTO, name);
}

}  // namespace

int main(int argc, char** argv) {
    int count = 0;
    if (cudaGetDeviceCount(&count) != cudaSuccess || count == 0) {
        std::printf("gpu_mla_test: skipped, no CUDA device here\n");
        return 77;
    }
    const int mixtures = argc > 1 ? std::atoi(argv[1]) : 120;
    Random random(argc > 2 ? std::strtoull(argv[2], nullptr, 10) : 31);
    for (int i = 0; i < mixtures; ++i) {
        std::string name;
        const std::unique_ptr<Prefill> prefill = random_prefill(random, 0, &name, Grid::kDevice);
        check_both(*prefill, "mixture " + std::to_string(i) + ": " + name);
        const std::unique_ptr<Decode> decode = random_decode(random, &name, Grid::kDevice);
        check_both(*decode, "mixture " + std::to_string(i) + ": " + name);
    }
    for (const int64_t n : {600, 1000}) {  // several row tiles of the up-projecting kernels
        std::string name;
        const std::unique_ptr<Prefill> prefill = random_prefill(random, n, &name, Grid::kDevice);
        check_both(*prefill, "tall: " + name);
    }
    check_both(*many_pieces(random), "many pieces");
    std::printf("%d mixtures, %d calls: worst error %.2f of the bound\n", mixtures, g_cases, g_worst);
    return finish("gpu_mla_test");
}

#else

int main() {
    std::printf("gpu_mla_test: skipped, built without CUDA\n");
    return 77;
}

#endif
