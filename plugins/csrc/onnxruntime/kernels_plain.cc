// For any processor.
#include "onnxruntime/attention_kernel.h"
#include "onnxruntime/lanes_plain.h"
#include "onnxruntime/product_kernel.h"
#include "onnxruntime/row_kernel.h"
#include "onnxruntime/state_kernel.h"

namespace outrider::engine {

const Kernels& plain_kernels() {
  static const Kernels kernels = {attention_of<Plain>(), rows_of<Plain>(), &multiply_panels<Plain>, states_of<Plain>()};
  return kernels;
}

}  // namespace outrider::engine
