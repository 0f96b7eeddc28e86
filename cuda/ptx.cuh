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

// Stores a word in one instruction. Left to itself the compiler now and then stores the parts that it was put together
// from one by one, which costs a request and its sectors for each. Reads of global memory are not ordered with it.
template <class word_t>
__device__ __forceinline__ void store_whole(word_t* target, word_t word) {
  *target = word;
}
__device__ __forceinline__ void store_whole(uint2* target, uint2 word) {
  asm volatile("st.global.v2.b32 [%0], {%1, %2};" ::"l"(__cvta_generic_to_global(target)), "r"(word.x), "r"(word.y));
}
__device__ __forceinline__ void store_whole(uint4* target, uint4 word) {
  asm volatile("st.global.v4.b32 [%0], {%1, %2, %3, %4};" ::"l"(__cvta_generic_to_global(target)), "r"(word.x),
               "r"(word.y), "r"(word.z), "r"(word.w));
}

}  // namespace pagedkv
