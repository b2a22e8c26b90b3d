// The fused KDA forward with segments of a sequence side by side, for long sequences of few heads.
// Design and measurements: docs/kernels/kda.md.
//
// The state behind a segment is affine in the one before it: S_out = M S_in + E. Three launches:
//   first    prepare blocks make the operand blocks of all chunks, as in split_sm90.cuh; behind them in the grid,
//            blocks that run each sequence's first segment, and those that find E and M of all others but the last:
//            the recurrence from zeros, and the recurrence on the identity without values. Neither has an output.
//   scan     S_in of all segments, in fp32
//   second   the segments behind the first one, from S_in
//
// A block of the recurrence is one of two for a segment and value head: half of the value columns; or E, or M.
//
// Barrier        count        arrives                                    waits
// full[stage]    1 + bytes    filler                                     consumers
// output[stage]  4            a lane per consumer warp                   writer
// empty[stage]   1; for E     writer; for E and M a lane per consumer    filler
//                and M 8      warp
// A filler waits for the flags of its chunks. Prepare blocks come first in the grid and wait for nobody.
#pragma once

#include "kda/segments_common_sm90.cuh"
#include "kda/split_sm90.cuh"

namespace flare::kda::fused {

// A thread.
template <class R, RecurrenceWork kWork>
__device__ __forceinline__ void fill_segment(const Args& args, const Segments& segments, const Segment& segment,
                                             int column0, uint32_t smem) {
    const int64_t first = segment.block(args.p);
    const uint8_t* source = segments.blocks + first * kOperandBytes;
    const uint32_t* flag = segments.flags + first;
    const Unit& unit = segment.unit;
    constexpr int kTiles = kWork == RecurrenceWork::kOutput ? 1 : kWork == RecurrenceWork::kEnd ? 2 : 0;  // of values
    constexpr uint32_t kMiddle = kWork == RecurrenceWork::kMap ? kBlockX - kBlockKr : kBlockA - kBlockKr;
    constexpr uint32_t kDecayBytes = kOperandBytes - kBlockDecay;
    constexpr uint32_t kBytes = kWork == RecurrenceWork::kOutput ? kOperandBytes : kBlockQd + kMiddle + kDecayBytes;
    pipe::PipeState<R::kStages> state = pipe::PipeState<R::kStages>::producer();
#pragma unroll 1
    for (int done = 0; done < unit.tokens; done += kChunk) {
        const uint32_t stage = smem + state.stage * kBlockBytes;
        const uint32_t bar = smem + R::kOffsetFull + 8 * state.stage;
        ptx::mbarrier_wait(smem + R::kOffsetEmpty + 8 * state.stage, state.phase);
        ptx::mbarrier_arrive_expect_tx(bar, kBytes + kTiles * kHalfTileBytes);
#pragma unroll
        for (int tile = 0; tile < kTiles; ++tile) {
            load_box(stage + kBlockV + tile * kHalfTileBytes, args.v, bar, column0 + 64 * tile, unit, unit.head, done,
                     args.p);
        }
        while (ptx::ld_acquire_gpu(flag) == 0) {
        }
        ptx::fence_proxy_async_global();
        if constexpr (kWork == RecurrenceWork::kOutput) {
            ptx::bulk_load(stage, source, kOperandBytes, bar);
        } else {  // w, Kr, X, decay
            ptx::bulk_load(stage, source, kBlockQd, bar);
            ptx::bulk_load(stage + kBlockKr, source + kBlockKr, kMiddle, bar);
            ptx::bulk_load(stage + kBlockDecay, source + kBlockDecay, kDecayBytes, bar);
        }
        source += kOperandBytes;
        ++flag;
        state.advance();
    }
}

// One chunk without its output, and without its values (kMap).
template <typename T, RecurrenceWork kWork>
__device__ __forceinline__ void pass_chunk(float (&s)[64], uint32_t block, uint32_t values, int lane, uint32_t piece) {
    const int t = lane % 4;
    uint32_t v[2][4];
    if constexpr (kWork == RecurrenceWork::kEnd) {
        load_values(v, lane_of_values(values, piece, lane), kChunk, t);
    }
    uint32_t s16[32];
    round_and_decay<T>(s16, s, block, t);
    float u[16];
    ptx::fence_registers(s16);
    if constexpr (kWork == RecurrenceWork::kEnd) {
        ptx::fence_registers(v[0]);
        ptx::fence_registers(v[1]);
        ptx::wgmma_fence();
        multiply_u<T>(u, v, s16, block);
    } else {
        const uint64_t desc_w = tile::make_desc_k<tile::Swizzle::k128>(block + kBlockW);
        ptx::wgmma_fence();
#pragma unroll
        for (int kk = 0; kk < 8; ++kk) {
            ptx::wgmma_rs<T, 32>(u, s16[4 * kk], s16[4 * kk + 1], s16[4 * kk + 2], s16[4 * kk + 3],
                                 tile::advance_desc(desc_w, tile::step_k<tile::Swizzle::k128>(kk, kChunk)), kk > 0);
        }
    }
    ptx::wgmma_commit();
    ptx::wgmma_wait<0>();
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
    add_ukr(s, u16, block);
    ptx::wgmma_commit();
    ptx::wgmma_wait<0>();
    ptx::fence_registers(s);
    scale.undo(s);
}

// A warpgroup: E or M of a segment, on 64 of their columns.
template <typename T, class R, RecurrenceWork kWork>
__device__ __forceinline__ void pass_segment(const KdaParams& p, const Segments& segments, const Segment& segment,
                                             int warp, uint32_t smem) {
    const int lane = static_cast<int>(threadIdx.x % 32);
    const int v0 = 16 * warp + lane / 4;
    const int c0 = 2 * (lane % 4);
    float s[64];
#pragma unroll
    for (int i = 0; i < 64; ++i) {
        s[i] = kWork == RecurrenceWork::kMap && v0 + 8 * (i / 2 % 2) == 8 * (i / 4) + c0 + i % 2 ? 1.0f : 0.0f;
    }
    pipe::PipeState<R::kStages> state = pipe::PipeState<R::kStages>::consumer();
#pragma unroll 1
    for (int done = 0; done < segment.unit.tokens; done += kChunk) {
        const uint32_t block = smem + state.stage * kBlockBytes;
        ptx::mbarrier_wait(smem + R::kOffsetFull + 8 * state.stage, state.phase);
        pass_chunk<T, kWork>(s, block, block + kBlockV + (warp / 4) * kHalfTileBytes, lane, 2 * (warp % 4));
        __syncwarp();
        if (lane == 0) {
            ptx::mbarrier_arrive(smem + R::kOffsetEmpty + 8 * state.stage);
        }
        state.advance();
    }
    float* const to = kWork == RecurrenceWork::kMap ? segments.maps + segment.state(p)
                                                 : segments.starts + segment.state(p) + p.heads_v * int64_t{128 * 128};
    store_state_as<StateLayout::kVK>(s, to + v0 * 128 + c0, 128, 128);
}

// A warpgroup: a segment on 64 value columns, with its output.
template <typename T, class R>
__device__ __forceinline__ void run_segment(const KdaParams& p, const Segments& segments, const Segment& segment,
                                            int column, int warp, uint32_t smem) {
    const int lane = static_cast<int>(threadIdx.x % 32);
    const int t = lane % 4;
    const int v0 = column + 16 * warp + lane / 4;
    const Unit& unit = segment.unit;
    int64_t state_row = unit.n;
    bool has_state = true;
    if (p.state_slots != nullptr) {
        state_row = load_index(p.state_slots, unit.n, p.index64);
        has_state = state_row != p.padding_slot;
    }
    float s[64];
    if (!segment.first()) {
        load_state_as<StateLayout::kVK>(s, segments.starts + segment.state(p) + v0 * 128 + 2 * t, 128, 128);
    } else if (p.initial_state != nullptr && has_state) {
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
    int chunks_to_checkpoint = 0;
    if (checkpoint_chunks != 0) {
        const int before = segment.start / kChunk;
        checkpoint_row = before / checkpoint_chunks + (p.cu_checkpoints != nullptr
                                                           ? load_index(p.cu_checkpoints, unit.n, p.index64)
                                                           : unit.n * (p.seqlen / p.checkpoint_interval));
        chunks_to_checkpoint = checkpoint_chunks - before % checkpoint_chunks;
    }
    pipe::PipeState<R::kStages> state = pipe::PipeState<R::kStages>::consumer();
#pragma unroll 1
    for (int remaining = unit.tokens; remaining > 0; remaining -= kChunk) {
        const int length = min(kChunk, remaining);
        const uint32_t block = smem + state.stage * kBlockBytes;
        ptx::mbarrier_wait(smem + R::kOffsetFull + 8 * state.stage, state.phase);
        consume_chunk<T>(s, block, block + kBlockV, length, lane, 2 * warp, [] {});
        if (lane == 0) {
            ptx::mbarrier_arrive(smem + R::kOffsetOutput + 8 * state.stage);
        }
        state.advance();
        if (checkpoint_chunks != 0 && --chunks_to_checkpoint == 0) {
            // A checkpoint needs a whole interval of tokens, so a ragged last chunk never ends one.
            if (length == kChunk) {
                store_state_tile(s, p, p.checkpoints, (checkpoint_row * p.heads_v + unit.head) * int64_t{128 * 128},
                                 p.checkpoint_dtype == DType::kBf16, v0, t);
            }
            ++checkpoint_row;
            chunks_to_checkpoint = checkpoint_chunks;
        }
    }
    if (segment.last()) {
        if (p.final_state != nullptr && has_state) {
            store_state_tile(s, p, p.final_state, state_row * p.final_stride_n + unit.head * p.final_stride_h,
                             p.final_dtype == DType::kBf16, v0, t);
        }
    } else if (segment.first()) {
        store_state_as<StateLayout::kVK>(
            s, segments.starts + segment.state(p) + p.heads_v * int64_t{128 * 128} + v0 * 128 + 2 * t, 128, 128);
    }
}

// The first launch has prepare blocks, the second none. Two blocks of the recurrence for every value head of every
// segment.
template <typename T, Anchors kAnchors>
__global__ void __launch_bounds__(kThreads, 1)
    kda_segments_sm90_kernel(const __grid_constant__ Args args, const __grid_constant__ Segments segments,
                             uint32_t prepare_blocks) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
    extern __shared__ uint8_t smem_raw[];
    const KdaParams& p = args.p;
    const uint32_t smem = (ptx::smem_addr(smem_raw) + 1023) / 1024 * 1024;
    const int warp = static_cast<int>(ptx::uniform_warp_idx());
    const int lane = static_cast<int>(threadIdx.x % 32);
    if (blockIdx.x < prepare_blocks) {
        using M = PrepareMap;
        if (threadIdx.x == 0) {
            init_split_barriers<M>(smem);
            ptx::fence_mbarrier_init();
        }
        __syncthreads();
        if (warp < 4 * M::kTeams) {
            ptx::setmaxnreg_inc<kSplitTeamRegs>();
            run_split_team<T, kAnchors, M>(p, smem, {0, static_cast<uint32_t>(warp / 4), warp % 4, lane});
        } else {
            ptx::setmaxnreg_dec<kSplitHelperRegs>();
            if (warp < 15) {
                help_team<T, kAnchors, M>(p, smem, static_cast<uint32_t>(warp - 12), segments.blocks, segments.flags);
            } else {
                const uint32_t chunks = longest(p);
                if (ptx::elect_one()) {
                    claim_chunks<M>(args, smem, segments.counter, chunks);
                }
            }
        }
        return;
    }
    using R = RecurrenceMap<0>;
    const bool first_launch = prepare_blocks != 0;
    const uint32_t index = blockIdx.x - prepare_blocks;
    const uint32_t heads = static_cast<uint32_t>(p.heads_v);
    const int half = static_cast<int>(index % 2);
    Segment segment;
    segment.locate(p, segments, static_cast<int32_t>(index / 2 / heads), static_cast<int32_t>(index / 2 % heads));
    if (!segment.exists() || (first_launch ? !segment.first() && segment.last() : segment.first())) {
        return;
    }
    const bool with_output = segment.first() || !first_launch;
    if (threadIdx.x == 0) {
        for (int i = 0; i < R::kStages; ++i) {
            ptx::mbarrier_init(smem + R::kOffsetFull + 8 * i, 1);
            ptx::mbarrier_init(smem + R::kOffsetOutput + 8 * i, 4);
            ptx::mbarrier_init(smem + R::kOffsetEmpty + 8 * i, with_output ? 1 : 8);
        }
        ptx::fence_mbarrier_init();
    }
    __syncthreads();
    if (warp >= 12) {
        ptx::setmaxnreg_dec<kSplitHostHelperRegs>();
        if (warp == 12) {
            if (ptx::elect_one()) {
                if (with_output) {
                    fill_segment<R, RecurrenceWork::kOutput>(args, segments, segment, 64 * half, smem);
                } else if (half == 0) {
                    fill_segment<R, RecurrenceWork::kEnd>(args, segments, segment, 0, smem);
                } else {
                    fill_segment<R, RecurrenceWork::kMap>(args, segments, segment, 0, smem);
                }
            }
        } else if (warp == 13 && with_output) {
            write_output<T, R>(p, segment.unit, 64 * half, 1, smem);
        }
    } else if (warp < (with_output ? 4 : 8)) {
        ptx::setmaxnreg_inc<kConsumerRegs>();
        if (with_output) {
            run_segment<T, R>(p, segments, segment, 64 * half, warp, smem);
        } else if (half == 0) {
            pass_segment<T, R, RecurrenceWork::kEnd>(p, segments, segment, warp, smem);
        } else {
            pass_segment<T, R, RecurrenceWork::kMap>(p, segments, segment, warp, smem);
        }
    }
#else
    __trap();
#endif
}

}  // namespace flare::kda::fused
