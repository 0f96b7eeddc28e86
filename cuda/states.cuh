// Softmax states with their accumulators, as warps leave them for each other, and how a warp merges them.
#pragma once
#include "convert.cuh"
#include "copy.cuh"
#include "ptx.cuh"
#include "softmax.cuh"

namespace pagedkv {

// A softmax state with its accumulator, in shared memory or in the workspace.
struct StoredState {
  float* acc;  // [head_size]
  float* max_logit;
  float* exp_sum;

  __device__ __forceinline__ SoftmaxState state() const { return {*max_logit, *exp_sum}; }
  __device__ __forceinline__ void set(const SoftmaxState& state) const {
    *max_logit = state.max_logit, *exp_sum = state.exp_sum;
  }
};

// Several, one for each head or row.
template <int ROW>
struct States {
  float* acc;         // [count, ROW]
  float* max_logits;  // [count]
  float* exp_sums;    // [count]

  // `acc` and, behind each other, the rest.
  __device__ __forceinline__ States(float* acc, float* sums, int64_t count)
      : acc(acc), max_logits(sums), exp_sums(sums + count) {}

  __device__ __forceinline__ StoredState at(int64_t index) const {
    return {acc + index * ROW, max_logits + index, exp_sums + index};
  }
};

// Four numbers from the `first` of a pack on, rounded after multiplication with a factor.
template <class scalar_t, int N>
__device__ __forceinline__ void set_four(Pack<scalar_t, N>& pack, int first, const float4& numbers, float factor) {
  pack.set(first, from_float<scalar_t>(numbers.x * factor));
  pack.set(first + 1, from_float<scalar_t>(numbers.y * factor));
  pack.set(first + 2, from_float<scalar_t>(numbers.z * factor));
  pack.set(first + 3, from_float<scalar_t>(numbers.w * factor));
}

// The accumulator of one state, spread over a warp: of every 128 numbers each lane holds four that adjoin.
template <int HEAD_SIZE>
struct WarpRow {
  static constexpr int PACKS = (HEAD_SIZE + 127) / 128;
  float4 packs[PACKS] = {};

  static __device__ __forceinline__ int feature(int pack) { return (pack * 32 + threadIdx.x % 32) * 4; }
  static __device__ __forceinline__ bool is_there(int pack) {
    return HEAD_SIZE % 128 == 0 || feature(pack) < HEAD_SIZE;
  }

  __device__ __forceinline__ void scale(float factor) {
#pragma unroll
    for (int i = 0; i < PACKS; i++) {
      float4& pack = packs[i];
      pack.x *= factor, pack.y *= factor, pack.z *= factor, pack.w *= factor;
    }
  }
  __device__ __forceinline__ void load(const float* acc) {
#pragma unroll
    for (int i = 0; i < PACKS; i++)
      if (is_there(i)) packs[i] = *reinterpret_cast<const float4*>(acc + feature(i));
  }
  __device__ __forceinline__ void add(const WarpRow& other, float factor) {
#pragma unroll
    for (int i = 0; i < PACKS; i++) {
      const float4& numbers = other.packs[i];
      float4& pack = packs[i];
      pack.x += numbers.x * factor, pack.y += numbers.y * factor;
      pack.z += numbers.z * factor, pack.w += numbers.w * factor;
    }
  }
  // Rounded, after multiplication with a factor.
  template <bool IS_ALIGNED, class scalar_t>
  __device__ __forceinline__ void write(scalar_t* out, float factor) const {
#pragma unroll
    for (int i = 0; i < PACKS; i++) {
      if (!is_there(i)) continue;
      Pack<scalar_t, 4> pack;
      set_four(pack, 0, packs[i], factor);
      store_elements<IS_ALIGNED>(out + feature(i), pack);
    }
  }
  __device__ __forceinline__ void store(const StoredState& target, const SoftmaxState& state) const {
#pragma unroll
    for (int i = 0; i < PACKS; i++)
      if (is_there(i)) *reinterpret_cast<float4*>(target.acc + feature(i)) = packs[i];
    if (threadIdx.x % 32 == 0) target.set(state);
  }
};

// One state from `count`, of which `locate(i)` is the i-th, in their order. By a warp, a lane for each of 32 at a time.
template <int HEAD_SIZE, class Locate>
__device__ __forceinline__ SoftmaxState merge_by_warp(int count, const Locate& locate, WarpRow<HEAD_SIZE>& row) {
  if (__builtin_expect(count == 1, false)) {  // out of the way of short sequences, which wait for code
    row.load(locate(0).acc);
    return locate(0).state();
  }
  constexpr int AT_ONCE = 8 / WarpRow<HEAD_SIZE>::PACKS;
  const int lane = threadIdx.x % 32;
  SoftmaxState state;
#pragma unroll 1
  for (int first = 0; first < count; first += 32) {
    const bool is_there = first + lane < count;
    const StoredState stored = locate(is_there ? first + lane : first);
    SoftmaxState part;
    if (is_there) part = stored.state();
    const auto acc = reinterpret_cast<uint64_t>(stored.acc);
    float factor;
    // One code for a few and for many, which so comes once.
#pragma unroll 1
    for (int i = first; i < min(first + 32, count); i += AT_ONCE) {
      WarpRow<HEAD_SIZE> others[AT_ONCE];
#pragma unroll
      for (int j = 0; j < AT_ONCE; j++) {
        const auto* other = reinterpret_cast<const float*>(__shfl_sync(WARP, acc, i + j - first));
        if (i + j < count) others[j].load(other);
      }
      if (i == first) {  // while those are on their way
        SoftmaxState parts;
        parts.max_logit = fmaxf(max_over_warp(part.max_logit), state.max_logit);
        factor = weight(part.max_logit, parts.max_logit);
        parts.exp_sum = sum_over_warp(part.exp_sum * factor);
        row.scale(state.merge(parts).x);
      }
#pragma unroll
      for (int j = 0; j < AT_ONCE; j++) row.add(others[j], __shfl_sync(WARP, factor, i + j - first));
    }
  }
  return state;
}

}  // namespace pagedkv
