// Built with -mavx512f -mavx512bw -mavx512vnni, run where the processor has them.
#include <immintrin.h>

#include "onnxruntime/quant_tiles.h"

namespace outrider::engine {
namespace {

template <bool Wide>
__m512 load_scales(const std::uint8_t* from) {
  if constexpr (Wide) return _mm512_loadu_ps(from);
  return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)));
}

// A group is two vectors: each quad of a row, spread over a vector, is multiplied with both.
struct Avx512Quant {
  static constexpr int kRows = 4;

  template <int Rows, int Bits, bool Wide, bool Minimums>
  static void tile(const std::uint8_t* packed, std::int64_t blocks, const QuantBlock* x, std::int64_t rows, float* to,
                   std::int64_t stride, const Ahead& ahead) {
    constexpr int kQuads = kBlock / kQuad, kHalves = 2, kColumns = kGroup / kHalves, kWidth = Wide ? 4 : 2;
    const __m512i nibble = _mm512_set1_epi8(15);
    __m512 sums[Rows][kHalves];
    for (int r = 0; r < Rows; ++r) sums[r][0] = sums[r][1] = _mm512_setzero_ps();
    for (std::int64_t block = 0; block < blocks; ++block, x += rows) {
      ahead.fetch(block);
      __m512i integers[Rows][kHalves];
      for (int r = 0; r < Rows; ++r)
        integers[r][0] = integers[r][1] = Minimums ? _mm512_setzero_si512() : _mm512_set1_epi32(x[r].correction);
      const auto add = [&](int quad, const __m512i (&weights)[kHalves]) __attribute__((always_inline)) {
        for (int r = 0; r < Rows; ++r) {
          std::int32_t four;
          std::memcpy(&four, x[r].integers + quad * kQuad, sizeof four);
          const __m512i row = _mm512_set1_epi32(four);
          for (int h = 0; h < kHalves; ++h) integers[r][h] = _mm512_dpbusd_epi32(integers[r][h], weights[h], row);
        }
      };
      if constexpr (Bits == 4) {
#pragma GCC unroll 4
        for (int quad = 0; quad < kQuads / 2; ++quad) {
          __m512i low[kHalves], high[kHalves];
          for (int h = 0; h < kHalves; ++h) {
            const __m512i both = _mm512_loadu_si512(packed + (quad * kHalves + h) * 64);
            low[h] = _mm512_and_si512(both, nibble);
            high[h] = _mm512_and_si512(_mm512_srli_epi16(both, 4), nibble);
          }
          add(quad, low);
          add(quad + kQuads / 2, high);
        }
      } else {
#pragma GCC unroll 8
        for (int quad = 0; quad < kQuads; ++quad) {
          __m512i weights[kHalves];
          for (int h = 0; h < kHalves; ++h) weights[h] = _mm512_loadu_si512(packed + (quad * kHalves + h) * 64);
          add(quad, weights);
        }
      }
      packed += kBlock * kGroup * Bits / 8;
      for (int h = 0; h < kHalves; ++h) {
        const __m512 scales = load_scales<Wide>(packed + h * kColumns * kWidth);
        for (int r = 0; r < Rows; ++r) {
          const __m512 scale = _mm512_mul_ps(scales, _mm512_set1_ps(x[r].scale));
          sums[r][h] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(integers[r][h]), scale, sums[r][h]);
        }
      }
      packed += kGroup * kWidth;
      if constexpr (Minimums) {
        for (int h = 0; h < kHalves; ++h) {
          const __m512 minimums = load_scales<Wide>(packed + h * kColumns * kWidth);
          for (int r = 0; r < Rows; ++r)
            sums[r][h] = _mm512_fmadd_ps(minimums, _mm512_set1_ps(x[r].scaled_sum), sums[r][h]);
        }
        packed += kGroup * kWidth;
      }
    }
    for (int r = 0; r < Rows; ++r)
      for (int h = 0; h < kHalves; ++h) _mm512_storeu_ps(to + r * stride + h * kColumns, sums[r][h]);
  }
};

}  // namespace

const QuantKernels& quant_avx512() {
  static const QuantKernels kernels = quant_of<Avx512Quant>();
  return kernels;
}

}  // namespace outrider::engine
