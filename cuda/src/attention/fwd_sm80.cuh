// Attention forward with mma.sync, cp.async and ldmatrix: o = softmax(scale q k^T) v, one tile of kBlockM query rows a block.
//
// Every warp owns 16 * kRowTiles query rows and all keys of a block: the softmax needs no other warp. Blocks of keys go from
// the last to the first. One stage of K and V: V(n) is copied under S = Q K(n)^T, K(n - 1) under the softmax and O += P V(n);
// two stages: block n - 1 is copied under all of block n, one barrier a block instead of two. Several blocks share an SM: one's
// softmax runs under another's products.
//
// Shared memory (bytes), element size 2, tiles in the format of tile/smem_layout.cuh, filled by cp.async, read by ldmatrix:
//   q    kBlockM * D * 2      also the way out of O: each warp writes and reads its own rows
//   k    kStages * kBlockN * D * 2
//   v    kStages * kBlockN * Dv * 2
//   loop 32 + 16 a warp: what the loop over blocks needs (LoopState, WarpKeys), so that it doesn't occupy registers through the
//        products
//
// Masks go by warp: a block of keys that all rows of a warp see costs none; of one that a mask cuts, two stages allow the warp
// to pass over every 32 keys that none of its rows sees (the barriers are outside of a warp's work on a block).
//
// Barriers: __syncthreads after each wait for copies (they become visible to the other threads; all have left the stage that is
// filled next).
#pragma once

#include <cstdint>

#include "../ptx/ldst.cuh"
#include "../ptx/math.cuh"
#include "../ptx/mma_sync.cuh"
#include "../tile/fragment.cuh"
#include "../tile/smem_layout.cuh"
#include "common_sm80.cuh"
#include "softmax.cuh"

namespace flare::attention {

// kGeneral: padded head dimensions, pages, splits, softcap, ALiBi, any scale, several heads a tile, any output type.
template <typename T_, int kHeadDim_, int kHeadDimV_, int kBlockM_, int kBlockN_, int kWarps_, int kStages_, int kBlocksPerSm_,
          bool kGeneral_>
struct Sm80Config {
    using T = T_;
    static constexpr int kHeadDim = kHeadDim_;
    static constexpr int kHeadDimV = kHeadDimV_;
    static constexpr int kBlockM = kBlockM_;
    static constexpr int kBlockN = kBlockN_;
    static constexpr int kWarps = kWarps_;
    static constexpr int kThreads = 32 * kWarps;
    static constexpr int kStages = kStages_;
    static constexpr int kBlocksPerSm = kBlocksPerSm_;
    static constexpr bool kGeneral = kGeneral_;
    static constexpr int kRowTiles = kBlockM / (16 * kWarps);
    static constexpr tile::Swizzle kSwizzle =
        kHeadDim % 64 == 0 && kHeadDimV % 64 == 0 ? tile::Swizzle::k128 : tile::Swizzle::k64;
    static constexpr int kSpan = static_cast<int>(tile::span_bytes(kSwizzle));
    static constexpr int kPieces = kSpan / 16;            // of 16 bytes in a span
    static constexpr int kCopyRows = kThreads / kPieces;  // rows of one span that all threads copy at once
    static constexpr int kStepsPerSpan = kSpan / 32;      // of 16 elements
    // Of S = Q K^T. NOTE: two row tiles with D = 128 and the whole loop in one piece make ptxas load fragments so early that it
    // spills (on sm_80).
    static constexpr int kUnrolledSteps = kHeadDim == 128 && kRowTiles > 1 ? 4 : kHeadDim / 16;
    static constexpr int kBytesQ = kBlockM * kHeadDim * 2;
    static constexpr int kBytesK = kBlockN * kHeadDim * 2;
    static constexpr int kBytesV = kBlockN * kHeadDimV * 2;
    static constexpr int kOffsetK = kBytesQ;
    static constexpr int kOffsetV = kOffsetK + kStages * kBytesK;
    static constexpr int kOffsetLoop = kOffsetV + kStages * kBytesV;
    static constexpr int kSmemBytes = kOffsetLoop + 32 + 16 * kWarps;
    // Keys that are masked, or passed over, together. (Warps of 16 rows see nearly the same, and gain nothing by less.)
    static constexpr int kEdgeN = kStages == 2 && kRowTiles > 1 ? 32 : kBlockN;

