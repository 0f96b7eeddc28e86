// The middle of a varlen CTA in float32. A warp takes 8 rows of the tile and 32 keys at a time: a lane scores one key
// for all rows, then accumulates some features over all keys. Queries and weights are read from shared memory, where
// all lanes want the same word.
#pragma once
#include "copy.cuh"
#include "paging.cuh"
#include "query_tiles.cuh"
#include "scores.cuh"
#include "softmax.cuh"
#include "states.cuh"

namespace pagedkv {

template <int HEAD_SIZE, int WARPS, bool IS_ALIGNED>
class CudaCoreMainloop {
  static constexpr int KEYS = 32, X = 4, LANE_FEATURES = (HEAD_SIZE + 31) / 32;

 public:
  static constexpr int WARP_ROWS = 8, ROWS = WARP_ROWS * WARPS, TILE_TOKENS = KEYS;
  static constexpr int ACC_ROW = HEAD_SIZE;  // numbers between the accumulators of two rows that are left
  static constexpr int SMEM_BYTES = ROWS * (HEAD_SIZE + KEYS) * 4;

  __device__ __forceinline__ explicit CudaCoreMainloop(char* smem)
      : query_smem_(reinterpret_cast<float*>(smem) + threadIdx.x / 32 * WARP_ROWS * HEAD_SIZE),
        weights_smem_(reinterpret_cast<float*>(smem) + ROWS * HEAD_SIZE + threadIdx.x / 32 * WARP_ROWS * KEYS) {}

  // As that of MmaMainloop.
  __device__ __forceinline__ void run(const QueryTile& tile, const FlashSequence<float>& sequence, const float* query,
                                      const ScoreOptions& options, const VarlenParams& params) {
    const KeyRange keys = tile.template keys<KEYS>(params);
    start_rows(tile, query, options, params);
    for (int32_t first = keys.first / KEYS * KEYS; first < keys.end; first += KEYS) {
      const int32_t key = first + lane();
      const bool is_there = keys.has(key);
      typename FlashSequence<float>::Row offsets{0, 0};
      if (is_there) offsets = sequence.row(sequence.find(key));
      float scores[WARP_ROWS] = {};
      if (is_there) multiply_keys(sequence.key + offsets.key, scores);
      __syncwarp();  // the weights of the keys before have been read
#pragma unroll
      for (int row = 0; row < WARP_ROWS; row++) {
        ScoreOptions of_row = options;
        of_row.query_position = position_[row];
        if (!options.are_plain()) scores[row] = of_row.logit(scores[row], slope_[row], key);
        update(row, scores[row], options.are_plain() ? options.scale_log2 : 1.0f, is_there && seen_[row].has(key));
      }
      __syncwarp();
      multiply_values(first, keys, sequence, offsets);
    }
    __syncthreads();
  }

  // Leaves the states of the warp's rows, where queries and weights were.
  __device__ __forceinline__ States<ACC_ROW> leave() const {
    const int first_row = threadIdx.x / 32 * WARP_ROWS;
    float *acc_smem = query_smem_ - first_row * HEAD_SIZE, *sums_smem = weights_smem_ - first_row * KEYS;
    const States<ACC_ROW> states_smem(acc_smem, sums_smem, ROWS);
#pragma unroll
    for (int row = 0; row < WARP_ROWS; row++) {
      const StoredState state = states_smem.at(first_row + row);
#pragma unroll
      for (int i = 0; i < LANE_FEATURES; i++)
        if (feature(i) < HEAD_SIZE) state.acc[feature(i)] = acc_[i][row];
      if (lane() == 0) state.set({max_logit_[row], exp_sum_[row]});
    }
    return states_smem;
  }

 private:
  static __device__ __forceinline__ int lane() { return threadIdx.x % 32; }
  static __device__ __forceinline__ int feature(int i) { return i * 32 + lane(); }

