// KDA forward in one kernel: two prepare teams feed a recurrence through shared memory, so that what they make never
// leaves the SM. Design and measurements: docs/kernels/kda.md.
//
// Recurrence, transposed: S^T [V x K] is the accumulator, a warpgroup owns 64 value columns as the M of wgmma m64, and all
// A operands come from registers:
//   U^T = V^T X^T + S^T w^T              m64n32 k32 (two terms of X), k128     A: values, S^T rounded to 16 bits
//   O^T = S^T Qd^T + U^T A^T             m64n32 k128, k32 (fp16)
//   S^T = S^T diag(exp G_C) + U^T Kr     m64n128 k32 (fp16)
//
// Barrier      count   arrives                                              waits
// full[block]  5       a lane per warp of the team that made it, and its    consumers, phase 0 first
//              + bytes loader with the bytes of the values
// empty[block] 8       a lane per consumer warp, once it has left it        the team, phase 1 first
// input[stage] 1       the team's loader with the bytes                     the team, phase 0 first
//              + bytes
// Operand tiles: written by ordinary stores, read by wgmma: fence.proxy.async in every writing thread before it arrives.
// Input stages and values: written by TMA, read and overwritten by ordinary accesses; the same fence before they go back.
#pragma once

#include "kda/column_scale.cuh"
#include "kda/fused_prepare_sm90.cuh"
#include "ptx/tma.cuh"

namespace flare::kda::fused {

// The state between registers and memory: register 4j + 2h + e is value v0 + 8h, key channel 8j + 2t + e. Channels from dim_k
// on exist in registers only, as zeros. `pitch` is the length of a row of the state in memory.
template <StateLayout kLayout, typename State>
__device__ __forceinline__ void load_state_as(float (&s)[64], const State* from, int pitch, int dim_k) {
    const int value_step = kLayout == StateLayout::kVK ? 8 * pitch : 8;
    const int channel_step = kLayout == StateLayout::kVK ? 1 : pitch;
#pragma unroll
    for (int j = 0; j < 16; ++j, from += 8 * channel_step) {
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            if (8 * j >= dim_k) {
                s[4 * j + 2 * h] = s[4 * j + 2 * h + 1] = 0.0f;
            } else if constexpr (kLayout == StateLayout::kVK && sizeof(State) == 4) {
                const float2 pair = *reinterpret_cast<const float2*>(from + h * value_step);
                s[4 * j + 2 * h] = pair.x;
                s[4 * j + 2 * h + 1] = pair.y;
            } else {
                s[4 * j + 2 * h] = static_cast<float>(from[h * value_step]);
                s[4 * j + 2 * h + 1] = static_cast<float>(from[h * value_step + channel_step]);
            }
        }
    }
}

template <StateLayout kLayout, typename State>
__device__ __forceinline__ void store_state_as(const float (&s)[64], State* to, int pitch, int dim_k) {
    const int value_step = kLayout == StateLayout::kVK ? 8 * pitch : 8;
    const int channel_step = kLayout == StateLayout::kVK ? 1 : pitch;
#pragma unroll
    for (int j = 0; j < 16; ++j, to += 8 * channel_step) {
        if (8 * j < dim_k) {
#pragma unroll
            for (int h = 0; h < 2; ++h) {
                if constexpr (kLayout == StateLayout::kVK && sizeof(State) == 4) {
                    *reinterpret_cast<float2*>(to + h * value_step) = {s[4 * j + 2 * h], s[4 * j + 2 * h + 1]};
                } else {
                    to[h * value_step] = static_cast<State>(s[4 * j + 2 * h]);
                    to[h * value_step + channel_step] = static_cast<State>(s[4 * j + 2 * h + 1]);
                }
            }
        }
    }
}

__device__ __forceinline__ int64_t state_start(const KdaParams& p, int64_t base, int v0, int t) {
    return base + (p.state_layout == StateLayout::kVK ? v0 * p.head_dim_k + 2 * t : 2 * t * p.head_dim_v + v0);
}