    static_assert(kBlockM % (16 * kWarps) == 0, "warps share the rows evenly");
    static_assert(kBlockN % kCopyRows == 0 && kBlockM % kCopyRows == 0, "copies are whole passes");
    static_assert(kCopyRows % 8 == 0, "the swizzle of a thread's piece is the same in all passes");
    static_assert(kHeadDim % (kSpan / 2) == 0 && kHeadDimV % (kSpan / 2) == 0, "head dimensions are whole spans");
    static_assert(kHeadDimV <= kHeadDim, "O leaves through the space of Q");
};

// Of the tile, for the loop over blocks of the lean kernel. NOTE: in shared memory because the accumulators take nearly all
// registers; as locals the compiler spills them.
struct LoopState {
    const char* k;  // key 0 of the K/V head
    const char* v;
    int first_key;
    int last_key;
};

// Which keys, counted from the tile's first, the rows of a warp see.
struct WarpKeys {
    int begin;  // any of them sees [begin, end)
    int end;
    int all_begin;  // and every one [all_begin, all_end)
    int all_end;

    __device__ __forceinline__ bool any(int key, int count) const { return key < end && key + count > begin; }
    __device__ __forceinline__ bool all(int key, int count) const { return key >= all_begin && key + count <= all_end; }
};

template <class Cfg>
struct Sm80Forward {
    using T = typename Cfg::T;
    static constexpr int kScores = Cfg::kBlockN / 2;  // of a 16-row tile, per thread
    static constexpr int kOutputs = Cfg::kHeadDimV / 2;
    static constexpr int kRowTiles = Cfg::kRowTiles;

    const Sm80Args& args;
    Sm80Tile tile;
    ScoreRule rule;
    KeySource keys_k;
    KeySource keys_v;
    uint32_t smem;
    int warp_row;        // first row of this warp in the tile; uniform
    uint32_t lane_addr;  // see fragment_addr

    // kGeneral, by row (mt, r) of this thread:
    int key_of_row[kRowTiles][2];  // see key_of
    float slope[kRowTiles][2];     // ALiBi, per unit

    static __device__ __forceinline__ int thread() { return static_cast<int>(threadIdx.x); }
    static __device__ __forceinline__ int lane() { return thread() % 32; }

    __device__ __forceinline__ int copy_row() const { return thread() / Cfg::kPieces; }
    __device__ __forceinline__ uint32_t copy_offset() const {
        return tile::swizzle<Cfg::kSwizzle>(static_cast<uint32_t>(copy_row() * Cfg::kSpan + thread() % Cfg::kPieces * 16));
    }

    // Fills a [kRows][kDim] tile: row(i) is where row i begins, null for a row of zeros; elements from `dim` on are zeros too.
    template <int kRows, int kDim, typename Row>
    __device__ __forceinline__ void copy_tile(uint32_t dst, int dim, Row row) const {
        const int piece = thread() % Cfg::kPieces;
        dst += copy_offset();
#pragma unroll
        for (int pass = 0; pass < kRows / Cfg::kCopyRows; ++pass) {
            const char* src = row(copy_row() + pass * Cfg::kCopyRows);
#pragma unroll
            for (int span = 0; span < kDim * 2 / Cfg::kSpan; ++span) {
                const int byte = span * Cfg::kSpan + piece * 16;
                const bool inside = src != nullptr && (!Cfg::kGeneral || byte < dim * 2);
                ptx::cp_async_16(dst + span * kRows * Cfg::kSpan + pass * Cfg::kCopyRows * Cfg::kSpan,
                                 inside ? src + byte : static_cast<const char*>(args.params.q), inside ? 16 : 0);
            }
        }
    }

