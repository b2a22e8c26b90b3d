// The fused KDA forward split over blocks, for few and long sequences: prepare blocks make chunks through the workspace for
// recurrence blocks, each of them on 64 or 128 value columns of a unit. A recurrence block may host a prepare team, too.
// Design and measurements: docs/kernels/kda.md.
//
// Teams claim chunks from a counter, the first chunks of all units first, and wait for nobody but their own block's copies:
// whatever blocks run, every chunk that was claimed is made, so no order of scheduling can deadlock. A flag per chunk says
// that its operand block is in memory. Which block makes a chunk changes no bit of it.
//
// Warpgroup 3 of every block serves the others:
// claimer  a thread: claims chunks, copies their inputs into a ring of stages
// helpers  a warp per team: puts gate constants and beta of the team's next chunk into the stage's scratch; copies the
//          operand block of the chunk before to the workspace and sets its flag
// filler   a thread: waits for flags, copies operand blocks and values into the recurrence's stages
// writer   a warp: the recurrence's output from the values' places to memory
//
// Barrier        count        arrives                                    waits
// claimed        1            claimer                                    helper, the team
// input_full     2 + bytes    claimer, with the bytes; helper            the team
// input_empty    4            a lane per warp of the team                claimer
// block_full     4            a lane per warp of the team                helper
// block_empty    1            helper, when shared memory has been read   the team
// full[stage]    1 + bytes    filler                                     consumers
// output[stage]  4 a group    a lane per consumer warp                   writer
// empty[stage]   1            writer                                     filler
// Fences between ordinary accesses and copies: as in fused_sm90.cuh; the values' places get theirs from the writer.
#pragma once

#include "kda/fused_sm90.cuh"

namespace flare::kda::fused {

// Shared memory of a block's teams, from byte kBase on: input stages, an operand block per team, scratch per input stage.
template <int kTeams_, int kInputs_, uint32_t kBase_>
struct SplitMap {
    static constexpr int kTeams = kTeams_;
    static constexpr int kInputs = kInputs_;
    static constexpr uint32_t kOffsetInput = kBase_;
    static constexpr uint32_t kOffsetBlock = kOffsetInput + kInputs * kInputBytes;
    static constexpr uint32_t kOffsetScratch = kOffsetBlock + kTeams * kBlockV;
    static constexpr uint32_t kScratchLength = kScratchBytes;     // rows of the chunk; -1 behind the last one
    static constexpr uint32_t kScratchIndex = kScratchBytes + 4;  // of its operand block in the workspace
    static constexpr uint32_t kScratchChunk = kScratchBytes + 8;
    static constexpr uint32_t kScratchStride = kScratchBytes + 32;
    static constexpr uint32_t kOffsetClaimed = kOffsetScratch + kInputs * kScratchStride;
    static constexpr uint32_t kOffsetInputFull = kOffsetClaimed + 8 * kInputs;
    static constexpr uint32_t kOffsetInputEmpty = kOffsetInputFull + 8 * kInputs;
    static constexpr uint32_t kOffsetBlockFull = kOffsetInputEmpty + 8 * kInputs;
    static constexpr uint32_t kOffsetBlockEmpty = kOffsetBlockFull + 8 * kTeams;
    static constexpr uint32_t kEnd = kOffsetBlockEmpty + 8 * kTeams;
    static_assert(kBase_ % 1024 == 0 && kBlockV % 1024 == 0 && kOffsetScratch % 16 == 0 && kScratchStride % 16 == 0);
};

template <int kTeams_, int kInputs_, uint32_t kBase_>
struct Team<SplitMap<kTeams_, kInputs_, kBase_>> {
    uint32_t scratch_at;  // of the input stage
    uint32_t index;
    int warp;
    int lane;

