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

}  // namespace pagedkv
