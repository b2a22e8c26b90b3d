// Loading roles of the Hopper MLA decode kernel: one warp by TMA, or four warps gathering 16-byte pieces.
#pragma once

#include <cmath>
#include <cstdint>

#include "../ptx/ldst.cuh"
#include "../ptx/mbarrier.cuh"
#include "../ptx/tma.cuh"
#include "decode_layout.cuh"

namespace flare::mla::decode {

// One thread. Where this part begins if all requests have the maximal length: its page table entries are fetched while the
// lengths are. A wrong guess costs a fetch.
__device__ __forceinline__ void prefetch_first_page(const DecodeArgs& args, int part) {
    const ScheduleParams& p = args.schedule;
    if (args.block_table == nullptr || p.seqlen_k == 0) {
        return;
    }
    const int blocks = blocks_of(p.seqlen_k);
    const float each = static_cast<float>(blocks + kPieceCost);
    const float share = static_cast<float>(p.batch) / static_cast<float>(p.num_parts);
    const bool even = ceilf(share) * each <= share * each + static_cast<float>(kSplitCost);
    const float at = p.never_split || (p.forced_parts == 0 && even) ? static_cast<float>(part) : static_cast<float>(part) * share;
    const int request = static_cast<int>(at);
    if (request < p.batch) {
        const int block = min(static_cast<int>((at - static_cast<float>(request)) * each), blocks - 1);
        const int64_t entry = request * args.block_table_stride_b + args.by_page.quotient(block * kBlockKeys);
        ptx::prefetch_l2(static_cast<const int32_t*>(args.block_table) + (args.index_is_64 ? 2 * entry : entry));
    }
}

// ---------------------------------------------------------------------------------------------------------------------
// What one warp loads by TMA, for the kernels of one block and of two that share their keys.

template <int kCluster, typename Storage>
struct BoxLoader {
    const DecodeArgs& args;
    const CUtensorMap* map_q;
    const CUtensorMap* map_q_rope;
    const CUtensorMap* map_kv;      // one chunk of kv_box_rows rows
    const CUtensorMap* map_values;  // two chunks of 64 rows
    Storage& smem;
    int lane;

    // Page and row of the lane's box group of one key block.
    struct Source {
        int page;
        int row;
    };

    // Starts the copy of the block's page table entries; each lane reads back what it asked for itself.
    __device__ __forceinline__ void request_pages(const Piece& piece, int block) const {
        if (args.block_table != nullptr && block < piece.end) {
            const int groups = kBlockKeys / args.kv_box_rows;
            const int key = block * kBlockKeys + lane * args.kv_box_rows;
            if (lane < groups && key < piece.len) {
                const int64_t entry = piece.request * args.block_table_stride_b + args.by_page.quotient(key);
                // The low word of an int64 entry is the page: there are fewer than 2^31.
                const int32_t* src = static_cast<const int32_t*>(args.block_table) + (args.index_is_64 ? 2 * entry : entry);
                ptx::cp_async_4(ptx::smem_addr(&smem.page_ids[block % kPageIdSlots][lane]), src);
            }
        }
        ptx::cp_async_commit();
    }

    __device__ __forceinline__ Source locate(const Piece& piece, int block) const {
        Source source;
        const int groups = kBlockKeys / args.kv_box_rows;
        const int key = block * kBlockKeys + lane * args.kv_box_rows;
        source.page = args.num_pages;  // out of bounds: zeros
        source.row = 0;
        if (lane < groups && key < piece.len) {
            const bool paged = args.block_table != nullptr;
            source.page = paged ? smem.page_ids[block % kPageIdSlots][lane] : piece.request;
            source.row = key - args.by_page.quotient(key) * args.page_size;
        }
        return source;
    }

