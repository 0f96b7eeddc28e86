// move_blocks: copies whole blocks of caches, from one to another (swap_blocks), inside one (copy_blocks), to host
// memory that a device can address or to a temporary. What lies in them is bytes.
#include "copy.cuh"
#include "params.cuh"

namespace pagedkv {

using byte_t = unsigned char;

// One part of a block: each thread keeps PACKS_IN_FLIGHT packs in flight, adjacent lanes take adjacent packs.
template <int PACK_BYTES, int PACKS_IN_FLIGHT>
__device__ __forceinline__ void move_part(byte_t* target, const byte_t* source, int64_t part,
                                          const BlockMoveParams& params) {
  const int64_t first = part * blockDim.x * PACKS_IN_FLIGHT + threadIdx.x;
  Pack<byte_t, PACK_BYTES> packs[PACKS_IN_FLIGHT];
#pragma unroll
  for (int i = 0; i < PACKS_IN_FLIGHT; i++) {
    const int64_t pack = first + i * blockDim.x, row = params.row_packs.divide(pack);
    const int64_t byte = (pack - row * params.row_packs.divisor) * PACK_BYTES;
    if (pack < params.block_packs) packs[i] = load<PACK_BYTES>(source + row * params.source_row_stride + byte);
  }
#pragma unroll
  for (int i = 0; i < PACKS_IN_FLIGHT; i++) {
    const int64_t pack = first + i * blockDim.x, row = params.row_packs.divide(pack);
    const int64_t byte = (pack - row * params.row_packs.divisor) * PACK_BYTES;
    if (pack < params.block_packs) store_joined(target + row * params.target_row_stride + byte, packs[i]);
  }
}

// A CTA takes one part of a block of one cache at a time. No target of the launch is a source of another of its pairs,
// so that the order of CTAs does not matter. Where one end lies behind a link that a few CTAs fill, these go round.
template <int PACK_BYTES, int PACKS_IN_FLIGHT, int THREADS>
__global__ void __launch_bounds__(THREADS)
    move_blocks(const BlockAddresses* __restrict__ caches,  // [num_caches]
                const int64_t* __restrict__ mapping,        // [num_pairs, 2] source, destination
                const __grid_constant__ BlockMoveParams params) {
  for (int64_t item = blockIdx.x; item < params.num_items; item += gridDim.x) {
    const int64_t move = params.parts_per_block.divide(item), cache = params.num_pairs.divide(move);
    const int64_t part = item - move * params.parts_per_block.divisor;
    const int64_t* pair = mapping + (move - cache * params.num_pairs.divisor) * params.pair_stride;
    const BlockAddresses addresses = caches[cache];
    const byte_t* source = bytes_at(addresses.source + pair[0] * addresses.source_block_stride);
    byte_t* target = bytes_at(addresses.target + pair[params.side_stride] * addresses.target_block_stride);
    move_part<PACK_BYTES, PACKS_IN_FLIGHT>(target, source, part, params);
  }
}

}  // namespace pagedkv