    // The same for keys that follow each other: src is this thread's 16 bytes of row 0, rows from `valid` on are zeros. (What
    // isn't read need not be mapped.)
    template <int kDim, bool kEdge>
    __device__ __forceinline__ void copy_dense_keys(uint32_t dst, const char* src, int64_t row_bytes, int valid) const {
        dst += copy_offset();
#pragma unroll
        for (int pass = 0; pass < Cfg::kBlockN / Cfg::kCopyRows; ++pass) {
            const uint32_t bytes = !kEdge || copy_row() + pass * Cfg::kCopyRows < valid ? 16 : 0;
#pragma unroll
            for (int span = 0; span < kDim * 2 / Cfg::kSpan; ++span) {
                ptx::cp_async_16(dst + span * Cfg::kBlockN * Cfg::kSpan + pass * Cfg::kCopyRows * Cfg::kSpan,
                                 src + span * Cfg::kSpan, bytes);
            }
            src += Cfg::kCopyRows * row_bytes;
        }
    }

    __device__ __forceinline__ LoopState state() const {
        if constexpr (Cfg::kGeneral) {
            return {keys_k.base, keys_v.base, tile.first_key, tile.last_key};
        } else {
            uint32_t bases[4];
            uint32_t range[4];
            ptx::ld_shared_v4(bases, smem + Cfg::kOffsetLoop);
            ptx::ld_shared_v4(range, smem + Cfg::kOffsetLoop + 16);
            return {reinterpret_cast<const char*>(uint64_t{bases[1]} << 32 | bases[0]),
                    reinterpret_cast<const char*>(uint64_t{bases[3]} << 32 | bases[2]), static_cast<int>(range[0]),
                    static_cast<int>(range[1])};
        }
    }

    // By one thread, before the first barrier.
    __device__ __forceinline__ void store_state() const {
        const uint64_t k = reinterpret_cast<uint64_t>(keys_k.base);
        const uint64_t v = reinterpret_cast<uint64_t>(keys_v.base);
        const uint32_t words[2][4] = {
            {static_cast<uint32_t>(k), static_cast<uint32_t>(k >> 32), static_cast<uint32_t>(v),
             static_cast<uint32_t>(v >> 32)},
            {static_cast<uint32_t>(tile.first_key), static_cast<uint32_t>(tile.last_key),
             static_cast<uint32_t>(tile.row0 + tile.seqlen_k - tile.seqlen_q - tile.first_key), 0}};
        ptx::st_shared_v4(smem + Cfg::kOffsetLoop, words[0]);
        ptx::st_shared_v4(smem + Cfg::kOffsetLoop + 16, words[1]);
    }

    __device__ __forceinline__ uint32_t warp_keys_addr() const {
        return smem + Cfg::kOffsetLoop + 32 + warp_row / kRowTiles;  // 16 bytes a warp of 16 kRowTiles rows
    }

    __device__ __forceinline__ WarpKeys warp_keys() const {
        uint32_t words[4];
        ptx::ld_shared_v4(words, warp_keys_addr());
        return {static_cast<int>(words[0]), static_cast<int>(words[1]), static_cast<int>(words[2]), static_cast<int>(words[3])};
    }

    // By one thread of each warp, before the first barrier.
    __device__ __forceinline__ void store_warp_keys() const {
        const FwdParams& p = args.params;
        const int count = min(16 * kRowTiles, tile.count - warp_row);
        uint32_t words[4] = {0, 0, 0, 0};  // a warp without rows sees nothing
        if (count > 0) {
            const int shift = tile.seqlen_k - tile.seqlen_q - tile.first_key;
            const int first = tile.token(args, tile.row0 + warp_row) + shift;
            const int last = tile.token(args, tile.row0 + warp_row + count - 1) + shift;
            const int end = tile.last_key - tile.first_key;
            words[0] = static_cast<uint32_t>(first - p.window_left);
            words[1] = static_cast<uint32_t>(min(end, last + p.window_right + 1));
            words[2] = static_cast<uint32_t>(last - p.window_left);
            words[3] = static_cast<uint32_t>(min(end, first + p.window_right + 1));
        }
        ptx::st_shared_v4(warp_keys_addr(), words);
    }

