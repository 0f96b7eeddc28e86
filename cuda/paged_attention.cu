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

template <class scalar_t, class cache_t, int HEAD_SIZE, int BLOCK_SIZE, int HEADS, int TILES_AHEAD, Copies COPIES>
struct ScanOf {
  using type = TensorCoreScan<scalar_t, cache_t, HEAD_SIZE, BLOCK_SIZE, HEADS, TILES_AHEAD, COPIES>;
};
template <int HEAD_SIZE, int BLOCK_SIZE, int HEADS, int TILES_AHEAD, Copies COPIES>
struct ScanOf<float, float, HEAD_SIZE, BLOCK_SIZE, HEADS, TILES_AHEAD, COPIES> {
  using type = CudaCoreScan<HEAD_SIZE, BLOCK_SIZE, HEADS, COPIES != COPY_ELEMENTS>;
};

// Softmax states of rows, one per head, in shared memory or in the workspace.
template <int ROW>
struct States {
  float* acc;         // [count, ROW]
  float* max_logits;  // [count]
  float* exp_sums;    // [count]

  static constexpr int BYTES = (ROW + 2) * sizeof(float);  // of each

  __device__ __forceinline__ States(void* memory, int64_t count)
      : acc(static_cast<float*>(memory)), max_logits(acc + count * ROW), exp_sums(max_logits + count) {}

  __device__ __forceinline__ void set(int64_t index, const SoftmaxState& state) const {
    max_logits[index] = state.max_logit, exp_sums[index] = state.exp_sum;
  }
  __device__ __forceinline__ float* acc_of(int64_t index) const { return acc + index * ROW; }
  __device__ __forceinline__ float4& pack(int64_t index, int feature) const {
    return *reinterpret_cast<float4*>(acc_of(index) + feature);
  }

  // By a warp, as `merged` leaves them.
  template <int HEAD_SIZE>
  __device__ __forceinline__ void set_all(int64_t index, const SoftmaxState& state,
                                          const float4 (&acc)[(HEAD_SIZE + 127) / 128]) const {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int j = 0; j < (HEAD_SIZE + 127) / 128; j++)
      if ((j * 32 + lane) * 4 < HEAD_SIZE) pack(index, (j * 32 + lane) * 4) = acc[j];
    if (lane == 0) set(index, state);
  }

  // One state from `count`, the i-th of them number `index_of(i)`, by a warp: every lane gets the state, and of the
  // accumulator the packs `lane`, `lane + 32` ...
  template <int HEAD_SIZE, class IndexOf>
  __device__ __forceinline__ SoftmaxState merged(int count, const IndexOf& index_of,
                                                 float4 (&sums)[(HEAD_SIZE + 127) / 128]) const {
    constexpr uint32_t WARP = 0xffffffffu;
    const int lane = threadIdx.x % 32;
    SoftmaxState state;
    for (auto& sum : sums) sum = {};
    for (int first = 0; first < count; first += 32) {
      const bool is_there = first + lane < count;
      const int64_t index = index_of(is_there ? first + lane : first);
      const SoftmaxState part{is_there ? max_logits[index] : -CUDART_INF_F, is_there ? exp_sums[index] : 0.0f};
      SoftmaxState parts{part.max_logit, 0.0f};
#pragma unroll
      for (int distance = 16; distance > 0; distance /= 2)
        parts.max_logit = fmaxf(parts.max_logit, __shfl_xor_sync(WARP, parts.max_logit, distance));
      parts.max_logit = fmaxf(parts.max_logit, state.max_logit);
      const float factor = weight(part.max_logit, parts.max_logit);
      parts.exp_sum = part.exp_sum * factor;
#pragma unroll
      for (int distance = 16; distance > 0; distance /= 2)
        parts.exp_sum += __shfl_xor_sync(WARP, parts.exp_sum, distance);
      const float2 factors = state.merge(parts);
      for (auto& sum : sums) sum.x *= factors.x, sum.y *= factors.x, sum.z *= factors.x, sum.w *= factors.x;
#pragma unroll 8
      for (int i = 0; i < min(32, count - first); i++) {
        const float factor_of_i = __shfl_sync(WARP, factor, i);
        const int64_t index_of_i = index_of(first + i);
#pragma unroll
        for (int j = 0; j < (HEAD_SIZE + 127) / 128; j++) {
          const int feature = (j * 32 + lane) * 4;
          if (HEAD_SIZE % 128 != 0 && feature >= HEAD_SIZE) continue;
          const float4 numbers = pack(index_of_i, feature);
          sums[j].x += numbers.x * factor_of_i, sums[j].y += numbers.y * factor_of_i;
          sums[j].z += numbers.z * factor_of_i, sums[j].w += numbers.w * factor_of_i;
        }
      }
    }
    return state;
  }
};

// Where the results of a unit's heads go.
template <class scalar_t>
struct Results {
  scalar_t* out;      // of the unit's sequence and first head
  float* lse;         // likewise, or null
  const void* sinks;  // [num_heads], or null
  float v_scale;
  int32_t first_head;
  const DecodeParams& params;

  __device__ __forceinline__ Results(scalar_t* out, float* lse, const void* sinks, const Scale& v_scale,
                                     const Segment& segment, const DecodeParams& params)
      : out(out + segment.sequence * params.out_token_stride + segment.first_head * params.out_head_stride),
        lse(lse == nullptr ? nullptr
                           : lse + segment.sequence * params.lse_token_stride + segment.first_head * params.lse_head_stride),
        sinks(sinks),
        v_scale(v_scale.of_head(segment.kv_head)),
        first_head(segment.first_head),
        params(params) {}

