// advance_decode: what has to be known of a decode step, computed where the kernels that need it run, so that a
// captured step can be replayed without the host.
//
// One CTA takes all sequences, a thread one at a time; those that are live take adjoining places in the batch, found by
// a prefix sum over the CTA.
#include "paging.cuh"
#include "params.cuh"
#include "ptx.cuh"

namespace pagedkv {

template <int THREADS>
__global__ void __launch_bounds__(THREADS)
    advance_decode(const int32_t* __restrict__ block_table,  // [num_seqs, max_blocks]
                   int32_t* __restrict__ seq_lens,           // [num_seqs], gains 1 where it is not 0
                   int64_t* __restrict__ slot_mapping,       // [num_seqs]
                   int64_t* __restrict__ positions,          // [num_seqs], or null
                   int32_t* __restrict__ query_starts,       // [num_seqs + 1]
                   const __grid_constant__ AdvanceParams params) {
  constexpr int WARPS = THREADS / 32;
  __shared__ int32_t live_smem[WARPS];  // sequences of each warp
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  int32_t num_live = 0;  // before this round
  for (int32_t first = 0; first < params.num_seqs; first += THREADS) {
    const int32_t sequence = first + threadIdx.x;
    const bool is_there = sequence < params.num_seqs;
    const int32_t position = is_there ? seq_lens[sequence] : 0;  // of the new token
    const bool is_live = position > 0;
    const uint32_t live = __ballot_sync(WARP, is_live);
    if (lane == 0) live_smem[warp] = __popc(live);
    __syncthreads();
    int32_t place = num_live + __popc(live & ((1u << lane) - 1));
    for (int i = 0; i < WARPS; i++) {
      if (i < warp) place += live_smem[i];
      num_live += live_smem[i];
    }
    __syncthreads();  // all have read before the next round writes
    if (is_there) query_starts[sequence] = place;
    if (!is_live) continue;

    const SlotPosition at = locate(position, params.block_size);
    const bool has_room = at.block < params.max_blocks;
    const int32_t block_id = has_room ? block_table[sequence * params.table_stride + at.block * params.table_step] : -1;
    slot_mapping[place] = block_id < 0 ? -1 : block_id * int64_t{params.block_size.divisor} + at.offset;
    if (positions != nullptr) positions[place] = position;
    if (has_room) seq_lens[sequence] = position + 1;
  }
  for (int32_t i = num_live + threadIdx.x; i < params.num_seqs; i += THREADS) {
    slot_mapping[i] = -1;
    if (positions != nullptr) positions[i] = 0;
  }
  if (threadIdx.x == 0) query_starts[params.num_seqs] = num_live;
}

}  // namespace pagedkv