    __device__ __forceinline__ uint32_t scratch() const { return scratch_at; }
    __device__ __forceinline__ void sync() const { ptx::named_barrier_sync(1 + index, 128); }
    __device__ __forceinline__ void sync_first() const { ptx::named_barrier_sync(1 + kTeams_ + index, 64); }
};

// Recurrence blocks have a ring of operand blocks with values, fewer with a team beside it.
template <int kHosted>
struct RecurrenceMap {
    static constexpr int kStages = kHosted > 0 ? 3 : 5;
    static constexpr uint32_t kOffsetFull = kStages * kBlockBytes;
    static constexpr uint32_t kOffsetOutput = kOffsetFull + 8 * kStages;
    static constexpr uint32_t kOffsetEmpty = kOffsetOutput + 8 * kStages;
    static constexpr uint32_t kEnd = kOffsetEmpty + 8 * kStages;
    static constexpr uint32_t kBase = (kEnd + 1023) / 1024 * 1024;
    using Team = SplitMap<1, 2, kBase>;
};
using PrepareMap = SplitMap<3, 5, 0>;

template <int kHosted>
inline constexpr uint32_t kSplitSharedBytes =
    1024 + max_of(PrepareMap::kEnd, kHosted > 0 ? RecurrenceMap<kHosted>::Team::kEnd : RecurrenceMap<kHosted>::kEnd);
static_assert(kSplitSharedBytes<0> <= 232448 && kSplitSharedBytes<1> <= 232448, "227 KB of shared memory per block");

// Registers a thread: teams and helpers of a prepare block, helpers of a recurrence block (whose team keeps 128).
inline constexpr uint32_t kSplitTeamRegs = 152;
inline constexpr uint32_t kSplitHelperRegs = 56;
inline constexpr uint32_t kSplitHostHelperRegs = 48;
static_assert(3 * kSplitTeamRegs + kSplitHelperRegs <= 512 && 2 * kConsumerRegs + 128 + kSplitHostHelperRegs <= 512,
              "setmaxnreg would wait for ever: the pool is what the block was launched with");

// A chunk on its way from the claimer to a helper.
struct ClaimedChunk {
    Unit unit;
    int32_t done;  // tokens of the unit before it
};
static_assert(sizeof(ClaimedChunk) == 20);

// A warp: chunks of the longest sequence.
__device__ __forceinline__ uint32_t longest(const KdaParams& p) {
    uint32_t tokens = static_cast<uint32_t>(p.seqlen);
    if (p.cu_seqlens != nullptr) {
        tokens = 0;
        for (int64_t i = threadIdx.x % 32; i < p.num_sequences; i += 32) {
            const int64_t length = load_index(p.cu_seqlens, i + 1, p.index64) - load_index(p.cu_seqlens, i, p.index64);
            tokens = max(tokens, static_cast<uint32_t>(length));
        }
        tokens = __reduce_max_sync(0xffffffffu, tokens);
    }
    return (tokens + kChunk - 1) / kChunk;
}

// A thread. Counts chunks as chunk * units + unit.
template <class M>
__device__ __forceinline__ void claim_chunks(const Args& args, uint32_t smem, uint32_t* counter, uint32_t chunks) {
    const KdaParams& p = args.p;
    const uint32_t units = num_units(p);
    const uint32_t end = units * chunks;
    const int group = static_cast<int>(p.heads_v / p.heads_qk);
    pipe::PipeState<M::kInputs> state = pipe::PipeState<M::kInputs>::producer();
    const auto stage_free = [&] { ptx::mbarrier_wait(smem + M::kOffsetInputEmpty + 8 * state.stage, state.phase); };
    uint32_t claimed = atomicAdd(counter, 1u);
    while (claimed < end) {
        const uint32_t next = atomicAdd(counter, 1u);  // its way is long
        const uint32_t number = claimed / units;
        Unit unit;
        unit.locate(p, claimed - number * units);
        const int done = static_cast<int>(number * kChunk);
        if (done < unit.tokens) {
            const int head_qk = group == 1 ? unit.head : unit.head / group;
            const uint32_t scratch = smem + M::kOffsetScratch + state.stage * M::kScratchStride;
            const uint32_t to = smem + M::kOffsetInput + state.stage * kInputBytes;
            const uint32_t full = smem + M::kOffsetInputFull + 8 * state.stage;
            stage_free();
            st_shared_u2(scratch + M::kScratchLength, static_cast<uint32_t>(min(kChunk, unit.tokens - done)),
                         static_cast<uint32_t>(block_index(p, unit, done)));
            st_shared_u2(scratch + M::kScratchChunk, unit.n, unit.head);
            st_shared_u2(scratch + M::kScratchChunk + 8, unit.tokens, unit.row);
            st_shared_u(scratch + M::kScratchChunk + 16, done);
            ptx::mbarrier_arrive(smem + M::kOffsetClaimed + 8 * state.stage);
            ptx::mbarrier_arrive_expect_tx(full, kInputBytes);
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                load_box(to + half * kInputHalf + kInputG, args.g, full, 64 * half, unit, unit.head, done, p);
                load_box(to + half * kInputHalf, args.k, full, 64 * half, unit, head_qk, done, p);
                load_box(to + half * kInputHalf + kInputQ, args.q, full, 64 * half, unit, head_qk, done, p);
            }
            state.advance();
        }
        claimed = next;
    }
    for (int i = 0; i < M::kTeams; ++i) {
        stage_free();
        st_shared_u(smem + M::kOffsetScratch + state.stage * M::kScratchStride + M::kScratchLength, 0xffffffffu);
        ptx::mbarrier_arrive(smem + M::kOffsetClaimed + 8 * state.stage);
        ptx::mbarrier_arrive(smem + M::kOffsetInputFull + 8 * state.stage);
        state.advance();
    }
}

