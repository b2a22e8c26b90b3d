// Loading roles of the Hopper MLA decode kernel: one warp by TMA, or four warps gathering 16-byte pieces.
#pragma once

#include <cuda_bf16.h>

#include <cmath>
#include <cstdint>

#include "../pipe/ring.cuh"
#include "../ptx/ldst.cuh"
#include "../ptx/mbarrier.cuh"
#include "../ptx/tma.cuh"
#include "decode_layout.cuh"

namespace flare::mla::decode {

// ---------------------------------------------------------------------------------------------------------------------
// Producer: one warp.

template <int kCluster, Load kLoad>
struct Producer {
    const DecodeArgs& args;
    const CUtensorMap* map_q;
    const CUtensorMap* map_q_rope;
    const CUtensorMap* map_kv;      // one chunk of kv_box_rows rows
    const CUtensorMap* map_values;  // two chunks of 64 rows
    SharedStorage<kLoad>& smem;
    int lane;
    uint32_t cta_rank;

    // Read once where a cluster shares the tile. Elsewhere the normal policy was 7 % faster: with evict-first, lines
    // that the 256-byte promotion fetched left before their turn (one H200, 128 x 4096 keys, 64 heads: 174.7 against
    // 164.1 us).
    static constexpr uint64_t kKvPolicy = kCluster > 1 ? ptx::kL2EvictFirst : ptx::kL2EvictNormal;

    // Page and row of the lane's box groups (lane and lane + 32) of one key block.
    struct Source {
        int page[2];
        int row[2];
    };

    // Starts the copy of the block's page table entries; each lane reads back what it asked for itself.
    __device__ __forceinline__ void request_pages(const Piece& piece, int block) const {
        if (args.block_table != nullptr && block < piece.end) {
            const int groups = kBlockKeys / args.kv_box_rows;
#pragma unroll
            for (int j = 0; j < 2; ++j) {
                const int group = lane + 32 * j;
                const int key = block * kBlockKeys + group * args.kv_box_rows;
                if (group < groups && key < piece.len) {
                    const int64_t entry = piece.request * args.block_table_stride_b + args.by_page.quotient(key);
                    // The low word of an int64 entry is the page: there are fewer than 2^31.
                    const int32_t* src =
                        static_cast<const int32_t*>(args.block_table) + (args.index_is_64 ? 2 * entry : entry);
                    ptx::cp_async_4(ptx::smem_addr(&smem.page_ids[block % kPageIdSlots][group]), src);
                }
            }
        }
        ptx::cp_async_commit();
    }

    __device__ __forceinline__ Source locate(const Piece& piece, int block) const {
        Source source;
        const int groups = kBlockKeys / args.kv_box_rows;
#pragma unroll
        for (int j = 0; j < 2; ++j) {
            const int group = lane + 32 * j;
            const int key = block * kBlockKeys + group * args.kv_box_rows;
            source.page[j] = args.num_pages;  // out of bounds: zeros
            source.row[j] = 0;
            if (group < groups && key < piece.len) {
                const bool paged = args.block_table != nullptr;
                source.page[j] = paged ? smem.page_ids[block % kPageIdSlots][group] : piece.request;
                source.row[j] = key - args.by_page.quotient(key) * args.page_size;
            }
        }
        return source;
    }

