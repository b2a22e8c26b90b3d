// Recurrence: walks the chunks of one (sequence, value head, up to 128 value columns) with the state in fp32 registers.
//
// Transposed: S^T [V x K] is the accumulator, a warp owns 16 value columns as the M of m16n8k16, and every A operand
// comes from registers (an accumulator's layout is an A operand's), so the chain of products has no shared-memory round
// trip:
//   W^T = S^T Kd^T, O^T = S^T Qd^T        n = 32 tokens, k = K     A: S^T rounded to 16 bits, B: tiles Kd, Qd
//   U^T = (V - norm_k W)^T X^T            n = 32, k = 32, tf32     B: tile X (fp16 inputs: two terms)
//   O^T += U^T A^T                        n = 32, k = 32, fp16     B: tile A
//   S^T = S^T diag(exp G_C) + U^T Kr      n = K, k = 32, fp16      B: tile Kr, by transposing ldmatrix
// The last two with both sides as two terms where inputs are fp16, S += U Kr with two of Kr where keys repeat. Of two terms
// against two the product of the small ones is left out.
// X has beta in its columns, and in its rows the norms of the keys as Kr and A hold them; out = norm_q * O.
//
// A ring of stages in shared memory, each the operand block and the value rows of a chunk, filled by cp.async one
// chunk's time or more ahead; one __syncthreads a chunk says both that a stage has landed and that the one before it is
// free. Each warp has 1 KB to transpose its 16 x 32 piece of the output.
#pragma once

#include "kda/chunk_sm80.cuh"
#include "ptx/ldst.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/mma_sync.cuh"
#include "tile/fragment.cuh"

namespace flare::kda::sm80 {

inline constexpr int kWarpColumns = 16;
inline constexpr int kMaxWarps = 8;

// Shared memory of a block of `warps` warps, per stage and in all.
template <typename T, int kK>
struct RecurrenceShared {
    using Layout = ChunkLayout<T, kK>;
    // Of a stage: the operand block, Kr's second term where keys repeat, values.
    static constexpr uint32_t kOffsetRepeats = Layout::kBlockBytes;
    static constexpr uint32_t kOffsetValues = kOffsetRepeats + (Layout::kMayRepeat ? Layout::kTileBytes : 0);

    int warps;

    // 16 bytes more than the values keep ldmatrix free of conflicts.
    __host__ __device__ uint32_t value_pitch() const { return 2 * kWarpColumns * warps + 16; }
    __host__ __device__ uint32_t stage_bytes() const { return kOffsetValues + kChunk * value_pitch(); }
    __host__ __device__ uint32_t bytes(int stages) const { return stages * stage_bytes() + 1024 * warps; }
};

// The state between registers and memory: s[tile][i] is column (value) v0 + 8 * (i / 2), channel 8 * tile + 2t + i % 2.
template <int kTiles, typename Access>
__device__ __forceinline__ void for_state(const KdaParams& p, int v0, int t, const Access& access) {
#pragma unroll
    for (int i = 0; i < 4 * kTiles; i += 2) {
        const int v = v0 + 8 * ((i / 2) % 2);
        const int c = 8 * (i / 4) + 2 * t;
        if (v < p.head_dim_v && c < p.head_dim_k) {
            access(i / 4, i % 4,
                   p.state_layout == StateLayout::kVK ? static_cast<int64_t>(v) * p.head_dim_k + c
                                                      : static_cast<int64_t>(c) * p.head_dim_v + v);
        }
    }
}

template <int kTiles>
__device__ __forceinline__ void load_state_tile(float (&s)[kTiles][4], const KdaParams& p, const void* state,
                                                DType dtype, int64_t base, int v0, int t) {
    const int64_t next = p.state_layout == StateLayout::kVK ? 1 : p.head_dim_v;
    for_state<kTiles>(p, v0, t, [&](int tile, int i, int64_t at) {
        s[tile][i] = load_state(state, base + at, dtype == DType::kBf16);
        s[tile][i + 1] = load_state(state, base + at + next, dtype == DType::kBf16);
    });
}

template <int kTiles>
__device__ __forceinline__ void store_state_tile(const float (&s)[kTiles][4], const KdaParams& p, void* state,
                                                 DType dtype, int64_t base, int v0, int t) {
    const int64_t next = p.state_layout == StateLayout::kVK ? 1 : p.head_dim_v;
    for_state<kTiles>(p, v0, t, [&](int tile, int i, int64_t at) {
        store_state(state, base + at, dtype == DType::kBf16, s[tile][i]);
        store_state(state, base + at + next, dtype == DType::kBf16, s[tile][i + 1]);
    });
}

// Requests chunks in order into the stages. Every thread calls next() once per chunk.
template <typename T, int kK>
struct Feeder {
    using Layout = ChunkLayout<T, kK>;
    const uint8_t* source;  // this thread's first 16 bytes of the next operand block
    const uint8_t* low;     // and of Kr's second term
    const uint8_t* flags;   // whether there is one; asked for a chunk ahead
    uint32_t has_low = 0;
    const T* values;        // this thread's first 16 bytes of the next chunk's values
    int64_t stride;         // of the values, between tokens
    int remaining;          // tokens from the next chunk on
    int row;                // of the values; the other one is 16 rows on
    bool has_column;
    uint32_t offset;  // of the values in a stage
    uint32_t pitch;

