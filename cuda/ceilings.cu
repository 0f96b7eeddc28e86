// What the card allows: kernels that only read, straight on or through block tables, only copy, or do nothing.
// Benchmarks state their figures as shares of these, measured in the same run, and flush L2 with the reader.
#include "params.cuh"
#include "ptx.cuh"

namespace pagedkv {

// Which packs of 16 bytes a thread takes.
struct Stride {
  int64_t first, step;
};

__device__ __forceinline__ Stride over_grid() {
  return {static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x, static_cast<int64_t>(gridDim.x) * blockDim.x};
}

// IN_FLIGHT loads at a time by each thread.
template <int IN_FLIGHT, class Use>
__device__ __forceinline__ void for_each_pack(const uint4* source, int64_t num_packs, const Stride& stride,
                                              const Use& use) {
  const int64_t step = stride.step;
  for (int64_t first = stride.first; first < num_packs; first += step * IN_FLIGHT) {
    uint4 packs[IN_FLIGHT];
#pragma unroll
    for (int i = 0; i < IN_FLIGHT; i++)
      if (first + i * step < num_packs) packs[i] = source[first + i * step];
#pragma unroll
    for (int i = 0; i < IN_FLIGHT; i++)
      if (first + i * step < num_packs) use(first + i * step, packs[i]);
  }
}

__device__ __forceinline__ uint32_t folded_pack(uint4 pack) { return pack.x ^ pack.y ^ pack.z ^ pack.w; }

// Reads all packs. They are folded into a value that is stored only if it equals one that random data hardly gives, so
// that the loads have a use.
template <int IN_FLIGHT>
__global__ void read_packs(const uint4* __restrict__ source,  // [num_packs]
                           uint32_t* __restrict__ unused,     // [1]
                           const StreamParams params) {
  uint32_t folded = 0;
  for_each_pack<IN_FLIGHT>(source, params.num_packs, over_grid(),
                           [&](int64_t, uint4 pack) { folded |= folded_pack(pack); });
  if (folded == params.never) unused[0] = folded;
}

template <int IN_FLIGHT>
__global__ void copy_packs(uint4* __restrict__ target,        // [num_packs]
                           const uint4* __restrict__ source,  // [num_packs]
                           const StreamParams params) {
  for_each_pack<IN_FLIGHT>(source, params.num_packs, over_grid(), [&](int64_t i, uint4 pack) { target[i] = pack; });
}

// Reads what a decode step over a packed cache has to read, through a table, and computes nothing: the floor of its
// time. A warp takes the keys or the values of one kv head in one block, which lie side by side; all warps stride over
// what the tables could name, sequence by sequence, and pass over blocks behind the end of their sequence.
template <int IN_FLIGHT>
__global__ void read_blocks(const uint4* __restrict__ key_cache,       // [num_blocks, num_kv_heads, packs_per_head]
                            const uint4* __restrict__ value_cache,     // [num_blocks, num_kv_heads, packs_per_head]
                            const int32_t* __restrict__ block_tables,  // [num_seqs, max_blocks]
                            const int32_t* __restrict__ seq_lens,      // [num_seqs]
                            uint32_t* __restrict__ unused,             // [1]
                            const BlockReadParams params) {
  const Stride threads = over_grid();
  const Stride lanes{threadIdx.x % 32, 32};
  uint32_t folded = 0;
  for (uint32_t item = threads.first / 32; item < params.num_items; item += threads.step / 32) {
    const uint32_t side = item % 2, head = item / 2 % params.num_kv_heads, entry = item / 2 / params.num_kv_heads;
    const uint32_t sequence = entry / params.max_blocks, block = entry % params.max_blocks;
    // Asked for before it is known to be of use: the length and the block id come together, not one after the other.
    const int64_t block_id = pinned(int64_t{block_tables[entry]});
    if (int64_t{block} * params.block_size >= seq_lens[sequence]) continue;
    const uint4* source = side == 0 ? key_cache : value_cache;
    source += (block_id * params.num_kv_heads + head) * params.packs_per_head;
    for_each_pack<IN_FLIGHT>(source, params.packs_per_head, lanes,
                             [&](int64_t, uint4 pack) { folded |= folded_pack(pack); });
  }
  if (folded == params.never) unused[0] = folded;
}

// A template like the others, since kernels are found by their template arguments.
template <int UNUSED>
__global__ void empty_kernel() {}

}  // namespace pagedkv
