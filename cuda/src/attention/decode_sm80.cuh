// Attention of at most 16 query rows of a K/V head (the tokens times the heads of its group) against a long run of keys: made
// to read K and V as fast as memory gives them.
//
// Each warp has its own ring of kStages chunks of 16 keys, filled by its own cp.async and waited for by itself alone: no
// barrier of the block until the end. A chunk is two products: S (16 x 16) = Q K^T with Q in registers, O (16 x Dv) += P V. At
// the end the warps' (m, l, O) are merged through shared memory.
//
// Shared memory (bytes): per warp kStages * 16 * (D + Dv) * 2, tiles in the format of tile/smem_layout.cuh; at the end O of
// each warp, fp32 [16][Dv], takes the ring's place. Behind the rings m and l of each warp and row; with D = 256, where
// registers are short, then the fragments of Q, [D / 16][lane] of 16 bytes.
#pragma once

#include "fwd_sm80.cuh"

namespace flare::attention {

template <typename T_, int kHeadDim_, int kWarps_, int kStages_, int kBlocksPerSm_>
struct Sm80DecodeConfig {
    using T = T_;
    static constexpr int kHeadDim = kHeadDim_;  // of K and V, padded
    static constexpr int kWarps = kWarps_;
    static constexpr int kThreads = 32 * kWarps;
    static constexpr int kStages = kStages_;
    static constexpr int kBlocksPerSm = kBlocksPerSm_;
    static constexpr int kChunk = 16;
    static constexpr int kSpan = 128;
    static constexpr int kBytesTile = kChunk * kHeadDim * 2;
    static constexpr int kBytesRing = kStages * 2 * kBytesTile;
    static constexpr int kRowO = kHeadDim + 4;  // floats; the padding spreads rows over banks
    static constexpr int kOffsetStats = kWarps * kBytesRing;
    static constexpr bool kQueryInRegisters = kHeadDim <= 128;
    static constexpr int kOffsetQuery = kOffsetStats + 2 * kWarps * kDecodeRows * 4;
    static constexpr int kSmemBytes = kOffsetQuery + (kQueryInRegisters ? 0 : kDecodeRows * kHeadDim * 2);

    static_assert(kHeadDim % 64 == 0, "head dimensions are whole spans");
    static_assert(kDecodeRows * kRowO * 4 <= kBytesRing, "O takes the ring's place");
    static_assert(kStages >= 2, "one chunk is copied while another is read");
};

template <class Cfg>
struct Sm80Decode {
    using T = typename Cfg::T;
    static constexpr int kOutputs = Cfg::kHeadDim / 2;
    static constexpr int kSteps = Cfg::kHeadDim / 16;
    static constexpr int kScores = Cfg::kChunk / 2;
    static constexpr int kQuerySteps = Cfg::kQueryInRegisters ? kSteps : 1;
    static constexpr tile::Swizzle kSwizzle = tile::Swizzle::k128;

    const Sm80Args& args;
    const Sm80Tile& tile;
    const ScoreRule& rule;
    KeySource keys_k;
    KeySource keys_v;
    uint8_t* smem;
    uint32_t ring;  // of this warp
    int warp;
    int lane;

    // Chunk c of this warp covers the keys from here on.
    __device__ __forceinline__ int first_key(int c) const { return tile.first_key + (c * Cfg::kWarps + warp) * Cfg::kChunk; }

    __device__ __forceinline__ void copy_chunk(int c) const {
        const FwdParams& p = args.params;
        const char* nowhere = static_cast<const char*>(p.q);
        const uint32_t stage = ring + c % Cfg::kStages * 2 * Cfg::kBytesTile;
        const int piece = lane % 8;
#pragma unroll
        for (int pass = 0; pass < Cfg::kChunk / 4; ++pass) {
            const int row = lane / 8 + 4 * pass;
            const int key = first_key(c) + row;
            const bool inside = key < tile.last_key;
            const KeyPlace place = inside ? KeyPlace::find(args, tile.batch, key) : KeyPlace{0, 0};
            const char* k = keys_k.row(place);
            const char* v = keys_v.row(place);
            const uint32_t at = stage + tile::swizzle<kSwizzle>(static_cast<uint32_t>(row * Cfg::kSpan + piece * 16));
#pragma unroll
            for (int span = 0; span < Cfg::kHeadDim / 64; ++span) {
                const int byte = span * Cfg::kSpan + piece * 16;
                const bool has_k = inside && byte < 2 * p.head_dim;
                const bool has_v = inside && byte < 2 * p.head_dim_v;
                const uint32_t dst = at + span * Cfg::kChunk * Cfg::kSpan;
                ptx::cp_async_16(dst, has_k ? k + byte : nowhere, has_k ? 16 : 0);
                ptx::cp_async_16(dst + Cfg::kBytesTile, has_v ? v + byte : nowhere, has_v ? 16 : 0);
            }
        }
    }