    __device__ __forceinline__ Feeder(const KdaParams& p, const Sequence& seq, const uint8_t* workspace, int64_t head,
                                      int column0, const RecurrenceShared<T, kK>& shared)
        : source(workspace + (head * num_slots(p) + seq.first_slot) * Layout::kBlockBytes + 16 * threadIdx.x),
          stride(p.v_stride.token),
          remaining(static_cast<int>(seq.tokens)),
          pitch(shared.value_pitch()) {
        const int pieces = 2 * shared.warps;  // of a row
        row = static_cast<int>(threadIdx.x) / pieces;
        const int piece = static_cast<int>(threadIdx.x) - row * pieces;
        has_column = column0 + 8 * piece < p.head_dim_v;
        values = static_cast<const T*>(p.v) + seq.batch * p.v_stride.batch + (seq.first_token + row) * stride +
                 head * p.v_stride.head + column0 + 8 * piece;
        offset = shared.kOffsetValues + row * pitch + 16 * piece;
        low = repeat_tile<Layout>(p, workspace, head * num_slots(p) + seq.first_slot) + 16 * threadIdx.x;
        flags = repeat_flags<Layout>(p, workspace, head * num_slots(p) + seq.first_slot);
        if (Layout::kMayRepeat && remaining > 0) {
            has_low = has_second_term(flags);
        }
    }

