// How a decode step is divided over CTAs. A unit is one sequence with query heads of one kv head, as many as a warp
// takes at once; a segment is what one CTA does of a unit, a range of its keys; a unit of several segments leaves as
// many partial states. A CTA takes a bundle of units at once, adjoining heads of one sequence, a team of its warps for
// each: their blocks lie side by side, and what is read together comes faster.
//
// With a partition size, CTA p of a unit's takes the p-th partition of its keys. Otherwise shares of tiles are equal,
// the last of one sequence and the first of the next, as in Osama et al., "Stream-K" (2023). Some bundles of a sequence
// make a group, whose tiles count once: a share is done by as many CTAs, a bundle each, which so read the same blocks
// at the same time.
#pragma once
#include "paging.cuh"
#include "params.cuh"
#include "ptx.cuh"

namespace pagedkv {

// a / b where that is below 2^20: an estimate in float32 is off by one at most.
__device__ __forceinline__ int32_t small_quotient(int32_t a, int32_t b) {
  const int32_t estimate = __float2int_rd(__int2float_rn(a) * approximate_reciprocal(__int2float_rn(b)));
  const int32_t rest = a - estimate * b;
  return estimate + (rest >= b) - (rest < 0);
}

// The warps of a CTA that scan one unit together.
struct Team {
  int32_t index, warps, warp;  // which of the CTA's; how many warps it has, and which of them this is

  // `warps` is a power of two.
  __device__ __forceinline__ explicit Team(int32_t warps)
      : index(threadIdx.x / 32 >> (__ffs(warps) - 1)), warps(warps), warp(threadIdx.x / 32 & (warps - 1)) {}

  // Until all of them are here.
  __device__ __forceinline__ void sync() const { sync_threads(1 + index, warps * 32); }
};

struct Segment {
  int64_t unit;
  int32_t sequence, kv_head, first_head, num_heads;  // of the unit
  KeyRange seen;                                     // keys that this segment reads
  int32_t query_position;                            // seq_len - 1
  int32_t first_position, num_tiles;                 // of its group, among all (find_share)
  int32_t partial, num_partials;                     // this state's place among those of the unit
  // Where those are kept. The first is the second one of its CTA, and all others are the first of theirs.
  int64_t first_state;
  int32_t state_step, second_state_step, head_step;

  __device__ __forceinline__ int64_t state(int32_t partial, int32_t head) const {
    return first_state + partial * state_step - (partial == 0 ? 0 : state_step - second_state_step) + head * head_step;
  }
};

// The keys that the last token of a sequence sees: none before the window.
__device__ __forceinline__ KeyRange seen_by_last(int32_t seq_len, int32_t window_left) {
  return {window_left < 0 ? 0 : max(0, seq_len - 1 - window_left), seq_len};
}

// Tiles that have any of some keys. At least one, so that some CTA writes the result of a sequence without keys.
template <int TILE_TOKENS>
__device__ __forceinline__ int32_t num_tiles(const KeyRange& keys) {
  return max(1, (keys.end + TILE_TOKENS - 1) / TILE_TOKENS - keys.first / TILE_TOKENS);
}

// `Queries` says how many tokens a sequence has, the query's own included.
template <int TILE_TOKENS, int HEADS, class Queries>
class Schedule {
 public:
  // Of the units that one of the CTA's teams takes.
  __device__ __forceinline__ Schedule(const Queries& queries, const DecodeParams& params, int32_t team)
      : queries_(queries), params_(params), team_(team) {
    if (params.partition_size > 0) {
      position_ = blockIdx.x, end_ = position_ + 1;
    } else {
      index_ = small_quotient(blockIdx.x, params_.ctas_per_share);
      bundle_ = blockIdx.x - index_ * params_.ctas_per_share;
      find_share();
    }
  }

  // The next segment of this CTA; false if there is none. All threads of a warp ask together. What it says of partial
  // states is there after find_partials, which can wait until the segment's keys are on their way.
  __device__ __forceinline__ bool next(Segment& segment) {
    return params_.partition_size > 0 ? next_partition(segment) : next_of_share(segment);
  }

  __device__ __forceinline__ void find_partials(Segment& segment) const {
    if (params_.partition_size > 0) return;
    const int32_t first = owner_of(segment.first_position);
    const int32_t last = owner_of(segment.first_position + segment.num_tiles - 1);
    segment.partial = index_ - first, segment.num_partials = last - first + 1;
    // A team leaves at most two states: of a unit that began before the share, and of one that goes on behind it.
    const int32_t step = params_.units_per_bundle * HEADS;
    segment.first_state = (2 * (first * params_.ctas_per_share + bundle_) + 1) * step + team_ * HEADS;
    segment.state_step = 2 * step * params_.ctas_per_share, segment.second_state_step = segment.state_step - step;
    segment.head_step = 1;
  }

 private:
  __device__ __forceinline__ KeyRange keys(int32_t sequence) const {
    return seen_by_last(queries_.seq_len(sequence), params_.window_left);
  }

  __device__ __forceinline__ void set_unit(Segment& segment, int32_t sequence, int32_t unit_head) const {
    const int32_t units = params_.units_per_kv_head;
    segment.unit = int64_t{sequence} * params_.units_per_sequence + unit_head;
    segment.sequence = sequence, segment.kv_head = small_quotient(unit_head, units);
    const int32_t first_of_group = (unit_head - segment.kv_head * units) * HEADS;
    segment.first_head = segment.kv_head * params_.queries_per_kv + first_of_group;
    segment.num_heads = min(HEADS, params_.queries_per_kv - first_of_group);
  }

