// PTX that CUDA C++ has no other word for. The only place with inline assembly.
#pragma once
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "types.cuh"

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
__device__ __forceinline__ int pinned(int x) {
  asm volatile("" : "+r"(x));
  return x;
}
__device__ __forceinline__ float pinned(float x) {
  asm volatile("" : "+f"(x));
  return x;
}

template <class T>
__device__ __forceinline__ const T* pinned(const T* x) {
  asm volatile("" : "+l"(x));
  return x;
}

struct WordHalves {
  uint16_t low, high;
};

// Without the shift that the upper half otherwise costs: instructions on 16 bits can read it where it is.
__device__ __forceinline__ WordHalves halves(uint32_t word) {
  WordHalves parts;
  asm("mov.b32 {%0, %1}, %2;" : "=h"(parts.low), "=h"(parts.high) : "r"(word));
  return parts;
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

// 2^x within two units in the last place; 0 where that would be subnormal.
__device__ __forceinline__ float exp2_approximate(float x) {
  float power;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(power) : "f"(x));
  return power;
}

// Adds 1 and returns what was there. What this thread has written, or has seen by way of a barrier, is there for who
// adds later; what those before have written is there for this thread.
__device__ __forceinline__ int32_t arrive(int32_t* counter) {
  int32_t before;
  asm volatile("atom.add.acq_rel.gpu.global.s32 %0, [%1], 1;"
               : "=r"(before)
               : "l"(__cvta_generic_to_global(counter))
               : "memory");
  return before;
}

// Waits until `count` threads have come to a barrier of the CTA's 16; the first is that of __syncthreads.
__device__ __forceinline__ void sync_threads(int32_t barrier, int32_t count) {
  asm volatile("bar.sync %0, %1;" ::"r"(barrier), "r"(count) : "memory");
}

// ---- all lanes of a warp --------------------------------------------------------------------------------------------

inline constexpr uint32_t WARP = 0xffffffffu;

// The sum and the largest of a number of every lane, the same in all of them.
__device__ __forceinline__ float sum_over_warp(float x) {
#pragma unroll
  for (int distance = 16; distance > 0; distance /= 2) x += __shfl_xor_sync(WARP, x, distance);
  return x;
}
__device__ __forceinline__ float max_over_warp(float x) {
#pragma unroll
  for (int distance = 16; distance > 0; distance /= 2) x = fmaxf(x, __shfl_xor_sync(WARP, x, distance));
  return x;
}

// An address in shared memory as instructions take it.
__device__ __forceinline__ uint32_t address_of(const void* smem) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(smem));
}

// ---- asynchronous copies --------------------------------------------------------------------------------------------

// Begins to copy 16 bytes into shared memory; zeros if `there` is false, and then nothing is read. By way of L1
// (`.ca`): on an H200, copies past it, bulk copies among them, come to 3.8 TB/s where these reach 4.5 if L1 has 60 KB
// left.
__device__ __forceinline__ void copy_async(void* target_smem, const void* source, bool there) {
  asm volatile("cp.async.ca.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(address_of(target_smem)),
               "l"(__cvta_generic_to_global(source)), "r"(there ? 16 : 0)
               : "memory");
}

// Makes a group of the copies that this thread began since the last one.
__device__ __forceinline__ void commit_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// Waits for this thread's groups but for the youngest ones.
template <int YOUNGEST>
__device__ __forceinline__ void wait_for_copies() {
  asm volatile("cp.async.wait_group %0;" ::"n"(YOUNGEST) : "memory");
}

// ---- tensor cores: a warp's fragments, each word two numbers --------------------------------------------------------

// D = A B + D with A [16, 16] and B [16, 8]. Lane l holds of A rows l / 4 and l / 4 + 8, of B column l / 4; of both the
// numbers 2 (l % 4) and the next along k, and those 8 further on; of D columns 2 (l % 4) and the next.
__device__ __forceinline__ void multiply_add(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2], __half) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, "
      "%3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}
__device__ __forceinline__ void multiply_add(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2],
                                             __nv_bfloat16) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, "
      "%3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

// Four 8 x 8 matrices of 16-bit words. Lane l gives the address of row l % 8 of matrix l / 8 and gets of each matrix
// words 2 (l % 4) and the next of row l / 4.
__device__ __forceinline__ void load_matrices(uint32_t (&matrices)[4], uint32_t row_smem) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(matrices[0]), "=r"(matrices[1]), "=r"(matrices[2]), "=r"(matrices[3])
               : "r"(row_smem)
               : "memory");
}

// The same, but of each matrix numbers 2 (l % 4) and the next of column l / 4.
__device__ __forceinline__ void load_matrices_transposed(uint32_t (&matrices)[4], uint32_t row_smem) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(matrices[0]), "=r"(matrices[1]), "=r"(matrices[2]), "=r"(matrices[3])
               : "r"(row_smem)
               : "memory");
}

// Transposes an 8 x 8 matrix: lane l holds the numbers 2 (l % 4) and the next of row l / 4.
__device__ __forceinline__ uint32_t transposed(uint32_t matrix) {
  uint32_t result;
  asm("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(result) : "r"(matrix));
  return result;
}

}  // namespace pagedkv
