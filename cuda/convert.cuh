// What happens to a value on its way into the cache: nothing, or quantisation to fp8.
#pragma once
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>
#include <math_constants.h>

#include "copy.cuh"
#include "ptx.cuh"

namespace pagedkv {

__device__ __forceinline__ float to_float(float x) { return x; }
__device__ __forceinline__ float to_float(__half x) { return __half2float(x); }
__device__ __forceinline__ float to_float(__nv_bfloat16 x) { return __bfloat162float(x); }

template <class T>
__device__ __forceinline__ T from_float(float x);
template <>
__device__ __forceinline__ float from_float(float x) {
  return x;
}
template <>
__device__ __forceinline__ __half from_float(float x) {
  return __float2half_rn(x);
}
template <>
__device__ __forceinline__ __nv_bfloat16 from_float(float x) {
  return __float2bfloat16_rn(x);
}

template <class cache_t>
inline constexpr __nv_fp8_interpretation_t FP8_FORMAT = __NV_E4M3;
template <>
inline constexpr __nv_fp8_interpretation_t FP8_FORMAT<__nv_fp8_e5m2> = __NV_E5M2;

// The scale of K or V: a number, or an array of one element or of one per head.
struct Scale {
  const float* array;  // null: the number
  float number;
  int stride;  // 0: all heads share the first element

  __device__ __forceinline__ float of_head(int head) const { return array == nullptr ? number : array[head * stride]; }
};

// x / divisor rounded as IEEE division rounds, for a positive normal divisor, in a few instructions. The divisor's
// power of two is split off first, which is exact, so that no intermediate leaves the exponent range for a quotient
// that fp8 can tell from 0 or infinity. The estimate is then corrected twice by its exact remainder; the second
// correction ends on the correctly rounded quotient (Markstein, "Computation of elementary functions on the IBM RISC
// System/6000 processor", 1990).
__device__ __forceinline__ float quotient(float x, float divisor) {
  const uint32_t bits = __float_as_uint(divisor), inverse_exponent = 254 - (bits >> 23);
  const float power = __uint_as_float(inverse_exponent == 0 ? 1u << 22 : inverse_exponent << 23);  // 2^-127: subnormal
  const float mantissa = __uint_as_float((bits & 0x007fffff) | 0x3f800000);
  const float reciprocal = __frcp_rn(mantissa);
  const float scaled = multiply_ieee(x, power);
  const float estimate = scaled * reciprocal;
  const float faithful = fmaf(fmaf(-estimate, mantissa, scaled), reciprocal, estimate);
  const float rounded = fmaf(fmaf(-faithful, mantissa, scaled), reciprocal, faithful);
  // Infinity and NaN have no remainder; that of -0 is +0.
  return fabsf(estimate) < CUDART_INF_F ? copysignf(rounded, x) : estimate;
}

// fp8 codes of saturate(x / scale), rounded once from the IEEE quotient, without a division where none is needed: if
// the products with a reciprocal that is a little too small and one a little too large round to the same codes, so does
// the quotient between them. Only quotients next to the middle of two codes are left, and those are divided.
template <class cache_t>
struct Quantizer {
  float scale;
  float reciprocal_low, reciprocal_high;

  __device__ __forceinline__ explicit Quantizer(float scale) : scale(scale) {
    const float reciprocal = approximate_reciprocal(scale);
    const bool is_exact = fmaf(reciprocal, scale, -1.0f) == 0.0f;  // a power of two
    // Wider than an error of the reciprocal of 2^-23 and roundings of product and quotient of 2^-24 each. Where the
    // reciprocal was too small to be told from 0, an open interval sends every value to the division.
    reciprocal_low = is_exact ? reciprocal : reciprocal * (1 - 0x1p-21f);
    reciprocal_high = is_exact ? reciprocal : reciprocal == 0.0f ? CUDART_INF_F : reciprocal * (1 + 0x1p-21f);
  }

