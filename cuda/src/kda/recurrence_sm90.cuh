// Recurrence: walks the chunks of one (sequence, value head, 64 or 128 value columns) with the state in fp32 registers.
//
// Transposed: S^T [V x K] is the accumulator, a warpgroup owns 64 value columns as the M of wgmma m64, and every A
// operand comes from registers, so the chain of products has no shared-memory round trip:
//   W^T = S^T Kd^T, O^T = S^T Qd^T        m64n32 k128          A: S^T rounded to 16 bits, B: tiles Kd, Qd, K-major
//   U^T = (V - norm_k W)^T X^T            m64n32 k32, tf32     B: tile X, K-major (fp16 inputs: two terms)
//   O^T += U^T A^T                        m64n32 k32, fp16     B: tile A, K-major
//   S^T = S^T diag(exp G_C) + U^T Kr      m64n128 k32, fp16    B: tile Kr, MN-major
// The last two with both sides as two terms where inputs are fp16. Of two terms against two the product of the small ones is
// left out. X has beta in its columns, and in its rows the norms of the keys as Kr and A hold them: scaled by powers of two
// only; out = norm_q * O. Operand blocks: chunk_sm80.cuh.
//
// Warps: kGroups = 1: a consumer and a producer warpgroup; kGroups = 2: two consumer warpgroups that fill the stages
// themselves. Per stage, shared memory:
//   operand block   31 488 B   fp16 45 824; written by one bulk copy, read by wgmma (async proxy) and by ordinary loads
//                              (decay, norms)
//   second term of Kr  8 192 B where keys repeat (chunk_sm80.cuh): another bulk copy, or zeros instead; S += U^T Kr_low
//   value rows      32 x (128 kGroups + 16) B, cp.async (a bulk copy per row costs more time than the whole block), read by
//                              ldmatrix; the padding keeps that free of conflicts
// and per consumer warp 1 KB to transpose its 16 x 32 piece of the output.
//
// Barrier          count           arrives                                   waits
// full[stage]      1 + 128 kGroups feeder 0, expecting the bytes; each feeder   consumers, phase 0 first
//                  + bytes         when its cp.async have landed
// empty[stage]     4 kGroups       one lane per consumer warp, after the      producer, phase 1 first
//                                  wgmma groups that read the stage and its own loads
// Operand blocks are written by the async proxy alone, value rows never meet it; the output piece belongs to one warp
// (__syncwarp).
#pragma once

#include "kda/chunk_sm80.cuh"
#include "kda/column_scale.cuh"
#include "pipe/ring.cuh"
#include "ptx/ldst.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/mma_sync.cuh"
#include "ptx/sync.cuh"
#include "ptx/tma.cuh"
#include "ptx/wgmma.cuh"
#include "tile/smem_desc.cuh"