    template <int kDim>
    __device__ __forceinline__ void copy_keys(uint32_t dst, const char* base, const KeyLayout& layout, int first, int last,
                                              int dim) const {
        const int valid = last - first;
        if constexpr (Cfg::kGeneral) {
            copy_tile<Cfg::kBlockN, kDim>(dst, dim, [&](int i) -> const char* {
                return i < valid ? KeySource{layout, base}.row(KeyPlace::find(args, tile.batch, first + i)) : nullptr;
            });
        } else {
            const char* src = base + (first + copy_row()) * layout.row_bytes + thread() % Cfg::kPieces * 16;
            if (valid >= Cfg::kBlockN) {
                copy_dense_keys<kDim, false>(dst, src, layout.row_bytes, valid);
            } else {
                copy_dense_keys<kDim, true>(dst, src, layout.row_bytes, valid);
            }
        }
    }

    __device__ __forceinline__ void copy_k(const LoopState& state, int n, int stage) const {
        copy_keys<Cfg::kHeadDim>(smem + Cfg::kOffsetK + stage * Cfg::kBytesK, state.k, args.k,
                                 state.first_key + n * Cfg::kBlockN, state.last_key, args.params.head_dim);
    }

    __device__ __forceinline__ void copy_v(const LoopState& state, int n, int stage) const {
        copy_keys<Cfg::kHeadDimV>(smem + Cfg::kOffsetV + stage * Cfg::kBytesV, state.v, args.v,
                                  state.first_key + n * Cfg::kBlockN, state.last_key, args.params.head_dim_v);
    }

    __device__ __forceinline__ void copy_q() const {
        const FwdParams& p = args.params;
        const char* base = static_cast<const char*>(p.q) + (tile.q_batch * p.q_stride.batch + tile.q_row * p.q_stride.row) * 2;
        copy_tile<Cfg::kBlockM, Cfg::kHeadDim>(smem, p.head_dim, [&](int i) -> const char* {
            if (i >= tile.count) {
                return nullptr;
            }
            if (!Cfg::kGeneral) {
                return base + ((tile.row0 + i) * p.q_stride.row + tile.head * p.q_stride.head) * 2;
            }
            const int token = tile.token(args, tile.row0 + i);
            return base + (token * p.q_stride.row + tile.query_head(args, tile.row0 + i, token) * p.q_stride.head) * 2;
        });
    }

    // Every ldmatrix reads 16 rows x 16 elements: row lane % 16, half lane / 16. This is the address for elements 16 kk.. of a
    // tile of kRows rows at `offset`; the swizzle commutes with adding multiples of 8 rows and with flipping higher column
    // bits, so that one register a column step serves Q, K and V.
    template <int kRows>
    __device__ __forceinline__ uint32_t fragment_addr(int offset, int kk) const {
        return (lane_addr ^ (kk % Cfg::kStepsPerSpan * 32)) + (offset + kk / Cfg::kStepsPerSpan * kRows * Cfg::kSpan);
    }

    // Scores of the kCount * 2 keys from `key` of a block on.
    template <int kCount>
    __device__ __forceinline__ void multiply_scores(float (&s)[kRowTiles][kCount], int stage, int key) const {
        const int q_rows = warp_row * Cfg::kSpan;
        const int k_tile = Cfg::kOffsetK + stage * Cfg::kBytesK + key * Cfg::kSpan;
#pragma unroll
        for (int mt = 0; mt < kRowTiles; ++mt) {
#pragma unroll
            for (int i = 0; i < kCount; ++i) {
                s[mt][i] = 0.0f;
            }
        }
#pragma unroll Cfg::kUnrolledSteps
        for (int kk = 0; kk < Cfg::kHeadDim / 16; ++kk) {
            uint32_t a[kRowTiles][4];
#pragma unroll
            for (int mt = 0; mt < kRowTiles; ++mt) {
                ptx::ldmatrix_x4(a[mt], fragment_addr<Cfg::kBlockM>(mt * 16 * Cfg::kSpan, kk) + q_rows);
            }
#pragma unroll
            for (int nt = 0; nt < kCount / 8; ++nt) {
                uint32_t b[4];
                ptx::ldmatrix_x4(b, fragment_addr<Cfg::kBlockN>(k_tile + nt * 16 * Cfg::kSpan, kk));
#pragma unroll
                for (int mt = 0; mt < kRowTiles; ++mt) {
                    ptx::mma_m16n8k16<T>(&s[mt][8 * nt], a[mt], b[0], b[2]);
                    ptx::mma_m16n8k16<T>(&s[mt][8 * nt + 4], a[mt], b[1], b[3]);
                }
            }
        }
    }