    // kCount chunks from kFirst on.
    template <int kFirst, int kCount>
    __device__ __forceinline__ void load_chunks(const Source& source, int buffer, uint32_t bar) const {
        constexpr uint16_t kMask = (1u << kCluster) - 1;
        const uint32_t dst = ptx::smem_addr(smem.k[buffer]) + kFirst * kChunkBytes;
        if (kCount == 2 && args.kv_box_rows == kBlockKeys) {
            if (lane == 0) {
                if constexpr (kCluster > 1) {
                    ptx::tma_load_multicast_4d(dst, map_values, bar, kMask, 0, source.row[0], kFirst, source.page[0],
                                               kKvPolicy);
                } else {
                    ptx::tma_load_4d(dst, map_values, bar, 0, source.row[0], kFirst, source.page[0], kKvPolicy);
                }
            }
            return;
        }
        const int groups = kBlockKeys / args.kv_box_rows;
#pragma unroll
        for (int c = 0; c < kCount; ++c) {
            const int column = chunk_column(args, kFirst + c);
#pragma unroll
            for (int j = 0; j < 2; ++j) {
                const int group = lane + 32 * j;
                if (group < groups) {
                    const uint32_t to = dst + c * kChunkBytes + group * args.kv_box_rows * 128;
                    if constexpr (kCluster > 1) {
                        ptx::tma_load_multicast_3d(to, map_kv, bar, kMask, column, source.row[j], source.page[j],
                                                   kKvPolicy);
                    } else {
                        ptx::tma_load_3d(to, map_kv, bar, column, source.row[j], source.page[j], kKvPolicy);
                    }
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

    __device__ __forceinline__ void load_q(int request, int tile) const {
        const uint32_t bar = ptx::smem_addr(&smem.q_full);
        constexpr uint32_t kQueryChunkBytes = SharedStorage<kLoad>::kQueryChunkBytes;
        const uint32_t dst = ptx::smem_addr(smem.q);
        arm(bar, kChunks * kQueryChunkBytes);
        const RowMap::Span span = args.row_map.span(request);
        const int row0 = span.first_token * args.row_map.heads + tile * kTileRows;
        if (args.q_rows_packed) {
            if (lane < kChunks) {
                ptx::tma_load_4d(dst + lane * kQueryChunkBytes, lane == kRopeChunk ? map_q_rope : map_q, bar,
                                 lane == kRopeChunk ? args.q_rope_column : chunk_column(args, lane), row0, 0, span.batch,
                                 ptx::kL2EvictFirst);
            }
        } else {
#pragma unroll 1
            for (int row = lane; row < query_rows(kLoad); row += 32) {
                const int token = (row0 + row) / args.row_map.heads;  // beyond the last: out of bounds, zeros
                const int head = row0 + row - token * args.row_map.heads;
#pragma unroll 1
                for (int chunk = 0; chunk < kChunks; ++chunk) {
                    ptx::tma_load_4d(dst + chunk * kQueryChunkBytes + row * 128, chunk == kRopeChunk ? map_q_rope : map_q, bar,
                                     chunk == kRopeChunk ? args.q_rope_column : chunk_column(args, chunk), head, token,
                                     span.batch, ptx::kL2EvictFirst);
                }
            }
        }
    }

    // The chunks behind one full barrier. In a cluster every group is fetched by one block for both, by turns.
    template <int kGroup>
    __device__ __forceinline__ void load_group(const Source& source, uint32_t g) const {
        const int buffer = g & 1;
        const uint32_t bar = ptx::smem_addr(&smem.k_full[buffer][kGroup]);
        constexpr int kFirst = kGroup == 0 ? kRopeChunk : 2 * (kGroup - 1);
        constexpr int kCount = kGroup == 0 ? 1 : 2;
        arm(bar, kCount * kChunkBytes);
        if (kCluster == 1 || ((kGroup == 0 ? g >> 1 : kGroup) & 1) == cta_rank) {
            load_chunks<kFirst, kCount>(source, buffer, bar);
        }
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
            load_q(piece.request, tile);
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
// Gathering producers: four warps, for page sizes that would make TMA boxes of less than 16 rows, for token indices and
// for 656-byte rows.

// Finds cache rows: key j of a sequence through the page table, or with token indices entry j of the token's list.
struct RowFinder {
    const DecodeArgs& args;
    const char* list = nullptr;  // of the piece's sequence: page table, or row indices; null: contiguous
    int request = 0;
    int end = 0;  // keys

    static constexpr uint32_t kAbsent = 0xffffffffu;

    __device__ __forceinline__ void begin(const Piece& piece) {
        const int bytes = args.index_is_64 ? 8 : 4;
        request = piece.request;
        end = min(piece.len, piece.end * kBlockKeys);
        if (args.indices != nullptr) {
            const RowMap::Span span = args.row_map.span(request);
            list = static_cast<const char*>(args.indices) +
                   (span.batch * args.indices_stride_b + span.first_token * args.indices_stride_s) * bytes;
        } else if (args.block_table != nullptr) {
            list = static_cast<const char*>(args.block_table) + request * args.block_table_stride_b * bytes;
        }
    }

    // What the table or the list says about a key; to be turned into a row later, when it has arrived.
    __device__ __forceinline__ int fetch(int key) const {
        if (key >= end) {
            return -1;
        }
        if (list == nullptr) {
            return request;
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
        return static_cast<uint32_t>(page * args.kv_stride_b + offset * args.kv_stride_s);
    }
};

// 16-bit rows. Thread t copies 16-byte piece t % 8 of every chunk of rows t / 8 + 16 j. cp.async completes on the full
// barriers without a wait here, so the proxy fence stands with the consumers, after their wait.
struct GatherProducer {
    const DecodeArgs& args;
    const Producer<1, Load::kGather>& tma;  // for q
    SharedStorage<Load::kGather>& smem;
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
                    fetched[j] = finder.fetch(block * kBlockKeys + thread / 8 + 16 * j);
                }
            };
            fetch(piece.begin);
            if (thread < 32) {
                ptx::mbarrier_wait(ptx::smem_addr(&smem.q_empty), q_phase);
                tma.load_q(piece.request, tile);
            }
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

// 656-byte rows: thread t widens 16-byte piece t % 8 of each group of 128 channels in rows t / 8 + 16 j of a block.
template <Load kLoad>
struct Row656Widener {
    SharedStorage<kLoad>& smem;
    int thread;

    static __device__ __forceinline__ uint32_t multiply(uint32_t x, uint32_t factor) {
        const __nv_bfloat162 product =
            __hmul2(*reinterpret_cast<const __nv_bfloat162*>(&x), *reinterpret_cast<const __nv_bfloat162*>(&factor));
        return *reinterpret_cast<const uint32_t*>(&product);
    }

    static __device__ __forceinline__ uint32_t multiply_add(uint32_t x, uint32_t factor, uint32_t addend) {
        const __nv_bfloat162 sum =
            __hfma2(*reinterpret_cast<const __nv_bfloat162*>(&x), *reinterpret_cast<const __nv_bfloat162*>(&factor),
                    *reinterpret_cast<const __nv_bfloat162*>(&addend));
        return *reinterpret_cast<const uint32_t*>(&sum);
    }

    // Both halves the upper half of a float.
    static __device__ __forceinline__ uint32_t twice(float x) { return __byte_perm(__float_as_uint(x), 0, 0x3232); }

    // Two e4m3 values in the upper bytes of x's halves, as bf16 times 2^-120: the same fields under another exponent bias.
    static __device__ __forceinline__ uint32_t refit(uint32_t x) {
        return ((x >> 4) & 0x07f007f0u) | (x & 0x80008000u);
    }

    // 16 e4m3 values, four a word, to eight words of bf16: times a scale that bf16 holds, below 128.
    static __device__ __forceinline__ void widen_exact(const uint32_t (&raw)[4], float scale, uint32_t (&x)[8]) {
        const uint32_t factor = twice(scale * 0x1p+60f * 0x1p+60f);
#pragma unroll
        for (int k = 0; k < 4; ++k) {
            x[2 * k] = multiply(refit(__byte_perm(raw[k], 0, 0x1404)), factor);
            x[2 * k + 1] = multiply(refit(__byte_perm(raw[k], 0, 0x3424)), factor);
        }
    }

    // Any scale: what bf16 leaves of it is a factor of its own, and 2^120 too, which scale * 2^120 might overflow with.
    static __device__ __forceinline__ void widen_any(const uint32_t (&raw)[4], float scale, uint32_t (&x)[8]) {
        const float high = __uint_as_float(__float_as_uint(scale) & 0xffff0000u);
        const __nv_bfloat162 rest = __float2bfloat162_rn(scale - high);
        const uint32_t low = *reinterpret_cast<const uint32_t*>(&rest);
        const uint32_t lift = twice(0x1p+120f);
#pragma unroll
        for (int k = 0; k < 4; ++k) {
            const uint32_t even = multiply(refit(__byte_perm(raw[k], 0, 0x1404)), lift);
            const uint32_t odd = multiply(refit(__byte_perm(raw[k], 0, 0x3424)), lift);
            x[2 * k] = multiply_add(even, twice(high), multiply(even, low));
            x[2 * k + 1] = multiply_add(odd, twice(high), multiply(odd, low));
        }
    }

    static __device__ __forceinline__ bool plain(float scale) {
        return (__float_as_uint(scale) & 0xffffu) == 0 && fabsf(scale) < 128.0f;
    }

    // 16 channels of group `group` in row `row` of the tile in `buffer`: two neighbouring 16-byte pieces. The upper four
    // threads of a row write the second one first: no bank conflicts.
    __device__ __forceinline__ void store(const uint32_t (&x)[8], int buffer, int group, int row) const {
        const int piece = 2 * (thread % 4);
        const uint32_t upper = thread / 4 % 2;
        const uint32_t addr =
            ptx::smem_addr(smem.k[buffer]) + (2 * group + upper) * kChunkBytes + row * 128 + ((piece ^ (row % 8)) << 4);
        uint32_t first[4];
        uint32_t second[4];
#pragma unroll
        for (int k = 0; k < 4; ++k) {
            first[k] = upper != 0 ? x[4 + k] : x[k];
            second[k] = upper != 0 ? x[k] : x[4 + k];
        }
        ptx::st_shared_v4(addr ^ (upper << 4), first);
        ptx::st_shared_v4(addr ^ (16 - (upper << 4)), second);
    }

    __device__ __forceinline__ void arrive(int buffer, int group) const {
        if (thread % 32 == 0) {
            ptx::mbarrier_arrive(ptx::smem_addr(&smem.k_full[buffer][group]));
        }
    }
};

// In place: the bytes of group g land in the second of the two chunks they become; the eight threads of a row, all of one
// warp, first read, then write.
struct Row656Producer {
    const DecodeArgs& args;
    const Producer<1, Load::kRow656>& tma;  // for q
    SharedStorage<Load::kRow656>& smem;
    int thread;

    __device__ __forceinline__ uint32_t piece_addr(int buffer, int chunk, int row) const {
        return ptx::smem_addr(smem.k[buffer]) + chunk * kChunkBytes + row * 128 + (((thread % 8) ^ (row % 8)) << 4);
    }

    __device__ __forceinline__ void load_pieces(const uint32_t (&rows)[4], int from_byte, int buffer, int chunk) const {
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            const bool used = rows[j] != RowFinder::kAbsent;
            ptx::cp_async_16(piece_addr(buffer, chunk, thread / 8 + 16 * j),
                             args.kv + (used ? int64_t{rows[j]} * 16 + from_byte + 16 * (thread % 8) : 0), used ? 16 : 0);
        }
        ptx::cp_async_commit();
    }

    __device__ __forceinline__ void load_half(const uint32_t (&rows)[4], int half, int buffer, uint32_t empty,
                                              uint32_t phase) const {
        ptx::mbarrier_wait(empty + 8 * (1 + half), phase);
        load_pieces(rows, 256 * half, buffer, 4 * half + 1);
        load_pieces(rows, 256 * half + 128, buffer, 4 * half + 3);
    }

    template <int kPending>
    __device__ __forceinline__ void widen(int group, int buffer, const float (&scales)[4]) const {
        const Row656Widener<Load::kRow656> widener{smem, thread};
        ptx::cp_async_wait<kPending>();
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            const int row = thread / 8 + 16 * j;
            const float scale = __shfl_sync(0xffffffffu, scales[j], (thread & 24) + group);
            uint32_t raw[4];
            uint32_t x[8];
            ptx::ld_shared_v4(raw, piece_addr(buffer, 2 * group + 1, row));
            if (__all_sync(0xffffffffu, widener.plain(scale))) {
                widener.widen_exact(raw, scale, x);
            } else {
                widener.widen_any(raw, scale, x);
            }
            __syncwarp();
            widener.store(x, buffer, group, row);
        }
        ptx::fence_proxy_async_smem();
        __syncwarp();
        widener.arrive(buffer, 1 + group);
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
                    fetched[j] = finder.fetch(block * kBlockKeys + thread / 8 + 16 * j);
                }
            };
            fetch(piece.begin);
            if (thread < 32) {
                ptx::mbarrier_wait(ptx::smem_addr(&smem.q_empty), q_phase);
                tma.load_q(piece.request, tile);
            }
            q_phase ^= 1;
#pragma unroll 1
            for (int block = piece.begin; block < piece.end; ++block, ++g) {
                const int buffer = g & 1;
                const uint32_t empty = ptx::smem_addr(&smem.k_empty[buffer][0]);
                const uint32_t phase = ((g >> 1) & 1) ^ 1;
                uint32_t rows[4];
#pragma unroll
                for (int j = 0; j < 4; ++j) {
                    rows[j] = finder.row(fetched[j], block * kBlockKeys + thread / 8 + 16 * j);
                }
                float scales[4];  // of group thread % 4; handed round by shuffles
#pragma unroll
                for (int j = 0; j < 4; ++j) {
                    const float* of_row = reinterpret_cast<const float*>(args.kv + int64_t{rows[j]} * 16 + kRowScales);
                    scales[j] = rows[j] != RowFinder::kAbsent ? __ldg(of_row + thread % 4) : 0.0f;
                }
                ptx::mbarrier_wait(empty, phase);
                load_pieces(rows, kRowRope, buffer, kRopeChunk);
                if (args.indices != nullptr && thread % 8 == 0) {
#pragma unroll
                    for (int j = 0; j < 4; ++j) {
                        smem.bias[g % kBiasSlots][thread / 8 + 16 * j] = rows[j] == RowFinder::kAbsent ? -INFINITY : 0.0f;
                    }
                }
                const int own = (block - piece.begin) & 1;  // the owner's half first
                load_half(rows, own, buffer, empty, phase);
                load_half(rows, own ^ 1, buffer, empty, phase);
                fetch(block + 1);  // arrives meanwhile
                ptx::cp_async_wait<4>();
                ptx::fence_proxy_async_smem();
                __syncwarp();
                if (thread % 32 == 0) {
                    ptx::mbarrier_arrive(ptx::smem_addr(&smem.k_full[buffer][0]));
                }
                widen<3>(2 * own, buffer, scales);
                widen<2>(2 * own + 1, buffer, scales);
                widen<1>(2 - 2 * own, buffer, scales);
                widen<0>(3 - 2 * own, buffer, scales);
            }
        }
    }
};

// From a ring: units of 16 whole rows come by bulk copies, five units ahead, and are widened row by row into the buffer.
struct Row656FewProducer {
    const DecodeArgs& args;
    const Producer<1, Load::kRow656Few>& tma;  // for q
    SharedStorage<Load::kRow656Few>& smem;
    int thread;

