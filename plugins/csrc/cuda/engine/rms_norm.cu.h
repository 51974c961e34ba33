// RmsNorm: a block norms one row, with the residual sum before it, or a product norms few rows by itself. row_squares in
// onnxruntime/row_kernel.h has the order.
#pragma once

#include "form.h"
#include "units.h"

namespace outrider {

constexpr int kNormRows = 8;  // that a product norms by itself: NORM_ROWS in plugins/cuda/engine_kernels.py

// What the numbers of each of `count` rows are multiplied by, up to kNormRows: a row's squares are sixteen lanes of four
// sums, which 64 threads have one each.
OUTRIDER_DEVICE void norm_factors(const float* rows, int count, i64 size, float epsilon, float* factors) {
  constexpr int kSums = 4 * kLanes;
  OUTRIDER_SHARED float partial[kNormRows * kSums];
  for (i64 t = thread_index(); t < count * kSums; t += thread_count()) {
    const float* row = rows + t / kSums * size;
    float sum = 0.0f;
    for (i64 i = t % kSums; i < size; i += kSums) sum = fused(row[i], row[i], sum);
    partial[t] = sum;
  }
  barrier();
  for (i64 r = thread_index(); r < count; r += thread_count()) {
    float totals[4];
    for (int v = 0; v < 4; ++v) totals[v] = sum_of_lanes(partial + r * kSums + v * kLanes);
    const float squares = (totals[0] + totals[2]) + (totals[1] + totals[3]);
    factors[r] = 1.0f / root(squares / static_cast<float>(size) + epsilon);
  }
  barrier();
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

// x + added goes to `sum`, and is normed; both may be null together. `epsilon` is a float32 as bits. Blocks have whole
// warps, and dynamic shared memory for a row; other forms than float32 want multiples of 32 numbers.
OUTRIDER_KERNEL outrider_rms_norm(const float* x, const float* weight, const float* added, char* normed, float* scales,
                                  i32* sums, float* sum, i64 size, i64 epsilon, i64 form) {
  const i64 at = block_index() * size;
  float* const row = reinterpret_cast<float*>(dynamic_shared());
  stage_row(x + at, added == nullptr ? nullptr : added + at, sum + at, size, row);
  barrier();
  OUTRIDER_SHARED float factor[1];
  norm_factors(row, 1, size, float_of(static_cast<i32>(epsilon)), factor);
  if (form == kFloat32) {
    float* to = reinterpret_cast<float*>(normed) + at;
    for (i64 i = thread_index(); i < size; i += thread_count()) to[i] = row[i] * factor[0] * weight[i];
    return;
  }
  for (i64 i = thread_index(); i < size; i += thread_count()) {
    keep_block({normed, scales, sums, form}, (at + i) / kBlock, row[i] * factor[0] * weight[i]);
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
