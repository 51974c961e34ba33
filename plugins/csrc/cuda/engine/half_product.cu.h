// HalfProduct: rows times weights of float16 or bfloat16, on tensor cores, summed in float32.
//
// An output is the sum of eight parts of its inputs, which a warp each adds up tile by tile; the parts are added in order.
// How many rows there are changes none of it: a row's product is a function of the row alone, on GPUs of one kind.
#pragma once

#include "form.h"
#include "rms_norm.cu.h"
#include "units.h"

namespace outrider {

constexpr int kHalfWarps = 8;
constexpr int kHalfOutputs = 32;  // of a block: four matrices of eight
constexpr int kHalfRows = 32;     // of a block: two matrices of sixteen
constexpr int kHalfInputs = 32;   // that a warp takes at once: two steps of sixteen
constexpr int kHalfOwn = kHalfRows / kHalfWarps;

// Rows of halves, [count, inputs]. Of a row that there is not, zeros are read.
struct HalfRows {
  const unsigned short* halves;
  i64 count, inputs;
  OUTRIDER_DEVICE Bytes16 eight(i64 row, i64 first) const {
    if (row >= count) return {};
    return load_bytes16(halves + row * inputs + first);
  }
};

// The same of rows of float32 that are normed as they are read, up to kNormRows of them.
struct NormedHalfRows {
  const float *x, *norm, *factors;
  i64 count, inputs, element;
  OUTRIDER_DEVICE u32 half(float value) const { return element == kFloat16 ? half_of(value) : bfloat_of(value); }
  OUTRIDER_DEVICE Bytes16 eight(i64 row, i64 first) const {
    if (row >= count) return {};
    Bytes16 to;
    for (int part = 0; part < 2; ++part) {
      const Bytes16 numbers = load_bytes16(x + row * inputs + first + 4 * part);
      const Bytes16 weights = load_bytes16(norm + first + 4 * part);
      u32 halves[4];
      for (int i = 0; i < 4; ++i) {
        const float number = float_of(static_cast<i32>(numbers.word[i]));
        halves[i] = half(number * factors[row] * float_of(static_cast<i32>(weights.word[i])));
      }
      to.word[2 * part] = halves[0] | halves[1] << 16;
      to.word[2 * part + 1] = halves[2] | halves[3] << 16;
    }
    return to;
  }
};

// 32 outputs of 32 rows: thread t has output t % 32 of rows t / 32, t / 32 + 8 ... in `totals`. A lane reads eight inputs in
// a row, of a row of x and of an output: which input is which in a matrix product does not matter, as long as both agree.
template <typename Rows>
OUTRIDER_DEVICE void half_tile(const Rows& x, const HalfRows& weights, i64 first_row, i64 first_output, i64 element,
                               float (&totals)[kHalfOwn]) {
  OUTRIDER_SHARED float parts[kHalfWarps][kHalfOutputs][kHalfRows + 1];  // one more, so that banks differ
  const int lane = static_cast<int>(lane_index()), group = lane / 4, turn = lane % 4;
  const i64 warp = thread_index() / 32;
  const bool second = first_row + 16 < x.count;  // whether there are rows for the second matrix of sixteen
  float sums[2][4][4] = {};
  for (i64 k = warp * kHalfInputs; k < x.inputs; k += kHalfWarps * kHalfInputs) {
    const i64 own = k + 8 * turn;
    Bytes16 w[4] = {}, a[4] = {};
    for (int n = 0; n < 4; ++n) w[n] = weights.eight(first_output + 8 * n + group, own);
    for (int m = 0; m < 4; ++m) {
      if (m < 2 || second) a[m] = x.eight(first_row + 8 * m + group, own);
    }
    for (int m = 0; m < (second ? 2 : 1); ++m) {
      for (int step = 0; step < 2; ++step) {
        const u32 left[4] = {a[2 * m].word[2 * step], a[2 * m + 1].word[2 * step], a[2 * m].word[2 * step + 1],
                             a[2 * m + 1].word[2 * step + 1]};
        for (int n = 0; n < 4; ++n) {
          const u32 right[2] = {w[n].word[2 * step], w[n].word[2 * step + 1]};
          if (element == kFloat16) {
            multiply_halves(sums[m][n], left, right);
          } else {
            multiply_bfloats(sums[m][n], left, right);
          }
        }
      }
    }
  }
  barrier();  // before anyone writes again
  for (int m = 0; m < 2; ++m) {
    for (int n = 0; n < 4; ++n) {
      for (int i = 0; i < 4; ++i) {
        parts[warp][8 * n + 2 * turn + i % 2][16 * m + group + 8 * (i / 2)] = sums[m][n][i];
      }
    }
  }
  barrier();
  for (int i = 0; i < kHalfOwn; ++i) {
    const i64 row = warp + i * kHalfWarps;
    totals[i] = parts[0][lane][row];
    for (int w = 1; w < kHalfWarps; ++w) totals[i] += parts[w][lane][row];
  }
}

// What a product is of, beside its rows, and where it goes. With a `unit`, output i is made of outputs i and outputs + i of
// the weights. Float32 are added to `residual` first, where it is not null; other forms want multiples of 32 outputs.
struct HalfProduct {
  const unsigned short* weight;
  const float* residual;
  Formed to;
  i64 rows, inputs, outputs, element, unit;
};

template <typename Rows>
OUTRIDER_DEVICE void multiply_halves_of(const Rows& x, const HalfProduct& product) {
  const i64 rows = product.rows, outputs = product.outputs, unit = product.unit;
  const i64 tiles = (rows + kHalfRows - 1) / kHalfRows;  // neighbours share weights
  const i64 group = block_index() / tiles;
  const i64 first = block_index() % tiles * kHalfRows;
  const HalfRows weights = {product.weight, unit == kNoUnit ? outputs : 2 * outputs, product.inputs};
  float totals[kHalfOwn];
  half_tile(x, weights, first, group * kHalfOutputs, product.element, totals);
  if (unit != kNoUnit) {
    float up[kHalfOwn];
    half_tile(x, weights, first, outputs + group * kHalfOutputs, product.element, up);
    for (int i = 0; i < kHalfOwn; ++i) totals[i] = gated(unit, totals[i], up[i]);
  }
  const i64 output = group * kHalfOutputs + lane_index();
  for (int i = 0; i < kHalfOwn; ++i) {
    const i64 row = first + thread_index() / 32 + i * kHalfWarps;
    if (row >= rows) break;
    keep_output(product.to, product.residual, row, group, output, outputs, totals[i]);
  }
}

// x and the weights are [rows, inputs] and [outputs, inputs]; inputs are a multiple of 32. Blocks of 256 threads.
OUTRIDER_KERNEL outrider_half_product(const unsigned short* x, const unsigned short* weight, const float* residual, char* to,
                                      float* to_scales, i32* to_sums, i64 rows, i64 inputs, i64 outputs, i64 element,
                                      i64 unit, i64 form) {
  const HalfRows given = {x, rows, inputs};
  multiply_halves_of(given, {weight, residual, {to, to_scales, to_sums, form}, rows, inputs, outputs, element, unit});
}

// The same of rows that are not normed yet, up to kNormRows.
OUTRIDER_KERNEL outrider_normed_half_product(const float* x, const float* norm, const unsigned short* weight, char* to,
                                             float* to_scales, i32* to_sums, i64 rows, i64 inputs, i64 outputs, i64 element,
                                             i64 unit, i64 form, i64 epsilon) {
  OUTRIDER_SHARED float factors[kNormRows];
  norm_factors(x, static_cast<int>(rows), inputs, float_of(static_cast<i32>(epsilon)), factors);
  const NormedHalfRows given = {x, norm, factors, rows, inputs, element};
  multiply_halves_of(given, {weight, nullptr, {to, to_scales, to_sums, form}, rows, inputs, outputs, element, unit});
}

// Rows of such weights, looked up by number. A number out of range gives zeros.
OUTRIDER_KERNEL outrider_half_gather(const i64* ids, const char* weight, float* to, i64 count, i64 inputs, i64 outputs,
                                     i64 element) {
  for (i64 i = block_index() * thread_count() + thread_index(); i < count * inputs; i += block_count() * thread_count()) {
    const i64 id = ids[i / inputs];
    to[i] = id < 0 || id >= outputs ? 0.0f : element_at(weight, id * inputs + i % inputs, element);
  }
}

}  // namespace outrider
