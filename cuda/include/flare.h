/*
 * flare: attention kernels behind one C ABI.
 *
 * The rules that hold for every function of this header:
 *
 * - Status. Functions that can fail return int32_t: FLARE_OK (0) or one of the FLARE_ERROR_ constants. flare_last_error()
 *   then tells, for the calling thread, which argument was wrong, what was found and what was wanted. On any error other than
 *   FLARE_ERROR_LAUNCH and FLARE_ERROR_CONTEXT nothing has been written.
 * - Structs. Zero a params struct, set struct_size = sizeof(the struct), set the fields you need: zero is always the documented
 *   default. Fields are only ever appended. A smaller struct_size (an older caller) is accepted; a larger one is accepted
 *   if the surplus bytes are zero.
 * - Devices. device = FLARE_DEVICE_CPU (-1): all pointers are host memory, the call is synchronous and `stream` is ignored.
 *   device >= 0: a CUDA ordinal; all data and index pointers are device memory; the work is queued on `stream` (a cudaStream_t /
 *   CUstream, NULL = legacy default stream), the primary context of the device is made current for the call and the caller's
 *   context restored. The host never reads device memory: grids and workspaces depend only on sizes in the struct, so a captured
 *   CUDA graph stays valid for all lengths within them. No allocation, no synchronisation, no printing.
 * - Tensors. Pointer plus strides in ELEMENTS of the tensor's dtype; the last dimension is contiguous (stride 1), every other
 *   stride is free: [B, S, H, D] and [B, H, S, D] are both just strides. Inputs may have stride 0 (broadcast); outputs may not.
 *   Outputs must not overlap inputs unless a field says so. CUDA kernels want 16-byte aligned base pointers and strides.
 * - Sizes are int64_t. Batch and sequence lengths may be 0: such a call succeeds and writes what is left to write.
 * - Index arrays (cu_seqlens, seqused, block tables, slots) hold int32 values, or int64 if index_dtype = FLARE_INT64.
 *   The CPU backend checks their values before it writes anything (FLARE_ERROR_INDEX). The CUDA backend can't: out-of-range
 *   page and slot numbers are the caller's responsibility there.
 * - Attention. scores = scale * q.k; softcap, then ALiBi, then the mask; softmax; all accumulation in fp32. Masks are bottom-right
 *   aligned: query row i of a sequence with sq queries and sk keys stands at position i + sk - sq. A row that sees no key has
 *   out = 0 and lse = -inf (with a sink: the sink). lse is the natural logarithm of the softmax denominator, fp32.
 * - Threads. Every function may be called from any thread at any time; nothing is shared between calls but the caller's buffers.
 * - The library reads no environment variable, opens no file and loads without a CUDA driver.
 *
 * Papers: FlashAttention-2 (arXiv 2307.08691), FlashAttention-3 (2407.08608), DeepSeek-V2 for MLA (2405.04434), Kimi Linear for
 * KDA (2510.26692).
 */
#ifndef FLARE_H
#define FLARE_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#if defined(FLARE_BUILD)
#define FLARE_API __attribute__((visibility("default")))
#else
#define FLARE_API
#endif

/* Version of this header: major << 16 | minor << 8 | patch. flare_version() tells the library's. */
#define FLARE_VERSION 0x000100

#define FLARE_DEVICE_CPU (-1)

/* --- Status codes. Never renumbered. ------------------------------------------------------------------------------------- */

#define FLARE_OK 0
/* 1..99: an argument is wrong */
#define FLARE_ERROR_NULL 1        /* a required pointer is NULL */
#define FLARE_ERROR_STRUCT_SIZE 2 /* struct_size is 0, too small, or names non-zero bytes this library doesn't know */
#define FLARE_ERROR_FLAGS 3       /* unknown flag bits */
#define FLARE_ERROR_SHAPE 4       /* a size is negative, zero where it may not be, or doesn't fit another */
#define FLARE_ERROR_STRIDE 5      /* a stride is negative, or lets an output overlap itself */
#define FLARE_ERROR_DTYPE 6       /* a dtype constant is unknown or not one of those this field takes */
#define FLARE_ERROR_ALIGNMENT 7   /* a pointer isn't aligned to its element (CPU) or to 16 bytes (CUDA) */
#define FLARE_ERROR_OPTION 8      /* an option is out of range or contradicts another */
#define FLARE_ERROR_INDEX 9       /* CPU: an entry of an index array is out of range */
#define FLARE_ERROR_OVERLAP 10    /* an output overlaps an input or another output */
#define FLARE_ERROR_OVERFLOW 11   /* sizes and strides address more than 2^63 bytes */
/* 100..199: valid, but this backend doesn't do it */
#define FLARE_UNSUPPORTED_DTYPE 100
#define FLARE_UNSUPPORTED_SHAPE 101
#define FLARE_UNSUPPORTED_ARCH 102
#define FLARE_UNSUPPORTED_FEATURE 103
#define FLARE_UNSUPPORTED_KERNEL 104 /* the kernel asked for by the field `kernel` can't run these params */
/* 200..299: resources */
#define FLARE_ERROR_WORKSPACE 200 /* workspace is NULL, misaligned (256 bytes) or smaller than flare_*_workspace() says */
#define FLARE_ERROR_MEMORY 201    /* the host is out of memory */
/* 300..399: device */
#define FLARE_ERROR_NO_DRIVER 300 /* no CUDA driver, or one older than this library needs */
#define FLARE_ERROR_NO_DEVICE 301 /* no such CUDA device */
#define FLARE_ERROR_NO_CUDA 302   /* this library was built without CUDA */
#define FLARE_ERROR_LAUNCH 303    /* a kernel launch failed */
#define FLARE_ERROR_CONTEXT 304   /* an earlier fault lost the CUDA context: restart the process */
/* 900..: a bug in flare */
#define FLARE_ERROR_INTERNAL 900