    template <bool kRepeats>
    __device__ __forceinline__ void next(uint32_t stage) {
        if (remaining > 0) {
            const auto copy = [&](uint32_t to, const uint8_t* from, uint32_t bytes) {
                const uint32_t step = 16 * blockDim.x;
                for (uint32_t at = 16 * threadIdx.x; at < bytes; at += step) {
                    ptx::cp_async_16(to + at, from, 16);
                    from += step;
                }
            };
            copy(stage, source, Layout::kBlockBytes);
            if constexpr (kRepeats) {
                if (has_low != 0) {
                    copy(stage + RecurrenceShared<T, kK>::kOffsetRepeats, low, Layout::kTileBytes);
                }
                low += Layout::kTileBytes;
                flags += 2;
                has_low = remaining > kChunk ? has_second_term(flags) : 0;
            }
            constexpr int kRows = 16;  // threads / pieces
#pragma unroll
            for (int pass = 0; pass < kChunk / kRows; ++pass) {
                // Rows and columns past the end are filled with zeros, read from nowhere.
                const bool valid = has_column && row + pass * kRows < remaining;
                ptx::cp_async_16(stage + offset + pass * kRows * pitch,
                                 valid ? static_cast<const void*>(values + pass * kRows * stride) : source,
                                 valid ? 16 : 0);
            }
            source += Layout::kBlockBytes;
            values += kChunk * stride;
            remaining -= kChunk;
        }
        ptx::cp_async_commit();
    }
};

// 1 where fp16 holds numbers up to `largest` well, else the power of two that brings it into [1, 2).
__device__ __forceinline__ float fp16_range(float largest) {
    const bool ordinary = largest == 0.0f || (largest >= 0x1p-10f && largest < 0x1p14f) || largest != largest;
    const int exponent = min(max(static_cast<int>(__float_as_uint(largest) >> 23), 1), 253);
    return ordinary ? 1.0f : __uint_as_float(static_cast<uint32_t>(254 - exponent) << 23);
}

// Accumulator tiles times a factor for each of a lane's two rows, which are value columns.
template <int kTiles>
__device__ __forceinline__ void scale_columns(float (&tiles)[kTiles][4], float first, float second) {
#pragma unroll
    for (int j = 0; j < kTiles; ++j) {
        tiles[j][0] *= first;
        tiles[j][1] *= first;
        tiles[j][2] *= second;
        tiles[j][3] *= second;
    }
}

// kRepeats: chunks may have a second term of Kr.
template <typename T, int kK, bool kRepeats>
__device__ __forceinline__ void walk_chunks(const KdaParams& p, const Sequence& seq, const uint8_t* workspace, int64_t n,
                                            int64_t head, int column0, int stages) {
    using Layout = ChunkLayout<T, kK>;
    constexpr int kTiles = kK / 8;  // n8 tiles of the state
    extern __shared__ __align__(16) uint8_t smem_raw[];
    const uint32_t smem = ptx::smem_addr(smem_raw);
    const RecurrenceShared<T, kK> shared{static_cast<int>(blockDim.x / 32)};
    const uint32_t stage_bytes = shared.stage_bytes();
    const int warp = threadIdx.x / 32;
    const int lane = threadIdx.x % 32;
    const int g = lane / 4;
    const int t = lane % 4;

    int remaining = static_cast<int>(seq.tokens);
    const int v0 = column0 + kWarpColumns * warp + g;  // column of this lane's first accumulator row

    Feeder<T, kK> feeder(p, seq, workspace, head, column0, shared);
#pragma unroll 1
    for (int i = 0; i < stages - 1; ++i) {
        feeder.template next<kRepeats>(smem + i * stage_bytes);
    }

    int64_t state_row = n;
    bool has_state = true;
    if (p.state_slots != nullptr) {
        state_row = load_index(p.state_slots, n, p.index64);
        has_state = state_row != p.padding_slot;
    }
    float s[kTiles][4] = {};
    if (p.initial_state != nullptr && has_state) {
        load_state_tile(s, p, p.initial_state, p.initial_dtype,
                        state_row * p.initial_stride_n + head * p.initial_stride_h, v0, t);
    }
    int64_t checkpoint_row = 0;
    if (p.checkpoints != nullptr) {
        checkpoint_row = p.cu_checkpoints != nullptr ? load_index(p.cu_checkpoints, n, p.index64)
                                                     : n * (p.seqlen / p.checkpoint_interval);
    }
    const int checkpoint_chunks =
        p.checkpoints != nullptr ? static_cast<int>(min(p.checkpoint_interval / kChunk, int64_t{INT32_MAX})) : 0;
    int chunks_to_checkpoint = checkpoint_chunks;

    // ldmatrix rows, by lane. l7: the row's place in the swizzle.
    const uint32_t l7 = lane % 8;
    // Tiles Kd and Qd: matrices (tokens, channels) (0, 0), (0, 8), (8, 0), (8, 8).
    const uint32_t row_nk = 8 * (lane / 16) + l7;
    const uint32_t key_lane = row_nk * 128;
    const uint32_t key_swizzle = ((lane / 8) % 2 ^ l7) * 16;
    // Tile Kr, transposed: (tokens, channels) (0, 0), (8, 0), (0, 8), (8, 8).
    const uint32_t restored_lane = (8 * ((lane / 8) % 2) + l7) * 128;
    const uint32_t restored_swizzle = (lane / 16 ^ l7) * 16;
    // Tile A: (rows, columns) (0, 0), (0, 8), (8, 0), (8, 8).
    const uint32_t square_lane = row_nk * 64;
    const uint32_t square_swizzle = ((lane / 8) % 2 ^ l7 / 2) * 16;
    // Values, transposed: (tokens, columns) (0, 0), (0, 8), (8, 0), (8, 8).
    const uint32_t value_lane =
        shared.kOffsetValues + row_nk * shared.value_pitch() + 2 * kWarpColumns * warp + 16 * ((lane / 8) % 2);

    // The output piece: 32 tokens x 32 bytes; rows 4..7 of each 8 swap halves, which spreads them over the banks.
    const uint32_t output = smem + stages * stage_bytes + 1024 * warp;
    T* out = static_cast<T*>(p.out) + seq.batch * p.out_stride.batch + seq.first_token * p.out_stride.token +
             head * p.out_stride.head + column0 + kWarpColumns * warp;
    const int out_columns = p.head_dim_v - column0 - kWarpColumns * warp;

    const uint8_t* flags = repeat_flags<Layout>(p, workspace, head * num_slots(p) + seq.first_slot);

    int stage_idx = 0;
    int fill_idx = stages - 1;
    for (; remaining > 0; remaining -= kChunk) {
        if (stages == 3) {
            ptx::cp_async_wait<1>();
        } else {
            ptx::cp_async_wait<0>();
        }
        __syncthreads();
        feeder.template next<kRepeats>(smem + fill_idx * stage_bytes);
        fill_idx = fill_idx + 1 == stages ? 0 : fill_idx + 1;
        const uint32_t block = smem + stage_idx * stage_bytes;
        stage_idx = stage_idx + 1 == stages ? 0 : stage_idx + 1;

        const uint32_t repeats = kRepeats ? has_second_term(flags) : 0;
        flags += 2;
        float w[4][4] = {}, o[4][4] = {};
#pragma unroll
        for (int kk = 0; kk < kK / 16; ++kk) {
            const uint32_t a[4] = {ptx::pack2<T>(s[2 * kk][0], s[2 * kk][1]), ptx::pack2<T>(s[2 * kk][2], s[2 * kk][3]),
                                   ptx::pack2<T>(s[2 * kk + 1][0], s[2 * kk + 1][1]),
                                   ptx::pack2<T>(s[2 * kk + 1][2], s[2 * kk + 1][3])};
            const uint32_t at = block + key_lane + (kk / 4) * 4096 + (key_swizzle ^ (32 * (kk % 4)));
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                uint32_t b[4];
                ptx::ldmatrix_x4(b, at + Layout::kOffsetKd + half * 2048);
                ptx::mma_m16n8k16<T>(w[2 * half], a, b[0], b[1]);
                ptx::mma_m16n8k16<T>(w[2 * half + 1], a, b[2], b[3]);
                ptx::ldmatrix_x4(b, at + Layout::kOffsetQd + half * 2048);
                ptx::mma_m16n8k16<T>(o[2 * half], a, b[0], b[1]);
                ptx::mma_m16n8k16<T>(o[2 * half + 1], a, b[2], b[3]);
            }
        }
#pragma unroll
        for (int j = 0; j < kTiles; ++j) {
            const float2 d = ptx::ld_shared_f2(block + Layout::kOffsetDecay + 8 * t + 32 * j);
            s[j][0] *= d.x;
            s[j][1] *= d.y;
            s[j][2] *= d.x;
            s[j][3] *= d.y;
        }

        // Rows past the end need no mask: their values, keys and beta are zeros. E = V - norm_k W goes in as tf32:
        // an accumulator's columns 2t and 2t + 1 are an A operand's t and t + 4, and X has its columns in that order.
        uint32_t e[4][4];
#pragma unroll
        for (int j = 0; j < 4; j += 2) {
            uint32_t value[4];
            ptx::ldmatrix_x4_trans(value, block + value_lane + 8 * j * shared.value_pitch());
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const int jj = j + i / 2;
                const int r = i % 2;
                const float2 norm_k = ptx::ld_shared_f2(block + Layout::kOffsetNormK + 8 * t + 32 * jj);
                const float2 v = unpack2<T>(value[i]);
                e[jj][r] = ptx::convert_tf32(fmaf(-norm_k.x, w[jj][2 * r], v.x));
                e[jj][2 + r] = ptx::convert_tf32(fmaf(-norm_k.y, w[jj][2 * r + 1], v.y));
            }
        }
        float u[4][4] = {};
#pragma unroll
        for (int j = 0; j < 4; ++j) {
#pragma unroll
            for (int kk = 0; kk < 4; kk += 2) {
                const uint32_t at = block + Layout::kOffsetX + (8 * j + l7) * 128 + ((2 * kk + lane / 8) ^ l7) * 16;
#pragma unroll
                for (int term = 0; term < Layout::kTerms; ++term) {
                    uint32_t b[4];
                    ptx::ldmatrix_x4(b, at + term * 2 * Layout::kSquareBytes);
                    ptx::mma_m16n8k8_tf32(u[j], e[kk], b[0], b[1]);
                    ptx::mma_m16n8k8_tf32(u[j], e[kk + 1], b[2], b[3]);
                }
            }
        }
        // U, and O += U A^T and S += U Kr, in fp16 for its three more bits: see chunk_sm80.cuh. Its range ends at
        // 65504, so a column whose values are out of the ordinary goes through all of this times a power of two. That
        // depends on this chunk's U alone: results stay the same whatever came before.
        float largest[2] = {};
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            largest[0] = fmaxf(largest[0], fmaxf(fabsf(u[j][0]), fabsf(u[j][1])));
            largest[1] = fmaxf(largest[1], fmaxf(fabsf(u[j][2]), fabsf(u[j][3])));
        }
        float range[2];
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            range[r] = fp16_range(tile::quad_max(largest[r]));
        }
        const bool scaled = __any_sync(0xffffffffu, range[0] != 1.0f || range[1] != 1.0f);
        if (scaled) {
            scale_columns(u, range[0], range[1]);
            scale_columns(o, range[0], range[1]);
            scale_columns(s, range[0], range[1]);
        }
