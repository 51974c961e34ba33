// For any processor of arm64, and run where quant_neon.cc is.
#include "onnxruntime/attention_kernel.h"
#include "onnxruntime/lanes_neon.h"
#include "onnxruntime/product_kernel.h"
#include "onnxruntime/row_kernel.h"
#include "onnxruntime/state_kernel.h"

namespace outrider::engine {

const Kernels& neon_kernels() {
  static const Kernels kernels = {attention_of<Neon>(), rows_of<Neon>(), &multiply_panels<Neon>, states_of<Neon>()};
  return kernels;
}

}  // namespace outrider::engine
