// A warp's scan of tiles of one sequence, for up to HEADS query heads that share a kv head, on tensor cores.
//
// A tile is scored as S^T = K Q^T and accumulated as O^T = V^T P^T: tokens and features are the rows of the products,
// heads their columns, and movmatrix turns the result of the first into the operand of the second. The packed layout lets
// every lane load what it multiplies in 16-byte packs: of K some features of a token, of V some tokens of a feature. How
// numbers are ordered along the inner axis of a product does not matter as long as both operands agree.
//
// Packs wait in shared memory. Eight lanes that copy at once copy 128 bytes that adjoin, which are fetched at once; they are
// not the lanes that will multiply them. Keys and values of a tile take turns as stages of a ring, TILES_AHEAD of each on
// their way.
#pragma once
#include "convert.cuh"
#include "copy.cuh"
#include "dequantize.cuh"
#include "paging.cuh"
#include "scores.cuh"
#include "softmax.cuh"

namespace pagedkv {

template <class scalar_t, class cache_t, int HEAD_SIZE, int BLOCK_SIZE, int HEADS, int TILES_AHEAD, bool IS_ALIGNED>
class TensorCoreScan {
  using product_t = typename Operand<scalar_t, cache_t>::type;
  static constexpr uint32_t WARP = 0xffffffffu;
  static constexpr bool IS_CONVERTED = !IS_SAME<scalar_t, product_t>;
  static constexpr int X = 16 / sizeof(cache_t), PAIRS = X / 2;   // numbers and words of a pack
  static constexpr int MATRICES = PAIRS;                          // groups of 8 tokens in a tile
  static constexpr int KEY_STEPS = (HEAD_SIZE + 4 * X - 1) / (4 * X);  // packs of a token for each of four lanes
  static constexpr int KEY_PACKS = MATRICES * KEY_STEPS, VALUE_PACKS = HEAD_SIZE / 8;
  static constexpr int STAGES = 2 * TILES_AHEAD + 1, STAGE_PACKS = KEY_PACKS > VALUE_PACKS ? KEY_PACKS : VALUE_PACKS;
  static constexpr int ROWS = (HEAD_SIZE + 15) / 16, COLUMNS = HEADS / 8;  // of the tiles of O^T
  // Blocks smaller than a pack of V: it comes from several.
  static constexpr int PART_TOKENS = X < BLOCK_SIZE ? X : BLOCK_SIZE, PARTS = X / PART_TOKENS;
  // Packs of V that adjoin in a block: those of a feature, then those of the next one.
  static constexpr int ROW_PACKS = BLOCK_SIZE <= X ? 1 : BLOCK_SIZE <= 2 * X ? 2 : 4;

 public:
  static constexpr int TILE_TOKENS = 4 * X;
  static constexpr int SMEM_BYTES = STAGES * STAGE_PACKS * 32 * 16;  // of a warp

  __device__ __forceinline__ explicit TensorCoreScan(void* ring_smem) : ring_smem_(static_cast<uint4*>(ring_smem)) {}

  // Begins with the tiles `first`, `first + step` ... of a sequence. `query` has rows of `num_heads` heads.
  __device__ __forceinline__ void start(const PackedSequence<cache_t, BLOCK_SIZE>& sequence, int32_t first, int32_t step,
                                        const scalar_t* query, int64_t head_stride, int num_heads) {
    sequence_ = sequence, copied_ = tile_ = first, step_ = step, num_heads_ = num_heads;
    end_ = (sequence.end_token + TILE_TOKENS - 1) / TILE_TOKENS;
    __syncwarp();  // all lanes have read the last stage
    read_stage_ = write_stage_;  // those between were left empty when the sequence before ended
    find_blocks(first);
#pragma unroll
    for (int i = 0; i < TILES_AHEAD; i++) copy_keys(), copy_values();
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
      float scores[PAIRS / 2][COLUMNS][4] = {};
      uint32_t weights[COLUMNS][PAIRS];
      float factors[COLUMNS][2];
      wait_for_stage();
      multiply_keys(scores);
      copy_keys();
      update(tile_ * TILE_TOKENS, options, scores, weights, factors);
      wait_for_stage();
      multiply_values(tile_ * TILE_TOKENS, weights, factors);
      copy_values();
    }
  }

  // Leaves the state of head h as number `first` + h.
  template <class States>
  __device__ __forceinline__ void leave(const States& states_smem, int first) {
#pragma unroll
    for (int n = 0; n < COLUMNS; n++)
#pragma unroll
      for (int h = 0; h < 2; h++) {
        const int head = n * 8 + 2 * column() + h;
#pragma unroll
        for (int feature = 0; feature < HEAD_SIZE; feature += 8)
          states_smem.acc_of(first + head)[feature + row()] = acc_[feature / 16][n][feature / 8 % 2 * 2 + h];
        const float exp_sum = over_rows(exp_sum_[n][h], [](float x, float y) { return x + y; });
        if (row() == 0) states_smem.set(first + head, {max_logit_[n][h], exp_sum});
      }
  }

