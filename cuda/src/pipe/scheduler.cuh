// Which tile a persistent block works on next. Static: every role computes the same sequence, no memory involved.
#pragma once

#include <cstdint>

namespace flare::pipe {

// Division by a run-time constant for n in [0, 2^31): multiply-high and shift, 10 cycles where a division takes 200.
struct FastDivisor {
    uint32_t divisor;
    uint32_t multiplier;
    uint32_t shift;

    static FastDivisor make(uint32_t divisor) {
        uint32_t shift = 0;
        while ((uint64_t{1} << shift) < divisor) {
            ++shift;
        }
        const uint64_t multiplier = (uint64_t{1} << 32) * ((uint64_t{1} << shift) - divisor) / divisor + 1;
        return {divisor, static_cast<uint32_t>(multiplier), shift};
    }

    __device__ __forceinline__ int quotient(int n) const {
        const uint32_t x = static_cast<uint32_t>(n);
        return static_cast<int>((__umulhi(x, multiplier) + x) >> shift);
    }
};

struct TileCoord {
    int m;      // row block
    int head;   // query head
    int batch;
};

// Tiles are numbered section by section. A section is a run of (batch, head) pairs; inside it the row block is the slow
// index, from the last (longest under a causal mask) to the first. Blocks take tiles round by round, odd rounds in reverse
// (so that nobody always gets the longest of a round). Or mirrored: a block takes tile i of a section from its front and
// tile i from its back, together as long as any other such two, so that no more than a few heads are read at a time.
// Or in two rounds a section, the second in reverse and hardly less than full: all blocks are through with a section at about
// the same time, and until then they read its heads only.
// The first `short_m` row blocks of all pairs come last of all, the row block slow, from short_m - 1 to 0: with a window
// those see fewer keys than the others, and fill the last rounds.
struct TileSchedule {
    int32_t num_m;
    int32_t num_tiles;          // num_m * batch * heads
    int32_t short_m;
    int32_t long_tiles;         // (num_m - short_m) * batch * heads
    FastDivisor section_tiles;  // pairs per section * (num_m - short_m)
    FastDivisor section_pairs;  // divides batch * heads
    FastDivisor all_pairs;      // batch * heads
    FastDivisor heads;
    bool mirrored;    // sections of an even number of tiles only
    bool two_rounds;  // sections of one to two tiles a block only

    static TileSchedule make(int32_t num_m, int32_t batch, int32_t heads, int32_t section_pairs, bool mirrored,
                             int32_t short_m = 0, bool two_rounds = false) {
        const int32_t long_m = num_m - short_m;
        const uint32_t section_tiles = static_cast<uint32_t>(long_m > 0 ? section_pairs * long_m : 1);
        return {num_m,
                num_m * batch * heads,
                short_m,
                long_m * batch * heads,
                FastDivisor::make(section_tiles),
                FastDivisor::make(section_pairs),
                FastDivisor::make(batch * heads),
                FastDivisor::make(heads),
                mirrored,
                two_rounds};
    }

    __device__ __forceinline__ TileCoord coord(int tile) const {
        if (tile >= long_tiles) {
            const int rest = tile - long_tiles;
            const int m = all_pairs.quotient(rest);
            const int pair = rest - m * static_cast<int>(all_pairs.divisor);
            const int batch = heads.quotient(pair);
            return {short_m - 1 - m, pair - batch * static_cast<int>(heads.divisor), batch};
        }
        const int section = section_tiles.quotient(tile);
        const int within = tile - section * static_cast<int>(section_tiles.divisor);
        const int m = section_pairs.quotient(within);
        const int pairs = static_cast<int>(section_pairs.divisor);
        const int pair = section * pairs + within - m * pairs;
        const int batch = heads.quotient(pair);
        return {num_m - 1 - m, pair - batch * static_cast<int>(heads.divisor), batch};
    }
};

struct TileCursor {
    int turn = 0;

    // The next tile of this block, or of the cluster of kCluster blocks that it belongs to; -1 when there is none left.
    template <int kCluster = 1>
    __device__ __forceinline__ int next(const TileSchedule& schedule) {
        const int grid = static_cast<int>(gridDim.x) / kCluster;
        const int cta = static_cast<int>(blockIdx.x) / kCluster;
        const bool odd = (turn & 1) != 0;
        int tile;
        if (schedule.mirrored) {
            tile = 2 * (turn / 2 * grid + cta);
            if (tile < schedule.num_tiles) {
                const int tiles = static_cast<int>(schedule.section_tiles.divisor);
                const int first = schedule.section_tiles.quotient(tile) * tiles;
                const int i = (tile - first) / 2;
                tile = first + (odd ? tiles - 1 - i : i);
            }
        } else if (schedule.two_rounds) {
            const int tiles = static_cast<int>(schedule.section_tiles.divisor);
            const int second = 2 * grid - 1 - cta;
            const bool left_out = odd && second >= tiles;  // goes on with the next section
            turn += left_out ? 1 : 0;
            tile = turn / 2 * tiles + (odd && !left_out ? second : cta);
        } else {
            tile = turn * grid + (odd ? grid - 1 - cta : cta);
        }
        ++turn;
        return tile < schedule.num_tiles ? tile : -1;
    }
};

}  // namespace flare::pipe