  // Sets `ambiguous` if a code may be off by one.
  template <class scalar_t, int N>
  __device__ __forceinline__ Pack<cache_t, N> multiply(const Pack<scalar_t, N>& pack, bool& ambiguous) const {
    uint32_t differing = 0;
    const auto codes = map_pairs(pack, [&](float x, float y) {
      const uint32_t low = codes_of(multiply_ieee(x, reciprocal_low), multiply_ieee(y, reciprocal_low));
      differing |= low ^ codes_of(multiply_ieee(x, reciprocal_high), multiply_ieee(y, reciprocal_high));
      return low;
    });
    ambiguous = ambiguous || differing != 0;
    return codes;
  }

  template <class scalar_t, int N>
  __device__ __forceinline__ Pack<cache_t, N> divide(const Pack<scalar_t, N>& pack) const {
    return map_pairs(pack, [&](float x, float y) { return codes_of(quotient(x, scale), quotient(y, scale)); });
  }

  static __device__ __forceinline__ uint32_t codes_of(float x, float y) {
    return __nv_cvt_float2_to_fp8x2(make_float2(x, y), __NV_SATFINITE, FP8_FORMAT<cache_t>);
  }

  // A hardware conversion takes two values; a pack of one repeats its only one.
  template <class scalar_t, int N, class Codes>
  static __device__ __forceinline__ Pack<cache_t, N> map_pairs(const Pack<scalar_t, N>& pack,
                                                               const Codes& codes_of_pair) {
    using pair_t = typename Word<N == 1 ? 1 : 2>::type;
    Pack<cache_t, N> codes;
#pragma unroll
    for (int i = 0; i < N; i += 2) {
      const uint32_t pair = codes_of_pair(to_float(pack.get(i)), to_float(pack.get(N == 1 ? 0 : i + 1)));
      codes.set_bits(i, static_cast<pair_t>(pair));
    }
    return codes;
  }
};

// Which of the two conversions a pass over the rows makes.
template <bool VALUE>
struct IsExact {};

// What a pack of a head becomes in the cache: codes by the common or the head's own scale. The quick conversion says
// whether it met a pack that needs the exact one; the caller then converts all it has again.
template <class scalar_t, class cache_t, bool SCALE_PER_HEAD>
struct CacheConvert {
  Scale scale;
  Quantizer<cache_t> common;

  __device__ __forceinline__ CacheConvert(const Scale& scale, float common) : scale(scale), common(common) {}

  template <bool IS_EXACT, int N>
  __device__ __forceinline__ Pack<cache_t, N> convert(IsExact<IS_EXACT>, int head, const Pack<scalar_t, N>& pack,
                                                      bool& ambiguous) const {
    const Quantizer<cache_t> quantizer = SCALE_PER_HEAD ? Quantizer<cache_t>(scale.of_head(head)) : common;
    if constexpr (IS_EXACT) return quantizer.divide(pack);
    return quantizer.multiply(pack, ambiguous);
  }
};

// An unquantised cache holds the bits it was given, NaN payloads included.
template <class scalar_t, bool SCALE_PER_HEAD>
struct CacheConvert<scalar_t, scalar_t, SCALE_PER_HEAD> {
  __device__ __forceinline__ CacheConvert(const Scale&, float) {}

  template <bool IS_EXACT, int N>
  __device__ __forceinline__ Pack<scalar_t, N> convert(IsExact<IS_EXACT>, int, const Pack<scalar_t, N>& pack,
                                                       bool&) const {
    return pack;
  }
};

// Copies rows through a conversion (see copy_rows): `ready(IsExact<..>, ambiguous)` returns the `put` of a pass.
template <int SIZE, int VEC, int PACKS_IN_FLIGHT, class scalar_t, class Ready>
__device__ __forceinline__ void convert_rows(const Rows<scalar_t>& rows, const Ready& ready) {
  bool ambiguous = false;
  copy_rows<SIZE, VEC, PACKS_IN_FLIGHT>(rows, [&] { return ready(IsExact<false>{}, ambiguous); });
  if (ambiguous) copy_rows<SIZE, VEC, 1>(rows, [&] { return ready(IsExact<true>{}, ambiguous); });
}

}  // namespace pagedkv
