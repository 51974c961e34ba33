// For any processor.
#include "onnxruntime/attention_kernel.h"
#include "onnxruntime/lanes_plain.h"
#include "onnxruntime/row_kernel.h"

namespace outrider::engine {

const Kernels& plain_kernels() {
  static const Kernels kernels = {attention_of<Plain>(), rows_of<Plain>()};
  return kernels;
}

}  // namespace outrider::engine