 private:
  // A lane's place in the products: its row of A, which is its column of B, and which of four lanes along the inner axis.
  static __device__ __forceinline__ int lane() { return threadIdx.x % 32; }
  static __device__ __forceinline__ int row() { return lane() / 4; }
  static __device__ __forceinline__ int column() { return lane() % 4; }

  // ---- copies -------------------------------------------------------------------------------------------------------

  // Of which row and column of the products a lane copies packs of V.
  static __device__ __forceinline__ int value_row() { return lane() % (8 * ROW_PACKS) / ROW_PACKS; }
  static __device__ __forceinline__ int value_column() {
    return lane() / (8 * ROW_PACKS) * ROW_PACKS + lane() % ROW_PACKS;
  }
  static __device__ __forceinline__ int lane_of_column(int column) {
    return column / ROW_PACKS * 8 * ROW_PACKS + column % ROW_PACKS;
  }

  // The blocks of the packs of V that this lane copies of a tile.
  __device__ __forceinline__ void find_blocks(int32_t tile) {
#pragma unroll
    for (int part = 0; part < PARTS; part++) {
      const int32_t first = tile * TILE_TOKENS + X * value_column() + part * PART_TOKENS;
      next_blocks_[part] = tile < end_ ? sequence_.block_of(first, PART_TOKENS) : 0;
    }
  }

  // A lane copies of 8 tokens the pack of one, of four packs of a token the one of its group of 8 lanes.
  __device__ __forceinline__ void copy_keys() {
    if (copied_ < end_) {
#pragma unroll
      for (int part = 0; part < PARTS; part++) blocks_[part] = next_blocks_[part];
      const int row = lane() % 8, column = lane() / 8;
#pragma unroll
      for (int matrix = 0; matrix < MATRICES; matrix++) {
        const int from = lane_of_column(matrix * 8 / X);
        const int32_t block = __shfl_sync(WARP, blocks_[matrix * 8 % X / PART_TOKENS], from);
        const int32_t first = copied_ * TILE_TOKENS + matrix * 8;
        const bool is_seen = sequence_.sees(first, 8);
#pragma unroll
        for (int i = 0; i < KEY_STEPS; i++) {
          const int pack = i * 4 + column;
          const bool is_there = is_seen && (HEAD_SIZE % (4 * X) == 0 || pack * X < HEAD_SIZE);
          copy_elements<X, IS_ALIGNED>(
              reinterpret_cast<cache_t*>(pack_smem(write_stage_, matrix * KEY_STEPS + i, row, column)),
              sequence_.key_pack(block, first + row, pack), is_there);
        }
      }
      find_blocks(copied_ + step_);
    }
    end_stage();
  }

  __device__ __forceinline__ void copy_values() {
    if (copied_ < end_) {
#pragma unroll
      for (int part = 0; part < PARTS; part++) {
        const int32_t first = copied_ * TILE_TOKENS + X * value_column() + part * PART_TOKENS;
        const bool is_seen = sequence_.sees(first, PART_TOKENS);
        const cache_t* values = sequence_.values_of(blocks_[part], first, value_row());
#pragma unroll
        for (int i = 0; i < VALUE_PACKS; i++) {
          uint4* pack = pack_smem(write_stage_, i, value_row(), value_column());
          copy_elements<PART_TOKENS, IS_ALIGNED>(reinterpret_cast<cache_t*>(pack) + part * PART_TOKENS,
                                                 values + i * 8 * BLOCK_SIZE, is_seen);
        }
      }
      copied_ += step_;
    }
    end_stage();
  }

  // After this every lane's copies into the stage to be read are there, and the stage read before is free.
  __device__ __forceinline__ void wait_for_stage() {
    wait_for_copies<2 * TILES_AHEAD - 1>();
    __syncwarp();
  }

  __device__ __forceinline__ void end_stage() {
    commit_copies();
    write_stage_ = write_stage_ + 1 == STAGES ? 0 : write_stage_ + 1;
  }
  __device__ __forceinline__ void next_read_stage() { read_stage_ = read_stage_ + 1 == STAGES ? 0 : read_stage_ + 1; }

  // The place of a lane's pack: different banks for eight lanes that write at once, and for eight that read at once.
  __device__ __forceinline__ uint4* pack_smem(int stage, int pack, int row, int column) {
    const int swizzled_row = row ^ ((column & 1) * 4 + (column & 2));
    return ring_smem_ + (stage * STAGE_PACKS + pack) * 32 + column * 8 + swizzled_row;
  }
  __device__ __forceinline__ uint4* pack_smem(int pack) { return pack_smem(read_stage_, pack, row(), column()); }

