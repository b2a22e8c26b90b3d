// Host side of one instance of the Hopper attention kernel: tensor maps, tile order, launch.
#pragma once

#include <algorithm>
#include <cstdint>

#include "../tile/tensor_map.h"
#include "flare.h"
#include "forward_sm90.h"
#include "fwd_sm90.cuh"

namespace flare::attention {

// Keys and values that L2 holds beside everything else, bytes (of 50 MB).
inline constexpr int64_t kKeysInL2 = int64_t{32} << 20;

inline int32_t clamp_window(int32_t bound) {
    return bound < 0 || bound > kUnbounded ? kUnbounded : bound;
}

template <class Cfg>
inline constexpr CUtensorMapDataType kMapType = Cfg::kFp8                                   ? CU_TENSOR_MAP_DATA_TYPE_UINT8
                                                : std::is_same_v<typename Cfg::T, __half> ? CU_TENSOR_MAP_DATA_TYPE_FLOAT16
                                                                                            : CU_TENSOR_MAP_DATA_TYPE_BFLOAT16;

// {span, rows, D / span, heads, batch}: one box lands a whole tile in the format of tile/smem_layout.cuh.
template <class Cfg>
bool make_map(CUtensorMap* map, const void* base, const Strides& stride, int64_t rows, int32_t head_dim, int32_t heads,
              int32_t batch, uint32_t box_rows, int32_t box_chunks) {
    const int64_t dims[5] = {Cfg::kSpan, rows, head_dim / Cfg::kSpan, heads, batch};
    const int64_t strides[4] = {stride.row * Cfg::kElement, Cfg::kSpan * Cfg::kElement, stride.head * Cfg::kElement,
                                stride.batch * Cfg::kElement};
    const uint32_t box[5] = {Cfg::kSpan, box_rows, static_cast<uint32_t>(box_chunks), 1, 1};
    return tile::make_tensor_map(map, kMapType<Cfg>, 5, base, dims, strides, box, Cfg::kSwizzle);
}

// Q with 2^head_bits heads joined: {span, heads, rows, D / span, batch}.
template <class Cfg>
bool make_joined_map(CUtensorMap* map, const FwdParams& p, int64_t rows, int32_t batch, int32_t head_bits) {
    constexpr int32_t kChunks = Cfg::kHeadDim / Cfg::kSpan;
    const int64_t dims[5] = {Cfg::kSpan, p.heads_q, rows, kChunks, batch};
    const int64_t strides[4] = {p.q_stride.head * Cfg::kElement, p.q_stride.row * Cfg::kElement, Cfg::kSpan * Cfg::kElement,
                                p.q_stride.batch * Cfg::kElement};
    const uint32_t box[5] = {Cfg::kSpan, 1u << head_bits, static_cast<uint32_t>(Cfg::kQRows >> head_bits), kChunks, 1};
    return tile::make_tensor_map(map, kMapType<Cfg>, 5, p.q, dims, strides, box, Cfg::kSwizzle);
}

// Whether L2 doesn't hold the keys of all heads.
inline bool beyond_l2(const FwdParams& p) {
    const int64_t keys = p.cu_seqlens_k != nullptr ? p.total_k : int64_t{p.batch} * p.seqlen_k;
    return 2 * keys * p.heads_kv * (p.head_dim + p.head_dim_v) > kKeysInL2;
}

// Whether reading the keys of all heads at a time would be the limit: L2 doesn't hold them, and fewer than four blocks work on
// the same. Tiles of 192 rows read less.
inline bool memory_bound(const FwdParams& p, int32_t rows) {
    return rows < 192 && beyond_l2(p) && 4 * int64_t{p.batch} * p.heads_kv > p.sm_count;
}

// Whether the tiles of dense queries are about as long as each other in spite of a causal mask, because queries are few to their
// keys, and few tiles share keys that L2 doesn't hold: these should be neighbours, then.
inline bool tiles_alike(const FwdParams& p, int32_t num_m, int32_t heads, int32_t workers) {
    const int64_t tiles = int64_t{num_m} * heads * p.batch;
    const bool alike = 8 * int64_t{p.seqlen_q} <= p.seqlen_k ? tiles >= 2 * workers
                                                             : 3 * int64_t{p.seqlen_q} <= p.seqlen_k && tiles >= 6 * workers;
    return alike && !has_device_lengths(p) && beyond_l2(p) && num_m * (heads / p.heads_kv) <= 32;
}

// Without a causal mask tiles are equal: the heads that share keys go together, for L2. With one, the longest tiles of all
// heads first balances best, but reads the keys of all heads at a time. Where L2 doesn't hold those: two rounds over a few
// heads, then over the next ones, if that takes hardly longer. Or where reading them would be the limit: two heads at a time,
// mirrored, if that leaves no more than a tenth of the blocks idle in the last round. `rows` of a tile, `workers` that take
// tiles.
inline pipe::TileSchedule tile_order(const FwdParams& p, int32_t rows, int32_t workers, bool causal) {
    const int32_t num_m = (p.seqlen_q + rows - 1) / rows;
    const int32_t pairs = p.batch * p.heads_q;
    if (!causal || tiles_alike(p, num_m, p.heads_q, workers)) {
        // Row blocks that the first key cuts short.
        const int64_t cut = int64_t{p.window_left} - (p.seqlen_k - p.seqlen_q);
        const int32_t short_m = p.window_left >= p.seqlen_k - 1 ? 0
                                : static_cast<int32_t>(std::clamp<int64_t>((cut + rows - 1) / rows, 0, num_m));
        return pipe::TileSchedule::make(num_m, p.batch, p.heads_q, p.heads_q / p.heads_kv, false, short_m);
    }
    // Lengths in row blocks, of the longest tile and of all.
    const int64_t longest = (p.seqlen_k + rows - 1) / rows;
    const int64_t total = int64_t{pairs} * num_m * (2 * longest - num_m + 1) / 2;
    if (beyond_l2(p) && num_m <= 2 * workers && longest >= num_m) {
        int32_t few = std::min(pairs, 2 * workers / num_m);
        while (pairs % few != 0) {
            --few;
        }
        // A block's tiles of a section, one of each round, are 2 * workers - 1 apart.
        const int64_t both = 2 * longest - (2 * workers - 1) / few + (2 * workers % few != 0 ? 1 : 0);
        const int64_t length = pairs / few * std::max(longest, both);
        if (few * num_m > workers && 100 * length * workers <= 101 * total) {
            return pipe::TileSchedule::make(num_m, p.batch, p.heads_q, few, false, 0, true);
        }
    }
    const int64_t twos = int64_t{num_m} * pairs / 2;
    const int64_t rounds = (twos + workers - 1) / workers;
    const bool mirrored = memory_bound(p, rows) && pairs % 2 == 0 && 10 * twos >= 9 * rounds * workers;
    return pipe::TileSchedule::make(num_m, p.batch, p.heads_q, mirrored ? 2 : pairs, mirrored);
}

template <class Cfg>
int32_t launch_sm90(const FwdParams& p, cudaStream_t stream) {
    if (p.batch == 0 || p.heads_q == 0 || p.seqlen_q == 0) {
        return FLARE_OK;
    }
    Sm90Args args{};
    args.params = p;
    args.params.window_left = clamp_window(p.window_left);
    args.params.window_right = clamp_window(p.window_right);
    const int32_t head_bits = Cfg::kDeviceLengths ? sm90_joined_heads(p, Cfg::kBlockM, p.sm_count) : 0;
    const int32_t tile_heads = p.heads_q >> head_bits;
    args.heads_per_kv = pipe::FastDivisor::make(static_cast<uint32_t>(tile_heads / p.heads_kv));
    args.unit = p.softcap > 0.0f ? p.softcap : p.scale;
    args.scale_log2 = args.unit * 1.4426950408889634f;
    args.softcap_in = p.softcap > 0.0f ? p.scale / p.softcap : 0.0f;
    args.slack = std::min(0.25f * Cfg::kSlackQuarters / args.scale_log2, 1e30f);

    const bool packed_q = p.cu_seqlens_q != nullptr;
    const bool packed_k = p.cu_seqlens_k != nullptr;
    const int64_t rows_q = packed_q ? p.total_q : p.seqlen_q;
    const int64_t rows_k = packed_k ? p.total_k : p.seqlen_k;
    // Without a key the maps describe one row of q, which no block reaches (see KeyRange).
    const FwdParams& s = args.params;
    const void* k = rows_k > 0 ? s.k : s.q;
    const void* v = rows_k > 0 ? s.v : s.q;
    const int64_t map_rows_k = std::max<int64_t>(1, rows_k);
    const int32_t batch_q = packed_q ? 1 : s.batch;
    const int32_t batch_k = packed_k ? 1 : s.batch;
    const bool mapped_q = head_bits > 0 ? make_joined_map<Cfg>(&args.map_q, s, rows_q, batch_q, head_bits)
                                        : make_map<Cfg>(&args.map_q, s.q, s.q_stride, rows_q, s.head_dim, s.heads_q, batch_q,
                                                        Cfg::kQRows, s.head_dim / Cfg::kSpan);
    const bool mapped = mapped_q &&
                        make_map<Cfg>(&args.map_k, k, s.k_stride, map_rows_k, s.head_dim, s.heads_kv, batch_k, Cfg::kBlockN,
                                      Cfg::kChunksK) &&
                        make_map<Cfg>(&args.map_v, v, s.v_stride, map_rows_k, s.head_dim_v, s.heads_kv, batch_k, Cfg::kBlockN,
                                      Cfg::kChunksV);
    if (!mapped) {
        return FLARE_ERROR_LAUNCH;
    }

    const bool causal = s.window_right < s.seqlen_k && s.window_left >= s.seqlen_k - 1;
    const int32_t workers = s.sm_count * Cfg::kBlocksPerSm / Cfg::kCluster;
    int64_t most_tiles;
    if constexpr (Cfg::kDeviceLengths) {
        const int64_t rows = rows_q << head_bits;
        const int32_t num_m = static_cast<int32_t>((rows + Cfg::kBlockM - 1) / Cfg::kBlockM);
        const bool alike = tiles_alike(s, num_m, tile_heads, workers);
        args.packed = PackedOrder::make(s.batch, tile_heads, tile_heads / s.heads_kv, head_bits, causal && !alike,
                                        memory_bound(s, Cfg::kBlockM));
        const int64_t row_blocks = packed_q ? rows / Cfg::kBlockM + s.batch
                                            : int64_t{s.batch} * num_m;
        most_tiles = row_blocks * tile_heads;
    } else {
        args.schedule = tile_order(s, Cfg::kBlockM * Cfg::kCluster, workers, causal);
        most_tiles = args.schedule.num_tiles;
    }

    const auto kernel = attention_fwd_sm90_kernel<Cfg>;
    // Per device and context, and cheap: set before every launch rather than remembered.
    if (cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, Cfg::kSmemBytes) != cudaSuccess) {
        return FLARE_ERROR_LAUNCH;
    }
    cudaLaunchConfig_t config{};
    config.gridDim = dim3(static_cast<unsigned>(std::min<int64_t>(most_tiles, workers) * Cfg::kCluster));
    config.blockDim = dim3(Cfg::kThreads);
    config.dynamicSmemBytes = Cfg::kSmemBytes;
    config.stream = stream;
    cudaLaunchAttribute cluster{};
    cluster.id = cudaLaunchAttributeClusterDimension;
    cluster.val.clusterDim.x = Cfg::kCluster;
    cluster.val.clusterDim.y = 1;
    cluster.val.clusterDim.z = 1;
    config.attrs = &cluster;
    config.numAttrs = Cfg::kCluster > 1 ? 1 : 0;
    return cudaLaunchKernelEx(&config, kernel, args) == cudaSuccess ? FLARE_OK : FLARE_ERROR_LAUNCH;
}

