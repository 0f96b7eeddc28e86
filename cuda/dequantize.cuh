// Packs of a cache as words of two numbers that tensor cores multiply, and as the numbers that they stand for. fp8
// codes become float16, which holds all of them exactly whatever the query's dtype.
#pragma once
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>

#include "convert.cuh"
#include "ptx.cuh"

namespace pagedkv {

template <class scalar_t, class cache_t>
struct Operand {
  using type = __half;
};
template <class scalar_t>
struct Operand<scalar_t, scalar_t> {
  using type = scalar_t;
};

template <class T, class U>
inline constexpr bool IS_SAME = false;
template <class T>
inline constexpr bool IS_SAME<T, T> = true;

// fp8 codes are multiplied as float16. A bfloat16 query may be too large or too small for that: it is divided by the
// power of two next to its largest number, which its scores make up for.
struct PowerOfTwo {
  static constexpr uint32_t EXPONENT_OF_1 = 127;  // as float32 has it
  float value, inverse;

  __device__ __forceinline__ explicit PowerOfTwo(uint32_t exponent)
      : value(__uint_as_float(exponent << 23)), inverse(__uint_as_float((2 * EXPONENT_OF_1 - exponent) << 23)) {}

  // Next to a number that is not negative. That of 1 for zero, infinity and NaN, and never one whose power of two has
  // no inverse.
  static __device__ __forceinline__ uint32_t exponent_of(float largest) {
    const uint32_t exponent = __float_as_uint(largest) >> 23;
    return exponent == 0 || exponent == 255 ? EXPONENT_OF_1 : min(exponent, 253u);
  }
};

template <__nv_fp8_interpretation_t FORMAT>
__device__ __forceinline__ uint32_t float16_pair(__nv_fp8x2_storage_t codes) {
  const __half2_raw pair = __nv_cvt_fp8x2_to_halfraw2(codes, FORMAT);
  return pair.x | static_cast<uint32_t>(pair.y) << 16;
}

// Fragments of A from four 8 x 8 matrices of 16-bit words as ldmatrix loads them: upper and lower rows of one, then of
// the next column. With 16-bit numbers they are one fragment. A word of 8-bit numbers has two pairs, and two matrices
// make one.
template <class cache_t>
__device__ __forceinline__ void make_fragments(const uint32_t (&matrices)[4], uint32_t (&fragments)[1][4]) {
#pragma unroll
  for (int i = 0; i < 4; i++) fragments[0][i] = matrices[i];
}
template <class cache_t>
__device__ __forceinline__ void make_fragments(const uint32_t (&matrices)[4], uint32_t (&fragments)[2][4]) {
#pragma unroll
  for (int i = 0; i < 4; i++) {
    const WordHalves codes = halves(matrices[i]);
    fragments[i / 2][i % 2] = float16_pair<FP8_FORMAT<cache_t>>(codes.low);
    fragments[i / 2][i % 2 + 2] = float16_pair<FP8_FORMAT<cache_t>>(codes.high);
  }
}

// Two numbers rounded to one word.
__device__ __forceinline__ uint32_t pair_of_floats(float x, float y, __half) {
  const __half2_raw pair = __floats2half2_rn(x, y);
  return pair.x | static_cast<uint32_t>(pair.y) << 16;
}
__device__ __forceinline__ uint32_t pair_of_floats(float x, float y, __nv_bfloat16) {
  const __nv_bfloat162_raw pair = __floats2bfloat162_rn(x, y);
  return pair.x | static_cast<uint32_t>(pair.y) << 16;
}

// Numbers of a head on their way out of the cache: fp8 codes times the head's scale in float32, rounded once.
template <class scalar_t, class cache_t>
struct Dequantizer {
  float scale;

  __device__ __forceinline__ Dequantizer(const Scale& scale, int head) : scale(scale.of_head(head)) {}

  // A hardware conversion takes two codes; a pack of one repeats its only one.
  template <int N>
  __device__ __forceinline__ Pack<scalar_t, N> convert(const Pack<cache_t, N>& codes) const {
    Pack<scalar_t, N> numbers;
#pragma unroll
    for (int i = 0; i < N; i += 2) {
      const uint32_t low = codes.get(i).__x, high = codes.get(N == 1 ? 0 : i + 1).__x;
      const float2 pair = __half22float2(__nv_cvt_fp8x2_to_halfraw2(low | high << 8, FP8_FORMAT<cache_t>));
      numbers.set(i, from_float<scalar_t>(multiply_ieee(pair.x, scale)));
      if (N > 1) numbers.set(i + 1, from_float<scalar_t>(multiply_ieee(pair.y, scale)));
    }
    return numbers;
  }
};

// An unquantised cache gives the bits it holds, NaN payloads included.
template <class scalar_t>
struct Dequantizer<scalar_t, scalar_t> {
  __device__ __forceinline__ Dequantizer(const Scale&, int) {}

  template <int N>
  __device__ __forceinline__ Pack<scalar_t, N> convert(const Pack<scalar_t, N>& pack) const {
    return pack;
  }
};

}  // namespace pagedkv
