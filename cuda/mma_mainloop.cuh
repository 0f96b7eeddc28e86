// The middle of a varlen CTA: scans the keys that a tile of queries sees, on tensor cores that every card from sm_80 on
// has. A tile of keys and values is copied while the one before is multiplied.
//
// S = Q K^T with queries as rows, then O += P V, whose first operand is the registers that S came out in. A warp has
// WARP_TILES times 16 rows: what it reads of K and V serves all of them, and reading shared memory is what limits
// tensor cores. Q stays in shared memory, for registers are full. K^T and V are what ldmatrix makes of rows of
// features, plain and transposed.
//
// Another mainloop takes this one's place if it has ROWS, WARP_ROWS, TILE_TOKENS, SMEM_BYTES, ACC_ROW, and `run` and
// `leave` of the same meaning: who finds the tile before and who writes results after knows no more of it.
#pragma once
#include "copy.cuh"
#include "dequantize.cuh"
#include "paging.cuh"
#include "query_tiles.cuh"
#include "row_copy.cuh"
#include "scores.cuh"
#include "softmax.cuh"
#include "states.cuh"

namespace pagedkv {

template <class scalar_t, class cache_t, int HEAD_SIZE, int KEYS, int WARPS, int WARP_TILES, bool HAS_OPTIONS,
          bool IS_ALIGNED>
class MmaMainloop {
  using product_t = typename Operand<scalar_t, cache_t>::type;
  static constexpr bool IS_CONVERTED = !IS_SAME<scalar_t, product_t>;
  static constexpr bool IS_FP8 = sizeof(cache_t) == 1;

  static constexpr int X = 16 / sizeof(cache_t);       // numbers of a pack
  static constexpr int STEPS = (HEAD_SIZE + 15) / 16;  // along the features, 16 at a time; past HEAD_SIZE they are 0
  static constexpr int PACKS = STEPS * 16 / X;         // of a key's row in shared memory
  static constexpr int SIDE_PACKS = KEYS * PACKS;      // of the keys of a tile, or of its values
  static constexpr int STAGES = 2;
  static constexpr int COLUMNS = KEYS / 8;        // tiles of S
  static constexpr int FEATURES = 2 * STEPS;      // tiles of O
  static constexpr int QUERY_PACKS = 2 * STEPS;   // of a query's row in shared memory
  static constexpr int WARP_KEYS = KEYS / WARPS;  // that a warp copies
  static constexpr int32_t LAST_KEY = 0x7fffffff;
  // How far logits, in units of log 2, may exceed the one that weights are relative to before that is moved: what has
  // been accumulated is then multiplied anew. Weights of 2^8 are far from what float16 holds.
  static constexpr float MOST_GROWTH = 8.0f;
  static constexpr float SMALLEST_FACTOR = 0x1p-126f;  // the smallest normal number
  static constexpr int HALVES = 2 * WARP_TILES;        // rows of which a lane holds parts: two of each tile
  static_assert(WARP_KEYS % 8 == 0, "whole periods of rows in shared memory");

 public:
  static constexpr int WARP_ROWS = 16 * WARP_TILES, ROWS = WARP_ROWS * WARPS, TILE_TOKENS = KEYS;
  // Numbers between the accumulators of two rows that are left: so many that rows written at once differ in banks.
  static constexpr int ACC_ROW = HEAD_SIZE + ((IS_FP8 ? 16 : 8) - HEAD_SIZE % 32 + 32) % 32;
  static constexpr int QUERY_BYTES = ROWS * QUERY_PACKS * 16, RING_BYTES = STAGES * 2 * SIDE_PACKS * 16;
  static constexpr int ACC_BYTES = ROWS * ACC_ROW * 4;
  static constexpr int INFO_BYTES = ROWS * 16;  // what is known of the rows
  static constexpr int SMEM_BYTES =
      (QUERY_BYTES + RING_BYTES > ACC_BYTES ? QUERY_BYTES + RING_BYTES : ACC_BYTES) + INFO_BYTES;