    // kCount chunks from kFirst on, to all blocks of the cluster.
    template <int kFirst, int kCount>
    __device__ __forceinline__ void load_chunks(const Source& source, uint32_t dst, uint32_t bar) const {
        constexpr uint16_t kMask = (1u << kCluster) - 1;
        if (kCount == 2 && args.kv_box_rows == kBlockKeys) {
            if (lane == 0) {
                if constexpr (kCluster > 1) {
                    ptx::tma_load_multicast_4d(dst, map_values, bar, kMask, 0, source.row, kFirst, source.page, args.kv_policy);
                } else {
                    ptx::tma_load_4d(dst, map_values, bar, 0, source.row, kFirst, source.page, args.kv_policy);
                }
            }
            return;
        }
        const int groups = kBlockKeys / args.kv_box_rows;
#pragma unroll
        for (int c = 0; c < kCount; ++c) {
            const int column = chunk_column(args, kFirst + c);
            if (lane < groups) {
                const uint32_t to = dst + c * kChunkBytes + lane * args.kv_box_rows * 128;
                if constexpr (kCluster > 1) {
                    ptx::tma_load_multicast_3d(to, map_kv, bar, kMask, column, source.row, source.page, args.kv_policy);
                } else {
                    ptx::tma_load_3d(to, map_kv, bar, column, source.row, source.page, args.kv_policy);
                }
            }
        }
    }

    __device__ __forceinline__ void arm(uint32_t bar, uint32_t bytes) const {
        if (lane == 0) {
            ptx::mbarrier_arrive_expect_tx(bar, bytes);
        }
        __syncwarp();
    }

    // Chunks [first, end) of the queries, for this block alone.
    __device__ __forceinline__ void load_q(int request, int tile, int first, int end, uint32_t dst, uint32_t bar) const {
        arm(bar, (end - first) * kChunkBytes);
        const RowMap::Span span = args.row_map.span(request);
        const int row0 = span.first_token * args.row_map.heads + tile * kTileRows;
        if (args.q_rows_packed) {
            const int chunk = first + lane;
            if (chunk < end) {
                ptx::tma_load_4d(dst + lane * kChunkBytes, chunk == kRopeChunk ? map_q_rope : map_q, bar,
                                 chunk == kRopeChunk ? args.q_rope_column : chunk_column(args, chunk), row0, 0, span.batch,
                                 ptx::kL2EvictFirst);
            }
        } else {
#pragma unroll 1
            for (int row = lane; row < kTileRows; row += 32) {
                const int token = (row0 + row) / args.row_map.heads;  // beyond the last: out of bounds, zeros
                const int head = row0 + row - token * args.row_map.heads;
#pragma unroll 1
                for (int chunk = first; chunk < end; ++chunk) {
                    ptx::tma_load_4d(dst + (chunk - first) * kChunkBytes + row * 128,
                                     chunk == kRopeChunk ? map_q_rope : map_q, bar,
                                     chunk == kRopeChunk ? args.q_rope_column : chunk_column(args, chunk), head, token,
                                     span.batch, ptx::kL2EvictFirst);
                }
            }
        }
    }
};

// ---------------------------------------------------------------------------------------------------------------------
// Producer: one warp.

struct Producer : BoxLoader<1, SharedStorage> {
    __device__ __forceinline__ void load_all_q(int request, int tile) const {
        load_q(request, tile, 0, kChunks, ptx::smem_addr(smem.q), ptx::smem_addr(&smem.q_full));
    }

    // The chunks behind one full barrier.
    template <int kGroup>
    __device__ __forceinline__ void load_group(const Source& source, uint32_t g) const {
        const int buffer = g & 1;
        const uint32_t bar = ptx::smem_addr(&smem.k_full[buffer][kGroup]);
        constexpr int kFirst = kGroup == 0 ? kRopeChunk : 2 * (kGroup - 1);
        constexpr int kCount = kGroup == 0 ? 1 : 2;
        arm(bar, kCount * kChunkBytes);
        load_chunks<kFirst, kCount>(source, ptx::smem_addr(smem.k[buffer]) + kFirst * kChunkBytes, bar);
    }

    template <int kHalf>
    __device__ __forceinline__ void load_half(const Source& source, uint32_t g, uint32_t empty, uint32_t phase) const {
        ptx::mbarrier_wait(empty + 8 * (1 + kHalf), phase);
        load_group<1 + 2 * kHalf>(source, g);
        load_group<2 + 2 * kHalf>(source, g);
    }

