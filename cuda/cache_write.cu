// Writes the keys and values of new tokens into the blocks of a paged cache, K and V in one launch: blockIdx.y picks one.
//
// reshape_and_cache_flash, NHD and HND blocks. A power-of-two group of adjacent threads copies a token, its heads one row
// each; adjacent lanes move adjacent packs.
//
// reshape_and_cache, packed blocks. A warp owns TOKENS_PER_WARP adjacent tokens of one head, a thread keeps one of them,
// and adjacent lanes keep adjacent tokens. What a warp stores at once then lies in adjacent slots wherever slots are
// consecutive: of K 16 bytes a slot, of V, whose innermost axis are the slots, one feature. Nothing waits in shared
// memory, and any pattern of slots takes the same path.
#include "convert.cuh"
#include "copy.cuh"
#include "paging.cuh"
#include "params.cuh"

namespace pagedkv {

template <class scalar_t, class cache_t, int HEAD_SIZE, int VEC, int PACKS_IN_FLIGHT, int THREADS>
__global__ void __launch_bounds__(THREADS)
    reshape_and_cache_flash(const scalar_t* __restrict__ key,          // [>= num_tokens, num_kv_heads, head_size]
                            const scalar_t* __restrict__ value,        // [>= num_tokens, num_kv_heads, head_size]
                            cache_t* __restrict__ key_cache,           // [num_blocks, block_size, num_kv_heads, head_size]
                            cache_t* __restrict__ value_cache,         //   or the two middle axes swapped: strides tell
                            const int64_t* __restrict__ slot_mapping,  // [num_tokens]
                            const float* __restrict__ k_scale,         // [1] or [num_kv_heads], or null
                            const float* __restrict__ v_scale,         // [1] or [num_kv_heads], or null
                            const __grid_constant__ CacheWriteParams params) {
  const bool is_value = blockIdx.y != 0;
  const CacheWriteSide& side = params.sides[blockIdx.y];
  const uint32_t lanes_log2 = params.lanes_per_token_log2, lanes = 1u << lanes_log2;
  const uint32_t token = blockIdx.x * (THREADS >> lanes_log2) + (threadIdx.x >> lanes_log2);
  if (token >= params.num_tokens) return;

  const int64_t slot = slot_mapping[token * params.slot_stride];
  const CacheConvert<scalar_t, cache_t> convert({is_value ? v_scale : k_scale, side.scale, side.scale_stride});
  const SlotPosition position = locate(slot, params.block_size);
  const scalar_t* source = (is_value ? value : key) + token * side.token_stride;
  cache_t* target = (is_value ? value_cache : key_cache) + position.block * side.cache_block_stride +
                    position.offset * side.cache_token_stride;
  copy_rows<HEAD_SIZE, VEC, PACKS_IN_FLIGHT>(
      source, side.head_stride, params.num_kv_heads.divisor, elements_to_alignment<VEC>(source),
      threadIdx.x & (lanes - 1), lanes, slot >= 0, [&](uint32_t head, uint32_t feature, auto pack) {
        store(target + head * side.cache_head_stride + feature, convert(head, pack));
      });
}

// Where the features of one slot go. Of a key, 16 / sizeof(cache_t) features adjoin, then come the slots ...
template <int BLOCK_SIZE, class cache_t, int N>
__device__ __forceinline__ void store_key(cache_t* block, uint32_t offset, uint32_t feature,
                                          const Pack<cache_t, N>& pack) {
  constexpr int X = 16 / sizeof(cache_t);
  store(block + (feature / X * BLOCK_SIZE + offset) * X + feature % X, pack);
}

// ... of a value, the slots of one feature.
template <int BLOCK_SIZE, class cache_t, int N>
__device__ __forceinline__ void store_value(cache_t* block, uint32_t offset, uint32_t feature,
                                            const Pack<cache_t, N>& pack) {
  cache_t* slots = block + feature * BLOCK_SIZE + offset;
#pragma unroll
  for (int i = 0; i < N; i++) slots[i * BLOCK_SIZE] = pack.get(i);
}

template <class scalar_t, class cache_t, int HEAD_SIZE, int BLOCK_SIZE, int VEC, int TOKENS_PER_WARP, int THREADS>
__global__ void __launch_bounds__(THREADS)
    reshape_and_cache(const scalar_t* __restrict__ key,          // [>= num_tokens, num_kv_heads, head_size]
                      const scalar_t* __restrict__ value,        // [>= num_tokens, num_kv_heads, head_size]
                      cache_t* __restrict__ key_cache,           // [num_blocks, num_kv_heads, head_size / x, block_size, x]
                      cache_t* __restrict__ value_cache,         // [num_blocks, num_kv_heads, head_size, block_size]
                      const int64_t* __restrict__ slot_mapping,  // [num_tokens]
                      const float* __restrict__ k_scale,         // [1] or [num_kv_heads], or null
                      const float* __restrict__ v_scale,         // [1] or [num_kv_heads], or null
                      const __grid_constant__ CacheWriteParams params) {
  constexpr uint32_t LANES_PER_TOKEN = 32 / TOKENS_PER_WARP;
  constexpr int PACKS_IN_FLIGHT = 4;
  const bool is_value = blockIdx.y != 0;
  const CacheWriteSide& side = params.sides[blockIdx.y];
  // Warps that follow each other take the heads of the same tokens, whose rows adjoin in memory.
  const uint32_t warp = blockIdx.x * (THREADS / 32) + threadIdx.x / 32, lane = threadIdx.x % 32;
  const uint32_t group = params.num_kv_heads.divide(warp), head = warp - group * params.num_kv_heads.divisor;
  const uint32_t token = group * TOKENS_PER_WARP + lane % TOKENS_PER_WARP;
  if (token >= params.num_tokens) return;

  const int64_t slot = slot_mapping[token * params.slot_stride];
  const Scale scale{is_value ? v_scale : k_scale, side.scale, side.scale_stride};
  const CacheConvert<scalar_t, cache_t> convert(scale.for_head(head));
  const SlotPosition position = locate(slot, params.block_size);
  const scalar_t* source = (is_value ? value : key) + token * side.token_stride + head * side.head_stride;
  cache_t* block = (is_value ? value_cache : key_cache) + position.block * side.cache_block_stride +
                   head * side.cache_head_stride;
  copy_rows<HEAD_SIZE, VEC, PACKS_IN_FLIGHT>(source, 0, 1, 0, lane / TOKENS_PER_WARP, LANES_PER_TOKEN, slot >= 0,
                                             [&](uint32_t, uint32_t feature, auto pack) {
                                               const auto converted = convert(head, pack);
                                               if (is_value)
                                                 store_value<BLOCK_SIZE>(block, position.offset, feature, converted);
                                               else
                                                 store_key<BLOCK_SIZE>(block, position.offset, feature, converted);
                                             });
}

}  // namespace pagedkv
