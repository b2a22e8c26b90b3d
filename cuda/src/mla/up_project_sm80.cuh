// MLA prefill with mma.sync that forms K = c W_uk[h] and V = c W_uv[h] a key tile at a time: neither ever leaves shared memory.
//
// A block (8 warps) takes 256 query rows of one head, so a projected tile serves R = 256 rows: per (row, key) pair 640 FLOP of
// attention and 2 d_c 256 / R = 1,024 of projection, where absorbed attention needs 2,176 (d_c = 512, rope 64). Per 64 keys:
//
//   project    [64 keys x d_c] x [d_c x 256]: C and both weights stream through four stages of 32 channels by cp.async; warp
//              (i, j) makes keys [32 i, 32 i + 32) of columns [64 j, 64 j + 64) of [K | V]; rounded to T into shared memory
//   attend     warp w has rows [32 w, 32 w + 32): S, softmax and O += P V, 32 keys at a time, no barrier between warps
//
// The first stages of the next tile are in flight during attend. A barrier per stage and one before attend; K and V are
// rewritten behind the stage barriers of the next tile. The rope part of the keys has two buffers and rides with stage 0.
//
// Shared memory, bytes: q 98,304 | k, v 32,768 | rope 16,384 | stages 4 x (c 4,096 + w 16,384) = 81,920; 229,376 in all.
// All tiles XOR the 16-byte chunk with the row, so that ldmatrix meets no bank twice.
#pragma once

#include "../ptx/ldst.cuh"
#include "../ptx/math.cuh"
#include "../ptx/mma_sync.cuh"
#include "../ptx/sync.cuh"
#include "../tile/fragment.cuh"
#include "absorbed_sm80.cuh"

namespace flare::mla {
namespace up_project {

inline constexpr int kThreads = 256;
inline constexpr int kRows = 256;
inline constexpr int kWarpRows = 32;
inline constexpr int kKeys = 64;
inline constexpr int kSubKeys = 32;  // scored at once
inline constexpr int kNope = 128;    // widths are padded to these with zeros
inline constexpr int kRope = 64;
inline constexpr int kValue = 128;
// 1 x 4096 x 16 heads on one H200, causal: 798 us with two stages of 64 channels, 956 us with four of 32, which meet twice as
// many barriers.
inline constexpr int kDepth = 64;
inline constexpr int kStages = 2;
// With fewer steps a stage of the next tile but one would be issued while its rope buffer is still read.
inline constexpr int kMinSteps = kStages - 1;
// O and the sums are rescaled when a maximum has grown by so many powers of two; P stays below 2^8, which T holds as precisely.
inline constexpr float kRescaleThreshold = 8.0f;

struct SharedStorage {
    alignas(128) uint8_t q[kRows * 2 * (kNope + kRope)];
    alignas(128) uint8_t kv[2][kKeys * 2 * kNope];  // K, V
    alignas(128) uint8_t rope[2][kKeys * 2 * kRope];
    alignas(128) uint8_t c[kStages][kKeys * 2 * kDepth];
    alignas(128) uint8_t w[kStages][2 * kDepth * (kNope + kValue)];
};
static_assert(sizeof(SharedStorage) <= 232448, "shared memory of a block on sm_90");
static_assert(kNope == kValue, "one layout for K and V");

// Rows of 128 bytes or a multiple: eight rows at one chunk column fall on eight bank groups.
template <int kRowBytes>
__device__ __forceinline__ uint32_t wide_offset(int row, int chunk) {
    static_assert(kRowBytes % 128 == 0);
    return static_cast<uint32_t>(row * kRowBytes + ((chunk ^ (row & 7)) << 4));
}

// Rows of kDepth channels. Rows of 64 bytes lie two to a bank line.
__device__ __forceinline__ uint32_t depth_offset(int row, int chunk) {
    static_assert(kDepth == 32 || kDepth == 64);
    return kDepth == 64 ? wide_offset<128>(row, chunk) : static_cast<uint32_t>(row * 64 + ((chunk ^ (row / 2 & 3)) << 4));
}

__device__ __forceinline__ uint32_t shared_address(const void* p) {
    return static_cast<uint32_t>(__cvta_generic_to_shared(p));
}

// A pair of K as fp16; where T reaches further than fp16, within its range.
template <typename T>
__device__ __forceinline__ uint32_t pack_scores(float x, float y) {
    constexpr float kMost = 65504.0f;
    if constexpr (std::is_same_v<T, __nv_bfloat16>) {
        x = x > kMost ? kMost : x < -kMost ? -kMost : x;  // NaN stays
        y = y > kMost ? kMost : y < -kMost ? -kMost : y;
    }
    return ptx::pack2<__half>(x, y);
}

// Walks (key tile, step of channels) ahead of the arithmetic and copies. A thread copies two chunks of one key and, of the
// weights, eight that start kDepth channels further with each step. The copies of a step come in four parts, which are issued
// between products: in one go after the barrier they would keep the tensor cores waiting.
template <typename T, bool kWeightsNk>
struct Copier {
    static constexpr int kChunks = kDepth / 8;
    static constexpr int kParts = 4;
    // A weight's rows (nk: columns of K or V, else channels) between two copies of a thread, and where W_uv begins in a stage.
    static constexpr int kWeightChunks = kWeightsNk ? kChunks : kNope / 8;
    static constexpr int kRowStep = kThreads / kWeightChunks;
    static constexpr int kRowStepBytes = kRowStep * (kWeightsNk ? 2 * kDepth : 2 * (kNope + kValue));
    static constexpr int kValueBytes = kWeightsNk ? kNope * 2 * kDepth : 2 * kNope;
    static_assert(2 * kParts * kThreads * 16 == sizeof(SharedStorage::w[0]), "a part is two copies a thread");

