// flash_attn_varlen_func: attention of any number of query tokens per sequence over an NHD or HND cache.
//
// A CTA finds its tile of queries (query_tiles.cuh), scans the keys that they see (a mainloop: mma_mainloop.cuh or, for
// float32, cuda_core_mainloop.cuh) and writes results, or states over a split of the keys, which a second kernel
// merges. The three know of each other what is said at the mainloop. Tiling and online softmax are those of
// FlashAttention-2 (Dao, 2023).
#include "convert.cuh"
#include "cuda_core_mainloop.cuh"
#include "mma_mainloop.cuh"
#include "paging.cuh"
#include "params.cuh"
#include "query_tiles.cuh"
#include "states.cuh"

namespace pagedkv {

template <class scalar_t, class cache_t, int HEAD_SIZE, int KEYS, int WARPS, bool IS_ALIGNED>
struct MainloopOf {
  using type = MmaMainloop<scalar_t, cache_t, HEAD_SIZE, KEYS, WARPS, IS_ALIGNED>;
};
template <int HEAD_SIZE, int KEYS, int WARPS, bool IS_ALIGNED>
struct MainloopOf<float, float, HEAD_SIZE, KEYS, WARPS, IS_ALIGNED> {
  using type = CudaCoreMainloop<HEAD_SIZE, WARPS, IS_ALIGNED>;
};

// Where results go.
template <class scalar_t, bool IS_ALIGNED>
struct VarlenResults {
  scalar_t* out;
  float* lse;         // or null
  const void* sinks;  // or null
  Scale v_scale;
  const VarlenParams& params;

  // By a warp: one query token, among all, and one query head.
  template <int HEAD_SIZE>
  __device__ __forceinline__ void write(int64_t token, int32_t head, SoftmaxState state,
                                        const WarpRow<HEAD_SIZE>& row) const {
    float factor = v_scale.of_head(params.queries_per_kv.divide(head));
    if (sinks != nullptr) factor *= state.merge({sink(head) * LOG2_E, 1.0f}).x;
    row.template write<IS_ALIGNED>(out + token * params.out_token_stride + head * params.out_head_stride,
                                   factor * state.normalizer());
    if (lse != nullptr && threadIdx.x % 32 == 0)
      lse[head * params.lse_head_stride + token * params.lse_token_stride] = state.lse();
  }

  __device__ __forceinline__ float sink(int32_t head) const {
    const int64_t offset = head * params.sink_stride;
    return params.sinks_are_float32 ? static_cast<const float*>(sinks)[offset]
                                    : to_float(static_cast<const scalar_t*>(sinks)[offset]);
  }
};

// The states that splits leave: of a query token and head one after the other.
template <int HEAD_SIZE>
__device__ __forceinline__ States<HEAD_SIZE> split_states(void* workspace, const VarlenParams& params) {
  float* acc = static_cast<float*>(workspace);
  return {acc, acc + params.num_states * HEAD_SIZE, params.num_states};
}
__device__ __forceinline__ int64_t first_split(int64_t token, int32_t head, const VarlenParams& params) {
  return (token * params.num_heads.divisor + head) * params.num_splits.divisor;
}

template <class scalar_t, class cache_t, int HEAD_SIZE, int KEYS, int WARPS, bool IS_ALIGNED>
__global__ void __launch_bounds__(WARPS * 32)
    varlen_attention(const scalar_t* __restrict__ query,        // [num_tokens, num_heads, head_size]
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
                     void* workspace,                           // `num_states` states, or null with a single split
                     const __grid_constant__ VarlenParams params) {
  using Mainloop = typename MainloopOf<scalar_t, cache_t, HEAD_SIZE, KEYS, WARPS, IS_ALIGNED>::type;
  // What is not quantised has no scale, whatever the caller gave.
  constexpr bool HAS_SCALES = !IS_SAME<scalar_t, cache_t>;
  const Scale scale_of_k{HAS_SCALES ? k_scale : nullptr, params.k_scale, params.k_scale_stride};
  const Scale scale_of_v{HAS_SCALES ? v_scale : nullptr, params.v_scale, params.v_scale_stride};
  extern __shared__ uint4 smem[];
  __shared__ float sums_smem[2 * Mainloop::ROWS];

  QueryTile tile;
  if (!TileScheduler<Mainloop::ROWS>(query_starts, seq_lens, params).find(tile)) return;
  const FlashSequence<cache_t> sequence{key_cache + tile.kv_head * params.key_head_stride,
                                        value_cache + tile.kv_head * params.value_head_stride,
                                        block_table + tile.sequence * params.table_stride,
                                        params.table_step,
                                        params.key_block_stride,
                                        params.key_token_stride,
                                        params.value_block_stride,
                                        params.value_token_stride,
                                        params.block_size};
  const float scale = params.scale * scale_of_k.of_head(tile.kv_head);
  Mainloop mainloop(reinterpret_cast<char*>(smem));
  mainloop.run(tile, sequence, query + tile.span.first_token * params.query_token_stride,
               {scale, scale * LOG2_E, params.softcap, approximate_reciprocal(params.softcap), alibi_slopes,
                params.slope_stride, 0},
               params);

  const States<Mainloop::ACC_ROW> states(reinterpret_cast<float*>(smem), sums_smem, Mainloop::ROWS);
  mainloop.leave(states);
  __syncthreads();
  const VarlenResults<scalar_t, IS_ALIGNED> results{out, lse, sinks, scale_of_v, params};
#pragma unroll 1
  for (int row = threadIdx.x / 32; row < tile.num_rows; row += WARPS) {
    const int64_t token = tile.span.first_token + tile.token(row, params);
    const int32_t head = tile.head(row, params);
    const StoredState stored = states.at(row);
    WarpRow<HEAD_SIZE> numbers;
    numbers.load(stored.acc);
    if (params.num_splits.divisor == 1)
      results.write(token, head, stored.state(), numbers);
    else
      numbers.store(split_states<HEAD_SIZE>(workspace, params).at(first_split(token, head, params) + tile.split),
                    stored.state());
  }
}

// Merges the states of splits in their order. A warp takes one query token and head.
template <class scalar_t, int HEAD_SIZE, bool IS_ALIGNED>
__global__ void __launch_bounds__(128)
    merge_splits(void* workspace,                           // `num_states` states
                 const int32_t* __restrict__ query_starts,  // [num_seqs + 1]
                 const void* __restrict__ sinks,            // [num_heads], or null
                 const float* __restrict__ v_scale,         // [1] or [num_kv_heads], or null
                 scalar_t* __restrict__ out,                // [num_tokens, num_heads, head_size]
                 float* __restrict__ lse,                   // [num_heads, num_tokens], or null
                 const __grid_constant__ VarlenParams params) {
  const int64_t item = (static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x) / 32;
  const int64_t token = params.num_heads.divide(item);
  const int32_t head = item - token * params.num_heads.divisor;
  if (token >= query_starts[params.num_seqs * params.query_start_stride]) return;  // padding
  const States<HEAD_SIZE> states = split_states<HEAD_SIZE>(workspace, params);
  WarpRow<HEAD_SIZE> row;
  const SoftmaxState state = merge_by_warp(
      params.num_splits.divisor, [&](int i) { return states.at(first_split(token, head, params) + i); }, row);
  const Scale scale_of_v{v_scale, params.v_scale, params.v_scale_stride};
  VarlenResults<scalar_t, IS_ALIGNED>{out, lse, sinks, scale_of_v, params}.write(token, head, state, row);
}

}  // namespace pagedkv