    template <int kCount>
    __device__ __forceinline__ void multiply_values(float (&o)[kRowTiles][kOutputs], const float (&s)[kRowTiles][kCount],
                                                    int stage, int key) const {
        const int v_tile = Cfg::kOffsetV + stage * Cfg::kBytesV + key * Cfg::kSpan;
#pragma unroll
        for (int kk = 0; kk < kCount / 8; ++kk) {
            uint32_t a[kRowTiles][4];
#pragma unroll
            for (int mt = 0; mt < kRowTiles; ++mt) {
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    a[mt][i] = ptx::pack2<T>(s[mt][8 * kk + 2 * i], s[mt][8 * kk + 2 * i + 1]);
                }
            }
#pragma unroll
            for (int dt = 0; dt < Cfg::kHeadDimV / 16; ++dt) {
                uint32_t b[4];
                ptx::ldmatrix_x4_trans(b, fragment_addr<Cfg::kBlockN>(v_tile + kk * 16 * Cfg::kSpan, dt));
#pragma unroll
                for (int mt = 0; mt < kRowTiles; ++mt) {
                    ptx::mma_m16n8k16<T>(&o[mt][8 * dt], a[mt], b[0], b[1]);
                    ptx::mma_m16n8k16<T>(&o[mt][8 * dt + 4], a[mt], b[2], b[3]);
                }
            }
        }
    }

    // Scale that isn't positive, softcap, ALiBi. `key` is counted from the tile's first.
    template <int kCount>
    __device__ __forceinline__ void transform_scores(float (&s)[kRowTiles][kCount], int key) const {
        if constexpr (Cfg::kGeneral) {
            if (rule.softcap) {
#pragma unroll
                for (int i = 0; i < kRowTiles * kCount; ++i) {
                    s[i / kCount][i % kCount] = tanh_exp(s[i / kCount][i % kCount] * rule.softcap_in);
                }
            } else if (rule.prescale != 1.0f) {
#pragma unroll
                for (int i = 0; i < kRowTiles * kCount; ++i) {
                    s[i / kCount][i % kCount] *= rule.prescale;
                }
            }
            if (args.params.alibi_slopes != nullptr) {
#pragma unroll
                for (int mt = 0; mt < kRowTiles; ++mt) {
#pragma unroll
                    for (int i = 0; i < kCount; ++i) {
                        const int distance = key_of(0, mt, (i / 2) % 2) - key - (8 * (i / 4) + i % 2);
                        s[mt][i] -= slope[mt][(i / 2) % 2] * fabsf(static_cast<float>(distance));
                    }
                }
            }
        }
    }

    template <int kCount>
    __device__ __forceinline__ void mask_scores(float (&s)[kRowTiles][kCount], const WarpKeys& keys, int key) const {
        const FwdParams& p = args.params;
        if (key + 2 * kCount > keys.all_end) {
            const LoopState range = state();
            const int shift = row_shift();
            const int end = range.last_key - 1 - range.first_key - 2 * (lane() % 4);
#pragma unroll
            for (int mt = 0; mt < kRowTiles; ++mt) {
                const int hi[2] = {min(end, key_of(shift, mt, 0) + p.window_right) - key,
                                   min(end, key_of(shift, mt, 1) + p.window_right) - key};
                mask_right(s[mt], hi);
            }
        }
        if (key < keys.all_begin) {
            const int shift = row_shift();
#pragma unroll
            for (int mt = 0; mt < kRowTiles; ++mt) {
                const int lo[2] = {key_of(shift, mt, 0) - p.window_left - key, key_of(shift, mt, 1) - p.window_left - key};
                mask_left(s[mt], lo);
            }
        }
    }

