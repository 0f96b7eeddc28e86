// PTX that CUDA C++ has no other word for. The only place with inline assembly.
#pragma once

namespace pagedkv {

// x * y as IEEE 754 has it. CuPy compiles with -ftz=true, under which `*` takes subnormal numbers for 0.
__device__ __forceinline__ float multiply_ieee(float x, float y) {
  float product;
  asm("mul.rn.f32 %0, %1, %2;" : "=f"(product) : "f"(x), "f"(y));
  return product;
}

}  // namespace pagedkv