#pragma unroll
        for (int kb = 0; kb < 2; ++kb) {
            uint32_t a[4], a_low[4];
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const float first = u[2 * kb + i / 2][2 * (i % 2)];
                const float second = u[2 * kb + i / 2][2 * (i % 2) + 1];
                a[i] = ptx::pack2<__half>(first, second);
                const float2 high = unpack2<__half>(a[i]);
                a_low[i] = ptx::pack2<__half>(first - high.x, second - high.y);  // unused with one term
            }
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const uint32_t at = block + Layout::kOffsetA + square_lane + half * 1024 + (square_swizzle ^ (32 * kb));
                uint32_t b[4];
                ptx::ldmatrix_x4(b, at);
                ptx::mma_m16n8k16<__half>(o[2 * half], a, b[0], b[1]);
                ptx::mma_m16n8k16<__half>(o[2 * half + 1], a, b[2], b[3]);
                if constexpr (Layout::kTerms == 2) {
                    ptx::mma_m16n8k16<__half>(o[2 * half], a_low, b[0], b[1]);
                    ptx::mma_m16n8k16<__half>(o[2 * half + 1], a_low, b[2], b[3]);
                    ptx::ldmatrix_x4(b, at + Layout::kSquareBytes);
                    ptx::mma_m16n8k16<__half>(o[2 * half], a, b[0], b[1]);
                    ptx::mma_m16n8k16<__half>(o[2 * half + 1], a, b[2], b[3]);
                }
            }
            const uint32_t restored = block + restored_lane + kb * 2048;
            const auto add_restored = [&](uint32_t tile, bool two_terms) {
#pragma unroll
                for (int pair = 0; pair < kTiles / 2; ++pair) {
                    uint32_t b[4];
                    ptx::ldmatrix_x4_trans(
                        b, restored + tile + (pair / 4) * 4096 + (restored_swizzle ^ (32 * (pair % 4))));
                    ptx::mma_m16n8k16<__half>(s[2 * pair], a, b[0], b[1]);
                    ptx::mma_m16n8k16<__half>(s[2 * pair + 1], a, b[2], b[3]);
                    if (two_terms) {
                        ptx::mma_m16n8k16<__half>(s[2 * pair], a_low, b[0], b[1]);
                        ptx::mma_m16n8k16<__half>(s[2 * pair + 1], a_low, b[2], b[3]);
                    }
                }
            };
            add_restored(Layout::kOffsetKr, Layout::kTerms == 2);
            if constexpr (Layout::kTerms == 2) {
                add_restored(Layout::kOffsetKr + Layout::kTileBytes, false);
            }
            if (kRepeats && repeats != 0) {
                add_restored(shared.kOffsetRepeats, false);
            }
        }
        if (scaled) {
            const float back[2] = {1.0f / range[0], 1.0f / range[1]};
            scale_columns(o, back[0], back[1]);
            scale_columns(s, back[0], back[1]);
        }

        __syncwarp();  // the previous chunk's piece has been read
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            const float2 norm_q = ptx::ld_shared_f2(block + Layout::kOffsetNormQ + 8 * t + 32 * j);
#pragma unroll
            for (int r = 0; r < 2; ++r) {
                // From (column g, tokens 2t, 2t + 1) to (token g, columns 2t, 2t + 1).
                const uint32_t turned =
                    ptx::movmatrix_trans(ptx::pack2<T>(o[j][2 * r] * norm_q.x, o[j][2 * r + 1] * norm_q.y));
                ptx::st_shared_b32(output + (8 * j + g) * 32 + ((r ^ g / 4) * 16) + 4 * t, turned);
            }
        }
        __syncwarp();
        const int length = min(kChunk, remaining);