namespace flare::kda {

inline constexpr int kDim = 128;  // K and V

// kRepeats: chunks may have a second term of Kr.
template <typename T, int kGroups, bool kRepeats>
struct RecurrenceConfig {
    using Layout = sm80::ChunkLayout<T, kDim>;
    static constexpr int kColumns = 64 * kGroups;  // value columns of a block
    static constexpr bool kHasProducer = kGroups == 1;
    static constexpr int kThreads =
        256;  // up to 255 registers without setmaxnreg, whose budget ptxas does not use here
    static constexpr int kFeeders = 128 * kGroups;
    static constexpr int kStages = Layout::kTerms == 1 && !kRepeats ? 5 : 4;
    static constexpr uint32_t kOffsetRepeats = (Layout::kBlockBytes + 1023) / 1024 * 1024;
    static constexpr uint32_t kStageBytes = kOffsetRepeats + (kRepeats ? Layout::kTileBytes : 0);
    static constexpr uint32_t kValuePitch = 2 * kColumns + 16;
    static constexpr uint32_t kValueBytes = kChunk * kValuePitch;
    static constexpr uint32_t kOffsetZeros = kStages * kStageBytes;
    static constexpr uint32_t kOffsetValues = kOffsetZeros + (kRepeats ? Layout::kTileBytes : 0);
    static constexpr uint32_t kOffsetOutput = kOffsetValues + kStages * kValueBytes;
    static constexpr uint32_t kOffsetBarriers = kOffsetOutput + 4 * kGroups * 1024;
    static constexpr uint32_t kSharedBytes = kOffsetBarriers + 2 * kStages * 8 + 1024;  // + alignment of the base
    static_assert(kSharedBytes <= 232448, "227 KB of shared memory per block");
};

// Fills stages in order; every one of kFeeders threads (numbered `thread`) calls next() once per chunk.
template <typename T, int kGroups, bool kRepeats>
struct Feeder {
    using Config = RecurrenceConfig<T, kGroups, kRepeats>;
    const T* value;         // this thread's first 16-byte piece of the next chunk's values
    const uint8_t* source;  // the next operand block
    const uint8_t* low;     // and Kr's second term
    const uint8_t* flags;   // whether there is one; asked for a chunk ahead
    uint32_t has_low = 0;
    int64_t stride;         // of the values, between tokens
    const void* anywhere;   // a valid address for pieces that are only zero-filled
    int remaining;          // tokens from the next chunk on
    int row;
    int thread;
    uint32_t destination;
    uint32_t smem, full, empty;
    pipe::PipeState<Config::kStages> state;

    __device__ __forceinline__ Feeder(const KdaParams& p, const Sequence& seq, const uint8_t* workspace, int64_t head,
                                      int column0, uint32_t smem_base, uint32_t full_barriers, uint32_t empty_barriers,
                                      int feeder)
        : stride(p.v_stride.token),
          anywhere(p.v),
          remaining(static_cast<int>(seq.tokens)),
          thread(feeder),
          smem(smem_base),
          full(full_barriers),
          empty(empty_barriers),
          state(pipe::PipeState<Config::kStages>::producer()) {
        constexpr int kPieces = Config::kColumns / 8;
        row = feeder / kPieces;
        const int piece = feeder % kPieces;
        value = static_cast<const T*>(p.v) + seq.batch * p.v_stride.batch + (seq.first_token + row) * stride +
                head * p.v_stride.head + column0 + 8 * piece;
        source = workspace + (head * num_slots(p) + seq.first_slot) * Config::Layout::kBlockBytes;
        destination = smem + Config::kOffsetValues + row * Config::kValuePitch + 16 * piece;
        if constexpr (kRepeats) {
            const int64_t index = head * num_slots(p) + seq.first_slot;
            low = sm80::repeat_tile<typename Config::Layout>(p, workspace, index);
            flags = sm80::repeat_flags<typename Config::Layout>(p, workspace, index);
            has_low = sm80::has_second_term(flags);
        }
    }

