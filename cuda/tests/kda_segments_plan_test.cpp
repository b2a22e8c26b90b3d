// When KDA on Hopper runs segments of a sequence side by side, and how long they are: from sizes alone, without a GPU.
#include <cstdio>

#if defined(FLARE_HAVE_CUDA)
#include <cstdint>

#include "kda/segments_plan.h"

namespace {

using namespace flare::kda;

int failures = 0;

void check(bool ok, const char* what, int line) {
    if (!ok) {
        ++failures;
        std::printf("FAIL line %d: %s\n", line, what);
    }
}
#define CHECK(condition) check(condition, #condition, __LINE__)

KdaParams dense(int64_t batch, int64_t tokens, int64_t heads) {
    KdaParams p{};
    p.num_sequences = batch;
    p.seqlen = tokens;
    p.heads_qk = p.heads_v = heads;
    p.head_dim_k = p.head_dim_v = 128;
    return p;
}

KdaParams packed(int64_t sequences, int64_t tokens, int64_t heads) {
    static const int32_t anywhere = 0;
    KdaParams p = dense(sequences, tokens, heads);
    p.cu_seqlens = &anywhere;
    return p;
}

constexpr SegmentCosts kCosts{27000, 2800, 1010};

// What the split form takes where values are halved: 680 ns a chunk.
SegmentPlan plan(const KdaParams& p) {
    return plan_segments(p, kCosts, 16000 + mean_tokens(p) / 32 * 680);
}

int64_t segments(const KdaParams& p) {
    const int64_t tokens = plan(p).tokens;
    return tokens == 0 ? 1 : (p.seqlen + tokens - 1) / tokens;
}

void test_sizes() {
    // As many as the SMs hold at a time: two blocks for all segments but one.
    CHECK(segments(dense(1, 65536, 16)) == 5);
    CHECK(segments(dense(1, 65536, 8)) == 9);
    CHECK(segments(dense(2, 65536, 4)) == 9);
    CHECK(segments(dense(1, 65536, 4)) == 17);
    // Fewer where the scan would cost what they save.
    CHECK(segments(dense(1, 65536, 1)) > 30 && segments(dense(1, 65536, 1)) < 67);
    CHECK(segments(dense(1, 8192, 1)) > 8 && segments(dense(1, 8192, 1)) < 32);
    for (const int64_t heads : {1, 2, 3, 5, 8, 13, 16}) {
        for (const int64_t tokens : {4096, 8191, 30000, 65536, 1048576}) {
            const KdaParams p = dense(1, tokens, heads);
            CHECK(plan(p).tokens % 32 == 0 && plan(p).tokens < tokens);
            CHECK(2 * heads * (segments(p) - 1) <= 132);
        }
    }
}

void test_none() {
    KdaParams p = dense(1, 65536, 4);
    CHECK(plan(p).tokens > 0);
    p.deterministic = 1;  // cuts follow from the length and from how many units there are
    CHECK(plan(p).tokens == 0);
    p = dense(1, 65536, 4);
    p.head_dim_k = p.head_dim_v = 64;
    CHECK(plan(p).tokens == 0);
    // Short ones, and units that fill the SMs by themselves.
    CHECK(plan(dense(1, 0, 4)).tokens == 0);
    CHECK(plan(dense(1, 333, 2)).tokens == 0);
    CHECK(plan(dense(1, 1024, 1)).tokens == 0);
    CHECK(plan(dense(0, 65536, 4)).tokens == 0);
    CHECK(plan(dense(1, 65536, 32)).tokens == 0);
    CHECK(plan(dense(1, 65536, 96)).tokens == 0);
    CHECK(plan(dense(64, 512, 32)).tokens == 0);
    // Whatever is quicker without.
    CHECK(plan_segments(dense(1, 65536, 4), kCosts, 300000).tokens == 0);
    CHECK(plan_segments(dense(1, 65536, 4), kCosts, 500000).tokens > 0);
}

void test_packed() {
    // One sequence is one sequence; several are planned for their mean length.
    CHECK(plan(packed(1, 65536, 8)).tokens == plan(dense(1, 65536, 8)).tokens);
    CHECK(plan(packed(2, 131072, 4)).tokens == plan(dense(2, 65536, 4)).tokens);
    CHECK(mean_tokens(packed(3, 9600, 1)) == 3200);
    CHECK(mean_tokens(packed(0, 0, 1)) == 0);
    // Slots hold every segment wherever sequences begin.
    const int64_t lengths[] = {5000, 0, 1, 255, 256, 257, 12345};
    KdaParams p = packed(7, 0, 1);
    for (const int64_t length : lengths) {
        p.seqlen += length;
    }
    int64_t begin = 0, free = 0;
    for (int64_t n = 0; n < 7; ++n) {
        const int64_t first = begin / 256 + n;
        CHECK(first >= free);
        free = first + (lengths[n] + 255) / 256;
        begin += lengths[n];
    }
    CHECK(free <= segment_slots(p, 256));
    CHECK(segment_slots(dense(3, 1000, 1), 256) == 12);
}

}  // namespace

int main() {
    test_sizes();
    test_none();
    test_packed();
    std::printf("kda_segments_plan_test: %d failures\n", failures);
    return failures == 0 ? 0 : 1;
}

#else

int main() {
    std::printf("kda_segments_plan_test: skipped, built without CUDA\n");
    return 77;
}

#endif
