// Absorbed MLA with mma.sync: S = [q_latent | q_rope] [c | k_rope]^T, O = P c, one shared latent row a key.
//
// A block (8 warps) takes kRows rows (row = token * H + head) of one sequence and one of num_splits equal runs of its 32-key
// tiles. A tile is 32 x 576 in shared memory; two of them alternate, filled by cp.async one tile ahead. Per tile:
//
//   wait for the tile, barrier A          issue the copies of tile i + 1; warp 0 looks up the places of tile i + 2
//   scores: warp (g, h) multiplies latents [128 g, +128) and rope [16 g, +16) of all rows and keys [16 h, +16): q stays in
//           registers; partial sums to shared memory; barrier B
//   softmax: the threads of a row add the four partial sums, update maximum and sum, write P and the factor; barrier C
//   O += P c: warp w owns latent columns [64 w, 64 w + 64)
//
// Shared-memory traffic per tile at 16 rows: 36 KB written by cp.async, 36 KB read by scores, 32 KB by O, 12 KB partial sums:
// 116 KB or 900 cycles, where reading 36 KB from memory takes 2,300 (3.7 TB/s over 132 SMs): two blocks an SM hide the rest.
#pragma once

#include "../ptx/ldst.cuh"
#include "../ptx/math.cuh"
#include "../ptx/mma_sync.cuh"
#include "absorbed_layout_sm80.cuh"
#include "absorbed_sm80.cuh"
#include "normaliser.cuh"

namespace flare::mla {

// Where results go: split 0 of 1 straight to out, or to the partial buffers.
struct AbsorbedTiles {
    int32_t num_splits;
    int32_t num_tiles;    // of rows, per unit
    int32_t rows_padded;  // seqlen_q * heads (sparse: heads): rows of a unit in the partial buffers
    int32_t units;        // sequences (sparse: tokens)
    float* o_part;        // [num_splits, units, rows_padded, d_c]
    float* lse_part;      // [num_splits, units, rows_padded], log2
    void* out;            // final results: the caller's, or latent outputs before W_uv
    DType out_dtype;
    int64_t out_stride_b, out_stride_s, out_stride_h;
    DType q_dtype;  // of a.q: fp16 after W_uk, whatever a.dtype is
    DType q_rope_dtype;
};

namespace absorbed {

__device__ __forceinline__ uint32_t bf16_to_fp16(uint32_t pair) {
    return ptx::pack2<__half>(__uint_as_float(pair << 16), __uint_as_float(pair & 0xffff0000u));
}

// Four e4m3 values as two pairs of fp16, exactly: their bits in place of its exponent and mantissa, times the power of two that
// the exponents' biases differ by. The one NaN, 0x7f, would become 480.
__device__ __forceinline__ void e4m3_to_fp16(uint32_t word, uint32_t& lo, uint32_t& hi) {
    const uint32_t spread[2] = {__byte_perm(word, 0, 0x1404), __byte_perm(word, 0, 0x3424)};  // bytes to the tops of halves
    uint32_t pairs[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        pairs[i] = (spread[i] >> 1 & 0x3f803f80u) | (spread[i] & 0x80008000u);
        const __half2 x = __hmul2(*reinterpret_cast<__half2*>(&pairs[i]), __half2half2(__ushort_as_half(0x5c00)));  // 2^8
        pairs[i] = *reinterpret_cast<const uint32_t*>(&x);
    }
    if (((word & 0x7f7f7f7fu) + 0x01010101u) & 0x80808080u) {
        const uint32_t nan = 0x7fffu;
        pairs[0] |= ((word & 0x7fu) == 0x7fu ? nan : 0) | ((word >> 8 & 0x7fu) == 0x7fu ? nan << 16 : 0);
        pairs[1] |= ((word >> 16 & 0x7fu) == 0x7fu ? nan : 0) | ((word >> 24 & 0x7fu) == 0x7fu ? nan << 16 : 0);
    }
    lo = pairs[0];
    hi = pairs[1];
}

// Partial scores of latents times the scales of their keys; `key` is this thread's first.
template <int kRowTiles>
__device__ __forceinline__ void scale_scores(float (&acc)[kRowTiles][2][4], const float (*scales)[kScoreGroups], int key,
                                             int group) {
#pragma unroll
    for (int n = 0; n < 2; ++n) {
        const float scale0 = scales[key + 8 * n][group];
        const float scale1 = scales[key + 8 * n + 1][group];
#pragma unroll
        for (int m = 0; m < kRowTiles; ++m) {
            acc[m][n][0] *= scale0;
            acc[m][n][1] *= scale1;
            acc[m][n][2] *= scale0;
            acc[m][n][3] *= scale1;
        }
    }
}

// Fills the tiles. Warp w has keys 4 w .. 4 w + 3. 656-byte rows are copied as they are and converted by the warp that copied
// them.
template <typename T, int kRows, bool kRow656>
struct TileLoader {
    const AbsorbedArgs& a;
    SharedStorage<kRows, kRow656>& smem;
    uint32_t k_addr;
    int thread;