    // This thread's row in the tile.
    __device__ __forceinline__ int own_row(int mt, int r) const { return warp_row + 16 * mt + lane() / 4 + 8 * r; }

    // Position of row (mt, r) on the key axis relative to the thread's first column in block 0.
    __device__ __forceinline__ int key_of(int shift, int mt, int r) const {
        return Cfg::kGeneral ? key_of_row[mt][r] : shift + own_row(mt, r) - 2 * (lane() % 4);
    }

    __device__ __forceinline__ int row_shift() const {
        return Cfg::kGeneral ? 0 : static_cast<int>(ptx::ld_shared_b32(smem + Cfg::kOffsetLoop + 24));
    }

    __device__ __forceinline__ float unit() const { return Cfg::kGeneral ? rule.unit : args.unit; }
    __device__ __forceinline__ float scale_log2() const { return Cfg::kGeneral ? rule.scale_log2 : args.scale_log2; }

    __device__ __forceinline__ void begin() {
        if constexpr (Cfg::kGeneral) {
            const int shift = tile.seqlen_k - tile.seqlen_q - tile.first_key - 2 * (lane() % 4);
#pragma unroll
            for (int mt = 0; mt < kRowTiles; ++mt) {
#pragma unroll
                for (int r = 0; r < 2; ++r) {
                    const int row = tile.row0 + min(own_row(mt, r), tile.count - 1);
                    const int token = tile.token(args, row);
                    key_of_row[mt][r] = token + shift;
                    slope[mt][r] = alibi_slope(args.params, tile.batch, tile.query_head(args, row, token)) / rule.unit;
                }
            }
        } else if (thread() == 0) {
            store_state();
        }
        if (lane() == 0) {
            store_warp_keys();
        }
    }

    // fp32 results go straight out: a quad fills a sector.
    __device__ __forceinline__ void store_fp32(float* out, const float (&o)[kOutputs], float factor, int r) const {
#pragma unroll
        for (int i = 2 * r; i < kOutputs; i += 4) {
            const int column = 2 * i + 2 * (lane() % 4) - 4 * r;
            if (column < args.params.head_dim_v) {
                *reinterpret_cast<float2*>(out + column) = make_float2(o[i] * factor, o[i + 1] * factor);
            }
        }
    }

    template <typename Out>
    __device__ __forceinline__ void stage_row(const float (&o)[kOutputs], float factor, int mt, int r) const {
        const int row = own_row(mt, r);
#pragma unroll
        for (int i = 2 * r; i < kOutputs; i += 4) {
            const uint32_t column_bytes = 4 * (i - 2 * r);  // 16 bytes a group of 8 columns
            const uint32_t at = tile::tile_addr<Cfg::kSwizzle>(0, Cfg::kBlockM, row, column_bytes) + lane() % 4 * 4;
            ptx::st_shared_b32(smem + at, ptx::pack2<Out>(o[i] * factor, o[i + 1] * factor));
        }
    }

    // Rows of this warp from shared memory to where they belong, 16 bytes a lane.
    __device__ __forceinline__ void store_staged() const {
        constexpr int kRowPieces = Cfg::kHeadDimV / 8;
        __syncwarp();
#pragma unroll 4
        for (int i = lane(); i < 16 * kRowTiles * kRowPieces; i += 32) {
            const int row = warp_row + i / kRowPieces;
            const int piece = i % kRowPieces;
            if (row < tile.count && (!Cfg::kGeneral || piece * 8 < args.params.head_dim_v)) {
                uint32_t data[4];
                ptx::ld_shared_v4(data, smem + tile::tile_addr<Cfg::kSwizzle>(0, Cfg::kBlockM, row, piece * 16));
                const int token = Cfg::kGeneral ? tile.token(args, tile.row0 + row) : tile.row0 + row;
                const int head = Cfg::kGeneral ? tile.query_head(args, tile.row0 + row, token) : tile.head;
                const OutputRow at = OutputRow::make(args, tile, token, head);
                ptx::st_global_v4(static_cast<uint16_t*>(args.params.o) + at.out + piece * 8, data);
            }
        }
    }