#pragma unroll
        for (int pass = 0; pass < 2; ++pass) {
            const int token = 16 * pass + lane / 2;
            const int half = lane % 2;
            uint32_t r[4];
            ptx::ld_shared_v4(r, output + token * 32 + ((half ^ (token / 4) % 2) * 16));
            if (token < length && 8 * half < out_columns) {
                ptx::st_global_v4(out + token * p.out_stride.token + 8 * half, r);
            }
        }
        out += kChunk * p.out_stride.token;

        if (checkpoint_chunks != 0 && --chunks_to_checkpoint == 0) {
            // A checkpoint needs a whole interval of tokens, so a ragged last chunk never ends one.
            if (length == kChunk) {
                store_state_tile(s, p, p.checkpoints, p.checkpoint_dtype,
                                 (checkpoint_row * p.heads_v + head) * p.head_dim_k * p.head_dim_v, v0, t);
            }
            ++checkpoint_row;
            chunks_to_checkpoint = checkpoint_chunks;
        }
    }
    if (p.final_state != nullptr && has_state) {
        store_state_tile(s, p, p.final_state, p.final_dtype, state_row * p.final_stride_n + head * p.final_stride_h, v0,
                         t);
    }
}

template <typename T, int kK>
__global__ void __launch_bounds__(32 * kMaxWarps, 1)
    kda_recurrence_sm80_kernel(const __grid_constant__ KdaParams p, const uint8_t* workspace, int blocks_per_state,
                               int stages) {
    using Layout = ChunkLayout<T, kK>;
    const uint32_t unit = blockIdx.x / static_cast<uint32_t>(blocks_per_state);
    const int column0 = static_cast<int>(blockIdx.x - unit * static_cast<uint32_t>(blocks_per_state)) * kWarpColumns *
                        static_cast<int>(blockDim.x / 32);
    const uint32_t heads = static_cast<uint32_t>(p.heads_v);
    const int64_t n = unit / heads;
    const int64_t head = unit - static_cast<uint32_t>(n) * heads;
    const Sequence seq = locate_sequence(p, n);
    if constexpr (Layout::kMayRepeat) {
        // Two loops: the one without second terms is the faster one.
        const uint8_t* const flags = repeat_flags<Layout>(p, workspace, head * num_slots(p) + seq.first_slot);
        if (any_repeats(flags, chunks_of(seq.tokens))) {
            walk_chunks<T, kK, true>(p, seq, workspace, n, head, column0, stages);
            return;
        }
    }
    walk_chunks<T, kK, false>(p, seq, workspace, n, head, column0, stages);
}

}  // namespace flare::kda::sm80
