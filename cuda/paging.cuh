// From token positions to cache addresses: what a slot or a block id means is known here alone.
#pragma once
#include "params.cuh"

namespace pagedkv {

struct SlotPosition {
  int64_t block;
  int32_t offset;
};

// Slot s is block s / block_size, offset s % block_size.
__device__ __forceinline__ SlotPosition locate(int64_t slot, const FastDivisor& block_size) {
  const int64_t block = block_size.divide(slot);
  return {block, static_cast<int32_t>(slot - block * block_size.divisor)};
}

}  // namespace pagedkv
