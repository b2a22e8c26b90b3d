// flare_mla_prefill and flare_mla_decode on the CPU against definitions in double: random mixtures of all options on
// every instruction set, then single edges.
#include "mla_cases.h"

using namespace mla_cases;

namespace {

template <class Problem>
void check(Problem& problem, const std::string& name) {
    problem.reference();
    for (const flare::cpu::Isa isa : kIsas) {
        flare::cpu::override_isa(isa);
        const std::string full = name + " " + flare::cpu::isa_name(isa);
        problem.run(0, full);
        const int32_t out_dtype = problem.p.out_dtype != 0 ? problem.p.out_dtype : problem.p.dtype;
        // Everything is computed in fp32 from the inputs as stored, so only the output's own rounding counts.
        problem.out.check_relative(out_bound(FLARE_FP32, out_dtype, 5e-6, 1.5e-3, 6e-3), full.c_str());
        if (problem.p.lse != nullptr) {
            problem.lse.check_absolute(1e-5, (full + " lse").c_str());
        }
        const std::vector<char> first_out = problem.out.snapshot();
        const std::vector<char> first_lse = problem.lse.snapshot();
        problem.run(1, full);
        EXPECT(first_out == problem.out.snapshot() && first_lse == problem.lse.snapshot(),
               "%s: bits depend on the thread count", full.c_str());
    }
    flare::cpu::override_isa(flare::cpu::Isa::kAvx512);
}

void test_random_mixtures(int count) {
    Random random(20260202);
    double worst = 0;
    for (int i = 0; i < count; ++i) {
        std::string name;
        const std::unique_ptr<Prefill> prefill = random_prefill(random, 0, &name);
        check(*prefill, "mixture " + std::to_string(i) + ": " + name);
        const std::unique_ptr<Decode> decode = random_decode(random, &name);
        check(*decode, "mixture " + std::to_string(i) + ": " + name);
        worst = std::max({worst, prefill->out.worst(), decode->out.worst()});
    }
    std::printf("%d mixtures: worst error %.2f of the bound\n", count, worst);
}

// More rows than one tile holds where there are few heads.
void test_tall_prefill() {
    Random random(11);
    std::string name;
    for (const int64_t n : {256, 300, 600}) {
        const std::unique_ptr<Prefill> prefill = random_prefill(random, n, &name);
        check(*prefill, "tall: " + name);
    }
}

void test_bad_indices() {
    Random random(12);
    std::string name;
    std::unique_ptr<Decode> decode;
    do {
        decode = random_decode(random, &name);
    } while (decode->p.topk_length == nullptr || decode->p.batch * decode->p.seqlen_q < 2);
    flare_mla_decode_params& p = decode->p;
    std::vector<int64_t> counts(static_cast<size_t>(p.batch * p.seqlen_q + 1), 0);
    counts[1] = p.topk + 1;
    decode->topk_length = Indices(p.index_dtype, counts);
    p.topk_length = decode->topk_length.data();
    uint64_t bytes = 0;
    EXPECT(flare_mla_decode_workspace(&p, &bytes) == FLARE_OK, "%s", last_error().c_str());
    decode->workspace.give(p, bytes);
    EXPECT(flare_mla_decode(&p) == FLARE_ERROR_INDEX, "topk_length beyond topk");
    EXPECT(last_error().find("topk_length[") != std::string::npos, "%s", last_error().c_str());
    do {
        decode = random_decode(random, &name);
    } while (decode->p.block_table == nullptr || decode->p.cu_seqlens_q != nullptr || decode->p.seqlen_q == 0 ||
             decode->p.seqlen_k == 0);
    std::vector<int64_t> lengths(static_cast<size_t>(decode->p.batch), decode->p.seqlen_k + 1);
    decode->lengths_k = Indices(decode->p.index_dtype, lengths);
    decode->p.seqlens_k = decode->lengths_k.data();
    EXPECT(flare_mla_decode_workspace(&decode->p, &bytes) == FLARE_OK, "%s", last_error().c_str());
    decode->workspace.give(decode->p, bytes);
    EXPECT(flare_mla_decode(&decode->p) == FLARE_ERROR_INDEX, "seqlens_k beyond seqlen_k");
    EXPECT(last_error().find("seqlens_k[0]") != std::string::npos, "%s", last_error().c_str());
}

}  // namespace

int main() {
    test_tall_prefill();
    test_bad_indices();
    test_random_mixtures(120);
    return finish("cpu_mla_test");
}