  __device__ __forceinline__ explicit MmaMainloop(char* smem)
      : query_smem_(reinterpret_cast<product_t*>(smem) + first_row() * QUERY_PACKS * 8),
        ring_smem_(reinterpret_cast<cache_t*>(smem + QUERY_BYTES)),
        info_smem_(reinterpret_cast<RowInfo*>(smem + SMEM_BYTES - INFO_BYTES) + first_row()) {}

  // All threads of the CTA together. `query` and the options' slopes are those of the first query of the sequence and
  // the first head of all.
  __device__ __forceinline__ void run(const QueryTile& tile, const FlashSequence<cache_t>& sequence,
                                      const scalar_t* query, const ScoreOptions& options, const VarlenParams& params) {
    keys_ = tile.template keys<KEYS>(params);
    const int32_t first_tile = keys_.first / KEYS, end_tile = (keys_.end + KEYS - 1) / KEYS;
    find(sequence, first_tile);
    start_rows(tile, query, options, params);
    copy_tile(sequence, first_tile);
    for (int32_t i = first_tile; i < end_tile; i++) {
      wait_for_copies<0>();
      if (!keys_.has(i * KEYS) || !keys_.has(i * KEYS + KEYS - 1)) clear_unseen_values(i);
      __syncthreads();  // the tile is there, and all warps have done with the one before
      copy_tile(sequence, i + 1);
      const int32_t first = i * KEYS, last = first + KEYS - 1;
      if (!by_any_.has_of(first, KEYS)) continue;
      float scores[WARP_TILES][COLUMNS][4] = {};
      uint32_t weights[WARP_TILES][COLUMNS][2];
      multiply_keys(i, scores);
      if constexpr (HAS_OPTIONS)
        apply_options(first, options, scores);
      else if (!(options.scale_log2 > 0.0f))
        multiply(options.scale_log2 == 0.0f ? 0.0f : -1.0f, scores);  // now the largest makes the largest logit
      if (by_all_.has(first) && by_all_.has(last))
        update<false>(first, options, scores, weights);
      else
        update<true>(first, options, scores, weights);
      multiply_values(i, weights);
    }
    wait_for_copies<0>();
    __syncthreads();
  }

  // Leaves the states of the warp's rows, where queries and keys were: accumulators, and of each row the rest.
  __device__ __forceinline__ States<ACC_ROW> leave() const {
    auto* acc_smem = reinterpret_cast<float*>(query_smem_ - first_row() * QUERY_PACKS * 8);
    const States<ACC_ROW> states_smem(acc_smem, reinterpret_cast<float*>(info_smem_ - first_row()), ROWS);
#pragma unroll
    for (int h = 0; h < HALVES; h++) {
      const int row = first_row() + row_of(h);
      const float (&acc)[FEATURES][4] = acc_[h / 2];
#pragma unroll
      for (int n = 0; n < FEATURES; n += 2) {
        const float *first = &acc[n][2 * (h % 2)], *second = &acc[n + 1][2 * (h % 2)];
        float* target_smem = states_smem.at(row).acc + n * 8;
        if constexpr (IS_FP8) {
          if (n * 8 + column() * 4 < HEAD_SIZE)
            *reinterpret_cast<float4*>(target_smem + column() * 4) = {first[0], second[0], first[1], second[1]};
        } else {
          if (n * 8 < HEAD_SIZE) *reinterpret_cast<float2*>(target_smem + column() * 2) = {first[0], first[1]};
          if (n * 8 + 8 < HEAD_SIZE)
            *reinterpret_cast<float2*>(target_smem + 8 + column() * 2) = {second[0], second[1]};
        }
      }
      const float exp_sum = over_columns(exp_sum_[h], [](float x, float y) { return x + y; });
      if (column() == 0) states_smem.at(row).set({max_logit_[h], exp_sum});
    }
    return states_smem;
  }

