// The middle of a varlen CTA: scans the keys that a tile of queries sees, on tensor cores that every card from sm_80 on
// has. A tile of keys and values is copied while the one before is multiplied.
//
// S = Q K^T with queries as rows, 16 to a warp, then O += P V, whose first operand is the registers that S came out in.
// K^T and V are what ldmatrix makes of rows of features, plain and transposed.
//
// Another mainloop takes this one's place if it has ROWS, TILE_TOKENS, SMEM_BYTES, ACC_ROW, and `run` and `leave` of
// the same meaning: who finds the tile before and who writes results after knows no more of it.
#pragma once
#include "copy.cuh"
#include "dequantize.cuh"
#include "paging.cuh"
#include "query_tiles.cuh"
#include "scores.cuh"
#include "softmax.cuh"

namespace pagedkv {

template <class scalar_t, class cache_t, int HEAD_SIZE, int KEYS, int WARPS, bool IS_ALIGNED>
class MmaMainloop {
  using product_t = typename Operand<scalar_t, cache_t>::type;
  static constexpr bool IS_CONVERTED = !IS_SAME<scalar_t, product_t>;
  static constexpr bool IS_FP8 = sizeof(cache_t) == 1;

  static constexpr int X = 16 / sizeof(cache_t);       // numbers of a pack
  static constexpr int STEPS = (HEAD_SIZE + 15) / 16;  // along the features, 16 at a time; past HEAD_SIZE they are 0
  static constexpr int PACKS = STEPS * 16 / X;         // of a row in shared memory
  static constexpr int SIDE_PACKS = KEYS * PACKS;      // of the keys of a tile, or of its values
  static constexpr int STAGES = 2;
  static constexpr int COLUMNS = KEYS / 8;    // tiles of S
  static constexpr int FEATURES = 2 * STEPS;  // tiles of O

 public:
  static constexpr int ROWS = 16 * WARPS, TILE_TOKENS = KEYS;
  // Numbers between the accumulators of two rows that are left: so many that rows written at once differ in banks.
  static constexpr int ACC_ROW = HEAD_SIZE + ((IS_FP8 ? 16 : 8) - HEAD_SIZE % 32 + 32) % 32;
  static constexpr int RING_BYTES = STAGES * 2 * SIDE_PACKS * 16, ACC_BYTES = ROWS * ACC_ROW * 4;
  static constexpr int OFFSET_BYTES = 2 * KEYS * static_cast<int>(sizeof(typename FlashSequence<cache_t>::Row));
  static constexpr int SMEM_BYTES = (RING_BYTES > ACC_BYTES ? RING_BYTES : ACC_BYTES) + OFFSET_BYTES;

  __device__ __forceinline__ explicit MmaMainloop(char* smem)
      : ring_smem_(reinterpret_cast<cache_t*>(smem)),
        rows_smem_(reinterpret_cast<Row*>(smem + SMEM_BYTES - OFFSET_BYTES)) {}

  // All threads of the CTA together. `query` and the options' slopes are those of the first query of the sequence and
  // the first head of all.
  __device__ __forceinline__ void run(const QueryTile& tile, const FlashSequence<cache_t>& sequence,
                                      const scalar_t* query, const ScoreOptions& options, const VarlenParams& params) {
    keys_ = tile.template keys<KEYS>(params);
    const int32_t first_tile = keys_.first / KEYS, end_tile = (keys_.end + KEYS - 1) / KEYS;
    find_rows(sequence, first_tile);
    start_rows(tile, query, options, params);
    __syncthreads();
    copy_tile(sequence, first_tile);
    find_rows(sequence, first_tile + 1);
    for (int32_t i = first_tile; i < end_tile; i++) {
      wait_for_copies<0>();
      __syncthreads();  // the tile and the offsets of the next are there, and all warps have done with the one before
      copy_tile(sequence, i + 1);
      find_rows(sequence, i + 2);
      float scores[COLUMNS][4] = {};
      multiply_keys(i, scores);
      update(i * KEYS, options, scores);
      multiply_values(i, scores);
    }
    wait_for_copies<0>();
    __syncthreads();
  }