    // The places of a tile's keys, by one warp, a key a lane; `put` makes them known.
    __device__ __forceinline__ KeyPlace look_up(const Sequence& s, int tile, int end) const {
        const int j = tile * kKeys + thread % 32;
        return j < end ? key_place(a, s, j) : KeyPlace{0, -1};
    }
    __device__ __forceinline__ void put(const Sequence& s, const KeyPlace& place, int tile) {
        const int slot = tile % kPlaces;
        const int lane = thread % 32;
        smem.latent_at[slot][lane] = place.present() ? place.offset(s, a.latent_stride_b, a.latent_stride_s) : 0;
        smem.rope_at[slot][lane] = place.present() ? place.offset(s, a.rope_stride_b, a.rope_stride_s) : 0;
        const uint32_t present = __ballot_sync(0xffffffffu, place.present());
        if (lane == 0) {
            smem.present[slot] = present;
        }
    }

    // Starts the copies of a tile; its places are known.
    __device__ __forceinline__ void issue(int tile) {
        const int slot = tile % kPlaces;
        const int lane = (kRows == 16 ? recomputed(thread) : thread) % 32;
        const int warp = (kRows == 16 ? recomputed(thread) : thread) / 32;
        const uint32_t present = smem.present[slot];
        if constexpr (kRow656) {
            const uint32_t dst = raw_address(tile);
            const auto copy = [&](int row, int chunk) {
                const bool valid = present >> row & 1;
                const char* src = a.latent + smem.latent_at[slot][row] + 16 * chunk;
                ptx::cp_async_16(dst + 656 * row + 16 * chunk, valid ? src : a.latent, valid ? 16 : 0);
            };
#pragma unroll
            for (int r = 0; r < 4; ++r) {
                copy(4 * warp + r, lane);
            }
            copy(4 * warp + lane / 8, 32 + lane % 8);  // scales and rope
            if (lane < 4) {
                copy(4 * warp + lane, 40);
            }
        } else {
            const uint32_t dst = k_address(tile);
#pragma unroll
            for (int r = 0; r < 4; ++r) {
                const int row = 4 * warp + r;
                const bool valid = present >> row & 1;
                const char* src = a.latent + smem.latent_at[slot][row] + 16 * lane;
#pragma unroll
                for (int half = 0; half < 2; ++half) {
                    const bool copied = valid && 8 * (lane + 32 * half) < a.d_c;
                    ptx::cp_async_16(dst + chunk_offset(row, lane + 32 * half), copied ? src + 512 * half : a.latent,
                                     copied ? 16 : 0);
                }
            }
            const int row = 4 * warp + lane / 8;
            const bool copied = (present >> row & 1) && 8 * (lane % 8) < a.d_rope;
            ptx::cp_async_16(dst + chunk_offset(row, kLatentChunks + lane % 8),
                             copied ? a.rope + smem.rope_at[slot][row] + 16 * (lane % 8) : a.latent, copied ? 16 : 0);
        }
    }

