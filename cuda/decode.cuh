// What a CTA of a decode kernel does: attention of one query token per sequence.
//
// A warp takes up to HEADS query heads that share a kv head, so that K and V are read once for all of them. The warps
// of a team scan the tiles of a segment in turn, each with softmax states of its own, which the team then merges. Of
// several segments of a sequence each leaves its states in a workspace, and the team that arrives last merges them in
// their order. How segments are cut is in partition.cuh, what a warp does with a tile in tensor_core_scan.cuh and, for
// float32, in cuda_core_scan.cuh.
#pragma once
#include "convert.cuh"
#include "dequantize.cuh"
#include "params.cuh"
#include "partition.cuh"
#include "scores.cuh"
#include "states.cuh"

namespace pagedkv {

// Where the results of a unit's heads go.
template <class scalar_t, bool IS_ALIGNED>
struct Results {
  scalar_t* out;      // of the unit's query and first head
  float* lse;         // likewise, or null
  const void* sinks;  // [num_heads], or null
  float v_scale;
  int32_t first_head;
  const DecodeParams& params;

  __device__ __forceinline__ Results(scalar_t* out, float* lse, const void* sinks, const Scale& v_scale,
                                     const Segment& segment, int64_t row, const DecodeParams& params)
      : out(out + row * params.out_token_stride + segment.first_head * params.out_head_stride),
        lse(lse == nullptr ? nullptr
                           : lse + row * params.lse_token_stride + segment.first_head * params.lse_head_stride),
        sinks(sinks),
        v_scale(v_scale.of_head(segment.kv_head)),
        first_head(segment.first_head),
        params(params) {}

  template <int HEAD_SIZE>
  __device__ __forceinline__ void write(int head, SoftmaxState state, const WarpRow<HEAD_SIZE>& row) const {
    float factor = v_scale;
    if (sinks != nullptr) factor *= state.merge({sink(head) * LOG2_E, 1.0f}).x;
    factor *= state.normalizer();
    row.template write<IS_ALIGNED>(out + head * params.out_head_stride, factor);
    if (lse != nullptr && threadIdx.x % 32 == 0) lse[head * params.lse_head_stride] = state.lse();
  }