 private:
  static __device__ __forceinline__ int lane() { return threadIdx.x % 32; }
  static __device__ __forceinline__ int column() { return lane() % 4; }
  static __device__ __forceinline__ int warp() { return threadIdx.x / 32; }
  static __device__ __forceinline__ int first_row() { return warp() * WARP_ROWS; }
  // Of the warp's rows those of which a lane holds parts.
  static __device__ __forceinline__ int row_of(int half) { return half * 8 + lane() / 4; }

  // ---- queries ------------------------------------------------------------------------------------------------------

  // What scores of a row may need.
  struct __align__(16) RowInfo {
    KeyRange seen;
    int32_t position;
    float slope;
  };

  __device__ __forceinline__ void start_rows(const QueryTile& tile, const scalar_t* query, const ScoreOptions& options,
                                             const VarlenParams& params) {
    const QueryRow row = tile.row(lane() < WARP_ROWS ? first_row() + lane() : ROWS, options, params);
    if (lane() < WARP_ROWS) info_smem_[lane()] = {row.seen, row.position, row.slope};
    __syncwarp();
    by_any_ = {__reduce_min_sync(WARP, row.is_there ? row.seen.first : LAST_KEY),
               __reduce_max_sync(WARP, row.seen.end)};
    by_all_ = {__reduce_max_sync(WARP, row.seen.first),
               __reduce_min_sync(WARP, row.is_there ? row.seen.end : LAST_KEY)};
    if constexpr (IS_FP8) {
      convert_queries(query, row.offset);
    } else {
      const RowCopy<scalar_t, HEAD_SIZE, QUERY_PACKS, WARP_ROWS, IS_ALIGNED> rows;
      rows.template copy<true>(reinterpret_cast<uint64_t>(query + row.offset), query_smem_);
    }
#pragma unroll
    for (int h = 0; h < HALVES; h++) {
      max_logit_[h] = -CUDART_INF_F, exp_sum_[h] = 0.0f;
#pragma unroll
      for (int n = 0; n < FEATURES; n++) acc_[h / 2][n][h % 2 * 2] = acc_[h / 2][n][h % 2 * 2 + 1] = 0.0f;
    }
  }

  // Queries for codes: as what codes become, and in the order in which ldmatrix spreads those of a key: of 16 features
  // a lane column gets four that adjoin.
  __device__ __forceinline__ void convert_queries(const scalar_t* query, int64_t offset_of_lane) {
#pragma unroll 4
    for (int row = 0; row < WARP_ROWS; row++) {
      const scalar_t* source = query + __shfl_sync(WARP, offset_of_lane, row);
      constexpr int ROUNDS = (STEPS * 8 + 31) / 32;
      Pack<scalar_t, 2> pairs[ROUNDS];
      float largest = 0.0f;
#pragma unroll
      for (int i = 0; i < ROUNDS; i++) {
        const int feature = (i * 32 + lane()) * 2;
        pairs[i].word = feature < HEAD_SIZE ? load_elements<2, IS_ALIGNED>(source + feature).word : 0;
        if (IS_CONVERTED)
          largest = fmaxf(largest, fmaxf(fabsf(to_float(pairs[i].get(0))), fabsf(to_float(pairs[i].get(1)))));
      }
      const PowerOfTwo power(PowerOfTwo::exponent_of(IS_CONVERTED ? max_over_warp(largest) : 1.0f));
      if (lane() == row) power_ = power.value;
#pragma unroll
      for (int i = 0; i < ROUNDS; i++) {
        const int pair = i * 32 + lane(), step = pair / 8, in_step = pair % 8;
        const uint32_t word = IS_CONVERTED ? pair_of_floats(to_float(pairs[i].get(0)) * power.inverse,
                                                            to_float(pairs[i].get(1)) * power.inverse, product_t{})
                                           : pairs[i].word;
        const int place = SwizzledRows<QUERY_PACKS>::place(row, step * 2 + in_step % 2);
        if (step < STEPS) reinterpret_cast<uint32_t*>(query_smem_)[place * 4 + in_step / 2] = word;
      }
    }
    __syncwarp();
  }

  // ---- copies -------------------------------------------------------------------------------------------------------