// Picks the instance: what the plain kernel need not carry (softcap, ALiBi; lengths on the device, joined heads) is compiled
// apart, and not at all for instances with several blocks an SM, a cluster or four consumers, which selection gives plain
// parameters only.
template <typename T, int kHeadDim, int kHeadDimV, int kConsumers, int kBlockN, int kStages, Sm90Schedule kSchedule,
          int kBlocksPerSm, int kCluster>
int32_t launch_sm90_features(const FwdParams& p, cudaStream_t stream) {
    if constexpr (kBlocksPerSm == 1 && kCluster == 1 && kConsumers < 4) {
        constexpr bool kLong = kConsumers == 3 && kHeadDim == 128 && sizeof(T) == 2;
        if constexpr (!kLong) {
            if (p.softcap > 0.0f || p.alibi_slopes != nullptr) {
                return launch_sm90<
                    Sm90Config<T, kHeadDim, kHeadDimV, kConsumers, kBlockN, kStages, kSchedule, 1, 1, true, true>>(p, stream);
            }
        }
        if (has_device_lengths(p) || sm90_joined_heads(p, 64 * kConsumers, p.sm_count) > 0) {
            return launch_sm90<
                Sm90Config<T, kHeadDim, kHeadDimV, kConsumers, kBlockN, kStages, kSchedule, 1, 1, false, true>>(p, stream);
        }
    }
    return launch_sm90<Sm90Config<T, kHeadDim, kHeadDimV, kConsumers, kBlockN, kStages, kSchedule, kBlocksPerSm, kCluster,
                                  false, false>>(p, stream);
}

