// From q . k to the logits of a softmax, in units of log 2.
#pragma once
#include "softmax.cuh"

namespace pagedkv {

// tanh within 2^-22, in a few instructions. Near 0 the quotient would lose what it is to give.
__device__ __forceinline__ float tanh_by_exp2(float x) {
  const float square = x * x;
  const float series = x + x * square * (-1.0f / 3 + square * (2.0f / 15 - square * (17.0f / 315)));
  const float quotient = 1.0f - 2.0f * approximate_reciprocal(exp2_approximate(x * (2.0f * LOG2_E)) + 1.0f);
  return fabsf(x) < 0.25f ? series : quotient;
}

struct ScoreOptions {
  float scale, scale_log2;    // of q . k, that of the keys included; the same in units of log 2
  float softcap;              // 0 for none
  const float* alibi_slopes;  // of the heads in question, or null
  int64_t slope_stride;
  int32_t query_position;

  // Whether a score needs no more than its factor.
  __device__ __forceinline__ bool are_plain() const { return softcap == 0.0f && alibi_slopes == nullptr; }
  __device__ __forceinline__ float slope(int32_t head) const {
    return alibi_slopes == nullptr ? 0.0f : alibi_slopes[head * slope_stride];
  }
  __device__ __forceinline__ float logit(float product, float slope, int32_t key_position) const {
    const float score = product * scale, capped = softcap == 0.0f ? score : softcap * tanh_by_exp2(score / softcap);
    return (capped - slope * abs(query_position - key_position)) * LOG2_E;
  }
};

}  // namespace pagedkv
