// Copies some tokens' keys or values from one order of axes into another, through a conversion of their packs.
#pragma once
#include "copy.cuh"
#include "params.cuh"

namespace pagedkv {

// Where some tokens lie at both ends of a copy, in elements: their first features of head 0.
template <int TOKENS>
struct TokenOffsets {
  int64_t source[TOKENS], target[TOKENS];
};

// Whether the features of a token adjoin, or each is a row of tokens, as in packed values.
enum class Features { ADJOIN, SPREAD };

// Where a feature lies from the first one of its head, at an end of the copy that holds numbers of type T.
template <class T, Features FEATURES>
__device__ __forceinline__ int64_t feature_offset(const CopyEnd& end, uint32_t feature) {
  constexpr uint32_t X = 16 / sizeof(T);
  const int64_t step = FEATURES == Features::ADJOIN ? 1 : end.pack_stride / X;
  return feature / X * end.pack_stride + feature % X * step;
}

template <int N, Features FEATURES, class T>
__device__ __forceinline__ Pack<T, N> load_features(const T* source, const CopyEnd& end) {
  if constexpr (FEATURES == Features::ADJOIN) {
    return load<N>(source);
  } else {
    const int64_t step = feature_offset<T, FEATURES>(end, 1);
    Pack<T, N> pack;
#pragma unroll
    for (int i = 0; i < N; i++) pack.set(i, load<1>(source + i * step).get(0));
    return pack;
  }
}

template <Features FEATURES, class T, int N>
__device__ __forceinline__ void store_features(T* target, const CopyEnd& end, const Pack<T, N>& pack) {
  if constexpr (FEATURES == Features::ADJOIN) {
    store_joined(target, pack);
  } else {
    const int64_t step = feature_offset<T, FEATURES>(end, 1);
#pragma unroll
    for (int i = 0; i < N; i++) target[i * step] = pack.get(i);
  }
}

// The conversion that keeps every bit.
struct Unchanged {
  template <class T, int N>
  __device__ __forceinline__ Pack<T, N> convert(const Pack<T, N>& pack) const {
    return pack;
  }
};

// Copies the packs of a CTA's tokens and heads, of which blockIdx.z picks the heads. A thread takes the same packs of
// one token after the other, and loads those of TOKENS_IN_FLIGHT before it stores the first. Of adjacent lanes
// TOKEN_LANES take adjacent tokens, which in packed blocks adjoin, and then come the next packs: so a warp touches
// whole sectors at both ends. `converter_of(head)` says what becomes of a head's packs.
template <int VEC, int TOKEN_LANES, Features SOURCE_FEATURES, Features TARGET_FEATURES, int TOKENS_IN_FLIGHT,
          int TOKENS, class source_t, class target_t, class ConverterOf>
__device__ __forceinline__ void copy_tokens(const source_t* source, target_t* target,
                                            const TokenOffsets<TOKENS>& tokens_smem, uint32_t num_tokens,
                                            const CopyEnd& from, const CopyEnd& to, const CopyTile& tile,
                                            const ConverterOf& converter_of) {
  const uint32_t lane = threadIdx.x % TOKEN_LANES, team = threadIdx.x / TOKEN_LANES;
  const uint32_t group = tile.packs_per_step.divide(team), first_token = group * TOKEN_LANES + lane;
  if (first_token >= tile.tokens_per_step) return;

  const uint32_t num_packs = tile.num_heads * tile.packs_per_head.divisor;
  for (uint32_t i = team - group * tile.packs_per_step.divisor; i < num_packs; i += tile.packs_per_step.divisor) {
    const uint32_t head_of_tile = tile.packs_per_head.divide(i), head = blockIdx.z * tile.num_heads + head_of_tile;
    const uint32_t feature = (i - head_of_tile * tile.packs_per_head.divisor) * VEC;
    const source_t* source_pack =
        source + head * from.head_stride + feature_offset<source_t, SOURCE_FEATURES>(from, feature);
    target_t* target_pack = target + head * to.head_stride + feature_offset<target_t, TARGET_FEATURES>(to, feature);
    const auto converter = converter_of(head);

    for (uint32_t first = first_token; first < num_tokens; first += tile.tokens_per_step * TOKENS_IN_FLIGHT) {
      Pack<source_t, VEC> packs[TOKENS_IN_FLIGHT];
#pragma unroll
      for (uint32_t j = 0; j < TOKENS_IN_FLIGHT; j++) {
        // The last token again where there is none: without a branch all loads are under way before one is waited for.
        const uint32_t token = min(first + j * tile.tokens_per_step, num_tokens - 1);
        packs[j] = load_features<VEC, SOURCE_FEATURES>(source_pack + tokens_smem.source[token], from);
      }
#pragma unroll
      for (uint32_t j = 0; j < TOKENS_IN_FLIGHT; j++) {
        const uint32_t token = first + j * tile.tokens_per_step;
        if (token < num_tokens)
          store_features<TARGET_FEATURES>(target_pack + tokens_smem.target[token], to, converter.convert(packs[j]));
      }
    }
  }
}

}  // namespace pagedkv
