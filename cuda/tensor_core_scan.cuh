// A warp's scan of tiles of one sequence, for up to HEADS query heads that share a kv head, on tensor cores.
//
// A tile is scored as S^T = K Q^T and accumulated as O^T = V^T P^T: tokens and features are the rows of the products,
// heads their columns, and movmatrix turns the result of the first into the operand of the second. How a tile is copied
// and read as operands is the layout's matter: packed_tile.cuh, flash_tile.cuh.
//
// A tile's keys and values take turns as stages of a ring in shared memory that belongs to the warp, TILES_AHEAD of
// each on their way.
#pragma once
#include "convert.cuh"
#include "copy.cuh"
#include "dequantize.cuh"
#include "scores.cuh"
#include "softmax.cuh"

namespace pagedkv {

template <class scalar_t, class Tile, int HEADS, int TILES_AHEAD, bool IS_ALIGNED>
class TensorCoreScan {
  using Sequence = typename Tile::Sequence;
  using product_t = typename Operand<scalar_t, typename Tile::cache_t>::type;
  static constexpr bool IS_CONVERTED = !IS_SAME<scalar_t, product_t>;

 public:
  using cache_t = typename Tile::cache_t;
  static constexpr int HEAD_SIZE = Tile::HEAD_SIZE, TILE_TOKENS = Tile::TOKENS;

 private:
  static constexpr int X = Tile::X, FRAGMENTS = Tile::FRAGMENTS, STAGE_PACKS = Tile::SIDE_PACKS;
  static constexpr int MATRICES = TILE_TOKENS / 8;                         // groups of 8 tokens, rows of S^T
  static constexpr int KEY_STEPS = (HEAD_SIZE + 15) / 16;                  // along the inner axis of S^T
  static constexpr int ROWS = (HEAD_SIZE + 15) / 16, COLUMNS = HEADS / 8;  // of the tiles of O^T
  static constexpr int STAGES = 2 * TILES_AHEAD + 1;
  static constexpr int STAGE_BYTES = STAGE_PACKS * 16;
  static constexpr bool ACC_IN_STAGE = HEADS * HEAD_SIZE * 4 <= STAGE_BYTES;

 public:
  // Numbers between the accumulators of two heads that a warp leaves. 16 bytes more than they need put the columns of
  // O^T, which it writes at once, into different banks.
  static constexpr int ACC_ROW = HEADS * (HEAD_SIZE + 4) * 4 <= STAGE_BYTES ? HEAD_SIZE + 4 : HEAD_SIZE;
  // Shared memory of a warp: the ring, and accumulators for which a stage is too small.
  static constexpr int SMEM_BYTES = STAGES * STAGE_BYTES + (ACC_IN_STAGE ? 0 : HEADS * ACC_ROW * 4);

  __device__ __forceinline__ explicit TensorCoreScan(void* ring_smem) : ring_smem_(static_cast<cache_t*>(ring_smem)) {}

  // Where the accumulators go after a `run`: a stage of the ring that stays free from the next start to the next run.
  __device__ __forceinline__ float* acc_smem() const {
    const int free_stage = write_stage_ == 0 ? STAGES - 1 : write_stage_ - 1;
    return reinterpret_cast<float*>(ring_smem_ + (ACC_IN_STAGE ? free_stage : STAGES) * (STAGE_PACKS * X));
  }

  // Begins with the tiles `first`, `first + step` ... of a sequence. `query` has rows of `num_heads` heads.
  __device__ __forceinline__ void start(const Sequence& sequence, int32_t first, int32_t step, const scalar_t* query,
                                        int64_t head_stride, int num_heads) {
    sequence_ = sequence, copied_ = tile_ = first, step_ = step, num_heads_ = num_heads;
    end_ = (sequence.seen.end + TILE_TOKENS - 1) / TILE_TOKENS;
    __syncwarp();                // all lanes have read the last stage
    read_stage_ = write_stage_;  // those between were left empty when the sequence before ended
    tile_in_cache_.find(sequence_, first);
#pragma unroll
    for (int i = 0; i < TILES_AHEAD; i++) copy_keys<true>(), copy_values<true>();
    load_queries(query, head_stride);
#pragma unroll
    for (int n = 0; n < COLUMNS; n++)
#pragma unroll
      for (int i = 0; i < 4; i++) {
        if (i < 2) max_logit_[n][i] = -CUDART_INF_F, exp_sum_[n][i] = 0.0f;
#pragma unroll
        for (int f = 0; f < ROWS; f++) acc_[f][n][i] = 0.0f;
      }
  }

