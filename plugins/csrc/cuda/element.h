// An element of a KV cache as float32, of whatever type the KV cache holds: as the CPU reads it, to the bit.
#pragma once

#include "block.h"

namespace outrider {

enum Element : int { kFloat32 = 0, kFloat16 = 1, kBFloat16 = 2 };  // ELEMENTS in cuda/launches.py

OUTRIDER_DEVICE float half_value(u32 bits) {
  const u32 sign = (bits & 0x8000u) << 16;
  const u32 exponent = bits >> 10 & 31u;
  const u32 fraction = bits & 1023u;
  if (exponent == 0) return (sign ? -0x1p-24f : 0x1p-24f) * static_cast<float>(fraction);
  const u32 wide = exponent == 31 ? 255u : exponent + 112u;
  return float_of(static_cast<i32>(sign | wide << 23 | fraction << 13));
}

OUTRIDER_DEVICE float element_at(const char* elements, i64 index, i64 type) {
  if (type == kFloat32) return reinterpret_cast<const float*>(elements)[index];
  const u32 bits = reinterpret_cast<const unsigned short*>(elements)[index];
  return type == kFloat16 ? half_value(bits) : float_of(static_cast<i32>(bits << 16));
}

}  // namespace outrider
