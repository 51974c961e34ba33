// A lane's part of a matrix product of its warp (PTX's mma.sync; csrc/cuda/warp.h says which element lies where).
//
// Floats are added in ascending order of k: a GPU has an order of its own. Products of halves are exact in float32.
#pragma once

#include <cstdint>

#include "grid.h"
#include "half.h"

namespace emulator {

// A product's kinds of elements: how many a register has, their values, and how a product is added.
struct Bytes {
  static constexpr int kPacked = 4;
  static std::int32_t a(std::uint32_t word, int i) { return static_cast<std::int8_t>(word >> 8 * i); }
  static std::int32_t b(std::uint32_t word, int i) { return static_cast<std::int8_t>(word >> 8 * i); }
  static std::int32_t sum(std::int32_t a, std::int32_t b, std::int32_t sum) {
    return static_cast<std::int32_t>(static_cast<std::uint32_t>(sum) + static_cast<std::uint32_t>(a * b));
  }
};

struct Floats {
  static constexpr int kPacked = 2;
  static float sum(float a, float b, float sum) { return sum + a * b; }
};

struct Halves : Floats {
  static float a(std::uint32_t word, int i) { return outrider::float_of_half(word >> 16 * i & 0xffffu); }
  static float b(std::uint32_t word, int i) { return a(word, i); }
};

struct Bfloats : Floats {
  static float a(std::uint32_t word, int i) { return outrider::float_of_bfloat(word >> 16 * i & 0xffffu); }
  static float b(std::uint32_t word, int i) { return a(word, i); }
};

// To a lane's four sums: `lanes` show their registers of A, then those of B.
template <typename Kind, typename T>
void add_products(T (&sums)[4], const Shown* lanes, Index lane) {
  constexpr int kPacked = Kind::kPacked;
  for (int s = 0; s < 4; ++s) {
    const Index row = lane / 4, column = lane % 4 * 2 + s % 2;
    const int lower = s / 2;  // whether the row is one of the lower eight
    for (int word = 0; word < 8; ++word) {
      const std::uint32_t a = lanes[row * 4 + word % 4].word[word / 4 * 2 + lower];
      const std::uint32_t b = lanes[column * 4 + word % 4].word[word / 4 + 4];
      for (int i = 0; i < kPacked; ++i) sums[s] = Kind::sum(Kind::a(a, i), Kind::b(b, i), sums[s]);
    }
  }
}

}  // namespace emulator
