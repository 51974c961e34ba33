// Floats and the KV cache's types, number by number.
#pragma once

#include <cstdint>
#include <cstring>

#include "half.h"
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

inline float to_float(BFloat16 x) { return float_of_bfloat(x.bits); }

inline float to_float(Half x) { return float_of_half(x.bits); }

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
  return {static_cast<std::uint16_t>(half_of(x))};
}

}  // namespace outrider::engine
