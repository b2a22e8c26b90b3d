#include "api/validate.h"

#include <algorithm>
#include <cinttypes>
#include <cmath>
#include <cstdio>
#include <initializer_list>
#include <utility>

#include "api/status.h"
#include "api/tensor_check.h"

// Returns the failed status from the enclosing function; text says argument, found, wanted.
#define FLARE_REQUIRE(condition, status, ...) \
    do {                                      \
        if (!(condition)) {                   \
            return fail(status, __VA_ARGS__); \
        }                                     \
    } while (false)

namespace flare {
namespace {

constexpr int64_t kLatentRowBytes = 656;
constexpr int64_t kMaxSplits = 256;
constexpr int64_t kCheckpointUnit = 64;

int32_t check_size(const char* name, int64_t value, int64_t low, int64_t high = INT64_MAX) {
    if (value >= low && value <= high) {
        return FLARE_OK;
    }
    if (high == INT64_MAX) {
        return fail(FLARE_ERROR_SHAPE, "%s is %" PRId64 "; it must be >= %" PRId64, name, value, low);
    }
    return fail(FLARE_ERROR_SHAPE, "%s is %" PRId64 "; it must be in %" PRId64 "..%" PRId64, name, value, low, high);
}

int32_t check_dtype(const char* name, int32_t dtype, std::initializer_list<int32_t> allowed) {
    for (const int32_t one : allowed) {
        if (dtype == one) {
            return FLARE_OK;
        }
    }
    char list[96] = "";
    int used = 0;
    for (const int32_t one : allowed) {
        used += std::snprintf(list + used, sizeof(list) - static_cast<size_t>(used), "%s%s", used > 0 ? ", " : "", dtype_name(one));
    }
    return fail(FLARE_ERROR_DTYPE, "%s is %d (%s); it takes %s", name, dtype, dtype == 0 ? "not given" : dtype_name(dtype), list);
}

int32_t check_choice(const char* name, int64_t value, int64_t low, int64_t high) {
    FLARE_REQUIRE(value >= low && value <= high, FLARE_ERROR_OPTION, "%s is %" PRId64 "; it must be in %" PRId64 "..%" PRId64, name,
                  value, low, high);
    return FLARE_OK;
}

int32_t check_index_array(const char* name, const void* data, int32_t index_dtype) {
    FLARE_REQUIRE(reinterpret_cast<uintptr_t>(data) % static_cast<uintptr_t>(dtype_bytes(index_dtype)) == 0, FLARE_ERROR_ALIGNMENT,
                  "%s: address %p isn't a multiple of its element size, %" PRId64, name, data, dtype_bytes(index_dtype));
    return FLARE_OK;
}

// What every params struct starts with.
template <typename Params>
int32_t check_common(const Params& p, uint32_t known_flags) {
    FLARE_REQUIRE((p.flags & ~known_flags) == 0, FLARE_ERROR_FLAGS, "flags has unknown bits 0x%x", p.flags & ~known_flags);
    FLARE_REQUIRE(p.device >= FLARE_DEVICE_CPU, FLARE_ERROR_OPTION, "device is %d; it must be -1 (CPU) or a CUDA ordinal", p.device);
    FLARE_TRY(check_choice("kernel", p.kernel, FLARE_KERNEL_AUTO, FLARE_KERNEL_SM90));
    FLARE_REQUIRE(p.num_threads >= 0, FLARE_ERROR_OPTION, "num_threads is %d; it must be >= 0 (0 = all cores)", p.num_threads);
    FLARE_REQUIRE(p.device != FLARE_DEVICE_CPU || p.kernel != FLARE_KERNEL_SM90, FLARE_UNSUPPORTED_KERNEL,
                  "kernel: SM90 asked for, but device is the CPU; use kernel = 0, or a CUDA device");
    return FLARE_OK;
}

template <typename Params>
int32_t resolve_index_dtype(Params& p) {
    if (p.index_dtype == 0) {
        p.index_dtype = FLARE_INT32;
    }
    return check_dtype("index_dtype", p.index_dtype, {FLARE_INT32, FLARE_INT64});
}

int32_t check_scale(float scale) {
    FLARE_REQUIRE(std::isfinite(scale), FLARE_ERROR_OPTION, "scale is %g; it must be finite", static_cast<double>(scale));
    return FLARE_OK;
}

// scale = 0 without FLARE_FLAG_SCALE stands for 1/sqrt(width).
template <typename Params>
int32_t resolve_scale(Params& p, int64_t width) {
    FLARE_TRY(check_scale(p.scale));
    if ((p.flags & FLARE_FLAG_SCALE) == 0) {
        FLARE_REQUIRE(p.scale >= 0.0f, FLARE_ERROR_OPTION,
                      "scale is %g; a negative scale needs FLARE_FLAG_SCALE, which says that it is meant", static_cast<double>(p.scale));
        if (p.scale == 0.0f) {
            p.scale = static_cast<float>(1.0 / std::sqrt(static_cast<double>(width)));
        }
        p.flags |= FLARE_FLAG_SCALE;
    }
    return FLARE_OK;
}

int32_t check_paging(const void* block_table, int64_t stride_b, int64_t batch, int64_t seqlen_k, int64_t page_size, int64_t num_pages,
                     int32_t index_dtype, Check check) {
    FLARE_TRY(check_size("page_size", page_size, 1));
    FLARE_TRY(check_size("num_pages", num_pages, 0));
    const int64_t pages = seqlen_k / page_size + (seqlen_k % page_size != 0 ? 1 : 0);
    const TensorView table("block_table", block_table, dtype_bytes(index_dtype), {batch, pages}, {stride_b, 1});
    return check_tensor(table, check == Check::kRun);
}

bool wants_data(Check check) { return check == Check::kRun; }

int32_t check_workspace(const void* workspace) {
    FLARE_REQUIRE(reinterpret_cast<uintptr_t>(workspace) % 256 == 0, FLARE_ERROR_WORKSPACE,
                  "workspace: address %p isn't a multiple of 256", workspace);
    return FLARE_OK;
}

int32_t check_all_disjoint(const TensorView& output, std::initializer_list<const TensorView*> others) {
    for (const TensorView* other : others) {
        FLARE_TRY(check_disjoint(output, *other));
    }
    return FLARE_OK;
}

int32_t check_inputs(std::initializer_list<const TensorView*> inputs, Check check) {
    for (const TensorView* input : inputs) {
        FLARE_TRY(check_tensor(*input, wants_data(check)));
    }
    return FLARE_OK;
}

// The outer two dimensions of queries and keys, dense, packed or paged.
struct SequenceDims {
    int64_t batch_q, rows_q, batch_k, rows_k;
};

template <typename Params>
SequenceDims sequence_dims(const Params& p) {
    SequenceDims dims{p.batch, p.seqlen_q, p.batch, p.seqlen_k};
    if (p.cu_seqlens_q != nullptr) {
        dims.batch_q = 1;
        dims.rows_q = p.total_q;
    }
    if (p.block_table != nullptr) {
        dims.batch_k = p.num_pages;
        dims.rows_k = p.page_size;
    } else if (p.cu_seqlens_k != nullptr) {
        dims.batch_k = 1;
        dims.rows_k = p.total_k;
    }
    return dims;
}

// How attention and MLA prefill are told where their sequences lie.
template <typename Params>
int32_t check_sequences(const Params& p, Check check) {
    const bool varlen_q = p.cu_seqlens_q != nullptr;
    const bool varlen_k = p.cu_seqlens_k != nullptr;
    const bool paged = p.block_table != nullptr;
    FLARE_REQUIRE(!(paged && varlen_k), FLARE_ERROR_OPTION,
                  "block_table and cu_seqlens_k are both given; pages take their lengths from seqused_k");
    FLARE_REQUIRE(!paged || p.seqused_k != nullptr, FLARE_ERROR_NULL, "seqused_k is NULL; with block_table it must tell the lengths");
    if (varlen_q) {
        FLARE_TRY(check_size("total_q", p.total_q, 0));
    }
    if (varlen_k) {
        FLARE_TRY(check_size("total_k", p.total_k, 0));
    }
    if (paged) {
        FLARE_TRY(check_paging(p.block_table, p.block_table_stride_b, p.batch, p.seqlen_k, p.page_size, p.num_pages, p.index_dtype,
                               check));
    }
    FLARE_TRY(check_index_array("cu_seqlens_q", p.cu_seqlens_q, p.index_dtype));
    FLARE_TRY(check_index_array("cu_seqlens_k", p.cu_seqlens_k, p.index_dtype));
    FLARE_TRY(check_index_array("seqused_q", p.seqused_q, p.index_dtype));
    FLARE_TRY(check_index_array("seqused_k", p.seqused_k, p.index_dtype));
    return FLARE_OK;
}

// Windows that no length within the maxima can reach are the same as none; afterwards i + window can't overflow.
template <typename Params>
int32_t resolve_mask(Params& p) {
    FLARE_TRY(check_choice("mask", p.mask, FLARE_MASK_NONE, FLARE_MASK_WINDOW));
    if (p.mask == FLARE_MASK_NONE) {
        p.window_left = p.window_right = -1;
    } else if (p.mask == FLARE_MASK_CAUSAL) {
        p.window_left = -1;
        p.window_right = 0;
    }
    p.window_left = p.window_left < 0 || p.window_left >= p.seqlen_k ? -1 : p.window_left;
    p.window_right = p.window_right < 0 || p.window_right >= p.seqlen_q + p.seqlen_k ? -1 : p.window_right;
    return FLARE_OK;
}

}  // namespace

int32_t validate(flare_attention_params& p, Check check) {
    FLARE_TRY(check_common(p, FLARE_FLAG_SCALE));
    FLARE_TRY(check_dtype("dtype", p.dtype, {FLARE_FP32, FLARE_FP16, FLARE_BF16, FLARE_FP8_E4M3}));
    if (p.out_dtype == 0) {
        p.out_dtype = p.dtype == FLARE_FP8_E4M3 ? FLARE_BF16 : p.dtype;
    }
    FLARE_TRY(check_dtype("out_dtype", p.out_dtype, {FLARE_FP32, FLARE_FP16, FLARE_BF16}));
    FLARE_TRY(resolve_index_dtype(p));
    FLARE_TRY(check_choice("num_splits", p.num_splits, 0, kMaxSplits));
    FLARE_TRY(check_choice("deterministic", p.deterministic, 0, 1));
    FLARE_TRY(check_size("batch", p.batch, 0));
    FLARE_TRY(check_size("seqlen_q", p.seqlen_q, 0, INT64_MAX / 4));
    FLARE_TRY(check_size("seqlen_k", p.seqlen_k, 0, INT64_MAX / 4));
    FLARE_TRY(check_size("heads_q", p.heads_q, 1));
    FLARE_TRY(check_size("heads_kv", p.heads_kv, 1));
    FLARE_TRY(check_size("head_dim_qk", p.head_dim_qk, 1, 512));
    FLARE_TRY(check_size("head_dim_v", p.head_dim_v, 1, 512));
    FLARE_REQUIRE(p.heads_q % p.heads_kv == 0, FLARE_ERROR_SHAPE,
                  "heads_q is %" PRId64 " and heads_kv %" PRId64 "; heads_q must be a multiple of heads_kv", p.heads_q, p.heads_kv);
    FLARE_REQUIRE(std::isfinite(p.softcap) && p.softcap >= 0.0f, FLARE_ERROR_OPTION, "softcap is %g; it must be >= 0 (0 = off)",
                  static_cast<double>(p.softcap));
    FLARE_TRY(resolve_scale(p, p.head_dim_qk));
    FLARE_TRY(resolve_mask(p));

    FLARE_REQUIRE(p.dtype == FLARE_FP8_E4M3 || (p.q_descale == nullptr && p.k_descale == nullptr && p.v_descale == nullptr),
                  FLARE_ERROR_OPTION, "descales are given, but dtype is %s; they go with FP8_E4M3", dtype_name(p.dtype));
    FLARE_TRY(check_sequences(p, check));

    const int64_t element = dtype_bytes(p.dtype);
    const auto [batch_q, rows_q, batch_k, rows_k] = sequence_dims(p);
    const TensorView q("q", p.q, element, {batch_q, rows_q, p.heads_q, p.head_dim_qk}, {p.q_stride_b, p.q_stride_s, p.q_stride_h, 1});
    const TensorView k("k", p.k, element, {batch_k, rows_k, p.heads_kv, p.head_dim_qk}, {p.k_stride_b, p.k_stride_s, p.k_stride_h, 1});
    const TensorView v("v", p.v, element, {batch_k, rows_k, p.heads_kv, p.head_dim_v}, {p.v_stride_b, p.v_stride_s, p.v_stride_h, 1});
    const TensorView out("out", p.out, dtype_bytes(p.out_dtype), {batch_q, rows_q, p.heads_q, p.head_dim_v},
                         {p.out_stride_b, p.out_stride_s, p.out_stride_h, 1});
    const TensorView lse("lse", p.lse, 4, {batch_q, p.heads_q, rows_q}, {p.lse_stride_b, p.lse_stride_h, 1});
    FLARE_TRY(check_inputs({&q, &k, &v}, check));
    FLARE_TRY(check_output(out, wants_data(check)));
    FLARE_TRY(check_all_disjoint(out, {&q, &k, &v}));
    if (p.lse != nullptr) {
        FLARE_TRY(check_output(lse, wants_data(check)));
        FLARE_TRY(check_all_disjoint(lse, {&q, &k, &v, &out}));
    }
    const TensorView alibi("alibi_slopes", p.alibi_slopes, 4, {p.batch, p.heads_q}, {p.alibi_stride_b, 1});
    const TensorView sink("sink", p.sink, 4, {p.heads_q}, {1});
    FLARE_TRY(check_tensor(alibi, p.alibi_slopes != nullptr));
    FLARE_TRY(check_tensor(sink, p.sink != nullptr));
    for (const auto& [name, data] : {std::pair<const char*, const float*>{"q_descale", p.q_descale},
                                     {"k_descale", p.k_descale},
                                     {"v_descale", p.v_descale}}) {
        const TensorView view(name, data, 4, {p.batch, p.heads_kv}, {p.descale_stride_b, p.descale_stride_h});
        FLARE_TRY(check_tensor(view, data != nullptr));
    }
    return check_workspace(p.workspace);
}

int32_t validate(flare_attention_merge_params& p, Check check) {
    FLARE_TRY(check_common(p, 0));
    FLARE_TRY(check_dtype("dtype", p.dtype, {FLARE_FP32, FLARE_FP16, FLARE_BF16}));
    p.out_dtype = p.out_dtype == 0 ? p.dtype : p.out_dtype;
    FLARE_TRY(check_dtype("out_dtype", p.out_dtype, {FLARE_FP32, FLARE_FP16, FLARE_BF16}));
    FLARE_TRY(check_size("num_partials", p.num_partials, 1));
    FLARE_TRY(check_size("batch", p.batch, 0));
    FLARE_TRY(check_size("seqlen", p.seqlen, 0));
    FLARE_TRY(check_size("heads", p.heads, 1));
    FLARE_TRY(check_size("head_dim", p.head_dim, 1));
    const TensorView partial_out("partial_out", p.partial_out, dtype_bytes(p.dtype),
                                 {p.num_partials, p.batch, p.seqlen, p.heads, p.head_dim},
                                 {p.partial_out_stride_p, p.partial_out_stride_b, p.partial_out_stride_s, p.partial_out_stride_h, 1});
    const TensorView partial_lse("partial_lse", p.partial_lse, 4, {p.num_partials, p.batch, p.heads, p.seqlen},
                                 {p.partial_lse_stride_p, p.partial_lse_stride_b, p.partial_lse_stride_h, 1});
    const TensorView out("out", p.out, dtype_bytes(p.out_dtype), {p.batch, p.seqlen, p.heads, p.head_dim},
                         {p.out_stride_b, p.out_stride_s, p.out_stride_h, 1});
    const TensorView lse("lse", p.lse, 4, {p.batch, p.heads, p.seqlen}, {p.lse_stride_b, p.lse_stride_h, 1});
    FLARE_TRY(check_inputs({&partial_out, &partial_lse}, check));
    FLARE_TRY(check_output(out, wants_data(check)));
    FLARE_TRY(check_all_disjoint(out, {&partial_out, &partial_lse}));
    if (p.lse != nullptr) {
        FLARE_TRY(check_output(lse, wants_data(check)));
        FLARE_TRY(check_all_disjoint(lse, {&partial_out, &partial_lse, &out}));
    }
    return FLARE_OK;
}

int32_t validate(flare_mla_prefill_params& p, Check check) {
    FLARE_TRY(check_common(p, FLARE_FLAG_SCALE));
    FLARE_TRY(check_dtype("dtype", p.dtype, {FLARE_FP32, FLARE_FP16, FLARE_BF16}));
    p.out_dtype = p.out_dtype == 0 ? p.dtype : p.out_dtype;
    FLARE_TRY(check_dtype("out_dtype", p.out_dtype, {FLARE_FP32, FLARE_FP16, FLARE_BF16}));
    p.latent_dtype = p.latent_dtype == 0 ? p.dtype : p.latent_dtype;
    FLARE_TRY(check_dtype("latent_dtype", p.latent_dtype, {p.dtype, FLARE_UINT8}));
    FLARE_TRY(resolve_index_dtype(p));
    FLARE_TRY(check_choice("weight_layout", p.weight_layout, FLARE_WEIGHT_CD, FLARE_WEIGHT_DC));
    FLARE_TRY(check_choice("mask", p.mask, FLARE_MASK_NONE, FLARE_MASK_CAUSAL));
    FLARE_TRY(check_choice("deterministic", p.deterministic, 0, 1));
    FLARE_TRY(check_size("batch", p.batch, 0));
    FLARE_TRY(check_size("seqlen_q", p.seqlen_q, 0, INT64_MAX / 4));
    FLARE_TRY(check_size("seqlen_k", p.seqlen_k, 0, INT64_MAX / 4));
    FLARE_TRY(check_size("heads", p.heads, 1));
    FLARE_TRY(check_size("d_nope", p.d_nope, 1, 512));
    FLARE_TRY(check_size("d_rope", p.d_rope, 0, 512));
    FLARE_TRY(check_size("d_c", p.d_c, 1, 1024));
    FLARE_TRY(check_size("d_v", p.d_v, 1, 512));
    FLARE_TRY(resolve_scale(p, p.d_nope + p.d_rope));

    const bool rows656 = p.latent_dtype == FLARE_UINT8;
    FLARE_REQUIRE(!rows656 || (p.d_c == 512 && p.d_rope == 64), FLARE_ERROR_SHAPE,
                  "d_c is %" PRId64 " and d_rope %" PRId64 "; 656-byte latent rows hold d_c = 512 and d_rope = 64", p.d_c, p.d_rope);
    FLARE_REQUIRE(!rows656 || p.k_rope == nullptr, FLARE_ERROR_OPTION,
                  "k_rope is given, but 656-byte latent rows carry the rope part themselves; set it to NULL");
    FLARE_TRY(check_sequences(p, check));

    const int64_t element = dtype_bytes(p.dtype);
    const auto [batch_q, rows_q, batch_k, rows_k] = sequence_dims(p);
    const bool by_c = p.weight_layout == FLARE_WEIGHT_CD;
    const TensorView q_nope("q_nope", p.q_nope, element, {batch_q, rows_q, p.heads, p.d_nope},
                            {p.q_nope_stride_b, p.q_nope_stride_s, p.q_nope_stride_h, 1});
    const TensorView q_rope("q_rope", p.q_rope, element, {batch_q, rows_q, p.heads, p.d_rope},
                            {p.q_rope_stride_b, p.q_rope_stride_s, p.q_rope_stride_h, 1});
    const TensorView c_kv("c_kv", p.c_kv, rows656 ? 1 : element, {batch_k, rows_k, rows656 ? kLatentRowBytes : p.d_c},
                          {p.c_kv_stride_b, p.c_kv_stride_s, 1});
    const TensorView k_rope("k_rope", p.k_rope, element, {batch_k, rows_k, rows656 ? 0 : p.d_rope},
                            {p.k_rope_stride_b, p.k_rope_stride_s, 1});
    const TensorView w_uk("w_uk", p.w_uk, element, {p.heads, by_c ? p.d_c : p.d_nope, by_c ? p.d_nope : p.d_c},
                          {p.w_uk_stride_h, p.w_uk_stride_r, 1});
    const TensorView w_uv("w_uv", p.w_uv, element, {p.heads, by_c ? p.d_c : p.d_v, by_c ? p.d_v : p.d_c},
                          {p.w_uv_stride_h, p.w_uv_stride_r, 1});
    const TensorView out("out", p.out, dtype_bytes(p.out_dtype), {batch_q, rows_q, p.heads, p.d_v},
                         {p.out_stride_b, p.out_stride_s, p.out_stride_h, 1});
    const TensorView lse("lse", p.lse, 4, {batch_q, p.heads, rows_q}, {p.lse_stride_b, p.lse_stride_h, 1});
    FLARE_TRY(check_inputs({&q_nope, &q_rope, &c_kv, &k_rope, &w_uk, &w_uv}, check));
    FLARE_TRY(check_output(out, wants_data(check)));
    FLARE_TRY(check_all_disjoint(out, {&q_nope, &q_rope, &c_kv, &k_rope, &w_uk, &w_uv}));
    if (p.lse != nullptr) {
        FLARE_TRY(check_output(lse, wants_data(check)));
        FLARE_TRY(check_all_disjoint(lse, {&q_nope, &q_rope, &c_kv, &k_rope, &w_uk, &w_uv, &out}));
    }
    FLARE_REQUIRE(!rows656 || reinterpret_cast<uintptr_t>(p.c_kv) % 16 == 0, FLARE_ERROR_ALIGNMENT,
                  "c_kv: address %p isn't a multiple of 16, which 656-byte rows need", p.c_kv);
    FLARE_REQUIRE(!rows656 || (p.c_kv_stride_s % 16 == 0 && p.c_kv_stride_b % 16 == 0), FLARE_ERROR_STRIDE,
                  "c_kv: strides of 656-byte rows must be multiples of 16 bytes, got %" PRId64 " and %" PRId64, p.c_kv_stride_b,
                  p.c_kv_stride_s);
    return check_workspace(p.workspace);
}

int32_t validate(flare_mla_decode_params& p, Check check) {
    FLARE_TRY(check_common(p, FLARE_FLAG_SCALE));
    FLARE_TRY(check_dtype("dtype", p.dtype, {FLARE_FP32, FLARE_FP16, FLARE_BF16}));
    p.out_dtype = p.out_dtype == 0 ? p.dtype : p.out_dtype;
    FLARE_TRY(check_dtype("out_dtype", p.out_dtype, {FLARE_FP32, FLARE_FP16, FLARE_BF16}));
    p.kv_dtype = p.kv_dtype == 0 ? p.dtype : p.kv_dtype;
    FLARE_TRY(check_dtype("kv_dtype", p.kv_dtype, {p.dtype, FLARE_UINT8}));
    FLARE_TRY(resolve_index_dtype(p));
    FLARE_TRY(check_choice("weight_layout", p.weight_layout, FLARE_WEIGHT_CD, FLARE_WEIGHT_DC));
    FLARE_TRY(check_choice("mask", p.mask, FLARE_MASK_NONE, FLARE_MASK_CAUSAL));
    FLARE_TRY(check_choice("num_splits", p.num_splits, 0, kMaxSplits));
    FLARE_TRY(check_choice("deterministic", p.deterministic, 0, 1));
    FLARE_TRY(check_size("batch", p.batch, 0));
    FLARE_TRY(check_size("seqlen_q", p.seqlen_q, 0, INT64_MAX / 4));
    FLARE_TRY(check_size("seqlen_k", p.seqlen_k, 0, INT64_MAX / 4));
    FLARE_TRY(check_size("heads", p.heads, 1));
    FLARE_TRY(check_size("d_c", p.d_c, 1, 1024));
    FLARE_TRY(check_size("d_rope", p.d_rope, 0, 512));
    FLARE_TRY(check_size("d_nope", p.d_nope, p.w_uk != nullptr ? 1 : 0, 512));
    FLARE_TRY(check_size("d_v", p.d_v, p.w_uv != nullptr ? 1 : 0, 512));
    FLARE_REQUIRE((p.flags & FLARE_FLAG_SCALE) != 0 || p.scale != 0.0f || p.d_nope > 0, FLARE_ERROR_OPTION,
                  "scale is 0 and d_nope is 0; the default 1/sqrt(d_nope + d_rope) needs d_nope: give one of them");
    FLARE_TRY(resolve_scale(p, p.d_nope + p.d_rope));

    const bool rows656 = p.kv_dtype == FLARE_UINT8;
    const bool sparse = p.indices != nullptr;
    const bool paged = p.block_table != nullptr;
    const bool varlen_q = p.cu_seqlens_q != nullptr;
    FLARE_REQUIRE(!rows656 || (p.d_c == 512 && p.d_rope == 64), FLARE_ERROR_SHAPE,
                  "d_c is %" PRId64 " and d_rope %" PRId64 "; 656-byte latent rows hold d_c = 512 and d_rope = 64", p.d_c, p.d_rope);
    FLARE_REQUIRE(sparse || !paged || p.seqlens_k != nullptr, FLARE_ERROR_NULL,
                  "seqlens_k is NULL; with block_table it must tell the lengths");
    FLARE_REQUIRE(!sparse || !varlen_q, FLARE_ERROR_OPTION,
                  "indices and cu_seqlens_q are both given; sparse calls take their shape from seqlen_q");
    FLARE_REQUIRE(p.w_uk == nullptr || p.d_rope == 0 || p.q_rope != nullptr || !wants_data(check), FLARE_ERROR_NULL,
                  "q_rope is NULL; with w_uk and d_rope = %" PRId64 " the rope part must come apart", p.d_rope);
    if (varlen_q) {
        FLARE_TRY(check_size("total_q", p.total_q, 0));
    }
    if (sparse) {
        FLARE_TRY(check_size("topk", p.topk, 0));
        FLARE_TRY(check_size("page_size", p.page_size, 1));
        FLARE_TRY(check_size("num_pages", p.num_pages, 0));
    } else if (paged) {
        FLARE_TRY(check_paging(p.block_table, p.block_table_stride_b, p.batch, p.seqlen_k, p.page_size, p.num_pages, p.index_dtype,
                               check));
    }
    FLARE_TRY(check_index_array("cu_seqlens_q", p.cu_seqlens_q, p.index_dtype));
    FLARE_TRY(check_index_array("seqlens_k", p.seqlens_k, p.index_dtype));
    FLARE_TRY(check_index_array("indices", p.indices, p.index_dtype));
    FLARE_TRY(check_index_array("topk_length", p.topk_length, p.index_dtype));

    const int64_t element = dtype_bytes(p.dtype);
    const int64_t batch_q = varlen_q ? 1 : p.batch;
    const int64_t rows_q = varlen_q ? p.total_q : p.seqlen_q;
    const int64_t batch_k = sparse || paged ? p.num_pages : p.batch;
    const int64_t rows_k = sparse || paged ? p.page_size : p.seqlen_k;
    const bool rope_apart = p.w_uk != nullptr || p.q_rope != nullptr;
    const int64_t q_width = p.w_uk != nullptr ? p.d_nope : p.d_c + (rope_apart ? 0 : p.d_rope);
    const int64_t out_width = p.w_uv != nullptr ? p.d_v : p.d_c;
    const bool by_c = p.weight_layout == FLARE_WEIGHT_CD;
    const TensorView q("q", p.q, element, {batch_q, rows_q, p.heads, q_width}, {p.q_stride_b, p.q_stride_s, p.q_stride_h, 1});
    const TensorView q_rope("q_rope", p.q_rope, element, {batch_q, rows_q, p.heads, rope_apart ? p.d_rope : 0},
                            {p.q_rope_stride_b, p.q_rope_stride_s, p.q_rope_stride_h, 1});
    const TensorView kv("kv", p.kv, rows656 ? 1 : element, {batch_k, rows_k, rows656 ? kLatentRowBytes : p.d_c + p.d_rope},
                        {p.kv_stride_b, p.kv_stride_s, 1});
    const TensorView w_uk("w_uk", p.w_uk, element,
                          {p.w_uk != nullptr ? p.heads : 0, by_c ? p.d_c : p.d_nope, by_c ? p.d_nope : p.d_c},
                          {p.w_uk_stride_h, p.w_uk_stride_r, 1});
    const TensorView w_uv("w_uv", p.w_uv, element, {p.w_uv != nullptr ? p.heads : 0, by_c ? p.d_c : p.d_v, by_c ? p.d_v : p.d_c},
                          {p.w_uv_stride_h, p.w_uv_stride_r, 1});
    const TensorView out("out", p.out, dtype_bytes(p.out_dtype), {batch_q, rows_q, p.heads, out_width},
                         {p.out_stride_b, p.out_stride_s, p.out_stride_h, 1});
    const TensorView lse("lse", p.lse, 4, {batch_q, p.heads, rows_q}, {p.lse_stride_b, p.lse_stride_h, 1});
    const TensorView indices("indices", p.indices, dtype_bytes(p.index_dtype), {sparse ? p.batch : 0, p.seqlen_q, p.topk},
                             {p.indices_stride_b, p.indices_stride_s, 1});
    const TensorView topk_length("topk_length", p.topk_length, dtype_bytes(p.index_dtype),
                                 {p.topk_length != nullptr ? p.batch : 0, p.seqlen_q},
                                 {p.topk_length_stride_b, p.topk_length_stride_s});
    const TensorView sink("sink", p.sink, 4, {p.sink != nullptr ? p.heads : 0}, {1});
    FLARE_TRY(check_inputs({&q, &q_rope, &kv, &w_uk, &w_uv, &indices, &topk_length, &sink}, check));
    FLARE_TRY(check_output(out, wants_data(check)));
    FLARE_TRY(check_all_disjoint(out, {&q, &q_rope, &kv, &w_uk, &w_uv}));
    if (p.lse != nullptr) {
        FLARE_TRY(check_output(lse, wants_data(check)));
        FLARE_TRY(check_all_disjoint(lse, {&q, &q_rope, &kv, &w_uk, &w_uv, &out}));
    }
    FLARE_REQUIRE(!rows656 || reinterpret_cast<uintptr_t>(p.kv) % 16 == 0, FLARE_ERROR_ALIGNMENT,
                  "kv: address %p isn't a multiple of 16, which 656-byte rows need", p.kv);
    FLARE_REQUIRE(!rows656 || (p.kv_stride_s % 16 == 0 && p.kv_stride_b % 16 == 0), FLARE_ERROR_STRIDE,
                  "kv: strides of 656-byte rows must be multiples of 16 bytes, got %" PRId64 " and %" PRId64, p.kv_stride_b,
                  p.kv_stride_s);
    return check_workspace(p.workspace);
}

namespace {

// What kda_forward and kda_decode have in common: options, dtypes, sizes, the seven token tensors.
template <typename Params>
int32_t validate_kda_tokens(Params& p, Check check) {
    FLARE_TRY(check_common(p, FLARE_FLAG_SCALE));
    FLARE_TRY(check_dtype("dtype", p.dtype, {FLARE_FP32, FLARE_FP16, FLARE_BF16}));
    p.gate_dtype = p.gate_dtype == 0 ? p.dtype : p.gate_dtype;
    p.beta_dtype = p.beta_dtype == 0 ? p.dtype : p.beta_dtype;
    FLARE_TRY(check_dtype("gate_dtype", p.gate_dtype, {FLARE_FP32, FLARE_FP16, FLARE_BF16}));
    FLARE_TRY(check_dtype("beta_dtype", p.beta_dtype, {FLARE_FP32, FLARE_FP16, FLARE_BF16}));
    FLARE_TRY(resolve_index_dtype(p));
    FLARE_TRY(check_choice("gate", p.gate, FLARE_GATE_LOG, FLARE_GATE_BOUNDED));
    FLARE_TRY(check_choice("beta_activation", p.beta_activation, FLARE_BETA_RAW, FLARE_BETA_SIGMOID2));
    FLARE_TRY(check_choice("qk_l2norm", p.qk_l2norm, 0, 1));
    FLARE_TRY(check_choice("beta_per_channel", p.beta_per_channel, 0, 1));
    FLARE_TRY(check_choice("deterministic", p.deterministic, 0, 1));
    FLARE_REQUIRE(p.gate != FLARE_GATE_BOUNDED || (std::isfinite(p.lower_bound) && p.lower_bound < 0.0f), FLARE_ERROR_OPTION,
                  "lower_bound is %g; the bounded gate needs a finite value < 0", static_cast<double>(p.lower_bound));
    FLARE_REQUIRE(p.gate != FLARE_GATE_LOG || (p.a_log == nullptr && p.dt_bias == nullptr), FLARE_ERROR_OPTION,
                  "a_log or dt_bias is given, but gate is LOG, which takes g as it is");
    FLARE_TRY(check_size("batch", p.batch, 0));
    FLARE_TRY(check_size("seqlen", p.seqlen, 0, INT64_MAX / 4));
    FLARE_TRY(check_size("heads_qk", p.heads_qk, 1));
    FLARE_TRY(check_size("heads_v", p.heads_v, 1));
    FLARE_TRY(check_size("head_dim_k", p.head_dim_k, 1, 512));
    FLARE_TRY(check_size("head_dim_v", p.head_dim_v, 1, 512));
    FLARE_REQUIRE(p.heads_v % p.heads_qk == 0, FLARE_ERROR_SHAPE,
                  "heads_v is %" PRId64 " and heads_qk %" PRId64 "; heads_v must be a multiple of heads_qk", p.heads_v, p.heads_qk);
    FLARE_TRY(resolve_scale(p, p.head_dim_k));
    if (p.cu_seqlens != nullptr) {
        FLARE_REQUIRE(p.batch == 1, FLARE_ERROR_SHAPE, "batch is %" PRId64 "; with cu_seqlens all tokens are packed and batch is 1",
                      p.batch);
        FLARE_TRY(check_size("num_sequences", p.num_sequences, 0));
        FLARE_TRY(check_index_array("cu_seqlens", p.cu_seqlens, p.index_dtype));
    } else {
        p.num_sequences = p.batch;
    }

    const int64_t element = dtype_bytes(p.dtype);
    const int64_t beta_channels = p.beta_per_channel ? p.head_dim_v : 1;
    const TensorView q("q", p.q, element, {p.batch, p.seqlen, p.heads_qk, p.head_dim_k}, {p.q_stride_b, p.q_stride_t, p.q_stride_h, 1});
    const TensorView k("k", p.k, element, {p.batch, p.seqlen, p.heads_qk, p.head_dim_k}, {p.k_stride_b, p.k_stride_t, p.k_stride_h, 1});
    const TensorView v("v", p.v, element, {p.batch, p.seqlen, p.heads_v, p.head_dim_v}, {p.v_stride_b, p.v_stride_t, p.v_stride_h, 1});
    const TensorView g("g", p.g, dtype_bytes(p.gate_dtype), {p.batch, p.seqlen, p.heads_v, p.head_dim_k},
                       {p.g_stride_b, p.g_stride_t, p.g_stride_h, 1});
    const TensorView beta("beta", p.beta, dtype_bytes(p.beta_dtype), {p.batch, p.seqlen, p.heads_v, beta_channels},
                          {p.beta_stride_b, p.beta_stride_t, p.beta_stride_h, 1});
    const TensorView a_log("a_log", p.a_log, 4, {p.a_log != nullptr ? p.heads_v : 0}, {1});
    const TensorView dt_bias("dt_bias", p.dt_bias, 4, {p.dt_bias != nullptr ? p.heads_v : 0, p.head_dim_k}, {p.head_dim_k, 1});
    const TensorView out("out", p.out, element, {p.batch, p.seqlen, p.heads_v, p.head_dim_v},
                         {p.out_stride_b, p.out_stride_t, p.out_stride_h, 1});
    FLARE_TRY(check_inputs({&q, &k, &v, &g, &beta, &a_log, &dt_bias}, check));
    FLARE_TRY(check_output(out, wants_data(check)));
    FLARE_TRY(check_all_disjoint(out, {&q, &k, &v, &g, &beta}));
    return check_workspace(p.workspace);
}

// Dense strides of [N, HV, K, V] states where none are given.
template <typename Params>
void resolve_state_strides(const Params& p, int64_t& stride_n, int64_t& stride_h) {
    stride_h = stride_h == 0 ? p.head_dim_k * p.head_dim_v : stride_h;
    stride_n = stride_n == 0 ? p.heads_v * stride_h : stride_n;
}

template <typename Params>
TensorView state_view(const char* name, const void* data, int32_t dtype, const Params& p, int64_t count, int64_t stride_n,
                      int64_t stride_h) {
    return TensorView(name, data, dtype_bytes(dtype), {data != nullptr ? count : 0, p.heads_v, p.head_dim_k * p.head_dim_v},
                      {stride_n, stride_h, 1});
}

int32_t resolve_state_dtype(const char* name, int32_t& dtype) {
    dtype = dtype == 0 ? FLARE_FP32 : dtype;
    return check_dtype(name, dtype, {FLARE_FP32, FLARE_BF16});
}

}  // namespace

int32_t validate(flare_kda_forward_params& p, Check check) {
    FLARE_TRY(validate_kda_tokens(p, check));
    FLARE_TRY(resolve_state_dtype("initial_state_dtype", p.initial_state_dtype));
    FLARE_TRY(resolve_state_dtype("final_state_dtype", p.final_state_dtype));
    FLARE_TRY(resolve_state_dtype("checkpoint_dtype", p.checkpoint_dtype));
    const bool any_state = p.initial_state != nullptr || p.final_state != nullptr || p.checkpoints != nullptr;
    FLARE_REQUIRE(any_state ? p.state_layout == FLARE_STATE_KV || p.state_layout == FLARE_STATE_VK
                            : p.state_layout >= 0 && p.state_layout <= FLARE_STATE_VK,
                  FLARE_ERROR_OPTION, "state_layout is %d; with states it must be FLARE_STATE_KV (1) or FLARE_STATE_VK (2)",
                  p.state_layout);
    resolve_state_strides(p, p.initial_state_stride_n, p.initial_state_stride_h);
    resolve_state_strides(p, p.final_state_stride_n, p.final_state_stride_h);
    int64_t rows = p.num_sequences;
    if (p.state_slots != nullptr) {
        FLARE_TRY(check_size("num_slots", p.num_slots, 0));
        FLARE_TRY(check_index_array("state_slots", p.state_slots, p.index_dtype));
        rows = p.num_slots;
    }
    const TensorView initial = state_view("initial_state", p.initial_state, p.initial_state_dtype, p, rows, p.initial_state_stride_n,
                                          p.initial_state_stride_h);
    const TensorView final_state =
        state_view("final_state", p.final_state, p.final_state_dtype, p, rows, p.final_state_stride_n, p.final_state_stride_h);
    FLARE_TRY(check_tensor(initial, p.initial_state != nullptr));
    FLARE_TRY(check_output(final_state, p.final_state != nullptr));
    const TensorView out("out", p.out, dtype_bytes(p.dtype), {p.batch, p.seqlen, p.heads_v, p.head_dim_v},
                         {p.out_stride_b, p.out_stride_t, p.out_stride_h, 1});
    FLARE_TRY(check_all_disjoint(out, {&initial, &final_state}));
    if (p.initial_state != nullptr && p.initial_state == p.final_state) {
        FLARE_REQUIRE(p.initial_state_dtype == p.final_state_dtype && p.initial_state_stride_n == p.final_state_stride_n &&
                          p.initial_state_stride_h == p.final_state_stride_h,
                      FLARE_ERROR_OVERLAP, "final_state is initial_state, but their dtypes or strides differ");
    } else {
        FLARE_TRY(check_disjoint(final_state, initial));
    }
    if (p.checkpoints != nullptr) {
        FLARE_REQUIRE(p.checkpoint_interval > 0 && p.checkpoint_interval % kCheckpointUnit == 0, FLARE_ERROR_OPTION,
                      "checkpoint_interval is %" PRId64 "; it must be a positive multiple of %" PRId64, p.checkpoint_interval,
                      kCheckpointUnit);
        FLARE_REQUIRE(p.cu_seqlens == nullptr || p.cu_checkpoints != nullptr, FLARE_ERROR_NULL,
                      "cu_checkpoints is NULL; with cu_seqlens it must tell each sequence's first checkpoint row");
        FLARE_TRY(check_index_array("cu_checkpoints", p.cu_checkpoints, p.index_dtype));
        const TensorView checkpoints("checkpoints", p.checkpoints, dtype_bytes(p.checkpoint_dtype),
                                     {p.batch, p.seqlen / p.checkpoint_interval, p.heads_v, p.head_dim_k * p.head_dim_v},
                                     {p.seqlen / p.checkpoint_interval * p.heads_v * p.head_dim_k * p.head_dim_v,
                                      p.heads_v * p.head_dim_k * p.head_dim_v, p.head_dim_k * p.head_dim_v, 1});
        FLARE_TRY(check_output(checkpoints, true));
        FLARE_TRY(check_all_disjoint(checkpoints, {&out, &initial, &final_state}));
    }
    return FLARE_OK;
}

int32_t validate(flare_kda_decode_params& p, Check check) {
    FLARE_TRY(validate_kda_tokens(p, check));
    FLARE_TRY(resolve_state_dtype("state_dtype", p.state_dtype));
    FLARE_REQUIRE(p.state_layout == FLARE_STATE_KV || p.state_layout == FLARE_STATE_VK, FLARE_ERROR_OPTION,
                  "state_layout is %d; it must be FLARE_STATE_KV (1) or FLARE_STATE_VK (2)", p.state_layout);
    resolve_state_strides(p, p.state_stride_n, p.state_stride_h);
    FLARE_TRY(check_size("num_slots", p.num_slots, 0));
    p.slots_per_sequence = p.slots_per_sequence == 0 ? 1 : p.slots_per_sequence;
    if (p.slots == nullptr) {
        FLARE_REQUIRE(p.slots_per_sequence == 1, FLARE_ERROR_OPTION, "slots_per_sequence is %" PRId64 ", but slots is NULL",
                      p.slots_per_sequence);
        FLARE_REQUIRE(p.num_slots >= p.num_sequences, FLARE_ERROR_SHAPE,
                      "num_slots is %" PRId64 "; without slots it must be >= the number of sequences, %" PRId64, p.num_slots,
                      p.num_sequences);
    } else {
        FLARE_TRY(check_index_array("slots", p.slots, p.index_dtype));
        FLARE_REQUIRE(p.slots_per_sequence >= 1 && (p.slots_per_sequence == 1 || p.slots_stride_n >= p.slots_per_sequence),
                      FLARE_ERROR_STRIDE, "slots_stride_n is %" PRId64 "; it must be >= slots_per_sequence, %" PRId64,
                      p.slots_stride_n, p.slots_per_sequence);
        FLARE_REQUIRE(p.slots_per_sequence == 1 || p.cu_seqlens != nullptr || p.slots_per_sequence >= p.seqlen, FLARE_ERROR_SHAPE,
                      "slots_per_sequence is %" PRId64 "; it must be 1 or >= seqlen, %" PRId64, p.slots_per_sequence, p.seqlen);
        if (p.slots_per_sequence == 1 && p.slots_stride_n == 0) {
            p.slots_stride_n = 1;
        }
    }
    FLARE_REQUIRE(p.num_accepted == nullptr || p.slots_per_sequence > 1, FLARE_ERROR_OPTION,
                  "num_accepted is given, but slots_per_sequence is 1; it chooses among the slots of a sequence");
    FLARE_TRY(check_index_array("num_accepted", p.num_accepted, p.index_dtype));
    const TensorView state("state", p.state, dtype_bytes(p.state_dtype), {p.num_slots, p.heads_v, p.head_dim_k * p.head_dim_v},
                           {p.state_stride_n, p.state_stride_h, 1});
    const TensorView state_out = state_view("state_out", p.state_out, p.state_dtype, p, p.num_slots, p.state_stride_n, p.state_stride_h);
    const TensorView out("out", p.out, dtype_bytes(p.dtype), {p.batch, p.seqlen, p.heads_v, p.head_dim_v},
                         {p.out_stride_b, p.out_stride_t, p.out_stride_h, 1});
    FLARE_TRY(check_output(state, wants_data(check) && p.num_sequences > 0));
    FLARE_TRY(check_output(state_out, p.state_out != nullptr));
    FLARE_TRY(check_all_disjoint(out, {&state, &state_out}));
    if (p.state_out != p.state) {
        FLARE_TRY(check_disjoint(state_out, state));
    }
    return FLARE_OK;
}

int32_t validate(flare_cast_params& p, Check check) {
    FLARE_TRY(check_common(p, FLARE_FLAG_SCALE));
    FLARE_TRY(check_dtype("src_dtype", p.src_dtype, {FLARE_FP32, FLARE_FP16, FLARE_BF16, FLARE_FP8_E4M3}));
    FLARE_TRY(check_dtype("dst_dtype", p.dst_dtype, {FLARE_FP32, FLARE_FP16, FLARE_BF16, FLARE_FP8_E4M3}));
    FLARE_TRY(check_choice("rank", p.rank, 0, TensorView::kMaxRank));
    FLARE_TRY(check_scale(p.scale));
    if ((p.flags & FLARE_FLAG_SCALE) == 0) {
        p.scale = p.scale == 0.0f ? 1.0f : p.scale;
        p.flags |= FLARE_FLAG_SCALE;
    }
    TensorView src("src", p.src, dtype_bytes(p.src_dtype), {}, {});
    TensorView dst("dst", p.dst, dtype_bytes(p.dst_dtype), {}, {});
    src.rank = dst.rank = p.rank;
    for (int i = 0; i < p.rank; ++i) {
        FLARE_TRY(check_size("shape", p.shape[i], 0));
        src.shape[i] = dst.shape[i] = p.shape[i];
        src.stride[i] = p.src_stride[i];
        dst.stride[i] = p.dst_stride[i];
    }
    FLARE_TRY(check_tensor(src, wants_data(check)));
    FLARE_TRY(check_output(dst, wants_data(check)));
    return check_disjoint(dst, src);
}

int32_t validate(flare_fill_params& p, Check check) {
    FLARE_TRY(check_common(p, 0));
    FLARE_TRY(check_dtype("dtype", p.dtype,
                          {FLARE_FP32, FLARE_FP16, FLARE_BF16, FLARE_FP8_E4M3, FLARE_UINT8, FLARE_INT32, FLARE_INT64}));
    FLARE_TRY(check_choice("rank", p.rank, 0, TensorView::kMaxRank));
    TensorView dst("dst", p.dst, dtype_bytes(p.dtype), {}, {});
    dst.rank = p.rank;
    for (int i = 0; i < p.rank; ++i) {
        FLARE_TRY(check_size("shape", p.shape[i], 0));
        dst.shape[i] = p.shape[i];
        dst.stride[i] = p.dst_stride[i];
    }
    return check_output(dst, wants_data(check));
}

int32_t validate(flare_cache_append_params& p, Check check) {
    FLARE_TRY(check_common(p, 0));
    FLARE_TRY(check_choice("layout", p.layout, FLARE_CACHE_KV, FLARE_CACHE_LATENT));
    FLARE_TRY(check_dtype("dtype", p.dtype, {FLARE_FP32, FLARE_FP16, FLARE_BF16}));
    const bool latent = p.layout == FLARE_CACHE_LATENT;
    p.cache_dtype = p.cache_dtype == 0 ? p.dtype : p.cache_dtype;
    if (latent) {
        FLARE_TRY(check_dtype("cache_dtype", p.cache_dtype, {FLARE_FP32, FLARE_FP16, FLARE_BF16, FLARE_UINT8}));
    } else {
        FLARE_TRY(check_dtype("cache_dtype", p.cache_dtype, {FLARE_FP32, FLARE_FP16, FLARE_BF16, FLARE_FP8_E4M3}));
    }
    FLARE_TRY(resolve_index_dtype(p));
    FLARE_TRY(check_choice("rotary_interleaved", p.rotary_interleaved, 0, 1));
    FLARE_TRY(check_size("num_tokens", p.num_tokens, 0));
    FLARE_TRY(check_size("heads", p.heads, 1, latent ? 1 : INT64_MAX));
    FLARE_TRY(check_size("head_dim_k", p.head_dim_k, 1));
    FLARE_TRY(check_size("head_dim_v", p.head_dim_v, 0));
    FLARE_TRY(check_size("num_pages", p.num_pages, 0));
    FLARE_TRY(check_size("page_size", p.page_size, 1));
    const bool rows656 = p.cache_dtype == FLARE_UINT8;
    FLARE_REQUIRE(!rows656 || (p.head_dim_k == 512 && p.head_dim_v == 64), FLARE_ERROR_SHAPE,
                  "head_dim_k is %" PRId64 " and head_dim_v %" PRId64 "; 656-byte latent rows hold d_c = 512 and d_r = 64", p.head_dim_k,
                  p.head_dim_v);
    const bool has_v = p.v != nullptr || (latent && p.head_dim_v > 0);
    FLARE_REQUIRE(latent || (p.v == nullptr) == (p.v_cache == nullptr), FLARE_ERROR_NULL,
                  "v and v_cache must both be given, or both be NULL");
    FLARE_REQUIRE(!latent || p.v_cache == nullptr, FLARE_ERROR_OPTION, "v_cache is given; the latent layout has one cache, k_cache");
    FLARE_REQUIRE(p.cache_dtype == FLARE_FP8_E4M3 || (p.k_descale == nullptr && p.v_descale == nullptr), FLARE_ERROR_OPTION,
                  "descales are given, but cache_dtype is %s; they go with FP8_E4M3", dtype_name(p.cache_dtype));
    if (p.rotary_cos != nullptr || p.rotary_sin != nullptr) {
        FLARE_REQUIRE(p.rotary_cos != nullptr && p.rotary_sin != nullptr && (p.positions != nullptr || !wants_data(check)),
                      FLARE_ERROR_NULL, "rotary_cos, rotary_sin and positions must be given together");
        const int64_t width = latent ? p.head_dim_v : p.head_dim_k;
        FLARE_REQUIRE(p.rotary_dim > 0 && p.rotary_dim % 2 == 0 && p.rotary_dim <= width, FLARE_ERROR_SHAPE,
                      "rotary_dim is %" PRId64 "; it must be even and in 2..%" PRId64, p.rotary_dim, width);
        FLARE_TRY(check_size("max_position", p.max_position, 0));
        FLARE_TRY(check_index_array("positions", p.positions, p.index_dtype));
    }
    const int64_t element = dtype_bytes(p.dtype);
    const int64_t cache_element = dtype_bytes(p.cache_dtype);
    const TensorView k("k", p.k, element, {p.num_tokens, p.heads, p.head_dim_k}, {p.k_stride_t, p.k_stride_h, 1});
    const TensorView v("v", p.v, element, {has_v ? p.num_tokens : 0, p.heads, p.head_dim_v}, {p.v_stride_t, p.v_stride_h, 1});
    const TensorView slots("slots", p.slots, dtype_bytes(p.index_dtype), {p.num_tokens}, {1});
    const int64_t k_width = latent ? (rows656 ? kLatentRowBytes : p.head_dim_k + p.head_dim_v) : p.head_dim_k;
    const TensorView k_cache("k_cache", p.k_cache, cache_element, {p.num_pages, p.page_size, p.heads, k_width},
                             {p.k_cache_stride_b, p.k_cache_stride_s, p.k_cache_stride_h, 1});
    const TensorView v_cache("v_cache", p.v_cache, cache_element,
                             {p.v_cache != nullptr ? p.num_pages : 0, p.page_size, p.heads, p.head_dim_v},
                             {p.v_cache_stride_b, p.v_cache_stride_s, p.v_cache_stride_h, 1});
    FLARE_TRY(check_inputs({&k, &v, &slots}, check));
    FLARE_TRY(check_output(k_cache, wants_data(check) && p.num_tokens > 0));
    FLARE_TRY(check_output(v_cache, wants_data(check) && p.num_tokens > 0));
    FLARE_TRY(check_all_disjoint(k_cache, {&k, &v}));
    FLARE_TRY(check_all_disjoint(v_cache, {&k, &v, &k_cache}));
    FLARE_REQUIRE(!rows656 || reinterpret_cast<uintptr_t>(p.k_cache) % 16 == 0, FLARE_ERROR_ALIGNMENT,
                  "k_cache: address %p isn't a multiple of 16, which 656-byte rows need", p.k_cache);
    FLARE_REQUIRE(!rows656 || (p.k_cache_stride_s % 16 == 0 && p.k_cache_stride_b % 16 == 0), FLARE_ERROR_STRIDE,
                  "k_cache: strides of 656-byte rows must be multiples of 16 bytes, got %" PRId64 " and %" PRId64, p.k_cache_stride_b,
                  p.k_cache_stride_s);
    return FLARE_OK;
}

int32_t check_workspace(const void* workspace, uint64_t given, uint64_t needed) {
    if (needed > 0 && (workspace == nullptr || given < needed)) {
        return fail(FLARE_ERROR_WORKSPACE, "workspace: %llu bytes given, %llu needed; ask the operation's _workspace function",
                    static_cast<unsigned long long>(workspace == nullptr ? 0 : given), static_cast<unsigned long long>(needed));
    }
    return FLARE_OK;
}

}  // namespace flare
