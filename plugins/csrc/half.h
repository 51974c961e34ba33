// float16 and bfloat16, which live in the low 16 bits of a number, as float32 and back: to the nearest, ties to even.
//
// The same bits everywhere, of NaN too, of which a GPU's own conversions know only one: it keeps its sign, and as
// float32 the value of the float16.
#pragma once

#include "portable.h"

namespace outrider {

// float16 as float32 for arithmetic, where one NaN is like another: less work for a GPU.
OUTRIDER_HD inline float number_of_half(u32 bits);

OUTRIDER_HD inline float float_of_half(u32 bits) {
  const u32 sign = (bits & 0x8000u) << 16, exponent = bits >> 10 & 31u, fraction = bits & 1023u;
  const float not_finite = float_of(static_cast<i32>(sign | 0x7f800000u | fraction << 13));
#if defined(__CUDA_ARCH__)
  return exponent == 31 ? not_finite : number_of_half(bits);
#else
  if (exponent == 31) return not_finite;
  if (exponent == 0) return (sign ? -0x1p-24f : 0x1p-24f) * static_cast<float>(fraction);
  return float_of(static_cast<i32>(sign | (exponent + 112u) << 23 | fraction << 13));
#endif
}

OUTRIDER_HD inline float number_of_half(u32 bits) {
#if defined(__CUDA_ARCH__)
  float value;
  asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(static_cast<unsigned short>(bits)));
  return value;
#else
  return float_of_half(bits);
#endif
}

OUTRIDER_HD inline u32 half_of(float value) {
  const u32 bits = static_cast<u32>(bits_of(value)), sign = bits >> 16 & 0x8000u, size = bits & 0x7fffffffu;
  if (size > 0x7f800000u) return sign | 0x7e00u;
#if defined(__CUDA_ARCH__)
  unsigned short half;
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(half) : "f"(value));
  return half;
#else
  if (size >= 0x477ff000u) return sign | 0x7c00u;  // 65520 and more
  if (size >= 0x38800000u) return sign | (size - 0x38000000u + 0xfffu + (size >> 13 & 1u)) >> 13;
  if (size <= 0x33000000u) return sign;  // 2^-25, half of the least step, and less
  const u32 fraction = (size & 0x7fffffu) | 0x800000u, shift = 126u - (size >> 23);  // below 2^-14: steps of 2^-24
  const u32 steps = fraction >> shift, rest = fraction << (32u - shift);
  return sign | (steps + (rest > 0x80000000u || (rest == 0x80000000u && (steps & 1u)) ? 1u : 0u));
#endif
}

OUTRIDER_HD inline float float_of_bfloat(u32 bits) { return float_of(static_cast<i32>(bits << 16)); }

OUTRIDER_HD inline u32 bfloat_of(float value) {
  const u32 bits = static_cast<u32>(bits_of(value)), sign = bits >> 16 & 0x8000u;
  if ((bits & 0x7fffffffu) > 0x7f800000u) return sign | 0x7fc0u;
  return (bits + 0x7fffu + (bits >> 16 & 1u)) >> 16;
}

}  // namespace outrider
