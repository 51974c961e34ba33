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

struct Avx512Quant {
  static constexpr int kRows = 8;

  template <int Rows, int Bits, bool Wide, bool Minimums>
  static void tile(const std::uint8_t* packed, const TileRows& x, float* to, std::int64_t stride) {
    constexpr int kQuads = kBlock / kQuad, kScale = kGroup * (Wide ? 4 : 2);
    constexpr int kOffset = Minimums ? 0 : 1 << (Bits - 1);
    // Sums of one or two rows wait for one another's products; a second sum for each does not.
    constexpr int kChains = Rows <= 2 ? 2 : 1;
    const __m512i nibble = _mm512_set1_epi8(15);
    __m512 sums[Rows];
    for (int r = 0; r < Rows; ++r) sums[r] = _mm512_setzero_ps();
    for (std::int64_t block = 0; block < x.blocks; ++block) {
      __m512i integers[Rows][kChains];
      for (int r = 0; r < Rows; ++r) {
        integers[r][0] =
            kOffset == 0 ? _mm512_setzero_si512() : _mm512_set1_epi32(-kOffset * x.sums[r * x.blocks + block]);
        if constexpr (kChains == 2) integers[r][1] = _mm512_setzero_si512();
      }
      const auto add = [&](int quad, __m512i weights) {
        for (int r = 0; r < Rows; ++r) {
          std::int32_t four;
          std::memcpy(&four, x.integers + r * x.inputs + block * kBlock + quad * kQuad, sizeof four);
          auto& sum = integers[r][quad % kChains];
          sum = _mm512_dpbusd_epi32(sum, weights, _mm512_set1_epi32(four));
        }
      };
      if constexpr (Bits == 4) {
        for (int quad = 0; quad < kQuads / 2; ++quad) {
          const __m512i both = _mm512_loadu_si512(packed + quad * 64);
          add(quad, _mm512_and_si512(both, nibble));
          add(quad + kQuads / 2, _mm512_and_si512(_mm512_srli_epi16(both, 4), nibble));
        }
        packed += kQuads / 2 * 64;
      } else {
        for (int quad = 0; quad < kQuads; ++quad) add(quad, _mm512_loadu_si512(packed + quad * 64));
        packed += kQuads * 64;
      }
      const __m512 scales = load_scales<Wide>(packed);
      packed += kScale;
      for (int r = 0; r < Rows; ++r) {
        __m512i sum = integers[r][0];
        if constexpr (kChains == 2) sum = _mm512_add_epi32(sum, integers[r][1]);
        const __m512 scale = _mm512_mul_ps(scales, _mm512_set1_ps(x.scales[r * x.blocks + block]));
        sums[r] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(sum), scale, sums[r]);
      }
      if constexpr (Minimums) {
        const __m512 minimums = load_scales<Wide>(packed);
        packed += kScale;
        for (int r = 0; r < Rows; ++r)
          sums[r] = _mm512_fmadd_ps(minimums, _mm512_set1_ps(x.scaled_sums[r * x.blocks + block]), sums[r]);
      }
    }
    for (int r = 0; r < Rows; ++r) _mm512_storeu_ps(to + r * stride, sums[r]);
  }
};

}  // namespace

const QuantKernels& quant_avx512() {
  static const QuantKernels kernels = quant_of<Avx512Quant>();
  return kernels;
}

}  // namespace outrider::engine
