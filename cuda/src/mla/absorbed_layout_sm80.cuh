// Tile sizes and shared memory of the portable absorbed kernel (absorbed_mma_sm80.cuh has the schedule).
#pragma once

#include <cstdint>

namespace flare::mla::absorbed {

inline constexpr int kThreads = 256;
inline constexpr int kWarps = kThreads / 32;
inline constexpr int kKeys = 32;  // of a key tile: one warp looks up their places
inline constexpr int kLatentCols = 512;
inline constexpr int kCols = 576;                      // [latent | rope], zeros where d_c < 512 or d_rope < 64
inline constexpr int kRowBytes = 2 * kCols + 16;       // eight rows at one column fall on different banks
inline constexpr int kLatentChunks = kLatentCols / 8;  // of 16 bytes
inline constexpr int kTileBytes = kKeys * kRowBytes;
inline constexpr int kRawBytes = kKeys * 656;
inline constexpr int kPlaces = 4;  // ring of key places: tiles i .. i + 3 are in use

// Tiles in flight, and buffers of 16-bit and of raw 656-byte rows.
template <bool kRow656>
struct Stages {
    static constexpr int kAhead = kRow656 ? 2 : 1;
    static constexpr int kTiles = kRow656 ? 1 : 2;
    static constexpr int kRaw = kRow656 ? 2 : 0;
};

// Warps that score the same keys share out the channels: group g has latents [128 g, 128 g + 128), which have one scale in
// 656-byte rows, and rope channels [16 g, 16 g + 16).
inline constexpr int kScoreGroups = 4;
inline constexpr int kLatentSteps = kLatentCols / 16 / kScoreGroups;
inline constexpr int kScoreSteps = kCols / 16 / kScoreGroups;
static_assert(kScoreSteps == kLatentSteps + 1);

__device__ __forceinline__ constexpr int step_column(int group, int step) {
    return step < kLatentSteps ? 128 * group + 16 * step : kLatentCols + 16 * group;
}
inline constexpr int kScorePitch = kKeys + 8;   // floats: rows of 8 banks apart
inline constexpr int kWeightPitch = kKeys + 8;  // halves: rows of 80 bytes, conflict-free for ldmatrix
inline constexpr int kWarpCols = kLatentCols / kWarps;

// 656-byte rows keep their e4m3 values unscaled, which fp16 holds exactly; scores of a group are multiplied by the key's scale
// of that group, and P comes in four versions, one times the scale of each group.
template <int kRows, bool kRow656>
struct SharedStorage {
    alignas(128) uint8_t k[Stages<kRow656>::kTiles][kTileBytes];
    alignas(16) uint8_t raw[kRow656 ? Stages<kRow656>::kRaw : 1][kRow656 ? kRawBytes : 16];
    alignas(16) float scores[kScoreGroups][kRows][kScorePitch];
    alignas(16) uint16_t weights[kRow656 ? kScoreGroups : 1][kRows][kWeightPitch];
    alignas(16) float scales[kRow656 ? kKeys : 1][kScoreGroups];
    float row_scale[kRows];
    int64_t latent_at[kPlaces][kKeys];  // byte offsets
    int64_t rope_at[kPlaces][kKeys];
    uint32_t present[kPlaces];  // bit j: key j of the tile exists
};
static_assert(sizeof(SharedStorage<16, true>) <= 101376, "shared memory of a block on sm_86");
static_assert(sizeof(SharedStorage<32, false>) <= 101376, "shared memory of a block on sm_86");

__device__ __forceinline__ uint32_t chunk_offset(int row, int chunk) {
    return static_cast<uint32_t>(row * kRowBytes + chunk * 16);
}

}  // namespace flare::mla::absorbed