    __device__ __forceinline__ void next() {
        constexpr int kRowsPerPass = 16;
        static_assert(kRowsPerPass * Config::kColumns / 8 == Config::kFeeders,
                      "two passes of 16-byte pieces cover 32 rows");
        const uint32_t bar = full + 8 * state.stage;
        ptx::mbarrier_wait(empty + 8 * state.stage, state.phase);
        if (thread == 0) {
            const uint32_t low_bytes = kRepeats && has_low != 0 ? Config::Layout::kTileBytes : 0;
            ptx::mbarrier_arrive_expect_tx(bar, Config::Layout::kBlockBytes + low_bytes);
            ptx::bulk_load(smem + state.stage * Config::kStageBytes, source, Config::Layout::kBlockBytes, bar);
            if (kRepeats && low_bytes != 0) {
                ptx::bulk_load(smem + state.stage * Config::kStageBytes + Config::kOffsetRepeats, low, low_bytes, bar);
            }
        }
#pragma unroll
        for (int pass = 0; pass < 2; ++pass) {
            // Rows past the end are filled with zeros, read from nowhere.
            const bool valid = row + pass * kRowsPerPass < remaining;
            ptx::cp_async_16(
                destination + state.stage * Config::kValueBytes + pass * kRowsPerPass * Config::kValuePitch,
                valid ? value + pass * kRowsPerPass * stride : anywhere, valid ? 16 : 0);
        }
        ptx::cp_async_mbarrier_arrive_noinc(bar);
        value += kChunk * stride;
        source += Config::Layout::kBlockBytes;
        if constexpr (kRepeats) {
            low += Config::Layout::kTileBytes;
            flags += 2;
            has_low = remaining > kChunk ? sm80::has_second_term(flags) : 0;
        }
        remaining -= kChunk;
        state.advance();
    }
};

// The state between registers and memory: register i is row (value) v0 + 8 * ((i / 2) % 2), column (key channel) 8 * (i
// / 4) + 2t + i % 2.
__device__ __forceinline__ void load_state_tile(float (&s)[64], const void* state, int64_t base, StateLayout layout,
                                                bool is_bf16, int v0, int t) {
#pragma unroll
    for (int i = 0; i < 64; ++i) {
        const int v = v0 + 8 * ((i / 2) % 2);
        const int c = 8 * (i / 4) + 2 * t + i % 2;
        s[i] = load_state(state, base + (layout == StateLayout::kVK ? v * kDim + c : c * kDim + v), is_bf16);
    }
}

__device__ __forceinline__ void store_state_tile(const float (&s)[64], void* state, int64_t base, StateLayout layout,
                                                 bool is_bf16, int v0, int t) {
#pragma unroll
    for (int i = 0; i < 64; ++i) {
        const int v = v0 + 8 * ((i / 2) % 2);
        const int c = 8 * (i / 4) + 2 * t + i % 2;
        store_state(state, base + (layout == StateLayout::kVK ? v * kDim + c : c * kDim + v), is_bf16, s[i]);
    }
}

template <typename T, int kGroups, bool kRepeats>
__device__ __forceinline__ void recurrence_consume(const KdaParams& p, const Sequence& seq, const uint8_t* workspace,
                                                   int64_t n, int64_t head, int column0, uint32_t smem, uint32_t full,
                                                   uint32_t empty, Feeder<T, kGroups, kRepeats>& feeder) {
    using Config = RecurrenceConfig<T, kGroups, kRepeats>;
    using Layout = typename Config::Layout;
    const int warp = static_cast<int>(ptx::uniform_warp_idx());
    const int lane = threadIdx.x % 32;
    const int g = lane / 4;
    const int t = lane % 4;
    const int warp_column = 16 * warp;             // value column of this warp inside the block's
    const int v0 = column0 + warp_column + g;      // value of this lane's first accumulator row
    int remaining = static_cast<int>(seq.tokens);  // tokens

    int64_t state_row = n;
    bool has_state = true;
    if (p.state_slots != nullptr) {
        state_row = load_index(p.state_slots, n, p.index64);
        has_state = state_row != p.padding_slot;
    }
    float s[64];
    if (p.initial_state != nullptr && has_state) {
        load_state_tile(s, p.initial_state, state_row * p.initial_stride_n + head * p.initial_stride_h, p.state_layout,
                        p.initial_dtype == DType::kBf16, v0, t);
    } else {
#pragma unroll
        for (int i = 0; i < 64; ++i) {
            s[i] = 0.0f;
        }
    }
    int64_t checkpoint_row = 0;
    if (p.checkpoints != nullptr) {
        checkpoint_row = p.cu_checkpoints != nullptr ? load_index(p.cu_checkpoints, n, p.index64)
                                                     : n * (p.seqlen / p.checkpoint_interval);
    }
    const int checkpoint_chunks = p.checkpoints != nullptr ? static_cast<int>(p.checkpoint_interval / kChunk) : 0;
    int chunks_to_checkpoint = checkpoint_chunks;

    // ldmatrix rows of the values, transposed: matrices are (tokens, values) (0, 0), (0, 8), (8, 0), (8, 8).
    const uint32_t value_lane = smem + Config::kOffsetValues + (lane % 8 + 8 * (lane / 16)) * Config::kValuePitch +
                                2 * (warp_column + 8 * ((lane / 8) % 2));
    // The output piece: 32 tokens x 32 bytes; rows 4..7 of each 8 swap halves so that stmatrix rows fall in different
    // banks.
    const uint32_t output = smem + Config::kOffsetOutput + warp * 1024;
    const int store_token = lane % 8 + 8 * (lane / 16);
    const uint32_t output_lane = output + store_token * 32 + ((((lane / 8) % 2) ^ ((store_token / 4) % 2)) * 16);
    T* out = static_cast<T*>(p.out) + seq.batch * p.out_stride.batch + seq.first_token * p.out_stride.token +
             head * p.out_stride.head + column0 + warp_column;

    if constexpr (!Config::kHasProducer) {
#pragma unroll 1
        for (int i = 0; i < Config::kStages - 1 && feeder.remaining > 0; ++i) {
            feeder.next();
        }
    }
    pipe::PipeState<Config::kStages> state = pipe::PipeState<Config::kStages>::consumer();
    const uint8_t* flags = sm80::repeat_flags<Layout>(p, workspace, head * num_slots(p) + seq.first_slot);
    for (; remaining > 0; remaining -= kChunk) {
        const int length = min(kChunk, remaining);
        const uint32_t block = smem + state.stage * Config::kStageBytes;
        const uint64_t desc_kd = tile::make_desc_k<tile::Swizzle::k128>(block + Layout::kOffsetKd);
        const uint64_t desc_qd = tile::make_desc_k<tile::Swizzle::k128>(block + Layout::kOffsetQd);
        const uint64_t desc_kr = tile::make_desc_mn<tile::Swizzle::k128>(block + Layout::kOffsetKr, kChunk);
        const uint64_t desc_x = tile::make_desc_k<tile::Swizzle::k128>(block + Layout::kOffsetX);
        const uint64_t desc_a = tile::make_desc_k<tile::Swizzle::k64>(block + Layout::kOffsetA);

        const uint32_t repeats = kRepeats ? sm80::has_second_term(flags) : 0;
        flags += 2;
        uint32_t s16[32];
#pragma unroll
        for (int i = 0; i < 32; ++i) {
            s16[i] = ptx::pack2<T>(s[2 * i], s[2 * i + 1]);
        }
        float w[16], o[16];
        ptx::mbarrier_wait(full + 8 * state.stage, state.phase);
        // While they run: decay the state, fetch the values.
#pragma unroll
        for (int j = 0; j < 16; ++j) {
            const float2 d = ptx::ld_shared_f2(block + Layout::kOffsetDecay + 8 * t + 32 * j);
            s[4 * j] *= d.x;
            s[4 * j + 1] *= d.y;
            s[4 * j + 2] *= d.x;
            s[4 * j + 3] *= d.y;
        }
        ptx::fence_registers(s16);
        ptx::wgmma_fence();
#pragma unroll
        for (int kk = 0; kk < 8; ++kk) {
            ptx::wgmma_rs<T, 32>(w, s16[4 * kk], s16[4 * kk + 1], s16[4 * kk + 2], s16[4 * kk + 3],
                                 tile::advance_desc(desc_kd, tile::step_k<tile::Swizzle::k128>(kk, kChunk)), kk > 0);
        }
        ptx::wgmma_commit();
#pragma unroll
        for (int kk = 0; kk < 8; ++kk) {
            ptx::wgmma_rs<T, 32>(o, s16[4 * kk], s16[4 * kk + 1], s16[4 * kk + 2], s16[4 * kk + 3],
                                 tile::advance_desc(desc_qd, tile::step_k<tile::Swizzle::k128>(kk, kChunk)), kk > 0);
        }
        ptx::wgmma_commit();

        uint32_t value[4][2];
#pragma unroll
        for (int j = 0; j < 4; j += 2) {
            uint32_t r[4];
            ptx::ldmatrix_x4_trans(r, value_lane + state.stage * Config::kValueBytes + 8 * j * Config::kValuePitch);
            value[j][0] = r[0];
            value[j][1] = r[1];
            value[j + 1][0] = r[2];
            value[j + 1][1] = r[3];
        }
        float2 norm_k[4];
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            norm_k[j] = ptx::ld_shared_f2(block + Layout::kOffsetNormK + 8 * t + 32 * j);
        }
        ptx::wgmma_wait<1>();
        ptx::fence_registers(w);
        // Rows past the end need no mask: their values, keys and beta are zeros. E = V - norm_k W goes in as tf32:
        // an accumulator's columns 2t and 2t + 1 are an A operand's t and t + 4, and X has its columns in that order.
        uint32_t e[16];
#pragma unroll
        for (int j = 0; j < 4; ++j) {
#pragma unroll
            for (int r = 0; r < 2; ++r) {
                const float2 v = unpack2<T>(value[j][r]);
                e[4 * j + r] = ptx::convert_tf32(fmaf(-norm_k[j].x, w[4 * j + 2 * r], v.x));
                e[4 * j + 2 + r] = ptx::convert_tf32(fmaf(-norm_k[j].y, w[4 * j + 2 * r + 1], v.y));
            }
        }
        float u[16];
        ptx::fence_registers(e);
        ptx::wgmma_fence();
#pragma unroll
        for (int term = 0; term < Layout::kTerms; ++term) {
#pragma unroll
            for (int j = 0; j < 4; ++j) {
                ptx::wgmma_rs<float, 32>(u, e[4 * j], e[4 * j + 1], e[4 * j + 2], e[4 * j + 3],
                                         tile::advance_desc(desc_x, term * 2 * Layout::kSquareBytes + 32 * j), term + j > 0);
            }
        }
        ptx::wgmma_commit();
        ptx::wgmma_wait<0>();
        ptx::fence_registers(u);
        ptx::fence_registers(o);
        const ColumnScale scale(u);
        scale.apply(u);
        scale.apply(o);
        scale.apply(s);
        uint32_t u16[8], u16_low[8];
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            u16[i] = ptx::pack2<__half>(u[2 * i], u[2 * i + 1]);
            const float2 high = unpack2<__half>(u16[i]);
            u16_low[i] = ptx::pack2<__half>(u[2 * i] - high.x, u[2 * i + 1] - high.y);
        }
        ptx::fence_registers(u16);
        if constexpr (Layout::kTerms == 2) {
            ptx::fence_registers(u16_low);
        }
        ptx::fence_registers(s);
        ptx::wgmma_fence();
        ptx::wgmma_rs<__half, 32>(o, u16[0], u16[1], u16[2], u16[3], desc_a, 1);
        ptx::wgmma_rs<__half, 32>(o, u16[4], u16[5], u16[6], u16[7], tile::advance_desc(desc_a, 32), 1);
        if constexpr (Layout::kTerms == 2) {
            const uint64_t desc_a_low = tile::advance_desc(desc_a, Layout::kSquareBytes);
            ptx::wgmma_rs<__half, 32>(o, u16_low[0], u16_low[1], u16_low[2], u16_low[3], desc_a, 1);
            ptx::wgmma_rs<__half, 32>(o, u16_low[4], u16_low[5], u16_low[6], u16_low[7], tile::advance_desc(desc_a, 32),
                                      1);
            ptx::wgmma_rs<__half, 32>(o, u16[0], u16[1], u16[2], u16[3], desc_a_low, 1);
            ptx::wgmma_rs<__half, 32>(o, u16[4], u16[5], u16[6], u16[7], tile::advance_desc(desc_a_low, 32), 1);
        }
        ptx::wgmma_commit();
        constexpr uint32_t kHalf = tile::step_mn<tile::Swizzle::k128>(1);
        ptx::wgmma_rs<__half, 128, 1>(s, u16[0], u16[1], u16[2], u16[3], desc_kr, 1);
        ptx::wgmma_rs<__half, 128, 1>(s, u16[4], u16[5], u16[6], u16[7], tile::advance_desc(desc_kr, kHalf), 1);
        if constexpr (Layout::kTerms == 2) {
            const uint64_t desc_kr_low = tile::advance_desc(desc_kr, Layout::kTileBytes);
            ptx::wgmma_rs<__half, 128, 1>(s, u16_low[0], u16_low[1], u16_low[2], u16_low[3], desc_kr, 1);
            ptx::wgmma_rs<__half, 128, 1>(s, u16_low[4], u16_low[5], u16_low[6], u16_low[7],
                                          tile::advance_desc(desc_kr, kHalf), 1);
            ptx::wgmma_rs<__half, 128, 1>(s, u16[0], u16[1], u16[2], u16[3], desc_kr_low, 1);
            ptx::wgmma_rs<__half, 128, 1>(s, u16[4], u16[5], u16[6], u16[7], tile::advance_desc(desc_kr_low, kHalf), 1);
        }
        if constexpr (kRepeats) {
            // No branch around wgmma: where there is no second term its product is one with zeros.
            const uint64_t desc_low = tile::make_desc_mn<tile::Swizzle::k128>(
                repeats != 0 ? block + Config::kOffsetRepeats : smem + Config::kOffsetZeros, kChunk);
            ptx::wgmma_rs<__half, 128, 1>(s, u16[0], u16[1], u16[2], u16[3], desc_low, 1);
            ptx::wgmma_rs<__half, 128, 1>(s, u16[4], u16[5], u16[6], u16[7], tile::advance_desc(desc_low, kHalf), 1);
        }
        ptx::wgmma_commit();

