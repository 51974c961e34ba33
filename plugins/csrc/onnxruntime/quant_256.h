// Products in vectors of 256 bits, which hold half a group. `Dot` adds the products of four inputs: quant_avx2.cc and
// quant_avxvnni.cc.
#pragma once

#include <immintrin.h>

#include "onnxruntime/quant_tiles.h"

namespace outrider::engine {
namespace {  // each instruction set has its own copy

template <bool Wide>
__m256 load_scales(const std::uint8_t* from) {
  if constexpr (Wide) return _mm256_loadu_ps(reinterpret_cast<const float*>(from));
  return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
}

// `Dot<Bits>` has kUnsigned, whether it takes integers as they are stored, or with their highest bit turned over, which
// makes them signed; and Sum, start(), add(sum, integers, row's integers) and total(sum), eight int32.
template <template <int> class Dot>
struct Quant256 {
  static constexpr int kRows = 4;

  template <int Rows, int Bits, bool Wide, bool Minimums>
  static void tile(const std::uint8_t* packed, const TileRows& x, float* to, std::int64_t stride) {
    half<Rows, Bits, Wide, Minimums>(packed, 0, x, to, stride);
    half<Rows, Bits, Wide, Minimums>(packed, 1, x, to + kGroup / 2, stride);
  }

 private:
  template <int Rows, int Bits, bool Wide, bool Minimums>
  static void half(const std::uint8_t* packed, int which, const TileRows& x, float* to, std::int64_t stride) {
    using Dots = Dot<Bits>;
    constexpr int kQuads = kBlock / kQuad, kScale = kGroup * (Wide ? 4 : 2);
    // What integers have too much of, and what turning their highest bit over takes away.
    constexpr int kOffset = (Minimums ? 0 : 1 << (Bits - 1)) - (Dots::kUnsigned ? 0 : 1 << (Bits - 1));
    const __m256i nibble = _mm256_set1_epi8(15);
    __m256 sums[Rows];
    for (int r = 0; r < Rows; ++r) sums[r] = _mm256_setzero_ps();
    for (std::int64_t block = 0; block < x.blocks; ++block) {
      typename Dots::Sum integers[Rows];
      for (int r = 0; r < Rows; ++r) integers[r] = Dots::start();
      const auto add = [&](int quad, __m256i weights) {
        for (int r = 0; r < Rows; ++r) {
          std::int32_t four;
          std::memcpy(&four, x.integers + r * x.inputs + block * kBlock + quad * kQuad, sizeof four);
          integers[r] = Dots::add(integers[r], weights, _mm256_set1_epi32(four));
        }
      };
      const auto load = [&](int quad) {
        return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(packed + quad * 64 + which * 32));
      };
      if constexpr (Bits == 4) {
        for (int quad = 0; quad < kQuads / 2; ++quad) {
          const __m256i both = load(quad);
          add(quad, _mm256_and_si256(both, nibble));
          add(quad + kQuads / 2, _mm256_and_si256(_mm256_srli_epi16(both, 4), nibble));
        }
        packed += kQuads / 2 * 64;
      } else {
        for (int quad = 0; quad < kQuads; ++quad) add(quad, load(quad));
        packed += kQuads * 64;
      }
      const __m256 scales = load_scales<Wide>(packed + which * kScale / 2);
      packed += kScale;
      for (int r = 0; r < Rows; ++r) {
        __m256i sum = Dots::total(integers[r]);
        if constexpr (kOffset != 0)
          sum = _mm256_add_epi32(sum, _mm256_set1_epi32(-kOffset * x.sums[r * x.blocks + block]));
        const __m256 scale = _mm256_mul_ps(scales, _mm256_set1_ps(x.scales[r * x.blocks + block]));
        sums[r] = _mm256_fmadd_ps(_mm256_cvtepi32_ps(sum), scale, sums[r]);
      }
      if constexpr (Minimums) {
        const __m256 minimums = load_scales<Wide>(packed + which * kScale / 2);
        packed += kScale;
        for (int r = 0; r < Rows; ++r)
          sums[r] = _mm256_fmadd_ps(minimums, _mm256_set1_ps(x.scaled_sums[r * x.blocks + block]), sums[r]);
      }
    }
    for (int r = 0; r < Rows; ++r) _mm256_storeu_ps(to + r * stride, sums[r]);
  }
};

}  // namespace
}  // namespace outrider::engine