    // Fragment of Q for step kk, from memory.
    __device__ __forceinline__ void load_query(uint32_t (&q)[4], const char* const (&rows)[2], int kk) const {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const int r = i % 2;
            const int column = 16 * kk + i / 2 * 8 + 2 * (lane % 4);
            const bool inside = rows[r] != nullptr && column < args.params.head_dim;
            q[i] = inside ? *reinterpret_cast<const uint32_t*>(rows[r] + column * 2) : 0;
        }
    }

    __device__ __forceinline__ uint32_t query_addr(int kk) const {
        return static_cast<uint32_t>(__cvta_generic_to_shared(smem)) + Cfg::kOffsetQuery + (kk * 32 + lane) * 16;
    }

    __device__ __forceinline__ void load_queries(uint32_t (&q)[kQuerySteps][4]) const {
        const FwdParams& p = args.params;
        const char* base = static_cast<const char*>(p.q) + (tile.q_batch * p.q_stride.batch + tile.q_row * p.q_stride.row) * 2;
        const char* rows[2];
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            const int row = lane / 4 + 8 * r;
            const int absolute = tile.row0 + min(row, tile.count - 1);
            const int token = tile.token(args, absolute);
            const int head = tile.query_head(args, absolute, token);
            rows[r] = row < tile.count ? base + (token * p.q_stride.row + head * p.q_stride.head) * 2 : nullptr;
        }
        if constexpr (Cfg::kQueryInRegisters) {
#pragma unroll
            for (int kk = 0; kk < kSteps; ++kk) {
                load_query(q[kk], rows, kk);
            }
        } else {
            for (int kk = warp; kk < kSteps; kk += Cfg::kWarps) {
                load_query(q[0], rows, kk);
                ptx::st_shared_v4(query_addr(kk), q[0]);
            }
            __syncthreads();
        }
    }

    // Step kk of 16 elements in a tile of 16 rows.
    static __device__ __forceinline__ uint32_t step_addr(uint32_t lane_addr, int kk) {
        return (lane_addr ^ (kk % 4 * 32)) + kk / 4 * Cfg::kChunk * Cfg::kSpan;
    }

    static __device__ __forceinline__ uint32_t lane_offset(int row, int half) {
        return tile::swizzle<kSwizzle>(static_cast<uint32_t>(row * Cfg::kSpan + half * 16));
    }

    __device__ __forceinline__ void multiply_scores(float (&s)[kScores], uint32_t (&q)[kQuerySteps][4], uint32_t smem_k) const {
        const uint32_t addr = smem_k + lane_offset(lane / 16 * 8 + lane % 8, lane / 8 % 2);
#pragma unroll
        for (int i = 0; i < kScores; ++i) {
            s[i] = 0.0f;
        }
#pragma unroll
        for (int kk = 0; kk < kSteps; ++kk) {
            uint32_t b[4];
            ptx::ldmatrix_x4(b, step_addr(addr, kk));
            uint32_t (&a)[4] = q[Cfg::kQueryInRegisters ? kk : 0];
            if constexpr (!Cfg::kQueryInRegisters) {
                ptx::ld_shared_v4(a, query_addr(kk));
            }
            ptx::mma_m16n8k16<T>(&s[0], a, b[0], b[1]);
            ptx::mma_m16n8k16<T>(&s[4], a, b[2], b[3]);
        }
    }

    __device__ __forceinline__ void multiply_values(float (&o)[kOutputs], const float (&s)[kScores], uint32_t smem_v) const {
        const uint32_t addr = smem_v + lane_offset(lane % 16, lane / 16);
        uint32_t a[4];
        pack_weights<T>(a, s);
#pragma unroll
        for (int dt = 0; dt < kSteps; ++dt) {
            uint32_t b[4];
            ptx::ldmatrix_x4_trans(b, step_addr(addr, dt));
            ptx::mma_m16n8k16<T>(&o[8 * dt], a, b[0], b[1]);
            ptx::mma_m16n8k16<T>(&o[8 * dt + 4], a, b[2], b[3]);
        }
    }

    // position: of the two rows on the key axis; slope: ALiBi per unit.
    __device__ __forceinline__ void transform_scores(float (&s)[kScores], const int (&position)[2], const float (&slope)[2],
                                                     int first) const {
        const FwdParams& p = args.params;
        if (rule.softcap) {
#pragma unroll
            for (int i = 0; i < kScores; ++i) {
                s[i] = tanh_exp(s[i] * rule.softcap_in);
            }
        } else if (rule.prescale != 1.0f) {
#pragma unroll
            for (int i = 0; i < kScores; ++i) {
                s[i] *= rule.prescale;
            }
        }
#pragma unroll
        for (int i = 0; i < kScores; ++i) {
            const int r = (i / 2) % 2;
            const int key = first + 8 * (i / 4) + 2 * (lane % 4) + i % 2;
            if (p.alibi_slopes != nullptr) {
                s[i] -= slope[r] * fabsf(static_cast<float>(position[r] - key));
            }
            const int hi = min(tile.last_key - 1, position[r] + p.window_right);
            const bool visible = key >= position[r] - p.window_left && key <= hi;
            s[i] = visible ? s[i] : -INFINITY;
        }
    }

    // This warp's O, maxima (in units) and sums to shared memory; its copies are done and its ring is read no more.
    __device__ __forceinline__ void hand_over(const float (&o)[kOutputs], const Softmax& softmax) const {
        float* rows = reinterpret_cast<float*>(smem + warp * Cfg::kBytesRing);
        float* stats = reinterpret_cast<float*>(smem + Cfg::kOffsetStats) + warp * 2 * kDecodeRows;
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            const int row = lane / 4 + 8 * r;
            const float sum = tile::quad_sum(softmax.row_sum[r]);
            if (row < tile.count) {
#pragma unroll
                for (int i = 2 * r; i < kOutputs; i += 4) {
                    *reinterpret_cast<float2*>(rows + row * Cfg::kRowO + 2 * (i - 2 * r) + 2 * (lane % 4)) =
                        make_float2(o[i], o[i + 1]);
                }
                if (lane % 4 == 0) {
                    stats[row] = softmax.row_max[r];
                    stats[kDecodeRows + row] = sum;
                }
            }
        }
    }

    // Four columns of a row a thread.
    __device__ __forceinline__ void merge_and_store() const {
        const FwdParams& p = args.params;
        const bool split = args.partial_out != nullptr;
        const float descale = rule.value_descale(args, tile);
        const float* stats = reinterpret_cast<const float*>(smem + Cfg::kOffsetStats);
        constexpr int kQuads = Cfg::kHeadDim / 4;
        for (int i = static_cast<int>(threadIdx.x); i < tile.count * kQuads; i += Cfg::kThreads) {
            const int row = i / kQuads;
            const int column = i % kQuads * 4;
            if (column >= p.head_dim_v) {
                continue;
            }
            float max = -INFINITY;
#pragma unroll
            for (int w = 0; w < Cfg::kWarps; ++w) {
                max = fmaxf(max, stats[w * 2 * kDecodeRows + row]);
            }
            float sum = 0.0f;
            float4 o = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
#pragma unroll
            for (int w = 0; w < Cfg::kWarps; ++w) {
                const float own = stats[w * 2 * kDecodeRows + row];
                const float weight = own == -INFINITY ? 0.0f : ptx::exp2_approx((own - max) * rule.scale_log2);
                const float4 part =
                    *reinterpret_cast<const float4*>(smem + w * Cfg::kBytesRing + (row * Cfg::kRowO + column) * 4);
                sum += weight * stats[w * 2 * kDecodeRows + kDecodeRows + row];
                o.x += weight * part.x;
                o.y += weight * part.y;
                o.z += weight * part.z;
                o.w += weight * part.w;
            }
            const int token = tile.token(args, tile.row0 + row);
            const int head = tile.query_head(args, tile.row0 + row, token);
            const float sink = p.sink != nullptr && !split ? p.sink[head] : -INFINITY;
            float lse;
            const float factor = Softmax::normaliser(max * rule.unit, sum, sink, lse) * descale;
            const OutputRow at = OutputRow::make(args, tile, token, head);
            float* lse_base = split ? args.partial_lse : p.lse;
            if (column == 0 && lse_base != nullptr) {
                lse_base[at.lse] = lse;
            }
            const float4 result = make_float4(o.x * factor, o.y * factor, o.z * factor, o.w * factor);
            if (split) {
                *reinterpret_cast<float4*>(args.partial_out + at.out + column) = result;
            } else {
                store_4(p.o, p.out_dtype, at.out + column, result);
            }
        }
    }

    __device__ __forceinline__ void run() const {
        uint32_t q[kQuerySteps][4];
        float o[kOutputs];
        float s[kScores];
        Softmax softmax;
        softmax.reset();
#pragma unroll
        for (int i = 0; i < kOutputs; ++i) {
            o[i] = 0.0f;
        }
        const int mine = tile.last_key - tile.first_key - warp * Cfg::kChunk;
        const int num_chunks = mine <= 0 ? 0 : (mine + Cfg::kWarps * Cfg::kChunk - 1) / (Cfg::kWarps * Cfg::kChunk);
#pragma unroll
        for (int c = 0; c < Cfg::kStages - 1; ++c) {
            if (c < num_chunks) {
                copy_chunk(c);
            }
            ptx::cp_async_commit();
        }
        load_queries(q);
        int position[2];
        float slope[2];
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            const int row = tile.row0 + min(lane / 4 + 8 * r, tile.count - 1);
            const int token = tile.token(args, row);
            position[r] = token + tile.seqlen_k - tile.seqlen_q;
            slope[r] = alibi_slope(args.params, tile.batch, tile.query_head(args, row, token)) / rule.unit;
        }
        for (int c = 0; c < num_chunks; ++c) {
            ptx::cp_async_wait<Cfg::kStages - 2>();
            __syncwarp();
            if (c + Cfg::kStages - 1 < num_chunks) {
                copy_chunk(c + Cfg::kStages - 1);
            }
            ptx::cp_async_commit();
            const uint32_t smem_k = ring + c % Cfg::kStages * 2 * Cfg::kBytesTile;
            multiply_scores(s, q, smem_k);
            transform_scores(s, position, slope, first_key(c));
            float alpha[2];
            softmax.update(s, alpha, rule.scale_log2);
            rescale(o, alpha);
            multiply_values(o, s, smem_k + Cfg::kBytesTile);
        }
        ptx::cp_async_wait<0>();
        __syncwarp();
        hand_over(o, softmax);
        __syncthreads();
        merge_and_store();
    }
};

