// An element of a KV cache as float32, of whatever type the KV cache holds: as the CPU reads it, to the bit.
#pragma once

#include "../half.h"
#include "block.h"

namespace outrider {

enum Element : int { kFloat32 = 0, kFloat16 = 1, kBFloat16 = 2 };  // ELEMENTS in cuda/launches.py

OUTRIDER_DEVICE float element_at(const char* elements, i64 index, i64 type) {
  if (type == kFloat32) return reinterpret_cast<const float*>(elements)[index];
  const u32 bits = reinterpret_cast<const unsigned short*>(elements)[index];
  return type == kFloat16 ? float_of_half(bits) : float_of_bfloat(bits);
}

OUTRIDER_DEVICE void keep_element(char* elements, i64 index, i64 type, float value) {
  if (type == kFloat32) {
    reinterpret_cast<float*>(elements)[index] = value;
  } else {
    reinterpret_cast<unsigned short*>(elements)[index] =
        static_cast<unsigned short>(type == kFloat16 ? half_of(value) : bfloat_of(value));
  }
}

}  // namespace outrider