  // Leaves the states of the rows, where the ring was: accumulators, and of each row the rest.
  template <class States>
  __device__ __forceinline__ void leave(const States& states_smem) const {
#pragma unroll
    for (int h = 0; h < 2; h++) {
      const int row = first_row() + 8 * h;
#pragma unroll
      for (int n = 0; n < FEATURES; n += 2) {
        const float *first = &acc_[n][2 * h], *second = &acc_[n + 1][2 * h];
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
  }

 private:
  using Row = typename FlashSequence<cache_t>::Row;

  static __device__ __forceinline__ int lane() { return threadIdx.x % 32; }
  static __device__ __forceinline__ int column() { return lane() % 4; }
  // A lane holds parts of this row of the tile and of the one 8 further on.
  static __device__ __forceinline__ int first_row() { return threadIdx.x / 32 * 16 + lane() / 4; }

  // ---- queries ------------------------------------------------------------------------------------------------------

  // Which features a lane holds of a step, in two pairs: as ldmatrix spreads the keys' rows.
  static __device__ __forceinline__ int feature(int step, int pair) {
    return step * 16 + (IS_FP8 ? column() * 4 + pair * 2 : pair * 8 + column() * 2);
  }

  __device__ __forceinline__ void start_rows(const QueryTile& tile, const scalar_t* query, const ScoreOptions& options,
                                             const VarlenParams& params) {
#pragma unroll
    for (int h = 0; h < 2; h++) {
      const QueryRow row = tile.row(first_row() + 8 * h, options, params);
      seen_[h] = row.seen, position_[h] = row.position, slope_[h] = row.slope;
      max_logit_[h] = -CUDART_INF_F, exp_sum_[h] = 0.0f;
      Pack<scalar_t, 2> pairs[STEPS][2];
#pragma unroll
      for (int i = 0; i < STEPS; i++)
#pragma unroll
        for (int pair = 0; pair < 2; pair++) {
          pairs[i][pair] = {};
          if (row.is_there && feature(i, pair) < HEAD_SIZE)
            pairs[i][pair] = load_elements<2, IS_ALIGNED>(query + row.offset + feature(i, pair));
        }
      set_queries(h, pairs);
    }
#pragma unroll
    for (int n = 0; n < FEATURES; n++)
#pragma unroll
      for (int i = 0; i < 4; i++) acc_[n][i] = 0.0f;
  }

  __device__ __forceinline__ void set_queries(int h, const Pack<scalar_t, 2> (&pairs)[STEPS][2]) {
    float largest = 1.0f;
    if constexpr (IS_CONVERTED) {
      largest = 0.0f;
#pragma unroll
      for (int i = 0; i < 4 * STEPS; i++) largest = fmaxf(largest, fabsf(to_float(pairs[i / 4][i / 2 % 2].get(i % 2))));
      largest = over_columns(largest, [](float x, float y) { return fmaxf(x, y); });
    }
    const PowerOfTwo power(PowerOfTwo::exponent_of(largest));
    power_[h] = power.value;
#pragma unroll
    for (int i = 0; i < 2 * STEPS; i++) {
      const Pack<scalar_t, 2>& pair = pairs[i / 2][i % 2];
      query_[i / 2][2 * (i % 2) + h] = IS_CONVERTED ? pair_of_floats(to_float(pair.get(0)) * power.inverse,
                                                                     to_float(pair.get(1)) * power.inverse, product_t{})
                                                    : pair.word;
    }
  }

  // ---- copies -------------------------------------------------------------------------------------------------------

  // Where the rows of a tile's keys and values lie; 0, which is always there, for those that nobody sees.
  __device__ __forceinline__ void find_rows(const FlashSequence<cache_t>& sequence, int32_t tile) {
    for (int i = threadIdx.x; i < KEYS; i += blockDim.x) {
      const int32_t token = tile * KEYS + i;
      rows_smem_[tile % 2 * KEYS + i] = keys_.has(token) ? sequence.row(token) : Row{0, 0};
    }
  }

  // Of the keys of a tile, or its values: the pack of a row. Eight rows that ldmatrix reads at once differ in banks.
  static __device__ __forceinline__ int place(int row, int pack) {
    constexpr int CYCLE = PACKS % 8 == 0 ? 8 : PACKS % 4 == 0 ? 4 : PACKS % 2 == 0 ? 2 : 1;
    return row * PACKS + (pack ^ row / (8 / CYCLE) % CYCLE);
  }
  __device__ __forceinline__ cache_t* side_smem(int32_t tile, bool is_value) const {
    return ring_smem_ + (tile % STAGES * 2 + is_value) * (SIDE_PACKS * X);
  }

  __device__ __forceinline__ void copy_tile(const FlashSequence<cache_t>& sequence, int32_t tile) {
    if (tile * KEYS < keys_.end) {
      for (int i = threadIdx.x; i < SIDE_PACKS; i += blockDim.x) {
        const int row = i / PACKS, pack = i % PACKS;
        const bool is_seen = keys_.has(tile * KEYS + row);
        const Row offsets = rows_smem_[tile % 2 * KEYS + row];
        copy_pack(side_smem(tile, false) + place(row, pack) * X, sequence.key + offsets.key + pack * X, pack, is_seen);
        copy_pack(side_smem(tile, true) + place(row, pack) * X, sequence.value + offsets.value + pack * X, pack,
                  is_seen);
      }
    }
    commit_copies();
  }

  // A pack of a row's features; zeros past its end.
  static __device__ __forceinline__ void copy_pack(cache_t* target_smem, const cache_t* source, int pack,
                                                   bool is_seen) {
    if constexpr (IS_ALIGNED) {
      const bool is_there = is_seen && pack * X < HEAD_SIZE;
      copy_async(target_smem, is_there ? source : source - pack * X, is_there);
    } else {
#pragma unroll
      for (int i = 0; i < X; i++) target_smem[i] = is_seen && pack * X + i < HEAD_SIZE ? source[i] : cache_t{};
    }
  }

  // ---- S = Q K^T  [16, KEYS] ----------------------------------------------------------------------------------------

  __device__ __forceinline__ void multiply_keys(int32_t tile, float (&scores)[COLUMNS][4]) const {
    const cache_t* keys_smem = side_smem(tile, false);
#pragma unroll
    for (int step = 0; step < STEPS; step++)
#pragma unroll
      for (int n = 0; n < COLUMNS; n += IS_FP8 ? 4 : 2) {
        uint32_t matrices[4];
        if constexpr (IS_FP8) {  // 32 keys of one pack
          load_matrices(matrices, keys_smem + place(n * 8 + lane(), step) * X);
#pragma unroll
          for (int i = 0; i < 4; i++) {
            const WordHalves codes = halves(matrices[i]);
            multiply_add(scores[n + i], query_[step],
                         {float16_pair<FP8_FORMAT<cache_t>>(codes.low), float16_pair<FP8_FORMAT<cache_t>>(codes.high)},
                         product_t{});
          }
        } else {  // 16 keys of two packs
          load_matrices(matrices,
                        keys_smem + place(n * 8 + lane() / 16 * 8 + lane() % 8, step * 2 + lane() / 8 % 2) * X);
          multiply_add(scores[n], query_[step], {matrices[0], matrices[1]}, product_t{});
          multiply_add(scores[n + 1], query_[step], {matrices[2], matrices[3]}, product_t{});
        }
      }
  }

  // ---- softmax ------------------------------------------------------------------------------------------------------

  // From scores to weights.
  __device__ __forceinline__ void update(int32_t first_key, const ScoreOptions& options, float (&scores)[COLUMNS][4]) {
#pragma unroll
    for (int h = 0; h < 2; h++) {
      const bool is_edge = first_key < seen_[h].first || first_key + KEYS > seen_[h].end;
      ScoreOptions of_row = options;
      of_row.query_position = position_[h];
      const float factor = options.are_plain() ? options.scale_log2 * power_[h] : 1.0f;
      float largest = max_logit_[h];
#pragma unroll
      for (int i = 0; i < 2 * COLUMNS; i++) {
        float& score = scores[i / 2][2 * h + i % 2];
        const int32_t key = first_key + i / 2 * 8 + column() * 2 + i % 2;
        if (!options.are_plain()) score = of_row.logit(score * power_[h], slope_[h], key);
        if (is_edge && !seen_[h].has(key)) score = CUDART_NAN_F;  // which no maximum takes
        largest = fmaxf(largest, score * factor);
      }
      largest = over_columns(largest, [](float x, float y) { return fmaxf(x, y); });
      const float rescale = weight(max_logit_[h], largest);
      max_logit_[h] = largest, exp_sum_[h] *= rescale;
#pragma unroll
      for (int i = 0; i < 2 * COLUMNS; i++) {
        float& score = scores[i / 2][2 * h + i % 2];
        const int32_t key = first_key + i / 2 * 8 + column() * 2 + i % 2;
        score = is_edge && !seen_[h].has(key) ? 0.0f : weight(score, factor, largest);
        exp_sum_[h] += score;
      }
#pragma unroll
      for (int n = 0; n < FEATURES; n++) acc_[n][2 * h] *= rescale, acc_[n][2 * h + 1] *= rescale;
    }
  }

  // The sum or maximum over the lanes that hold the other columns of a row.
  template <class Combine>
  static __device__ __forceinline__ float over_columns(float value, const Combine& combine) {
#pragma unroll
    for (int distance = 1; distance < 4; distance *= 2) value = combine(value, __shfl_xor_sync(WARP, value, distance));
    return value;
  }

  // ---- O += P V  [16, HEAD_SIZE] ------------------------------------------------------------------------------------

  // Of two tiles of 8 columns of O a lane holds four features: two that adjoin of each, or with fp8, whose codes come
  // in pairs, four that adjoin, the even ones in the first tile.
  __device__ __forceinline__ void multiply_values(int32_t tile, const float (&weights)[COLUMNS][4]) {
    const cache_t* values_smem = side_smem(tile, true);
#pragma unroll
    for (int first = 0; first < COLUMNS; first += IS_FP8 ? 4 : 2) {  // of 8 keys
      uint32_t operands[IS_FP8 ? 2 : 1][4];
#pragma unroll
      for (int i = 0; i < (IS_FP8 ? 8 : 4); i++)
        operands[i / 4][i % 4] =
            pair_of_floats(weights[first + i / 2][i % 2 * 2], weights[first + i / 2][i % 2 * 2 + 1], product_t{});
#pragma unroll
      for (int n = 0; n < FEATURES; n += 2) {
        uint32_t matrices[4];
        if constexpr (IS_FP8) {  // 32 keys of one pack, two features to a word
          load_matrices_transposed(matrices, values_smem + place(first * 8 + lane(), n / 2) * X);
          uint32_t even[4], odd[4];
#pragma unroll
          for (int i = 0; i < 4; i++) {
            const WordHalves codes = halves(__byte_perm(matrices[i], 0, 0x3120));
            even[i] = float16_pair<FP8_FORMAT<cache_t>>(codes.low);
            odd[i] = float16_pair<FP8_FORMAT<cache_t>>(codes.high);
          }
#pragma unroll
          for (int i = 0; i < 2; i++) {
            multiply_add(acc_[n], operands[i], {even[2 * i], even[2 * i + 1]}, product_t{});
            multiply_add(acc_[n + 1], operands[i], {odd[2 * i], odd[2 * i + 1]}, product_t{});
          }
        } else {  // 16 keys of two packs
          load_matrices_transposed(matrices, values_smem + place(first * 8 + lane() % 16, n + lane() / 16) * X);
          multiply_add(acc_[n], operands[0], {matrices[0], matrices[1]}, product_t{});
          multiply_add(acc_[n + 1], operands[0], {matrices[2], matrices[3]}, product_t{});
        }
      }
    }
  }

  cache_t* ring_smem_;
  Row* rows_smem_;  // [2, KEYS]
  KeyRange keys_;
  // Of a lane's two rows.
  KeyRange seen_[2];
  int32_t position_[2];
  float slope_[2], power_[2], max_logit_[2], exp_sum_[2];
  uint32_t query_[STEPS][4];
  float acc_[FEATURES][4];
};

}  // namespace pagedkv