  __device__ __forceinline__ void start_rows(const QueryTile& tile, const float* query, const ScoreOptions& options,
                                             const VarlenParams& params) {
#pragma unroll
    for (int i = 0; i < WARP_ROWS; i++) {
      const QueryRow row = tile.row(threadIdx.x / 32 * WARP_ROWS + i, options, params);
      seen_[i] = row.seen, position_[i] = row.position, slope_[i] = row.slope;
      max_logit_[i] = -CUDART_INF_F, exp_sum_[i] = 0.0f;
      for (int j = lane(); j < HEAD_SIZE; j += 32)
        query_smem_[i * HEAD_SIZE + j] = row.is_there ? query[row.offset + j] : 0.0f;
#pragma unroll
      for (int j = 0; j < LANE_FEATURES; j++) acc_[j][i] = 0.0f;
    }
    __syncwarp();
  }

  // S = Q K^T  [8, 32]
  __device__ __forceinline__ void multiply_keys(const float* key, float (&scores)[WARP_ROWS]) const {
#pragma unroll 4
    for (int pack = 0; pack < HEAD_SIZE / X; pack++) {
      const auto numbers = load_elements<X, IS_ALIGNED>(key + pack * X);
#pragma unroll
      for (int row = 0; row < WARP_ROWS; row++) {
        const auto queries = load_shared<X>(query_smem_ + row * HEAD_SIZE + pack * X);
        float sum = 0.0f;  // few numbers first, which rounds less than all of them one after the other
#pragma unroll
        for (int i = 0; i < X; i++) sum = fmaf(numbers.get(i), queries.get(i), sum);
        scores[row] += sum;
      }
    }
  }

  // Takes one score of every lane that has `is_seen` into a row's state, and leaves their weights in shared memory.
  __device__ __forceinline__ void update(int row, float score, float factor_of_score, bool is_seen) {
    const float largest = max_over_warp(is_seen ? fmaxf(score * factor_of_score, max_logit_[row]) : max_logit_[row]);
    const float factor = weight(max_logit_[row], largest),
                mine = is_seen ? weight(score, factor_of_score, largest) : 0.0f;
    max_logit_[row] = largest;
    exp_sum_[row] = exp_sum_[row] * factor + sum_over_warp(mine);
    weights_smem_[row * KEYS + lane()] = mine;
#pragma unroll
    for (int i = 0; i < LANE_FEATURES; i++) acc_[i][row] *= factor;
  }

  // O += P V  [8, HEAD_SIZE], of the keys that some row of the tile sees.
  __device__ __forceinline__ void multiply_values(int32_t first_key, const KeyRange& keys,
                                                  const FlashSequence<float>& sequence,
                                                  const typename FlashSequence<float>::Row& offsets) {
    float sums[LANE_FEATURES][WARP_ROWS] = {};  // of one tile first, which rounds less
#pragma unroll 1
    for (int key = 0; key < KEYS; key++) {
      const int64_t offset = __shfl_sync(WARP, offsets.value, key);
      if (!keys.has(first_key + key)) continue;
#pragma unroll
      for (int i = 0; i < LANE_FEATURES; i++) {
        if (feature(i) >= HEAD_SIZE) continue;
        const float value = __ldg(sequence.value + offset + feature(i));
#pragma unroll
        for (int row = 0; row < WARP_ROWS; row++)
          sums[i][row] = fmaf(value, weights_smem_[row * KEYS + key], sums[i][row]);
      }
    }
#pragma unroll
    for (int i = 0; i < LANE_FEATURES; i++)
#pragma unroll
      for (int row = 0; row < WARP_ROWS; row++) acc_[i][row] += sums[i][row];
  }

  float* query_smem_;    // [8, HEAD_SIZE]
  float* weights_smem_;  // [8, KEYS]
  KeyRange seen_[WARP_ROWS];
  int32_t position_[WARP_ROWS];
  float slope_[WARP_ROWS], max_logit_[WARP_ROWS], exp_sum_[WARP_ROWS];
  float acc_[LANE_FEATURES][WARP_ROWS];
};

}  // namespace pagedkv