  // Looks up where the rows lie that this warp copies of a tile, a lane for each; 0, which is always there, for keys
  // that nobody sees.
  __device__ __forceinline__ void find(const FlashSequence<cache_t>& sequence, int32_t tile) {
    const int32_t token = tile * KEYS + warp() * WARP_KEYS + lane() % WARP_KEYS;
    next_ = {0, 0};
    if (keys_.has(token)) next_ = sequence.find(token);
  }

  __device__ __forceinline__ cache_t* side_smem(int32_t tile, bool is_value) const {
    return ring_smem_ + (tile % STAGES * 2 + is_value) * (SIDE_PACKS * X);
  }

  // The tile that was looked up, and looks up the next.
  __device__ __forceinline__ void copy_tile(const FlashSequence<cache_t>& sequence, int32_t tile) {
    if (tile * KEYS < keys_.end) {
      const auto row = sequence.row(next_);
      const int offset = warp() * WARP_KEYS * PACKS * X;
      rows_.template copy<!IS_ALIGNED>(reinterpret_cast<uint64_t>(sequence.key + row.key),
                                       side_smem(tile, false) + offset);
      rows_.template copy<!IS_ALIGNED>(reinterpret_cast<uint64_t>(sequence.value + row.value),
                                       side_smem(tile, true) + offset);
      find(sequence, tile + 1);
    }
    commit_copies();
  }

  // Those of the warp's rows. Values that nobody sees may be anything, and 0 x NaN is NaN.
  __device__ __forceinline__ void clear_unseen_values(int32_t tile) const {
    auto* packs_smem = reinterpret_cast<uint4*>(side_smem(tile, true)) + warp() * WARP_KEYS * PACKS;
    __syncwarp();
    clear_unseen_rows<PACKS, WARP_KEYS>(keys_, tile * KEYS + warp() * WARP_KEYS, packs_smem);
  }

  // ---- S = Q K^T  [WARP_ROWS, KEYS] ---------------------------------------------------------------------------------

  __device__ __forceinline__ void multiply_keys(int32_t tile, float (&scores)[WARP_TILES][COLUMNS][4]) const {
    const int row = IS_FP8 ? lane() : lane() / 16 * 8 + lane() % 8, pack = IS_FP8 ? 0 : lane() / 8 % 2;
    const SwizzledReader<PACKS> keys_smem(side_smem(tile, false), row, pack);
    const SwizzledReader<QUERY_PACKS> queries_smem(query_smem_, lane() % 16, lane() / 16);
#pragma unroll
    for (int step = 0; step < STEPS; step++) {
      uint32_t queries[WARP_TILES][4];
#pragma unroll
      for (int m = 0; m < WARP_TILES; m++) load_matrices(queries[m], queries_smem.at(m * 16, step * 2));
#pragma unroll
      for (int n = 0; n < COLUMNS; n += IS_FP8 ? 4 : 2) {
        uint32_t matrices[4];
        if constexpr (IS_FP8) {  // 32 keys of one pack
          load_matrices(matrices, keys_smem.at(n * 8, step));
#pragma unroll
          for (int i = 0; i < 4; i++) {
            const WordHalves codes = halves(matrices[i]);
            const uint32_t keys[2] = {float16_pair<FP8_FORMAT<cache_t>>(codes.low),
                                      float16_pair<FP8_FORMAT<cache_t>>(codes.high)};
#pragma unroll
            for (int m = 0; m < WARP_TILES; m++) multiply_add(scores[m][n + i], queries[m], keys, product_t{});
          }
        } else {  // 16 keys of two packs
          load_matrices(matrices, keys_smem.at(n * 8, step * 2));
#pragma unroll
          for (int m = 0; m < WARP_TILES; m++) {
            multiply_add(scores[m][n], queries[m], {matrices[0], matrices[1]}, product_t{});
            multiply_add(scores[m][n + 1], queries[m], {matrices[2], matrices[3]}, product_t{});
          }
        }
      }
    }
  }

