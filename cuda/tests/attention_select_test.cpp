// Which Hopper attention kernel the parameters select: a pure function, tested without a GPU.
#include <cstdio>

#if defined(FLARE_HAVE_CUDA)
#include <cstdint>
#include <cstring>

#include "attention/forward_sm90.h"
#include "flare.h"

namespace {

using flare::attention::DType;
using flare::attention::FwdParams;

int failures = 0;

alignas(16) char memory[64];
const int32_t lengths[2] = {0, 0};
const float slopes[1] = {0.5f};

FwdParams make(int32_t head_dim, int32_t head_dim_v, int32_t rows, int32_t keys, int32_t left, int32_t right,
               DType dtype = DType::kBf16) {
    FwdParams p{};
    p.q = p.k = p.v = p.o = memory;
    const auto dense = [](int64_t length, int64_t heads, int64_t dim) {
        return flare::attention::Strides{length * heads * dim, heads * dim, dim};
    };
    p.batch = 2;
    p.heads_q = 8;
    p.heads_kv = 4;
    p.q_stride = dense(rows, 8, head_dim);
    p.k_stride = dense(keys, 4, head_dim);
    p.v_stride = dense(keys, 4, head_dim_v);
    p.o_stride = dense(rows, 8, head_dim_v);
    p.lse_stride = {int64_t{8} * rows, 1, rows};
    p.dtype = dtype;
    p.seqlen_q = rows;
    p.seqlen_k = keys;
    p.head_dim = head_dim;
    p.head_dim_v = head_dim_v;
    p.window_left = left;
    p.window_right = right;
    p.scale = 0.125f;
    p.sm_count = 132;
    return p;
}

void expect_name(const FwdParams& p, const char* name, const char* what) {
    const int32_t status = flare::attention::select_attention_sm90(p);
    const char* got = status == FLARE_OK ? flare::attention::attention_sm90_kernel_name(p) : "none";
    if (std::strcmp(got, name) != 0) {
        std::printf("FAIL %s: %s (status %d), want %s\n", what, got, status, name);
        ++failures;
    }
}

void expect_status(const FwdParams& p, int32_t status, const char* what) {
    const int32_t got = flare::attention::select_attention_sm90(p);
    if (got != status) {
        std::printf("FAIL %s: status %d, want %d\n", what, got, status);
        ++failures;
    }
}

void instances() {
    expect_name(make(64, 64, 4096, 4096, -1, -1), "attention_sm90_d64", "D=64 full");
    expect_name(make(64, 64, 512, 512, -1, -1), "attention_sm90_d64_short", "D=64 full, few keys, few tiles");
    FwdParams few = make(64, 64, 64, 8192, -1, -1);
    few.heads_kv = 8;
    expect_name(few, "attention_sm90_d64_short", "D=64, few rows");
    few.seqlen_q = 192;
    few.batch = 64;
    expect_name(few, "attention_sm90_d64", "D=64, 192 rows, many tiles");
    few.seqlen_q = 256;
    expect_name(few, "attention_sm90_d64_quad", "D=64, 256 rows, many tiles");
    few.seqlen_q = 64;
    few.softcap = 30.0f;
    expect_name(few, "attention_sm90_d64", "D=64, few rows, softcap");
    expect_name(make(64, 64, 1024, 1024, -1, 0), "attention_sm90_d64_short", "D=64 causal, 1024 keys, few tiles");
    expect_name(make(64, 64, 2048, 2048, -1, 0), "attention_sm90_d64", "D=64 causal, 2048 keys, few tiles");
    expect_name(make(64, 64, 16384, 1024, -1, -1), "attention_sm90_d64_quad", "D=64 full, few keys");
    expect_name(make(64, 64, 6145, 1024, -1, 0), "attention_sm90_d64_quad", "D=64 causal, few keys");
    expect_name(make(64, 64, 6144, 1024, -1, 0), "attention_sm90_d64_short", "D=64 causal, few keys, tiles one too few");
    expect_name(make(64, 64, 16384, 16384, 511, 0), "attention_sm90_d64_quad", "D=64 window of 512");
    expect_name(make(64, 64, 16384, 16384, 2559, 0), "attention_sm90_d64_quad", "D=64 window of 2560");
    expect_name(make(64, 64, 16384, 16384, 2560, 0), "attention_sm90_d64", "D=64 window of 2561");
    expect_name(make(64, 64, 16384, 1025, -1, -1), "attention_sm90_d64", "D=64 full, 1025 keys");
    expect_name(make(96, 96, 100, 100, -1, 0), "attention_sm90_d96", "D=96");
    expect_name(make(128, 128, 1024, 1024, -1, -1), "attention_sm90_d128", "D=128, 1024 keys");
    expect_name(make(128, 128, 2047, 2047, -1, -1), "attention_sm90_d128", "D=128 full, 2047 keys");
    expect_name(make(128, 128, 2048, 2048, -1, -1), "attention_sm90_d128_long", "D=128 full, 2048 keys");
    expect_name(make(128, 128, 2048, 2048, -1, 0), "attention_sm90_d128", "D=128 causal, 2048 keys");
    expect_name(make(128, 128, 4096, 4096, -1, 0), "attention_sm90_d128", "D=128 causal, 4096 keys");
    expect_name(make(128, 128, 4096, 4096, -1, -1), "attention_sm90_d128_long", "D=128 full, 4096 keys");
    expect_name(make(128, 128, 8192, 8192, -1, 0), "attention_sm90_d128_long", "D=128 causal, 8192 keys");
    expect_name(make(128, 128, 500, 8192, -1, -1), "attention_sm90_d128", "D=128, few rows");
    expect_name(make(128, 128, 16384, 16384, 1023, 0), "attention_sm90_d128", "D=128 window of 1024");
    expect_name(make(128, 128, 16384, 16384, 4095, 0), "attention_sm90_d128_long", "D=128 window of 4096");
    expect_name(make(192, 128, 512, 512, -1, 0), "attention_sm90_d192_128", "D=192/128");
    expect_name(make(192, 192, 512, 512, -1, 0), "attention_sm90_d192", "D=192");
    expect_name(make(256, 256, 2048, 2048, -1, -1), "attention_sm90_d256", "D=256, 2048 keys");
    expect_name(make(256, 256, 8192, 8192, -1, -1), "attention_sm90_d256_pair", "D=256, 8192 keys");
    expect_name(make(256, 256, 128, 8192, -1, -1), "attention_sm90_d256", "D=256, few rows");
    expect_name(make(128, 128, 8192, 8192, -1, 0, DType::kFp16), "attention_sm90_d128_long", "fp16");
    expect_name(make(128, 128, 8192, 8192, -1, 0, DType::kFp8E4m3), "attention_sm90_d128_e4m3", "e4m3");
    expect_name(make(128, 128, 0, 0, -1, 0), "attention_sm90_d128", "empty");
    FwdParams fixed = make(64, 64, 16384, 16384, 511, 0);  // the number of tiles depends on the batch
    fixed.deterministic = 1;
    expect_name(fixed, "attention_sm90_d64_short", "D=64 window of 512, deterministic");
    fixed = make(64, 64, 16384, 1024, -1, -1);
    fixed.deterministic = 1;
    expect_name(fixed, "attention_sm90_d64", "D=64 full, few keys, deterministic");
    FwdParams joined = make(64, 64, 8, 1000, -1, 0);
    joined.batch = 64;
    joined.heads_kv = 1;
    expect_name(joined, "attention_sm90_d64", "D=64 causal, 1000 keys, heads joined");
}

// Instances that are built for plain parameters only must not be chosen for others.
void plain_only() {
    FwdParams p = make(64, 64, 512, 512, -1, 0);
    p.softcap = 30.0f;
    expect_name(p, "attention_sm90_d64", "softcap");
    p = make(64, 64, 512, 512, -1, 0);
    p.seqused_k = lengths;
    expect_name(p, "attention_sm90_d64", "seqused_k");
    p = make(256, 256, 8192, 8192, -1, -1);
    p.alibi_slopes = slopes;
    expect_name(p, "attention_sm90_d256", "ALiBi");
    p = make(128, 128, 8192, 8192, -1, -1);
    p.seqused_q = lengths;
    expect_name(p, "attention_sm90_d128_long", "seqused_q");
    p.deterministic = 1;
    expect_name(p, "attention_sm90_d128", "seqused_q, deterministic");
    p = make(128, 128, 8192, 8192, -1, -1);
    p.softcap = 30.0f;
    expect_name(p, "attention_sm90_d128", "D=128, softcap");
    p = make(256, 256, 8192, 8192, -1, -1);
    p.cu_seqlens_q = lengths;
    expect_name(p, "attention_sm90_d256", "cu_seqlens_q");
}

void refusals() {
    expect_status(make(80, 80, 128, 128, -1, 0), FLARE_UNSUPPORTED_SHAPE, "D=80");
    expect_status(make(128, 64, 128, 128, -1, 0), FLARE_UNSUPPORTED_SHAPE, "D=128, Dv=64");
    expect_status(make(64, 64, 128, 128, -1, 0, DType::kFp8E4m3), FLARE_UNSUPPORTED_SHAPE, "e4m3, D=64");
    FwdParams p = make(128, 128, 128, 128, -1, 0);
    p.scale = -1.0f;
    expect_status(p, FLARE_UNSUPPORTED_FEATURE, "negative scale");
    p = make(128, 128, 128, 128, -1, 0);
    p.block_table = lengths;
    expect_status(p, FLARE_UNSUPPORTED_FEATURE, "paged");
    p = make(128, 128, 128, 128, -1, 0);
    p.k_stride.row += 4;
    expect_status(p, FLARE_UNSUPPORTED_SHAPE, "row stride of 8 bytes over a multiple of 16");
    p = make(128, 128, 128, 128, -1, 0, DType::kFp8E4m3);
    p.k_stride.row += 8;
    expect_status(p, FLARE_UNSUPPORTED_SHAPE, "the same, e4m3");
    p.k_stride.row += 8;
    expect_status(p, FLARE_OK, "e4m3, row stride a multiple of 16 bytes");
    p = make(128, 128, 128, 128, -1, 0);
    p.q = memory + 8;
    expect_status(p, FLARE_UNSUPPORTED_SHAPE, "q not on 16 bytes");
    expect_status(make(128, 128, 1 << 28, 128, -1, 0), FLARE_UNSUPPORTED_SHAPE, "too many rows");
}

}  // namespace

int main() {
    instances();
    plain_only();
    refusals();
    std::printf("attention_select_test: %s\n", failures == 0 ? "PASS" : "FAIL");
    return failures != 0;
}
#else
int main() {
    std::printf("built without CUDA: skipped\n");
    return 77;
}
#endif
