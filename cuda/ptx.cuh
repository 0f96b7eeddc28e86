// PTX that CUDA C++ has no other word for. The only place with inline assembly.
#pragma once

namespace pagedkv {

// x * y as IEEE 754 has it. CuPy compiles with -ftz=true, under which `*` takes subnormal numbers for 0.
__device__ __forceinline__ float multiply_ieee(float x, float y) {
  float product;
  asm("mul.rn.f32 %0, %1, %2;" : "=f"(product) : "f"(x), "f"(y));
  return product;
}

// 1 / x within one unit in the last place, and 0 where that would be subnormal: no branch, unlike 1.0f / x.
__device__ __forceinline__ float approximate_reciprocal(float x) {
  float reciprocal;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(reciprocal) : "f"(x));
  return reciprocal;
}

// The value itself. The compiler cannot see that, and computes what follows from it here and not earlier.
__device__ __forceinline__ long long pinned(long long x) {
  asm volatile("" : "+l"(x));
  return x;
}
__device__ __forceinline__ float pinned(float x) {
  asm volatile("" : "+f"(x));
  return x;
}

}  // namespace pagedkv