    // Makes the copies of a tile complete for this thread; a barrier makes them visible to others. With 656-byte rows the tile
    // before has been read by all.
    __device__ __forceinline__ void finish(int tile) {
        ptx::cp_async_wait<Stages<kRow656>::kAhead - 1>();
        if constexpr (kRow656) {
            __syncwarp();
            const int lane = (kRows == 16 ? recomputed(thread) : thread) % 32;
            const int warp = (kRows == 16 ? recomputed(thread) : thread) / 32;
            const uint32_t src = raw_address(tile);
            const uint32_t dst = k_address(tile);
#pragma unroll
            for (int r = 0; r < 4; ++r) {
                const int row = 4 * warp + r;
                uint32_t in[4];
                uint32_t out[8];
                ptx::ld_shared_v4(in, src + 656 * row + 16 * lane);
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    e4m3_to_fp16(in[i], out[2 * i], out[2 * i + 1]);
                }
                ptx::st_shared_v4(dst + chunk_offset(row, 2 * lane), {out[0], out[1], out[2], out[3]});
                ptx::st_shared_v4(dst + chunk_offset(row, 2 * lane + 1), {out[4], out[5], out[6], out[7]});
            }
            const int row = 4 * warp + lane / 8;
            uint32_t rope[4];
            ptx::ld_shared_v4(rope, src + 656 * row + kRow656Rope + 16 * (lane % 8));
#pragma unroll
            for (uint32_t& pair : rope) {
                pair = bf16_to_fp16(pair);
            }
            ptx::st_shared_v4(dst + chunk_offset(row, kLatentChunks + lane % 8), rope);
            if (lane % 8 < kScoreGroups) {
                smem.scales[row][lane % 8] =
                    *reinterpret_cast<const float*>(smem.raw[tile % 2] + 656 * row + kRow656Scales + 4 * (lane % 8));
            }
        }
    }

    __device__ __forceinline__ uint32_t k_address(int tile) const {
        return k_addr + tile % Stages<kRow656>::kTiles * kTileBytes;
    }
    __device__ __forceinline__ uint32_t raw_address(int tile) const {
        return static_cast<uint32_t>(__cvta_generic_to_shared(smem.raw[kRow656 ? tile % 2 : 0]));
    }
};

}  // namespace absorbed