  // By a warp, as States::merged leaves them.
  template <int HEAD_SIZE>
  __device__ __forceinline__ void write(int head, SoftmaxState state, const float4 (&acc)[(HEAD_SIZE + 127) / 128]) const {
    float factor = v_scale;
    if (sinks != nullptr) factor *= state.merge({sink(head) * LOG2_E, 1.0f}).x;
    factor *= state.normalizer();
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int j = 0; j < (HEAD_SIZE + 127) / 128; j++) {
      const int feature = (j * 32 + lane) * 4;
      const float numbers[4] = {acc[j].x, acc[j].y, acc[j].z, acc[j].w};
      scalar_t* target = out + head * params.out_head_stride + feature * params.out_feature_stride;
#pragma unroll
      for (int i = 0; i < 4; i++)
        if (feature < HEAD_SIZE) target[i * params.out_feature_stride] = from_float<scalar_t>(numbers[i] * factor);
    }
    if (lse != nullptr && lane == 0) lse[head * params.lse_head_stride] = state.lse();
  }

  __device__ __forceinline__ float sink(int head) const {
    const int64_t offset = (first_head + head) * params.sink_stride;
    return params.sinks_are_float32 ? static_cast<const float*>(sinks)[offset]
                                    : to_float(static_cast<const scalar_t*>(sinks)[offset]);
  }
};

// Whether this CTA is the last of `count` to arrive; what the others have written is then there to be read.
__device__ __forceinline__ bool is_last_to_arrive(int32_t* counter, int32_t count) {
  __shared__ bool is_last_smem;
  __syncthreads();
  if (threadIdx.x == 0) {
    is_last_smem = arrive(counter) == count - 1;
    if (is_last_smem) *counter = 0;  // as the next launch wants it
  }
  __syncthreads();
  return is_last_smem;
}

template <class scalar_t, class cache_t, int HEAD_SIZE, int BLOCK_SIZE, int HEADS, int WARPS, int TILES_AHEAD,
          Copies COPIES>
__global__ void __launch_bounds__(WARPS * 32, 2)
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
  using Scan = typename ScanOf<scalar_t, cache_t, HEAD_SIZE, BLOCK_SIZE, HEADS, TILES_AHEAD, COPIES>::type;
  // 16 bytes between rows put the columns of O^T that a warp writes at once into different banks.
  using WarpStates = States<HEAD_SIZE + 4>;
  using SegmentStates = States<HEAD_SIZE>;
  static_assert(HEAD_SIZE % 8 == 0, "rows are packs");
  extern __shared__ uint4 smem[];  // the warps' scans and their states
  const int warp = threadIdx.x / 32;
  Scan scan(reinterpret_cast<char*>(smem) + warp * Scan::SMEM_BYTES);
  const WarpStates warp_states(reinterpret_cast<char*>(smem) + WARPS * Scan::SMEM_BYTES, WARPS * HEADS);
  const SegmentStates partials(workspace, params.num_states);

  const auto start = [&](const Segment& segment) {
    const PackedSequence<cache_t, BLOCK_SIZE> sequence{key_cache + segment.kv_head * params.key_head_stride,
                                                       value_cache + segment.kv_head * params.value_head_stride,
                                                       block_tables + segment.sequence * params.table_stride,
                                                       params.table_step,
                                                       params.key_block_stride,
                                                       params.value_block_stride,
                                                       segment.first_token,
                                                       segment.end_token};
    scan.start(sequence, segment.first_token / Scan::TILE_TOKENS + warp, WARPS,
               query + segment.sequence * params.query_token_stride + segment.first_head * params.query_head_stride,
               params.query_head_stride, segment.num_heads);
  };

  Schedule<Scan::TILE_TOKENS, HEADS> schedule(seq_lens, params);
  Segment segment, following;
  bool is_there = schedule.next(segment);
  if (is_there) start(segment);
  for (; is_there; segment = following) {
    const float scale = params.scale * Scale{k_scale, params.k_scale, params.k_scale_stride}.of_head(segment.kv_head);
    const float* slopes = alibi_slopes == nullptr ? nullptr : alibi_slopes + segment.first_head * params.slope_stride;
    scan.run({scale, scale * LOG2_E, params.softcap, slopes, params.slope_stride, segment.query_position});
    scan.leave(warp_states, warp * HEADS);
    is_there = schedule.next(following);
    if (is_there) start(following);  // its tiles are on their way while this segment is brought to its end
    __syncthreads();

    const Results<scalar_t> results(out, lse, sinks, Scale{v_scale, params.v_scale, params.v_scale_stride}, segment, params);
    const bool is_whole = segment.num_partials == 1;
    float4 acc[(HEAD_SIZE + 127) / 128];
    for (int head = warp; head < segment.num_heads; head += WARPS) {
      const SoftmaxState state = warp_states.template merged<HEAD_SIZE>(WARPS, [&](int i) { return i * HEADS + head; }, acc);
      if (is_whole)
        results.template write<HEAD_SIZE>(head, state, acc);
      else
        partials.template set_all<HEAD_SIZE>(segment.state(segment.partial, head), state, acc);
    }
    if (!is_whole && is_last_to_arrive(counters + segment.unit, segment.num_partials))
      for (int head = warp; head < segment.num_heads; head += WARPS) {
        const auto index_of = [&](int i) { return segment.state(i, head); };
        const SoftmaxState state = partials.template merged<HEAD_SIZE>(segment.num_partials, index_of, acc);
        results.template write<HEAD_SIZE>(head, state, acc);
      }
    __syncthreads();  // the states have been read
  }
}

}  // namespace pagedkv