  // Scans all of them.
  __device__ __forceinline__ void run(const ScoreOptions& options) {
    load_slopes(options);
    for (; tile_ < end_; tile_ += step_) {
      const int32_t first_token = tile_ * TILE_TOKENS;
      float scores[MATRICES / 2][COLUMNS][4] = {};
      uint32_t weights[COLUMNS][MATRICES];
      float factors[COLUMNS][2];
      wait_for_stage();
      multiply_keys(scores);
      copy_keys();
      is_edge_ = first_token < sequence_.seen.first || first_token + TILE_TOKENS > sequence_.seen.end;
      update(first_token, options, scores, weights, factors);
      wait_for_stage();
      if (is_edge_) Tile::clear_unseen_values(sequence_, tile_, stage_smem_);
      multiply_values(weights, factors);
      copy_values();
    }
  }

  // Leaves the states of the heads.
  template <class States>
  __device__ __forceinline__ void leave(const States& states_smem) {
#pragma unroll
    for (int n = 0; n < COLUMNS; n++)
#pragma unroll
      for (int h = 0; h < 2; h++) {
        const int head = n * 8 + 2 * column() + h;
#pragma unroll
        for (int first = 0; first < HEAD_SIZE; first += 8) {
          const int half = first / 8 % 2;
          states_smem.at(head).acc[first / 16 * 16 + Tile::feature(half, row())] = acc_[first / 16][n][half * 2 + h];
        }
        const float exp_sum = over_rows(exp_sum_[n][h], [](float x, float y) { return x + y; });
        if (row() == 0) states_smem.at(head).set({max_logit_[n][h], exp_sum});
      }
  }

 private:
  // A lane's place in the products: its row of A, which is its column of B, and which of four lanes along the inner
  // axis.
  static __device__ __forceinline__ int lane() { return threadIdx.x % 32; }
  static __device__ __forceinline__ int row() { return lane() / 4; }
  static __device__ __forceinline__ int column() { return lane() % 4; }

  // ---- copies -------------------------------------------------------------------------------------------------------

  template <bool IS_FIRST = false>
  __device__ __forceinline__ void copy_keys() {
    if (copied_ < end_) {
      tile_in_cache_.take(sequence_);
      tile_in_cache_.template copy_keys<IS_FIRST>(sequence_, copied_, write_smem());
      tile_in_cache_.find(sequence_, copied_ + step_);
    }
    end_stage();
  }

  template <bool IS_FIRST = false>
  __device__ __forceinline__ void copy_values() {
    if (copied_ < end_) {
      tile_in_cache_.template copy_values<IS_FIRST>(sequence_, copied_, write_smem());
      copied_ += step_;
    }
    end_stage();
  }

  __device__ __forceinline__ cache_t* write_smem() const { return ring_smem_ + write_stage_ * (STAGE_PACKS * X); }
  __device__ __forceinline__ void end_stage() {
    commit_copies();
    write_stage_ = write_stage_ + 1 == STAGES ? 0 : write_stage_ + 1;
  }

  // After this all copies into the stage to be read are there, and the stage read before is free.
  __device__ __forceinline__ void wait_for_stage() {
    wait_for_copies<2 * TILES_AHEAD - 1>();
    __syncwarp();
    stage_smem_ = ring_smem_ + read_stage_ * (STAGE_PACKS * X);
    read_stage_ = read_stage_ + 1 == STAGES ? 0 : read_stage_ + 1;
  }

  // ---- S^T = K Q^T  [TILE_TOKENS, HEADS] ----------------------------------------------------------------------------

  // Which features a lane holds of a step along the inner axis, in two pairs: as ldmatrix spreads a row over four
  // lanes.
  static __device__ __forceinline__ int feature(int step, int pair) {
    return step * 16 + (FRAGMENTS == 1 ? pair * 8 + column() * 2 : column() * 4 + pair * 2);
  }

