// Writes the keys and values of new tokens into the blocks of a paged cache, K and V in one launch: blockIdx.y picks
// one.
//
// reshape_and_cache_flash, NHD and HND blocks. A power-of-two group of adjacent threads copies a token, its heads one
// row each; adjacent lanes move adjacent packs.
//
// reshape_and_cache, packed blocks. A warp owns TILE_TOKENS adjacent tokens of one head. Their rows come in as they
// lie, wait in the warp's own shared memory, and leave as the cache wants them: adjacent lanes store to adjacent slots,
// of K 16 bytes each, of V, whose innermost axis are the slots, packs of VEC slots where consecutive slots fill them.
#include "convert.cuh"
#include "copy.cuh"
#include "paging.cuh"
#include "params.cuh"

namespace pagedkv {

template <class scalar_t, class cache_t, bool SCALE_PER_HEAD, int HEAD_SIZE, int VEC, int PACKS_IN_FLIGHT, int THREADS>
__global__ void __launch_bounds__(THREADS)
    reshape_and_cache_flash(const scalar_t* __restrict__ key,    // [>= num_tokens, num_kv_heads, head_size]
                            const scalar_t* __restrict__ value,  // [>= num_tokens, num_kv_heads, head_size]
                            cache_t* __restrict__ key_cache,     // [num_blocks, block_size, num_kv_heads, head_size]
                            cache_t* __restrict__ value_cache,   //   or the two middle axes swapped: strides tell
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
  const Scale scale{is_value ? v_scale : k_scale, side.scale, side.scale_stride};
  const float common_scale = scale.of_head(0);
  const scalar_t* source = (is_value ? value : key) + token * side.token_stride;
  cache_t* cache = is_value ? value_cache : key_cache;
  const Rows<scalar_t> heads{source,
                             side.head_stride,
                             params.num_kv_heads.divisor,
                             elements_to_alignment<VEC>(source),
                             threadIdx.x & (lanes - 1),
                             lanes};
  convert_rows<HEAD_SIZE, VEC, PACKS_IN_FLIGHT>(heads, [&](auto is_exact, bool& ambiguous) {
    const int64_t live_slot = pinned(slot);
    const CacheConvert<scalar_t, cache_t, SCALE_PER_HEAD> converter(scale, pinned(common_scale));
    const SlotPosition position = locate(live_slot, params.block_size);
    cache_t* target = cache + position.block * side.cache_block_stride + position.offset * side.cache_token_stride;
    return [=, &ambiguous](uint32_t head, uint32_t feature, auto pack) {
      if (live_slot < 0) return;
      store(target + head * side.cache_head_stride + feature, converter.convert(is_exact, head, pack, ambiguous));
    };
  });
}

// Some rows of one head in shared memory, on their way from tokens that adjoin to slots that adjoin.
template <class cache_t, int HEAD_SIZE, int TILE_TOKENS, int GROUP>
struct Tile {
  static constexpr int TOKENS = TILE_TOKENS;
  // 16 bytes between rows put the packs of different tokens, 32 more between groups the elements of different groups
  // that a warp touches at once into different banks.
  static constexpr int ROW = HEAD_SIZE + 16 / sizeof(cache_t), GROUP_SKEW = 32 / sizeof(cache_t);
  alignas(16) cache_t elements[TILE_TOKENS * ROW + TILE_TOKENS / GROUP * GROUP_SKEW];

