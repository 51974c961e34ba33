// Sixteen lanes of AVX-512.
#pragma once

#include <immintrin.h>

#include <cstdint>

#include "onnxruntime/attention_tile.h"

namespace outrider::engine {
namespace {

struct Avx512 {
  using Vector = __m512;
  static constexpr int kWidth = kLanes;
  static constexpr int kSlab = 4;  // vectors of output that are summed at once: 4 rows of them and the values fit
  static constexpr int kScored = 4;  // rows that are scored at once, against four keys
  static constexpr int kMultiplied = 8;  // rows that are multiplied at once with a vector of weights

  static Vector zero() { return _mm512_setzero_ps(); }
  static Vector load(const float* x) { return _mm512_loadu_ps(x); }
  static Vector load(const Half* x) { return _mm512_cvtph_ps(half(x)); }
  static Vector load(const Int8* x) {
    return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(x))));
  }
  static void store(float* to, Vector x) { _mm512_storeu_ps(to, x); }
  static Vector broadcast(float x) { return _mm512_set1_ps(x); }
  static Vector fma(Vector a, Vector b, Vector c) { return _mm512_fmadd_ps(a, b, c); }
  static Vector add(Vector a, Vector b) { return _mm512_add_ps(a, b); }
  static Vector mul(Vector a, Vector b) { return _mm512_mul_ps(a, b); }
  static Vector sub(Vector a, Vector b) { return _mm512_sub_ps(a, b); }
  static Vector div(Vector a, Vector b) { return _mm512_div_ps(a, b); }
  static Vector abs(Vector x) { return _mm512_abs_ps(x); }
  static Vector where_negative(Vector x, Vector then, Vector otherwise) {
    return _mm512_mask_blend_ps(_mm512_cmp_ps_mask(x, zero(), _CMP_LT_OQ), otherwise, then);
  }
  static Vector max(Vector a, Vector b) { return _mm512_max_ps(a, b); }
  static float highest(Vector x) { return _mm512_reduce_max_ps(x); }
  // Lanes of x that are larger than `than`, lane 0 in bit 0; NaN is not.
  static std::uint32_t above(Vector x, Vector than) {
    return _mm512_cmp_ps_mask(x, than, _CMP_GT_OQ);
  }
  static std::uint32_t zeros(const float* x) {
    return _mm512_cmp_ps_mask(_mm512_loadu_ps(x), _mm512_setzero_ps(), _CMP_EQ_OQ);
  }

  // to[k] = scale * the sum of x[k]'s lanes: attention_tile.h says in what order.
  static void sum_each(const Vector* x, float scale, float* to) {
    const __m512 abcd = by_key(x);
    const __m256 half = _mm256_add_ps(_mm512_castps512_ps256(abcd),
                                      _mm256_castpd_ps(_mm512_extractf64x4_pd(_mm512_castps_pd(abcd), 1)));
    const __m128 quarter = _mm_add_ps(_mm256_castps256_ps128(half), _mm256_extractf128_ps(half, 1));
    _mm_storeu_ps(to, _mm_mul_ps(quarter, _mm_set1_ps(scale)));
  }

  // scores[r][j + i] = scale * the sum of x[r][i]'s lanes, each summed as `sum_each` does.
  template <int Rows>
  static void sum_block(const Vector (&x)[Rows][4], float scale, float* const* scores, std::int64_t j) {
    if constexpr (Rows == 4) {
      const Vector ab = halves(by_key(x[0]), by_key(x[1])), cd = halves(by_key(x[2]), by_key(x[3]));
      const Vector sums = _mm512_mul_ps(add(_mm512_shuffle_f32x4(ab, cd, 0x88), _mm512_shuffle_f32x4(ab, cd, 0xdd)),
                                        broadcast(scale));
      _mm_storeu_ps(scores[0] + j, _mm512_castps512_ps128(sums));
      _mm_storeu_ps(scores[1] + j, _mm512_extractf32x4_ps(sums, 1));
      _mm_storeu_ps(scores[2] + j, _mm512_extractf32x4_ps(sums, 2));
      _mm_storeu_ps(scores[3] + j, _mm512_extractf32x4_ps(sums, 3));
    } else {
      for (int r = 0; r < Rows; ++r) sum_each(x[r], scale, scores[r] + j);
    }
  }

  // exp of numbers up to 0, as lanes_plain.h says.
  static Vector exp(Vector x) {
    const Vector bounded = max(broadcast(kExpLowest), x);  // NaN stays NaN
    const Vector n = _mm512_roundscale_ps(_mm512_mul_ps(bounded, broadcast(kLog2E)), 8);
    Vector r = _mm512_fnmadd_ps(n, broadcast(kLn2High), bounded);
    r = _mm512_fnmadd_ps(n, broadcast(kLn2Low), r);
    Vector p = broadcast(kExpTaylor[0]);
    for (int i = 1; i < kExpTerms; ++i) p = fma(p, r, broadcast(kExpTaylor[i]));
    const __mmask16 tiny = _mm512_cmp_ps_mask(x, broadcast(kExpLowest), _CMP_LT_OQ);  // and minus infinity
    return _mm512_mask_blend_ps(tiny, _mm512_scalef_ps(p, n), zero());
  }

 private:
  // Four vectors as one, in whose quarters lane k has what is left to sum of x[k].
  static Vector by_key(const Vector* x) {
    const Vector ab = add(_mm512_unpacklo_ps(x[0], x[1]), _mm512_unpackhi_ps(x[0], x[1]));
    const Vector cd = add(_mm512_unpacklo_ps(x[2], x[3]), _mm512_unpackhi_ps(x[2], x[3]));
    return add(_mm512_castpd_ps(_mm512_unpacklo_pd(_mm512_castps_pd(ab), _mm512_castps_pd(cd))),
               _mm512_castpd_ps(_mm512_unpackhi_pd(_mm512_castps_pd(ab), _mm512_castps_pd(cd))));
  }
  // The first and third quarters of each, and the second and fourth, summed: two of a, two of b.
  static Vector halves(Vector a, Vector b) {
    return add(_mm512_shuffle_f32x4(a, b, 0x44), _mm512_shuffle_f32x4(a, b, 0xee));
  }
  static __m256i half(const void* x) { return _mm256_loadu_si256(static_cast<const __m256i*>(x)); }
};

}  // namespace
}  // namespace outrider::engine