__device__ __forceinline__ void load_state_tile(float (&s)[64], const KdaParams& p, const void* state, int64_t base,
                                                bool is_bf16, int v0, int t) {
    const int64_t start = state_start(p, base, v0, t);
    const float* const wide = static_cast<const float*>(state) + start;
    const __nv_bfloat16* const narrow = static_cast<const __nv_bfloat16*>(state) + start;
    if (p.state_layout == StateLayout::kVK) {
        is_bf16 ? load_state_as<StateLayout::kVK>(s, narrow, p.head_dim_k, p.head_dim_k)
                : load_state_as<StateLayout::kVK>(s, wide, p.head_dim_k, p.head_dim_k);
    } else {
        is_bf16 ? load_state_as<StateLayout::kKV>(s, narrow, p.head_dim_v, p.head_dim_k)
                : load_state_as<StateLayout::kKV>(s, wide, p.head_dim_v, p.head_dim_k);
    }
}

__device__ __forceinline__ void store_state_tile(const float (&s)[64], const KdaParams& p, void* state, int64_t base,
                                                 bool is_bf16, int v0, int t) {
    const int64_t start = state_start(p, base, v0, t);
    float* const wide = static_cast<float*>(state) + start;
    __nv_bfloat16* const narrow = static_cast<__nv_bfloat16*>(state) + start;
    if (p.state_layout == StateLayout::kVK) {
        is_bf16 ? store_state_as<StateLayout::kVK>(s, narrow, p.head_dim_k, p.head_dim_k)
                : store_state_as<StateLayout::kVK>(s, wide, p.head_dim_k, p.head_dim_k);
    } else {
        is_bf16 ? store_state_as<StateLayout::kKV>(s, narrow, p.head_dim_v, p.head_dim_k)
                : store_state_as<StateLayout::kKV>(s, wide, p.head_dim_v, p.head_dim_k);
    }
}

// Values of a chunk as A operands, by ldmatrix from `tile_lane` on; zeros behind the end, where the next sequence's lie.
__device__ __forceinline__ void load_values(uint32_t (&v)[2][4], uint32_t tile_lane, int length, int t) {
    ptx::ldmatrix_x4_trans(v[0], tile_lane);
    ptx::ldmatrix_x4_trans(v[1], tile_lane + 16 * 128);
    if (length < kChunk) {
#pragma unroll
        for (int kk = 0; kk < 2; ++kk) {
#pragma unroll
            for (int r = 0; r < 4; ++r) {
                const int token = 16 * kk + 8 * (r / 2) + 2 * t;
                v[kk][r] = token + 1 < length ? v[kk][r] : token < length ? v[kk][r] & 0xffffu : 0u;
            }
        }
    }
}

// The state before a chunk, rounded for its products; then its decay. In this order, and before the products: ptxas would wait
// for them before it touches an accumulator of the last chunk.
template <typename T>
__device__ __forceinline__ void round_and_decay(uint32_t (&s16)[32], float (&s)[64], uint32_t block, int t) {
#pragma unroll
    for (int i = 0; i < 32; ++i) {
        s16[i] = ptx::pack2<T>(s[2 * i], s[2 * i + 1]);
    }
#pragma unroll
    for (int j = 0; j < 16; ++j) {
        const float2 d = ptx::ld_shared_f2(block + kBlockDecay + 8 * t + 32 * j);
        s[4 * j] *= d.x;
        s[4 * j + 1] *= d.y;
        s[4 * j + 2] *= d.x;
        s[4 * j + 3] *= d.y;
    }
}

// U^T = V^T X^T + S^T w^T.
template <typename T>
__device__ __forceinline__ void multiply_u(float (&u)[16], const uint32_t (&v)[2][4], const uint32_t (&s16)[32],
                                           uint32_t block) {
    const uint64_t desc_x = tile::make_desc_k<tile::Swizzle::k64>(block + kBlockX);
    const uint64_t desc_w = tile::make_desc_k<tile::Swizzle::k128>(block + kBlockW);
#pragma unroll
    for (int term = 0; term < 2; ++term) {
#pragma unroll
        for (int kk = 0; kk < 2; ++kk) {
            ptx::wgmma_rs<T, 32>(u, v[kk][0], v[kk][1], v[kk][2], v[kk][3],
                                 tile::advance_desc(desc_x, 2048 * term + 32 * kk), term + kk > 0);
        }
    }
#pragma unroll
    for (int kk = 0; kk < 8; ++kk) {
        ptx::wgmma_rs<T, 32>(u, s16[4 * kk], s16[4 * kk + 1], s16[4 * kk + 2], s16[4 * kk + 3],
                             tile::advance_desc(desc_w, tile::step_k<tile::Swizzle::k128>(kk, kChunk)), 1);
    }
}

