// Sixteen lanes in four vectors of NEON.
#pragma once

#include <arm_neon.h>

#include <cstdint>

#include "onnxruntime/attention_tile.h"

namespace outrider::engine {
namespace {

struct Neon {
  struct Vector {
    float32x4_t quarter[4];
  };
  static constexpr int kWidth = kLanes;
  static constexpr int kSlab = 1;    // vectors of output that are summed at once
  static constexpr int kScored = 1;  // rows that are scored at once, against four keys
  static constexpr int kMultiplied = 4;  // rows that are multiplied at once with a vector of weights

  template <class F>
  static Vector each(F f) {
    return {{f(0), f(1), f(2), f(3)}};
  }
  static Vector zero() { return broadcast(0.0f); }
  static Vector load(const float* x) {
    return each([&](int q) { return vld1q_f32(x + 4 * q); });
  }
  static Vector load(const Half* x) {
    return each([&](int q) { return vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(&x[4 * q].bits))); });
  }
  static Vector load(const Int8* x) {
    const int8x16_t all = vld1q_s8(&x->value);
    const int16x8_t halves[] = {vmovl_s8(vget_low_s8(all)), vmovl_s8(vget_high_s8(all))};
    return each([&](int q) {
      const int16x8_t half = halves[q / 2];
      return vcvtq_f32_s32(vmovl_s16(q % 2 == 0 ? vget_low_s16(half) : vget_high_s16(half)));
    });
  }
  static void store(float* to, Vector x) {
    for (int q = 0; q < 4; ++q) vst1q_f32(to + 4 * q, x.quarter[q]);
  }
  static Vector broadcast(float x) {
    return each([&](int) { return vdupq_n_f32(x); });
  }
  static Vector fma(Vector a, Vector b, Vector c) {
    return each([&](int q) { return vfmaq_f32(c.quarter[q], a.quarter[q], b.quarter[q]); });
  }
  static Vector add(Vector a, Vector b) {
    return each([&](int q) { return vaddq_f32(a.quarter[q], b.quarter[q]); });
  }
  static Vector mul(Vector a, Vector b) {
    return each([&](int q) { return vmulq_f32(a.quarter[q], b.quarter[q]); });
  }
  static Vector sub(Vector a, Vector b) {
    return each([&](int q) { return vsubq_f32(a.quarter[q], b.quarter[q]); });
  }
  static Vector div(Vector a, Vector b) {
    return each([&](int q) { return vdivq_f32(a.quarter[q], b.quarter[q]); });
  }
  static Vector abs(Vector x) {
    return each([&](int q) { return vabsq_f32(x.quarter[q]); });
  }
  static Vector where_negative(Vector x, Vector then, Vector otherwise) {
    return each([&](int q) { return vbslq_f32(vcltzq_f32(x.quarter[q]), then.quarter[q], otherwise.quarter[q]); });
  }
  // b where one of them is NaN: vmaxq_f32 gives NaN.
  static Vector max(Vector a, Vector b) {
    return each([&](int q) { return larger(a.quarter[q], b.quarter[q]); });
  }
  static float highest(Vector x) {
    return vmaxvq_f32(larger(larger(x.quarter[0], x.quarter[1]), larger(x.quarter[2], x.quarter[3])));
  }
  // Lanes of x that are larger than `than`, lane 0 in bit 0; NaN is not.
  static std::uint32_t above(Vector x, Vector than) {
    return bits([&](int q) { return vcgtq_f32(x.quarter[q], than.quarter[q]); });
  }
  static std::uint32_t zeros(const float* x) {
    return bits([&](int q) { return vceqzq_f32(vld1q_f32(x + 4 * q)); });
  }

  // to[k] = scale * the sum of x[k]'s lanes: attention_tile.h says in what order.
  static void sum_each(const Vector* x, float scale, float* to) {
    const Vector sums = each([&](int q) { return by_key(x, q); });
    const float32x4_t even = vaddq_f32(sums.quarter[0], sums.quarter[2]);
    const float32x4_t odd = vaddq_f32(sums.quarter[1], sums.quarter[3]);
    vst1q_f32(to, vmulq_n_f32(vaddq_f32(even, odd), scale));
  }

  template <int Rows>
  static void sum_block(const Vector (&x)[Rows][4], float scale, float* const* scores, std::int64_t j) {
    for (int r = 0; r < Rows; ++r) sum_each(x[r], scale, scores[r] + j);
  }

  // exp of numbers up to 0, as lanes_plain.h says.
  static Vector exp(Vector x) {
    return each([&](int q) { return quarter_exp(x.quarter[q]); });
  }

 private:
  static float32x4_t larger(float32x4_t a, float32x4_t b) { return vbslq_f32(vcgtq_f32(a, b), a, b); }

  static float32x4_t quarter_exp(float32x4_t x) {
    const float32x4_t lowest = vdupq_n_f32(kExpLowest);
    const float32x4_t bounded = larger(lowest, x);  // NaN stays NaN
    const float32x4_t n = vrndnq_f32(vmulq_n_f32(bounded, kLog2E));
    float32x4_t r = vfmsq_f32(bounded, n, vdupq_n_f32(kLn2High));
    r = vfmsq_f32(r, n, vdupq_n_f32(kLn2Low));
    float32x4_t p = vdupq_n_f32(kExpTaylor[0]);
    for (int i = 1; i < kExpTerms; ++i) p = vfmaq_f32(vdupq_n_f32(kExpTaylor[i]), p, r);
    const int32x4_t power = vshlq_n_s32(vaddq_s32(vcvtq_s32_f32(n), vdupq_n_s32(127)), 23);
    const float32x4_t result = vmulq_f32(p, vreinterpretq_f32_s32(power));
    return vbslq_f32(vcltq_f32(x, lowest), vdupq_n_f32(0.0f), result);  // minus infinity too
  }
  // Lane k has the sum of x[k]'s quarter q.
  static float32x4_t by_key(const Vector* x, int q) {
    const float32x4_t a = x[0].quarter[q], b = x[1].quarter[q], c = x[2].quarter[q], d = x[3].quarter[q];
    const float64x2_t ab = vreinterpretq_f64_f32(vaddq_f32(vzip1q_f32(a, b), vzip2q_f32(a, b)));
    const float64x2_t cd = vreinterpretq_f64_f32(vaddq_f32(vzip1q_f32(c, d), vzip2q_f32(c, d)));
    return vaddq_f32(vreinterpretq_f32_f64(vzip1q_f64(ab, cd)), vreinterpretq_f32_f64(vzip2q_f64(ab, cd)));
  }
  template <class F>
  static std::uint32_t bits(F mask) {
    constexpr std::uint32_t kBit[4] = {1, 2, 4, 8};
    std::uint32_t all = 0;
    for (int q = 0; q < 4; ++q) all |= vaddvq_u32(vandq_u32(mask(q), vld1q_u32(kBit))) << (4 * q);
    return all;
  }
};

}  // namespace
}  // namespace outrider::engine
