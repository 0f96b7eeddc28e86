// How a warp copies rows of features into shared memory.
#pragma once
#include "copy.cuh"
#include "paging.cuh"

namespace pagedkv {

// Rows of so many packs in shared memory, placed so that eight rows that ldmatrix reads at once differ in banks.
template <int PACKS>
struct SwizzledRows {
  static __device__ __forceinline__ int place(int row, int pack) {
    constexpr int CYCLE = PACKS % 8 == 0 ? 8 : PACKS % 4 == 0 ? 4 : PACKS % 2 == 0 ? 2 : 1;
    return row * PACKS + (pack ^ row / (8 / CYCLE) % CYCLE);
  }
};

// By a warp: zeros in the rows of tokens that are not seen, the first of which is `first_token`.
template <int PACKS, int ROWS>
__device__ __forceinline__ void clear_unseen_rows(const KeyRange& seen, int32_t first_token, void* rows_smem) {
#pragma unroll 1
  for (int i = threadIdx.x % 32; i < ROWS * PACKS; i += 32)
    if (!seen.has(first_token + i / PACKS)) static_cast<uint4*>(rows_smem)[i] = {};
}

// Where a lane reads such rows by ldmatrix: a row and pack of its own, and from there some rows and packs further on.
template <int PACKS>
class SwizzledReader {
  static constexpr bool IS_WHOLE = PACKS % 8 == 0;  // a row is as many lines: only the lowest bits of a pack are mixed

 public:
  // The rows begin at a multiple of 128 bytes.
  __device__ __forceinline__ SwizzledReader(const void* rows_smem, int row, int pack)
      : start_(address_of(rows_smem) + (IS_WHOLE ? SwizzledRows<PACKS>::place(row, pack) * 16 : 0)),
        row_(row),
        pack_(pack) {}

  // `rows` is a multiple of 8, and no bit of `packs` is one of the lane's own pack: both are constants, and cost next
  // to nothing.
  __device__ __forceinline__ uint32_t at(int rows, int packs) const {
    if constexpr (IS_WHOLE)
      return (start_ ^ packs % 8 * 16) + (rows * PACKS + packs / 8 * 8) * 16;
    else
      return start_ + SwizzledRows<PACKS>::place(row_ + rows, pack_ + packs) * 16;
  }

 private:
  uint32_t start_;
  int row_, pack_;
};

// Copies ROWS rows of SIZE numbers into rows of PACKS packs; what a row lacks there is 0. The rows may lie anywhere: a
// lane knows the address of each.
template <class T, int SIZE, int PACKS, int ROWS, bool IS_ALIGNED>
class RowCopy {
  static constexpr int X = 16 / sizeof(T);  // numbers of a pack
  // Lanes that share a row: with eight of them a warp copies whole lines.
  static constexpr int LANES = PACKS >= 8 ? 8 : PACKS >= 4 ? 4 : PACKS >= 2 ? 2 : 1;
  static constexpr int AT_ONCE = 32 / LANES, ROUNDS = (ROWS + AT_ONCE - 1) / AT_ONCE;
  static constexpr int PERIOD = AT_ONCE < 8 && ROUNDS > 1 ? 8 / AT_ONCE : 1;  // rounds after which places repeat
  static_assert(ROWS % 8 == 0 && ROUNDS % PERIOD == 0, "whole periods");

 public:
  __device__ __forceinline__ RowCopy() {
#pragma unroll
    for (int i = 0; i < PERIOD; i++)
      target_[i] = pinned(SwizzledRows<PACKS>::place(i * AT_ONCE + first_row(), first_pack()) * X);
  }

  // Lane r has the address of row r. As a loop the code is short, for where it runs once and would be waited for.
  template <bool IS_LOOP>
  __device__ __forceinline__ void copy(uint64_t row_of_lane, T* rows_smem) const {
#pragma unroll(IS_LOOP ? 1 : ROUNDS)
    for (int round = 0; round < ROUNDS; round += PERIOD)
#pragma unroll
      for (int i = 0; i < PERIOD; i++) {
        const int row = (round + i) * AT_ONCE + first_row();
        const uint64_t address = __shfl_sync(WARP, row_of_lane, row);
        if (ROWS % AT_ONCE != 0 && row >= ROWS) break;
        const T* source = pinned(reinterpret_cast<const T*>(address) + first_pack() * X);
        T* target_smem = rows_smem + target_[i] + round * AT_ONCE * PACKS * X;
#pragma unroll
        for (int j = 0; j < PACKS; j += LANES) {
          if (PACKS % LANES != 0 && j + first_pack() >= PACKS) break;
          copy_pack(target_smem + j * X, source + j * X, (j + first_pack()) * X);
        }
      }
  }

 private:
  static __device__ __forceinline__ int first_row() { return threadIdx.x % 32 / LANES; }
  static __device__ __forceinline__ int first_pack() { return threadIdx.x % 32 % LANES; }

  static __device__ __forceinline__ void copy_pack(T* target_smem, const T* source, int first) {
    if constexpr (IS_ALIGNED) {
      copy_async(target_smem, source, PACKS * X == SIZE || first < SIZE);
    } else {
#pragma unroll
      for (int i = 0; i < X; i++) target_smem[i] = first + i < SIZE ? source[i] : T{};
    }
  }

  int target_[PERIOD];  // where a lane's first packs go
};

}  // namespace pagedkv
