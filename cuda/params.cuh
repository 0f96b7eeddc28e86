// By-value parameter structs, one per kernel family. pagedkv/params.py mirrors each field in NumPy and appends
// static_asserts on sizes and order to every compiled source.
#pragma once
#include "types.cuh"

namespace pagedkv {

// Division of numbers below 2^63 by one that the host knows, without a branch: (high(x * multiplier) + x) >> shift
// (Granlund and Montgomery, "Division by invariant integers using multiplication", 1994).
struct FastDivisor {
  uint64_t multiplier;
  uint32_t divisor;
  uint32_t shift;

  __device__ __forceinline__ uint64_t divide(uint64_t x) const { return (__umul64hi(x, multiplier) + x) >> shift; }
};

// One side (K or V) of a cache write. Strides are in elements.
struct CacheWriteSide {
  int64_t token_stride;  // of the new rows
  int64_t head_stride;
  int64_t cache_block_stride;  // of the cache
  int64_t cache_token_stride;  // flash layouts only: the packed layout fixes its inner axes
  int64_t cache_head_stride;
  float scale;           // used where the kernel's scale pointer is null
  int32_t scale_stride;  // between the scales of heads, 0 where all share one
};

struct CacheWriteParams {
  CacheWriteSide sides[2];  // K, V
  int64_t slot_stride;
  FastDivisor block_size;
  FastDivisor num_kv_heads;
  int32_t num_tokens;
  int32_t lanes_per_token_log2;  // flash layouts: threads that share a token
};

// The ceilings a benchmark measures beside its kernels.
struct StreamParams {
  int64_t num_packs;  // of 16 bytes
  uint32_t never;     // a value the reader's data does not fold to
};

}  // namespace pagedkv
