// A warp's scan of tiles of one sequence in float32, for up to HEADS query heads that share a kv head. A lane scores
// one token of a tile for all heads, then accumulates some features over all tokens. Queries and weights are read from
// shared memory, where all lanes want the same word.
#pragma once
#include "copy.cuh"
#include "paging.cuh"
#include "scores.cuh"
#include "softmax.cuh"

namespace pagedkv {

template <int SIZE, int BLOCK_SIZE, int HEADS, bool IS_ALIGNED>
class CudaCoreScan {
  static constexpr int X = 4, LANE_FEATURES = (SIZE + 31) / 32;

 public:
  using cache_t = float;
  static constexpr int HEAD_SIZE = SIZE, TILE_TOKENS = 32;
  static constexpr int ACC_ROW = HEAD_SIZE;  // numbers between the accumulators of two heads that a warp leaves
  // Shared memory of a warp: queries, accumulators, weights.
  static constexpr int SMEM_BYTES = HEADS * (HEAD_SIZE + ACC_ROW + TILE_TOKENS) * 4;

  __device__ __forceinline__ explicit CudaCoreScan(void* smem)
      : query_smem_(static_cast<float*>(smem)), weights_smem_(query_smem_ + HEADS * (HEAD_SIZE + ACC_ROW)) {}

  // Begins with the tiles `first`, `first + step` ... of a sequence. `query` has rows of `num_heads` heads.
  __device__ __forceinline__ void start(const PackedSequence<float, BLOCK_SIZE>& sequence, int32_t first, int32_t step,
                                        const float* query, int64_t head_stride, int num_heads) {
    sequence_ = sequence, tile_ = first, step_ = step, num_heads_ = num_heads;
    __syncwarp();
    for (int i = lane(); i < HEADS * HEAD_SIZE; i += 32) {
      const int head = i / HEAD_SIZE;
      query_smem_[i] = head < num_heads ? query[head * head_stride + i % HEAD_SIZE] : 0.0f;
    }
    __syncwarp();
#pragma unroll
    for (int head = 0; head < HEADS; head++) {
      max_logit_[head] = -CUDART_INF_F, exp_sum_[head] = 0.0f;
#pragma unroll
      for (int i = 0; i < LANE_FEATURES; i++) acc_[i][head] = 0.0f;
    }
  }

  // Where the accumulators go.
  __device__ __forceinline__ float* acc_smem() const { return query_smem_ + HEADS * HEAD_SIZE; }

  // Scans all of them.
  __device__ __forceinline__ void run(const ScoreOptions& options) {
    for (; tile_ * TILE_TOKENS < sequence_.seen.end; tile_ += step_) {
      const int32_t token = tile_ * TILE_TOKENS + lane();
      const bool is_seen = sequence_.seen.has(token);
      float scores[HEADS] = {};
      if (is_seen) multiply_keys(token, scores);
      __syncwarp();  // the weights of the tile before have been read
#pragma unroll
      for (int head = 0; head < HEADS; head++) {
        const float slope = head < num_heads_ ? options.slope(head) : 0.0f;
        if (!options.are_plain()) scores[head] = options.logit(scores[head], slope, token);
        update(head, scores[head], options.are_plain() ? options.scale_log2 : 1.0f, is_seen);
      }
      __syncwarp();
      multiply_values(tile_ * TILE_TOKENS);
    }
  }

  // Leaves the states of the heads.
  template <class States>
  __device__ __forceinline__ void leave(const States& states_smem) {
#pragma unroll
    for (int head = 0; head < HEADS; head++) {
#pragma unroll
      for (int i = 0; i < LANE_FEATURES; i++)
        if (feature(i) < HEAD_SIZE) states_smem.at(head).acc[feature(i)] = acc_[i][head];
      if (lane() == 0) states_smem.at(head).set({max_logit_[head], exp_sum_[head]});
    }
  }

 private:
  static __device__ __forceinline__ int lane() { return threadIdx.x % 32; }
  static __device__ __forceinline__ int feature(int i) { return i * 32 + lane(); }

  // S^T = K Q^T  [TILE_TOKENS, HEADS]
  __device__ __forceinline__ void multiply_keys(int32_t token, float (&scores)[HEADS]) const {
    const int32_t block = sequence_.block_of(token, 1);
#pragma unroll 4
    for (int pack = 0; pack < HEAD_SIZE / X; pack++) {
      const auto keys = load_elements<X, IS_ALIGNED>(sequence_.key_pack(block, token, pack));
#pragma unroll
      for (int head = 0; head < HEADS; head++) {
        const auto queries = load_shared<X>(query_smem_ + head * HEAD_SIZE + pack * X);
#pragma unroll
        for (int i = 0; i < X; i++) scores[head] = fmaf(keys.get(i), queries.get(i), scores[head]);
      }
    }
  }

  // Takes one score of every lane that has `is_seen` into a head's state, and leaves their weights in shared memory.
  __device__ __forceinline__ void update(int head, float score, float factor_of_score, bool is_seen) {
    const float largest = max_over_warp(is_seen ? fmaxf(score * factor_of_score, max_logit_[head]) : max_logit_[head]);
    const float factor = weight(max_logit_[head], largest),
                mine = is_seen ? weight(score, factor_of_score, largest) : 0.0f;
    max_logit_[head] = largest;
    exp_sum_[head] = exp_sum_[head] * factor + sum_over_warp(mine);
    weights_smem_[head * TILE_TOKENS + lane()] = mine;
#pragma unroll
    for (int i = 0; i < LANE_FEATURES; i++) acc_[i][head] *= factor;
  }

  // O^T += V^T P^T  [HEAD_SIZE, HEADS]. Values next to seen ones may be anything, and 0 x NaN is NaN.
  __device__ __forceinline__ void multiply_values(int32_t first_token) {
#pragma unroll 1
    for (int32_t token = first_token; token < first_token + TILE_TOKENS; token += X) {
      if (!sequence_.seen.has_of(token, X)) continue;
      const int32_t block = sequence_.block_of(token, X);
#pragma unroll
      for (int i = 0; i < LANE_FEATURES; i++) {
        if (feature(i) >= HEAD_SIZE) continue;
        const auto values = load_elements<X, IS_ALIGNED>(sequence_.values_of(block, token, feature(i)));
#pragma unroll
        for (int head = 0; head < HEADS; head++) {
          const auto weights = load_shared<X>(weights_smem_ + head * TILE_TOKENS + (token - first_token));
#pragma unroll
          for (int j = 0; j < X; j++)
            if (sequence_.seen.has(token + j)) acc_[i][head] = fmaf(values.get(j), weights.get(j), acc_[i][head]);
        }
      }
    }
  }

  PackedSequence<float, BLOCK_SIZE> sequence_;
  int32_t tile_, step_, num_heads_;
  float* query_smem_;
  float* weights_smem_;
  float acc_[LANE_FEATURES][HEADS], exp_sum_[HEADS], max_logit_[HEADS];
};

}  // namespace pagedkv