/* --- Constants ----------------------------------------------------------------------------------------------------------- */

/* dtypes; 0 is "not given" */
#define FLARE_FP32 1
#define FLARE_FP16 2
#define FLARE_BF16 3
#define FLARE_FP8_E4M3 4
#define FLARE_UINT8 5 /* only for 656-byte latent rows: see flare_mla_decode_params */
#define FLARE_INT32 6
#define FLARE_INT64 7

/* field `kernel` */
#define FLARE_KERNEL_AUTO 0
#define FLARE_KERNEL_PORTABLE 1 /* sm_80 code, or the CPU backend */
#define FLARE_KERNEL_SM90 2     /* Hopper code; FLARE_UNSUPPORTED_KERNEL where it can't run */

/* field `flags` */
#define FLARE_FLAG_SCALE 1u /* take the field `scale` literally, also when it is 0 or negative; else scale = 0 means the default */

/* field `mask` */
#define FLARE_MASK_NONE 0
#define FLARE_MASK_CAUSAL 1 /* key j is visible to query i if j <= i + sk - sq */
#define FLARE_MASK_WINDOW 2 /* ... if i + sk - sq - window_left <= j <= i + sk - sq + window_right; negative = unbounded on that side */

/* field `gate` of KDA */
#define FLARE_GATE_LOG 0      /* g is the log decay itself (<= 0) */
#define FLARE_GATE_SOFTPLUS 1 /* log decay = -exp(a_log) * softplus(g + dt_bias) */
#define FLARE_GATE_BOUNDED 2  /* log decay = lower_bound * sigmoid(exp(a_log) * (g + dt_bias)) */

/* field `beta_activation` of KDA */
#define FLARE_BETA_RAW 0
#define FLARE_BETA_SIGMOID 1
#define FLARE_BETA_SIGMOID2 2 /* 2 * sigmoid(beta): negative eigenvalues allowed */

/* field `state_layout` of KDA; has no default because with K = V a wrong layout goes unseen */
#define FLARE_STATE_KV 1 /* [..., HV, K, V] */
#define FLARE_STATE_VK 2 /* [..., HV, V, K] */

/* field `weight_layout` of MLA */
#define FLARE_WEIGHT_CD 0 /* w_uk [H, d_c, d_nope], w_uv [H, d_c, d_v] */
#define FLARE_WEIGHT_DC 1 /* w_uk [H, d_nope, d_c], w_uv [H, d_v, d_c]: the order of a checkpoint's kv_b weight */

/* field `layout` of flare_cache_append */
#define FLARE_CACHE_KV 0     /* separate K and V caches [pages, page_size, heads, D] */
#define FLARE_CACHE_LATENT 1 /* one latent cache [pages, page_size, d_c + d_r], or 656-byte rows */

/* operations, for flare_kernel_name */
#define FLARE_OP_ATTENTION_FORWARD 1
#define FLARE_OP_MLA_PREFILL 2
#define FLARE_OP_MLA_DECODE 3
#define FLARE_OP_KDA_FORWARD 4
#define FLARE_OP_KDA_DECODE 5
#define FLARE_OP_ATTENTION_MERGE 6
#define FLARE_OP_CAST 7
#define FLARE_OP_FILL 8
#define FLARE_OP_CACHE_APPEND 9

/* --- Attention ----------------------------------------------------------------------------------------------------------- */

/*
 * flare_attention_forward: softmax(scale * Q K^T + mask) V, prefill and decode, dense, packed (varlen) or paged.
 *
 * Dense:  q [B, Sq, H, D], k [B, Sk, Hk, D], v [B, Sk, Hk, Dv], out [B, Sq, H, Dv], lse [B, H, Sq].
 * Varlen: cu_seqlens_q and cu_seqlens_k given. q [total_q, H, D], k [total_k, Hk, D], v, out packed alike, lse [H, total_q];
 *         *_stride_b are ignored; seqlen_q and seqlen_k are the largest lengths. Either one alone may be given.
 * Paged:  block_table given. k_pages [num_pages, page_size, Hk, D] (k_stride_b = stride between pages, k_stride_s = inside a page),
 *         v_pages alike; key j of sequence b lies in page block_table[b][j / page_size]. Needs seqused_k; entries beyond a
 *         sequence's length are never read. Excludes cu_seqlens_k. seqlen_k is the largest length.
 * H must be a multiple of Hk; query head h reads K/V head h / (H / Hk).
 */
