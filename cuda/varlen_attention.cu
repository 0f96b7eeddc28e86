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

template <class scalar_t, class cache_t, int HEAD_SIZE, int KEYS, int WARPS, int WARP_TILES, bool HAS_OPTIONS,
          bool IS_ALIGNED>
struct MainloopOf {
  using type = MmaMainloop<scalar_t, cache_t, HEAD_SIZE, KEYS, WARPS, WARP_TILES, HAS_OPTIONS, IS_ALIGNED>;
};
template <int HEAD_SIZE, int KEYS, int WARPS, int WARP_TILES, bool HAS_OPTIONS, bool IS_ALIGNED>
struct MainloopOf<float, float, HEAD_SIZE, KEYS, WARPS, WARP_TILES, HAS_OPTIONS, IS_ALIGNED> {
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
  __device__ __forceinline__ void write(int64_t token, int32_t head, const SoftmaxState& state,
                                        const WarpRow<HEAD_SIZE>& row) const {
    const float factor = finish(token, head, state, threadIdx.x % 32 == 0);
    row.template write<IS_ALIGNED>(row_of(token, head), factor);
  }

  __device__ __forceinline__ scalar_t* row_of(int64_t token, int32_t head) const {
    return out + token * params.out_token_stride + head * params.out_head_stride;
  }

  // What the accumulator of a final state is to be multiplied with. Writes its LSE, if that `is_mine`.
  __device__ __forceinline__ float finish(int64_t token, int32_t head, SoftmaxState state, bool is_mine) const {
    float factor = v_scale.of_head(params.queries_per_kv.divide(head));
    if (sinks != nullptr) factor *= state.merge({sink(head) * LOG2_E, 1.0f}).x;
    if (lse != nullptr && is_mine) lse[head * params.lse_head_stride + token * params.lse_token_stride] = state.lse();
    return factor * state.normalizer();
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

// The rows of a warp, as a mainloop has left them: results, or the states of a split. A lane knows where one of them
// goes and what it is multiplied with; then all lanes move packs.
template <int HEAD_SIZE, int WARP_ROWS, int ACC_ROW, class scalar_t, bool IS_ALIGNED>
__device__ __forceinline__ void write_rows(const QueryTile& tile, const States<ACC_ROW>& states_smem,
                                           const VarlenResults<scalar_t, IS_ALIGNED>& results, void* workspace) {
  constexpr int X = 16 / sizeof(scalar_t), PACKS = HEAD_SIZE / X;
  const VarlenParams& params = results.params;
  const int lane = threadIdx.x % 32, first = threadIdx.x / 32 * WARP_ROWS;
  const int num_rows = min(WARP_ROWS, tile.num_rows - first);
  const bool is_split = params.num_splits.divisor > 1;
  uint64_t target_of_lane = 0;
  float factor_of_lane = 1.0f;
  if (lane < num_rows) {
    const int64_t token = tile.span.first_token + tile.token(first + lane, params);
    const int32_t head = tile.head(first + lane, params);
    const SoftmaxState state = states_smem.at(first + lane).state();
    if (is_split) {
      const StoredState target =
          split_states<HEAD_SIZE>(workspace, params).at(first_split(token, head, params) + tile.split);
      target.set(state);
      target_of_lane = reinterpret_cast<uint64_t>(target.acc);
    } else {
      factor_of_lane = results.finish(token, head, state, true);
      target_of_lane = reinterpret_cast<uint64_t>(results.row_of(token, head));
    }
  }
#pragma unroll 4
  for (int i = lane; i - lane < num_rows * PACKS; i += 32) {
    const int row = min(i / PACKS, WARP_ROWS - 1), feature = i % PACKS * X;
    const uint64_t target = __shfl_sync(WARP, target_of_lane, row);
    const float factor = __shfl_sync(WARP, factor_of_lane, row);
    if (i >= num_rows * PACKS) break;
    float4 numbers[X / 4];
#pragma unroll
    for (int j = 0; j < X / 4; j++)
      numbers[j] = *reinterpret_cast<const float4*>(states_smem.at(first + row).acc + feature + 4 * j);
    if (is_split) {
#pragma unroll
      for (int j = 0; j < X / 4; j++)
        *reinterpret_cast<float4*>(reinterpret_cast<float*>(target) + feature + 4 * j) = numbers[j];
    } else {
      Pack<scalar_t, X> pack;
#pragma unroll
      for (int j = 0; j < X / 4; j++) set_four(pack, 4 * j, numbers[j], factor);
      store_elements<IS_ALIGNED>(reinterpret_cast<scalar_t*>(target) + feature, pack);
    }
  }
}

template <class scalar_t, class cache_t, int HEAD_SIZE, int KEYS, int WARPS, int WARP_TILES, bool HAS_OPTIONS,
          bool IS_ALIGNED>
__global__ void __launch_bounds__(WARPS * 32, 2)
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
  using Mainloop =
      typename MainloopOf<scalar_t, cache_t, HEAD_SIZE, KEYS, WARPS, WARP_TILES, HAS_OPTIONS, IS_ALIGNED>::type;
  // What is not quantised has no scale, whatever the caller gave.
  constexpr bool HAS_SCALES = !IS_SAME<scalar_t, cache_t>;
  const Scale scale_of_k{HAS_SCALES ? k_scale : nullptr, params.k_scale, params.k_scale_stride};
  const Scale scale_of_v{HAS_SCALES ? v_scale : nullptr, HAS_SCALES ? params.v_scale : 1.0f, params.v_scale_stride};
  extern __shared__ __align__(128) uint4 smem[];
  __shared__ QueryTile tile_smem;  // registers are for the mainloop

  QueryTile tile;
  if (!TileScheduler<Mainloop::ROWS>(query_starts, seq_lens, params).find(tile)) return;
  if (threadIdx.x == 0) tile_smem = tile;
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

  const States<Mainloop::ACC_ROW> states_smem = mainloop.leave();
  __syncwarp();
  const VarlenResults<scalar_t, IS_ALIGNED> results{out, lse, sinks, scale_of_v, params};
  write_rows<HEAD_SIZE, Mainloop::WARP_ROWS>(tile_smem, states_smem, results, workspace);
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
