// Reads keys and values out of the blocks of a paged cache, K and V in one launch: blockIdx.y picks one. A CTA takes
// some heads of some adjacent tokens: first a thread finds where each token lies, then all threads copy packs.
//
// gather_cache: ranges of sequences into rows, one range after the other; fp8 codes become numbers.
//
// convert_layout: all tokens of all blocks into blocks of another layout, every bit as it is.
//
// Values of packed blocks are rows of tokens. A thread then loads, or stores, the features of its pack one by one, and
// the lanes beside it those of adjacent tokens, so that a warp touches whole sectors there too.
#include "dequantize.cuh"
#include "paging.cuh"
#include "params.cuh"
#include "token_copy.cuh"

namespace pagedkv {

// Of tokens whose features are loaded or stored one by one: these are many accesses already.
inline constexpr int SPREAD_TOKENS_IN_FLIGHT = 2;

template <class scalar_t, class cache_t, int VEC, int TOKEN_LANES, int TOKENS_IN_FLIGHT, int THREADS>
__global__ void __launch_bounds__(THREADS)
    gather_cache(const cache_t* __restrict__ key_cache,    // NHD, HND or packed blocks: strides tell
                 const cache_t* __restrict__ value_cache,  // of the same layout
                 const int32_t* __restrict__ block_table,  // [num_seqs, max_blocks]
                 const int32_t* __restrict__ cu_seq_lens,  // [num_seqs + 1]
                 const int32_t* __restrict__ seq_starts,   // [num_seqs], or null: 0
                 const float* __restrict__ k_scale,        // [1] or [num_kv_heads], or null
                 const float* __restrict__ v_scale,        // [1] or [num_kv_heads], or null
                 scalar_t* __restrict__ key_out,           // [num_tokens, num_kv_heads, head_size]
                 scalar_t* __restrict__ value_out,         // [num_tokens, num_kv_heads, head_size]
                 const __grid_constant__ GatherParams params) {
  __shared__ TokenOffsets<THREADS> tokens_smem;
  const bool is_value = blockIdx.y != 0;
  const GatherSide& side = params.sides[blockIdx.y];
  const TokenRanges ranges{cu_seq_lens, seq_starts, block_table, params};
  const int64_t first_row = static_cast<int64_t>(blockIdx.x) * params.tile.num_tokens;
  const int32_t num_rows = min(ranges.num_rows() - first_row, int64_t{params.tile.num_tokens});
  if (num_rows <= 0) return;

  const int32_t thread = threadIdx.x;
  if (thread < num_rows) {
    const int64_t row = first_row + thread;
    const SlotPosition position = ranges.find(row);
    tokens_smem.source[thread] = offset_of(position, side.cache);
    tokens_smem.target[thread] = row * side.out.token_stride;
  }
  __syncthreads();

  const Scale scale{is_value ? v_scale : k_scale, side.scale, side.scale_stride};
  const auto converter_of = [&](int head) { return Dequantizer<scalar_t, cache_t>(scale, head); };
  if (is_value && TOKEN_LANES > 1)
    copy_tokens<VEC, TOKEN_LANES, Features::SPREAD, Features::ADJOIN, SPREAD_TOKENS_IN_FLIGHT>(
        value_cache, value_out, tokens_smem, num_rows, side.cache, side.out, params.tile, converter_of);
  else
    copy_tokens<VEC, TOKEN_LANES, Features::ADJOIN, Features::ADJOIN, TOKENS_IN_FLIGHT>(
        is_value ? value_cache : key_cache, is_value ? value_out : key_out, tokens_smem, num_rows, side.cache, side.out,
        params.tile, converter_of);
}

template <int ELEMENT_BYTES, int VEC, int TOKEN_LANES, bool TO_PACKED, int TOKENS_IN_FLIGHT, int THREADS>
__global__ void __launch_bounds__(THREADS)
    convert_layout(const typename Word<ELEMENT_BYTES>::type* __restrict__ key_cache,    // blocks of one layout
                   const typename Word<ELEMENT_BYTES>::type* __restrict__ value_cache,  // of the same
                   typename Word<ELEMENT_BYTES>::type* __restrict__ key_out,            // as many of another
                   typename Word<ELEMENT_BYTES>::type* __restrict__ value_out,          // of the same
                   const __grid_constant__ ConvertParams params) {
  __shared__ TokenOffsets<THREADS> tokens_smem;
  const bool is_value = blockIdx.y != 0;
  const ConvertSide& side = params.sides[blockIdx.y];
  const int64_t first_slot = static_cast<int64_t>(blockIdx.x) * params.tile.num_tokens;
  const int32_t num_slots = min(params.num_slots - first_slot, int64_t{params.tile.num_tokens});

  const int32_t thread = threadIdx.x;
  if (thread < num_slots) {
    const SlotPosition position = locate(first_slot + thread, params.block_size);
    tokens_smem.source[thread] = offset_of(position, side.source);
    tokens_smem.target[thread] = offset_of(position, side.target);
  }
  __syncthreads();

  constexpr Features SOURCE_VALUES = TO_PACKED ? Features::ADJOIN : Features::SPREAD;
  constexpr Features TARGET_VALUES = TO_PACKED ? Features::SPREAD : Features::ADJOIN;
  const auto converter_of = [](uint32_t) { return Unchanged{}; };
  if (is_value && TOKEN_LANES > 1)
    copy_tokens<VEC, TOKEN_LANES, SOURCE_VALUES, TARGET_VALUES, SPREAD_TOKENS_IN_FLIGHT>(
        value_cache, value_out, tokens_smem, num_slots, side.source, side.target, params.tile, converter_of);
  else
    copy_tokens<VEC, TOKEN_LANES, Features::ADJOIN, Features::ADJOIN, TOKENS_IN_FLIGHT>(
        is_value ? value_cache : key_cache, is_value ? value_out : key_out, tokens_smem, num_slots, side.source,
        side.target, params.tile, converter_of);
}

}  // namespace pagedkv
