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

template <int kType>
constexpr int kElementBytes = kType == kFloat32 ? 4 : 2;

// A float16 or bfloat16 for arithmetic: see number_of_half.
template <int kType>
OUTRIDER_DEVICE float element_of_bits(u32 bits) {
  return kType == kFloat16 ? number_of_half(bits) : float_of_bfloat(bits);
}

template <int kType>
OUTRIDER_DEVICE float number_at(const char* from) {
  if (kType == kFloat32) return *reinterpret_cast<const float*>(from);
  return element_of_bits<kType>(*reinterpret_cast<const unsigned short*>(from));
}

// Four elements from a multiple of four on: one load.
template <int kType>
OUTRIDER_DEVICE void load_four(const char* from, float* to) {
  if (kType == kFloat32) {
    const Quad four = load_quad(reinterpret_cast<const float*>(from));
    for (int i = 0; i < 4; ++i) to[i] = four.value[i];
  } else {
    const Bytes8 four = load_bytes8(from);
    for (int i = 0; i < 4; ++i) to[i] = element_of_bits<kType>(four.word[i / 2] >> 16 * (i % 2) & 0xffffu);
  }
}

// Eight elements from a multiple of eight on: one load, or two of float32.
template <int kType>
OUTRIDER_DEVICE void load_eight(const char* from, float* to) {
  if (kType == kFloat32) {
    load_four<kType>(from, to);
    load_four<kType>(from + 16, to + 4);
  } else {
    const Bytes16 eight = load_bytes16(from);
    for (int i = 0; i < 8; ++i) to[i] = element_of_bits<kType>(eight.word[i / 2] >> 16 * (i % 2) & 0xffffu);
  }
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