typedef struct flare_attention_params {
    uint32_t struct_size; /* sizeof(flare_attention_params) */
    uint32_t flags;       /* FLARE_FLAG_* */
    int32_t device;       /* FLARE_DEVICE_CPU or a CUDA ordinal */
    int32_t kernel;       /* FLARE_KERNEL_* */
    void* stream;         /* CUDA stream; ignored on the CPU */
    int32_t num_threads;  /* CPU: threads to use, 0 = all cores */
    int32_t deterministic; /* 1: results don't depend on what else is in the batch (fixed split sizes) */

    int32_t dtype;       /* of q, k, v: FP32, FP16, BF16, FP8_E4M3 */
    int32_t out_dtype;   /* FP32, FP16, BF16; 0 = dtype, or BF16 for FP8 inputs */
    int32_t index_dtype; /* INT32 or INT64; 0 = INT32 */
    int32_t num_splits;  /* key splits of one sequence: 0 = automatic, 1 = none, n = exactly n */

    int64_t batch;       /* B >= 0 */
    int64_t seqlen_q;    /* Sq >= 0; with cu_seqlens_q the maximum */
    int64_t seqlen_k;    /* Sk >= 0; with cu_seqlens_k or pages the maximum */
    int64_t heads_q;     /* H >= 1 */
    int64_t heads_kv;    /* Hk >= 1 */
    int64_t head_dim_qk; /* D, 1..512 */
    int64_t head_dim_v;  /* Dv, 1..512 */
    int64_t total_q;     /* varlen: rows of q and out */
    int64_t total_k;     /* varlen: rows of k and v */

    const void* q;
    const void* k;
    const void* v;
    void* out;
    float* lse; /* optional */
    int64_t q_stride_b, q_stride_s, q_stride_h;
    int64_t k_stride_b, k_stride_s, k_stride_h;
    int64_t v_stride_b, v_stride_s, v_stride_h;
    int64_t out_stride_b, out_stride_s, out_stride_h;
    int64_t lse_stride_b, lse_stride_h; /* stride 1 along the sequence */

    float scale;   /* 0 = 1/sqrt(D), unless FLARE_FLAG_SCALE */
    float softcap; /* s = softcap * tanh(s / softcap); 0 = off */
    int32_t mask;  /* FLARE_MASK_* */
    int32_t reserved0;
    int64_t window_left;  /* read if mask = WINDOW: keys to the left besides the own one; negative = all. A model's "window W" is W - 1 */
    int64_t window_right; /* read if mask = WINDOW; negative = all */

    const void* cu_seqlens_q; /* [B + 1] */
    const void* cu_seqlens_k; /* [B + 1] */
    const void* seqused_q;    /* [B], optional: rows in use of each sequence, <= its length; the rows beyond are not written */
    const void* seqused_k;    /* [B], optional (needed with pages) */
    const void* block_table;  /* [B, >= ceil(seqlen_k / page_size)] */
    int64_t block_table_stride_b;
    int64_t page_size; /* >= 1 */
    int64_t num_pages;

    const float* alibi_slopes; /* [H] or [B, H]: adds -slope * |i + sk - sq - j| */
    int64_t alibi_stride_b;    /* 0 = the same for each sequence */
    const float* sink;         /* [H]: one more softmax logit per head, without a value; lse includes it */
    const float* q_descale;    /* FP8: [B, Hk], true value = stored * descale; NULL = 1 */
    const float* k_descale;
    const float* v_descale;
    int64_t descale_stride_b, descale_stride_h; /* of all three; 0 = broadcast */

    void* workspace; /* flare_attention_workspace() bytes, 256-byte aligned; may be NULL if that is 0 */
    uint64_t workspace_bytes;
} flare_attention_params;

/*
 * flare_attention_merge: joins P partial results over disjoint keys: lse = ln sum_p exp(lse_p), out = sum_p exp(lse_p - lse) out_p.
 * A partial with lse = -inf has weight 0 and its out is not looked at.
 * partial_out [P, B, S, H, D], partial_lse [P, B, H, S] -> out [B, S, H, D], lse [B, H, S].
 */
typedef struct flare_attention_merge_params {
    uint32_t struct_size;
    uint32_t flags;
    int32_t device;
    int32_t kernel;
    void* stream;
    int32_t num_threads;
    int32_t dtype;     /* of partial_out: FP32, FP16, BF16 */
    int32_t out_dtype; /* 0 = dtype */
    int32_t reserved0;

    int64_t num_partials; /* P >= 1 */
    int64_t batch, seqlen, heads, head_dim;

    const void* partial_out;
    const float* partial_lse;
    void* out;
    float* lse; /* optional */
    int64_t partial_out_stride_p, partial_out_stride_b, partial_out_stride_s, partial_out_stride_h;
    int64_t partial_lse_stride_p, partial_lse_stride_b, partial_lse_stride_h;
    int64_t out_stride_b, out_stride_s, out_stride_h;
    int64_t lse_stride_b, lse_stride_h;
} flare_attention_merge_params;