        // While the state is updated: write the output.
        float2 norm_q[4];
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            norm_q[j] = ptx::ld_shared_f2(block + Layout::kOffsetNormQ + 8 * t + 32 * j);
        }
        ptx::wgmma_wait<1>();
        ptx::fence_registers(o);
        scale.undo(o);
        __syncwarp();  // the previous chunk's piece has been read
#pragma unroll
        for (int j = 0; j < 4; j += 2) {
            uint32_t r[4];
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const int jj = j + i / 2;
                r[i] =
                    ptx::pack2<T>(o[4 * jj + 2 * (i % 2)] * norm_q[jj].x, o[4 * jj + 2 * (i % 2) + 1] * norm_q[jj].y);
            }
            ptx::stmatrix_x4_trans(output_lane + 8 * j * 32, r[0], r[1], r[2], r[3]);
        }
        __syncwarp();
#pragma unroll
        for (int pass = 0; pass < 2; ++pass) {
            const int token = 16 * pass + lane / 2;
            const int half = lane % 2;
            uint32_t r[4];
            ptx::ld_shared_v4(r, output + token * 32 + ((half ^ ((token / 4) % 2)) * 16));
            if (token < length) {
                ptx::st_global_v4(out + token * p.out_stride.token + 8 * half, r);
            }
        }
        out += kChunk * p.out_stride.token;

        ptx::wgmma_wait<0>();
        ptx::fence_registers(s);
        scale.undo(s);
        if (lane == 0) {  // the __syncwarp above put this warp's loads from the stage before it
            ptx::mbarrier_arrive(empty + 8 * state.stage);
        }
        state.advance();
        if constexpr (!Config::kHasProducer) {
            // Into the stage of the previous chunk, which the other warps have had a chunk's time to leave.
            if (feeder.remaining > 0) {
                feeder.next();
            }
        }
        if (checkpoint_chunks != 0 && --chunks_to_checkpoint == 0) {
            // A checkpoint needs a whole interval of tokens, so a ragged last chunk never ends one.
            if (length == kChunk) {
                store_state_tile(s, p.checkpoints, (checkpoint_row * p.heads_v + head) * kDim * kDim, p.state_layout,
                                 p.checkpoint_dtype == DType::kBf16, v0, t);
            }
            ++checkpoint_row;
            chunks_to_checkpoint = checkpoint_chunks;
        }
    }
    if (p.final_state != nullptr && has_state) {
        store_state_tile(s, p.final_state, state_row * p.final_stride_n + head * p.final_stride_h, p.state_layout,
                         p.final_dtype == DType::kBf16, v0, t);
    }
}

