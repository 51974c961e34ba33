// RmsNorm: a block norms one row, with the residual sum before it. row_squares in
// onnxruntime/row_kernel.h has the order.
#pragma once

#include "form.h"
#include "units.h"

namespace outrider {

// The factor of the numbers of a row in shared memory. The sum of their squares is sixteen lanes of four sums, which
// 64 threads have one each.
OUTRIDER_DEVICE float norm_factor(const float* row, i64 size, float epsilon) {
  constexpr int kSums = 4 * kLanes;
  OUTRIDER_SHARED float totals[4];
  const int thread = static_cast<int>(thread_index()), count = static_cast<int>(size);
  if (thread < kSums) {
    float sum = 0.0f;
    OUTRIDER_UNROLL(16)
    for (int i = thread; i < count; i += kSums) sum = fused(row[i], row[i], sum);
    sum = sum + shuffle_xor(sum, 2);  // sum_of_lanes, in its order
    sum = sum + shuffle_xor(sum, 1);
    sum = sum + shuffle_xor(sum, 8);
    sum = sum + shuffle_xor(sum, 4);
    if (thread % kLanes == 0) totals[thread / kLanes] = sum;
  }
  barrier();
  const float squares = (totals[0] + totals[2]) + (totals[1] + totals[3]);
  return 1.0f / root(squares / static_cast<float>(size) + epsilon);
}

constexpr int kQuadsAtOnce = 4;  // of a thread, which are loaded before the first one is used

// Copies a row of `size` numbers to `staged`, in shared memory, with all threads of the block; x + added, which goes to `sum`
// as well, where `added` is not null. A barrier has to follow.
OUTRIDER_DEVICE void stage_row(const float* x, const float* added, float* sum, i64 size, float* staged) {
  const int thread = static_cast<int>(thread_index()), threads = static_cast<int>(thread_count());
  const int whole = size % 4 == 0 ? static_cast<int>(size / 4) : 0;  // rows of other sizes are not aligned
  for (int first = thread; first < whole; first += kQuadsAtOnce * threads) {
    Quad numbers[kQuadsAtOnce], more[kQuadsAtOnce] = {};
    for (int q = 0; q < kQuadsAtOnce; ++q) {
      const int at = 4 * (first + q * threads);
      if (at >= size) break;
      numbers[q] = load_quad(x + at);
      if (added != nullptr) more[q] = load_quad(added + at);
    }
    for (int q = 0; q < kQuadsAtOnce; ++q) {
      const int at = 4 * (first + q * threads);
      if (at >= size) break;
      for (int i = 0; added != nullptr && i < 4; ++i) numbers[q].value[i] = numbers[q].value[i] + more[q].value[i];
      keep_quad(staged + at, numbers[q]);
      if (added != nullptr) keep_quad(sum + at, numbers[q]);
    }
  }
  for (int i = 4 * whole + thread; i < size; i += threads) {
    staged[i] = added == nullptr ? x[i] : x[i] + added[i];
    if (added != nullptr) sum[i] = staged[i];
  }
}

// A thread's weights of a row that is kept in another form than float32, from the place `start` on.
OUTRIDER_DEVICE void load_weights(const float* weight, int start, i64 size, Quad (&weights)[kQuadsAtOnce]) {
  for (int q = 0; q < kQuadsAtOnce; ++q) {
    const int first = start + 4 * static_cast<int>(thread_index() + q * thread_count());
    if (first < size) weights[q] = load_quad(weight + first);
  }
}

// Norms a row of `size` numbers in shared memory, which is row `index` of what is kept. The first `weights` are loaded.
OUTRIDER_DEVICE void keep_normed(const float* row, const float* weight, Quad (&weights)[kQuadsAtOnce], float epsilon, i64 size,
                                 i64 index, const Formed& to) {
  const int threads = static_cast<int>(thread_count());
  if (to.form == kFloat32) {
    const float factor = norm_factor(row, size, epsilon);
    float* const numbers = reinterpret_cast<float*>(to.to) + index * size;
    for (i64 i = thread_index(); i < size; i += threads) numbers[i] = row[i] * factor * weight[i];
    return;
  }
  const int own = static_cast<int>(thread_index()) * 4;
  const float factor = norm_factor(row, size, epsilon);
  for (int start = 0; start < size; start += 4 * kQuadsAtOnce * threads) {
    if (start > 0) load_weights(weight, start, size, weights);
    for (int q = 0; q < kQuadsAtOnce; ++q) {
      const int first = start + own + 4 * q * threads;
      if (first - own % 128 >= size) break;  // no number of the warp
      float values[4] = {};
      if (first < size) {
        const Quad numbers = load_quad(row + first);
        for (int i = 0; i < 4; ++i) values[i] = numbers.value[i] * factor * weights[q].value[i];
      }
      keep_four(to, index * size + first, first < size, values);
    }
  }
}

// x + added goes to `sum`, and is normed; both may be null together. `epsilon` is a float32 as bits. Blocks have whole
// warps, and dynamic shared memory for a row; other forms than float32 want multiples of 32 numbers.
OUTRIDER_KERNEL outrider_rms_norm(const float* x, const float* weight, const float* added, char* normed, float* scales,
                                  i32* sums, float* sum, i64 size, i64 epsilon, i64 form) {
  let_next_begin();
  Quad weights[kQuadsAtOnce] = {};
  if (form != kFloat32) load_weights(weight, 0, size, weights);
  wait_for_earlier();
  const i64 at = block_index() * size;
  float* const row = reinterpret_cast<float*>(dynamic_shared());
  stage_row(x + at, added == nullptr ? nullptr : added + at, sum + at, size, row);
  barrier();
  keep_normed(row, weight, weights, float_of(static_cast<i32>(epsilon)), size, block_index(), {normed, scales, sums, form});
}

// to[row, i] = unit(both[row, i], both[row, size + i]).
OUTRIDER_KERNEL outrider_gated_unit(const float* both, float* to, i64 rows, i64 size, i64 unit) {
  follow();
  for (i64 i = block_index() * thread_count() + thread_index(); i < rows * size; i += block_count() * thread_count()) {
    const float* gate = both + i / size * 2 * size + i % size;
    to[i] = gated(unit, gate[0], gate[size]);
  }
}

}  // namespace outrider