/* --- Multi-head latent attention ----------------------------------------------------------------------------------------- */

/*
 * flare_mla_prefill: attention over K = c_kv W_uk[h], V = c_kv W_uv[h], which are formed inside the kernel, tile by tile:
 *   s = scale * (q_nope . K + q_rope . k_rope)
 * q_nope [B, Sq, H, d_nope], q_rope [B, Sq, H, d_rope], c_kv [B, Sk, d_c], k_rope [B, Sk, d_rope], out [B, Sq, H, d_v], lse [B, H, Sq].
 * Varlen: cu_seqlens_q / cu_seqlens_k as in attention (q [total_q, H, .], c_kv [total_k, d_c]).
 * Paged:  block_table and seqused_k: c_kv and k_rope are pools [num_pages, page_size, .], *_stride_b is the stride between pages.
 * 656-byte rows: latent_dtype = UINT8: c_kv points to rows as in flare_mla_decode_params (strides in bytes), k_rope is NULL.
 */
typedef struct flare_mla_prefill_params {
    uint32_t struct_size;
    uint32_t flags;
    int32_t device;
    int32_t kernel;
    void* stream;
    int32_t num_threads;
    int32_t deterministic;

    int32_t dtype;        /* of q_nope, q_rope, w_uk, w_uv and of the latents unless latent_dtype: FP32, FP16, BF16 */
    int32_t out_dtype;    /* 0 = dtype */
    int32_t latent_dtype; /* 0 = dtype; UINT8 = 656-byte rows (d_c = 512, d_rope = 64) */
    int32_t index_dtype;
    int32_t weight_layout; /* FLARE_WEIGHT_* */
    int32_t mask;          /* FLARE_MASK_NONE or FLARE_MASK_CAUSAL */

    int64_t batch, seqlen_q, seqlen_k, heads;
    int64_t d_nope; /* 1..512 */
    int64_t d_rope; /* 0..512; 0 = no rope part, q_rope and k_rope are NULL */
    int64_t d_c;    /* 1..1024 */
    int64_t d_v;    /* 1..512 */
    int64_t total_q, total_k;

    const void* q_nope;
    const void* q_rope;
    const void* c_kv;
    const void* k_rope;
    const void* w_uk;
    const void* w_uv;
    void* out;
    float* lse; /* optional */
    int64_t q_nope_stride_b, q_nope_stride_s, q_nope_stride_h;
    int64_t q_rope_stride_b, q_rope_stride_s, q_rope_stride_h;
    int64_t c_kv_stride_b, c_kv_stride_s;
    int64_t k_rope_stride_b, k_rope_stride_s;
    int64_t w_uk_stride_h, w_uk_stride_r; /* r: the middle dimension of weight_layout */
    int64_t w_uv_stride_h, w_uv_stride_r;
    int64_t out_stride_b, out_stride_s, out_stride_h;
    int64_t lse_stride_b, lse_stride_h;

    float scale; /* 0 = 1/sqrt(d_nope + d_rope), unless FLARE_FLAG_SCALE */
    int32_t reserved0;

    const void* cu_seqlens_q;
    const void* cu_seqlens_k;
    const void* seqused_q;
    const void* seqused_k;
    const void* block_table;
    int64_t block_table_stride_b;
    int64_t page_size;
    int64_t num_pages;

    void* workspace;
    uint64_t workspace_bytes;
} flare_mla_prefill_params;

/*
 * flare_mla_decode: the absorbed form: every query head reads one shared latent row of d_c + d_rope channels as its key and the
 * first d_c channels of it as its value.
 * q [B, Sq, H, d_c + d_rope], out [B, Sq, H, d_c], lse [B, H, Sq]; Sq >= 1 new tokens whose rows are already in the cache.
 *
 * Weights: with w_uk given, q is q_nope [B, Sq, H, d_nope] and q_rope [B, Sq, H, d_rope] comes apart; the kernel forms q_nope W_uk^T.
 * With w_uv given, out is [B, Sq, H, d_v]. Without w_uk, q_rope NULL means that q carries the rope part in its last d_rope channels.
 *
 * Cache: contiguous (block_table NULL): kv [B, Sk, d_c + d_rope]; paged: kv [num_pages, page_size, d_c + d_rope], kv_stride_b between
 * pages. kv_dtype = UINT8: rows of 656 bytes, strides in bytes, kv_stride_s >= 656: 512 e4m3 values, 4 fp32 scales (one per 128
 * values), 64 bf16 rope values (d_c = 512, d_rope = 64).
 * seqlens_k [B]: visible keys of each sequence including its Sq new ones; NULL = seqlen_k for all (contiguous only).
 *
 * Sparse: indices [B, Sq, topk] name the rows each query token attends to: row i is page i / page_size, offset i % page_size of the pool
 * [num_pages, page_size, .] (contiguous caches: num_pages = B, page_size = Sk). Negative or too large = absent. topk_length [B, Sq]
 * (optional): only the first topk_length entries count. block_table, seqlens_k and mask are not used then.
 */
