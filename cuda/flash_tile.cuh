// A tile of an NHD or HND cache, as a warp holds it in shared memory: of every token a row of features, of K and of V.
// K as an operand is what ldmatrix reads of such rows, and V^T what it reads transposed.
#pragma once
#include "copy.cuh"
#include "dequantize.cuh"
#include "paging.cuh"
#include "row_copy.cuh"

namespace pagedkv {

template <class T, int SIZE>
class FlashTile {
 public:
  using cache_t = T;
  using Sequence = SeenFlashSequence<cache_t>;
  static constexpr int HEAD_SIZE = SIZE, TOKENS = 32;
  static constexpr int X = 16 / sizeof(cache_t);             // numbers of 16 bytes
  static constexpr int FRAGMENTS = X / 8;                    // of A that four 8 x 8 matrices make
  static constexpr int SIDE_PACKS = TOKENS * HEAD_SIZE / X;  // of its keys, or of its values

  // The token that is a row of a group of 8.
  static __device__ __forceinline__ int token(int matrix, int row) { return matrix * 8 + row; }
  // The feature that is a row of the upper or lower half of 16. Codes come in pairs of features, the halves of a word.
  static __device__ __forceinline__ int feature(int half, int row) {
    return FRAGMENTS == 1 ? half * 8 + row : row * 2 + half;
  }

  // ---- copies -------------------------------------------------------------------------------------------------------

  // Looks up where a tile lies: every lane finds the slot of one token; 0, which is always there, if it is not seen.
  __device__ __forceinline__ void find(const Sequence& sequence, int32_t tile) {
    const int32_t token = tile * TOKENS + lane();
    next_ = {0, 0};
    if (sequence.seen.has(token)) next_ = sequence.find(token);
  }
  // From now on copies are of the tile that was looked up.
  __device__ __forceinline__ void take(const Sequence& sequence) {
    const auto row = sequence.row(next_);
    key_ = reinterpret_cast<uint64_t>(sequence.key + row.key);
    value_ = reinterpret_cast<uint64_t>(sequence.value + row.value);
  }

  // The first of a segment in a loop, whose code is there after one round: what runs once waits for it.
  template <bool IS_FIRST>
  __device__ __forceinline__ void copy_keys(const Sequence&, int32_t, cache_t* side_smem) const {
    rows_.template copy<IS_FIRST>(key_, side_smem);
  }
  template <bool IS_FIRST>
  __device__ __forceinline__ void copy_values(const Sequence&, int32_t, cache_t* side_smem) const {
    rows_.template copy<IS_FIRST>(value_, side_smem);
  }

  // Values of tokens that are not seen may be anything, and 0 x NaN is NaN.
  static __device__ __forceinline__ void clear_unseen_values(const Sequence& sequence, int32_t tile,
                                                             cache_t* side_smem) {
    clear_unseen_rows<ROW_PACKS, TOKENS>(sequence.seen, tile * TOKENS, side_smem);
    __syncwarp();
  }

  // ---- fragments ----------------------------------------------------------------------------------------------------

  // 16 tokens, of which this is the first, of two packs of features, or of the last one: K as A.
  static __device__ __forceinline__ void load_keys(const cache_t* side_smem, int first_token, int pack,
                                                   uint32_t (&keys)[FRAGMENTS][4]) {
    const bool has_second = pack + 1 < ROW_PACKS;
    uint32_t matrices[4];
    load_matrices(matrices, Reader(side_smem, lane() % 16, has_second ? lane() / 16 : 0).at(first_token, pack));
    make_fragments<cache_t>(matrices, keys);
    if (FRAGMENTS == 1 && !has_second) keys[0][2] = keys[0][3] = 0;
  }

  // Features f * 16 ... of 16 tokens, or of 32 whose numbers are codes: V^T as A.
  static __device__ __forceinline__ void load_values(const cache_t* side_smem, int first_token, int f,
                                                     uint32_t (&values)[FRAGMENTS][4]) {
    uint32_t matrices[4];
    if constexpr (FRAGMENTS == 1) {
      const bool has_second = f * 16 + 8 < HEAD_SIZE;
      const Reader reader(side_smem, lane() / 16 * 8 + lane() % 8, has_second ? lane() / 8 % 2 : 0);
      load_matrices_transposed(matrices, reader.at(first_token, 2 * f));
      make_fragments<cache_t>(matrices, values);
      if (!has_second) values[0][1] = values[0][3] = 0;
    } else {
      load_matrices_transposed(matrices, Reader(side_smem, lane(), 0).at(first_token, f));
#pragma unroll
      for (int i = 0; i < 4; i++) {
        const WordHalves codes = halves(__byte_perm(matrices[i], 0, 0x3120));  // two tokens of each feature
        values[i / 2][i % 2 * 2] = float16_pair<FP8_FORMAT<cache_t>>(codes.low);
        values[i / 2][i % 2 * 2 + 1] = float16_pair<FP8_FORMAT<cache_t>>(codes.high);
      }
    }
  }

 private:
  static constexpr int ROW_PACKS = HEAD_SIZE / X;
  static_assert(HEAD_SIZE % X == 0, "rows are packs");
  using Reader = SwizzledReader<ROW_PACKS>;

  static __device__ __forceinline__ int lane() { return threadIdx.x % 32; }

  RowCopy<cache_t, HEAD_SIZE, ROW_PACKS, TOKENS, true> rows_;
  typename Sequence::Slot next_;
  uint64_t key_, value_;  // of the row of a lane's token
};

}  // namespace pagedkv
