// RmsNorm: a block norms one row, with the residual sum before it; row_squares in onnxruntime/row_kernel.h has the order.
#pragma once

#include "form.h"
#include "units.h"

namespace outrider {

// The sum of the squares of a row: sixteen lanes of four sums, which threads 0 to 63 have one each.
OUTRIDER_DEVICE float sum_of_squares(const float* row, i64 size) {
  OUTRIDER_SHARED float partial[4 * kLanes];
  OUTRIDER_SHARED float total;
  barrier();  // before anyone writes again, and behind what made the row
  for (i64 t = thread_index(); t < 4 * kLanes; t += thread_count()) {
    float sum = 0.0f;
    for (i64 i = t; i < size; i += 4 * kLanes) sum = fused(row[i], row[i], sum);
    partial[t] = sum;
  }
  barrier();
  if (thread_index() == 0) {
    float totals[4];
    for (int v = 0; v < 4; ++v) totals[v] = sum_of_lanes(partial + v * kLanes);
    total = (totals[0] + totals[2]) + (totals[1] + totals[3]);
  }
  barrier();
  return total;
}

// `added` may be null; `sum`, where x + added goes, too, unless there is something added. `epsilon` is a float32 as bits. Blocks
// have whole warps; other forms than float32 want multiples of 32 numbers.
OUTRIDER_KERNEL outrider_rms_norm(const float* x, const float* weight, const float* added, char* normed, float* scales,
                                  i32* sums, float* sum, i64 size, i64 epsilon, i64 form) {
  const i64 at = block_index() * size;
  const float* row = x + at;
  if (added != nullptr) {
    for (i64 i = thread_index(); i < size; i += thread_count()) sum[at + i] = x[at + i] + added[at + i];
    row = sum + at;
  }
  const float squares = sum_of_squares(row, size);
  const float factor = 1.0f / root(squares / static_cast<float>(size) + float_of(static_cast<i32>(epsilon)));
  if (form == kFloat32) {
    float* to = reinterpret_cast<float*>(normed) + at;
    for (i64 i = thread_index(); i < size; i += thread_count()) to[i] = row[i] * factor * weight[i];
    return;
  }
  for (i64 i = thread_index(); i < size; i += thread_count()) {
    keep_block({normed, scales, sums, form}, (at + i) / kBlock, row[i] * factor * weight[i]);
  }
}

// to[row, i] = unit(both[row, i], both[row, size + i]).
OUTRIDER_KERNEL outrider_gated_unit(const float* both, float* to, i64 rows, i64 size, i64 unit) {
  for (i64 i = block_index() * thread_count() + thread_index(); i < rows * size; i += block_count() * thread_count()) {
    const float* gate = both + i / size * 2 * size + i % size;
    to[i] = gated(unit, gate[0], gate[size]);
  }
}

}  // namespace outrider