  static __device__ __forceinline__ void read_pack(uint32_t (&pack)[4], const uint4* place) {
    const uint4 words = *place;
    pack[0] = words.x, pack[1] = words.y, pack[2] = words.z, pack[3] = words.w;
  }

  // ---- S^T = K Q^T  [TILE_TOKENS, HEADS] ----------------------------------------------------------------------------

  // The columns of Q^T, with the features of this lane's packs of K.
  __device__ __forceinline__ void load_queries(const scalar_t* query, int64_t head_stride) {
#pragma unroll
    for (int n = 0; n < COLUMNS; n++) {
      const int head = n * 8 + row();
      Pack<scalar_t, 8> packs[KEY_STEPS * X / 8];
#pragma unroll
      for (int i = 0; i < KEY_STEPS * X / 8; i++) {
        const int feature = (i / (X / 8) * 4 + column()) * X + i % (X / 8) * 8;
        packs[i] = {};
        if (head < num_heads_ && feature < HEAD_SIZE) packs[i] = load_elements<8, IS_ALIGNED>(query + head * head_stride + feature);
      }
      set_queries(n, packs);
    }
  }

  __device__ __forceinline__ void set_queries(int n, const Pack<scalar_t, 8> (&packs)[KEY_STEPS * X / 8]) {
    const float power = IS_CONVERTED ? power_of_two(packs) : 1.0f;
#pragma unroll
    for (int i = 0; i < KEY_STEPS * PAIRS; i++) {
      const Pack<scalar_t, 8>& pack = packs[i / 4];
      query_[i / PAIRS][n][i % PAIRS] =
          IS_CONVERTED ? pair_of_floats(to_float(pack.get(i % 4 * 2)) / power, to_float(pack.get(i % 4 * 2 + 1)) / power, product_t{})
                       : pack.bits(i % 4);
    }
#pragma unroll
    for (int h = 0; h < 2; h++) power_[n][h] = IS_CONVERTED ? __shfl_sync(WARP, power, (2 * column() + h) * 4) : 1.0f;
  }

  // fp8 keys are multiplied as float16. A bfloat16 query may be too large or too small for that: it is divided by the power
  // of two next to its largest number, which its scores make up for.
  __device__ __forceinline__ float power_of_two(const Pack<scalar_t, 8> (&packs)[KEY_STEPS * X / 8]) const {
    float largest = 0.0f;
#pragma unroll
    for (int i = 0; i < KEY_STEPS * X; i++) largest = fmaxf(largest, fabsf(to_float(packs[i / 8].get(i % 8))));
    largest = fmaxf(largest, __shfl_xor_sync(WARP, largest, 1));
    largest = fmaxf(largest, __shfl_xor_sync(WARP, largest, 2));
    const uint32_t exponent = __float_as_uint(largest) >> 23;
    return exponent == 0 || exponent == 255 ? 1.0f : __uint_as_float(exponent << 23);
  }

  __device__ __forceinline__ void multiply_keys(float (&scores)[PAIRS / 2][COLUMNS][4]) {
#pragma unroll
    for (int i = 0; i < KEY_STEPS; i++)
#pragma unroll
      for (int t = 0; t < MATRICES / 2; t++) {
        uint32_t upper[4], lower[4];
        read_pack(upper, pack_smem(2 * t * KEY_STEPS + i));
        read_pack(lower, pack_smem((2 * t + 1) * KEY_STEPS + i));
#pragma unroll
        for (int j = 0; j < PAIRS; j += 2) {
          const uint32_t keys[4] = {pair_of(upper, j, cache_t{}), pair_of(lower, j, cache_t{}),
                                    pair_of(upper, j + 1, cache_t{}), pair_of(lower, j + 1, cache_t{})};
#pragma unroll
          for (int n = 0; n < COLUMNS; n++)
            multiply_add(scores[t][n], keys, {query_[i][n][j], query_[i][n][j + 1]}, product_t{});
        }
      }
    next_read_stage();
  }

  // ---- softmax ------------------------------------------------------------------------------------------------------