    // `last` is read by the other warps no more: O may take Q's place (own rows only).
    __device__ __forceinline__ void finish(const float (&o)[kRowTiles][kOutputs], const Softmax (&softmax)[kRowTiles]) const {
        const FwdParams& p = args.params;
        const bool split = Cfg::kGeneral && args.partial_out != nullptr;
        const bool fp32 = Cfg::kGeneral && (split || p.out_dtype == DType::kFp32);
        const float descale = Cfg::kGeneral ? rule.value_descale(args, tile) : 1.0f;
        float* lse_base = split ? args.partial_lse : p.lse;
#pragma unroll
        for (int mt = 0; mt < kRowTiles; ++mt) {
#pragma unroll
            for (int r = 0; r < 2; ++r) {
                const int row = own_row(mt, r);
                const bool exists = row < tile.count;
                const int absolute = tile.row0 + min(row, tile.count - 1);
                const int token = Cfg::kGeneral ? tile.token(args, absolute) : absolute;
                const int head = Cfg::kGeneral ? tile.query_head(args, absolute, token) : tile.head;
                const float sink = p.sink != nullptr && !split ? p.sink[head] : -INFINITY;
                float lse;
                const float factor = softmax[mt].finish(r, unit(), sink, lse) * descale;
                const OutputRow at = OutputRow::make(args, tile, token, head);
                if (exists && lse_base != nullptr && lane() % 4 == 0) {
                    lse_base[at.lse] = lse;
                }
                if (fp32) {
                    if (exists) {
                        store_fp32((split ? args.partial_out : static_cast<float*>(p.o)) + at.out, o[mt], factor, r);
                    }
                } else if (!Cfg::kGeneral || p.out_dtype == p.dtype) {
                    stage_row<T>(o[mt], factor, mt, r);
                } else if (p.out_dtype == DType::kBf16) {
                    stage_row<__nv_bfloat16>(o[mt], factor, mt, r);
                } else {
                    stage_row<__half>(o[mt], factor, mt, r);
                }
            }
        }
        if (!fp32) {
            store_staged();
        }
    }

    // Weights of scores and their part of O.
    template <int kCount>
    __device__ __forceinline__ void accumulate(float (&o)[kRowTiles][kOutputs], Softmax (&softmax)[kRowTiles],
                                               float (&s)[kRowTiles][kCount], int stage, int key) const {
#pragma unroll
        for (int mt = 0; mt < kRowTiles; ++mt) {
            softmax[mt].update_lazily(s[mt], o[mt], scale_log2());
        }
        multiply_values(o, s, stage, key);
    }