template <Sm90Elements kElements, int kHeadDim, int kHeadDimV, int kConsumers, int kBlockN, int kStages,
          Sm90Schedule kSchedule, int kBlocksPerSm, int kCluster>
int32_t launch_sm90_elements(const FwdParams& p, cudaStream_t stream) {
    if constexpr (kElements == Sm90Elements::kE4m3) {
        return launch_sm90_features<__nv_fp8_e4m3, kHeadDim, kHeadDimV, kConsumers, kBlockN, kStages, kSchedule, kBlocksPerSm,
                                    kCluster>(p, stream);
    } else if (p.dtype == DType::kBf16) {
        return launch_sm90_features<__nv_bfloat16, kHeadDim, kHeadDimV, kConsumers, kBlockN, kStages, kSchedule, kBlocksPerSm,
                                    kCluster>(p, stream);
    } else {
        return launch_sm90_features<__half, kHeadDim, kHeadDimV, kConsumers, kBlockN, kStages, kSchedule, kBlocksPerSm,
                                    kCluster>(p, stream);
    }
}

}  // namespace flare::attention

#define FLARE_DEFINE_LAUNCH_SM90(id, elements, d, dv, consumers, block_n, stages, schedule, blocks_per_sm, cluster)       \
    int32_t launch_sm90_##id(const FwdParams& p, cudaStream_t stream) {                                                   \
        return launch_sm90_elements<Sm90Elements::elements, d, dv, consumers, block_n, stages, Sm90Schedule::schedule,    \
                                    blocks_per_sm, cluster>(p, stream);                                                   \
    }
