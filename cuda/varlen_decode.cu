// flash_attn_varlen_func of the sequences that have one query token: decode.cuh over an NHD or HND cache.
#include "decode.cuh"
#include "flash_tile.cuh"
#include "tensor_core_scan.cuh"

namespace pagedkv {

// The query of a sequence, if it has exactly one, is where its queries start.
struct QueryAtStart {
  const int32_t* seq_lens;
  const int32_t* query_starts;
  int64_t seq_len_stride, query_start_stride;

  // Of any other sequence 0: its keys are not for this kernel.
  __device__ __forceinline__ int32_t seq_len(int32_t sequence) const {
    const int32_t seq_len = seq_lens[sequence * seq_len_stride];
    return is_there(sequence) ? seq_len : 0;
  }
  // 0, which is always there, for any other sequence.
  __device__ __forceinline__ int64_t row(int32_t sequence) const {
    return is_there(sequence) ? query_starts[sequence * query_start_stride] : 0;
  }
  __device__ __forceinline__ bool is_there(int32_t sequence) const {
    const int32_t* start = query_starts + sequence * query_start_stride;
    return start[query_start_stride] - start[0] == 1;
  }
};

template <class scalar_t, class cache_t, int HEAD_SIZE, int HEADS, int WARPS, int TILES_AHEAD>
__global__ void __launch_bounds__(WARPS * 32, 2)
    varlen_decode(const scalar_t* __restrict__ query,        // [num_tokens, num_heads, head_size]
                  const cache_t* __restrict__ key_cache,     // [num_blocks, ...], by its strides
                  const cache_t* __restrict__ value_cache,   // [num_blocks, ...]
                  const int32_t* __restrict__ block_table,   // [num_seqs, max_blocks]
                  const int32_t* __restrict__ seq_lens,      // [num_seqs]
                  const int32_t* __restrict__ query_starts,  // [num_seqs + 1]
                  const float* __restrict__ alibi_slopes,    // [num_heads], or null
                  const void* __restrict__ sinks,            // [num_heads], or null
                  const float* __restrict__ k_scale,         // [1] or [num_kv_heads], or null
                  const float* __restrict__ v_scale,         // [1] or [num_kv_heads], or null
                  scalar_t* __restrict__ out,                // [num_tokens, num_heads, head_size]
                  float* __restrict__ lse,                   // [num_heads, num_tokens], or null
                  void* workspace,                           // `num_states` states
                  int32_t* counters,                         // [num_units] zeros
                  const __grid_constant__ DecodeParams params) {
  using Scan = TensorCoreScan<scalar_t, FlashTile<cache_t, HEAD_SIZE>, HEADS, TILES_AHEAD, true>;
  const DecodeArrays<scalar_t> arrays{query, alibi_slopes, sinks, k_scale, v_scale, out, lse, workspace, counters};
  const auto sequence_of = [&](const Segment& segment) {
    return SeenFlashSequence<cache_t>{
        {key_cache + segment.kv_head * params.key_head_stride, value_cache + segment.kv_head * params.value_head_stride,
         block_table + segment.sequence * params.table_stride, params.table_step, params.key_block_stride,
         params.key_token_stride, params.value_block_stride, params.value_token_stride, params.block_size},
        segment.seen};
  };
  const QueryAtStart queries{seq_lens, query_starts, params.seq_len_stride, params.query_start_stride};
  decode<Scan, HEADS, WARPS, true>(arrays, queries, sequence_of, params);
}

}  // namespace pagedkv