// O^T = S^T Qd^T; the rest of it, U^T A^T; S^T += U^T Kr.
template <typename T>
__device__ __forceinline__ void multiply_o(float (&o)[16], const uint32_t (&s16)[32], uint32_t block) {
    const uint64_t desc_qd = tile::make_desc_k<tile::Swizzle::k128>(block + kBlockQd);
#pragma unroll
    for (int kk = 0; kk < 8; ++kk) {
        ptx::wgmma_rs<T, 32>(o, s16[4 * kk], s16[4 * kk + 1], s16[4 * kk + 2], s16[4 * kk + 3],
                             tile::advance_desc(desc_qd, tile::step_k<tile::Swizzle::k128>(kk, kChunk)), kk > 0);
    }
}
__device__ __forceinline__ void multiply_ua(float (&ua)[16], const uint32_t (&u16)[8], uint32_t block) {
    const uint64_t desc_a = tile::make_desc_k<tile::Swizzle::k64>(block + kBlockA);
    ptx::wgmma_rs<__half, 32>(ua, u16[0], u16[1], u16[2], u16[3], desc_a, 0);
    ptx::wgmma_rs<__half, 32>(ua, u16[4], u16[5], u16[6], u16[7], tile::advance_desc(desc_a, 32), 1);
}
__device__ __forceinline__ void add_ukr(float (&s)[64], const uint32_t (&u16)[8], uint32_t block) {
    const uint64_t desc_kr = tile::make_desc_mn<tile::Swizzle::k128>(block + kBlockKr, kChunk);
    ptx::wgmma_rs<__half, 128, 1>(s, u16[0], u16[1], u16[2], u16[3], desc_kr, 1);
    ptx::wgmma_rs<__half, 128, 1>(s, u16[4], u16[5], u16[6], u16[7],
                                  tile::advance_desc(desc_kr, tile::step_mn<tile::Swizzle::k128>(1)), 1);
}

// O + U A to the places of the warp's values, through the addresses they were loaded from.
template <typename T>
__device__ __forceinline__ void leave_output(const float (&o)[16], const float (&ua)[16], uint32_t tile_lane) {
#pragma unroll
    for (int j = 0; j < 4; j += 2) {
        uint32_t r[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const int at = 4 * (j + i / 2) + 2 * (i % 2);
            r[i] = ptx::pack2<T>(o[at] + ua[at], o[at + 1] + ua[at + 1]);
        }
        ptx::stmatrix_x4_trans(tile_lane + 8 * j * 128, r[0], r[1], r[2], r[3]);
    }
}

// ldmatrix rows of a warp's values, transposed: matrices are (tokens, values) (0, 0), (0, 8), (8, 0), (8, 8).
__device__ __forceinline__ uint32_t lane_of_values(uint32_t values, uint32_t piece, int lane) {
    return values + (lane % 8 + 8 * (lane / 16)) * 128 + (((piece + (lane / 8) % 2) ^ (lane % 8)) << 4);
}

// One chunk: updates the state and leaves the output in the places of the values; `write` runs with the state's products.
template <typename T, class Write>
__device__ __forceinline__ void consume_chunk(float (&s)[64], uint32_t block, uint32_t values, int length, int lane,
                                              uint32_t piece, const Write& write) {
    const int t = lane % 4;
    const uint32_t tile_lane = lane_of_values(values, piece, lane);
    uint32_t v[2][4];
    load_values(v, tile_lane, length, t);
    uint32_t s16[32];
    round_and_decay<T>(s16, s, block, t);
    float u[16], o[16];
    ptx::fence_registers(v[0]);
    ptx::fence_registers(v[1]);
    ptx::fence_registers(s16);
    ptx::wgmma_fence();
    multiply_u<T>(u, v, s16, block);
    ptx::wgmma_commit();
    multiply_o<T>(o, s16, block);
    ptx::wgmma_commit();
    ptx::wgmma_wait<1>();
    ptx::fence_registers(u);
    const ColumnScale scale(u);
    scale.apply(u);
    scale.apply(s);
    uint32_t u16[8];
#pragma unroll
    for (int i = 0; i < 8; ++i) {
        u16[i] = ptx::pack2<__half>(u[2 * i], u[2 * i + 1]);
    }
    ptx::fence_registers(u16);
    ptx::fence_registers(s);
    ptx::wgmma_fence();
    // Rows past the end need no mask: their values, keys and beta are zeros.
    multiply_ua(u, u16, block);
    ptx::wgmma_commit();
    add_ukr(s, u16, block);
    ptx::wgmma_commit();
    ptx::wgmma_wait<1>();
    ptx::fence_registers(o);
    ptx::fence_registers(u);
    scale.undo(u);
    leave_output<T>(o, u, tile_lane);
    __syncwarp();
    write();
    ptx::wgmma_wait<0>();
    ptx::fence_registers(s);
    scale.undo(s);
}