  // ---- softmax ------------------------------------------------------------------------------------------------------

  static __device__ __forceinline__ int key_of(int number) { return number / 2 * 8 + column() * 2 + number % 2; }

  // From scores to logits.
  __device__ __forceinline__ void apply_options(int32_t first_key, const ScoreOptions& options,
                                                float (&scores)[WARP_TILES][COLUMNS][4]) const {
#pragma unroll
    for (int h = 0; h < HALVES; h++) {
      const RowInfo row = info_smem_[row_of(h)];
      ScoreOptions of_row = options;
      of_row.query_position = row.position;
      const float power = power_of(h);
#pragma unroll
      for (int i = 0; i < 2 * COLUMNS; i++) {
        float& score = scores[h / 2][i / 2][h % 2 * 2 + i % 2];
        score = of_row.logit(score * power, row.slope, first_key + key_of(i));
      }
    }
  }

  static __device__ __forceinline__ void multiply(float factor, float (&scores)[WARP_TILES][COLUMNS][4]) {
#pragma unroll
    for (int i = 0; i < WARP_TILES * COLUMNS * 4; i++) scores[i / 4 / COLUMNS][i / 4 % COLUMNS][i % 4] *= factor;
  }

  __device__ __forceinline__ float power_of(int half) const {
    return IS_CONVERTED ? __shfl_sync(WARP, power_, row_of(half)) : 1.0f;
  }

  // From scores to weights, as pairs of an operand. At an edge some keys are not seen by some rows.
  template <bool IS_EDGE>
  __device__ __forceinline__ void update(int32_t first_key, const ScoreOptions& options,
                                         float (&scores)[WARP_TILES][COLUMNS][4],
                                         uint32_t (&weights)[WARP_TILES][COLUMNS][2]) {
    float rescale[HALVES];
    bool is_same = true;
#pragma unroll
    for (int h = 0; h < HALVES; h++) {
      // Never 0, by which minus infinity would be no number; what is below that is 0 in effect.
      const float factor = HAS_OPTIONS ? 1.0f : fmaxf(fabsf(options.scale_log2) * power_of(h), SMALLEST_FACTOR);
      if constexpr (IS_EDGE) {
        const KeyRange seen = info_smem_[row_of(h)].seen;
        const uint32_t first = first_key + column() * 2 - seen.first, count = max(0, seen.end - seen.first);
#pragma unroll
        for (int i = 0; i < 2 * COLUMNS; i++)
          if (first + (i / 2 * 8 + i % 2) >= count) scores[h / 2][i / 2][h % 2 * 2 + i % 2] = -CUDART_INF_F;
      }
      float largest = -CUDART_INF_F;
#pragma unroll
      for (int i = 0; i < 2 * COLUMNS; i++) largest = fmaxf(largest, scores[h / 2][i / 2][h % 2 * 2 + i % 2]);
      largest = over_columns(largest, [](float x, float y) { return fmaxf(x, y); });
      largest *= factor;  // rounding keeps order
      if (!(largest > max_logit_[h] + MOST_GROWTH)) largest = max_logit_[h];
      is_same &= largest == max_logit_[h];
      rescale[h] = weight(max_logit_[h], largest);
      max_logit_[h] = largest;
      float sum = exp_sum_[h] * rescale[h];
#pragma unroll
      for (int n = 0; n < COLUMNS; n++) {
        float pair[2];
#pragma unroll
        for (int i = 0; i < 2; i++) {
          pair[i] = weight(scores[h / 2][n][h % 2 * 2 + i], factor, largest);
          sum += pair[i];
        }
        weights[h / 2][n][h % 2] = pair_of_floats(pair[0], pair[1], product_t{});
      }
      exp_sum_[h] = sum;
    }
    if (__all_sync(WARP, is_same)) return;  // which is the rule after a tile or two
#pragma unroll
    for (int h = 0; h < HALVES; h++)
#pragma unroll
      for (int n = 0; n < FEATURES; n++)
        acc_[h / 2][n][h % 2 * 2] *= rescale[h], acc_[h / 2][n][h % 2 * 2 + 1] *= rescale[h];
  }

