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

// Attention of one query token per sequence. Strides are in elements.
struct DecodeParams {
  int64_t query_token_stride;
  int64_t query_head_stride;
  int64_t key_block_stride;
  int64_t key_token_stride;  // flash layouts only: the packed layout fixes its inner axes
  int64_t key_head_stride;
  int64_t value_block_stride;
  int64_t value_token_stride;
  int64_t value_head_stride;
  int64_t table_stride;  // between the rows of the block table
  int64_t table_step;    // inside one
  int64_t seq_len_stride;
  int64_t query_start_stride;  // flash layouts only
  int64_t out_token_stride;
  int64_t out_head_stride;
  int64_t lse_head_stride;
  int64_t lse_token_stride;
  int64_t slope_stride;
  int64_t sink_stride;
  int64_t num_states;      // that the workspace holds
  FastDivisor block_size;  // flash layouts only
  float scale;             // of q . k
  float softcap;           // 0 for none
  float k_scale;           // used where the kernel's pointer is null
  float v_scale;
  int32_t k_scale_stride;  // between the scales of heads, 0 where all share one
  int32_t v_scale_stride;
  int32_t num_seqs;
  int32_t queries_per_kv;
  int32_t units_per_kv_head;   // parts of a group
  int32_t units_per_sequence;  // num_kv_heads times those
  int32_t units_per_bundle;    // that a CTA takes at once
  int32_t ctas_per_share;      // bundles of a group
  int32_t groups_per_sequence;
  int32_t team_warps;      // of a CTA's, for each of its units
  int32_t window_left;     // -1 for no bound
  int32_t partition_size;  // tokens; 0 for equal shares
  int32_t num_partitions;  // of a sequence, at most
  int32_t num_heads;
  int32_t sinks_are_float32;  // else they have the query's dtype
};

// Attention of any number of query tokens per sequence. Strides are in elements.
struct VarlenParams {
  int64_t query_token_stride;
  int64_t query_head_stride;
  int64_t key_block_stride;
  int64_t key_token_stride;
  int64_t key_head_stride;
  int64_t value_block_stride;
  int64_t value_token_stride;
  int64_t value_head_stride;
  int64_t table_stride;  // between the rows of the block table
  int64_t table_step;    // inside one
  int64_t seq_len_stride;
  int64_t query_start_stride;
  int64_t out_token_stride;
  int64_t out_head_stride;
  int64_t lse_head_stride;
  int64_t lse_token_stride;
  int64_t slope_stride;
  int64_t sink_stride;
  int64_t num_states;  // that the workspace holds
  FastDivisor block_size;
  FastDivisor queries_per_kv;
  FastDivisor num_kv_heads;
  FastDivisor num_splits;
  FastDivisor num_heads;
  float scale;    // of q . k
  float softcap;  // 0 for none
  float k_scale;  // used where the kernel's pointer is null
  float v_scale;
  int32_t k_scale_stride;  // between the scales of heads, 0 where all share one
  int32_t v_scale_stride;
  int32_t num_seqs;
  int32_t least_queries;  // of a sequence: those with fewer are left to others
  int32_t window_left;    // -1 for no bound
  int32_t window_right;
  int32_t sinks_are_float32;  // else they have the query's dtype
};

// One of two attention states, or what they merge into. Strides are in elements.
struct MergeSide {
  int64_t token_stride;
  int64_t head_stride;
  int64_t lse_head_stride;
  int64_t lse_token_stride;
};

struct MergeParams {
  MergeSide prefix, suffix, merged;
  FastDivisor packs_per_row;  // of one query and head
  FastDivisor num_heads;
  int64_t num_packs;
};

// One end of a copy of keys or values. Strides are in elements.
struct CopyEnd {
  int64_t block_stride;
  int64_t token_stride;
  int64_t head_stride;
  int64_t pack_stride;  // between as many features as 16 bytes hold
};

// What a CTA copies: some tokens' packs of some heads, so many tokens and packs of each at a time.
struct CopyTile {
  FastDivisor packs_per_head;
  FastDivisor packs_per_step;
  uint32_t tokens_per_step;
  uint32_t num_heads;
  int32_t num_tokens;
};

// One side (K or V) of a gather.
struct GatherSide {
  CopyEnd cache, out;
  float scale;           // used where the kernel's scale pointer is null
  int32_t scale_stride;  // between the scales of heads, 0 where all share one
};

struct GatherParams {
  GatherSide sides[2];   // K, V
  int64_t table_stride;  // between the rows of the block table
  int64_t table_step;    // inside one
  int64_t row_start_stride;
  int64_t seq_start_stride;
  FastDivisor block_size;
  CopyTile tile;
  int32_t num_seqs;
  int32_t num_rows;  // that the outputs have
};

// One side (K or V) of a change of layout.
struct ConvertSide {
  CopyEnd source, target;
};

struct ConvertParams {
  ConvertSide sides[2];  // K, V
  FastDivisor block_size;
  CopyTile tile;
  int64_t num_slots;
};

// A decode step that the device lays out. Strides are in elements.
struct AdvanceParams {
  int64_t table_stride;  // between the rows of the block table
  int64_t table_step;    // inside one
  FastDivisor block_size;
  int32_t num_seqs;
  int32_t max_blocks;
};

// Where the blocks of one cache lie, or one part of each: block i at `source + i * source_block_stride`. In bytes.
struct BlockAddresses {
  int64_t source;
  int64_t target;
  int64_t source_block_stride;
  int64_t target_block_stride;
};

// Moves of whole blocks. A block is `num_rows` rows, each of adjoining bytes.
struct BlockMoveParams {
  int64_t source_row_stride;  // in bytes
  int64_t target_row_stride;
  int64_t pair_stride;  // of the mapping, in elements
  int64_t side_stride;  // from a source to its destination
  int64_t block_packs;  // of a block: num_rows * row_packs
  int64_t num_items;    // parts of blocks: num_caches * num_pairs * parts_per_block
  FastDivisor row_packs;
  FastDivisor parts_per_block;
  FastDivisor num_pairs;
};

// The ceilings a benchmark measures beside its kernels.
struct StreamParams {
  int64_t num_packs;  // of 16 bytes
  uint32_t never;     // a value the reader's data does not fold to
};

// The floor of a decode step.
struct BlockReadParams {
  uint32_t num_items;  // 2 * num_seqs * max_blocks * num_kv_heads
  uint32_t max_blocks;
  uint32_t num_kv_heads;
  uint32_t packs_per_head;  // of 16 bytes, in one block
  int32_t block_size;
  uint32_t never;  // as above
};

}  // namespace pagedkv