    __device__ __forceinline__ void run(int tile) const {
        PieceIterator it(smem.share);
        Piece piece;
        uint32_t q_phase = 1;
        uint32_t g = 0;  // key blocks loaded so far
        while (it.advance(args.schedule, piece)) {
            if (piece.begin == piece.end) {
                continue;
            }
#pragma unroll
            for (int j = 0; j < 4; ++j) {
                request_pages(piece, piece.begin + j);
            }
            ptx::mbarrier_wait(ptx::smem_addr(&smem.q_empty), q_phase);
            q_phase ^= 1;
            load_all_q(piece.request, tile);
#pragma unroll 1
            for (int block = piece.begin; block < piece.end; ++block, ++g) {
                const uint32_t empty = ptx::smem_addr(&smem.k_empty[g & 1][0]);
                const uint32_t phase = ((g >> 1) & 1) ^ 1;
                request_pages(piece, block + 4);
                ptx::cp_async_wait<4>();  // the entries of this block
                const Source source = locate(piece, block);
                ptx::mbarrier_wait(empty, phase);
                load_group<0>(source, g);
                // The owner's half first: its previous tenant leaves first, and the owner scores it first.
                const uint32_t owner = (block - piece.begin) & 1;
                if (owner == 0) {
                    load_half<0>(source, g, empty, phase);
                    load_half<1>(source, g, empty, phase);
                } else {
                    load_half<1>(source, g, empty, phase);
                    load_half<0>(source, g, empty, phase);
                }
            }
        }
    }
};

// ---------------------------------------------------------------------------------------------------------------------
// Gathering producer: four warps, for page sizes that would make TMA boxes of less than 16 rows and for token indices.

// Finds cache rows: key j of a sequence through the page table, or with token indices entry j of the token's list.
struct RowFinder {
    const DecodeArgs& args;
    const char* list = nullptr;  // of the piece's sequence: page table, or row indices

    static constexpr uint32_t kAbsent = 0xffffffffu;

    __device__ __forceinline__ void begin(const Piece& piece) {
        const int bytes = args.index_is_64 ? 8 : 4;
        if (args.indices != nullptr) {
            const RowMap::Span span = args.row_map.span(piece.request);
            list = static_cast<const char*>(args.indices) +
                   (span.batch * args.indices_stride_b + span.first_token * args.indices_stride_s) * bytes;
        } else {
            list = static_cast<const char*>(args.block_table) + piece.request * args.block_table_stride_b * bytes;
        }
    }

    // What the table or the list says about a key; to be turned into a row later, when it has arrived.
    __device__ __forceinline__ int fetch(const Piece& piece, int key) const {
        if (key >= piece.len || key >= piece.end * kBlockKeys) {
            return -1;
        }
        const int at = args.indices != nullptr ? key : args.by_page.quotient(key);
        if (!args.index_is_64) {
            return __ldg(reinterpret_cast<const int*>(list) + at);
        }
        const long long entry = __ldg(reinterpret_cast<const long long*>(list) + at);
        return entry < 0 || entry > 0x7fffffff ? -1 : static_cast<int>(entry);
    }

    // In 16-byte units: pools of up to 64 GiB. kAbsent: there is none.
    __device__ __forceinline__ uint32_t row(int fetched, int key) const {
        if (fetched < 0) {
            return kAbsent;
        }
        int page = fetched;
        int offset;
        if (args.indices != nullptr) {
            page = args.by_page.quotient(fetched);
            offset = fetched - page * args.page_size;
            if (page >= args.num_pages) {
                return kAbsent;
            }
        } else {
            offset = key - args.by_page.quotient(key) * args.page_size;
        }
        return static_cast<uint32_t>(page) * args.kv_stride_b + static_cast<uint32_t>(offset) * args.kv_stride_s;
    }
};

// Thread t copies 16-byte piece t % 8 of every chunk of rows t / 8 + 16 j. cp.async completes on the full
// barriers without a wait here, so the proxy fence stands with the consumers, after their wait.
struct GatherProducer {
    const DecodeArgs& args;
    const Producer& tma;  // for q
    SharedStorage& smem;
    int thread;

    static constexpr int kRopeArrivals = 128 + 4;  // four more: a warp's biases are written