    const AbsorbedArgs& a;
    SharedStorage& smem;
    const Sequence& s;
    int head;
    int thread;
    int end;    // keys
    int steps;  // per tile
    int tile = 0;
    int step = 0;
    int stage = 0;
    KeyPlace here{0, -1};  // absent from the last tile on

    __device__ __forceinline__ KeyPlace look_up(int key_tile) const {
        const int j = key_tile * kKeys + thread / 4;
        return j < end ? key_place(a, s, j) : KeyPlace{0, -1};
    }
    __device__ __forceinline__ void begin() { here = look_up(0); }

    // 16 bytes, zeros unless valid; then src isn't read.
    static __device__ __forceinline__ void copy(uint32_t dst, const void* src, bool valid) {
        ptx::cp_async_16(dst, src, valid ? 16 : 0);
    }

    // A step's copies as they advance from part to part.
    struct Sources {
        const char* latent;  // chunk part of this thread's key
        const char* weight;
        int64_t weight_step;  // bytes to the next weight copy
        uint32_t c;           // shared addresses
        uint32_t w;
        int channel;  // first of `latent`
        int rows;     // of the weight from the first copy's to the last that there is
    };

    __device__ __forceinline__ Sources sources() const {
        const int tid = recomputed(thread);
        const int channel0 = step * kDepth;
        Sources x;
        x.channel = channel0 + 8 * (tid % 4);
        x.latent = a.latent + here.offset(s, a.latent_stride_b, a.latent_stride_s) + 2 * x.channel;
        x.c = shared_address(smem.c[stage]) + depth_offset(tid / 4, tid % 4);
        set_weight(x, false);
        x.w = shared_address(smem.w[stage]) +
              (kWeightsNk ? depth_offset(tid / kWeightChunks, tid % kWeightChunks)
                          : wide_offset<2 * (kNope + kValue)>(tid / kWeightChunks, tid % kWeightChunks));
        return x;
    }
    // The first half of the parts copies W_uk, the second W_uv.
    __device__ __forceinline__ void set_weight(Sources& x, bool uv) const {
        const int tid = recomputed(thread);
        const int row = tid / kWeightChunks;
        const int column = 8 * (tid % kWeightChunks);
        const int channel0 = step * kDepth;
        const int width = uv ? a.d_v : a.d_nope;
        const int64_t stride = uv ? a.w_uv_stride_r : a.w_uk_stride_r;
        const T* src = uv ? static_cast<const T*>(a.w_uv) + head * a.w_uv_stride_h
                          : static_cast<const T*>(a.w_uk) + head * a.w_uk_stride_h;
        if constexpr (kWeightsNk) {
            src += row * stride + channel0 + column;
            x.rows = channel0 + column < a.d_c ? width - row : 0;
        } else {
            src += (channel0 + row) * stride + column;
            x.rows = column < width ? a.d_c - channel0 - row : 0;
        }
        x.weight = reinterpret_cast<const char*>(src);
        x.weight_step = 2 * kRowStep * stride;
    }