template <typename T, int kGroups, bool kRepeats>
__device__ __forceinline__ void walk_chunks(const KdaParams& p, const Sequence& seq, const uint8_t* workspace, int64_t n,
                                            int64_t head, int column0) {
    using Config = RecurrenceConfig<T, kGroups, kRepeats>;
    extern __shared__ uint8_t smem_raw[];
    const uint32_t smem = (ptx::smem_addr(smem_raw) + 1023) / 1024 * 1024;
    const uint32_t full = smem + Config::kOffsetBarriers;
    const uint32_t empty = full + 8 * Config::kStages;
    if (threadIdx.x == 0) {
        for (int i = 0; i < Config::kStages; ++i) {
            ptx::mbarrier_init(full + 8 * i, 1 + Config::kFeeders);
            ptx::mbarrier_init(empty + 8 * i, 4 * kGroups);
        }
        ptx::fence_mbarrier_init();
    }
    if constexpr (kRepeats) {
        for (uint32_t i = 16 * threadIdx.x; i < Config::Layout::kTileBytes; i += 16 * Config::kThreads) {
            ptx::st_shared_v4(smem + Config::kOffsetZeros + i, {0, 0, 0, 0});
        }
        ptx::fence_proxy_async_smem();
    }
    __syncthreads();
    Feeder<T, kGroups, kRepeats> feeder(p, seq, workspace, head, column0, smem, full, empty,
                                        threadIdx.x % Config::kFeeders);
    if (Config::kHasProducer && ptx::uniform_warp_idx() >= 4) {
        while (feeder.remaining > 0) {
            feeder.next();
        }
    } else {
        recurrence_consume<T, kGroups, kRepeats>(p, seq, workspace, n, head, column0, smem, full, empty, feeder);
    }
}