    // One warp. fetched: what the list says about row `lane` of the unit.
    __device__ __forceinline__ void load_unit(const RowFinder& finder, int fetched, int key0, uint32_t slot) const {
        const int lane = thread % 32;
        const uint32_t row = lane < kRawRows ? finder.row(fetched, key0 + lane) : RowFinder::kAbsent;
        const uint32_t present = __ballot_sync(0xffffffffu, row != RowFinder::kAbsent);
        const uint32_t full = ptx::smem_addr(&smem.raw.full[slot]);
        if (lane == 0) {
            smem.raw.present[slot] = present;
            ptx::mbarrier_arrive_expect_tx(full, __popc(present) * kRowBytes);
        }
        __syncwarp();
        if (row != RowFinder::kAbsent) {
            ptx::bulk_load(ptx::smem_addr(smem.raw.rows[slot]) + lane * kRowBytes, args.kv + int64_t{row} * 16, kRowBytes,
                           full);
        }
        __syncwarp();
    }

    __device__ __forceinline__ void run(int tile) const {
        constexpr int kUnitsPerBlock = kBlockKeys / kRawRows;
        const Row656Widener<Load::kRow656Few> widener{smem, thread};
        const int warp = thread / 32;
        const int lane = thread % 32;
        RowFinder finder{args};
        PieceIterator it(smem.share);
        Piece piece;
        uint32_t q_phase = 1;
        uint32_t g = 0;
        pipe::PipeState<kRawUnits> widening = pipe::PipeState<kRawUnits>::consumer();
        while (it.advance(args.schedule, piece)) {
            if (piece.begin == piece.end) {
                continue;
            }
            finder.begin(piece);
            const int key_begin = piece.begin * kBlockKeys;
            const int units = (piece.end - piece.begin) * kUnitsPerBlock;
            const uint32_t units_before = g * kUnitsPerBlock;
            // The warps load units by turns. `mine`: this warp's next one, which was looked up one turn before.
            int mine = warp;
            int fetched = lane < kRawRows ? finder.fetch(key_begin + mine * kRawRows + lane) : -1;
            const auto load_below = [&](int limit) {
                while (mine < min(limit, units)) {
                    const uint32_t n = units_before + mine;
                    const uint32_t slot = n % kRawUnits;
                    ptx::mbarrier_wait(ptx::smem_addr(&smem.raw.empty[slot]), (n / kRawUnits & 1) ^ 1);
                    load_unit(finder, fetched, key_begin + mine * kRawRows, slot);
                    mine += kUnitsPerBlock;
                    fetched = lane < kRawRows ? finder.fetch(key_begin + mine * kRawRows + lane) : -1;
                }
            };
            if (warp == 0) {
                ptx::mbarrier_wait(ptx::smem_addr(&smem.q_empty), q_phase);
                tma.load_q(piece.request, tile);
            }
            load_below(kRawUnits);
            q_phase ^= 1;
#pragma unroll 1
            for (int unit = 0; unit < units; ++unit) {
                const int buffer = g & 1;
                const int row = unit % kUnitsPerBlock * kRawRows + thread / 8;
                ptx::mbarrier_wait(ptx::smem_addr(&smem.raw.full[widening.stage]), widening.phase);
                const bool present = ((smem.raw.present[widening.stage] >> (thread / 8)) & 1) != 0;
                const uint32_t from = ptx::smem_addr(smem.raw.rows[widening.stage]) + thread / 8 * kRowBytes;
                uint32_t raw[5][4];  // four groups, rope
                uint32_t scales[4] = {0, 0, 0, 0};
#pragma unroll
                for (int i = 0; i < 5; ++i) {
                    raw[i][0] = raw[i][1] = raw[i][2] = raw[i][3] = 0;
                }
                if (present) {
#pragma unroll
                    for (int i = 0; i < 4; ++i) {
                        ptx::ld_shared_v4(raw[i], from + 128 * i + 16 * (thread % 8));
                    }
                    ptx::ld_shared_v4(raw[4], from + kRowRope + 16 * (thread % 8));
                    ptx::ld_shared_v4(scales, from + kRowScales);
                }
                ptx::fence_proxy_async_smem();  // the next bulk copy follows these reads
                __syncwarp();
                if (thread % 32 == 0) {
                    ptx::mbarrier_arrive(ptx::smem_addr(&smem.raw.empty[widening.stage]));
                }
                widening.advance();
                if (unit % kUnitsPerBlock == 0) {
                    const uint32_t empty = ptx::smem_addr(&smem.k_empty[buffer][0]);
                    const uint32_t phase = ((g >> 1) & 1) ^ 1;
#pragma unroll
                    for (int i = 0; i < 3; ++i) {
                        ptx::mbarrier_wait(empty + 8 * i, phase);
                    }
                }
                if (args.indices != nullptr && thread % 8 == 0) {
                    smem.bias[g % kBiasSlots][row] = present ? 0.0f : -INFINITY;
                }
                ptx::st_shared_v4(ptx::smem_addr(smem.k[buffer]) + kRopeChunk * kChunkBytes + row * 128 +
                                      (((thread % 8) ^ (row % 8)) << 4),
                                  raw[4]);
                const bool plain = widener.plain(__uint_as_float(scales[0])) && widener.plain(__uint_as_float(scales[1])) &&
                                   widener.plain(__uint_as_float(scales[2])) && widener.plain(__uint_as_float(scales[3]));
                if (__all_sync(0xffffffffu, plain)) {
#pragma unroll
                    for (int i = 0; i < 4; ++i) {
                        uint32_t x[8];
                        widener.widen_exact(raw[i], __uint_as_float(scales[i]), x);
                        widener.store(x, buffer, i, row);
                    }
                } else {
#pragma unroll
                    for (int i = 0; i < 4; ++i) {
                        uint32_t x[8];
                        widener.widen_any(raw[i], __uint_as_float(scales[i]), x);
                        widener.store(x, buffer, i, row);
                    }
                }
                if (unit % kUnitsPerBlock == kUnitsPerBlock - 1) {
                    ptx::fence_proxy_async_smem();
                    __syncwarp();
#pragma unroll
                    for (int group = 0; group < kGroups; ++group) {
                        widener.arrive(buffer, group);
                    }
                    ++g;
                }
                load_below(unit + 1 + kRawUnits);
            }
        }
    }
};

}  // namespace flare::mla::decode
