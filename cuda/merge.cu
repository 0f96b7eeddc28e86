// merge_attn_states: attention of the same queries over two sets of keys, merged by their LSE (Ye et al., "Cascade
// Inference", 2024, section 2.2).
#include "convert.cuh"
#include "copy.cuh"
#include "params.cuh"
#include "softmax.cuh"

namespace pagedkv {

// The state of a normalised side, its logits shifted by `shift`. An LSE of -inf or +inf says that it saw no key.
__device__ __forceinline__ SoftmaxState state_of_side(float lse, float shift) {
  if (fabsf(lse) == CUDART_INF_F) return {};
  return {(lse - shift) * LOG2_E, 1.0f};
}

// A thread takes VEC adjoining features of one query and head.
template <class scalar_t, int VEC>
__global__ void __launch_bounds__(128)
    merge_attn_states(const scalar_t* __restrict__ prefix_output,  // [num_tokens, num_heads, head_size]
                      const float* __restrict__ prefix_lse,        // [num_heads, num_tokens]
                      const scalar_t* __restrict__ suffix_output,  // [num_tokens, num_heads, head_size]
                      const float* __restrict__ suffix_lse,        // [num_heads, num_tokens]
                      scalar_t* __restrict__ out,                  // [num_tokens, num_heads, head_size]
                      float* __restrict__ lse_out,                 // [num_heads, num_tokens]
                      const __grid_constant__ MergeParams params) {
  const int64_t pack = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (pack >= params.num_packs) return;
  const int64_t row = params.packs_per_row.divide(pack), token = params.num_heads.divide(row);
  const int64_t head = row - token * params.num_heads.divisor;
  const int64_t feature = (pack - row * params.packs_per_row.divisor) * VEC;

  const MergeSide &prefix = params.prefix, &suffix = params.suffix, &merged = params.merged;
  const float prefix_sum = prefix_lse[head * prefix.lse_head_stride + token * prefix.lse_token_stride];
  const float suffix_sum = suffix_lse[head * suffix.lse_head_stride + token * suffix.lse_token_stride];
  // Only a difference of two may be exponentiated, and the larger one must come out as it went in.
  const float larger = fmaxf(prefix_sum == CUDART_INF_F ? -CUDART_INF_F : prefix_sum,
                             suffix_sum == CUDART_INF_F ? -CUDART_INF_F : suffix_sum);
  const float shift = larger == -CUDART_INF_F ? 0.0f : larger;
  SoftmaxState state = state_of_side(prefix_sum, shift);
  const SoftmaxState other = state_of_side(suffix_sum, shift);
  const bool has_prefix = state.exp_sum != 0.0f, has_suffix = other.exp_sum != 0.0f;
  const float2 factors = state.merge(other);
  const float normalizer = state.normalizer();

  // What an empty side holds may be anything, and 0 x NaN is NaN.
  Pack<scalar_t, VEC> prefix_pack{}, suffix_pack{}, pack_out;
  if (has_prefix)
    prefix_pack = load<VEC>(prefix_output + token * prefix.token_stride + head * prefix.head_stride + feature);
  if (has_suffix)
    suffix_pack = load<VEC>(suffix_output + token * suffix.token_stride + head * suffix.head_stride + feature);
#pragma unroll
  for (int i = 0; i < VEC; i++)
    pack_out.set(i, from_float<scalar_t>(to_float(prefix_pack.get(i)) * (factors.x * normalizer) +
                                         to_float(suffix_pack.get(i)) * (factors.y * normalizer)));
  store(out + token * merged.token_stride + head * merged.head_stride + feature, pack_out);
  if (feature == 0) lse_out[head * merged.lse_head_stride + token * merged.lse_token_stride] = shift + state.lse();
}

}  // namespace pagedkv
