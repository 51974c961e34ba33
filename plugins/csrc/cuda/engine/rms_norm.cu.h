// RmsNorm: a block norms one row, with the residual sum before it, or a product norms a row by itself. row_squares in
// onnxruntime/row_kernel.h has the order.
#pragma once

#include "form.h"
#include "units.h"

namespace outrider {

// What the numbers of a row in shared memory are multiplied by. The sum of their squares is sixteen lanes of four sums, which
// 64 threads have one each.
OUTRIDER_DEVICE float norm_factor(const float* row, i64 size, float epsilon) {
  constexpr int kSums = 4 * kLanes;
  OUTRIDER_SHARED float partial[kSums], factor;
  const i64 thread = thread_index();
  if (thread < kSums) {
    float sum = 0.0f;
    OUTRIDER_UNROLL(8)
    for (i64 i = thread; i < size; i += kSums) sum = fused(row[i], row[i], sum);
    partial[thread] = sum;
  }
  barrier();
  if (thread == 0) {
    float totals[4];
    for (int v = 0; v < 4; ++v) totals[v] = sum_of_lanes(partial + v * kLanes);
    const float squares = (totals[0] + totals[2]) + (totals[1] + totals[3]);
    factor = 1.0f / root(squares / static_cast<float>(size) + epsilon);
  }
  barrier();
  return factor;
}

// Copies a row of `size` numbers to `staged`, in shared memory, with all threads of the block; x + added, which goes to `sum`
// as well, where `added` is not null. A barrier has to follow.
OUTRIDER_DEVICE void stage_row(const float* x, const float* added, float* sum, i64 size, float* staged) {
  OUTRIDER_UNROLL(4)
  for (i64 i = thread_index(); i < size; i += thread_count()) {
    staged[i] = added == nullptr ? x[i] : x[i] + added[i];
    if (added != nullptr) sum[i] = staged[i];
  }
}

// Norms a row of `size` numbers in shared memory, which is row `index` of what is kept.
OUTRIDER_DEVICE void keep_normed(const float* row, const float* weight, float factor, i64 size, i64 index,
                                 const Formed& to) {
  if (to.form == kFloat32) {
    float* const numbers = reinterpret_cast<float*>(to.to) + index * size;
    for (i64 i = thread_index(); i < size; i += thread_count()) numbers[i] = row[i] * factor * weight[i];
    return;
  }
  OUTRIDER_UNROLL(4)
  for (i64 start = thread_index() / 32 * 128; start < size; start += thread_count() * 4) {
    const i64 first = start + 4 * lane_index();
    const bool there = first < size;
    float values[4] = {};
    if (there) {
      const Quad numbers = load_quad(row + first), weights = load_quad(weight + first);
      for (int i = 0; i < 4; ++i) values[i] = numbers.value[i] * factor * weights.value[i];
    }
    keep_four(to, index * size + first, there, values);
  }
}

// Norms `count` rows for a product of the same block, which reads them in shared memory. `row` has room for one.
OUTRIDER_DEVICE void norm_rows(const float* x, const float* weight, i64 count, i64 size, float epsilon, float* row,
                               const Formed& to) {
  for (i64 r = 0; r < count; ++r) {
    stage_row(x + r * size, nullptr, nullptr, size, row);
    barrier();
    keep_normed(row, weight, norm_factor(row, size, epsilon), size, r, to);
    barrier();
  }
}

// x + added goes to `sum`, and is normed; both may be null together. `epsilon` is a float32 as bits. Blocks have whole
// warps, and dynamic shared memory for a row; other forms than float32 want multiples of 32 numbers.
OUTRIDER_KERNEL outrider_rms_norm(const float* x, const float* weight, const float* added, char* normed, float* scales,
                                  i32* sums, float* sum, i64 size, i64 epsilon, i64 form) {
  const i64 at = block_index() * size;
  float* const row = reinterpret_cast<float*>(dynamic_shared());
  stage_row(x + at, added == nullptr ? nullptr : added + at, sum + at, size, row);
  barrier();
  const float factor = norm_factor(row, size, float_of(static_cast<i32>(epsilon)));
  keep_normed(row, weight, factor, size, block_index(), {normed, scales, sums, form});
}

// to[row, i] = unit(both[row, i], both[row, size + i]).
OUTRIDER_KERNEL outrider_gated_unit(const float* both, float* to, i64 rows, i64 size, i64 unit) {
  for (i64 i = block_index() * thread_count() + thread_index(); i < rows * size; i += block_count() * thread_count()) {
    const float* gate = both + i / size * 2 * size + i % size;
    to[i] = gated(unit, gate[0], gate[size]);
  }
}

}  // namespace outrider