// Blocks: ((unit * num_splits) + split) * num_tiles + tile.
template <typename T, int kRows, bool kRow656>
__global__ void __launch_bounds__(absorbed::kThreads, kRows == 16 ? 2 : 1)
    mla_absorbed_sm80_kernel(const AbsorbedArgs a, const AbsorbedTiles tiles) {
    using namespace absorbed;
    // Only two blocks an SM are short of registers.
    const auto here = [](int x) { return kRows == 16 ? recomputed(x) : x; };
    static_assert(!kRow656 || std::is_same_v<T, __half>, "656-byte rows are fp16 arithmetic");
    constexpr int kAhead = Stages<kRow656>::kAhead;
    constexpr int kRowTiles = kRows / 16;
    constexpr int kRowThreads = kThreads / kRows;  // threads that share a row's softmax
    constexpr int kRowKeys = kKeys / kRowThreads;  // keys of a thread there
    extern __shared__ __align__(128) uint8_t smem_bytes[];
    using Storage = SharedStorage<kRows, kRow656>;
    Storage& smem = *reinterpret_cast<Storage*>(smem_bytes);
    const int tid = static_cast<int>(threadIdx.x);

    // Divisions and loads leave these in vector registers, which are scarce here.
    const int row_tile = ptx::uniform(static_cast<int>(blockIdx.x) % tiles.num_tiles);
    const int split = ptx::uniform(static_cast<int>(blockIdx.x) / tiles.num_tiles % tiles.num_splits);
    const int unit = ptx::uniform(static_cast<int>(blockIdx.x) / tiles.num_tiles / tiles.num_splits);
    const Sequence s = uniform_sequence(load_sequence(a, unit));
    const int rows = s.num_tokens * a.heads;
    const int row0 = row_tile * kRows;
    if (row0 >= rows) {
        return;
    }
    // Keys that the last row of the tile sees, cut into equal runs of tiles.
    const int last_token = s.first_token + (min(row0 + kRows, rows) - 1) / a.heads;
    const int end = key_limit(a, s, last_token);
    const int num_tiles = (end + kKeys - 1) / kKeys;
    const int run = (num_tiles + tiles.num_splits - 1) / tiles.num_splits;
    const int tile_begin = min(split * run, num_tiles);
    const int tile_end = min(tile_begin + run, num_tiles);

    TileLoader<T, kRows, kRow656> loader{a, smem, static_cast<uint32_t>(__cvta_generic_to_shared(smem.k)), tid};
    if (tid < 32) {
#pragma unroll
        for (int i = 0; i <= kAhead; ++i) {
            loader.put(s, loader.look_up(s, tile_begin + i, end), tile_begin + i);
        }
    }

    // Q: this warp's quarter of the channels of all rows, as A fragments.
    uint32_t q[kRowTiles][kScoreSteps][4];
#pragma unroll
    for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int row = row0 + 16 * m + 8 * half + tid % 32 / 4;
            const int token = row / a.heads;
            const int head = row - token * a.heads;
            const bool valid = row < rows;
            // 16-bit elements: of T, or with T = fp16 also bf16.
            const uint16_t* latent = static_cast<const uint16_t*>(a.q) + head * a.q_stride_h +
                                     token_offset(a, s, s.first_token + token, a.q_stride_b, a.q_stride_s);
            const uint16_t* rope = static_cast<const uint16_t*>(a.q_rope) + head * a.q_rope_stride_h +
                                   token_offset(a, s, s.first_token + token, a.q_rope_stride_b, a.q_rope_stride_s);
#pragma unroll
            for (int kk = 0; kk < kScoreSteps; ++kk) {
#pragma unroll
                for (int right = 0; right < 2; ++right) {
                    const int column = step_column(tid / 64, kk) + 8 * right + 2 * (tid % 4);
                    uint32_t pair = 0;
                    if (valid && column < a.d_c) {
                        pair = __ldg(reinterpret_cast<const uint32_t*>(latent + column));
                    } else if (valid && column >= kLatentCols && column - kLatentCols < a.d_rope) {
                        pair = __ldg(reinterpret_cast<const uint32_t*>(rope + column - kLatentCols));
                    }
                    if (kRow656 && (kk < kLatentSteps ? tiles.q_dtype : tiles.q_rope_dtype) == DType::kBf16) {
                        pair = bf16_to_fp16(pair);
                    }
                    q[m][kk][half + 2 * right] = pair;
                }
            }
        }
    }

    // Softmax: thread tid has keys [kRowKeys c, ..) of row tid / kRowThreads.
    const int my_limit =
        row0 + tid / kRowThreads < rows ? key_limit(a, s, s.first_token + (row0 + tid / kRowThreads) / a.heads) : 0;
    float top = -INFINITY;  // log2 units, the same in all threads of the row
    float sum = 0.0f;       // this thread's share

    float o[kRowTiles][kWarpCols / 8][4] = {};

    __syncthreads();
    const auto issue = [&](int tile) {
        if (tile < tile_end) {
            loader.issue(tile);
        }
        ptx::cp_async_commit();  // also when empty: waits count groups
    };
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {
        issue(tile_begin + i);
    }
    for (int tile = tile_begin; tile < tile_end; ++tile) {
        if constexpr (kRow656) {
            __syncthreads();  // the one tile is free
        }
        loader.finish(tile);
        __syncthreads();  // A: the tile is there; the other stage and the weights are free
        issue(tile + kAhead);
        KeyPlace place{};
        if (tid < 32) {
            place = loader.look_up(s, tile + kAhead + 1, end);
        }
        const uint32_t k_addr = loader.k_address(tile);
        {
            const int lane = here(tid) % 32;
            const int group = here(tid) / 64;
            const int key_half = here(tid) / 32 % 2;
            float acc[kRowTiles][2][4] = {};
            // Matrices: keys 0-7 and 8-15 of the half, channels 0-7 and 8-15 of the step.
            const int key = 16 * key_half + (lane / 16) * 8 + lane % 8;
            // kConvert: q W_uk^T is fp16, as rounded to bf16 it would move scores and with them the lse of rows that see few
            // keys; so the latents' fragments become fp16 too.
            const auto score = [&](auto convert) {
                constexpr bool kConvert = decltype(convert)::value;
#pragma unroll
                for (int kk = 0; kk < kScoreSteps; ++kk) {
                    if (kRow656 && kk == kLatentSteps) {
                        scale_scores(acc, smem.scales, 16 * key_half + 2 * (lane % 4), group);
                    }
                    uint32_t b[4];
                    ptx::ldmatrix_x4(b, k_addr + chunk_offset(key, step_column(group, kk) / 8 + lane / 8 % 2));
                    if constexpr (kConvert) {
                        if (kk < kLatentSteps) {
#pragma unroll
                            for (uint32_t& pair : b) {
                                pair = bf16_to_fp16(pair);
                            }
                        }
                    }
#pragma unroll
                    for (int m = 0; m < kRowTiles; ++m) {
                        if (kConvert && kk < kLatentSteps) {
                            ptx::mma_m16n8k16<__half>(acc[m][0], q[m][kk], b[0], b[1]);
                            ptx::mma_m16n8k16<__half>(acc[m][1], q[m][kk], b[2], b[3]);
                        } else {
                            ptx::mma_m16n8k16<T>(acc[m][0], q[m][kk], b[0], b[1]);
                            ptx::mma_m16n8k16<T>(acc[m][1], q[m][kk], b[2], b[3]);
                        }
                    }
                }
            };
            if (std::is_same_v<T, __nv_bfloat16> && tiles.q_dtype == DType::kFp16) {
                score(std::true_type{});
            } else {
                score(std::false_type{});
            }
#pragma unroll
            for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
                for (int n = 0; n < 2; ++n) {
                    const int column = 16 * key_half + 8 * n + 2 * (lane % 4);
                    float (*scores)[kScorePitch] = smem.scores[group] + 16 * m + lane / 4;
                    *reinterpret_cast<float2*>(&scores[0][column]) = make_float2(acc[m][n][0], acc[m][n][1]);
                    *reinterpret_cast<float2*>(&scores[8][column]) = make_float2(acc[m][n][2], acc[m][n][3]);
                }
            }
        }
        __syncthreads();  // B: partial scores are there
        {
            const int my_row = here(tid) / kRowThreads;
            const int my_key = kRowKeys * (here(tid) % kRowThreads);
            float x[kRowKeys] = {};
#pragma unroll
            for (int g = 0; g < kScoreGroups; ++g) {
#pragma unroll
                for (int i = 0; i < kRowKeys; i += 2) {
                    const float2 part = *reinterpret_cast<const float2*>(&smem.scores[g][my_row][my_key + i]);
                    x[i] += part.x;
                    x[i + 1] += part.y;
                }
            }
            const uint32_t present = smem.present[tile % kPlaces] >> my_key;
            float new_top = top;
#pragma unroll
            for (int i = 0; i < kRowKeys; ++i) {
                const bool visible = (present >> i & 1) && tile * kKeys + my_key + i < my_limit;
                x[i] = visible ? x[i] * a.scale_log2 : -INFINITY;
                new_top = fmaxf(new_top, x[i]);
            }
#pragma unroll
            for (int offset = kRowThreads / 2; offset > 0; offset /= 2) {
                new_top = fmaxf(new_top, __shfl_xor_sync(0xffffffffu, new_top, offset));
            }
            const float base = new_top == -INFINITY ? 0.0f : new_top;
            const float alpha = ptx::exp2_approx(top - base);
            top = new_top;
            sum *= alpha;
#pragma unroll
            for (int i = 0; i < kRowKeys; ++i) {
                x[i] = ptx::exp2_approx(x[i] - base);
                sum += x[i];
            }
#pragma unroll
            for (int g = 0; g < (kRow656 ? kScoreGroups : 1); ++g) {
#pragma unroll
                for (int i = 0; i < kRowKeys; i += 2) {
                    const float scale0 = kRow656 ? smem.scales[my_key + i][g] : 1.0f;
                    const float scale1 = kRow656 ? smem.scales[my_key + i + 1][g] : 1.0f;
                    *reinterpret_cast<uint32_t*>(&smem.weights[g][my_row][my_key + i]) =
                        ptx::pack2<T>(x[i] * scale0, x[i + 1] * scale1);
                }
            }
            if (tid % kRowThreads == 0) {
                smem.row_scale[my_row] = alpha;
            }
            if (tid < 32) {
                loader.put(s, place, tile + kAhead + 1);
            }
        }
        __syncthreads();  // C: weights and factors are there
        if (tid / 32 * kWarpCols < a.d_c) {
            const int lane = here(tid) % 32;
            const int warp = here(tid) / 32;
#pragma unroll
            for (int m = 0; m < kRowTiles; ++m) {
                const float alpha0 = smem.row_scale[16 * m + lane / 4];
                const float alpha1 = smem.row_scale[16 * m + 8 + lane / 4];
                if (__any_sync(0xffffffffu, alpha0 != 1.0f || alpha1 != 1.0f)) {
#pragma unroll
                    for (int n = 0; n < kWarpCols / 8; ++n) {
                        o[m][n][0] *= alpha0;
                        o[m][n][1] *= alpha0;
                        o[m][n][2] *= alpha1;
                        o[m][n][3] *= alpha1;
                    }
                }
            }
#pragma unroll
            for (int kk = 0; kk < kKeys / 16; ++kk) {
                uint32_t p[kRowTiles][4];
#pragma unroll
                for (int m = 0; m < kRowTiles; ++m) {
                    const uint16_t* weights =
                        &smem.weights[kRow656 ? warp / 2 : 0][16 * m + lane % 16][16 * kk + 8 * (lane / 16)];
                    ptx::ldmatrix_x4(p[m], static_cast<uint32_t>(__cvta_generic_to_shared(weights)));
                }
                // Matrices: keys 0-7 and 8-15 of the step, columns 0-7 and 8-15.
                const int key = 16 * kk + lane % 16;
#pragma unroll
                for (int n = 0; n < kWarpCols / 16; ++n) {
                    uint32_t v[4];
                    ptx::ldmatrix_x4_trans(v, k_addr + chunk_offset(key, warp * kWarpCols / 8 + 2 * n + lane / 16));
#pragma unroll
                    for (int m = 0; m < kRowTiles; ++m) {
                        ptx::mma_m16n8k16<T>(o[m][2 * n], p[m], v[0], v[1]);
                        ptx::mma_m16n8k16<T>(o[m][2 * n + 1], p[m], v[2], v[3]);
                    }
                }
            }
        }
    }

    // Sums, the sink, and the factor of O; partial results leave the sink to the merge.
