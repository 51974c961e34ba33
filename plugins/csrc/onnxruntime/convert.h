// Floats and the KV cache's types, number by number.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#include "onnxruntime/kv_slots.h"

namespace outrider::engine {

inline std::uint32_t bits_of(float x) {
  std::uint32_t bits;
  std::memcpy(&bits, &x, sizeof bits);
  return bits;
}

inline float from_bits(std::uint32_t bits) {
  float x;
  std::memcpy(&x, &bits, sizeof x);
  return x;
}

inline float to_float(float x) { return x; }

inline float to_float(BFloat16 x) { return from_bits(static_cast<std::uint32_t>(x.bits) << 16); }

inline float to_float(Half x) {
  const std::uint32_t sign = (x.bits & 0x8000u) << 16, exponent = x.bits >> 10 & 31u, fraction = x.bits & 1023u;
  if (exponent == 31) return from_bits(sign | 0x7f800000u | fraction << 13);
  if (exponent == 0) return (sign ? -1.0f : 1.0f) * std::ldexp(static_cast<float>(fraction), -24);
  return from_bits(sign | (exponent + 112) << 23 | fraction << 13);
}

inline float to_float(Int8 x) { return static_cast<float>(x.value); }

// To the nearest, ties to even.
template <class To>
To from_float(float x);

template <>
inline float from_float<float>(float x) {
  return x;
}

template <>
inline Half from_float<Half>(float x) {
  const std::uint32_t bits = bits_of(x), sign = bits >> 16 & 0x8000u, size = bits & 0x7fffffffu;
  if (size > 0x7f800000u) return {static_cast<std::uint16_t>(sign | 0x7e00u)};
  if (size >= 0x477ff000u) return {static_cast<std::uint16_t>(sign | 0x7c00u)};  // 65520 and more
  if (size < 0x38800000u) {  // below the smallest normal: a multiple of 2^-24
    const float steps = std::nearbyint(std::ldexp(from_bits(size), 24));
    return {static_cast<std::uint16_t>(sign | static_cast<std::uint32_t>(steps))};
  }
  return {static_cast<std::uint16_t>(sign | ((size - 0x38000000u + 0xfffu + (size >> 13 & 1u)) >> 13))};
}

}  // namespace outrider::engine