    __device__ __forceinline__ void issue(Sources& x, int part) const {
        if (part == kParts / 2) {
            set_weight(x, true);
        }
        if (part == 0) {
#pragma unroll
            for (int i = 0; i < kChunks / 4; ++i) {
                copy(x.c ^ 64 * i, x.latent + 64 * i, here.present() && x.channel + 32 * i < a.d_c);
            }
        }
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const int done = (2 * part + i) % kParts;  // of this weight
            copy(x.w + (part < kParts / 2 ? 0 : kValueBytes) + done * kRowStepBytes, x.weight, done * kRowStep < x.rows);
            x.weight += x.weight_step;
        }
    }

    // After the last part: the rope chunks of a new tile, the group's end, and the next step.
    __device__ __forceinline__ void advance() {
        if (step == 0 && a.d_rope > 0) {
            const int tid = recomputed(thread);
            const char* rope = a.rope + here.offset(s, a.rope_stride_b, a.rope_stride_s) + 16 * (tid % 4);
            const uint32_t dst = shared_address(smem.rope[tile & 1]) + wide_offset<2 * kRope>(tid / 4, tid % 4);
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                copy(dst ^ 64 * i, rope + 64 * i, here.present() && 8 * (tid % 4) + 32 * i < a.d_rope);
            }
        }
        ptx::cp_async_commit();
        stage = stage + 1 == kStages ? 0 : stage + 1;
        if (++step == steps) {
            step = 0;
            ++tile;
            here = look_up(tile);  // wanted a step later
        }
    }
};

// acc += c [64, kDepth] w [kDepth, 256] of one stage: this warp's 32 x 64; issues the copies of a later one. Chunk 2 i of a row
// lies at its chunk 0 XOR 32 i bytes.
template <typename T, bool kWeightsNk>
__device__ __forceinline__ void project_step(float (&acc)[2][8][4], uint32_t c_base, uint32_t w_base, int thread,
                                             Copier<T, kWeightsNk>& copier) {
    const int tid = recomputed(thread);
    const int lane = tid % 32;
    const int warp = tid / 32;
    const uint32_t c_addr = c_base + depth_offset(32 * (warp % 2) + lane % 16, lane / 16);
    const uint32_t w_addr = w_base + (kWeightsNk ? depth_offset(64 * (warp / 2) + 8 * (lane / 16) + lane % 8, lane / 8 % 2)
                                                 : wide_offset<2 * (kNope + kValue)>(lane % 16, lane / 16) + 128 * (warp / 2));
    // Fragments are loaded one product ahead.
    const auto load_a = [&](uint32_t (&af)[2][4], int kk) {
#pragma unroll
        for (int m = 0; m < 2; ++m) {
            ptx::ldmatrix_x4(af[m], (c_addr ^ 32 * kk) + 16 * m * 2 * kDepth);
        }
    };
    const auto load_b = [&](uint32_t (&bf)[4], int kk, int n) {
        if constexpr (kWeightsNk) {
            ptx::ldmatrix_x4(bf, (w_addr ^ 32 * kk) + 16 * n * 2 * kDepth);
        } else {
            ptx::ldmatrix_x4_trans(bf, (recomputed(w_addr) ^ 32 * n) + 16 * kk * 2 * (kNope + kValue));
        }
    };
    uint32_t af[2][2][4];
    uint32_t bf[2][4];
    load_a(af[0], 0);
    load_b(bf[0], 0, 0);
    auto sources = copier.sources();
#pragma unroll
    for (int kk = 0; kk < kDepth / 16; ++kk) {
        if (!kWeightsNk && kk == 1) {  // no registers to have it earlier, between the copies
            load_a(af[1], 1);
        }
#pragma unroll
        for (int n = 0; n < 4; ++n) {
            if (n < 3) {
                load_b(bf[(n + 1) % 2], kk, n + 1);
            } else if (kk + 1 < kDepth / 16) {
                load_b(bf[0], kk + 1, 0);
            }
            if ((kWeightsNk || kk > 0) && n == 2 && kk + 1 < kDepth / 16) {
                load_a(af[(kk + 1) % 2], kk + 1);
            }
#pragma unroll
            for (int m = 0; m < 2; ++m) {
                ptx::mma_m16n8k16<T>(acc[m][2 * n], af[kk % 2][m], bf[n % 2][0], bf[n % 2][1]);
                ptx::mma_m16n8k16<T>(acc[m][2 * n + 1], af[kk % 2][m], bf[n % 2][2], bf[n % 2][3]);
            }
            if (kk == 0) {
                copier.issue(sources, n);
            }
        }
        if (kk == 0) {
            copier.advance();
        }
    }
}