typedef struct flare_mla_decode_params {
    uint32_t struct_size;
    uint32_t flags;
    int32_t device;
    int32_t kernel;
    void* stream;
    int32_t num_threads;
    int32_t deterministic;

    int32_t dtype;     /* of q, q_rope, w_uk, w_uv, and of kv unless kv_dtype: FP32, FP16, BF16 */
    int32_t out_dtype; /* 0 = dtype */
    int32_t kv_dtype;  /* 0 = dtype; UINT8 = 656-byte rows */
    int32_t index_dtype;
    int32_t weight_layout;
    int32_t mask; /* FLARE_MASK_NONE or FLARE_MASK_CAUSAL (the same when Sq = 1) */
    int32_t num_splits;
    int32_t reserved0;

    int64_t batch, seqlen_q, seqlen_k, heads;
    int64_t d_c;    /* 1..1024 */
    int64_t d_rope; /* 0..512 */
    int64_t d_nope; /* with w_uk: width of q; also sets the default scale */
    int64_t d_v;    /* with w_uv: width of out */
    int64_t total_q;

    const void* q;
    const void* q_rope;
    const void* kv;
    const void* w_uk;
    const void* w_uv;
    void* out;
    float* lse; /* optional */
    int64_t q_stride_b, q_stride_s, q_stride_h;
    int64_t q_rope_stride_b, q_rope_stride_s, q_rope_stride_h;
    int64_t kv_stride_b, kv_stride_s;
    int64_t w_uk_stride_h, w_uk_stride_r;
    int64_t w_uv_stride_h, w_uv_stride_r;
    int64_t out_stride_b, out_stride_s, out_stride_h;
    int64_t lse_stride_b, lse_stride_h;

    float scale; /* 0 = 1/sqrt(d_nope + d_rope), which needs d_nope; else give it */
    int32_t reserved1;

    const void* cu_seqlens_q; /* [B + 1], optional: ragged query counts; q, out [total_q, H, .], lse [H, total_q] */
    const void* seqlens_k;
    const void* block_table;
    int64_t block_table_stride_b;
    int64_t page_size;
    int64_t num_pages;

    const void* indices;
    int64_t indices_stride_b, indices_stride_s;
    int64_t topk;
    const void* topk_length;
    int64_t topk_length_stride_b, topk_length_stride_s;
    const float* sink; /* [H], optional; lse includes it */

    void* workspace;
    uint64_t workspace_bytes;
} flare_mla_decode_params;

/* --- Kimi Delta Attention ------------------------------------------------------------------------------------------------ */

/*
 * flare_kda_forward: for each token t of a sequence, on a K x V state S per value head:
 *   S <- diag(exp(gate_t)) S;  e = v_t - S^T k_t;  S <- S + beta_t k_t e^T;  out_t = scale * S^T q_t
 * q, k [B, T, H, K]; v [B, T, HV, V]; g [B, T, HV, K]; beta [B, T, HV] (or [B, T, HV, V], see beta_per_channel); out [B, T, HV, V].
 * Value head hv reads query/key head hv / (HV / H).
 * Varlen: cu_seqlens given: B = 1, all tokens packed along T, N = num_sequences. Else N = B.
 * States: [N, HV, K, V] or [N, HV, V, K]; the inner K x V block is dense, *_stride_n and _h are free (0 = dense). final_state may be
 * the same memory as initial_state. A sequence without tokens: final = initial (or zero).
 * With state_slots [N], sequence n reads and writes slot state_slots[n] of the pools instead of row n; a sequence with slot
 * padding_slot reads zeros and writes no state. With final_state no two sequences may name the same slot.
 * Checkpoints: the state after every checkpoint_interval tokens of a sequence. Row of the j-th checkpoint of sequence n:
 * n * floor(T / checkpoint_interval) + j, or cu_checkpoints[n] + j with varlen; layout as the states, dense rows.
 */
