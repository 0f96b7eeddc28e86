// What the card allows: kernels that only read, only copy, or do nothing. Benchmarks state their figures as shares of
// these, measured in the same run, and flush L2 with the reader.
#include "params.cuh"

namespace pagedkv {

// Grid-stride over 16-byte packs, IN_FLIGHT loads at a time by each thread.
template <int IN_FLIGHT, class Use>
__device__ __forceinline__ void for_each_pack(const uint4* source, int64_t num_packs, const Use& use) {
  const int64_t step = static_cast<int64_t>(gridDim.x) * blockDim.x;
  for (int64_t first = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x; first < num_packs;
       first += step * IN_FLIGHT) {
    uint4 packs[IN_FLIGHT];
#pragma unroll
    for (int i = 0; i < IN_FLIGHT; i++)
      if (first + i * step < num_packs) packs[i] = source[first + i * step];
#pragma unroll
    for (int i = 0; i < IN_FLIGHT; i++)
      if (first + i * step < num_packs) use(first + i * step, packs[i]);
  }
}

// Reads all packs. They are folded into a value that is stored only if it equals one that random data hardly gives, so
// that the loads have a use.
template <int IN_FLIGHT>
__global__ void read_packs(const uint4* __restrict__ source,  // [num_packs]
                           uint32_t* __restrict__ unused,     // [1]
                           const StreamParams params) {
  uint32_t folded = 0;
  for_each_pack<IN_FLIGHT>(source, params.num_packs,
                           [&](int64_t, uint4 pack) { folded |= pack.x ^ pack.y ^ pack.z ^ pack.w; });
  if (folded == params.never) unused[0] = folded;
}

template <int IN_FLIGHT>
__global__ void copy_packs(uint4* __restrict__ target,        // [num_packs]
                           const uint4* __restrict__ source,  // [num_packs]
                           const StreamParams params) {
  for_each_pack<IN_FLIGHT>(source, params.num_packs, [&](int64_t i, uint4 pack) { target[i] = pack; });
}

// A template like the others, since kernels are found by their template arguments.
template <int UNUSED>
__global__ void empty_kernel() {}

}  // namespace pagedkv
