// A tile of a packed cache, as a warp holds it in shared memory: copied as it lies in its blocks, which is what
// ldmatrix reads: rows of 16 bytes, of K some features of a token, of V some tokens of a feature.
#pragma once
#include "copy.cuh"
#include "dequantize.cuh"
#include "paging.cuh"

namespace pagedkv {

template <class T, int SIZE, int BLOCK_SIZE, bool IS_ALIGNED>
class PackedTile {
 public:
  using cache_t = T;
  using Sequence = PackedSequence<cache_t, BLOCK_SIZE>;
  static constexpr int HEAD_SIZE = SIZE, TOKENS = 32;
  static constexpr int X = Sequence::X;                      // numbers of a row of 16 bytes
  static constexpr int FRAGMENTS = X / 8;                    // of A that four 8 x 8 matrices make
  static constexpr int SIDE_PACKS = TOKENS * HEAD_SIZE / X;  // of its keys, or of its values

  // The token that is a row of a group of 8. Rows 2 c and 2 c + 1 of both groups of a fragment are the tokens that lane
  // column c holds of a row of V: adjoining pairs of 16-bit numbers, or fours of 8-bit ones.
  static __device__ __forceinline__ int token(int matrix, int row) {
    return FRAGMENTS == 1 ? matrix * 8 + row : matrix / 2 * 16 + row / 2 * 4 + matrix % 2 * 2 + row % 2;
  }
  // The feature that is a row of the upper or lower half of 16.
  static __device__ __forceinline__ int feature(int half, int row) { return half * 8 + row; }

  // ---- copies -------------------------------------------------------------------------------------------------------

  // Looks up where a tile lies: lane p finds the block of part p.
  __device__ __forceinline__ void find(const Sequence& sequence, int32_t tile) {
    next_block_ = sequence.block_of(tile * TOKENS + lane() % PARTS * PART_TOKENS, PART_TOKENS);
  }
  // From now on copies are of the tile that was looked up.
  __device__ __forceinline__ void take(const Sequence&) { block_ = next_block_; }

  template <bool IS_FIRST>
  __device__ __forceinline__ void copy_keys(const Sequence& sequence, int32_t tile, cache_t* side_smem) const {
    copy_parts<PART_TOKENS>(sequence, tile, side_smem, [&](int32_t block, int token) {
      return sequence.key_pack(block, tile * TOKENS + token, 0);
    });
  }
  template <bool IS_FIRST>
  __device__ __forceinline__ void copy_values(const Sequence& sequence, int32_t tile, cache_t* side_smem) const {
    copy_parts<VALUE_PACKS>(sequence, tile, side_smem, [&](int32_t block, int token) {
      return sequence.values_of(block, tile * TOKENS + token, 0);
    });
  }

  // Values next to seen ones may be anything, and 0 x NaN is NaN.
  static __device__ __forceinline__ void clear_unseen_values(const Sequence& sequence, int32_t tile,
                                                             cache_t* side_smem) {
    const int row = lane() / VALUE_PACKS, pack = place<VALUE_PACKS>(row, lane() % VALUE_PACKS);
#pragma unroll 1
    for (int part = 0; part < PARTS; part++) {
      // What a lane's packs have of tokens is the same for all of them.
      const int32_t first = tile * TOKENS + part * PART_TOKENS + pack * X;
      uint32_t masks[4] = {};
#pragma unroll
      for (int i = 0; i < X; i++)
        if (sequence.seen.has(first + i % PART_TOKENS)) masks[i / (X / 4)] |= WORD_MASK << i % (X / 4) * WORD_BITS;
#pragma unroll 1
      for (int i = lane(); i < PART_PACKS; i += 32) {
        auto* words = reinterpret_cast<uint4*>(side_smem + (part * PART_PACKS + i) * X);
        const uint4 old = *words;
        *words = {old.x & masks[0], old.y & masks[1], old.z & masks[2], old.w & masks[3]};
      }
    }
    __syncwarp();
  }

  // ---- fragments ----------------------------------------------------------------------------------------------------

  // 16 tokens, of which this is the first, of two packs of features, or of the last one: K as A.
  static __device__ __forceinline__ void load_keys(const cache_t* side_smem, int first_token, int pack,
                                                   uint32_t (&keys)[FRAGMENTS][4]) {
    const bool has_second = pack + 1 < HEAD_SIZE / X;
    uint32_t matrices[4];
    // Lane l gives the address of row l % 8 of matrix l / 8: two groups of 8 tokens, of both two rows of 16 bytes.
    const int group = lane() / 8 % 2, half = lane() / 16;
    const cache_t* row_smem = side_smem + key_offset(token(group, lane() % 8), has_second ? half : 0);
    load_matrices(matrices, address_of(row_smem + key_offset(first_token, pack)));
    make_fragments<cache_t>(matrices, keys);
    if (FRAGMENTS == 1 && !has_second) keys[0][2] = keys[0][3] = 0;
  }