  __device__ __forceinline__ bool next_partition(Segment& segment) {
    if (position_ >= end_) return false;
    const int32_t unit = position_ / params_.num_partitions, partition = position_ % params_.num_partitions;
    position_ = end_;
    set_unit(segment, unit / params_.units_per_sequence, unit % params_.units_per_sequence);
    const KeyRange visible = keys(segment.sequence);
    // A sequence longer than the caller's bound ends in the last partition: no unit waits for CTAs that are not there.
    const int32_t size = params_.partition_size, most = params_.num_partitions - 1;
    const int32_t first = min(visible.first / size, most), last = min(max(0, visible.end - 1) / size, most);
    if (partition < first || partition > last) return false;
    segment.seen = {max(visible.first, partition * size), partition == last ? visible.end : (partition + 1) * size};
    segment.query_position = visible.end - 1;
    segment.partial = partition - first, segment.num_partials = last - first + 1;
    const int64_t row = int64_t{segment.sequence} * params_.num_heads + segment.first_head;
    segment.first_state = row * params_.num_partitions + first;
    segment.state_step = segment.second_state_step = 1, segment.head_step = params_.num_partitions;
    return true;
  }

  // Positions count tiles: sequence by sequence, in it group by group, in it tile by tile.
  __device__ __forceinline__ void find_share() {
    const int32_t lane = threadIdx.x % 32, slice = (params_.num_seqs + 31) / 32;
    int32_t tiles = 0;  // of the sequences of this lane's slice
#pragma unroll 1
    for (int32_t i = lane * slice; i < min((lane + 1) * slice, params_.num_seqs); i++)
      tiles += num_tiles<TILE_TOKENS>(keys(i));
    int32_t up_to = tiles;
#pragma unroll 1
    for (int32_t distance = 1; distance < min(32, params_.num_seqs); distance *= 2) {
      const int32_t before = __shfl_up_sync(WARP, up_to, distance);
      if (lane >= distance) up_to += before;
    }
    const int32_t total = __shfl_sync(WARP, up_to, min(32, params_.num_seqs) - 1) * params_.groups_per_sequence;
    const int32_t num_shares = min(static_cast<int32_t>(gridDim.x) / params_.ctas_per_share, total);  // none is empty
    share_ = static_cast<uint32_t>(total) / static_cast<uint32_t>(num_shares);
    larger_shares_ = total - share_ * num_shares;
    if (index_ >= num_shares) return;
    position_ = first_of(index_), end_ = first_of(index_ + 1);

    const uint32_t reached = __ballot_sync(WARP, up_to * params_.groups_per_sequence > position_);
    const int32_t owner = __ffs(reached) - 1;
    sequence_ = owner * slice;
    tiles_before_ = __shfl_sync(WARP, up_to - tiles, owner);
    settle();
  }

  // Where a share begins. The first ones have a tile more than the others.
  __device__ __forceinline__ int32_t first_of(int32_t index) const {
    return index * share_ + min(index, larger_shares_);
  }
  __device__ __forceinline__ int32_t owner_of(int32_t position) const {
    const int32_t of_larger = larger_shares_ * (share_ + 1);
    return position < of_larger ? small_quotient(position, share_ + 1)
                                : larger_shares_ + small_quotient(position - of_larger, share_);
  }

  // Moves on to the sequence that the position lies in.
  __device__ __forceinline__ void settle() {
    for (; sequence_ < params_.num_seqs && position_ < end_; sequence_++) {
      visible_ = keys(sequence_);
      num_tiles_ = num_tiles<TILE_TOKENS>(visible_);
      if (position_ < (tiles_before_ + num_tiles_) * params_.groups_per_sequence) return;
      tiles_before_ += num_tiles_;
    }
  }

  __device__ __forceinline__ bool next_of_share(Segment& segment) {
    if (position_ >= end_) return false;
    const KeyRange visible = visible_;
    const int32_t in_sequence = position_ - tiles_before_ * params_.groups_per_sequence;
    const int32_t group = small_quotient(in_sequence, num_tiles_);
    const int32_t tile = in_sequence - group * num_tiles_, first_tile = visible.first / TILE_TOKENS + tile;
    const int32_t count = min(num_tiles_ - tile, end_ - position_);
    set_unit(segment, sequence_, (group * params_.ctas_per_share + bundle_) * params_.units_per_bundle + team_);
    segment.seen = {max(visible.first, first_tile * TILE_TOKENS), min(visible.end, (first_tile + count) * TILE_TOKENS)};
    segment.query_position = visible.end - 1;
    segment.first_position = position_ - tile, segment.num_tiles = num_tiles_;
    position_ += count;
    settle();
    return true;
  }

  const Queries& queries_;
  const DecodeParams& params_;
  const int32_t team_;
  KeyRange visible_{};  // of the sequence that the position lies in
  int32_t position_ = 0, end_ = 0, tiles_before_ = 0, sequence_ = 0, num_tiles_ = 0;
  int32_t share_ = 0, larger_shares_ = 0;
  int32_t index_ = 0, bundle_ = 0;  // which share is this CTA's, and which bundle of its groups
};

}  // namespace pagedkv