  // From scores to P^T as an operand, and what the accumulators are to be multiplied with before it is added.
  __device__ __forceinline__ void update(int32_t first_token, const ScoreOptions& options,
                                         float (&scores)[PAIRS / 2][COLUMNS][4], uint32_t (&weights)[COLUMNS][PAIRS],
                                         float (&factors)[COLUMNS][2]) {
    is_edge_ = first_token < sequence_.first_token || first_token + TILE_TOKENS > sequence_.end_token;
#pragma unroll
    for (int n = 0; n < COLUMNS; n++) {
#pragma unroll
      for (int h = 0; h < 2; h++) {
        float largest = max_logit_[n][h];
#pragma unroll
        for (int matrix = 0; matrix < MATRICES; matrix++) {
          float& score = scores[matrix / 2][n][matrix % 2 * 2 + h];
          score = logit(score, n, h, first_token + matrix * 8 + row(), options);
          largest = fmaxf(largest, score);
        }
        largest = over_rows(largest, [](float x, float y) { return fmaxf(x, y); });
        factors[n][h] = weight(max_logit_[n][h], largest);
        max_logit_[n][h] = largest;
        exp_sum_[n][h] *= factors[n][h];
#pragma unroll
        for (int matrix = 0; matrix < MATRICES; matrix++) {
          float& score = scores[matrix / 2][n][matrix % 2 * 2 + h];
          score = weight(score, largest);
          exp_sum_[n][h] += score;
        }
      }
#pragma unroll
      for (int matrix = 0; matrix < MATRICES; matrix++) {
        const float* pair = &scores[matrix / 2][n][matrix % 2 * 2];
        weights[n][matrix] = transposed(pair_of_floats(pair[0], pair[1], product_t{}));
      }
      exchange(weights[n]);
    }
  }

  // After the transposition a lane holds the pair of its column, of every group of 8 tokens. It wants all pairs of the
  // groups that its packs of V are of: four lanes transpose a matrix of words.
  __device__ __forceinline__ void exchange(uint32_t (&weights)[PAIRS]) const {
    constexpr int GROUPS = X / 8;  // in a pack of V
    uint32_t words[PAIRS];
#pragma unroll
    for (int i = 0; i < PAIRS; i++) words[i] = weights[i];
#pragma unroll
    for (int distance = 1; distance < 4; distance *= 2)
#pragma unroll
      for (int i = 0; i < PAIRS; i++) {
        if (i / GROUPS & distance) continue;
        uint32_t &low = words[i], &high = words[i + distance * GROUPS];
        const bool is_high = column() & distance;
        const uint32_t received = __shfl_xor_sync(WARP, is_high ? low : high, distance);
        low = is_high ? received : low;
        high = is_high ? high : received;
      }
#pragma unroll
    for (int i = 0; i < PAIRS; i++) weights[i] = words[i % 4 * GROUPS + i / 4];
  }

  __device__ __forceinline__ float logit(float product, int n, int h, int32_t position, const ScoreOptions& options) const {
    if (is_edge_ && !sequence_.sees(position, 1)) return -CUDART_INF_F;
    product *= power_[n][h];
    return options.are_plain() ? product * options.scale_log2 : options.logit(product, slope_[n][h], position);
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

  __device__ __forceinline__ void multiply_values(int32_t first_token, const uint32_t (&weights)[COLUMNS][PAIRS],
                                                  const float (&factors)[COLUMNS][2]) {
    if (is_edge_) clear_unseen_values(first_token + X * column());
#pragma unroll
    for (int f = 0; f < ROWS; f++) {
#pragma unroll
      for (int n = 0; n < COLUMNS; n++)
#pragma unroll
        for (int i = 0; i < 4; i++) acc_[f][n][i] *= factors[n][i % 2];
      uint32_t upper[4], lower[4] = {};
      read_pack(upper, pack_smem(2 * f));
      if (2 * f + 1 < VALUE_PACKS) read_pack(lower, pack_smem(2 * f + 1));
#pragma unroll
      for (int j = 0; j < PAIRS; j += 2) {
        const uint32_t values[4] = {pair_of(upper, j, cache_t{}), pair_of(lower, j, cache_t{}),
                                    pair_of(upper, j + 1, cache_t{}), pair_of(lower, j + 1, cache_t{})};
#pragma unroll
        for (int n = 0; n < COLUMNS; n++)
          multiply_add(acc_[f][n], values, {weights[n][j], weights[n][j + 1]}, product_t{});
      }
    }
    next_read_stage();
  }

  // Values next to seen ones may be anything, and 0 x NaN is NaN.
  __device__ __forceinline__ void clear_unseen_values(int32_t first_token) {
    for (int i = 0; i < VALUE_PACKS; i++) {
      cache_t* values = reinterpret_cast<cache_t*>(pack_smem(i));
#pragma unroll
      for (int j = 0; j < X; j++)
        if (!sequence_.sees(first_token + j, 1)) values[j] = cache_t{};
    }
  }

  PackedSequence<cache_t, BLOCK_SIZE> sequence_;
  uint4* ring_smem_;
  int32_t tile_, copied_, end_, step_, num_heads_, next_blocks_[PARTS], blocks_[PARTS];
  int write_stage_ = 0, read_stage_ = 0;
  bool is_edge_;
  uint32_t query_[KEY_STEPS][COLUMNS][PAIRS];
  float power_[COLUMNS][2], slope_[COLUMNS][2];
  float acc_[ROWS][COLUMNS][4], exp_sum_[COLUMNS][2], max_logit_[COLUMNS][2];
};

}  // namespace pagedkv
