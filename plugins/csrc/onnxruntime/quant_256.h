// Products in vectors of 256 bits, which hold a quarter of a group. `Dot` adds the products of four inputs: quant_avx2.cc and
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

// `Dot<Bits>` has kUnsigned, whether it takes integers as they are stored, or with their highest bit flipped, which
// makes them signed; and Sum, start(), add(sum, integers, row's integers) and total(sum), eight int32.
template <template <int> class Dot>
struct Quant256 {
  static constexpr int kRows = 4, kColumns = 8;

  template <int Rows, int Bits, bool Wide, bool Minimums>
  static void columns(const std::uint8_t* packed, int first, std::int64_t blocks, const QuantBlock* x,
                      std::int64_t rows, float* to, std::int64_t stride, const Ahead& ahead) {
    using Dots = Dot<Bits>;
    constexpr int kQuads = kBlock / kQuad, kQuadBytes = kGroup * kQuad, kScale = kGroup * (Wide ? 4 : 2);
    // What flipping the highest bit subtracts; of weights without minimums that is what was added to them.
    constexpr int kTurned = Dots::kUnsigned ? 0 : 1 << (Bits - 1);
    const __m256i nibble = _mm256_set1_epi8(15);
    __m256 sums[Rows];
    for (int r = 0; r < Rows; ++r) sums[r] = _mm256_setzero_ps();
    for (std::int64_t block = 0; block < blocks; ++block, x += rows) {
      ahead.fetch(block);
      typename Dots::Sum integers[Rows];
      for (int r = 0; r < Rows; ++r) integers[r] = Dots::start();
      const auto add = [&](int quad, __m256i weights) __attribute__((always_inline)) {
        for (int r = 0; r < Rows; ++r) {
          std::int32_t four;
          std::memcpy(&four, x[r].integers + quad * kQuad, sizeof four);
          integers[r] = Dots::add(integers[r], weights, _mm256_set1_epi32(four));
        }
      };
      const auto load = [&](int quad) __attribute__((always_inline)) {
        return _mm256_loadu_si256(
            reinterpret_cast<const __m256i*>(packed + quad * kQuadBytes + first * kQuad));
      };
      if constexpr (Bits == 4) {
#pragma GCC unroll 4
        for (int quad = 0; quad < kQuads / 2; ++quad) {
          const __m256i both = load(quad);
          add(quad, _mm256_and_si256(both, nibble));
          add(quad + kQuads / 2, _mm256_and_si256(_mm256_srli_epi16(both, 4), nibble));
        }
      } else {
#pragma GCC unroll 8
        for (int quad = 0; quad < kQuads; ++quad) add(quad, load(quad));
      }
      packed += kBlock * kGroup * Bits / 8;
      const __m256 scales = load_scales<Wide>(packed + first * kScale / kGroup);
      packed += kScale;
      for (int r = 0; r < Rows; ++r) {
        __m256i sum = Dots::total(integers[r]);
        if constexpr (kTurned == 0 && !Minimums) sum = _mm256_add_epi32(sum, _mm256_set1_epi32(x[r].correction));
        if constexpr (kTurned != 0 && Minimums) sum = _mm256_add_epi32(sum, _mm256_set1_epi32(kTurned * x[r].sum));
        const __m256 scale = _mm256_mul_ps(scales, _mm256_set1_ps(x[r].scale));
        sums[r] = _mm256_fmadd_ps(_mm256_cvtepi32_ps(sum), scale, sums[r]);
      }
      if constexpr (Minimums) {
        const __m256 minimums = load_scales<Wide>(packed + first * kScale / kGroup);
        packed += kScale;
        for (int r = 0; r < Rows; ++r)
          sums[r] = _mm256_fmadd_ps(minimums, _mm256_set1_ps(x[r].scaled_sum), sums[r]);
      }
    }
    for (int r = 0; r < Rows; ++r) _mm256_storeu_ps(to + r * stride, sums[r]);
  }
};

}  // namespace
}  // namespace outrider::engine