// A warp's rows of the output to memory. The fence, for the copies that get the values' places back, comes before the stores:
// behind them it would wait for them.
template <typename T>
__device__ __forceinline__ void write_rows(T* out, int64_t stride, int rows, uint32_t values, uint32_t piece, int lane) {
    uint32_t rows16[2][4];
#pragma unroll
    for (int pass = 0; pass < 2; ++pass) {
        const int token = 16 * pass + lane / 2;
        ptx::ld_shared_v4(rows16[pass], values + token * 128 + (((piece + lane % 2) ^ (token % 8)) << 4));
    }
    ptx::fence_proxy_async_smem();
#pragma unroll
    for (int pass = 0; pass < 2; ++pass) {
        const int token = 16 * pass + lane / 2;
        if (token < rows) {
            ptx::st_global_v4(out + token * stride + 8 * (lane % 2), rows16[pass]);
        }
    }
}

// The recurrence of one unit on the 16 value columns per warp from `column` on. Stages hold operand blocks; consume(s, stage,
// block, length) brings the state s behind the chunk there and gives the stage back.
template <int kStages, class Consume>
__device__ __forceinline__ void consume_unit(const KdaParams& p, const Unit& unit, int column, uint32_t stages, uint32_t full,
                                             pipe::PipeState<kStages>& state, Consume consume) {
    const int lane = threadIdx.x % 32;
    const int t = lane % 4;
    const int v0 = column + lane / 4;
    int64_t state_row = unit.n;
    bool has_state = true;
    if (p.state_slots != nullptr) {
        state_row = load_index(p.state_slots, unit.n, p.index64);
        has_state = state_row != p.padding_slot;
    }
    // With 64 value columns some warps have none: they compute zeros.
    const bool has_columns = column < p.head_dim_v;
    has_state = has_state && has_columns;
    float s[64];
    if (p.initial_state != nullptr && has_state) {
        load_state_tile(s, p, p.initial_state, state_row * p.initial_stride_n + unit.head * p.initial_stride_h,
                        p.initial_dtype == DType::kBf16, v0, t);
    } else {
#pragma unroll
        for (int i = 0; i < 64; ++i) {
            s[i] = 0.0f;
        }
    }
    const int checkpoint_chunks = p.checkpoints != nullptr ? static_cast<int>(p.checkpoint_interval / kChunk) : 0;
    int64_t checkpoint_row = 0;
    if (checkpoint_chunks != 0) {
        checkpoint_row = p.cu_checkpoints != nullptr ? load_index(p.cu_checkpoints, unit.n, p.index64)
                                                     : unit.n * (p.seqlen / p.checkpoint_interval);
    }
    int chunks_to_checkpoint = checkpoint_chunks;
#pragma unroll 1
    for (int remaining = unit.tokens; remaining > 0; remaining -= kChunk) {
        const int length = min(kChunk, remaining);
        ptx::mbarrier_wait(full + 8 * state.stage, state.phase);
        consume(s, state.stage, stages + state.stage * kBlockBytes, length);
        state.advance();
        if (checkpoint_chunks != 0 && --chunks_to_checkpoint == 0) {
            // A checkpoint needs a whole interval of tokens, so a ragged last chunk never ends one.
            if (length == kChunk && has_columns) {
                const int64_t size = static_cast<int64_t>(p.head_dim_k) * p.head_dim_v;
                store_state_tile(s, p, p.checkpoints, (checkpoint_row * p.heads_v + unit.head) * size,
                                 p.checkpoint_dtype == DType::kBf16, v0, t);
            }
            ++checkpoint_row;
            chunks_to_checkpoint = checkpoint_chunks;
        }
    }
    if (p.final_state != nullptr && has_state) {
        store_state_tile(s, p, p.final_state, state_row * p.final_stride_n + unit.head * p.final_stride_h,
                         p.final_dtype == DType::kBf16, v0, t);
    }
}