// This warp's 32 x 64 of [K | V]. K is fp16 whatever T is: rounded to bf16 it would move scores by up to 2^-9 of themselves,
// and with them the lse of rows that see few keys.
template <typename T>
__device__ __forceinline__ void store_projected(SharedStorage& smem, const float (&acc)[2][8][4], int thread) {
    const int tid = recomputed(thread);
    const int lane = tid % 32;
    const int warp = tid / 32;
    uint8_t* const kv = smem.kv[warp / 4] + 4 * (lane % 4);
    const auto store = [&](auto pack) {
#pragma unroll
        for (int m = 0; m < 2; ++m) {
#pragma unroll
            for (int n = 0; n < 8; ++n) {
                const int chunk = 8 * (warp / 2 % 2) + n;
#pragma unroll
                for (int half = 0; half < 2; ++half) {
                    const int key = 32 * (warp % 2) + 16 * m + 8 * half + lane / 4;
                    *reinterpret_cast<uint32_t*>(kv + wide_offset<2 * kNope>(key, chunk)) =
                        pack(acc[m][n][2 * half], acc[m][n][2 * half + 1]);
                }
            }
        }
    };
    if (warp / 4 == 0) {
        store([](float x, float y) { return pack_scores<T>(x, y); });
    } else {
        store([](float x, float y) { return ptx::pack2<T>(x, y); });
    }
}

// A warp's 32 rows: running maximum and sum, rows m, half of the fragment.
struct RowState {
    float top[2][2];  // log2 units; what P and O are relative to
    float sum[2][2];  // this thread's share
    int limit;        // keys that this thread's first row sees; causal rows further down see one more each
};

