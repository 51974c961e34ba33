// Built with -mavx2 -mfma -mf16c -mavxvnni, run where the processor has them.
#include "onnxruntime/quant_256.h"

namespace outrider::engine {
namespace {

template <int Bits>
struct FoursDot {
  static constexpr bool kUnsigned = true;
  using Sum = __m256i;
  static Sum start() { return _mm256_setzero_si256(); }
  static Sum add(Sum sum, __m256i weights, __m256i row) { return _mm256_dpbusd_avx_epi32(sum, weights, row); }
  static __m256i total(Sum sum) { return sum; }
};

}  // namespace

const QuantKernels& quant_avxvnni() {
  static const QuantKernels kernels = quant_of<InParts<Quant256<FoursDot>>>();
  return kernels;
}

}  // namespace outrider::engine
