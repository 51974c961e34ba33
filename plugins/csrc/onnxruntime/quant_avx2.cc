// Built with -mavx2 -mfma -mf16c, run where the processor has them.
#include "onnxruntime/quant_256.h"

namespace outrider::engine {
namespace {

// The instruction adds two products in 16 bits: all eight of a block for weights below 16 (8 * 2 * 15 * 127 = 30480),
// and two alone for weights of 8 bits, whose magnitudes (at most 128) it takes, the row's integers having their signs.
template <int Bits>
struct PairsDot;

template <>
struct PairsDot<4> {
  static constexpr bool kUnsigned = true;
  using Sum = __m256i;
  static Sum start() { return _mm256_setzero_si256(); }
  static Sum add(Sum sum, __m256i weights, __m256i row) {
    return _mm256_add_epi16(sum, _mm256_maddubs_epi16(weights, row));
  }
  static __m256i total(Sum sum) { return _mm256_madd_epi16(sum, _mm256_set1_epi16(1)); }
};

template <>
struct PairsDot<8> {
  static constexpr bool kUnsigned = false;
  using Sum = __m256i;
  static Sum start() { return _mm256_setzero_si256(); }
  static Sum add(Sum sum, __m256i weights, __m256i row) {
    const __m256i turned = _mm256_xor_si256(weights, _mm256_set1_epi8(-128));
    const __m256i pairs = _mm256_maddubs_epi16(_mm256_abs_epi8(turned), _mm256_sign_epi8(row, turned));
    return _mm256_add_epi32(sum, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
  }
  static __m256i total(Sum sum) { return sum; }
};

}  // namespace

const QuantKernels& quant_avx2() {
  static const QuantKernels kernels = quant_of<InParts<Quant256<PairsDot>>>();
  return kernels;
}

}  // namespace outrider::engine
