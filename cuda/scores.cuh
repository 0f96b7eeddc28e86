// From q . k to the logits of a softmax, in units of log 2.
#pragma once
#include "softmax.cuh"

namespace pagedkv {

// cap * tanh(score / cap). Far below the cap 1 - 2 / (e^2x + 1) would have lost the digits of tanh(x) that the cap
// magnifies, and x itself may be too small to be told from 0: there it is the series, times the score.
__device__ __forceinline__ float capped_score(float score, float cap, float inverse_cap) {
  const float x = score * inverse_cap, square = x * x;
  const float series = fmaf(square, fmaf(square, fmaf(square, -17.0f / 315, 2.0f / 15), -1.0f / 3), 1.0f);
  const float tanh_x = 1.0f - 2.0f * approximate_reciprocal(exp2_approximate(x * (2.0f * LOG2_E)) + 1.0f);
  return fabsf(x) < 0.25f ? score * series : cap * tanh_x;
}

struct ScoreOptions {
  float scale, scale_log2;  // of q . k, that of the keys included; the same in units of log 2
  float softcap;            // 0 for none
  float inverse_softcap;
  const float* alibi_slopes;  // of the heads in question, or null
  int64_t slope_stride;
  int32_t query_position;

  // Whether a score needs no more than its factor.
  __device__ __forceinline__ bool are_plain() const { return softcap == 0.0f && alibi_slopes == nullptr; }
  __device__ __forceinline__ float slope(int32_t head) const {
    return alibi_slopes == nullptr ? 0.0f : alibi_slopes[head * slope_stride];
  }
  __device__ __forceinline__ float logit(float product, float slope, int32_t key_position) const {
    const float score = product * scale,
                capped = softcap == 0.0f ? score : capped_score(score, softcap, inverse_softcap);
    return (capped - slope * abs(query_position - key_position)) * LOG2_E;
  }
};

}  // namespace pagedkv