  __device__ __forceinline__ void load_queries(const scalar_t* query, int64_t head_stride) {
#pragma unroll
    for (int n = 0; n < COLUMNS; n++) {
      const int head = n * 8 + row();
      Pack<scalar_t, 2> pairs[KEY_STEPS][2];
#pragma unroll
      for (int i = 0; i < KEY_STEPS; i++)
#pragma unroll
        for (int pair = 0; pair < 2; pair++) {
          pairs[i][pair] = {};
          if (head < num_heads_ && feature(i, pair) < HEAD_SIZE)
            pairs[i][pair] = load_elements<2, IS_ALIGNED>(query + head * head_stride + feature(i, pair));
        }
      set_queries(n, pairs);
    }
  }

  __device__ __forceinline__ void set_queries(int n, const Pack<scalar_t, 2> (&pairs)[KEY_STEPS][2]) {
    const PowerOfTwo power(IS_CONVERTED ? exponent_of_largest(pairs) : PowerOfTwo::EXPONENT_OF_1);
#pragma unroll
    for (int i = 0; i < 2 * KEY_STEPS; i++) {
      const Pack<scalar_t, 2>& pair = pairs[i / 2][i % 2];
      query_[i / 2][n][i % 2] = IS_CONVERTED ? pair_of_floats(to_float(pair.get(0)) * power.inverse,
                                                              to_float(pair.get(1)) * power.inverse, product_t{})
                                             : pair.word;
    }
#pragma unroll
    for (int h = 0; h < 2; h++)
      power_[n][h] = IS_CONVERTED ? __shfl_sync(WARP, power.value, (2 * column() + h) * 4) : 1.0f;
  }

  static __device__ __forceinline__ uint32_t exponent_of_largest(const Pack<scalar_t, 2> (&pairs)[KEY_STEPS][2]) {
    float largest = 0.0f;
#pragma unroll
    for (int i = 0; i < 4 * KEY_STEPS; i++)
      largest = fmaxf(largest, fabsf(to_float(pairs[i / 4][i / 2 % 2].get(i % 2))));
    largest = fmaxf(largest, __shfl_xor_sync(WARP, largest, 1));
    return PowerOfTwo::exponent_of(fmaxf(largest, __shfl_xor_sync(WARP, largest, 2)));
  }

  __device__ __forceinline__ void multiply_keys(float (&scores)[MATRICES / 2][COLUMNS][4]) const {
    constexpr int PACKS = HEAD_SIZE / X;
#pragma unroll
    for (int t = 0; t < MATRICES / 2; t++)
#pragma unroll
      for (int pack = 0; pack < PACKS; pack += 2) {
        uint32_t keys[FRAGMENTS][4];
        Tile::load_keys(stage_smem_, 16 * t, pack, keys);
#pragma unroll
        for (int i = 0; i < FRAGMENTS; i++) {
          const int step = pack / 2 * FRAGMENTS + i;
          if (FRAGMENTS == 2 && i == 1 && pack + 1 == PACKS) break;
#pragma unroll
          for (int n = 0; n < COLUMNS; n++) multiply_add(scores[t][n], keys[i], query_[step][n], product_t{});
        }
      }
  }

  // ---- softmax ------------------------------------------------------------------------------------------------------

  // From scores to P^T as an operand, and what the accumulators are to be multiplied with before it is added.
  __device__ __forceinline__ void update(int32_t first_token, const ScoreOptions& options,
                                         float (&scores)[MATRICES / 2][COLUMNS][4],
                                         uint32_t (&weights)[COLUMNS][MATRICES], float (&factors)[COLUMNS][2]) {
    if (!options.are_plain()) apply_options(first_token, options, scores);
    if (is_edge_) set_unseen(first_token, scores, CUDART_NAN_F);  // which no maximum takes
#pragma unroll
    for (int n = 0; n < COLUMNS; n++)
#pragma unroll
      for (int h = 0; h < 2; h++) {
        // What a score is to be multiplied with is rounded once, together with the difference from the largest.
        const float factor = options.are_plain() ? options.scale_log2 * power_[n][h] : 1.0f;
        float largest = max_logit_[n][h];
#pragma unroll
        for (int i = 0; i < MATRICES; i++) largest = fmaxf(largest, scores[i / 2][n][i % 2 * 2 + h] * factor);
        largest = over_rows(largest, [](float x, float y) { return fmaxf(x, y); });
        factors[n][h] = weight(max_logit_[n][h], largest);
        max_logit_[n][h] = largest;
#pragma unroll
        for (int i = 0; i < MATRICES; i++) {
          float& score = scores[i / 2][n][i % 2 * 2 + h];
          score = weight(score, factor, largest);
        }
      }
    if (is_edge_) set_unseen(first_token, scores, 0.0f);
#pragma unroll
    for (int n = 0; n < COLUMNS; n++) {
      exp_sum_[n][0] *= factors[n][0], exp_sum_[n][1] *= factors[n][1];
#pragma unroll
      for (int i = 0; i < MATRICES; i++) {
        const float* pair = &scores[i / 2][n][i % 2 * 2];
        exp_sum_[n][0] += pair[0], exp_sum_[n][1] += pair[1];
        weights[n][i] = transposed(pair_of_floats(pair[0], pair[1], product_t{}));
      }
    }
  }

