// paged_attention_v1 and v2: attention of one query token per sequence over a packed cache.
//
// v1 has one segment per sequence, v2 several: decode.cuh.
#include "cuda_core_scan.cuh"
#include "decode.cuh"
#include "packed_tile.cuh"
#include "tensor_core_scan.cuh"

namespace pagedkv {

template <class scalar_t, class cache_t, int HEAD_SIZE, int BLOCK_SIZE, int HEADS, int TILES_AHEAD, bool IS_ALIGNED>
struct ScanOf {
  using Tile = PackedTile<cache_t, HEAD_SIZE, BLOCK_SIZE, IS_ALIGNED>;
  using type = TensorCoreScan<scalar_t, Tile, HEADS, TILES_AHEAD, IS_ALIGNED>;
};
template <int HEAD_SIZE, int BLOCK_SIZE, int HEADS, int TILES_AHEAD, bool IS_ALIGNED>
struct ScanOf<float, float, HEAD_SIZE, BLOCK_SIZE, HEADS, TILES_AHEAD, IS_ALIGNED> {
  using type = CudaCoreScan<HEAD_SIZE, BLOCK_SIZE, HEADS, IS_ALIGNED>;
};

// Sequence s has query s.
struct QueryOfEach {
  const int32_t* seq_lens;
  int64_t seq_len_stride;

  __device__ __forceinline__ int32_t seq_len(int32_t sequence) const { return seq_lens[sequence * seq_len_stride]; }
  __device__ __forceinline__ int64_t row(int32_t sequence) const { return sequence; }
  __device__ __forceinline__ bool is_there(int32_t) const { return true; }
};

template <class scalar_t, class cache_t, int HEAD_SIZE, int BLOCK_SIZE, int HEADS, int WARPS, int TILES_AHEAD,
          bool IS_ALIGNED>
__global__ void __launch_bounds__(WARPS * 32, 2)
    paged_attention(const scalar_t* __restrict__ query,     // [num_seqs, num_heads, head_size]
                    const cache_t* __restrict__ key_cache,  // [num_blocks, num_kv_heads, head_size / x, block_size, x]
                    const cache_t* __restrict__ value_cache,   // [num_blocks, num_kv_heads, head_size, block_size]
                    const int32_t* __restrict__ block_tables,  // [num_seqs, max_blocks]
                    const int32_t* __restrict__ seq_lens,      // [num_seqs]
                    const float* __restrict__ alibi_slopes,    // [num_heads], or null
                    const void* __restrict__ sinks,            // [num_heads], or null
                    const float* __restrict__ k_scale,         // [1] or [num_kv_heads], or null
                    const float* __restrict__ v_scale,         // [1] or [num_kv_heads], or null
                    scalar_t* __restrict__ out,                // [num_seqs, num_heads, head_size]
                    float* __restrict__ lse,                   // [num_heads, num_seqs], or null
                    void* workspace,                           // `num_states` states, or null if no unit is cut
                    int32_t* counters,                         // [num_units] zeros, or null likewise
                    const __grid_constant__ DecodeParams params) {
  using Scan = typename ScanOf<scalar_t, cache_t, HEAD_SIZE, BLOCK_SIZE, HEADS, TILES_AHEAD, IS_ALIGNED>::type;
  const DecodeArrays<scalar_t> arrays{query, alibi_slopes, sinks, k_scale, v_scale, out, lse, workspace, counters};
  const auto sequence_of = [&](const Segment& segment) {
    return PackedSequence<cache_t, BLOCK_SIZE>{key_cache + segment.kv_head * params.key_head_stride,
                                               value_cache + segment.kv_head * params.value_head_stride,
                                               block_tables + segment.sequence * params.table_stride,
                                               params.table_step,
                                               params.key_block_stride,
                                               params.value_block_stride,
                                               segment.seen};
  };
  decode<Scan, HEADS, WARPS, IS_ALIGNED>(arrays, QueryOfEach{seq_lens, params.seq_len_stride}, sequence_of, params);
}

}  // namespace pagedkv