// A warp.
template <typename T, Anchors kAnchors, class M>
__device__ __forceinline__ void help_team(const KdaParams& p, uint32_t smem, uint32_t team, uint8_t* workspace,
                                          uint32_t* flags) {
    const int lane = static_cast<int>(threadIdx.x % 32);
    pipe::PipeState<M::kInputs> input = pipe::PipeState<M::kInputs>::consumer();
    for (uint32_t i = 0; i < team; ++i) {
        input.advance();
    }
    int64_t index = -1;  // of the block that the team is making
    for (uint32_t phase = 0;; phase ^= 1) {
        const uint32_t scratch = smem + M::kOffsetScratch + input.stage * M::kScratchStride;
        ptx::mbarrier_wait(smem + M::kOffsetClaimed + 8 * input.stage, input.phase);
        const int length = static_cast<int>(ptx::ld_shared_b32(scratch + M::kScratchLength));
        int64_t next = -1;
        if (length > 0) {
            next = static_cast<int64_t>(ptx::ld_shared_b32(scratch + M::kScratchIndex));
            ClaimedChunk chunk;
            const uint2 first = ld_shared_u2(scratch + M::kScratchChunk);
            const uint2 second = ld_shared_u2(scratch + M::kScratchChunk + 8);
            chunk.unit = {static_cast<int32_t>(first.x), static_cast<int32_t>(first.y), static_cast<int32_t>(second.x),
                          static_cast<int32_t>(second.y)};
            chunk.done = static_cast<int32_t>(ptx::ld_shared_b32(scratch + M::kScratchChunk + 16));
            const float beta = load_beta<T>(p, chunk, lane);
            put_gate<kAnchors>(p, Team<M>{scratch, 0, 0, lane}, chunk.unit.head);
            st_shared_f(scratch + kScratchBeta + 4 * lane, lane < length ? activate_beta(p.beta_activation, beta) : 0.0f);
        }
        __syncwarp();
        if (lane == 0) {
            ptx::mbarrier_arrive(smem + M::kOffsetInputFull + 8 * input.stage);
        }
        if (index >= 0) {
            ptx::mbarrier_wait(smem + M::kOffsetBlockFull + 8 * team, phase ^ 1);
            if (lane == 0) {
                ptx::bulk_store(workspace + index * kOperandBytes, smem + M::kOffsetBlock + team * kBlockV, kOperandBytes);
                ptx::bulk_commit_group();
                ptx::bulk_wait_group_read<0>();
                ptx::mbarrier_arrive(smem + M::kOffsetBlockEmpty + 8 * team);
                ptx::bulk_wait_group<0>();
                ptx::fence_proxy_async_global();
                ptx::st_release_gpu(flags + index, 1);
            }
            __syncwarp();
        }
        if (next < 0) {
            return;
        }
        index = next;
        for (int i = 0; i < M::kTeams; ++i) {
            input.advance();
        }
    }
}