typedef struct flare_kda_forward_params {
    uint32_t struct_size;
    uint32_t flags;
    int32_t device;
    int32_t kernel;
    void* stream;
    int32_t num_threads;
    int32_t deterministic; /* 1: bits don't depend on batch mates, on where a sequence is cut (at multiples of 64) or extended */

    int32_t dtype;       /* of q, k, v, out: FP32, FP16, BF16 */
    int32_t gate_dtype;  /* of g; 0 = dtype */
    int32_t beta_dtype;  /* 0 = dtype */
    int32_t index_dtype;
    int32_t initial_state_dtype; /* FP32 or BF16; 0 = FP32 */
    int32_t final_state_dtype;
    int32_t checkpoint_dtype;
    int32_t state_layout; /* FLARE_STATE_KV or FLARE_STATE_VK; must be given if any state is */

    int32_t gate;            /* FLARE_GATE_* */
    int32_t beta_activation; /* FLARE_BETA_* */
    int32_t qk_l2norm;       /* 1: q and k are divided by sqrt(sum of squares + 1e-6) */
    int32_t beta_per_channel; /* 1: beta is [B, T, HV, V] */
    float lower_bound;       /* gate BOUNDED: < 0 */
    float scale;             /* 0 = 1/sqrt(K), unless FLARE_FLAG_SCALE */

    int64_t batch, seqlen, heads_qk, heads_v;
    int64_t head_dim_k; /* K, 1..512 */
    int64_t head_dim_v; /* V, 1..512 */
    int64_t num_sequences; /* with cu_seqlens */

    const void* q;
    const void* k;
    const void* v;
    const void* g;
    const void* beta;
    const float* a_log;   /* [HV]; NULL = exp(a_log) is 1 */
    const float* dt_bias; /* [HV, K] dense; NULL = 0 */
    void* out;
    int64_t q_stride_b, q_stride_t, q_stride_h;
    int64_t k_stride_b, k_stride_t, k_stride_h;
    int64_t v_stride_b, v_stride_t, v_stride_h;
    int64_t g_stride_b, g_stride_t, g_stride_h;
    int64_t beta_stride_b, beta_stride_t, beta_stride_h; /* stride_h is free too: beta may be [B, HV, T] */
    int64_t out_stride_b, out_stride_t, out_stride_h;

    const void* initial_state; /* NULL = zero */
    void* final_state;         /* NULL = not wanted */
    int64_t initial_state_stride_n, initial_state_stride_h;
    int64_t final_state_stride_n, final_state_stride_h;
    const void* state_slots; /* [N], optional */
    int64_t num_slots;
    int64_t padding_slot; /* with state_slots; -1 is usual */

    const void* cu_seqlens; /* [N + 1] */
    void* checkpoints;
    const void* cu_checkpoints; /* [N + 1], with varlen */
    int64_t checkpoint_interval; /* a multiple of 64 */

    void* workspace;
    uint64_t workspace_bytes;
} flare_kda_forward_params;

/*
 * flare_kda_decode: the same recurrence for one or a few tokens per sequence on a pool of states that is updated in place.
 * q, k [N, T, H, K], v, out [N, T, HV, V], g, beta as in flare_kda_forward; cu_seqlens: ragged token counts, packed along T with B = 1.
 * state: pool [num_slots, HV, K, V] (or V, K). slots NULL: sequence n uses slot n (num_slots >= N).
 * slots_per_sequence = 1: slots [N]; read before the first and written after the last token.
 * slots_per_sequence = T: slots [N, T] (speculative verification): the state is written after every token t to slots[n][t]; the start state is
 * slots[n][num_accepted[n] - 1] (num_accepted NULL: slots[n][0]).
 * No two entries that are written may name the same slot, nor may a sequence start from a slot that another one writes in place.
 * A slot equal to padding_slot is neither read (zeros) nor written. state_out: write there instead of in place, same strides.
 */
typedef struct flare_kda_decode_params {
    uint32_t struct_size;
    uint32_t flags;
    int32_t device;
    int32_t kernel;
    void* stream;
    int32_t num_threads;
    int32_t deterministic;

    int32_t dtype;
    int32_t gate_dtype;
    int32_t beta_dtype;
    int32_t index_dtype;
    int32_t state_dtype; /* FP32 or BF16; 0 = FP32 */
    int32_t state_layout;

    int32_t gate;
    int32_t beta_activation;
    int32_t qk_l2norm;
    int32_t beta_per_channel;
    float lower_bound;
    float scale;

    int64_t batch, seqlen, heads_qk, heads_v, head_dim_k, head_dim_v;
    int64_t num_sequences; /* with cu_seqlens */

    const void* q;
    const void* k;
    const void* v;
    const void* g;
    const void* beta;
    const float* a_log;
    const float* dt_bias;
    void* out;
    int64_t q_stride_b, q_stride_t, q_stride_h;
    int64_t k_stride_b, k_stride_t, k_stride_h;
    int64_t v_stride_b, v_stride_t, v_stride_h;
    int64_t g_stride_b, g_stride_t, g_stride_h;
    int64_t beta_stride_b, beta_stride_t, beta_stride_h;
    int64_t out_stride_b, out_stride_t, out_stride_h;

    void* state;
    void* state_out; /* NULL = in place */
    int64_t state_stride_n, state_stride_h; /* 0 = dense */
    int64_t num_slots;
    const void* slots;
    int64_t slots_stride_n;
    int64_t slots_per_sequence; /* 0 = 1 */
    int64_t padding_slot;       /* with slots */
    const void* num_accepted;   /* [N], 1..T */
    const void* cu_seqlens;     /* [N + 1] */

    void* workspace;
    uint64_t workspace_bytes;
} flare_kda_decode_params;

/* --- Conversion and caches ----------------------------------------------------------------------------------------------- */

