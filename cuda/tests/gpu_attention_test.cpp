// Attention and the merge of partial results on CUDA against the CPU backend, through flare.h: every kernel by name, every
// option, outputs poisoned first, unused memory filled with NaN, errors held to the bounds of the golden vectors. Without
// arguments the whole grid, "grid I N" every N-th case of it from the I-th on (several processes share the work, most of which
// is the CPU's); "small [I N]" a short one for compute-sanitizer; "random SECONDS SEED" random cases. Ends with status 77 (skipped)
// where there is no usable GPU.
#if defined(FLARE_HAVE_CUDA)
#include "gpu_support.h"

#include <chrono>

using namespace gpu_test;

namespace {

// Standard normal values, drawn from a table: a test makes hundreds of millions.
double quick_normal() {
    static const std::vector<double> table = [] {
        std::mt19937_64 bits(7);
        std::normal_distribution<double> distribution;
        std::vector<double> values(1 << 18);
        for (double& x : values) {
            x = distribution(bits);
        }
        return values;
    }();
    return table[random_bits() >> 46];
}

struct Case {
    int32_t dtype = FLARE_BF16;
    int32_t out_dtype = 0;
    int64_t batch = 1;
    int64_t sq = 1;
    int64_t sk = 1;
    int64_t heads = 1;
    int64_t heads_kv = 1;
    int64_t d = 128;
    int64_t dv = 128;
    int32_t mask = FLARE_MASK_NONE;
    int64_t left = 0;
    int64_t right = 0;
    float softcap = 0.0f;
    bool alibi = false;
    bool sink = false;
    bool scaled = false;  // take `scale` literally
    float scale = 0.0f;
    int64_t page = 0;  // 0 = contiguous
    bool packed_q = false;
    bool packed_k = false;
    bool used_q = false;
    bool used_k = false;
    bool index64 = false;
    bool heads_first = false;  // [B, H, S, D]
    int64_t row_padding = 0;   // elements of NaN behind each row
    bool lse = true;
    bool descales = false;
    int32_t splits = 0;
    int32_t deterministic = 0;
    int32_t kernel = FLARE_KERNEL_AUTO;
    const char* expect = "";  // kernel name begins with
};

std::string describe(const Case& c) {
    char text[512];
    std::snprintf(
        text, sizeof(text), "%s%s B%d Sq%d Sk%d H%d/%d D%d/%d m%d(%d,%d) cap%g%s%s scale%g page%d%s%s%s%s%s%s pad%d s%d%s k%d",
        name_of(c.dtype), c.out_dtype ? (std::string(">") + name_of(c.out_dtype)).c_str() : "", static_cast<int>(c.batch),
        static_cast<int>(c.sq), static_cast<int>(c.sk), static_cast<int>(c.heads), static_cast<int>(c.heads_kv),
        static_cast<int>(c.d), static_cast<int>(c.dv), c.mask, static_cast<int>(c.left), static_cast<int>(c.right),
        static_cast<double>(c.softcap), c.alibi ? " alibi" : "", c.sink ? " sink" : "",
        static_cast<double>(c.scaled ? c.scale : -99), static_cast<int>(c.page), c.packed_q ? " packq" : "",
        c.packed_k ? " packk" : "", c.used_q ? " usedq" : "", c.used_k ? " usedk" : "", c.index64 ? " i64" : "",
        c.heads_first ? " bhnd" : "", static_cast<int>(c.row_padding), c.splits, c.deterministic ? " det" : "", c.kernel);
    return text;
}

// A [B, S, H, D] tensor, or [total, H, D]: strides, and which (sequence, row) exist.
struct Layout {
    int64_t stride_b, stride_s, stride_h, count;