#pragma unroll
    for (int offset = kRowThreads / 2; offset > 0; offset /= 2) {
        sum += __shfl_xor_sync(0xffffffffu, sum, offset);
    }
    const bool partial = tiles.num_splits > 1;
    const int64_t part_row = (int64_t{split} * tiles.units + unit) * tiles.rows_padded;
    __syncthreads();  // row_scale has been read
    const int my_row = tid / kRowThreads;
    if (tid % kRowThreads == 0 && row0 + my_row < rows) {
        const int row = row0 + my_row;
        const int token = row / a.heads;
        const int head = row - token * a.heads;
        const float sink = a.sink != nullptr && !partial ? a.sink[head] * kLog2e : -INFINITY;
        float lse;
        smem.row_scale[my_row] = normaliser_log2(top, sum, sink, lse);
        if (partial) {
            tiles.lse_part[part_row + row] = lse;
        } else if (a.lse != nullptr) {
            a.lse[lse_offset(a, s, s.first_token + token, head)] = lse * kLn2;
        }
    }
    __syncthreads();
    const int lane = tid % 32;
    const int warp = tid / 32;
    if (warp * kWarpCols >= a.d_c) {
        return;
    }
#pragma unroll
    for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int local = 16 * m + 8 * half + lane / 4;
            const int row = row0 + local;
            if (row >= rows) {
                continue;
            }
            const int token = row / a.heads;
            const int head = row - token * a.heads;
            const float factor = smem.row_scale[local];
            void* const base = partial ? tiles.o_part : tiles.out;
            const DType dtype = partial ? DType::kFp32 : tiles.out_dtype;
            const int64_t at = partial ? (part_row + row) * a.d_c
                                       : token_offset(a, s, s.first_token + token, tiles.out_stride_b, tiles.out_stride_s) +
                                             head * tiles.out_stride_h;
#pragma unroll
            for (int n = 0; n < kWarpCols / 8; ++n) {
                const int column = warp * kWarpCols + 8 * n + 2 * (lane % 4);
                if (column < a.d_c) {
                    store_pair(base, dtype, at + column, o[m][n][2 * half] * factor, o[m][n][2 * half + 1] * factor);
                }
            }
        }
    }
}

}  // namespace flare::mla
