// paged_attention_v1 and v2: attention of one query token per sequence over a packed cache.
//
// A CTA takes up to HEADS query heads that share a kv head, so that K and V are read once for all of them. Its warps scan
// the tiles of a segment in turn, each with softmax states of its own, which the CTA then merges. v1 has one segment per
// sequence. v2 has several, which leave their states in a workspace, and the CTA that arrives last merges them in their
// order. How segments are cut is in partition.cuh, what a warp does with a tile in tensor_core_scan.cuh and, for float32,
// in cuda_core_scan.cuh.
#include "convert.cuh"
#include "cuda_core_scan.cuh"
#include "paging.cuh"
#include "params.cuh"
#include "partition.cuh"
#include "softmax.cuh"
#include "tensor_core_scan.cuh"

namespace pagedkv {

template <class scalar_t, class cache_t, int HEAD_SIZE, int BLOCK_SIZE, int HEADS, int TILES_AHEAD, bool IS_ALIGNED>
struct ScanOf {
  using type = TensorCoreScan<scalar_t, cache_t, HEAD_SIZE, BLOCK_SIZE, HEADS, TILES_AHEAD, IS_ALIGNED>;
};
template <int HEAD_SIZE, int BLOCK_SIZE, int HEADS, int TILES_AHEAD, bool IS_ALIGNED>
struct ScanOf<float, float, HEAD_SIZE, BLOCK_SIZE, HEADS, TILES_AHEAD, IS_ALIGNED> {
  using type = CudaCoreScan<HEAD_SIZE, BLOCK_SIZE, HEADS, IS_ALIGNED>;
};

// Softmax states of HEADS heads, several times: those of the warps of a CTA in shared memory, or those of the segments of
// all units in the workspace.
template <int HEADS, int HEAD_SIZE, int ROW>
struct States {
  float* acc;           // [count, HEADS, ROW]
  SoftmaxState* state;  // [count, HEADS]

  static constexpr int64_t BYTES = HEADS * (ROW * sizeof(float) + sizeof(SoftmaxState));  // of each

  __device__ __forceinline__ States(void* memory, int64_t count)
      : acc(static_cast<float*>(memory)), state(reinterpret_cast<SoftmaxState*>(acc + count * HEADS * ROW)) {}

  __device__ __forceinline__ float* acc_of(int64_t index, int head) const { return acc + (index * HEADS + head) * ROW; }
  __device__ __forceinline__ SoftmaxState* state_of(int64_t index) const { return state + index * HEADS; }

  // One state from `count`, the i-th of them number `index_of(i)`, with four numbers of its accumulator.
  template <class IndexOf>
  __device__ __forceinline__ SoftmaxState merged(int count, const IndexOf& index_of, int head, int feature,
                                                 float4& sum) const {
    SoftmaxState common;
    for (int i = 0; i < count; i++) common.max_logit = fmaxf(common.max_logit, state_of(index_of(i))[head].max_logit);
    sum = {};
#pragma unroll 4
    for (int i = 0; i < count; i++) {
      const SoftmaxState part = state_of(index_of(i))[head];
      const float4 numbers = *reinterpret_cast<const float4*>(acc_of(index_of(i), head) + feature);
      const float factor = weight(part.max_logit, common.max_logit);
      common.exp_sum += part.exp_sum * factor;
      sum.x += numbers.x * factor, sum.y += numbers.y * factor, sum.z += numbers.z * factor, sum.w += numbers.w * factor;
    }
    return common;
  }
};

// Where the results of a unit's heads go.
template <class scalar_t>
struct Results {
  scalar_t* out;  // of the sequence and the first head
  float* lse;     // likewise, or null
  const void* sinks;  // of the first head, or null
  float v_scale;
  const DecodeParams& params;

  __device__ __forceinline__ void write(int head, int feature, SoftmaxState state, const float4& acc) const {
    float factor = v_scale;
    if (sinks != nullptr) factor *= state.merge({sink(head) * LOG2_E, 1.0f}).x;
    factor *= state.normalizer();
    scalar_t* target = out + head * params.out_head_stride + feature * params.out_feature_stride;
    const float numbers[4] = {acc.x, acc.y, acc.z, acc.w};
#pragma unroll
    for (int i = 0; i < 4; i++) target[i * params.out_feature_stride] = from_float<scalar_t>(numbers[i] * factor);
    if (lse != nullptr && feature == 0) lse[head * params.lse_head_stride] = state.lse();
  }

