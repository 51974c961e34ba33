// Sixteen lanes in plain C++, for any processor, and the rule for those in vectors.
#pragma once

#include <cmath>

#include "onnxruntime/attention_tile.h"
#include "onnxruntime/convert.h"

namespace outrider::engine {
namespace {

struct Plain {
  struct Vector {
    float lane[kLanes];
  };
  static constexpr int kWidth = kLanes;
  static constexpr int kSlab = 1;    // vectors of output that are summed at once
  static constexpr int kScored = 4;  // rows that are scored at once, against four keys
  static constexpr int kMultiplied = 4;  // rows that are multiplied at once with a vector of weights

  template <class F>
  static Vector each(F f) {
    Vector x;
    for (int i = 0; i < kWidth; ++i) x.lane[i] = f(i);
    return x;
  }
  static Vector zero() { return broadcast(0.0f); }
  template <class T>
  static Vector load(const T* x) {
    return each([&](int i) { return to_float(x[i]); });
  }
  static void store(float* to, const Vector& x) {
    for (int i = 0; i < kWidth; ++i) to[i] = x.lane[i];
  }
  static Vector broadcast(float x) {
    return each([&](int) { return x; });
  }
  static Vector fma(const Vector& a, const Vector& b, const Vector& c) {
    return each([&](int i) { return std::fma(a.lane[i], b.lane[i], c.lane[i]); });
  }
  static Vector add(const Vector& a, const Vector& b) {
    return each([&](int i) { return a.lane[i] + b.lane[i]; });
  }
  static Vector mul(const Vector& a, const Vector& b) {
    return each([&](int i) { return a.lane[i] * b.lane[i]; });
  }
  static Vector sub(const Vector& a, const Vector& b) {
    return each([&](int i) { return a.lane[i] - b.lane[i]; });
  }
  static Vector div(const Vector& a, const Vector& b) {
    return each([&](int i) { return a.lane[i] / b.lane[i]; });
  }
  static Vector abs(const Vector& x) {
    return each([&](int i) { return std::fabs(x.lane[i]); });
  }
  static Vector where_negative(const Vector& x, const Vector& then, const Vector& otherwise) {
    return each([&](int i) { return x.lane[i] < 0.0f ? then.lane[i] : otherwise.lane[i]; });
  }
  static Vector max(const Vector& a, const Vector& b) {
    return each([&](int i) { return a.lane[i] > b.lane[i] ? a.lane[i] : b.lane[i]; });
  }
  static float highest(const Vector& x) {
    float top = x.lane[0];
    for (int i = 1; i < kWidth; ++i) top = top < x.lane[i] ? x.lane[i] : top;
    return top;
  }
  // Lanes of x that are larger than `than`, lane 0 in bit 0; NaN is not.
  static std::uint32_t above(const Vector& x, const Vector& than) {
    std::uint32_t bits = 0;
    for (int i = 0; i < kWidth; ++i) bits |= static_cast<std::uint32_t>(x.lane[i] > than.lane[i]) << i;
    return bits;
  }
  static std::uint32_t zeros(const float* x) {
    std::uint32_t bits = 0;
    for (int i = 0; i < kWidth; ++i) bits |= static_cast<std::uint32_t>(x[i] == 0.0f) << i;
    return bits;
  }

  // to[k] = scale * the sum of x[k]'s lanes: attention_tile.h says in what order.
  static void sum_each(const Vector* x, float scale, float* to) {
    for (int k = 0; k < 4; ++k) {
      float quarter[4];
      for (int q = 0; q < 4; ++q) {
        const float* lane = x[k].lane + 4 * q;
        quarter[q] = (lane[0] + lane[2]) + (lane[1] + lane[3]);
      }
      to[k] = ((quarter[0] + quarter[2]) + (quarter[1] + quarter[3])) * scale;
    }
  }
  template <int Rows>
  static void sum_block(const Vector (&x)[Rows][4], float scale, float* const* scores, std::int64_t j) {
    for (int r = 0; r < Rows; ++r) sum_each(x[r], scale, scores[r] + j);
  }

  // exp of numbers up to 0, to about 1e-7 of the result: 2^n * p(r), p the Taylor polynomial on |r| <= ln(2) / 2. Below
  // kExpLowest it is 0.
  static Vector exp(const Vector& x) {
    return each([&](int i) {
      const float number = x.lane[i];
      if (!(number >= kExpLowest)) return number < kExpLowest ? 0.0f : number;  // NaN stays NaN
      const float n = std::nearbyint(number * kLog2E);
      const float r = std::fma(-n, kLn2Low, std::fma(-n, kLn2High, number));
      float p = kExpTaylor[0];
      for (int term = 1; term < kExpTerms; ++term) p = std::fma(p, r, kExpTaylor[term]);
      const float power = from_bits(static_cast<std::uint32_t>(static_cast<std::int32_t>(n) + 127) << 23);
      return p * power;
    });
  }
};

}  // namespace
}  // namespace outrider::engine