  // Features f * 16 ... of as many tokens as two rows of 16 bytes hold: V^T as A.
  static __device__ __forceinline__ void load_values(const cache_t* side_smem, int first_token, int f,
                                                     uint32_t (&values)[FRAGMENTS][4]) {
    const bool has_second = f * 16 + 8 < HEAD_SIZE;
    const int feature = f * 16 + (has_second ? lane() / 8 % 2 * 8 : 0) + lane() % 8;
    uint32_t matrices[4];
    if constexpr (PART_TOKENS >= X)
      load_matrices(matrices, address_of(side_smem + value_offset(first_token + lane() / 16 * X, feature)));
    else  // a row of 16 bytes has two features: every lane takes its own four tokens
#pragma unroll
      for (int i = 0; i < 4; i++) {
        const int row_of_lane = f * 16 + (has_second ? i % 2 * 8 : 0) + lane() / 4;
        matrices[i] = *reinterpret_cast<const uint32_t*>(
            side_smem + value_offset(first_token + i / 2 * X + lane() % 4 * 4, row_of_lane));
      }
    make_fragments<cache_t>(matrices, values);
    if (!has_second)
#pragma unroll
      for (int i = 0; i < FRAGMENTS; i++) values[i][1] = values[i][3] = 0;
  }

 private:
  // What a tile has of a block.
  static constexpr int PART_TOKENS = BLOCK_SIZE < TOKENS ? BLOCK_SIZE : TOKENS;
  static constexpr int PARTS = TOKENS / PART_TOKENS, PART_PACKS = SIDE_PACKS / PARTS;
  static constexpr int VALUE_PACKS = PART_TOKENS < X ? 1 : PART_TOKENS / X;  // of a feature
  static constexpr int WORD_BITS = 8 * sizeof(cache_t);
  static constexpr uint32_t WORD_MASK = (1u << WORD_BITS) - 1;

  static __device__ __forceinline__ int lane() { return threadIdx.x % 32; }

  // Where a pack is put in a row of ROW_PACKS: of short rows, those that eight lanes read at once then differ in banks.
  template <int ROW_PACKS>
  static __device__ __forceinline__ int place(int row, int pack) {
    return ROW_PACKS < 8 ? pack ^ row * ROW_PACKS / 8 % ROW_PACKS : pack;
  }

  // The parts of a tile that are seen. A part has rows of ROW_PACKS packs, which lie BLOCK_SIZE / PART_TOKENS times as
  // far apart in the cache.
  template <int ROW_PACKS, class SourceOf>
  __device__ __forceinline__ void copy_parts(const Sequence& sequence, int32_t tile, cache_t* side_smem,
                                             const SourceOf& source_of) const {
    constexpr int SPREAD = BLOCK_SIZE / PART_TOKENS;
    static_assert(32 % ROW_PACKS == 0, "after a warp's packs the next ones begin with a row, placed like the first");
    const int row = lane() / ROW_PACKS, pack = lane() % ROW_PACKS;
    cache_t* target_smem = side_smem + (row * ROW_PACKS + place<ROW_PACKS>(row, pack)) * X;
#pragma unroll
    for (int part = 0; part < PARTS; part++) {
      const cache_t* source = source_of(__shfl_sync(WARP, block_, part), part * PART_TOKENS);
      source = pinned(source + (row * ROW_PACKS * SPREAD + pack) * X);  // or each copy would compute its own
      const bool is_seen = sequence.seen.has_of(tile * TOKENS + part * PART_TOKENS, PART_TOKENS);
#pragma unroll(IS_ALIGNED ? PART_PACKS : 1)  // element by element a pack is long enough
      for (int i = 0; i < PART_PACKS; i += 32) {
        if (PART_PACKS % 32 != 0 && i + lane() >= PART_PACKS) break;
        copy_elements<X, IS_ALIGNED>(target_smem + (part * PART_PACKS + i) * X, source + i * SPREAD * X, is_seen);
      }
    }
  }

  // Where in a side: features from pack * X on of a token; tokens from `token` on of a feature.
  static __device__ __forceinline__ int key_offset(int token, int pack) {
    return ((token / PART_TOKENS * (HEAD_SIZE / X) + pack) * PART_TOKENS + token % PART_TOKENS) * X;
  }
  static __device__ __forceinline__ int value_offset(int token, int feature) {
    const int row = token / PART_TOKENS * HEAD_SIZE + feature, pack = token % PART_TOKENS / X;
    return row * PART_TOKENS + place<VALUE_PACKS>(feature, pack) * X + token % PART_TOKENS % X;
  }

  int32_t next_block_, block_;
};

}  // namespace pagedkv