  __device__ __forceinline__ float sink(int head) const {
    const int64_t offset = head * params.sink_stride;
    return params.sinks_are_float32 ? static_cast<const float*>(sinks)[offset]
                                    : to_float(static_cast<const scalar_t*>(sinks)[offset]);
  }
};

// Whether this CTA is the last of `count` to arrive; what the others have written is then there to be read.
__device__ __forceinline__ bool is_last_to_arrive(int32_t* counter, int32_t count) {
  __shared__ bool is_last_smem;
  __threadfence();
  __syncthreads();
  if (threadIdx.x == 0) {
    is_last_smem = atomicAdd(counter, 1) == count - 1;
    if (is_last_smem) *counter = 0;  // as the next launch wants it
  }
  __syncthreads();
  __threadfence();
  return is_last_smem;
}

template <class scalar_t, class cache_t, int HEAD_SIZE, int BLOCK_SIZE, int HEADS, int WARPS, int TILES_AHEAD,
          bool IS_ALIGNED>
__global__ void __launch_bounds__(WARPS * 32)
    paged_attention(const scalar_t* __restrict__ query,        // [num_seqs, num_heads, head_size]
                    const cache_t* __restrict__ key_cache,     // [num_blocks, num_kv_heads, head_size / x, block_size, x]
                    const cache_t* __restrict__ value_cache,   // [num_blocks, num_kv_heads, head_size, block_size]
                    const int32_t* __restrict__ block_tables,  // [num_seqs, max_blocks]
                    const int32_t* __restrict__ seq_lens,      // [num_seqs]
                    const float* __restrict__ alibi_slopes,    // [num_heads], or null
                    const void* __restrict__ sinks,            // [num_heads], or null
                    const float* __restrict__ k_scale,         // [1] or [num_kv_heads], or null
                    const float* __restrict__ v_scale,         // [1] or [num_kv_heads], or null
                    scalar_t* __restrict__ out,                // [num_seqs, num_heads, head_size]
                    float* __restrict__ lse,                   // [num_heads, num_seqs], or null
                    void* workspace,                           // `num_slots` states, or null if no unit is cut
                    int32_t* counters,                         // [num_units] zeros, or null likewise
                    const __grid_constant__ DecodeParams params) {
  using Scan = typename ScanOf<scalar_t, cache_t, HEAD_SIZE, BLOCK_SIZE, HEADS, TILES_AHEAD, IS_ALIGNED>::type;
  // 16 bytes between rows put the columns of O^T that a warp writes at once into different banks.
  using WarpStates = States<HEADS, HEAD_SIZE, HEAD_SIZE + 4>;
  using SegmentStates = States<HEADS, HEAD_SIZE, HEAD_SIZE>;
  static_assert(HEAD_SIZE % 8 == 0, "rows are packs");
  extern __shared__ uint4 smem[];  // the warps' scans, then their states
  const int warp = threadIdx.x / 32;
  const WarpStates warp_states(smem, WARPS);
  const SegmentStates partials(workspace, params.num_slots);

  Schedule<Scan::TILE_TOKENS> schedule(seq_lens, params);
  for (Segment segment; schedule.next(segment);) {
    const int32_t kv_head = segment.unit_head / params.units_per_kv_head;
    const int32_t first_of_group = segment.unit_head % params.units_per_kv_head * HEADS;
    const int32_t first_head = kv_head * params.queries_per_kv + first_of_group;
    const int32_t num_heads = min(HEADS, params.queries_per_kv - first_of_group);
    const PackedSequence<cache_t, BLOCK_SIZE> sequence{key_cache + kv_head * params.key_head_stride,
                                                       value_cache + kv_head * params.value_head_stride,
                                                       block_tables + segment.sequence * params.table_stride,
                                                       params.table_step,
                                                       params.key_block_stride,
                                                       params.value_block_stride,
                                                       segment.first_token,
                                                       segment.end_token};
    const float scale = params.scale * Scale{k_scale, params.k_scale, params.k_scale_stride}.of_head(kv_head);
    const float* slopes = alibi_slopes == nullptr ? nullptr : alibi_slopes + first_head * params.slope_stride;
    const ScoreOptions options{scale, scale * LOG2_E, params.softcap, slopes, params.slope_stride, segment.query_position};

    Scan scan(sequence, reinterpret_cast<char*>(smem) + warp * Scan::SMEM_BYTES);
    scan.run(segment.first_token / Scan::TILE_TOKENS + warp,
             (segment.end_token + Scan::TILE_TOKENS - 1) / Scan::TILE_TOKENS, WARPS,
             query + segment.sequence * params.query_token_stride + first_head * params.query_head_stride,
             params.query_head_stride, num_heads, options);
    __syncthreads();  // every scan has ended
    scan.leave(warp_states.acc_of(warp, 0), HEAD_SIZE + 4, warp_states.state_of(warp));
    __syncthreads();

    const Results<scalar_t> results{
        out + segment.sequence * params.out_token_stride + first_head * params.out_head_stride,
        lse == nullptr ? nullptr : lse + segment.sequence * params.lse_token_stride + first_head * params.lse_head_stride,
        sinks == nullptr ? nullptr
                         : static_cast<const char*>(sinks) + first_head * params.sink_stride *
                                                                 (params.sinks_are_float32 ? sizeof(float) : sizeof(scalar_t)),
        Scale{v_scale, params.v_scale, params.v_scale_stride}.of_head(kv_head), params};
    const auto for_each_pack = [&](const auto& act) {
      for (int i = threadIdx.x * 4; i < num_heads * HEAD_SIZE; i += WARPS * 128) act(i / HEAD_SIZE, i % HEAD_SIZE);
    };
    const bool is_whole = segment.num_partials == 1;
    for_each_pack([&](int head, int feature) {
      float4 acc;
      const SoftmaxState state = warp_states.merged(WARPS, [](int i) { return i; }, head, feature, acc);
      if (is_whole) return results.write(head, feature, state, acc);
      const int32_t slot = segment.slot(segment.partial);
      *reinterpret_cast<float4*>(partials.acc_of(slot, head) + feature) = acc;
      if (feature == 0) partials.state_of(slot)[head] = state;
    });
    if (!is_whole && is_last_to_arrive(counters + segment.unit, segment.num_partials))
      for_each_pack([&](int head, int feature) {
        float4 acc;
        const auto slot = [&](int i) { return segment.slot(i); };
        const SoftmaxState state = partials.merged(segment.num_partials, slot, head, feature, acc);
        results.write(head, feature, state, acc);
      });
    __syncthreads();  // shared memory is free again
  }
}

}  // namespace pagedkv