  // The sum or maximum over the lanes that hold the other columns of a row.
  template <class Combine>
  static __device__ __forceinline__ float over_columns(float value, const Combine& combine) {
#pragma unroll
    for (int distance = 1; distance < 4; distance *= 2) value = combine(value, __shfl_xor_sync(WARP, value, distance));
    return value;
  }

  // ---- O += P V  [WARP_ROWS, HEAD_SIZE] -----------------------------------------------------------------------------

  // Of two tiles of 8 columns of O a lane holds four features: two that adjoin of each, or with fp8, whose codes come
  // in pairs, four that adjoin, the even ones in the first tile.
  __device__ __forceinline__ void multiply_values(int32_t tile, const uint32_t (&weights)[WARP_TILES][COLUMNS][2]) {
    constexpr int FRAGMENTS = IS_FP8 ? 2 : 1;  // of 16 keys
    const int row = IS_FP8 ? lane() : lane() % 16, pack = IS_FP8 ? 0 : lane() / 16;
    const SwizzledReader<PACKS> values_smem(side_smem(tile, true), row, pack);
#pragma unroll
    for (int first = 0; first < COLUMNS; first += 2 * FRAGMENTS) {  // of 8 keys
      uint32_t operands[WARP_TILES][FRAGMENTS][4];
#pragma unroll
      for (int m = 0; m < WARP_TILES; m++)
#pragma unroll
        for (int i = 0; i < 4 * FRAGMENTS; i++) operands[m][i / 4][i % 4] = weights[m][first + i / 2][i % 2];
#pragma unroll
      for (int n = 0; n < FEATURES; n += 2) {
        uint32_t matrices[4];
        if constexpr (IS_FP8) {  // 32 keys of one pack, two features to a word
          load_matrices_transposed(matrices, values_smem.at(first * 8, n / 2));
          uint32_t even[4], odd[4];
#pragma unroll
          for (int i = 0; i < 4; i++) {
            const WordHalves codes = halves(__byte_perm(matrices[i], 0, 0x3120));
            even[i] = float16_pair<FP8_FORMAT<cache_t>>(codes.low);
            odd[i] = float16_pair<FP8_FORMAT<cache_t>>(codes.high);
          }
#pragma unroll
          for (int m = 0; m < WARP_TILES; m++)
#pragma unroll
            for (int i = 0; i < 2; i++) {
              multiply_add(acc_[m][n], operands[m][i], {even[2 * i], even[2 * i + 1]}, product_t{});
              multiply_add(acc_[m][n + 1], operands[m][i], {odd[2 * i], odd[2 * i + 1]}, product_t{});
            }
        } else {  // 16 keys of two packs
          load_matrices_transposed(matrices, values_smem.at(first * 8, n));
#pragma unroll
          for (int m = 0; m < WARP_TILES; m++) {
            multiply_add(acc_[m][n], operands[m][0], {matrices[0], matrices[1]}, product_t{});
            multiply_add(acc_[m][n + 1], operands[m][0], {matrices[2], matrices[3]}, product_t{});
          }
        }
      }
    }
  }

  product_t* query_smem_;  // of the warp: [WARP_ROWS, STEPS * 16]
  cache_t* ring_smem_;
  RowCopy<cache_t, HEAD_SIZE, PACKS, WARP_KEYS, IS_ALIGNED> rows_;
  RowInfo* info_smem_;                          // [WARP_ROWS]
  typename FlashSequence<cache_t>::Slot next_;  // of the row that a lane knows of the tile to be copied
  KeyRange keys_;
  KeyRange by_any_, by_all_;  // what is seen by any of the warp's rows, by all of them
  float power_ = 1.0f;        // of the row that a lane knows
  // Of the rows of which it holds parts.
  float max_logit_[HALVES], exp_sum_[HALVES];
  float acc_[WARP_TILES][FEATURES][4];
};

}  // namespace pagedkv
