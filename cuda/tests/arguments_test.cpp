// Wrong arguments: a table of (what is wrong, status, part of the message). Each must leave every output untouched.
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <functional>
#include <limits>
#include <string>
#include <vector>

#include "flare.h"

namespace {

int failures = 0;
int checks = 0;

void expect(const std::string& what, int32_t got, int32_t wanted, const char* part) {
    char text[1024];
    flare_last_error(text, sizeof(text));
    ++checks;
    if (got != wanted || (part != nullptr && std::strstr(text, part) == nullptr)) {
        std::printf("FAIL %s: got %s \"%s\", wanted %s with \"%s\"\n", what.c_str(), flare_status_string(got), text,
                    flare_status_string(wanted), part == nullptr ? "" : part);
        ++failures;
    }
}

constexpr int64_t kHuge = int64_t{1} << 61;
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

// Memory for one call: inputs of ones, outputs of a pattern that must survive.
struct Buffers {
    std::vector<float> in = std::vector<float>(1 << 16, 1.0f);
    std::vector<float> out = std::vector<float>(1 << 14, 42.0f);
    std::vector<int32_t> index = std::vector<int32_t>(64, 0);

    float* input(int i) { return in.data() + i * 4096; }
    float* output(int i) { return out.data() + i * 4096; }
    void check_untouched(const std::string& what) {
        for (const float value : out) {
            if (value != 42.0f) {
                std::printf("FAIL %s: an output was written\n", what.c_str());
                ++failures;
                return;
            }
        }
    }
};

template <typename Params>
struct Case {
    const char* what;
    int32_t status;
    const char* part;
    std::function<void(Params&, Buffers&)> spoil;
};

template <typename Params>
void run_table(const char* operation, Params (*good)(Buffers&), int32_t (*call)(const Params*), const std::vector<Case<Params>>& cases) {
    Buffers fresh;
    const Params valid = good(fresh);
    expect(std::string(operation) + ": the unspoilt params", call(&valid), FLARE_OK, nullptr);
    for (const Case<Params>& one : cases) {
        Buffers buffers;
        Params params = good(buffers);
        one.spoil(params, buffers);
        const std::string what = std::string(operation) + ": " + one.what;
        expect(what, call(&params), one.status, one.part);
        buffers.check_untouched(what);
    }
}

template <typename Params>
Params zeroed() {
    Params params;
    std::memset(&params, 0, sizeof(params));
    params.struct_size = sizeof(params);
    params.device = FLARE_DEVICE_CPU;
    return params;
}

flare_attention_params good_attention(Buffers& b) {
    auto p = zeroed<flare_attention_params>();
    p.dtype = FLARE_FP32;
    p.batch = 1;
    p.seqlen_q = 3;
    p.seqlen_k = 5;
    p.heads_q = 4;
    p.heads_kv = 2;
    p.head_dim_qk = p.head_dim_v = 8;
    p.q = b.input(0);
    p.k = b.input(1);
    p.v = b.input(2);
    p.out = b.output(0);
    p.lse = b.output(1);
    p.q_stride_s = p.out_stride_s = 32;
    p.k_stride_s = p.v_stride_s = 16;
    p.q_stride_h = p.k_stride_h = p.v_stride_h = p.out_stride_h = 8;
    p.q_stride_b = p.out_stride_b = 96;
    p.k_stride_b = p.v_stride_b = 80;
    p.lse_stride_b = 12;
    p.lse_stride_h = 3;
    return p;
}

void make_paged(flare_attention_params& p, Buffers& b) {
    // One sequence of 5 keys in pages of 2 rows; pool of 4 pages.
    p.block_table = b.index.data();
    p.block_table_stride_b = 3;
    p.page_size = 2;
    p.num_pages = 4;
    b.index[0] = 2;
    b.index[1] = 0;
    b.index[2] = 3;
    b.index[8] = 5;
    p.seqused_k = b.index.data() + 8;
    p.k_stride_b = p.v_stride_b = 32;
}

const std::vector<Case<flare_attention_params>> kAttention = {
    {"unknown flag", FLARE_ERROR_FLAGS, "flags", [](auto& p, auto&) { p.flags = 0x80; }},
    {"device -7", FLARE_ERROR_OPTION, "device", [](auto& p, auto&) { p.device = -7; }},
    {"kernel 9", FLARE_ERROR_OPTION, "kernel", [](auto& p, auto&) { p.kernel = 9; }},
    {"sm90 kernel on the CPU", FLARE_UNSUPPORTED_KERNEL, "CPU", [](auto& p, auto&) { p.kernel = FLARE_KERNEL_SM90; }},
    {"dtype missing", FLARE_ERROR_DTYPE, "dtype", [](auto& p, auto&) { p.dtype = 0; }},
    {"dtype INT32", FLARE_ERROR_DTYPE, "INT32", [](auto& p, auto&) { p.dtype = FLARE_INT32; }},
    {"out_dtype FP8", FLARE_ERROR_DTYPE, "out_dtype", [](auto& p, auto&) { p.out_dtype = FLARE_FP8_E4M3; }},
    {"index_dtype FP32", FLARE_ERROR_DTYPE, "index_dtype", [](auto& p, auto&) { p.index_dtype = FLARE_FP32; }},
    {"negative batch", FLARE_ERROR_SHAPE, "batch is -1", [](auto& p, auto&) { p.batch = -1; }},
    {"negative seqlen_q", FLARE_ERROR_SHAPE, "seqlen_q", [](auto& p, auto&) { p.seqlen_q = -3; }},
    {"negative seqlen_k", FLARE_ERROR_SHAPE, "seqlen_k", [](auto& p, auto&) { p.seqlen_k = INT64_MIN; }},
    {"no heads", FLARE_ERROR_SHAPE, "heads_q", [](auto& p, auto&) { p.heads_q = 0; }},
    {"head_dim 513", FLARE_ERROR_SHAPE, "head_dim_qk is 513", [](auto& p, auto&) { p.head_dim_qk = 513; }},
    {"head_dim_v 0", FLARE_ERROR_SHAPE, "head_dim_v", [](auto& p, auto&) { p.head_dim_v = 0; }},
    {"heads not a multiple", FLARE_ERROR_SHAPE, "multiple", [](auto& p, auto&) { p.heads_kv = 3; }},
    {"negative stride", FLARE_ERROR_STRIDE, "k: stride", [](auto& p, auto&) { p.k_stride_s = -16; }},
    {"output stride 0", FLARE_ERROR_STRIDE, "out", [](auto& p, auto&) { p.out_stride_h = 0; }},
    {"lse rows overlap", FLARE_ERROR_STRIDE, "lse", [](auto& p, auto&) { p.lse_stride_h = 1; }},
    {"address overflow", FLARE_ERROR_OVERFLOW, "q", [](auto& p, auto&) { p.q_stride_s = kHuge; }},
    {"q NULL", FLARE_ERROR_NULL, "q is NULL", [](auto& p, auto&) { p.q = nullptr; }},
    {"v NULL", FLARE_ERROR_NULL, "v is NULL", [](auto& p, auto&) { p.v = nullptr; }},
    {"out NULL", FLARE_ERROR_NULL, "out is NULL", [](auto& p, auto&) { p.out = nullptr; }},
    {"q misaligned", FLARE_ERROR_ALIGNMENT, "q: address", [](auto& p, auto&) { p.q = static_cast<const char*>(p.q) + 1; }},
    {"out is q", FLARE_ERROR_OVERLAP, "out overlaps q", [](auto& p, auto& b) { p.out = b.input(0); }},
    {"out inside v", FLARE_ERROR_OVERLAP, "out overlaps v", [](auto& p, auto& b) { p.out = b.input(2) + 8; }},
    {"lse inside out", FLARE_ERROR_OVERLAP, "lse overlaps out", [](auto& p, auto&) { p.lse = static_cast<float*>(p.out) + 4; }},
    {"scale NaN", FLARE_ERROR_OPTION, "scale", [](auto& p, auto&) { p.scale = kNan; }},
    {"negative scale without the flag", FLARE_ERROR_OPTION, "FLARE_FLAG_SCALE", [](auto& p, auto&) { p.scale = -1.0f; }},
    {"softcap negative", FLARE_ERROR_OPTION, "softcap", [](auto& p, auto&) { p.softcap = -2.0f; }},
    {"mask 3", FLARE_ERROR_OPTION, "mask", [](auto& p, auto&) { p.mask = 3; }},
    {"num_splits 1000", FLARE_ERROR_OPTION, "num_splits", [](auto& p, auto&) { p.num_splits = 1000; }},
    {"negative threads", FLARE_ERROR_OPTION, "num_threads", [](auto& p, auto&) { p.num_threads = -1; }},
    {"descale without FP8", FLARE_ERROR_OPTION, "descales", [](auto& p, auto& b) { p.q_descale = b.input(3); }},
    {"misaligned workspace", FLARE_ERROR_WORKSPACE, "workspace",
     [](auto& p, auto& b) { p.workspace = reinterpret_cast<char*>(b.input(3)) + 4; }},
    {"pages without lengths", FLARE_ERROR_NULL, "seqused_k",
     [](auto& p, auto& b) {
         make_paged(p, b);
         p.seqused_k = nullptr;
     }},
    {"pages and cu_seqlens_k", FLARE_ERROR_OPTION, "cu_seqlens_k",
     [](auto& p, auto& b) {
         make_paged(p, b);
         p.cu_seqlens_k = b.index.data() + 16;
     }},
    {"page size 0", FLARE_ERROR_SHAPE, "page_size",
     [](auto& p, auto& b) {
         make_paged(p, b);
         p.page_size = 0;
     }},
    {"page id too large", FLARE_ERROR_INDEX, "block_table",
     [](auto& p, auto& b) {
         make_paged(p, b);
         b.index[1] = 4;
     }},
    {"page id negative", FLARE_ERROR_INDEX, "block_table",
     [](auto& p, auto& b) {
         make_paged(p, b);
         b.index[0] = -1;
     }},
    {"length beyond the cache", FLARE_ERROR_INDEX, "seqused_k",
     [](auto& p, auto& b) {
         make_paged(p, b);
         b.index[8] = 6;
     }},
    {"cu_seqlens decreasing", FLARE_ERROR_INDEX, "cu_seqlens_q",
     [](auto& p, auto& b) {
         p.cu_seqlens_q = b.index.data();
         p.total_q = 3;
         b.index[0] = 2;
         b.index[1] = 1;
     }},
    {"cu_seqlens beyond total", FLARE_ERROR_INDEX, "cu_seqlens_q",
     [](auto& p, auto& b) {
         p.cu_seqlens_q = b.index.data();
         p.total_q = 3;
         b.index[0] = 0;
         b.index[1] = 4;
     }},
    {"seqused_q beyond seqlen_q", FLARE_ERROR_INDEX, "seqused_q",
     [](auto& p, auto& b) {
         p.seqused_q = b.index.data();
         b.index[0] = 4;
     }},
};

flare_attention_merge_params good_merge(Buffers& b) {
    auto p = zeroed<flare_attention_merge_params>();
    p.dtype = FLARE_FP32;
    p.num_partials = 2;
    p.batch = 1;
    p.seqlen = 3;
    p.heads = 2;
    p.head_dim = 4;
    p.partial_out = b.input(0);
    p.partial_lse = b.input(1);
    p.out = b.output(0);
    p.lse = b.output(1);
    p.partial_out_stride_p = p.partial_out_stride_b = p.out_stride_b = 24;
    p.partial_out_stride_s = p.out_stride_s = 8;
    p.partial_out_stride_h = p.out_stride_h = 4;
    p.partial_lse_stride_p = p.partial_lse_stride_b = p.lse_stride_b = 6;
    p.partial_lse_stride_h = p.lse_stride_h = 3;
    return p;
}

const std::vector<Case<flare_attention_merge_params>> kMerge = {
    {"no partials", FLARE_ERROR_SHAPE, "num_partials", [](auto& p, auto&) { p.num_partials = 0; }},
    {"FP8", FLARE_ERROR_DTYPE, "dtype", [](auto& p, auto&) { p.dtype = FLARE_FP8_E4M3; }},
    {"partial_lse NULL", FLARE_ERROR_NULL, "partial_lse", [](auto& p, auto&) { p.partial_lse = nullptr; }},
    {"out in the partials", FLARE_ERROR_OVERLAP, "partial_out", [](auto& p, auto& b) { p.out = b.input(0) + 24; }},
};

flare_mla_prefill_params good_prefill(Buffers& b) {
    auto p = zeroed<flare_mla_prefill_params>();
    p.dtype = FLARE_FP32;
    p.batch = 1;
    p.seqlen_q = 2;
    p.seqlen_k = 3;
    p.heads = 2;
    p.d_nope = 4;
    p.d_rope = 2;
    p.d_c = 8;
    p.d_v = 4;
    p.q_nope = b.input(0);
    p.q_rope = b.input(1);
    p.c_kv = b.input(2);
    p.k_rope = b.input(3);
    p.w_uk = b.input(4);
    p.w_uv = b.input(5);
    p.out = b.output(0);
    p.lse = b.output(1);
    p.q_nope_stride_b = p.out_stride_b = 16;
    p.q_nope_stride_s = p.out_stride_s = 8;
    p.q_nope_stride_h = p.out_stride_h = 4;
    p.q_rope_stride_b = 8;
    p.q_rope_stride_s = 4;
    p.q_rope_stride_h = 2;
    p.c_kv_stride_b = 24;
    p.c_kv_stride_s = 8;
    p.k_rope_stride_b = 6;
    p.k_rope_stride_s = 2;
    p.w_uk_stride_h = p.w_uv_stride_h = 32;
    p.w_uk_stride_r = p.w_uv_stride_r = 4;
    p.lse_stride_b = 4;
    p.lse_stride_h = 2;
    return p;
}

const std::vector<Case<flare_mla_prefill_params>> kPrefill = {
    {"window mask", FLARE_ERROR_OPTION, "mask", [](auto& p, auto&) { p.mask = FLARE_MASK_WINDOW; }},
    {"d_c 0", FLARE_ERROR_SHAPE, "d_c", [](auto& p, auto&) { p.d_c = 0; }},
    {"d_rope negative", FLARE_ERROR_SHAPE, "d_rope", [](auto& p, auto&) { p.d_rope = -64; }},
    {"weight layout 2", FLARE_ERROR_OPTION, "weight_layout", [](auto& p, auto&) { p.weight_layout = 2; }},
    {"k_rope NULL", FLARE_ERROR_NULL, "k_rope is NULL", [](auto& p, auto&) { p.k_rope = nullptr; }},
    {"w_uv NULL", FLARE_ERROR_NULL, "w_uv is NULL", [](auto& p, auto&) { p.w_uv = nullptr; }},
    {"latent dtype of its own", FLARE_ERROR_DTYPE, "latent_dtype", [](auto& p, auto&) { p.latent_dtype = FLARE_BF16; }},
    {"656-byte rows of another size", FLARE_ERROR_SHAPE, "656", [](auto& p, auto&) { p.latent_dtype = FLARE_UINT8; }},
    {"out in c_kv", FLARE_ERROR_OVERLAP, "c_kv", [](auto& p, auto& b) { p.out = b.input(2); }},
};

flare_mla_decode_params good_decode(Buffers& b) {
    auto p = zeroed<flare_mla_decode_params>();
    p.dtype = FLARE_FP32;
    p.batch = 1;
    p.seqlen_q = 1;
    p.seqlen_k = 5;
    p.heads = 2;
    p.d_c = 8;
    p.d_rope = 2;
    p.scale = 0.25f;
    p.q = b.input(0);
    p.kv = b.input(1);
    p.out = b.output(0);
    p.lse = b.output(1);
    p.q_stride_b = p.q_stride_s = 20;
    p.q_stride_h = 10;
    p.kv_stride_b = 20;
    p.kv_stride_s = 10;
    p.out_stride_b = p.out_stride_s = 16;
    p.out_stride_h = 8;
    p.lse_stride_b = 2;
    p.lse_stride_h = 1;
    p.block_table = b.index.data();
    p.block_table_stride_b = 3;
    p.page_size = 2;
    p.num_pages = 4;
    b.index[0] = 3;
    b.index[1] = 1;
    b.index[2] = 0;
    b.index[8] = 5;
    p.seqlens_k = b.index.data() + 8;
    return p;
}

const std::vector<Case<flare_mla_decode_params>> kDecode = {
    {"no scale", FLARE_ERROR_OPTION, "scale", [](auto& p, auto&) { p.scale = 0.0f; }},
    {"pages without lengths", FLARE_ERROR_NULL, "seqlens_k", [](auto& p, auto&) { p.seqlens_k = nullptr; }},
    {"page id too large", FLARE_ERROR_INDEX, "block_table", [](auto&, auto& b) { b.index[2] = 4; }},
    {"length beyond the cache", FLARE_ERROR_INDEX, "seqlens_k", [](auto&, auto& b) { b.index[8] = 6; }},
    {"length negative", FLARE_ERROR_INDEX, "seqlens_k", [](auto&, auto& b) { b.index[8] = -1; }},
    {"w_uk without rope part", FLARE_ERROR_NULL, "q_rope",
     [](auto& p, auto& b) {
         p.w_uk = b.input(2);
         p.d_nope = 4;
     }},
    {"kv dtype", FLARE_ERROR_DTYPE, "kv_dtype", [](auto& p, auto&) { p.kv_dtype = FLARE_FP8_E4M3; }},
    {"sparse with ragged queries", FLARE_ERROR_OPTION, "cu_seqlens_q",
     [](auto& p, auto& b) {
         p.indices = b.index.data();
         p.cu_seqlens_q = b.index.data();
     }},
    {"sparse, topk negative", FLARE_ERROR_SHAPE, "topk",
     [](auto& p, auto& b) {
         p.indices = b.index.data();
         p.topk = -1;
     }},
};

flare_kda_forward_params good_kda(Buffers& b) {
    auto p = zeroed<flare_kda_forward_params>();
    p.dtype = FLARE_FP32;
    p.batch = 1;
    p.seqlen = 4;
    p.heads_qk = 1;
    p.heads_v = 2;
    p.head_dim_k = p.head_dim_v = 4;
    p.q = b.input(0);
    p.k = b.input(1);
    p.v = b.input(2);
    p.g = b.input(3);
    p.beta = b.input(4);
    p.out = b.output(0);
    p.gate = FLARE_GATE_BOUNDED;
    p.lower_bound = -5.0f;
    p.state_layout = FLARE_STATE_KV;
    p.final_state = b.output(1);
    p.q_stride_b = p.k_stride_b = 16;
    p.q_stride_t = p.k_stride_t = p.q_stride_h = p.k_stride_h = 4;
    p.v_stride_b = p.g_stride_b = p.out_stride_b = 32;
    p.v_stride_t = p.g_stride_t = p.out_stride_t = 8;
    p.v_stride_h = p.g_stride_h = p.out_stride_h = 4;
    p.beta_stride_b = 8;
    p.beta_stride_t = 2;
    p.beta_stride_h = 1;
    return p;
}

const std::vector<Case<flare_kda_forward_params>> kKda = {
    {"lower_bound 0", FLARE_ERROR_OPTION, "lower_bound", [](auto& p, auto&) { p.lower_bound = 0.0f; }},
    {"gate 3", FLARE_ERROR_OPTION, "gate", [](auto& p, auto&) { p.gate = 3; }},
    {"bias on a log gate", FLARE_ERROR_OPTION, "LOG",
     [](auto& p, auto& b) {
         p.gate = FLARE_GATE_LOG;
         p.dt_bias = b.input(5);
     }},
    {"no state layout", FLARE_ERROR_OPTION, "state_layout", [](auto& p, auto&) { p.state_layout = 0; }},
    {"heads not a multiple", FLARE_ERROR_SHAPE, "multiple", [](auto& p, auto&) { p.heads_qk = 4; }},
    {"state dtype FP16", FLARE_ERROR_DTYPE, "final_state_dtype", [](auto& p, auto&) { p.final_state_dtype = FLARE_FP16; }},
    {"beta NULL", FLARE_ERROR_NULL, "beta is NULL", [](auto& p, auto&) { p.beta = nullptr; }},
    {"out is v", FLARE_ERROR_OVERLAP, "v", [](auto& p, auto& b) { p.out = b.input(2); }},
    {"state over out", FLARE_ERROR_OVERLAP, "final_state", [](auto& p, auto&) { p.final_state = static_cast<float*>(p.out) + 8; }},
    {"in place with other dtypes", FLARE_ERROR_OVERLAP, "dtypes",
     [](auto& p, auto& b) {
         p.initial_state = b.output(1);
         p.initial_state_dtype = FLARE_BF16;
     }},
    {"varlen with batch 2", FLARE_ERROR_SHAPE, "batch",
     [](auto& p, auto& b) {
         p.batch = 2;
         p.cu_seqlens = b.index.data();
     }},
    {"cu_seqlens decreasing", FLARE_ERROR_INDEX, "cu_seqlens",
     [](auto& p, auto& b) {
         p.cu_seqlens = b.index.data();
         p.num_sequences = 2;
         b.index[1] = 3;
         b.index[2] = 2;
     }},
    {"cu_seqlens not ending at T", FLARE_ERROR_INDEX, "cu_seqlens",
     [](auto& p, auto& b) {
         p.cu_seqlens = b.index.data();
         p.num_sequences = 1;
         b.index[1] = 5;
     }},
    {"slot out of range", FLARE_ERROR_INDEX, "state_slots",
     [](auto& p, auto& b) {
         p.state_slots = b.index.data();
         p.num_slots = 1;
         p.padding_slot = -1;
         b.index[0] = 1;
     }},
    {"checkpoint interval 10", FLARE_ERROR_OPTION, "checkpoint_interval",
     [](auto& p, auto& b) {
         p.checkpoints = b.output(2);
         p.checkpoint_interval = 10;
     }},
};

flare_kda_decode_params good_kda_decode(Buffers& b) {
    auto p = zeroed<flare_kda_decode_params>();
    p.dtype = FLARE_FP32;
    p.batch = 2;
    p.seqlen = 1;
    p.heads_qk = p.heads_v = 1;
    p.head_dim_k = p.head_dim_v = 4;
    p.q = b.input(0);
    p.k = b.input(1);
    p.v = b.input(2);
    p.g = b.input(3);
    p.beta = b.input(4);
    p.out = b.output(0);
    p.state = b.output(1);
    p.state_layout = FLARE_STATE_VK;
    p.num_slots = 3;
    p.q_stride_b = p.k_stride_b = p.v_stride_b = p.g_stride_b = p.out_stride_b = 4;
    p.q_stride_t = p.k_stride_t = p.v_stride_t = p.g_stride_t = p.out_stride_t = 4;
    p.q_stride_h = p.k_stride_h = p.v_stride_h = p.g_stride_h = p.out_stride_h = 4;
    p.beta_stride_b = p.beta_stride_t = p.beta_stride_h = 1;
    p.slots = b.index.data();
    p.padding_slot = -1;
    b.index[0] = 2;
    b.index[1] = -1;
    return p;
}

const std::vector<Case<flare_kda_decode_params>> kKdaDecode = {
    {"slot out of range", FLARE_ERROR_INDEX, "slots", [](auto&, auto& b) { b.index[1] = 3; }},
    {"too few slots", FLARE_ERROR_SHAPE, "num_slots",
     [](auto& p, auto&) {
         p.slots = nullptr;
         p.num_slots = 1;
     }},
    {"accepted without slots per token", FLARE_ERROR_OPTION, "num_accepted", [](auto& p, auto& b) { p.num_accepted = b.index.data(); }},
    {"two sequences, one slot", FLARE_ERROR_INDEX, "slots", [](auto&, auto& b) { b.index[1] = 2; }},
    {"state NULL", FLARE_ERROR_NULL, "state is NULL", [](auto& p, auto&) { p.state = nullptr; }},
    {"no state layout", FLARE_ERROR_OPTION, "state_layout", [](auto& p, auto&) { p.state_layout = 0; }},
};

flare_cast_params good_cast(Buffers& b) {
    auto p = zeroed<flare_cast_params>();
    p.src_dtype = FLARE_FP32;
    p.dst_dtype = FLARE_BF16;
    p.rank = 2;
    p.shape[0] = 3;
    p.shape[1] = 4;
    p.src_stride[0] = p.dst_stride[0] = 4;
    p.src_stride[1] = p.dst_stride[1] = 1;
    p.src = b.input(0);
    p.dst = b.output(0);
    return p;
}

const std::vector<Case<flare_cast_params>> kCast = {
    {"rank 6", FLARE_ERROR_OPTION, "rank", [](auto& p, auto&) { p.rank = 6; }},
    {"INT64", FLARE_ERROR_DTYPE, "src_dtype", [](auto& p, auto&) { p.src_dtype = FLARE_INT64; }},
    {"negative shape", FLARE_ERROR_SHAPE, "shape", [](auto& p, auto&) { p.shape[1] = -1; }},
    {"dst stride 0", FLARE_ERROR_STRIDE, "dst", [](auto& p, auto&) { p.dst_stride[0] = 0; }},
    {"in place", FLARE_ERROR_OVERLAP, "dst overlaps src", [](auto& p, auto&) { p.src = p.dst; }},
};

flare_fill_params good_fill(Buffers& b) {
    auto p = zeroed<flare_fill_params>();
    p.dtype = FLARE_FP16;
    p.rank = 1;
    p.shape[0] = 5;
    p.dst_stride[0] = 1;
    p.dst = b.output(0);
    p.value = 1.5;
    return p;
}

const std::vector<Case<flare_fill_params>> kFill = {
    {"no dtype", FLARE_ERROR_DTYPE, "dtype", [](auto& p, auto&) { p.dtype = 0; }},
    {"dst NULL", FLARE_ERROR_NULL, "dst", [](auto& p, auto&) { p.dst = nullptr; }},
};

flare_cache_append_params good_append(Buffers& b) {
    auto p = zeroed<flare_cache_append_params>();
    p.dtype = FLARE_FP32;
    p.num_tokens = 3;
    p.heads = 2;
    p.head_dim_k = p.head_dim_v = 4;
    p.num_pages = 2;
    p.page_size = 2;
    p.k = b.input(0);
    p.v = b.input(1);
    p.k_stride_t = p.v_stride_t = 8;
    p.k_stride_h = p.v_stride_h = 4;
    p.k_cache = b.output(0);
    p.v_cache = b.output(1);
    p.k_cache_stride_b = p.v_cache_stride_b = 16;
    p.k_cache_stride_s = p.v_cache_stride_s = 8;
    p.k_cache_stride_h = p.v_cache_stride_h = 4;
    p.slots = b.index.data();
    b.index[0] = 3;
    b.index[1] = -1;
    b.index[2] = 0;
    return p;
}

const std::vector<Case<flare_cache_append_params>> kAppend = {
    {"slot beyond the pool", FLARE_ERROR_INDEX, "slots", [](auto&, auto& b) { b.index[0] = 4; }},
    {"one slot twice", FLARE_ERROR_INDEX, "slots", [](auto&, auto& b) { b.index[2] = 3; }},
    {"layout 2", FLARE_ERROR_OPTION, "layout", [](auto& p, auto&) { p.layout = 2; }},
    {"v without v_cache", FLARE_ERROR_NULL, "v_cache", [](auto& p, auto&) { p.v_cache = nullptr; }},
    {"UINT8 rows in a KV cache", FLARE_ERROR_DTYPE, "cache_dtype", [](auto& p, auto&) { p.cache_dtype = FLARE_UINT8; }},
    {"descale without FP8", FLARE_ERROR_OPTION, "descales", [](auto& p, auto& b) { p.k_descale = b.input(2); }},
    {"rotary without positions", FLARE_ERROR_NULL, "positions",
     [](auto& p, auto& b) {
         p.rotary_cos = p.rotary_sin = b.input(2);
         p.rotary_dim = 4;
         p.max_position = 8;
     }},
    {"rotary_dim odd", FLARE_ERROR_SHAPE, "rotary_dim",
     [](auto& p, auto& b) {
         p.rotary_cos = p.rotary_sin = b.input(2);
         p.positions = b.index.data() + 8;
         p.rotary_dim = 3;
         p.max_position = 8;
     }},
    {"position beyond the table", FLARE_ERROR_INDEX, "positions",
     [](auto& p, auto& b) {
         p.rotary_cos = p.rotary_sin = b.input(2);
         p.positions = b.index.data() + 8;
         p.rotary_dim = 4;
         p.max_position = 8;
         b.index[8] = 8;
     }},
    {"caches overlap", FLARE_ERROR_OVERLAP, "v_cache", [](auto& p, auto&) { p.v_cache = p.k_cache; }},
};

}  // namespace

int main() {
    run_table("attention", good_attention, flare_attention_forward, kAttention);
    run_table("merge", good_merge, flare_attention_merge, kMerge);
    run_table("mla_prefill", good_prefill, flare_mla_prefill, kPrefill);
    run_table("mla_decode", good_decode, flare_mla_decode, kDecode);
    run_table("kda_forward", good_kda, flare_kda_forward, kKda);
    run_table("kda_decode", good_kda_decode, flare_kda_decode, kKdaDecode);
    run_table("cast", good_cast, flare_cast, kCast);
    run_table("fill", good_fill, flare_fill, kFill);
    run_table("cache_append", good_append, flare_cache_append, kAppend);
    std::printf("arguments_test: %d checks, %d failures\n", checks, failures);
    return failures != 0;
}