template <typename T, int kGroups>
constexpr uint32_t recurrence_shared_bytes() {
    using Plain = RecurrenceConfig<T, kGroups, false>;
    using WithRepeats = RecurrenceConfig<T, kGroups, Plain::Layout::kMayRepeat>;
    return Plain::kSharedBytes > WithRepeats::kSharedBytes ? Plain::kSharedBytes : WithRepeats::kSharedBytes;
}

template <typename T, int kGroups>
__global__ void __launch_bounds__(RecurrenceConfig<T, kGroups, false>::kThreads, 1)
    kda_recurrence_sm90_kernel(const __grid_constant__ KdaParams p, const uint8_t* workspace) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
    using Config = RecurrenceConfig<T, kGroups, false>;
    using Layout = typename Config::Layout;
    constexpr int kSplits = kDim / Config::kColumns;
    const int64_t unit = blockIdx.x / kSplits;
    const int column0 = static_cast<int>(blockIdx.x % kSplits) * Config::kColumns;
    const int64_t n = unit / p.heads_v;
    const int64_t head = unit % p.heads_v;
    const Sequence seq = locate_sequence(p, n);
    if constexpr (Layout::kMayRepeat) {
        // Two loops: the one without second terms is the faster one.
        const uint8_t* const flags = sm80::repeat_flags<Layout>(p, workspace, head * num_slots(p) + seq.first_slot);
        if (sm80::any_repeats(flags, chunks_of(seq.tokens))) {
            walk_chunks<T, kGroups, true>(p, seq, workspace, n, head, column0);
            return;
        }
    }
    walk_chunks<T, kGroups, false>(p, seq, workspace, n, head, column0);
#else
    __trap();
#endif
}

}  // namespace flare::kda
