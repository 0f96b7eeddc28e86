// The state of an online softmax: partial results of attention, and how they merge. Logits are in units of log 2, so
// that every exponential is one exp2.
#pragma once
#include <math_constants.h>

#include "ptx.cuh"

namespace pagedkv {

inline constexpr float LOG2_E = 1.4426950408889634f, LN_2 = 0.6931471805599453f;

// 2^(logit - max_logit). A row that has seen no key has the maximum -inf: it is shifted by 0, since -inf - -inf is NaN.
__device__ __forceinline__ float weight(float logit, float max_logit) {
  return exp2_approximate(logit - (max_logit == -CUDART_INF_F ? 0.0f : max_logit));
}

// The same of score * factor, without rounding the product.
__device__ __forceinline__ float weight(float score, float factor, float max_logit) {
  return exp2_approximate(fmaf(score, factor, max_logit == -CUDART_INF_F ? 0.0f : -max_logit));
}

// One row over some of its keys: out = acc / exp_sum, with acc kept by the owner of the state. A row that has seen no
// key holds -inf and 0.
struct SoftmaxState {
  float max_logit = -CUDART_INF_F, exp_sum = 0.0f;

  // Takes in a state over other keys; returns what `acc` is to be multiplied with before the other's is added.
  __device__ __forceinline__ float2 merge(const SoftmaxState& other) {
    const float common = fmaxf(max_logit, other.max_logit);
    const float2 factors = {weight(max_logit, common), weight(other.max_logit, common)};
    exp_sum = exp_sum * factors.x + other.exp_sum * factors.y;
    max_logit = common;
    return factors;
  }

  // What `acc` is to be multiplied with in the end; 0 where no key was seen.
  __device__ __forceinline__ float normalizer() const { return exp_sum == 0.0f ? 0.0f : 1.0f / exp_sum; }

  // The natural logarithm of the denominator; -inf where no key was seen.
  __device__ __forceinline__ float lse() const {
    return exp_sum == 0.0f ? -CUDART_INF_F : (max_logit + __log2f(exp_sum)) * LN_2;
  }
};

}  // namespace pagedkv
