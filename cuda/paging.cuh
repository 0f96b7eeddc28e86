// From token positions to cache addresses: what a slot or a block id means is known here alone.
#pragma once
#include "params.cuh"

namespace pagedkv {

struct SlotPosition {
  int64_t block;
  int32_t offset;
};

// Slot s is block s / block_size, offset s % block_size. Slots beyond 31 bits are legal and rare, and a 64-bit division
// costs many times a multiplication.
__device__ __forceinline__ SlotPosition locate(int64_t slot, const FastDivisor& block_size) {
  const uint32_t low = static_cast<uint32_t>(slot);
  if (slot >> 31 != 0) return {slot / block_size.divisor, static_cast<int32_t>(slot % block_size.divisor)};
  const uint32_t block = block_size.divide(low);
  return {block, static_cast<int32_t>(low - block * block_size.divisor)};
}

}  // namespace pagedkv