  __device__ __forceinline__ cache_t* row(int token) { return elements + token * ROW + token / GROUP * GROUP_SKEW; }
};

// In place of an offset, for a token without a slot. Strides may be negative, and so may offsets.
inline constexpr int64_t NO_SLOT = -0x7fffffffffffffff;

// K: 16 / sizeof(cache_t) features of a slot adjoin, then come the slots. Adjacent lanes store to adjacent slots.
// `slot_offset` is where the slot of token lane % Tile::TOKENS begins in the head's part of the cache, or
// NO_SLOT.
template <int HEAD_SIZE, int BLOCK_SIZE, int VEC, class cache_t, class Tile>
__device__ __forceinline__ void store_keys(cache_t* cache, int64_t slot_offset, Tile& tile_smem) {
  constexpr int X = 16 / sizeof(cache_t), LANES_PER_TOKEN = 32 / Tile::TOKENS;
  if (slot_offset == NO_SLOT) return;
  const int lane = threadIdx.x % 32;
  const cache_t* row_smem = tile_smem.row(lane % Tile::TOKENS);
#pragma unroll
  for (int feature = lane / Tile::TOKENS * VEC; feature < HEAD_SIZE; feature += LANES_PER_TOKEN * VEC)
    store(cache + slot_offset + feature / X * (BLOCK_SIZE * X) + feature % X, load_shared<VEC>(row_smem + feature));
}

// V: the slots of one feature adjoin. A group of VEC tokens whose slots fill an aligned pack leaves as packs, adjacent
// lanes storing the packs of a feature and then of the next one; other tokens leave one by one, adjacent lanes taking
// adjacent tokens.
template <int HEAD_SIZE, int BLOCK_SIZE, int VEC, class cache_t, class Tile>
__device__ __forceinline__ void store_values(cache_t* cache, int64_t slot_offset, Tile& tile_smem) {
  constexpr int GROUPS = Tile::TOKENS / VEC;
  const int lane = threadIdx.x % 32, token = lane % Tile::TOKENS;

  const int64_t group_offset = __shfl_sync(WARP, slot_offset, lane / VEC * VEC);
  const bool in_pack = group_offset != NO_SLOT && group_offset % VEC == 0 && slot_offset == group_offset + lane % VEC;
  const uint32_t ragged_tokens = ~__ballot_sync(WARP, in_pack);
  const auto is_whole = [&](int group) { return (ragged_tokens >> group * VEC & ((1u << VEC) - 1)) == 0; };

  const int group = lane % GROUPS;
  const int64_t pack_offset = __shfl_sync(WARP, slot_offset, group * VEC);
  if (is_whole(group)) {
#pragma unroll 4
    for (int feature = lane / GROUPS; feature < HEAD_SIZE; feature += 32 / GROUPS) {
      Pack<cache_t, VEC> slots;
#pragma unroll
      for (int i = 0; i < VEC; i++) slots.set(i, tile_smem.row(group * VEC + i)[feature]);
      store_joined(cache + pack_offset + feature * BLOCK_SIZE, slots);
    }
  }

  if (slot_offset == NO_SLOT || is_whole(token / VEC)) return;
#pragma unroll 4
  for (int feature = lane / Tile::TOKENS; feature < HEAD_SIZE; feature += 32 / Tile::TOKENS)
    cache[slot_offset + feature * BLOCK_SIZE] = tile_smem.row(token)[feature];
}

template <class scalar_t, class cache_t, int HEAD_SIZE, int BLOCK_SIZE, int VEC, int TILE_TOKENS, int THREADS>
__global__ void __launch_bounds__(THREADS)
    reshape_and_cache(const scalar_t* __restrict__ key,    // [>= num_tokens, num_kv_heads, head_size]
                      const scalar_t* __restrict__ value,  // [>= num_tokens, num_kv_heads, head_size]
                      cache_t* __restrict__ key_cache,     // [num_blocks, num_kv_heads, head_size / x, block_size, x]
                      cache_t* __restrict__ value_cache,   // [num_blocks, num_kv_heads, head_size, block_size]
                      const int64_t* __restrict__ slot_mapping,  // [num_tokens]
                      const float* __restrict__ k_scale,         // [1] or [num_kv_heads], or null
                      const float* __restrict__ v_scale,         // [1] or [num_kv_heads], or null
                      const __grid_constant__ CacheWriteParams params) {
  static_assert(32 % TILE_TOKENS == 0 && TILE_TOKENS % VEC == 0 && BLOCK_SIZE % VEC == 0, "packs of slots fill a tile");
  constexpr int WARPS = THREADS / 32;
  constexpr int PACKS_IN_FLIGHT = sizeof(cache_t) == sizeof(scalar_t) ? TILE_TOKENS / 2 : 4;
  __shared__ Tile<cache_t, HEAD_SIZE, TILE_TOKENS, VEC> tiles_smem[WARPS];
  auto& tile_smem = tiles_smem[threadIdx.x / 32];
  const bool is_value = blockIdx.y != 0;
  const CacheWriteSide& side = params.sides[blockIdx.y];
  // Warps that follow each other take the heads of the same tokens, whose rows adjoin in memory.
  const uint32_t warp = blockIdx.x * WARPS + threadIdx.x / 32, lane = threadIdx.x % 32;
  const uint32_t tile = params.num_kv_heads.divide(warp), head = warp - tile * params.num_kv_heads.divisor;
  const int first_token = tile * TILE_TOKENS, num_rows = min(TILE_TOKENS, params.num_tokens - first_token);
  if (num_rows <= 0) return;

  const int row = lane % TILE_TOKENS;
  const int64_t slot = row < num_rows ? slot_mapping[(first_token + row) * params.slot_stride] : -1;
  const Scale scale{is_value ? v_scale : k_scale, side.scale, side.scale_stride};
  const float head_scale = scale.of_head(head);
  const scalar_t* source = (is_value ? value : key) + first_token * side.token_stride + head * side.head_stride;
  const Rows<scalar_t> tokens{source, side.token_stride, static_cast<uint32_t>(num_rows), 0, lane, 32};
  convert_rows<HEAD_SIZE, VEC, PACKS_IN_FLIGHT>(tokens, [&](auto is_exact, bool& ambiguous) {
    const CacheConvert<scalar_t, cache_t, false> converter(scale, pinned(head_scale));
    return [=, &ambiguous, &tile_smem](uint32_t token, uint32_t feature, auto pack) {
      store(tile_smem.row(token) + feature, converter.convert(is_exact, head, pack, ambiguous));
    };
  });
  __syncwarp();

  cache_t* cache = (is_value ? value_cache : key_cache) + head * side.cache_head_stride;
  const SlotPosition position = locate(slot, params.block_size);
  const int64_t block_offset = position.block * side.cache_block_stride;
  constexpr int X = 16 / sizeof(cache_t);
  if (is_value)
    store_values<HEAD_SIZE, BLOCK_SIZE, VEC>(cache, slot < 0 ? NO_SLOT : block_offset + position.offset, tile_smem);
  else
    store_keys<HEAD_SIZE, BLOCK_SIZE, VEC>(cache, slot < 0 ? NO_SLOT : block_offset + position.offset * X, tile_smem);
}

}  // namespace pagedkv
