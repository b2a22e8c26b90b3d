// What the portable attention path decides from sizes and options alone, without a GPU: kernel, tiles, splits, workspace, and
// when it's taken although the Hopper kernel could run.
#include <cstdint>
#include <cstdio>

#include "attention/plan_sm80.h"

namespace {

using namespace flare::attention;

int failures = 0;

void check(bool ok, const char* what, int line) {
    if (!ok) {
        ++failures;
        std::printf("FAIL line %d: %s\n", line, what);
    }
}
#define CHECK(condition) check(condition, #condition, __LINE__)

FwdParams dense(int32_t batch, int32_t seqlen_q, int32_t seqlen_k, int32_t heads_q, int32_t heads_kv, int32_t head_dim) {
    FwdParams p{};
    p.dtype = p.out_dtype = DType::kBf16;
    p.batch = batch;
    p.seqlen_q = seqlen_q;
    p.seqlen_k = seqlen_k;
    p.heads_q = heads_q;
    p.heads_kv = heads_kv;
    p.head_dim = p.head_dim_v = head_dim;
    p.window_left = p.window_right = -1;
    p.scale = 0.125f;
    p.sm_count = 132;
    p.q_stride = p.o_stride = {int64_t{seqlen_q} * heads_q * head_dim, int64_t{heads_q} * head_dim, head_dim};
    p.k_stride = p.v_stride = {int64_t{seqlen_k} * heads_kv * head_dim, int64_t{heads_kv} * head_dim, head_dim};
    return p;
}

void test_kernels() {
    const FwdParams prefill = dense(2, 1000, 1000, 8, 8, 128);
    CHECK(plan_sm80(prefill).kernel == Sm80Kernel::kTile);
    CHECK(plan_sm80(prefill).num_splits == 1);
    for (int32_t d : {64, 96, 128, 192, 256}) {
        CHECK(plan_sm80(dense(4, 1000, 1000, 8, 8, d)).kernel == Sm80Kernel::kTile);
    }
    CHECK(plan_sm80(dense(1, 1000, 1000, 8, 8, 80)).kernel == Sm80Kernel::kGeneral);
    CHECK(plan_sm80(dense(1, 1000, 1000, 8, 8, 80)).head_dim == 128);
    CHECK(plan_sm80(dense(1, 1000, 1000, 8, 8, 264)).kernel == Sm80Kernel::kFma);
    CHECK(plan_sm80(dense(1, 1000, 1000, 8, 8, 77)).kernel == Sm80Kernel::kFma);

    FwdParams p = prefill;
    p.dtype = p.out_dtype = DType::kFp32;
    CHECK(plan_sm80(p).kernel == Sm80Kernel::kFma);
    p = prefill;
    p.k_stride.row += 1;
    CHECK(plan_sm80(p).kernel == Sm80Kernel::kFma);
    p = prefill;
    p.softcap = 30.0f;
    CHECK(plan_sm80(p).kernel == Sm80Kernel::kGeneral);
    p = prefill;
    p.scale = -1.0f;
    CHECK(plan_sm80(p).kernel == Sm80Kernel::kGeneral);
    p = prefill;
    p.out_dtype = DType::kFp32;
    CHECK(plan_sm80(p).kernel == Sm80Kernel::kGeneral);
    p = prefill;
    p.num_splits = 3;
    CHECK(plan_sm80(p).kernel == Sm80Kernel::kGeneral && plan_sm80(p).num_splits == 3);

    // Rows of a group: 16 and fewer decode, up to 64 share a tile.
    CHECK(plan_sm80(dense(1, 2, 4096, 32, 4, 128)).kernel == Sm80Kernel::kDecode);
    CHECK(plan_sm80(dense(1, 3, 4096, 32, 4, 128)).kernel == Sm80Kernel::kGeneral);
    CHECK(plan_sm80(dense(1, 3, 4096, 32, 4, 128)).group == 8);
    CHECK(plan_sm80(dense(1, 8, 4096, 32, 4, 128)).num_m == 1);
    CHECK(plan_sm80(dense(1, 0, 4096, 32, 4, 128)).num_m == 0);
    // More: together and in splits while that fills the device better, then apart.
    CHECK(plan_sm80(dense(1, 9, 4096, 32, 4, 128)).group == 8);
    CHECK(plan_sm80(dense(1, 9, 4096, 32, 4, 128)).num_m == 2);
    CHECK(plan_sm80(dense(1, 9, 4096, 32, 4, 128)).num_splits > 1);
    CHECK(plan_sm80(dense(1, 100, 4096, 4, 4, 128)).kernel == Sm80Kernel::kGeneral);
    CHECK(plan_sm80(dense(16, 128, 4096, 32, 4, 128)).kernel == Sm80Kernel::kTile);
    CHECK(plan_sm80(dense(16, 128, 4096, 32, 4, 128)).num_splits == 1);
    CHECK(plan_sm80(dense(1, 2000, 4096, 4, 4, 128)).kernel == Sm80Kernel::kTile);
}

// Few visible keys a row: small tiles, so that little beyond them is computed.
void test_narrow_windows() {
    const auto rows_of_tile = [](FwdParams p, int32_t left, int32_t right) {
        p.window_left = left;
        p.window_right = right;
        const Sm80Plan plan = plan_sm80(p);
        return plan.kernel == Sm80Kernel::kTile ? plan.block_m : -1;
    };
    const FwdParams p = dense(1, 16384, 16384, 16, 16, 128);
    CHECK(rows_of_tile(p, -1, -1) == 128);
    CHECK(rows_of_tile(p, -1, 0) == 128);
    CHECK(rows_of_tile(p, 4095, 0) == 128);
    CHECK(rows_of_tile(p, 1023, 0) == 128);
    CHECK(rows_of_tile(p, 511, 0) == 64);
    CHECK(rows_of_tile(p, 256, 256) == 64);
    CHECK(rows_of_tile(dense(16, 1024, 1024, 16, 16, 128), -1, 0) == 64);
    const FwdParams narrow = dense(1, 16384, 16384, 32, 32, 64);
    CHECK(rows_of_tile(narrow, -1, -1) == 128);
    CHECK(rows_of_tile(narrow, 4095, 0) == 128);
    CHECK(rows_of_tile(narrow, 1023, 0) == 64);
    CHECK(rows_of_tile(dense(16, 1024, 1024, 32, 32, 64), -1, -1) == 64);
}

void test_splits() {
    // Few blocks: splits fill the device; many: none, or few.
    CHECK(plan_sm80(dense(1, 1, 131072, 32, 8, 128)).num_splits >= 16);
    CHECK(plan_sm80(dense(1, 1, 256, 32, 8, 128)).num_splits == 1);
    CHECK(plan_sm80(dense(512, 1, 8192, 32, 8, 128)).num_splits <= 4);
    FwdParams window = dense(1, 1, 131072, 32, 8, 128);
    window.window_left = 255;
    window.window_right = 0;
    CHECK(plan_sm80(window).num_splits == 1);

    // A deterministic result depends on nothing but its own keys: splits of one size.
    for (int32_t batch : {1, 7, 64}) {
        FwdParams p = dense(batch, 1, 10000, 32, 8, 128);
        p.deterministic = 1;
        CHECK(plan_sm80(p).split_keys == kDeterministicSplit);
        CHECK(plan_sm80(p).num_splits == 5);
    }
    FwdParams forced = dense(1, 1, 10000, 32, 8, 128);
    forced.num_splits = 1;
    CHECK(plan_sm80(forced).num_splits == 1 && sm80_workspace(forced) == 0);
}

void test_workspace() {
    CHECK(sm80_workspace(dense(8, 4096, 4096, 32, 8, 128)) == 0);
    for (int32_t seqlen_q : {1, 9, 128}) {
        uint64_t largest = 0;
        for (int32_t batch = 1; batch <= 300; ++batch) {
            FwdParams p = dense(batch, seqlen_q, 9000, 32, 8, 128);
            const Sm80Plan plan = plan_sm80(p);
            const uint64_t rows = uint64_t{32} * static_cast<uint64_t>(seqlen_q) * static_cast<uint64_t>(batch);
            const uint64_t used = plan.num_splits > 1 ? rows * static_cast<uint64_t>(plan.num_splits) * (128 + 1) * 4 : 0;
            CHECK(sm80_workspace(p) >= used);
            CHECK(sm80_workspace(p) >= largest);  // what serves a batch serves smaller ones
            largest = sm80_workspace(p);
            p.num_splits = 7;
            CHECK(sm80_workspace(p) >= rows * 7 * (128 + 1) * 4);
            p.num_splits = 0;
            p.deterministic = 1;
            CHECK(seqlen_q > 9 || sm80_workspace(p) >= rows * 5 * (128 + 1) * 4);
        }
    }
}

void test_choice_on_hopper() {
    CHECK(sm80_is_faster(dense(64, 1, 8192, 32, 8, 128)));
    CHECK(sm80_is_faster(dense(1, 1, 100, 32, 32, 64)));
    CHECK(sm80_is_faster(dense(1, 5, 8192, 32, 8, 128)));
    // Heads of a group in one tile, splits on all SMs; until Hopper's own tiles are full and enough.
    CHECK(sm80_is_faster(dense(1, 64, 8192, 8, 1, 128)));
    CHECK(sm80_is_faster(dense(1, 16, 32768, 64, 8, 128)));
    CHECK(!sm80_is_faster(dense(1, 128, 32768, 64, 8, 128)));
    CHECK(sm80_is_faster(dense(4, 16, 4096, 64, 8, 128)));
    CHECK(!sm80_is_faster(dense(16, 16, 4096, 64, 8, 128)));
    CHECK(!sm80_is_faster(dense(16, 64, 4096, 64, 8, 128)));
    CHECK(sm80_is_faster(dense(4, 8, 4096, 64, 8, 256)));
    CHECK(!sm80_is_faster(dense(1, 16, 1024, 64, 8, 128)));
    CHECK(sm80_is_faster(dense(1, 64, 16384, 4, 4, 128)));
    CHECK(!sm80_is_faster(dense(1, 512, 512, 16, 16, 128)));
    FwdParams forced = dense(1, 16, 32768, 64, 8, 128);
    forced.num_splits = 1;
    CHECK(!sm80_is_faster(forced));
    // Which kernel makes a deterministic result doesn't depend on the batch.
    for (int32_t rows : {1, 4, 8, 9, 40, 128}) {
        for (int32_t batch : {1, 3, 20, 300}) {
            FwdParams one = dense(1, rows, 5000, 32, 4, 128);
            one.deterministic = 1;
            FwdParams many = dense(batch, rows, 5000, 32, 4, 128);
            many.deterministic = 1;
            CHECK(plan_sm80(one).kernel == plan_sm80(many).kernel);
            CHECK(plan_sm80(one).num_splits == plan_sm80(many).num_splits);
            CHECK(sm80_is_faster(one) == sm80_is_faster(many));
        }
    }
    FwdParams fp8 = dense(64, 1, 8192, 32, 8, 128);  // fp32 arithmetic is slower than anything
    fp8.dtype = DType::kFp8E4m3;
    CHECK(!sm80_is_faster(fp8));
    CHECK(!sm80_is_faster(dense(4, 4096, 4096, 16, 16, 128)));
}

// Heads joined in a tile of the Hopper kernel: where that saves a round.
void test_joined_heads() {
    CHECK(sm90_joined_heads(dense(16, 16, 4096, 64, 8, 128), 128, 132) == 3);
    CHECK(sm90_joined_heads(dense(16, 64, 4096, 64, 8, 128), 128, 132) == 3);
    CHECK(sm90_joined_heads(dense(16, 128, 4096, 64, 8, 128), 128, 132) == 0);  // tiles are full
    CHECK(sm90_joined_heads(dense(1, 16, 4096, 64, 8, 128), 128, 132) == 0);    // one round anyway
    CHECK(sm90_joined_heads(dense(16, 16, 4096, 64, 64, 128), 128, 132) == 0);
    CHECK(sm90_joined_heads(dense(16, 16, 4096, 48, 8, 128), 128, 132) == 0);  // not a power of two
    CHECK(sm90_joined_heads(dense(16, 1, 4096, 64, 1, 128), 192, 132) == 6);
    CHECK(sm90_joined_heads(dense(16, 4096, 4096, 64, 8, 128), 128, 132) == 0);
    const float slope = 0.5f;
    FwdParams p = dense(16, 16, 4096, 64, 8, 128);
    p.alibi_slopes = &slope;
    CHECK(sm90_joined_heads(p, 128, 132) == 0);
    p = dense(16, 16, 4096, 64, 8, 128);
    p.deterministic = 1;
    CHECK(sm90_joined_heads(p, 128, 132) == 0);
}

// Tiles of D = 64 and how long they take, in hundredths.
void test_tiles_d64() {
    const auto expect = [](FwdParams p, Sm90TileD64 tile, int64_t time) {
        CHECK(sm90_tile_d64(p).tile == tile);
        CHECK(sm90_tile_d64(p).time == time);
    };
    expect(dense(1, 64, 2048, 32, 32, 64), Sm90TileD64::kShort, 85);
    expect(dense(16, 64, 2048, 32, 32, 64), Sm90TileD64::kShort, 112 + 85);
    expect(dense(16, 192, 2048, 32, 32, 64), Sm90TileD64::kLong, 400);
    expect(dense(16, 256, 2048, 32, 32, 64), Sm90TileD64::kQuad, 4 * 143);
    expect(dense(16, 256, 1024, 32, 32, 64), Sm90TileD64::kQuad, 4 * 125);
    expect(dense(16, 64, 2048, 32, 4, 64), Sm90TileD64::kLong, 200);  // heads joined: 192 tiles
    FwdParams p = dense(16, 64, 2048, 32, 32, 64);
    p.softcap = 30.0f;
    expect(p, Sm90TileD64::kLong, 400);
    p.softcap = 0.0f;
    p.deterministic = 1;
    expect(p, Sm90TileD64::kShort, 112 + 85);
    // What chooses between the kernels knows them: tiles of 64 rows take half as long.
    CHECK(estimate_hopper(dense(16, 64, 2048, 32, 32, 64)) < estimate_hopper(dense(16, 192, 2048, 32, 32, 64)) * 6 / 10);
    CHECK(estimate_hopper(dense(16, 256, 2048, 32, 32, 64)) > estimate_hopper(dense(16, 192, 2048, 32, 32, 64)));
}

}  // namespace

int main() {
    test_kernels();
    test_narrow_windows();
    test_splits();
    test_workspace();
    test_choice_on_hopper();
    test_joined_heads();
    test_tiles_d64();
    std::printf("attention_plan_test: %d failures\n", failures);
    return failures != 0;
}
