// Sixteen lanes in two vectors of AVX2.
#pragma once

#include <immintrin.h>

#include <cstdint>

#include "onnxruntime/attention_tile.h"

namespace outrider::engine {
namespace {

struct Avx2 {
  struct Vector {
    __m256 low, high;
  };
  static constexpr int kWidth = kLanes;
  static constexpr int kSlab = 1;    // vectors of output that are summed at once
  static constexpr int kScored = 1;  // rows that are scored at once, against four keys
  static constexpr int kMultiplied = 4;  // rows that are multiplied at once with a vector of weights

  static Vector zero() { return {_mm256_setzero_ps(), _mm256_setzero_ps()}; }
  static Vector load(const float* x) { return {_mm256_loadu_ps(x), _mm256_loadu_ps(x + 8)}; }
  static Vector load(const Half* x) { return {_mm256_cvtph_ps(halves(x)), _mm256_cvtph_ps(halves(x + 8))}; }
  static Vector load(const Int8* x) { return {widened(x), widened(x + 8)}; }
  static void store(float* to, Vector x) {
    _mm256_storeu_ps(to, x.low);
    _mm256_storeu_ps(to + 8, x.high);
  }
  static Vector broadcast(float x) { return {_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
  static Vector fma(Vector a, Vector b, Vector c) {
    return {_mm256_fmadd_ps(a.low, b.low, c.low), _mm256_fmadd_ps(a.high, b.high, c.high)};
  }
  static Vector add(Vector a, Vector b) { return {_mm256_add_ps(a.low, b.low), _mm256_add_ps(a.high, b.high)}; }
  static Vector mul(Vector a, Vector b) { return {_mm256_mul_ps(a.low, b.low), _mm256_mul_ps(a.high, b.high)}; }
  static Vector sub(Vector a, Vector b) { return {_mm256_sub_ps(a.low, b.low), _mm256_sub_ps(a.high, b.high)}; }
  static Vector div(Vector a, Vector b) { return {_mm256_div_ps(a.low, b.low), _mm256_div_ps(a.high, b.high)}; }
  static Vector abs(Vector x) {
    const __m256 sign = _mm256_set1_ps(-0.0f);
    return {_mm256_andnot_ps(sign, x.low), _mm256_andnot_ps(sign, x.high)};
  }
  static Vector where_negative(Vector x, Vector then, Vector otherwise) {
    const __m256 zeros = _mm256_setzero_ps();
    return {_mm256_blendv_ps(otherwise.low, then.low, _mm256_cmp_ps(x.low, zeros, _CMP_LT_OQ)),
            _mm256_blendv_ps(otherwise.high, then.high, _mm256_cmp_ps(x.high, zeros, _CMP_LT_OQ))};
  }
  static Vector max(Vector a, Vector b) { return {_mm256_max_ps(a.low, b.low), _mm256_max_ps(a.high, b.high)}; }
  static float highest(Vector x) {
    const __m256 both = _mm256_max_ps(x.low, x.high);
    __m128 y = _mm_max_ps(_mm256_castps256_ps128(both), _mm256_extractf128_ps(both, 1));
    y = _mm_max_ps(y, _mm_movehl_ps(y, y));
    return _mm_cvtss_f32(_mm_max_ss(y, _mm_movehdup_ps(y)));
  }
  // Lanes of x that are larger than `than`, lane 0 in bit 0; NaN is not.
  static std::uint32_t above(Vector x, Vector than) {
    return bits(_mm256_cmp_ps(x.low, than.low, _CMP_GT_OQ), _mm256_cmp_ps(x.high, than.high, _CMP_GT_OQ));
  }
  static std::uint32_t zeros(const float* x) {
    const __m256 zero = _mm256_setzero_ps();
    return bits(_mm256_cmp_ps(_mm256_loadu_ps(x), zero, _CMP_EQ_OQ),
                _mm256_cmp_ps(_mm256_loadu_ps(x + 8), zero, _CMP_EQ_OQ));
  }

  // to[k] = scale * the sum of x[k]'s lanes: attention_tile.h says in what order.
  static void sum_each(const Vector* x, float scale, float* to) {
    const __m256 low = by_key(x[0].low, x[1].low, x[2].low, x[3].low);
    const __m256 high = by_key(x[0].high, x[1].high, x[2].high, x[3].high);
    const __m256 sum = _mm256_add_ps(low, high);  // of quarters 0 and 2, and of 1 and 3
    const __m128 total = _mm_add_ps(_mm256_castps256_ps128(sum), _mm256_extractf128_ps(sum, 1));
    _mm_storeu_ps(to, _mm_mul_ps(total, _mm_set1_ps(scale)));
  }

  template <int Rows>
  static void sum_block(const Vector (&x)[Rows][4], float scale, float* const* scores, std::int64_t j) {
    for (int r = 0; r < Rows; ++r) sum_each(x[r], scale, scores[r] + j);
  }

  // exp of numbers up to 0, as lanes_plain.h says.
  static Vector exp(Vector x) { return {half_exp(x.low), half_exp(x.high)}; }

 private:
  static __m256 half_exp(__m256 x) {
    const __m256 bounded = _mm256_max_ps(_mm256_set1_ps(kExpLowest), x);  // NaN stays NaN
    const __m256 n = _mm256_round_ps(_mm256_mul_ps(bounded, _mm256_set1_ps(kLog2E)),
                                     _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    __m256 r = _mm256_fnmadd_ps(n, _mm256_set1_ps(kLn2High), bounded);
    r = _mm256_fnmadd_ps(n, _mm256_set1_ps(kLn2Low), r);
    __m256 p = _mm256_set1_ps(kExpTaylor[0]);
    for (int i = 1; i < kExpTerms; ++i) p = _mm256_fmadd_ps(p, r, _mm256_set1_ps(kExpTaylor[i]));
    const __m256i power = _mm256_slli_epi32(_mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127)), 23);
    const __m256 result = _mm256_mul_ps(p, _mm256_castsi256_ps(power));
    const __m256 tiny = _mm256_cmp_ps(x, _mm256_set1_ps(kExpLowest), _CMP_LT_OQ);  // and minus infinity
    return _mm256_blendv_ps(result, _mm256_setzero_ps(), tiny);
  }
  // In each half, lane k has the sum of x[k]'s quarter there.
  static __m256 by_key(__m256 a, __m256 b, __m256 c, __m256 d) {
    const __m256 ab = _mm256_add_ps(_mm256_unpacklo_ps(a, b), _mm256_unpackhi_ps(a, b));
    const __m256 cd = _mm256_add_ps(_mm256_unpacklo_ps(c, d), _mm256_unpackhi_ps(c, d));
    return _mm256_add_ps(_mm256_castpd_ps(_mm256_unpacklo_pd(_mm256_castps_pd(ab), _mm256_castps_pd(cd))),
                         _mm256_castpd_ps(_mm256_unpackhi_pd(_mm256_castps_pd(ab), _mm256_castps_pd(cd))));
  }
  static std::uint32_t bits(__m256 low, __m256 high) {
    return static_cast<std::uint32_t>(_mm256_movemask_ps(low)) |
           static_cast<std::uint32_t>(_mm256_movemask_ps(high)) << 8;
  }
  static __m128i halves(const void* x) { return _mm_loadu_si128(static_cast<const __m128i*>(x)); }
  static __m256 widened(const Int8* x) {
    return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(x))));
  }
};

}  // namespace
}  // namespace outrider::engine