// The 32 keys from `key0` of the current tile, which start at `first` of the sequence.
template <typename T>
__device__ __forceinline__ void attend(float (&o)[2][16][4], RowState& rows, const AbsorbedArgs& a, SharedStorage& smem,
                                       uint32_t rope_addr, int thread, int key0, int first, bool masked) {
    const int tid = recomputed(thread);
    const int lane = tid % 32;
    const int warp = tid / 32;
    float x[2][4][4] = {};
    const uint32_t q_addr = shared_address(smem.q) + wide_offset<2 * (kNope + kRope)>(kWarpRows * warp + lane % 16, lane / 16);
    const int key = key0 + 8 * (lane / 16) + lane % 8;
    const uint32_t k_addr = shared_address(smem.kv[0]) + wide_offset<2 * kNope>(key, lane / 8 % 2);
    const uint32_t v_addr = shared_address(smem.kv[1]) + wide_offset<2 * kValue>(key0 + lane % 16, lane / 16);
    // Step i of the 12: chunk 2 i of a row lies at its chunk 0 XOR 32 (i mod 4) bytes, plus 128 (i / 4).
    const uint32_t rope_at = rope_addr + wide_offset<2 * kRope>(key, lane / 8 % 2);
    uint32_t qf[2][2][4];
    uint32_t kf[2][2][4];
    const auto load = [&](int step) {
        const int lower = 32 * (step % 4);
        const bool nope = step < kNope / 16;
#pragma unroll
        for (int m = 0; m < 2; ++m) {
            ptx::ldmatrix_x4(qf[step % 2][m], (q_addr ^ lower) + 128 * (step / 4) + 16 * m * 2 * (kNope + kRope));
        }
#pragma unroll
        for (int j = 0; j < 2; ++j) {
            ptx::ldmatrix_x4(kf[step % 2][j], nope ? (k_addr ^ lower) + 128 * (step / 4) + 16 * j * 2 * kNope
                                                   : (rope_at ^ lower) + 16 * j * 2 * kRope);
        }
    };
    const auto multiply = [&](int step, auto type) {
        using Product = decltype(type);
#pragma unroll
        for (int j = 0; j < 2; ++j) {
#pragma unroll
            for (int m = 0; m < 2; ++m) {
                ptx::mma_m16n8k16<Product>(x[m][2 * j], qf[step % 2][m], kf[step % 2][j][0], kf[step % 2][j][1]);
                ptx::mma_m16n8k16<Product>(x[m][2 * j + 1], qf[step % 2][m], kf[step % 2][j][2], kf[step % 2][j][3]);
            }
        }
    };
    constexpr int kSteps = (kNope + kRope) / 16;
    load(0);
#pragma unroll
    for (int step = 0; step < kNope / 16; ++step) {
        load(step + 1);
        multiply(step, __half{});
    }
    if (a.d_rope > 0) {
#pragma unroll
        for (int step = kNope / 16; step < kSteps; ++step) {
            if (step + 1 < kSteps) {
                load(step + 1);
            }
            multiply(step, T{});
        }
    }

    float new_top[2][2];
    bool grew = false;
#pragma unroll
    for (int m = 0; m < 2; ++m) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            float most = -INFINITY;
            const int limit = rows.limit + (a.causal ? 16 * m + 8 * half : 0) - first - 2 * (lane % 4);
#pragma unroll
            for (int n = 0; n < 4; ++n) {
#pragma unroll
                for (int i = 0; i < 2; ++i) {
                    x[m][n][2 * half + i] *= a.scale_log2;
                }
            }
            if (masked) {
#pragma unroll
                for (int n = 0; n < 4; ++n) {
#pragma unroll
                    for (int i = 0; i < 2; ++i) {
                        x[m][n][2 * half + i] = 8 * n + i < limit ? x[m][n][2 * half + i] : -INFINITY;
                    }
                }
            }
#pragma unroll
            for (int n = 0; n < 4; ++n) {
#pragma unroll
                for (int i = 0; i < 2; ++i) {
                    most = fmaxf(most, x[m][n][2 * half + i]);
                }
            }
            new_top[m][half] = fmaxf(rows.top[m][half], tile::quad_max(most));
            grew = grew || new_top[m][half] > rows.top[m][half] + kRescaleThreshold;
        }
    }
    if (__any_sync(0xffffffffu, grew)) {
#pragma unroll
        for (int m = 0; m < 2; ++m) {
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const float base = new_top[m][half] == -INFINITY ? 0.0f : new_top[m][half];
                const float alpha = ptx::exp2_approx(rows.top[m][half] - base);
                rows.top[m][half] = new_top[m][half];
                rows.sum[m][half] *= alpha;
#pragma unroll
                for (int n = 0; n < kValue / 8; ++n) {
                    o[m][n][2 * half] *= alpha;
                    o[m][n][2 * half + 1] *= alpha;
                }
            }
        }
    }
    uint32_t p[2][2][4];
#pragma unroll
    for (int m = 0; m < 2; ++m) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const float base = rows.top[m][half] == -INFINITY ? 0.0f : rows.top[m][half];