/*
 * flare_cast: dst = convert(src * scale), any strides. Round to nearest even; NaN stays NaN (quiet, sign kept); FP8_E4M3 saturates at +-448.
 */
typedef struct flare_cast_params {
    uint32_t struct_size;
    uint32_t flags; /* FLARE_FLAG_SCALE: scale is literal; else 0 = 1 */
    int32_t device;
    int32_t kernel;
    void* stream;
    int32_t num_threads;
    int32_t src_dtype; /* FP32, FP16, BF16, FP8_E4M3 */
    int32_t dst_dtype;
    int32_t rank;  /* 0..5 */
    float scale;
    int32_t reserved0;
    const void* src;
    void* dst;
    int64_t shape[5];
    int64_t src_stride[5]; /* free, also the last */
    int64_t dst_stride[5];
} flare_cast_params;

/* flare_fill: dst = value, converted as by flare_cast (integers: rounded to nearest even, saturating). */
typedef struct flare_fill_params {
    uint32_t struct_size;
    uint32_t flags;
    int32_t device;
    int32_t kernel;
    void* stream;
    int32_t num_threads;
    int32_t dtype; /* any */
    int32_t rank;  /* 0..5 */
    int32_t reserved0;
    double value;
    void* dst;
    int64_t shape[5];
    int64_t dst_stride[5];
} flare_fill_params;

/*
 * flare_cache_append: writes new rows into a paged cache, converting on the way. Row t goes to page slots[t] / page_size, offset
 * slots[t] % page_size; a negative slot skips the row, and no two rows may go to one slot.
 *
 * layout KV:     k [T, Hk, D] -> k_cache [num_pages, page_size, Hk, D], v [T, Hk, Dv] -> v_cache. v and v_cache may both be NULL.
 * layout LATENT: k = c_kv [T, d_c] (heads = 1, head_dim_k = d_c), v = k_rope [T, d_r] (head_dim_v = d_r, may be 0) ->
 *                k_cache [num_pages, page_size, d_c + d_r] in cache_dtype, or 656-byte rows with cache_dtype UINT8 (strides in bytes,
 *                scale of a group of 128 = 2^ceil(log2(max(amax / 448, 1e-4)))).
 * FP8_E4M3 caches: stored = value / descale[head].
 * Rotary: rotary_cos and rotary_sin [max_position, rotary_dim / 2] fp32, positions [T]: turns the first rotary_dim channels of k (KV) or of
 * v (LATENT: the rope part), as pairs (0, 1), (2, 3), ... if rotary_interleaved, else (i, i + rotary_dim / 2).
 */
typedef struct flare_cache_append_params {
    uint32_t struct_size;
    uint32_t flags;
    int32_t device;
    int32_t kernel;
    void* stream;
    int32_t num_threads;
    int32_t layout;      /* FLARE_CACHE_* */
    int32_t dtype;       /* of k, v: FP32, FP16, BF16 */
    int32_t cache_dtype; /* 0 = dtype; FP32, FP16, BF16, FP8_E4M3 (KV), UINT8 (LATENT) */
    int32_t index_dtype;
    int32_t rotary_interleaved;

    int64_t num_tokens; /* T */
    int64_t heads;
    int64_t head_dim_k;
    int64_t head_dim_v;
    int64_t num_pages;
    int64_t page_size;

    const void* k;
    const void* v;
    int64_t k_stride_t, k_stride_h;
    int64_t v_stride_t, v_stride_h;
    void* k_cache;
    void* v_cache;
    int64_t k_cache_stride_b, k_cache_stride_s, k_cache_stride_h; /* page, row in page, head */
    int64_t v_cache_stride_b, v_cache_stride_s, v_cache_stride_h;
    const void* slots; /* [T] */
    const float* k_descale; /* [heads], NULL = 1 */
    const float* v_descale;

    const float* rotary_cos; /* NULL = no rotary */
    const float* rotary_sin;
    const void* positions;
    int64_t rotary_dim;   /* even */
    int64_t max_position; /* rows of rotary_cos */
} flare_cache_append_params;

/* --- DLPack -------------------------------------------------------------------------------------------------------------- */

#define FLARE_DLPACK_MAX_RANK 8

/* field `flags` of flare_dlpack_tensor */
#define FLARE_DLPACK_READ_ONLY 1u   /* the consumer must not write */
#define FLARE_DLPACK_COPIED 2u      /* the producer made a copy for this exchange; import only */
#define FLARE_DLPACK_HOST_PINNED 4u /* device = CPU: page-locked by CUDA (kDLCUDAHost) */
#define FLARE_DLPACK_MANAGED 8u     /* device >= 0: managed memory (kDLCUDAManaged) */

/* argument `kind` of the functions below */
#define FLARE_DLPACK_VERSIONED 0 /* DLManagedTensorVersioned, DLPack 1.x */
#define FLARE_DLPACK_LEGACY 1    /* DLManagedTensor, before 1.0; it can't say that memory is read-only */

