// Product: rows times float32 weights. Each output is summed over inputs in ascending order by fused multiply-adds, so that
// a row's product is a function of the row alone; onnxruntime/product_kernel.h has the same rule.
#pragma once

#include "lane_math.h"

namespace outrider {

constexpr int kRowsAtOnce = 8;

// Weights are [inputs, outputs], or `turned` [outputs, inputs]. A block has as many outputs as threads, of eight rows.
OUTRIDER_KERNEL outrider_product(const float* x, const float* weight, float* to, i64 rows, i64 inputs, i64 outputs,
                                 i64 turned) {
  follow();
  const i64 tiles = (outputs + thread_count() - 1) / thread_count();
  const i64 output = block_index() % tiles * thread_count() + thread_index();
  const i64 first = block_index() / tiles * kRowsAtOnce;
  if (output >= outputs) return;
  const int count = rows - first < kRowsAtOnce ? static_cast<int>(rows - first) : kRowsAtOnce;
  const float* column = turned != 0 ? weight + output * inputs : weight + output;
  const i64 stride = turned != 0 ? 1 : outputs;
  float sums[kRowsAtOnce] = {};
  for (i64 k = 0; k < inputs; ++k) {
    const float w = column[k * stride];
    for (int r = 0; r < kRowsAtOnce; ++r) {
      if (r < count) sums[r] = fused(x[(first + r) * inputs + k], w, sums[r]);
    }
  }
  for (int r = 0; r < count; ++r) to[(first + r) * outputs + output] = sums[r];
}

}  // namespace outrider
