// Built with -mavx2 -mfma -mf16c, run where the processor has them. Nothing inline of a standard library is used here: a
// linker keeps one copy of an inline function, and might keep this one for all.
#include "onnxruntime/attention_kernel.h"
#include "onnxruntime/lanes_avx2.h"
#include "onnxruntime/product_kernel.h"
#include "onnxruntime/row_kernel.h"
#include "onnxruntime/state_kernel.h"

namespace outrider::engine {

const Kernels& avx2_kernels() {
  static const Kernels kernels = {attention_of<Avx2>(), rows_of<Avx2>(), &multiply_panels<Avx2>, states_of<Avx2>()};
  return kernels;
}

}  // namespace outrider::engine
