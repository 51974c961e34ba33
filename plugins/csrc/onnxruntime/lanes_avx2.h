// Eight lanes of AVX2.
#pragma once

#include <immintrin.h>

#include <cstdint>

#include "onnxruntime/attention_tile.h"

namespace outrider::engine {
namespace {

struct Avx2 {
  using Vector = __m256;
  static constexpr int kWidth = 8;
  static constexpr int kSlab = 2;
  static constexpr int kScored = 2;  // rows that are scored at once, against four keys

  static Vector zero() { return _mm256_setzero_ps(); }
  static Vector load(const float* x) { return _mm256_loadu_ps(x); }
  static Vector load(const Half* x) { return _mm256_cvtph_ps(half(x)); }
  static Vector load(const BFloat16* x) {
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(half(x)), 16));
  }
  static void store(float* to, Vector x) { _mm256_storeu_ps(to, x); }
  static Vector broadcast(float x) { return _mm256_set1_ps(x); }
  static Vector fma(Vector a, Vector b, Vector c) { return _mm256_fmadd_ps(a, b, c); }
  static Vector add(Vector a, Vector b) { return _mm256_add_ps(a, b); }
  static Vector mul(Vector a, Vector b) { return _mm256_mul_ps(a, b); }
  static Vector sub(Vector a, Vector b) { return _mm256_sub_ps(a, b); }
  static Vector div(Vector a, Vector b) { return _mm256_div_ps(a, b); }
  static Vector abs(Vector x) { return _mm256_andnot_ps(broadcast(-0.0f), x); }
  static Vector where_negative(Vector x, Vector then, Vector otherwise) {
    return _mm256_blendv_ps(otherwise, then, _mm256_cmp_ps(x, zero(), _CMP_LT_OQ));
  }
  static Vector max(Vector a, Vector b) { return _mm256_max_ps(a, b); }
  static float highest(Vector x) {
    __m128 y = _mm_max_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
    y = _mm_max_ps(y, _mm_movehl_ps(y, y));
    return _mm_cvtss_f32(_mm_max_ss(y, _mm_movehdup_ps(y)));
  }
  // Lanes of x that are larger than `than`, lane 0 in bit 0; NaN is not.
  static std::uint32_t above(Vector x, Vector than) {
    return static_cast<std::uint32_t>(_mm256_movemask_ps(_mm256_cmp_ps(x, than, _CMP_GT_OQ)));
  }
  static std::uint32_t zeros(const float* x) {
    return static_cast<std::uint32_t>(
        _mm256_movemask_ps(_mm256_cmp_ps(_mm256_loadu_ps(x), _mm256_setzero_ps(), _CMP_EQ_OQ)));
  }

  // Lane i of each half joins lane i + 2, then neighbours join, then halves.
  static void sum_each(const Vector* x, float scale, float* to) {
    const __m256 ab = add(_mm256_unpacklo_ps(x[0], x[1]), _mm256_unpackhi_ps(x[0], x[1]));
    const __m256 cd = add(_mm256_unpacklo_ps(x[2], x[3]), _mm256_unpackhi_ps(x[2], x[3]));
    const __m256 abcd = add(_mm256_castpd_ps(_mm256_unpacklo_pd(_mm256_castps_pd(ab), _mm256_castps_pd(cd))),
                            _mm256_castpd_ps(_mm256_unpackhi_pd(_mm256_castps_pd(ab), _mm256_castps_pd(cd))));
    const __m128 half = _mm_add_ps(_mm256_castps256_ps128(abcd), _mm256_extractf128_ps(abcd, 1));
    _mm_storeu_ps(to, _mm_mul_ps(half, _mm_set1_ps(scale)));
  }

  template <int Rows>
  static void sum_block(const Vector (&x)[Rows][4], float scale, float* const* scores, std::int64_t j) {
    for (int r = 0; r < Rows; ++r) sum_each(x[r], scale, scores[r] + j);
  }

  // exp of numbers up to 0, to about 1e-7 of the result: 2^n * p(r), p the Taylor polynomial on |r| <= ln(2) / 2.
  static Vector exp(Vector x) {
    const Vector bounded = max(x, broadcast(-87.0f));
    const Vector n =
        _mm256_round_ps(_mm256_mul_ps(bounded, broadcast(1.44269504f)), _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    Vector r = _mm256_fnmadd_ps(n, broadcast(0.693359375f), bounded);
    r = _mm256_fnmadd_ps(n, broadcast(-2.12194440e-4f), r);
    Vector p = broadcast(1.0f / 720);
    constexpr float kLower[] = {1.0f / 120, 1.0f / 24, 1.0f / 6, 0.5f, 1.0f, 1.0f};
    for (const float c : kLower) p = fma(p, r, broadcast(c));
    const __m256i power = _mm256_slli_epi32(_mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127)), 23);
    const Vector result = _mm256_mul_ps(p, _mm256_castsi256_ps(power));
    return _mm256_blendv_ps(result, zero(), _mm256_cmp_ps(x, broadcast(-87.0f), _CMP_LT_OQ));  // and minus infinity
  }

 private:
  static __m128i half(const void* x) { return _mm_loadu_si128(static_cast<const __m128i*>(x)); }
};

}  // namespace
}  // namespace outrider::engine