/*
 * One tensor that changes hands as a DLManagedTensor (https://dmlc.github.io/dlpack/latest/c_api.html), without a copy.
 * data is the address of the first element (a byte_offset is added in), strides are in elements.
 */
typedef struct flare_dlpack_tensor {
    uint32_t struct_size; /* sizeof(flare_dlpack_tensor) */
    uint32_t flags;       /* FLARE_DLPACK_* */
    int32_t device;       /* FLARE_DEVICE_CPU or a CUDA ordinal */
    int32_t dtype;        /* any FLARE_ dtype */
    int32_t rank;         /* 0..FLARE_DLPACK_MAX_RANK */
    int32_t reserved0;
    void* data; /* may be NULL if there are no elements */
    int64_t shape[FLARE_DLPACK_MAX_RANK];
    int64_t stride[FLARE_DLPACK_MAX_RANK];
} flare_dlpack_tensor;

/* --- Functions ----------------------------------------------------------------------------------------------------------- */

FLARE_API int32_t flare_attention_forward(const flare_attention_params* params);
FLARE_API int32_t flare_attention_merge(const flare_attention_merge_params* params);
FLARE_API int32_t flare_mla_prefill(const flare_mla_prefill_params* params);
FLARE_API int32_t flare_mla_decode(const flare_mla_decode_params* params);
FLARE_API int32_t flare_kda_forward(const flare_kda_forward_params* params);
FLARE_API int32_t flare_kda_decode(const flare_kda_decode_params* params);
FLARE_API int32_t flare_cast(const flare_cast_params* params);
FLARE_API int32_t flare_fill(const flare_fill_params* params);
FLARE_API int32_t flare_cache_append(const flare_cache_append_params* params);

/*
 * Bytes of workspace that the call with these params needs. Host only; data pointers may still be NULL, but optional ones must already be
 * NULL or not as they will be. Checks sizes, strides, dtypes and options like the call itself. Never more for smaller maxima.
 */
FLARE_API int32_t flare_attention_workspace(const flare_attention_params* params, uint64_t* bytes);
FLARE_API int32_t flare_mla_prefill_workspace(const flare_mla_prefill_params* params, uint64_t* bytes);
FLARE_API int32_t flare_mla_decode_workspace(const flare_mla_decode_params* params, uint64_t* bytes);
FLARE_API int32_t flare_kda_forward_workspace(const flare_kda_forward_params* params, uint64_t* bytes);
FLARE_API int32_t flare_kda_decode_workspace(const flare_kda_decode_params* params, uint64_t* bytes);

/*
 * Writes the name of the kernel that these params would run (backend, operation, tile, path), NUL-terminated and cut to `capacity` bytes.
 * operation: FLARE_OP_*; params: that operation's struct; data pointers may be NULL.
 */
FLARE_API int32_t flare_kernel_name(int32_t operation, const void* params, char* name, uint64_t capacity);

/*
 * DLPack. Export makes a managed tensor over the caller's memory and adds 1 to *holds; the consumer's call of its deleter, from any thread,
 * takes 1 away and frees the managed tensor, not the data: whoever owns the data keeps it, and `holds`, until *holds is 0. The last thing that
 * a deleter touches is *holds. `holds` may be NULL.
 * Import describes another library's managed tensor and takes nothing: on success and on failure alike it stays the caller's, until
 * flare_dlpack_release calls its deleter (which may be NULL) when the data is no longer needed. Missing strides mean dense rows. Refused are
 * another major version, types and devices that flare doesn't have, vectors of more than one lane, negative strides, data that isn't
 * aligned to its element. Neither calls CUDA; ordering against work on the data is the caller's and the consumer's.
 */
FLARE_API int32_t flare_dlpack_export(const flare_dlpack_tensor* tensor, int32_t kind, int64_t* holds, void** managed);
FLARE_API int32_t flare_dlpack_import(const void* managed, int32_t kind, flare_dlpack_tensor* tensor);
FLARE_API int32_t flare_dlpack_release(void* managed, int32_t kind);

/* Text of the calling thread's last error, "" if none. Returns its length without the NUL; writes at most `capacity` bytes. */
FLARE_API uint64_t flare_last_error(char* text, uint64_t capacity);

/* Name of a status code, "FLARE_ERROR_SHAPE" say; never NULL. Static memory. */
FLARE_API const char* flare_status_string(int32_t status);

/* One line: version, compiler, backends with their instruction sets, CUDA version or why there is none. Static memory. */
FLARE_API const char* flare_build_info(void);

/* FLARE_VERSION of the library. */
FLARE_API uint32_t flare_version(void);

/*
 * The ABI as text, for binding tests; static memory. Lines:
 *   struct NAME SIZE
 *   field STRUCT.NAME OFFSET SIZE
 *   function NAME RETURN(ARGUMENT,...)     types: void, i32, u32, u64, ptr
 *   constant NAME VALUE
 */
FLARE_API const char* flare_abi(void);

#ifdef __cplusplus
}
#endif

#endif /* FLARE_H */