__device__ __forceinline__ void init_barriers(uint32_t full, uint32_t empty, int stages, uint32_t full_count,
                                              uint32_t empty_count) {
    if (threadIdx.x == 0) {
        for (int i = 0; i < stages; ++i) {
            ptx::mbarrier_init(full + 8 * i, full_count);
            ptx::mbarrier_init(empty + 8 * i, empty_count);
        }
        ptx::fence_mbarrier_init();
    }
    __syncthreads();
}

// Teams are the last warpgroups of a block.
template <class M>
__device__ __forceinline__ Team<M> make_team(uint32_t smem, int warp) {
    return {smem, static_cast<uint32_t>(warp / 4 - (kThreads / 128 - M::kTeams)), warp % 4,
            static_cast<int>(threadIdx.x % 32)};
}

template <class M>
__device__ __forceinline__ void init_team_barriers(uint32_t smem) {
    if (threadIdx.x == 0) {
        for (int i = 0; i < M::kTeams * M::kInputStages; ++i) {
            ptx::mbarrier_init(smem + M::kOffsetInputFull + 8 * i, 1);
        }
    }
}

template <typename T, Anchors kAnchors>
__global__ void __launch_bounds__(kThreads, 1)
    kda_fused_sm90_kernel(const __grid_constant__ Args args, uint32_t* counter) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
    extern __shared__ uint8_t smem_raw[];
    const KdaParams& p = args.p;
    const uint32_t smem = (ptx::smem_addr(smem_raw) + 1023) / 1024 * 1024;
    const uint32_t full = smem + FusedMap::kOffsetBlockFull;
    const uint32_t empty = smem + FusedMap::kOffsetBlockEmpty;
    init_team_barriers<FusedMap>(smem);
    init_barriers(full, empty, FusedMap::kBlocks, 5, 8);
    const Schedule schedule{counter, smem};
    schedule.open(p);
    const int warp = static_cast<int>(ptx::uniform_warp_idx());
    const int lane = static_cast<int>(threadIdx.x % 32);
    if (warp < 8) {
        ptx::setmaxnreg_inc<kConsumerRegs>();
        pipe::PipeState<FusedMap::kBlocks> state = pipe::PipeState<FusedMap::kBlocks>::consumer();
        const uint32_t busy = schedule.busy(p);
        bool dealt = true;
        uint32_t place = 0;
#pragma unroll 1
        for (uint32_t round = 0;; ++round) {
            if (dealt) {
                place = schedule.take(round);
                dealt = place < busy;
                place = dealt ? place : busy + blockIdx.x;  // sequences without tokens, in fixed rounds
            } else {
                place += gridDim.x;
            }
            if (place >= num_units(p)) {
                break;
            }
            Unit unit;
            schedule.locate(unit, p, place);
            const int column = 16 * warp;
            const int64_t stride = p.out_stride.token;
            T* out = static_cast<T*>(p.out) + static_cast<int64_t>(unit.batch(p)) * p.out_stride.batch +
                     static_cast<int64_t>(unit.row) * stride + unit.head * p.out_stride.head + column;
            consume_unit(p, unit, column, smem + FusedMap::kOffsetBlock, full, state,
                               [&](float(&s)[64], uint32_t stage, uint32_t block, int length) {
                                   const uint32_t values = block + kBlockV + (warp / 4) * kHalfTileBytes;
                                   const uint32_t piece = 2 * (warp % 4);
                                   consume_chunk<T>(s, block, values, length, lane, piece, [&] {
                                       write_rows(out, stride, column < p.head_dim_v ? length : 0, values, piece, lane);
                                   });
                                   __syncwarp();
                                   if (lane == 0) {
                                       ptx::mbarrier_arrive(empty + 8 * stage);
                                   }
                                   out += kChunk * stride;
                               });
        }
    } else {
        ptx::setmaxnreg_dec<kTeamRegs>();
        run_team<T, kAnchors>(args, make_team<FusedMap>(smem, warp), UnitWalk(p, schedule), schedule);
    }
#else
    __trap();
#endif
}

}  // namespace flare::kda::fused