#pragma unroll
            for (int n = 0; n < 4; ++n) {
                const float p0 = ptx::exp2_approx(x[m][n][2 * half] - base);
                const float p1 = ptx::exp2_approx(x[m][n][2 * half + 1] - base);
                rows.sum[m][half] += p0 + p1;
                p[m][n / 2][2 * (n % 2) + half] = ptx::pack2<T>(p0, p1);
            }
        }
    }
    uint32_t vf[2][4];
    const auto load_v = [&](int i) {
        const int j = i / (kValue / 16);
        const int n = i % (kValue / 16);
        ptx::ldmatrix_x4_trans(vf[i % 2], (v_addr ^ 32 * (n % 4)) + 128 * (n / 4) + 16 * j * 2 * kValue);
    };
    load_v(0);
#pragma unroll
    for (int i = 0; i < 2 * kValue / 16; ++i) {
        const int j = i / (kValue / 16);
        const int n = i % (kValue / 16);
        if (i + 1 < 2 * kValue / 16) {
            load_v(i + 1);
        }
#pragma unroll
        for (int m = 0; m < 2; ++m) {
            ptx::mma_m16n8k16<T>(o[m][2 * n], p[m][j], vf[i % 2][0], vf[i % 2][1]);
            ptx::mma_m16n8k16<T>(o[m][2 * n + 1], p[m][j], vf[i % 2][2], vf[i % 2][3]);
        }
    }
}

}  // namespace up_project

// Blocks: tiles of rows from the last (it sees the most keys) to the first; within one, heads of a sequence are neighbours.
template <typename T, bool kWeightsNk>
__global__ void __launch_bounds__(up_project::kThreads, 1) mla_up_project_sm80_kernel(const AbsorbedArgs a, int num_row_tiles) {
    using namespace up_project;
    extern __shared__ __align__(128) uint8_t smem_bytes[];
    SharedStorage& smem = *reinterpret_cast<SharedStorage*>(smem_bytes);
    const int tid = static_cast<int>(threadIdx.x);
    const int lane = tid % 32;

    // Divisions and loads leave these in vector registers, which are scarce here.
    const int head = ptx::uniform(static_cast<int>(blockIdx.x) % a.heads);
    const int unit = ptx::uniform(static_cast<int>(blockIdx.x) / a.heads % a.batch);
    const int row_tile = ptx::uniform(num_row_tiles - 1 - static_cast<int>(blockIdx.x) / a.heads / a.batch);
    const Sequence s = uniform_sequence(load_sequence(a, unit));
    const int row0 = row_tile * kRows;
    if (row0 >= s.num_tokens) {
        return;
    }
    const int end = ptx::uniform(key_limit(a, s, min(row0 + kRows, s.num_tokens) - 1));
    const int num_tiles = (end + kKeys - 1) / kKeys;
    const int steps = max(kMinSteps, (a.d_c + kDepth - 1) / kDepth);

    Copier<T, kWeightsNk> copier{a, smem, s, head, tid, end, steps};
    copier.begin();
    {
        // Q, zeros beyond the last token and the widths: a warp copies rows warp, warp + 8, ..
        const int64_t nope_at = token_offset(a, s, row0, a.q_stride_b, a.q_stride_s) + head * a.q_stride_h;
        const int64_t rope_at = token_offset(a, s, row0, a.q_rope_stride_b, a.q_rope_stride_s) + head * a.q_rope_stride_h;
        const int lane = tid % 32;
        for (int row = tid / 32; row < kRows; row += kThreads / 32) {
            const bool nope = lane < kNope / 8;
            const int column = 8 * (nope ? lane : lane - kNope / 8);
            const T* src = nope ? static_cast<const T*>(a.q) + nope_at + row * a.q_stride_s
                                : static_cast<const T*>(a.q_rope) + rope_at + row * a.q_rope_stride_s;
            const bool valid = row0 + row < s.num_tokens && column < (nope ? a.d_nope : a.d_rope);
            if (lane < (kNope + kRope) / 8) {
                copier.copy(shared_address(smem.q) + wide_offset<2 * (kNope + kRope)>(row, lane), src + column, valid);
            }
        }
        ptx::cp_async_commit();
    }
#pragma unroll
    for (int i = 0; i < kStages - 1; ++i) {
        auto sources = copier.sources();
#pragma unroll
        for (int part = 0; part < copier.kParts; ++part) {
            copier.issue(sources, part);
        }
        copier.advance();
    }
    if constexpr (std::is_same_v<T, __nv_bfloat16>) {
        // The part of q that meets K as fp16: each thread what it copied itself.
        ptx::cp_async_wait<kStages - 1>();
        for (int row = tid / 32; tid % 32 < kNope / 8 && row < kRows; row += kThreads / 32) {
            uint32_t* const at = reinterpret_cast<uint32_t*>(smem.q + wide_offset<2 * (kNope + kRope)>(row, tid % 32));
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                at[i] = pack_scores<T>(__uint_as_float(at[i] << 16), __uint_as_float(at[i] & 0xffff0000u));
            }
        }
    }

    // Rows beyond the last token may see zeros beyond the last key; they aren't stored.
    RowState rows;
    const int warp_row = row0 + kWarpRows * (tid / 32);
    int most = 0;   // keys that some row of the warp sees
    int least = 0;  // keys that all see
    if (warp_row < s.num_tokens) {
        most = key_limit(a, s, min(warp_row + kWarpRows, s.num_tokens) - 1);
        least = key_limit(a, s, warp_row);
    }
    most = ptx::uniform(most);
    least = ptx::uniform(least);
    rows.limit = a.causal ? warp_row + lane / 4 + s.num_keys - s.num_tokens + 1 : s.num_keys;