    template <int kGroup>
    __device__ __forceinline__ void load_group(const uint32_t (&row)[4], int buffer) const {
        constexpr int kFirst = kGroup == 0 ? kRopeChunk : 2 * (kGroup - 1);
        constexpr int kCount = kGroup == 0 ? 1 : 2;
        const int column = 8 * (thread % 8);
        const int width = kGroup == 0 ? args.d_total - args.d_c : args.d_c;
        const uint32_t dst = ptx::smem_addr(smem.k[buffer]) + kFirst * kChunkBytes + (thread / 8) * 128 +
                             (((thread % 8) ^ (thread / 8 % 8)) << 4);
#pragma unroll
        for (int c = 0; c < kCount; ++c) {
            const int from = kGroup == 0 ? column : 64 * (kFirst + c) + column;
            const uint32_t offset = static_cast<uint32_t>(kGroup == 0 ? args.d_c + column : from) / 8;
#pragma unroll
            for (int j = 0; j < 4; ++j) {
                const bool used = row[j] != RowFinder::kAbsent && from < width;
                ptx::cp_async_16(dst + c * kChunkBytes + j * 16 * 128,
                                 args.kv + (used ? (int64_t{row[j]} + offset) * 16 : 0), used ? 16 : 0);
            }
        }
        ptx::cp_async_mbarrier_arrive_noinc(ptx::smem_addr(&smem.k_full[buffer][kGroup]));
    }

    template <int kHalf>
    __device__ __forceinline__ void load_half(const uint32_t (&row)[4], int buffer, uint32_t empty, uint32_t phase) const {
        ptx::mbarrier_wait(empty + 8 * (1 + kHalf), phase);
        load_group<1 + 2 * kHalf>(row, buffer);
        load_group<2 + 2 * kHalf>(row, buffer);
    }

    __device__ __forceinline__ void write_biases(const uint32_t (&row)[4], uint32_t g) const {
        if (args.indices != nullptr && thread % 8 == 0) {
#pragma unroll
            for (int j = 0; j < 4; ++j) {
                smem.bias[g % kBiasSlots][thread / 8 + 16 * j] = row[j] == RowFinder::kAbsent ? -INFINITY : 0.0f;
            }
        }
        __syncwarp();
        if (thread % 32 == 0) {
            ptx::mbarrier_arrive(ptx::smem_addr(&smem.k_full[g & 1][0]));
        }
    }

    __device__ __forceinline__ void run(int tile) const {
        RowFinder finder{args};
        PieceIterator it(smem.share);
        Piece piece;
        uint32_t q_phase = 1;
        uint32_t g = 0;
        while (it.advance(args.schedule, piece)) {
            if (piece.begin == piece.end) {
                continue;
            }
            finder.begin(piece);
            int fetched[4];
            const auto fetch = [&](int block) {
#pragma unroll
                for (int j = 0; j < 4; ++j) {
                    fetched[j] = finder.fetch(piece, block * kBlockKeys + thread / 8 + 16 * j);
                }
            };
            if (thread < 32) {
                ptx::mbarrier_wait(ptx::smem_addr(&smem.q_empty), q_phase);
                tma.load_all_q(piece.request, tile);
            }
            fetch(piece.begin);  // NOTE: after the queries; before them it costs registers that aren't there
            q_phase ^= 1;
#pragma unroll 1
            for (int block = piece.begin; block < piece.end; ++block, ++g) {
                const int buffer = g & 1;
                const uint32_t empty = ptx::smem_addr(&smem.k_empty[buffer][0]);
                const uint32_t phase = ((g >> 1) & 1) ^ 1;
                uint32_t row[4];
#pragma unroll
                for (int j = 0; j < 4; ++j) {
                    row[j] = finder.row(fetched[j], block * kBlockKeys + thread / 8 + 16 * j);
                }
                ptx::mbarrier_wait(empty, phase);
                load_group<0>(row, buffer);
                write_biases(row, g);
                if (((block - piece.begin) & 1) == 0) {
                    load_half<0>(row, buffer, empty, phase);
                    load_half<1>(row, buffer, empty, phase);
                } else {
                    load_half<1>(row, buffer, empty, phase);
                    load_half<0>(row, buffer, empty, phase);
                }
                fetch(block + 1);  // arrives while the next buffer is waited for
            }
        }
    }
};

}  // namespace flare::mla::decode
