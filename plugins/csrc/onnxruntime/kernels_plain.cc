// For any processor.
#include "onnxruntime/attention_kernel.h"
#include "onnxruntime/lanes_plain.h"
#include "onnxruntime/row_kernel.h"

namespace outrider::engine {

const Kernels& plain_kernels() {
  static const Kernels kernels = {attention_of<Plain<4>>(), rows_of<Plain<4>>()};
  return kernels;
}

const Kernels& single_kernels() {
  static const Kernels kernels = {attention_of<Plain<1>>(), rows_of<Plain<1>>()};
  return kernels;
}

}  // namespace outrider::engine
