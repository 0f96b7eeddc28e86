// From token positions to cache addresses: what a slot or a block id means is known here alone.
#pragma once
#include "params.cuh"

namespace pagedkv {

struct SlotPosition {
  int64_t block;
  int32_t offset;
};

// Slot s is block s / block_size, offset s % block_size.
__device__ __forceinline__ SlotPosition locate(int64_t slot, const FastDivisor& block_size) {
  const int64_t block = block_size.divide(slot);
  return {block, static_cast<int32_t>(slot - block * block_size.divisor)};
}

// Keys from `first` on, before `end`.
struct KeyRange {
  int32_t first, end;

  __device__ __forceinline__ bool has(int32_t key) const { return key >= first && key < end; }
  // Any of so many.
  __device__ __forceinline__ bool has_of(int32_t key, int32_t count) const { return key < end && key + count > first; }
};

// The keys and values of one sequence and kv head in a packed cache, those that a query sees. Blocks without any are
// never followed: their ids may be anything.
template <class cache_t, int BLOCK_SIZE>
struct PackedSequence {
  static constexpr int X = 16 / sizeof(cache_t);  // features of a pack of K, tokens of a pack of V

  const cache_t* key;  // of the kv head, block 0
  const cache_t* value;
  const int32_t* block_table;  // of the sequence
  int64_t table_step, key_block_stride, value_block_stride;
  KeyRange seen;

  // The block of a token; 0, which is always there, for one next to which none is seen.
  __device__ __forceinline__ int32_t block_of(int32_t token, int32_t count) const {
    return seen.has_of(token, count) ? block_table[token / BLOCK_SIZE * table_step] : 0;
  }
  __device__ __forceinline__ const cache_t* key_pack(int32_t block, int32_t token, int32_t pack) const {
    return key + block * key_block_stride + (pack * BLOCK_SIZE + token % BLOCK_SIZE) * X;
  }
  __device__ __forceinline__ const cache_t* values_of(int32_t block, int32_t token, int32_t feature) const {
    return value + block * value_block_stride + feature * BLOCK_SIZE + token % BLOCK_SIZE;
  }
};

// The keys and values of one sequence and kv head in an NHD or HND cache, a row of features for each token.
template <class cache_t>
struct FlashSequence {
  const cache_t* key;  // of the kv head, block 0
  const cache_t* value;
  const int32_t* block_table;  // of the sequence
  int64_t table_step, key_block_stride, key_token_stride, value_block_stride, value_token_stride;
  FastDivisor block_size;

  struct Row {
    int64_t key, value;  // offsets
  };
  struct Slot {
    int32_t block, offset;
  };
  __device__ __forceinline__ Slot find(int32_t token) const {
    const SlotPosition position = locate(token, block_size);
    return {block_table[position.block * table_step], position.offset};
  }
  __device__ __forceinline__ Row row(const Slot& slot) const {
    return {slot.block * key_block_stride + slot.offset * key_token_stride,
            slot.block * value_block_stride + slot.offset * value_token_stride};
  }
};

// The same, and what of it a query sees.
template <class cache_t>
struct SeenFlashSequence : FlashSequence<cache_t> {
  KeyRange seen;
};

// Where a slot lies in a cache, in elements.
__device__ __forceinline__ int64_t offset_of(const SlotPosition& position, const CopyEnd& cache) {
  return position.block * cache.block_stride + position.offset * cache.token_stride;
}

// Ranges of several sequences' tokens as rows, one range after the other.
struct TokenRanges {
  const int32_t* cu_seq_lens;  // [num_seqs + 1]: where each sequence's rows start
  const int32_t* seq_starts;   // [num_seqs]: the first token of each range, or null: 0
  const int32_t* block_table;  // [num_seqs, max_blocks]
  const GatherParams& params;

  __device__ __forceinline__ int32_t row_start(int32_t sequence) const {
    return cu_seq_lens[sequence * params.row_start_stride];
  }
  // Those that there are and that fit.
  __device__ __forceinline__ int32_t num_rows() const { return min(row_start(params.num_seqs), params.num_rows); }

  // The last sequence that starts at a row or before it: one that is empty starts where the next one does.
  __device__ __forceinline__ int32_t sequence_of(int32_t row) const {
    int32_t first = 0, last = params.num_seqs - 1;
    while (first < last) {
      const int32_t middle = (first + last + 1) / 2;
      if (row_start(middle) <= row)
        first = middle;
      else
        last = middle - 1;
    }
    return first;
  }

  // Where a row's token lies.
  __device__ __forceinline__ SlotPosition find(int32_t row) const {
    const int32_t sequence = sequence_of(row);
    const int64_t start = seq_starts == nullptr ? 0 : seq_starts[sequence * params.seq_start_stride];
    const SlotPosition position = locate(start + row - row_start(sequence), params.block_size);
    return {block_table[sequence * params.table_stride + position.block * params.table_step], position.offset};
  }
};

}  // namespace pagedkv