    __device__ __forceinline__ void run() {
        float o[kRowTiles][kOutputs];
        Softmax softmax[kRowTiles];
#pragma unroll
        for (int mt = 0; mt < kRowTiles; ++mt) {
            softmax[mt].reset();
#pragma unroll
            for (int i = 0; i < kOutputs; ++i) {
                o[mt][i] = 0.0f;
            }
        }
        begin();
        const int last = tile.num_blocks - 1;
        if (last >= 0) {  // NOTE: else there is no barrier between a copy of Q and the output, which takes its place
            copy_q();
            const LoopState first{keys_k.base, keys_v.base, tile.first_key, tile.last_key};
            copy_k(first, last, 0);
            if constexpr (Cfg::kStages == 2) {
                copy_v(first, last, 0);
            }
        }
        ptx::cp_async_commit();
        int stage = 0;
        for (int n = last; n >= 0; --n) {
            ptx::cp_async_wait<0>();
            __syncthreads();
            if constexpr (Cfg::kStages == 2) {
                if (n > 0) {
                    const LoopState now = state();
                    copy_k(now, n - 1, stage ^ 1);
                    copy_v(now, n - 1, stage ^ 1);
                }
            } else {
                copy_v(state(), n, 0);
            }
            ptx::cp_async_commit();
            const int key0 = n * Cfg::kBlockN;
            const WarpKeys keys = warp_keys();
            if constexpr (Cfg::kStages == 2) {
                if (keys.all(key0, Cfg::kBlockN)) {
                    float s[kRowTiles][kScores];
                    multiply_scores(s, stage, 0);
                    transform_scores(s, key0);
                    accumulate(o, softmax, s, stage, 0);
                } else {
#pragma unroll 1
                    for (int key = 0; key < Cfg::kBlockN; key += Cfg::kEdgeN) {
                        if (keys.any(key0 + key, Cfg::kEdgeN)) {
                            float s[kRowTiles][Cfg::kEdgeN / 2];
                            multiply_scores(s, stage, key);
                            transform_scores(s, key0 + key);
                            mask_scores(s, keys, key0 + key);
                            accumulate(o, softmax, s, stage, key);
                        }
                    }
                }
            } else {
                float s[kRowTiles][kScores];
                multiply_scores(s, stage, 0);
                ptx::cp_async_wait<0>();
                __syncthreads();
                if (n > 0) {
                    copy_k(state(), n - 1, 0);
                }
                ptx::cp_async_commit();
                transform_scores(s, key0);
                mask_scores(s, keys, key0);
                accumulate(o, softmax, s, stage, 0);
            }
            stage = Cfg::kStages == 2 ? stage ^ 1 : 0;
        }
        ptx::cp_async_wait<0>();
        // NOTE: made again, from a number that the compiler can't tell to be the same, rather than kept in registers through
        // the loop.
        tile = Sm80Tile::make<Cfg::kBlockM, Cfg::kBlockN>(args, ptx::uniform(static_cast<int>(blockIdx.x)));
        finish(o, softmax);
    }
};

template <class Cfg>
__global__ void __launch_bounds__(Cfg::kThreads, Cfg::kBlocksPerSm)
    attention_fwd_sm80_kernel(const __grid_constant__ Sm80Args args) {
    extern __shared__ __align__(1024) uint8_t smem[];
    Sm80Tile tile = Sm80Tile::make<Cfg::kBlockM, Cfg::kBlockN>(args, static_cast<int>(blockIdx.x));
    if (tile.count <= 0) {
        return;
    }
    tile.make_uniform();
    const FwdParams& p = args.params;
    const uint32_t base = static_cast<uint32_t>(__cvta_generic_to_shared(smem));
    const int lane = static_cast<int>(threadIdx.x) % 32;
    Sm80Forward<Cfg> forward{
        args,
        tile,
        ScoreRule::make(args, tile),
        KeySource::make(args, tile, p.k, args.k),
        KeySource::make(args, tile, p.v, args.v),
        base,
        ptx::uniform(static_cast<int>(threadIdx.x) / 32) * 16 * Sm80Forward<Cfg>::kRowTiles,
        base + tile::swizzle<Cfg::kSwizzle>(static_cast<uint32_t>(lane % 16 * Cfg::kSpan + lane / 16 * 16))};
    forward.run();
}

template <class Cfg>
cudaError_t launch_sm80(const Sm80Args& args, int64_t num_tiles, cudaStream_t stream) {
    const auto kernel = attention_fwd_sm80_kernel<Cfg>;
    // Per device and context, and cheap: set before every launch rather than remembered.
    if (const cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, Cfg::kSmemBytes)) {
        return error;
    }
    kernel<<<static_cast<unsigned>(num_tiles), Cfg::kThreads, Cfg::kSmemBytes, stream>>>(args);
    return cudaPeekAtLastError();
}

}  // namespace flare::attention