// A warpgroup: every kTeams-th chunk of the ring.
template <typename T, Anchors kAnchors, class M>
__device__ __forceinline__ void run_split_team(const KdaParams& p, uint32_t smem, Team<M> team) {
    pipe::PipeState<M::kInputs> input = pipe::PipeState<M::kInputs>::consumer();
    for (uint32_t i = 0; i < team.index; ++i) {
        input.advance();
    }
    const uint32_t block = smem + M::kOffsetBlock + team.index * kBlockV;
    const uint32_t full = smem + M::kOffsetBlockFull + 8 * team.index;
    const uint32_t empty = smem + M::kOffsetBlockEmpty + 8 * team.index;
    uint32_t phase = 1;  // of empty
#pragma unroll 1
    while (true) {
        const uint32_t stage = smem + M::kOffsetInput + input.stage * kInputBytes;
        team.scratch_at = smem + M::kOffsetScratch + input.stage * M::kScratchStride;
        // A stage is full for every team in turn, and a parity tells only neighbouring rounds apart: claimed says that the stage
        // has come to this round.
        ptx::mbarrier_wait(smem + M::kOffsetClaimed + 8 * input.stage, input.phase);
        ptx::mbarrier_wait(smem + M::kOffsetInputFull + 8 * input.stage, input.phase);
        const int length = static_cast<int>(ptx::ld_shared_b32(team.scratch() + M::kScratchLength));
        if (length < 0) {
            return;
        }
        const bool two_terms =
            prepare_tiles<T, kAnchors>(p, team, stage, block, length, [&] { ptx::mbarrier_wait(empty, phase); });
        phase ^= 1;
        ptx::fence_proxy_async_smem();
        team.sync();
        multiply_chunk<T, kAnchors>(team, stage, block, two_terms, [] {});
        team.sync();
        put_inverse<T>(team, block);
        ptx::fence_proxy_async_smem();
        team.sync();
        put_w<T>(team, stage, block);
        ptx::fence_proxy_async_smem();  // also: the stage goes back to the copies
        __syncwarp();
        if (team.lane == 0) {
            ptx::mbarrier_arrive(full);
            ptx::mbarrier_arrive(smem + M::kOffsetInputEmpty + 8 * input.stage);
        }
        for (int i = 0; i < M::kTeams; ++i) {
            input.advance();
        }
    }
}

// A thread.
template <class R>
__device__ __forceinline__ void fill_stages(const Args& args, const Unit& unit, int column0, int groups, uint32_t smem,
                                            const uint8_t* workspace, const uint32_t* flags) {
    const int64_t first = block_index(args.p, unit, 0);
    const uint8_t* source = workspace + first * kOperandBytes;
    const uint32_t* flag = flags + first;
    pipe::PipeState<R::kStages> state = pipe::PipeState<R::kStages>::producer();
#pragma unroll 1
    for (int done = 0; done < unit.tokens; done += kChunk) {
        const uint32_t stage = smem + state.stage * kBlockBytes;
        const uint32_t bar = smem + R::kOffsetFull + 8 * state.stage;
        ptx::mbarrier_wait(smem + R::kOffsetEmpty + 8 * state.stage, state.phase);
        ptx::mbarrier_arrive_expect_tx(bar, kOperandBytes + groups * kHalfTileBytes);
        for (int group = 0; group < groups; ++group) {
            load_box(stage + kBlockV + group * kHalfTileBytes, args.v, bar, column0 + 64 * group, unit, unit.head, done,
                     args.p);
        }
        while (ptx::ld_acquire_gpu(flag) == 0) {
        }
        ptx::fence_proxy_async_global();
        ptx::bulk_load(stage, source, kOperandBytes, bar);
        source += kOperandBytes;
        ++flag;
        state.advance();
    }
}

// A warp.
template <typename T, class R>
__device__ __forceinline__ void write_output(const KdaParams& p, const Unit& unit, int column0, int groups, uint32_t smem) {
    const int lane = static_cast<int>(threadIdx.x % 32);
    const int64_t stride = p.out_stride.token;
    T* out = static_cast<T*>(p.out) + static_cast<int64_t>(unit.batch(p)) * p.out_stride.batch +
             static_cast<int64_t>(unit.row + lane / 8) * stride + unit.head * p.out_stride.head + column0 + 8 * (lane % 8);
    pipe::PipeState<R::kStages> state = pipe::PipeState<R::kStages>::consumer();
#pragma unroll 1
    for (int remaining = unit.tokens; remaining > 0; remaining -= kChunk) {
        ptx::mbarrier_wait(smem + R::kOffsetOutput + 8 * state.stage, state.phase);
        for (int group = 0; group < groups; ++group) {
            const uint32_t values = smem + state.stage * kBlockBytes + kBlockV + group * kHalfTileBytes;
#pragma unroll
            for (int row = 0; row < kChunk; row += 4) {
                const int token = row + lane / 8;
                uint32_t r[4];
                ptx::ld_shared_v4(r, values + token * 128 + (((lane % 8) ^ (token % 8)) << 4));
                if (token < remaining) {
                    ptx::st_global_v4(out + row * stride + 64 * group, r);
                }
            }
        }
        ptx::fence_proxy_async_smem();  // the values' places go back to the copies
        __syncwarp();
        if (lane == 0) {
            ptx::mbarrier_arrive(smem + R::kOffsetEmpty + 8 * state.stage);
        }
        out += kChunk * stride;
        state.advance();
    }
}

