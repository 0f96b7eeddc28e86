// Which queries a CTA takes. The rows of a sequence and kv head are its query tokens, of each the query heads that
// share the kv head, side by side; a tile is ROWS of them. Which tile is whose follows from lengths on the device, so
// that a captured launch can be replayed on others.
#pragma once
#include "paging.cuh"
#include "params.cuh"
#include "ptx.cuh"
#include "scores.cuh"

namespace pagedkv {

// Of one sequence.
struct QuerySpan {
  int32_t first_token, query_len, seq_len;  // the first among all queries

  // Where a query stands: the queries are the last tokens of the sequence.
  __device__ __forceinline__ int32_t position(int32_t token) const { return seq_len - query_len + token; }

  // What a query sees.
  __device__ __forceinline__ KeyRange keys(int32_t token, const VarlenParams& params) const {
    const int32_t at = position(token), left = params.window_left, right = params.window_right;
    return {left < 0 || left >= at ? 0 : at - left,
            right < 0 || right >= seq_len - at ? seq_len : max(0, at + right + 1)};
  }
};

// A row of a tile: one query token with one query head.
struct QueryRow {
  bool is_there;
  KeyRange seen;
  int32_t position;  // where the query stands
  float slope;       // of its head
  int64_t offset;    // of its numbers from those of the sequence's first query and the first head
};

struct QueryTile {
  QuerySpan span;
  int32_t sequence, kv_head, split;
  int32_t first_row, num_rows;  // of those of the sequence and kv head

  __device__ __forceinline__ int32_t token(int32_t row, const VarlenParams& params) const {
    return params.queries_per_kv.divide(first_row + row);
  }
  // Of all query heads.
  __device__ __forceinline__ int32_t head(int32_t row, const VarlenParams& params) const {
    return (kv_head - token(row, params)) * static_cast<int32_t>(params.queries_per_kv.divisor) + first_row + row;
  }

  __device__ __forceinline__ QueryRow row(int32_t row, const ScoreOptions& options, const VarlenParams& params) const {
    if (row >= num_rows) return {false, {0, 0}, span.position(0), 0.0f, 0};
    const int32_t of_token = token(row, params), of_head = head(row, params);
    return {true, span.keys(of_token, params), span.position(of_token), options.slope(of_head),
            of_token * params.query_token_stride + of_head * params.query_head_stride};
  }

  // What its queries see together, in the tile's split: whole tiles of TILE_TOKENS keys go to a split.
  template <int TILE_TOKENS>
  __device__ __forceinline__ KeyRange keys(const VarlenParams& params) const {
    const KeyRange first = span.keys(token(0, params), params), last = span.keys(token(num_rows - 1, params), params);
    const int32_t first_tile = span.keys(0, params).first / TILE_TOKENS;
    const int32_t tiles = (span.keys(span.query_len - 1, params).end + TILE_TOKENS - 1) / TILE_TOKENS - first_tile;
    const int32_t num_splits = params.num_splits.divisor;
    const int32_t share = max(1, (tiles + num_splits - 1) / num_splits);
    const int64_t split_first = (first_tile + int64_t{split} * share) * TILE_TOKENS;
    const int64_t split_end = split_first + int64_t{share} * TILE_TOKENS;
    return {static_cast<int32_t>(max(int64_t{first.first}, split_first)),
            static_cast<int32_t>(min(int64_t{last.end}, split_end))};
  }
};

// Tiles in the order of CTAs: sequence by sequence, in it from the last rows, which see the most keys, to the first; of
// each one CTA for each kv head and split. Those of one sequence find its keys in L2: longest first among all sequences
// took 2 to 7 % longer on an H200. A launch may have CTAs too many.
template <int ROWS>
class TileScheduler {
 public:
  __device__ __forceinline__ TileScheduler(const int32_t* query_starts, const int32_t* seq_lens,
                                           const VarlenParams& params)
      : query_starts_(query_starts), seq_lens_(seq_lens), params_(params) {}

  // The tile of this CTA; false if there is none. All threads of a warp ask together.
  __device__ __forceinline__ bool find(QueryTile& tile) const {
    const int64_t item = blockIdx.x, of_head = params_.num_splits.divide(item);
    int32_t index = params_.num_kv_heads.divide(of_head);
    tile.split = item - of_head * params_.num_splits.divisor;
    tile.kv_head = of_head - int64_t{index} * params_.num_kv_heads.divisor;

    const int32_t lane = threadIdx.x % 32, slice = (params_.num_seqs + 31) / 32;
    int32_t tiles = 0;  // of the sequences of this lane's slice
    QuerySpan span{};   // of the last of them
#pragma unroll 1
    for (int32_t i = lane * slice; i < min((lane + 1) * slice, params_.num_seqs); i++) {
      span = span_of(i);
      tiles += num_tiles(span);
    }
    int32_t up_to = tiles;
#pragma unroll
    for (int32_t distance = 1; distance < 32; distance *= 2) {
      const int32_t before = __shfl_up_sync(WARP, up_to, distance);
      if (lane >= distance) up_to += before;
    }
    const uint32_t reached = __ballot_sync(WARP, up_to > index);
    if (reached == 0) return false;
    const int32_t owner = __ffs(reached) - 1;
    index -= __shfl_sync(WARP, up_to - tiles, owner);
    tile.sequence = owner * slice;
    tile.span = {__shfl_sync(WARP, span.first_token, owner), __shfl_sync(WARP, span.query_len, owner),
                 __shfl_sync(WARP, span.seq_len, owner)};
    if (slice > 1)
      for (tile.span = span_of(tile.sequence); index >= num_tiles(tile.span); tile.span = span_of(++tile.sequence))
        index -= num_tiles(tile.span);

    tile.first_row = (num_tiles(tile.span) - 1 - index) * ROWS;
    tile.num_rows =
        min(ROWS, tile.span.query_len * static_cast<int32_t>(params_.queries_per_kv.divisor) - tile.first_row);
    return true;
  }

 private:
  __device__ __forceinline__ QuerySpan span_of(int32_t sequence) const {
    const int32_t* start = query_starts_ + sequence * params_.query_start_stride;
    const int32_t query_len = start[params_.query_start_stride] - start[0];
    return {start[0], query_len < params_.least_queries ? 0 : query_len, seq_lens_[sequence * params_.seq_len_stride]};
  }
  __device__ __forceinline__ int32_t num_tiles(const QuerySpan& span) const {
    return (span.query_len * static_cast<int32_t>(params_.queries_per_kv.divisor) + ROWS - 1) / ROWS;
  }

  const int32_t* query_starts_;
  const int32_t* seq_lens_;
  const VarlenParams& params_;
};

}  // namespace pagedkv