#pragma unroll
    for (int m = 0; m < 2; ++m) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            rows.top[m][half] = -INFINITY;
            rows.sum[m][half] = 0.0f;
        }
    }
    float o[2][kValue / 8][4] = {};
    int stage = 0;
    for (int tile = 0; tile < num_tiles; ++tile) {
        {
            float acc[2][8][4] = {};
            for (int step = 0; step < steps; ++step) {
                ptx::cp_async_wait<kStages - 2>();
                __syncthreads();  // this stage is there, the one before is free
                project_step<T, kWeightsNk>(acc, shared_address(smem.c[stage]), shared_address(smem.w[stage]), tid, copier);
                stage = stage + 1 == kStages ? 0 : stage + 1;
            }
            store_projected<T>(smem, acc, tid);
        }
        __syncthreads();  // K and V are there
        const uint32_t rope_addr = shared_address(smem.rope[tile & 1]);
        for (int sub = 0; sub < kKeys; sub += kSubKeys) {
            const int first = tile * kKeys + sub;
            if (first < most) {
                attend<T>(o, rows, a, smem, rope_addr, tid, sub, first, first + kSubKeys > least);
            }
        }
    }
    ptx::cp_async_wait<0>();

    const Sequence done = load_sequence(a, recomputed(unit));
#pragma unroll
    for (int m = 0; m < 2; ++m) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int row = warp_row + 16 * m + 8 * half + lane / 4;
            const float sum = tile::quad_sum(rows.sum[m][half]);
            if (row >= done.num_tokens) {
                continue;
            }
            const float factor = sum == 0.0f ? 0.0f : __frcp_rn(sum);
            if (a.lse != nullptr && lane % 4 == 0) {
                a.lse[lse_offset(a, done, row, head)] = sum == 0.0f ? -INFINITY : (rows.top[m][half] + log2f(sum)) * kLn2;
            }
            const int64_t at = token_offset(a, done, row, a.out_stride_b, a.out_stride_s) + head * a.out_stride_h;
#pragma unroll
            for (int n = 0; n < kValue / 8; ++n) {
                const int column = 8 * n + 2 * (lane % 4);
                if (column < a.d_v) {
                    store_pair(a.out, a.out_dtype, at + column, o[m][n][2 * half] * factor, o[m][n][2 * half + 1] * factor);
                }
            }
        }
    }
}

}  // namespace flare::mla
