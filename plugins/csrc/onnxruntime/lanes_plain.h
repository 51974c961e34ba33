// Lanes in plain C++: for processors of other kinds, and for heads that no vector divides.
#pragma once

#include <cmath>

#include "onnxruntime/attention_tile.h"
#include "onnxruntime/convert.h"

namespace outrider::engine {
namespace {

template <int Width>
struct Plain {
  struct Vector {
    float lane[Width];
  };
  static constexpr int kWidth = Width;
  static constexpr int kSlab = Width == 1 ? 1 : 2;
  static constexpr int kScored = 4;

  template <class F>
  static Vector each(F f) {
    Vector x;
    for (int i = 0; i < Width; ++i) x.lane[i] = f(i);
    return x;
  }
  static Vector zero() { return broadcast(0.0f); }
  template <class T>
  static Vector load(const T* x) {
    return each([&](int i) { return to_float(x[i]); });
  }
  static void store(float* to, const Vector& x) {
    for (int i = 0; i < Width; ++i) to[i] = x.lane[i];
  }
  static Vector broadcast(float x) {
    return each([&](int) { return x; });
  }
  static Vector fma(const Vector& a, const Vector& b, const Vector& c) {
    return each([&](int i) { return a.lane[i] * b.lane[i] + c.lane[i]; });
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
    for (int i = 1; i < Width; ++i) top = top < x.lane[i] ? x.lane[i] : top;
    return top;
  }
  static std::uint32_t above(const Vector& x, const Vector& than) {
    std::uint32_t bits = 0;
    for (int i = 0; i < Width; ++i) bits |= static_cast<std::uint32_t>(x.lane[i] > than.lane[i]) << i;
    return bits;
  }
  static std::uint32_t zeros(const float* x) {
    std::uint32_t bits = 0;
    for (int i = 0; i < Width; ++i) bits |= static_cast<std::uint32_t>(x[i] == 0.0f) << i;
    return bits;
  }
  static void sum_each(const Vector* x, float scale, float* to) {
    for (int k = 0; k < 4; ++k) {
      float sum = 0.0f;
      for (int i = 0; i < Width; ++i) sum += x[k].lane[i];
      to[k] = sum * scale;
    }
  }
  template <int Rows>
  static void sum_block(const Vector (&x)[Rows][4], float scale, float* const* scores, std::int64_t j) {
    for (int r = 0; r < Rows; ++r) sum_each(x[r], scale, scores[r] + j);
  }

  static Vector exp(const Vector& x) {
    return each([&](int i) { return std::exp(x.lane[i]); });
  }
};

}  // namespace
}  // namespace outrider::engine
