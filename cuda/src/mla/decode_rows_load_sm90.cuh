// What the computing roles of decode_rows_sm90.cuh share, and the loading role.
#pragma once

#include <cuda_fp16.h>

#include <cstdint>

#include "../ptx/ldst.cuh"
#include "../ptx/math.cuh"
#include "../ptx/mbarrier.cuh"
#include "../ptx/sync.cuh"
#include "../ptx/tma.cuh"
#include "decode_rows_layout_sm90.cuh"

namespace flare::mla {
namespace rows {

__device__ __forceinline__ uint32_t bf16_to_fp16(uint32_t pair) {
    return ptx::pack2<__half>(__uint_as_float(pair << 16), __uint_as_float(pair & 0xffff0000u));
}

// Four e4m3 values as two pairs of fp16, exactly.
__device__ __forceinline__ void e4m3_to_fp16(uint32_t word, uint32_t& lo, uint32_t& hi) {
    asm("{\n"
        ".reg .b16 l, h;\n"
        "mov.b32 {l, h}, %2;\n"
        "cvt.rn.f16x2.e4m3x2 %0, l;\n"
        "cvt.rn.f16x2.e4m3x2 %1, h;\n"
        "}"
        : "=r"(lo), "=r"(hi)
        : "r"(word));
}

// Tiles of a piece, over the whole sequence.
__device__ __forceinline__ int first_tile(const Piece& piece) {
    return piece.begin * (kBlockKeys / kKeys);
}
__device__ __forceinline__ int last_tile(const Piece& piece) {
    return min(piece.end * (kBlockKeys / kKeys), (piece.len + kKeys - 1) / kKeys);
}

// Warps take the tiles by turns, lane j key j: one warp issues a copy in some 80 cycles, where rows of a tile need a copy each.
template <int kTall>
struct Loader {
    using S = Shape<kTall>;
    const RowsArgs& args;
    SharedStorage<kTall>& smem;
    int warp;  // 0 .. kLoaders - 1
    int lane;

    // What the table or the list says about a key, negative for none; to be turned into an address when it has arrived.
    __device__ __forceinline__ int fetch(const Piece& piece, const char* list, int key) const {
        if (key >= piece.len) {
            return -1;
        }
        if (list == nullptr) {
            return piece.request;
        }
        const int at = args.indices != nullptr ? key : args.by_page.quotient(key);
        if (!args.index_is_64) {
            return __ldg(reinterpret_cast<const int*>(list) + at);
        }
        const long long entry = __ldg(reinterpret_cast<const long long*>(list) + at);
        return entry < 0 || entry > 0x7fffffff ? -1 : static_cast<int>(entry);
    }

    __device__ __forceinline__ const char* row(int fetched, int key) const {
        if (fetched < 0) {
            return nullptr;
        }
        int page = fetched;
        int offset;
        if (args.indices != nullptr) {
            page = args.by_page.quotient(fetched);
            offset = fetched - page * args.page_size;
            if (page >= args.num_pages) {
                return nullptr;
            }
        } else {
            offset = key - args.by_page.quotient(key) * args.page_size;
        }
        return args.kv + page * args.kv_stride_b + offset * args.kv_stride_s;
    }

    __device__ __forceinline__ void load(const char* src, uint32_t g) const {
        const uint32_t stage = g % S::kStages;
        const uint32_t full = ptx::smem_addr(&smem.full[stage]);
        const uint32_t tile = ptx::smem_addr(smem.k[stage]);
        const uint32_t dst = tile + lane * kRowBytes;
        ptx::mbarrier_wait(ptx::smem_addr(&smem.empty[stage]), (g / S::kStages & 1) ^ 1);
        const uint32_t present = __ballot_sync(0xffffffffu, src != nullptr);
        if (src == nullptr) {  // 0 * NaN = NaN
            const uint32_t zeros[4] = {0, 0, 0, 0};
#pragma unroll 1
            for (int i = 0; i < kRowBytes; i += 16) {
                ptx::st_shared_v4(dst + i, zeros);
            }
            ptx::fence_proxy_async_smem();
        }
        __syncwarp();
        if (lane == 0) {
            smem.present[stage] = present;
            ptx::mbarrier_arrive_expect_tx(full, __popc(present) * kRowBytes);
        }
        __syncwarp();
        if (args.whole_tiles) {
            if (lane == 0 && present != 0) {
                ptx::bulk_load(tile, src, __popc(present) * kRowBytes, full, args.kv_policy);
            }
        } else if (src != nullptr) {
            ptx::bulk_load(dst, src, kRowBytes, full, args.kv_policy);
        }
    }

    __device__ __forceinline__ void run() const {
        PieceIterator it(smem.share);
        Piece piece;
        uint32_t g0 = 0;  // tiles before this piece
        while (it.advance(args.schedule, piece)) {
            const char* list = nullptr;
            const int bytes = args.index_is_64 ? 8 : 4;
            if (args.indices != nullptr) {
                const RowMap::Span span = args.row_map.span(piece.request);
                list = static_cast<const char*>(args.indices) +
                       (span.batch * args.indices_stride_b + span.first_token * args.indices_stride_s) * bytes;
            } else if (args.block_table != nullptr) {
                list = static_cast<const char*>(args.block_table) + piece.request * args.block_table_stride_b * bytes;
            }
            const int first = first_tile(piece);
            const int count = (max(first, last_tile(piece)) - first + S::kTileStep - 1) / S::kTileStep * S::kTileStep;
            const int last = first + count;
            // A stage always belongs to the same warp.
            int t = first + static_cast<int>((warp + S::kLoaders - g0 % S::kLoaders) % S::kLoaders);
            int next = fetch(piece, list, t * kKeys + lane);
#pragma unroll 1
            for (; t < last; t += S::kLoaders) {
                const int now = next;
                next = fetch(piece, list, (t + S::kLoaders) * kKeys + lane);
                load(row(now, t * kKeys + lane), g0 + (t - first));
            }
            g0 += last - first;
        }
    }
};

}  // namespace rows
}  // namespace flare::mla