template <class M>
__device__ __forceinline__ void init_split_barriers(uint32_t smem) {
    for (int i = 0; i < M::kInputs; ++i) {
        ptx::mbarrier_init(smem + M::kOffsetClaimed + 8 * i, 1);
        ptx::mbarrier_init(smem + M::kOffsetInputFull + 8 * i, 2);
        ptx::mbarrier_init(smem + M::kOffsetInputEmpty + 8 * i, 4);
    }
    for (int i = 0; i < M::kTeams; ++i) {
        ptx::mbarrier_init(smem + M::kOffsetBlockFull + 8 * i, 4);
        ptx::mbarrier_init(smem + M::kOffsetBlockEmpty + 8 * i, 1);
    }
}

// flags: one per operand block, and behind them the counter of claimed chunks; all zero at the start.
template <typename T, int kHosted, Anchors kAnchors>
__global__ void __launch_bounds__(kThreads, 1)
    kda_split_sm90_kernel(const __grid_constant__ Args args, uint8_t* workspace, uint32_t* flags, uint32_t* counter,
                          uint32_t prepare_blocks, int groups) {
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
                help_team<T, kAnchors, M>(p, smem, static_cast<uint32_t>(warp - 12), workspace, flags);
            } else {
                const uint32_t chunks = longest(p);
                if (ptx::elect_one()) {
                    claim_chunks<M>(args, smem, counter, chunks);
                }
            }
        }
        return;
    }
    using R = RecurrenceMap<kHosted>;
    using M = typename R::Team;
    if (threadIdx.x == 0) {
        for (int i = 0; i < R::kStages; ++i) {
            ptx::mbarrier_init(smem + R::kOffsetFull + 8 * i, 1);
            ptx::mbarrier_init(smem + R::kOffsetOutput + 8 * i, 4 * groups);
            ptx::mbarrier_init(smem + R::kOffsetEmpty + 8 * i, 1);
        }
        if (kHosted > 0) {
            init_split_barriers<M>(smem);
        }
        ptx::fence_mbarrier_init();
    }
    __syncthreads();
    const uint32_t index = blockIdx.x - prepare_blocks;
    const bool halves = 64 * groups < p.head_dim_v;  // two blocks a unit
    const int column0 = halves ? 64 * static_cast<int>(index % 2) : 0;
    Unit unit;
    unit.locate(p, halves ? index / 2 : index);
    if (warp < 4 * groups) {
        ptx::setmaxnreg_inc<kConsumerRegs>();
        pipe::PipeState<R::kStages> state = pipe::PipeState<R::kStages>::consumer();
        consume_unit(p, unit, column0 + 16 * warp, smem, smem + R::kOffsetFull, state,
                           [&](float(&s)[64], uint32_t stage, uint32_t block, int length) {
                               consume_chunk<T>(s, block, block + kBlockV + (warp / 4) * kHalfTileBytes, length, lane,
                                                2 * (warp % 4), [] {});
                               if (lane == 0) {
                                   ptx::mbarrier_arrive(smem + R::kOffsetOutput + 8 * stage);
                               }
                           });
    } else if (warp >= 12) {
        ptx::setmaxnreg_dec<kSplitHostHelperRegs>();
        if (warp == 12) {
            if (ptx::elect_one()) {
                fill_stages<R>(args, unit, column0, groups, smem, workspace, flags);
            }
        } else if (warp == 13) {
            write_output<T, R>(p, unit, column0, groups, smem);
        } else if (kHosted > 0 && warp == 14) {
            help_team<T, kAnchors, M>(p, smem, 0, workspace, flags);
        } else if (kHosted > 0) {
            const uint32_t chunks = longest(p);
            if (ptx::elect_one()) {
                claim_chunks<M>(args, smem, counter, chunks);
            }
        }
    } else if (kHosted > 0 && warp >= 8) {
        run_split_team<T, kAnchors, M>(p, smem, {0, 0, warp % 4, lane});
    }
#else
    __trap();
#endif
}

}  // namespace flare::kda::fused
