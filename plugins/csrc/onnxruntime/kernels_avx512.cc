// Built with -mavx512f -mavx512dq -mfma, run where the processor has them. Nothing inline of a standard library is used here: a
// linker keeps one copy of an inline function, and might keep this one for all.
#include "onnxruntime/attention_kernel.h"
#include "onnxruntime/lanes_avx512.h"
#include "onnxruntime/product_kernel.h"
#include "onnxruntime/row_kernel.h"
#include "onnxruntime/state_kernel.h"

namespace outrider::engine {

const Kernels& avx512_kernels() {
  static const Kernels kernels = {attention_of<Avx512>(), rows_of<Avx512>(), &multiply_panels<Avx512>, states_of<Avx512>()};
  return kernels;
}

}  // namespace outrider::engine