template <class Cfg>
__global__ void __launch_bounds__(Cfg::kThreads, Cfg::kBlocksPerSm)
    attention_decode_sm80_kernel(const __grid_constant__ Sm80Args args) {
    extern __shared__ __align__(1024) uint8_t smem[];
    const Sm80Tile tile = Sm80Tile::make<kDecodeRows, Cfg::kChunk>(args, static_cast<int>(blockIdx.x));
    if (tile.count <= 0) {
        return;
    }
    const FwdParams& p = args.params;
    const ScoreRule rule = ScoreRule::make(args, tile);
    const int warp = static_cast<int>(threadIdx.x) / 32;
    const Sm80Decode<Cfg> decode{args,
                                 tile,
                                 rule,
                                 KeySource::make(args, tile, p.k, args.k),
                                 KeySource::make(args, tile, p.v, args.v),
                                 smem,
                                 static_cast<uint32_t>(__cvta_generic_to_shared(smem)) + warp * Cfg::kBytesRing,
                                 warp,
                                 static_cast<int>(threadIdx.x) % 32};
    decode.run();
}

template <class Cfg>
cudaError_t launch_decode_sm80(const Sm80Args& args, int64_t num_tiles, cudaStream_t stream) {
    const auto kernel = attention_decode_sm80_kernel<Cfg>;
    if (const cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, Cfg::kSmemBytes)) {
        return error;
    }
    kernel<<<static_cast<unsigned>(num_tiles), Cfg::kThreads, Cfg::kSmemBytes, stream>>>(args);
    return cudaPeekAtLastError();
}

}  // namespace flare::attention