    Layout(int64_t batch, int64_t rows, int64_t heads, int64_t dim, const Case& c) {
        const int64_t width = dim + c.row_padding;
        if (c.heads_first) {
            stride_s = width;
            stride_h = rows * width;
        } else {
            stride_h = width;
            stride_s = heads * width;
        }
        stride_b = rows * heads * width;
        count = std::max<int64_t>(1, batch * stride_b);
    }
};

void fill_row(Mirror& x, int64_t at, int64_t dim) {
    for (int64_t i = 0; i < dim; ++i) {
        x.set(at + i, static_cast<float>(quick_normal()));
    }
}

double out_bound(const Case& c) {
    if (c.dtype == FLARE_FP8_E4M3) {
        return 4e-2;
    }
    const double own = c.dtype == FLARE_FP32 ? 2e-6 : c.dtype == FLARE_FP16 ? 1e-3 : 5e-3;
    const double rounding = c.out_dtype == FLARE_BF16 ? 5e-3 : c.out_dtype == FLARE_FP16 ? 1e-3 : 0.0;
    return std::max(own, rounding);
}

double lse_bound(const Case& c) {
    return c.dtype == FLARE_FP32 ? 1e-5 : c.dtype == FLARE_BF16 ? 2e-3 : c.dtype == FLARE_FP16 ? 1e-3 : 4e-2;
}

void fail(const std::string& what, const std::string& kernel, const std::string& why) {
    report(false, what, "[" + kernel + "] " + why + " " + last_error());
}

int turn = 0;  // cases of the grid so far
int share = 0;
int shares = 0;  // 0: random cases, not shared

void test(const Case& c) {
    if (shares > 0) {
        if (turn++ % shares != share) {
            return;
        }
        random_bits.seed(0x5EED + static_cast<uint64_t>(turn));  // the same data whoever runs it
    }
    const int32_t index_type = c.index64 ? FLARE_INT64 : FLARE_INT32;
    const bool paged = c.page > 0;
    // Lengths: sequence b has sq - b rows of which b % 2 aren't in use; likewise keys. Dense storage has room for the maximum.
    std::vector<int64_t> len_q, len_k, used_q, used_k, begin_q{0}, begin_k{0};
    for (int64_t b = 0; b < c.batch; ++b) {
        len_q.push_back(c.packed_q ? std::max<int64_t>(0, c.sq - 3 * b) : c.sq);
        len_k.push_back(c.packed_k ? (b % 3 == 2 ? 0 : std::max<int64_t>(0, c.sk - 5 * b)) : c.sk);
        used_q.push_back(c.used_q ? std::max<int64_t>(0, len_q.back() - b % 2) : len_q.back());
        used_k.push_back(c.used_k || paged ? std::max<int64_t>(0, len_k.back() - (b % 3 == 1 ? len_k.back() / 2 : b))
                                           : len_k.back());
        begin_q.push_back(begin_q.back() + len_q.back());
        begin_k.push_back(begin_k.back() + len_k.back());
    }
    const int64_t pages_each = paged ? (c.sk + c.page - 1) / c.page : 0;
    const int64_t num_pages = pages_each * c.batch + 1;  // page 0 belongs to nobody
    const int64_t rows_q = c.packed_q ? begin_q.back() : c.sq;
    const int64_t rows_k = paged ? c.page : c.packed_k ? begin_k.back() : c.sk;
    const int64_t batch_q = c.packed_q ? 1 : c.batch;
    const int64_t batch_k = paged ? num_pages : c.packed_k ? 1 : c.batch;
    const Layout at_q(batch_q, rows_q, c.heads, c.d, c), at_k(batch_k, rows_k, c.heads_kv, c.d, c),
        at_v(batch_k, rows_k, c.heads_kv, c.dv, c), at_o(batch_q, rows_q, c.heads, c.dv, c);
    const int32_t out_type = c.out_dtype != 0 ? c.out_dtype : c.dtype == FLARE_FP8_E4M3 ? FLARE_BF16 : c.dtype;
    Mirror q(c.dtype, at_q.count), k(c.dtype, at_k.count), v(c.dtype, at_v.count), out(out_type, at_o.count);
    const int64_t lse_b = c.heads * rows_q;
    Mirror lse(FLARE_FP32, std::max<int64_t>(1, batch_q * lse_b));
    Mirror slopes(FLARE_FP32, c.batch * c.heads), sinks(FLARE_FP32, c.heads);
    Mirror scales_q(FLARE_FP32, c.batch * c.heads_kv), scales_k(FLARE_FP32, c.batch * c.heads_kv),
        scales_v(FLARE_FP32, c.batch * c.heads_kv);
    Mirror cu_q(index_type, c.batch + 1), cu_k(index_type, c.batch + 1), in_use_q(index_type, c.batch + 1),
        in_use_k(index_type, c.batch + 1), table(index_type, std::max<int64_t>(1, c.batch * pages_each));
    for (int64_t b = 0; b < c.batch; ++b) {
        for (int64_t h = 0; h < c.heads; ++h) {
            for (int64_t i = 0; i < used_q[b]; ++i) {
                fill_row(
                    q,
                    (c.packed_q ? (begin_q[b] + i) * at_q.stride_s : b * at_q.stride_b + i * at_q.stride_s) + h * at_q.stride_h,
                    c.d);
            }
        }
        for (int64_t page = 0; page < pages_each; ++page) {
            // Pages beyond the length don't exist, nor does anybody read their numbers.
            table.set_index(b * pages_each + page, page * c.page < used_k[b] ? num_pages - 1 - (b * pages_each + page) : -1);
        }
        for (int64_t h = 0; h < c.heads_kv; ++h) {
            for (int64_t i = 0; i < used_k[b]; ++i) {
                const int64_t outer = paged ? num_pages - 1 - (b * pages_each + i / c.page) : c.packed_k ? 0 : b;
                const int64_t row = paged ? i % c.page : c.packed_k ? begin_k[b] + i : i;
                fill_row(k, outer * at_k.stride_b + row * at_k.stride_s + h * at_k.stride_h, c.d);
                fill_row(v, outer * at_v.stride_b + row * at_v.stride_s + h * at_v.stride_h, c.dv);
            }
        }
        in_use_q.set_index(b, used_q[b]);
        in_use_k.set_index(b, used_k[b]);
    }
    for (int64_t b = 0; b <= c.batch; ++b) {
        cu_q.set_index(b, begin_q[b]);
        cu_k.set_index(b, begin_k[b]);
    }
    for (int64_t i = 0; i < c.batch * c.heads; ++i) {
        slopes.set(i, static_cast<float>(0.1 * std::fabs(quick_normal())));
    }
    for (int64_t i = 0; i < c.heads; ++i) {
        sinks.set(i, i % 4 != 3 ? static_cast<float>(quick_normal()) : i % 8 == 3 ? INFINITY : -INFINITY);
    }
    for (int64_t i = 0; i < c.batch * c.heads_kv; ++i) {
        scales_q.set(i, static_cast<float>(1.0 + 0.2 * quick_normal()));
        scales_k.set(i, static_cast<float>(1.0 + 0.2 * quick_normal()));
        scales_v.set(i, static_cast<float>(1.0 + 0.2 * quick_normal()));
    }
    for (Mirror* x : {&q, &k, &v, &out, &lse, &slopes, &sinks, &scales_q, &scales_k, &scales_v, &cu_q, &cu_k, &in_use_q,
                      &in_use_k, &table}) {
        x->upload();
    }

    flare_attention_params p;
    std::memset(&p, 0, sizeof(p));
    p.struct_size = sizeof(p);
    p.flags = c.scaled ? FLARE_FLAG_SCALE : 0;
    p.scale = c.scaled ? c.scale : 0.0f;
    p.dtype = c.dtype;
    p.out_dtype = c.out_dtype;
    p.index_dtype = index_type;
    p.num_splits = c.splits;
    p.deterministic = c.deterministic;
    p.batch = c.batch;
    p.seqlen_q = c.sq;
    p.seqlen_k = c.sk;
    p.heads_q = c.heads;
    p.heads_kv = c.heads_kv;
    p.head_dim_qk = c.d;
    p.head_dim_v = c.dv;
    p.total_q = rows_q;
    p.total_k = rows_k;
    p.q_stride_b = at_q.stride_b;
    p.q_stride_s = at_q.stride_s;
    p.q_stride_h = at_q.stride_h;
    p.k_stride_b = at_k.stride_b;
    p.k_stride_s = at_k.stride_s;
    p.k_stride_h = at_k.stride_h;
    p.v_stride_b = at_v.stride_b;
    p.v_stride_s = at_v.stride_s;
    p.v_stride_h = at_v.stride_h;
    p.out_stride_b = at_o.stride_b;
    p.out_stride_s = at_o.stride_s;
    p.out_stride_h = at_o.stride_h;
    p.lse_stride_h = rows_q;
    p.lse_stride_b = lse_b;
    p.softcap = c.softcap;
    p.mask = c.mask;
    p.window_left = c.left;
    p.window_right = c.right;
    p.page_size = paged ? c.page : 0;
    p.num_pages = paged ? num_pages : 0;
    p.block_table_stride_b = pages_each;
    p.alibi_stride_b = c.heads;
    p.descale_stride_b = c.descales ? c.heads_kv : 0;
    p.descale_stride_h = c.descales ? 1 : 0;
    const auto point = [&](int32_t device) {
        p.device = device;
        p.q = q.on(device);
        p.k = k.on(device);
        p.v = v.on(device);
        p.out = out.on(device);
        p.lse = c.lse ? lse.floats(device) : nullptr;
        p.alibi_slopes = c.alibi ? slopes.floats(device) : nullptr;
        p.sink = c.sink ? sinks.floats(device) : nullptr;
        p.q_descale = c.descales ? scales_q.floats(device) : nullptr;
        p.k_descale = c.descales ? scales_k.floats(device) : nullptr;
        p.v_descale = c.descales ? scales_v.floats(device) : nullptr;
        p.cu_seqlens_q = c.packed_q ? cu_q.on(device) : nullptr;
        p.cu_seqlens_k = c.packed_k ? cu_k.on(device) : nullptr;
        p.seqused_q = c.used_q ? in_use_q.on(device) : nullptr;
        p.seqused_k = c.used_k || paged ? in_use_k.on(device) : nullptr;
        p.block_table = paged ? table.on(device) : nullptr;
    };
    const std::string what = describe(c);
    point(FLARE_DEVICE_CPU);
    p.kernel = FLARE_KERNEL_AUTO;
    p.num_splits = 1;
    uint64_t bytes = 0;
    if (flare_attention_workspace(&p, &bytes) != FLARE_OK) {
        return fail(what, "cpu", "the CPU backend refused the workspace");
    }
    std::vector<uint8_t> scratch(bytes + 256);
    p.workspace = scratch.data() + (256 - reinterpret_cast<uintptr_t>(scratch.data()) % 256) % 256;
    p.workspace_bytes = bytes;
    if (flare_attention_forward(&p) != FLARE_OK) {
        return fail(what, "cpu", "the CPU backend refused");
    }

    point(0);
    p.kernel = c.kernel;
    p.num_splits = c.splits;
    char kernel[128] = "?";
    void* workspace = nullptr;
    if (flare_kernel_name(FLARE_OP_ATTENTION_FORWARD, &p, kernel, sizeof(kernel)) != FLARE_OK ||
        flare_attention_workspace(&p, &bytes) != FLARE_OK) {
        return fail(what, kernel, "refused");
    }
    if (std::strncmp(kernel, c.expect, std::strlen(c.expect)) != 0) {
        return fail(what, kernel, std::string("expected ") + c.expect);
    }
    check_cuda(cudaMalloc(&workspace, bytes + 256), "cudaMalloc");
    check_cuda(cudaMemset(workspace, 0xff, bytes + 256), "cudaMemset");
    p.workspace = workspace;
    p.workspace_bytes = bytes;
    std::vector<uint8_t> first_out, first_lse;
    for (int repeat = 0; repeat < 2; ++repeat) {
        const int32_t status = flare_attention_forward(&p);
        check_cuda(cudaDeviceSynchronize(), (what + " " + kernel).c_str());
        if (status != FLARE_OK) {
            fail(what, kernel, flare_status_string(status));
            cudaFree(workspace);
            return;
        }
        if (repeat == 0) {
            first_out = out.download();
            first_lse = lse.download();
        }
    }
    const bool same = first_out == out.download() && first_lse == lse.download();
    cudaFree(workspace);
    const Difference error = compare(out, first_out);
    const Difference error_lse = c.lse ? compare(lse, first_lse) : Difference{0.0, 0.0};
    if (!same) {
        fail(what, kernel, "two runs differ");
    } else if (!(error.relative <= out_bound(c)) || !(error_lse.largest <= lse_bound(c))) {
        char why[128];
        std::snprintf(why, sizeof(why), "out %.2e > %.1e or lse %.2e > %.1e", error.relative, out_bound(c), error_lse.largest,
                      lse_bound(c));
        fail(what, kernel, why);
    } else {
        report(true, what, "");
        std::printf("ok   %-34s %.1e %.1e  %s\n", kernel, error.relative, error_lse.largest, what.c_str());
    }
}

void test_merge(int32_t dtype, int32_t out_dtype, int64_t partials, int64_t batch, int64_t seqlen, int64_t heads, int64_t dim) {
    const int64_t rows = batch * seqlen * heads;
    Mirror parts(dtype, partials * rows * dim), lses(FLARE_FP32, partials * rows), out(out_dtype, rows * dim),
        lse(FLARE_FP32, rows);
    for (int64_t i = 0; i < partials * rows; ++i) {
        const bool empty = integer(0, 4) == 0;
        lses.set(i, empty ? -INFINITY : static_cast<float>(3.0 * quick_normal()));
    }
    // partial_out [P, B, S, H, D] but partial_lse [P, B, H, S]: an empty partial's out stays NaN.
    for (int64_t p = 0; p < partials; ++p) {
        for (int64_t b = 0; b < batch; ++b) {
            for (int64_t s = 0; s < seqlen; ++s) {
                for (int64_t h = 0; h < heads; ++h) {
                    const float one = lses.get(((p * batch + b) * heads + h) * seqlen + s);
                    if (std::isfinite(one)) {
                        fill_row(parts, (((p * batch + b) * seqlen + s) * heads + h) * dim, dim);
                    }
                }
            }
        }
    }
    for (Mirror* x : {&parts, &lses, &out, &lse}) {
        x->upload();
    }
    flare_attention_merge_params m;
    std::memset(&m, 0, sizeof(m));
    m.struct_size = sizeof(m);
    m.dtype = dtype;
    m.out_dtype = out_dtype;
    m.num_partials = partials;
    m.batch = batch;
    m.seqlen = seqlen;
    m.heads = heads;
    m.head_dim = dim;
    m.partial_out_stride_h = m.out_stride_h = dim;
    m.partial_out_stride_s = m.out_stride_s = heads * dim;
    m.partial_out_stride_b = m.out_stride_b = seqlen * heads * dim;
    m.partial_out_stride_p = rows * dim;
    m.partial_lse_stride_h = m.lse_stride_h = seqlen;
    m.partial_lse_stride_b = m.lse_stride_b = heads * seqlen;
    m.partial_lse_stride_p = rows;
    char kernel[128] = "cpu";
    char what[160];
    std::snprintf(what, sizeof(what), "merge %s>%s P%d B%d S%d H%d D%d", name_of(dtype), name_of(out_dtype),
                  static_cast<int>(partials), static_cast<int>(batch), static_cast<int>(seqlen), static_cast<int>(heads),
                  static_cast<int>(dim));
    for (const int32_t device : {-1, 0}) {
        m.device = device;
        m.partial_out = parts.on(device);
        m.partial_lse = lses.floats(device);
        m.out = out.on(device);
        m.lse = lse.floats(device);
        if (device == 0 && flare_kernel_name(FLARE_OP_ATTENTION_MERGE, &m, kernel, sizeof(kernel)) != FLARE_OK) {
            return fail(what, kernel, "no name");
        }
        if (flare_attention_merge(&m) != FLARE_OK) {
            return fail(what, kernel, "refused");
        }
    }
    check_cuda(cudaDeviceSynchronize(), what);
    const Difference error = compare(out, out.download());
    const Difference error_lse = compare(lse, lse.download());
    const double bound = out_dtype == FLARE_BF16 ? 3e-3 : out_dtype == FLARE_FP16 ? 4e-4 : 2e-6;
    if (std::strcmp(kernel, "attention_sm80_merge") != 0 || !(error.relative <= bound) || !(error_lse.largest <= 1e-5)) {
        char why[96];
        std::snprintf(why, sizeof(why), "out %.2e > %.1e or lse %.2e", error.relative, bound, error_lse.largest);
        return fail(what, kernel, why);
    }
    report(true, what, "");
    std::printf("ok   %-34s %.1e %.1e  %s\n", kernel, error.relative, error_lse.largest, what);
}

// Base shapes with a change each.
template <typename Change>
Case with(Case c, Change change) {
    change(c);
    return c;
}

Case prefill(int32_t dtype, int64_t d, int64_t dv) {
    Case c;
    c.dtype = dtype;
    c.batch = 2;
    c.sq = 200;
    c.sk = 333;
    c.heads = 4;
    c.heads_kv = 2;
    c.d = d;
    c.dv = dv;
    c.mask = FLARE_MASK_CAUSAL;
    c.kernel = FLARE_KERNEL_PORTABLE;
    return c;
}

Case decode(int32_t dtype, int64_t d) {
    Case c = prefill(dtype, d, d);
    c.batch = 3;
    c.sq = 1;
    c.sk = 700;
    c.heads = 8;
    c.expect = "attention_sm80_decode";
    return c;
}

void test_masks(Case c) {
    for (const int32_t mask : {FLARE_MASK_NONE, FLARE_MASK_CAUSAL}) {
        c.mask = mask;
        test(c);
        test(with(c, [](Case& x) { std::swap(x.sq, x.sk); }));  // with a causal mask the first rows see nothing
    }
    c.mask = FLARE_MASK_WINDOW;
    const int64_t windows[][2] = {{0, 0}, {63, 0}, {100, 20}, {-1, 7}, {5, -1}, {1000, 0}};
    for (const auto& w : windows) {
        c.left = w[0];
        c.right = w[1];
        test(c);
    }
    test(with(c, [](Case& x) { x.sk = 0; }));
}

void test_options(const Case& c) {
    test(with(c, [](Case& x) { x.softcap = 5.0f; }));
    test(with(c, [](Case& x) {
        x.softcap = 50.0f;
        x.scaled = true;
        x.scale = -0.1f;
    }));
    test(with(c, [](Case& x) { x.alibi = true; }));
    test(with(c, [](Case& x) { x.sink = true; }));
    test(with(c, [](Case& x) {
        x.sink = x.alibi = true;
        x.softcap = 3.0f;
        x.mask = FLARE_MASK_WINDOW;
        x.left = 40;
        x.right = 3;
    }));
    test(with(c, [](Case& x) {
        x.scaled = true;
        x.scale = -0.3f;
    }));
    test(with(c, [](Case& x) {
        x.softcap = 5.0f;
        x.scaled = true;
        x.scale = 0.0f;
    }));
    test(with(c, [](Case& x) {
        x.scaled = true;
        x.scale = 0.0f;
    }));
    test(with(c, [](Case& x) { x.lse = false; }));
    test(with(c, [](Case& x) { x.heads_first = true; }));
    test(with(c, [](Case& x) { x.row_padding = 8; }));
    test(with(c, [](Case& x) {
        x.packed_q = x.packed_k = true;
        x.batch = 4;
    }));
    test(with(c, [](Case& x) {
        x.packed_q = x.packed_k = x.used_q = x.used_k = true;
        x.batch = 4;
        x.index64 = true;
    }));
    test(with(c, [](Case& x) {
        x.used_q = x.used_k = true;
        x.mask = FLARE_MASK_NONE;
    }));
    test(with(c, [](Case& x) {
        x.packed_q = true;
        x.used_k = true;
        x.sink = true;
    }));
    for (const int64_t page : {1, 16, 17, 64, 128}) {
        test(with(c, [=](Case& x) {
            x.page = page;
            x.index64 = page == 17;
        }));
    }
    test(with(c, [](Case& x) {
        x.page = 16;
        x.packed_q = true;
        x.mask = FLARE_MASK_WINDOW;
        x.left = 50;
        x.batch = 3;
    }));
    for (const int32_t splits : {2, 5, 64}) {
        test(with(c, [=](Case& x) {
            x.splits = splits;
            x.sink = splits == 5;
        }));
    }
    test(with(c, [](Case& x) {
        x.splits = 3;
        x.packed_q = x.packed_k = true;
        x.batch = 4;
        x.used_q = true;
    }));
    test(with(c, [](Case& x) {
        x.splits = 3;
        x.page = 16;
        x.mask = FLARE_MASK_WINDOW;
        x.left = 200;
    }));
    test(with(c, [](Case& x) {
        x.deterministic = 1;
        x.sk = 5000;
    }));
    test(with(c, [](Case& x) { x.heads = x.heads_kv = 3; }));
    test(with(c, [](Case& x) {
        x.heads = 6;
        x.heads_kv = 1;
    }));
    for (const int32_t out : {FLARE_FP32, FLARE_FP16, FLARE_BF16}) {
        test(with(c, [=](Case& x) { x.out_dtype = out; }));
    }
}

void test_grid() {
    for (const int32_t dtype : {FLARE_BF16, FLARE_FP16}) {
        const int64_t dims[][2] = {{64, 64}, {96, 96}, {128, 128}, {192, 128}, {192, 192}, {256, 256}};
        for (const auto& d : dims) {
            Case c = prefill(dtype, d[0], d[1]);
            c.expect = "attention_sm80_d";
            test_masks(c);
            for (const int64_t n : {1, 15, 16, 17, 63, 64, 65, 127, 128, 129, 257}) {
                test(with(c, [=](Case& x) {
                    x.sq = x.sk = n;
                    x.expect = "attention_sm80";
                    x.heads_kv = 4;
                }));
            }
        }
        // Rows that see many keys have larger tiles.
        for (const int64_t d : {64, 128}) {
            const Case many = with(prefill(dtype, d, d), [=](Case& x) {
                x.batch = 1;
                x.sq = 1100;
                x.sk = d == 64 ? 4500 : 1500;
                x.expect = d == 64 ? "attention_sm80_d64" : "attention_sm80_d128";
            });
            test_masks(many);
            for (const int64_t right : {0, 200}) {
                test(with(many, [=](Case& x) {
                    x.mask = FLARE_MASK_WINDOW;
                    x.left = x.sk / 2;
                    x.right = right;
                    x.expect = x.d == 64 ? "attention_sm80_d64_128x64" : "attention_sm80_d128_128x64";
                }));
            }
        }
        for (const int64_t d : {64, 128, 256}) {
            test_options(with(prefill(dtype, d, d), [](Case& x) { x.expect = "attention_sm80"; }));
            // Tiles of rows that see nothing, beside others.
            for (const int64_t page : {0, 16}) {
                test(with(prefill(dtype, d, d), [=](Case& x) {
                    x.sq = 2100;
                    x.sk = 17;
                    x.page = page;
                    x.heads = 6;
                }));
            }
            test_options(decode(dtype, d));
            test_masks(with(decode(dtype, d), [](Case& x) { x.expect = "attention_sm80"; }));
            test(with(decode(dtype, d), [](Case& x) {
                x.sk = 20000;
                x.batch = 1;
            }));
            test(with(decode(dtype, d), [](Case& x) {
                x.sq = 4;
                x.mask = FLARE_MASK_CAUSAL;
            }));
            // 17..64 rows of a group: one tile of the general kernel, split.
            const Case few = with(decode(dtype, d), [](Case& x) {
                x.sq = 7;
                x.sk = 1500;
                x.expect = "attention_sm80_general";
            });
            test(few);
            test_options(with(few, [](Case& x) { x.expect = "attention_sm80"; }));
            // More rows, several tiles of a group's heads.
            test_options(with(few, [](Case& x) {
                x.sq = 61;
                x.expect = "attention_sm80";
            }));
        }
        for (int64_t d = 8; d <= 512; d += d < 72 ? 8 : 56) {
            test(with(prefill(dtype, d, d), [](Case& x) {
                x.batch = 1;
                x.sq = 70;
                x.sk = 90;
            }));
            test(with(prefill(dtype, d, 520 - d), [](Case& x) {
                x.batch = 1;
                x.sq = 70;
                x.sk = 90;
            }));
            test(with(prefill(dtype, d, d), [](Case& x) {
                x.batch = 1;
                x.sq = 1;
                x.sk = 90;
                x.page = 16;
            }));
        }
        test(with(prefill(dtype, 128, 128), [](Case& x) {
            x.row_padding = 3;
            x.expect = "attention_sm80_fma";
        }));
        test(with(prefill(dtype, 77, 33), [](Case& x) { x.expect = "attention_sm80_fma"; }));
    }
    for (const int32_t dtype : {FLARE_FP32, FLARE_FP8_E4M3}) {
        for (const int64_t d : {64, 100, 128, 256, 512}) {
            Case c = with(prefill(dtype, d, d), [=](Case& x) {
                x.sq = 70;
                x.sk = 140;
                x.descales = dtype == FLARE_FP8_E4M3;
            });
            test_masks(c);
            if (d == 64 || d == 256) {
                test_options(c);
                test_options(with(decode(dtype, d), [](Case& x) { x.expect = "attention_sm80"; }));
            }
        }
        const char* automatic = dtype == FLARE_FP8_E4M3 ? "attention_sm90_d128_e4m3" : "attention_sm80";
        test(with(prefill(dtype, 128, 128), [=](Case& x) {
            x.kernel = FLARE_KERNEL_AUTO;
            x.expect = automatic;
        }));
    }
    // Automatic choice on Hopper: its own kernel, or a portable one for what that refuses or does slower.
    const Case automatic = with(prefill(FLARE_BF16, 128, 128), [](Case& x) { x.kernel = FLARE_KERNEL_AUTO; });
    test(with(automatic, [](Case& x) { x.expect = "attention_sm90_d128"; }));
    test(with(automatic, [](Case& x) {
        x.page = 16;
        x.expect = "attention_sm80_general_d128";
    }));
    test(with(automatic, [](Case& x) {
        x.splits = 3;
        x.expect = "attention_sm80_general_d128";
    }));
    test(with(automatic, [](Case& x) {
        x.scaled = true;
        x.scale = -1.0f;
        x.expect = "attention_sm80_general_d128";
    }));
    test(with(automatic, [](Case& x) {
        x.packed_q = x.index64 = true;
        x.expect = "attention_sm80_general_d128";
    }));
    test(with(automatic, [](Case& x) {
        x.d = x.dv = 80;
        x.expect = "attention_sm80_general_d128";
    }));
    test(with(automatic, [](Case& x) {
        x.sq = 1;
        x.expect = "attention_sm80_decode_d128";
    }));
    test(with(automatic, [](Case& x) {
        x.sq = 20;
        x.sk = 6000;
        x.expect = "attention_sm80_general_d128";
    }));
    for (const int32_t dtype : {FLARE_FP32, FLARE_FP16, FLARE_BF16}) {
        for (const int32_t out : {FLARE_FP32, FLARE_FP16, FLARE_BF16}) {
            test_merge(dtype, out, 3, 2, 5, 3, 128);
        }
        test_merge(dtype, dtype, 1, 1, 1, 1, 1);
        test_merge(dtype, dtype, 70, 1, 3, 2, 77);
        test_merge(dtype, FLARE_FP32, 5, 1, 2, 2, 512);
        test_merge(dtype, dtype, 2, 0, 2, 2, 64);
    }
}

void test_small() {
    test(with(prefill(FLARE_BF16, 128, 128), [](Case& x) {
        x.batch = 1;
        x.sq = 270;
        x.sk = 900;
        x.heads = x.heads_kv = 8;
        x.mask = FLARE_MASK_WINDOW;
        x.left = 650;
        x.splits = 1;
        x.expect = "attention_sm80_d128_128x64";
    }));
    for (const int64_t d : {64, 96, 128, 192, 256}) {
        test(with(prefill(FLARE_BF16, d, d), [](Case& x) {
            x.batch = 1;
            x.sq = 150;
            x.heads = x.heads_kv = 1;
            x.packed_k = x.packed_q = true;
        }));
        test(with(prefill(FLARE_FP16, d, d), [](Case& x) {
            x.batch = 1;
            x.sq = 70;
            x.page = 16;
            x.softcap = 5;
            x.alibi = true;
            x.splits = 2;
        }));
        test(with(decode(FLARE_BF16, d), [](Case& x) {
            x.batch = 2;
            x.page = 16;
            x.sink = true;
        }));
    }
    test(with(prefill(FLARE_FP32, 72, 72), [](Case& x) {
        x.batch = 1;
        x.sq = 70;
        x.splits = 2;
    }));
    test(with(prefill(FLARE_FP8_E4M3, 128, 256), [](Case& x) {
        x.batch = 1;
        x.sq = 70;
        x.descales = true;
    }));
    test_merge(FLARE_FP16, FLARE_FP32, 3, 2, 5, 3, 77);
}

template <typename T, size_t N>
T one_of(const T (&choices)[N]) {
    return choices[integer(0, static_cast<int64_t>(N) - 1)];
}

Case random_case() {
    Case c;
    c.dtype = one_of({FLARE_BF16, FLARE_BF16, FLARE_FP16, FLARE_FP16, FLARE_FP32, FLARE_FP8_E4M3});
    c.kernel = one_of({FLARE_KERNEL_AUTO, FLARE_KERNEL_PORTABLE});
    c.heads_kv = integer(1, 3);
    c.heads = c.heads_kv * integer(1, 5);
    c.batch = integer(1, 3);
    c.sq = one_of({integer(1, 3), integer(1, 40), integer(0, 300), integer(100, 900)});
    c.sk = one_of({integer(0, 100), integer(0, 700), c.sq, integer(500, 3000)});
    c.d = one_of({int64_t{64}, int64_t{128}, int64_t{256}, 8 * integer(1, 32)});
    c.dv = integer(0, 3) == 0 ? 8 * integer(1, 32) : c.d;
    c.mask = one_of({FLARE_MASK_NONE, FLARE_MASK_CAUSAL, FLARE_MASK_WINDOW});
    c.left = integer(-1, 200);
    c.right = integer(-1, 200);
    c.softcap = integer(0, 3) == 0 ? 4.0f : 0.0f;
    c.alibi = integer(0, 3) == 0;
    c.sink = integer(0, 3) == 0;
    c.page = integer(0, 2) == 0 ? integer(1, 80) : 0;
    c.packed_q = integer(0, 3) == 0;
    c.packed_k = c.page == 0 && integer(0, 3) == 0;
    c.used_q = integer(0, 3) == 0;
    c.used_k = integer(0, 3) == 0;
    c.index64 = integer(0, 3) == 0;
    c.heads_first = integer(0, 2) == 0;
    c.row_padding = integer(0, 4) == 0 ? 8 : 0;
    c.lse = integer(0, 4) != 0;
    c.splits = integer(0, 3) == 0 ? static_cast<int32_t>(integer(1, 9)) : 0;
    c.deterministic = integer(0, 4) == 0;
    c.descales = c.dtype == FLARE_FP8_E4M3 && integer(0, 1) == 0;
    return c;
}

void test_random(int seconds, uint64_t seed) {
    const auto end = std::chrono::steady_clock::now() + std::chrono::seconds(seconds);
    for (uint64_t i = 0; std::chrono::steady_clock::now() < end; ++i) {
        random_bits.seed(seed + i);
        const int before = failures;
        test(random_case());
        if (failures != before) {
            std::printf("     seed %llu\n", static_cast<unsigned long long>(seed + i));
        }
    }
}

}  // namespace

int main(int argc, char** argv) {
    if (!has_device()) {
        std::printf("gpu_attention_test: skipped, no CUDA device here\n");
        return kSkipped;
    }
    const std::string what = argc > 1 ? argv[1] : "grid";
    if (what == "random") {
        test_random(argc > 2 ? std::atoi(argv[2]) : 10, argc > 3 ? std::strtoull(argv[3], nullptr, 10) : 1);
    } else {
        share = argc > 2 ? std::atoi(argv[2]) : 0;
        shares = argc > 3 ? std::max(1, std::atoi(argv[3])) : 1;
        what == "small" ? test_small() : test_grid();
    }
    return finish("gpu_attention_test");
}

#else

#include <cstdio>

int main() {
    std::printf("gpu_attention_test: skipped, built without CUDA\n");
    return 77;
}

#endif