  __device__ __forceinline__ float sink(int head) const {
    const int64_t offset = (first_head + head) * params.sink_stride;
    return params.sinks_are_float32 ? static_cast<const float*>(sinks)[offset]
                                    : to_float(static_cast<const scalar_t*>(sinks)[offset]);
  }
};

// Whether this team is the last of `count` to arrive; what the others have written is then there to be read.
__device__ __forceinline__ bool is_last_to_arrive(int32_t* counter, int32_t count, const Team& team) {
  __shared__ bool is_last_smem[32];
  team.sync();
  if (team.warp == 0 && threadIdx.x % 32 == 0) {
    const bool is_last = arrive(counter) == count - 1;
    if (is_last) *counter = 0;  // as the next launch wants it
    is_last_smem[team.index] = is_last;
  }
  team.sync();
  return is_last_smem[team.index];
}

// The arrays of a decode kernel that all layouts have.
template <class scalar_t>
struct DecodeArrays {
  const scalar_t* query;      // [num_tokens, num_heads, head_size]
  const float* alibi_slopes;  // [num_heads], or null
  const void* sinks;          // [num_heads], or null
  const float* k_scale;       // [1] or [num_kv_heads], or null
  const float* v_scale;       // [1] or [num_kv_heads], or null
  scalar_t* out;              // [num_tokens, num_heads, head_size]
  float* lse;                 // [num_heads, num_tokens], or null
  void* workspace;            // `num_states` states, or null if no unit is cut
  int32_t* counters;          // [num_units] zeros, or null likewise
};

// `Queries` says which query a sequence has, of how many tokens, and whether there is one: seq_len, row, is_there.
// `sequence_of(segment)` is what the scan reads.
template <class Scan, int HEADS, int WARPS, bool IS_ALIGNED, class scalar_t, class Queries, class SequenceOf>
__device__ __forceinline__ void decode(const DecodeArrays<scalar_t>& arrays, const Queries& queries,
                                       const SequenceOf& sequence_of, const DecodeParams& params) {
  constexpr int HEAD_SIZE = Scan::HEAD_SIZE;
  static_assert(HEAD_SIZE % 8 == 0, "rows are packs");
  static_assert(Scan::SMEM_BYTES % 128 == 0, "the rings of all warps begin with a line");
  using WarpStates = States<Scan::ACC_ROW>;
  using SegmentStates = States<HEAD_SIZE>;
  // What is not quantised has no scale, whatever the caller gave.
  constexpr bool HAS_SCALES = !IS_SAME<scalar_t, typename Scan::cache_t>;
  const Scale scale_of_k{HAS_SCALES ? arrays.k_scale : nullptr, params.k_scale, params.k_scale_stride};
  const Scale scale_of_v{HAS_SCALES ? arrays.v_scale : nullptr, params.v_scale, params.v_scale_stride};
  extern __shared__ __align__(128) uint4 smem[];  // the warps' scans
  __shared__ float sums_smem[WARPS][2 * HEADS];   // of the states that they leave
  __shared__ float* acc_smem[WARPS];
  const Team team(params.team_warps);
  const int warp = threadIdx.x / 32, first_warp = warp - team.warp;
  Scan scan(reinterpret_cast<char*>(smem) + warp * Scan::SMEM_BYTES);
  float* partial_acc = static_cast<float*>(arrays.workspace);
  const SegmentStates partials(partial_acc, partial_acc + params.num_states * HEAD_SIZE, params.num_states);

  const auto start = [&](const Segment& segment) {
    const int64_t row = queries.row(segment.sequence);
    scan.start(sequence_of(segment), segment.seen.first / Scan::TILE_TOKENS + team.warp, team.warps,
               arrays.query + row * params.query_token_stride + segment.first_head * params.query_head_stride,
               params.query_head_stride, segment.num_heads);
  };

  Schedule<Scan::TILE_TOKENS, HEADS, Queries> schedule(queries, params, team.index);
  Segment segment, following;
  for (bool has_segment = false;; has_segment = true) {
    const bool has_following = schedule.next(following);
    if (has_following) start(following);
    if (has_segment) {
      team.sync();  // all of its warps have left their states
      const Results<scalar_t, IS_ALIGNED> results(arrays.out, arrays.lse, arrays.sinks, scale_of_v, segment,
                                                  queries.row(segment.sequence), params);
      // First the states of the warps and then, if there are several and this team is the last, those of the segments:
      // by the same code, since code that runs for the first time comes slowly.
#pragma unroll 1
      for (bool of_warps = true;; of_warps = false) {
        const bool is_result = !of_warps || segment.num_partials == 1;
        const auto locate = [&](int i, int head) {
          return of_warps ? WarpStates(acc_smem[first_warp + i], sums_smem[first_warp + i], HEADS).at(head)
                          : partials.at(segment.state(i, head));
        };
#pragma unroll 1
        for (int head = team.warp; head < segment.num_heads; head += team.warps) {
          WarpRow<HEAD_SIZE> row;
          const SoftmaxState state =
              merge_by_warp(of_warps ? team.warps : segment.num_partials, [&](int i) { return locate(i, head); }, row);
          if (!is_result)
            row.store(partials.at(segment.state(segment.partial, head)), state);
          else if (queries.is_there(segment.sequence))
            results.write(head, state, row);
        }
        if (is_result || !is_last_to_arrive(arrays.counters + segment.unit, segment.num_partials, team)) break;
      }
      team.sync();  // the states have been read
    }
    if (!has_following) break;
    segment = following;
    schedule.find_partials(segment);

    const float scale = params.scale * scale_of_k.of_head(segment.kv_head);
    const float* slopes =
        arrays.alibi_slopes == nullptr ? nullptr : arrays.alibi_slopes + segment.first_head * params.slope_stride;
    scan.run({scale, scale * LOG2_E, params.softcap, approximate_reciprocal(params.softcap), slopes,
              params.slope_stride, segment.query_position});
    if (threadIdx.x % 32 == 0) acc_smem[warp] = scan.acc_smem();
    scan.leave(WarpStates(scan.acc_smem(), sums_smem[warp], HEADS));
  }
}

}  // namespace pagedkv