  // From scores to logits.
  __device__ __forceinline__ void apply_options(int32_t first_token, const ScoreOptions& options,
                                                float (&scores)[MATRICES / 2][COLUMNS][4]) const {
#pragma unroll
    for (int i = 0; i < MATRICES; i++)
#pragma unroll
      for (int n = 0; n < COLUMNS; n++)
#pragma unroll
        for (int h = 0; h < 2; h++) {
          float& score = scores[i / 2][n][i % 2 * 2 + h];
          score = options.logit(score * power_[n][h], slope_[n][h], first_token + Tile::token(i, row()));
        }
  }

  __device__ __forceinline__ void set_unseen(int32_t first_token, float (&scores)[MATRICES / 2][COLUMNS][4],
                                             float value) const {
#pragma unroll
    for (int i = 0; i < MATRICES; i++) {
      const bool is_seen = sequence_.seen.has(first_token + Tile::token(i, row()));
#pragma unroll
      for (int n = 0; n < COLUMNS; n++)
#pragma unroll
        for (int h = 0; h < 2; h++)
          if (!is_seen) scores[i / 2][n][i % 2 * 2 + h] = value;
    }
  }

  // The sum or maximum over the lanes that hold the other rows of a column.
  template <class Combine>
  static __device__ __forceinline__ float over_rows(float value, const Combine& combine) {
#pragma unroll
    for (int distance = 4; distance < 32; distance *= 2) value = combine(value, __shfl_xor_sync(WARP, value, distance));
    return value;
  }

  __device__ __forceinline__ void load_slopes(const ScoreOptions& options) {
#pragma unroll
    for (int n = 0; n < COLUMNS; n++)
#pragma unroll
      for (int h = 0; h < 2; h++) {
        const int head = n * 8 + 2 * column() + h;
        slope_[n][h] = head < num_heads_ ? options.slope(head) : 0.0f;
      }
  }

  // ---- O^T += V^T P^T  [HEAD_SIZE, HEADS] ---------------------------------------------------------------------------

  __device__ __forceinline__ void multiply_values(const uint32_t (&weights)[COLUMNS][MATRICES],
                                                  const float (&factors)[COLUMNS][2]) {
#pragma unroll
    for (int f = 0; f < ROWS; f++) {
#pragma unroll
      for (int n = 0; n < COLUMNS; n++)
#pragma unroll
        for (int i = 0; i < 4; i++) acc_[f][n][i] *= factors[n][i % 2];
#pragma unroll
      for (int first = 0; first < MATRICES / 2; first += FRAGMENTS) {
        uint32_t values[FRAGMENTS][4];
        Tile::load_values(stage_smem_, first * 16, f, values);
#pragma unroll
        for (int i = 0; i < FRAGMENTS; i++)
#pragma unroll
          for (int n = 0; n < COLUMNS; n++)
            multiply_add(acc_[f][n], values[i], {weights[n][2 * (first + i)], weights[n][2 * (first + i) + 1]},
                         product_t{});
      }
    }
  }

  Sequence sequence_;
  Tile tile_in_cache_;  // that is copied
  cache_t* ring_smem_;
  cache_t* stage_smem_;
  int32_t tile_, copied_, end_, step_, num_heads_;
  int write_stage_ = 0, read_stage_ = 0;
  bool is_edge_;
  uint32_t query_[KEY_STEPS][COLUMNS][2];
  float power_[COLUMNS][2], slope_[COLUMNS][2];
  float acc_[ROWS][COLUMNS][4], exp_sum_[COLUMNS][2], max_logit_[COLUMNS][2];
};

}  // namespace pagedkv
