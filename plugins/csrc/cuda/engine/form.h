// The form in which a kernel leaves numbers for the product that reads them: as float32, as halves, or as integers of 8 bits
// in blocks of 32 with a scale each. Kernels that norm or compute them write this form.
#pragma once

#include "../element.h"
#include "../warp.h"
#include "lane_math.h"

namespace outrider {

constexpr int kBlock = 32;       // numbers that share a scale
constexpr int kIntegers = 3;     // a form beside those of Element: FORMS in plugins/cuda/engine_kernels.py
constexpr float kRounds = 12582912.0f;  // 1.5 * 2^23: a sum with it has no places after the point

// Where numbers go. Of integers, scales and sums are [rows, blocks], and `to` has bytes.
struct Formed {
  char* to;
  float* scales;
  i32* sums;
  i64 form;
};

OUTRIDER_DEVICE i32 of_warp_largest(i32 value) {
  for (int mask = 16; mask > 0; mask /= 2) {
    const i32 other = shuffle_xor(value, mask);
    value = other > value ? other : value;
  }
  return value;
}

OUTRIDER_DEVICE i32 of_warp_sum(i32 value) {
  for (int mask = 16; mask > 0; mask /= 2) value += shuffle_xor(value, mask);
  return value;
}

// The integers of a block of numbers, the largest of which has the bits `most` without its sign: quantize in
// onnxruntime/quantize.h.
struct Scaled {
  i32 most;
  bool usable;
  float factor;
  OUTRIDER_DEVICE explicit Scaled(i32 largest)
      : most(largest), usable(most >= 0x0d800000 && most < 0x7f800000), factor(127.0f / float_of(most)) {}  // 2^-100, infinity
  OUTRIDER_DEVICE i32 integer(float value) const {
    return usable ? bits_of(value * factor + kRounds) - bits_of(kRounds) : 0;
  }
  OUTRIDER_DEVICE float scale() const {
    return usable ? float_of(most) / 127.0f : most >= 0x7f800000 ? float_of(0x7fc00000) : 0.0f;
  }
};

// A warp keeps a block of numbers, one of each lane; `block` counts those of all rows.
OUTRIDER_DEVICE void keep_block(const Formed& formed, i64 block, float value) {
  const i64 at = block * kBlock + lane_index();
  if (formed.form != kIntegers) {
    keep_element(formed.to, at, formed.form, value);
    return;
  }
  const Scaled scaled(of_warp_largest(bits_of(value) & 0x7fffffff));
  const i32 integer = scaled.integer(value), sum = of_warp_sum(integer);
  formed.to[at] = static_cast<char>(integer);
  if (lane_index() == 0) {
    formed.scales[block] = scaled.scale();
    formed.sums[block] = sum;
  }
}

// A warp keeps 128 numbers, four of each lane from `first` on, a multiple of four; blocks that are not `there` are left out.
OUTRIDER_DEVICE void keep_four(const Formed& formed, i64 first, bool there, const float (&values)[4]) {
  if (formed.form != kIntegers) {
    for (int i = 0; there && i < 4; ++i) keep_element(formed.to, first + i, formed.form, values[i]);
    return;
  }
  i32 most = 0;
  for (int i = 0; i < 4; ++i) most = (bits_of(values[i]) & 0x7fffffff) > most ? bits_of(values[i]) & 0x7fffffff : most;
  for (int mask = 4; mask > 0; mask /= 2) {
    const i32 other = shuffle_xor(most, mask);
    most = other > most ? other : most;
  }
  const Scaled scaled(most);
  u32 word = 0;
  i32 sum = 0;
  for (int i = 0; i < 4; ++i) {
    const i32 integer = scaled.integer(values[i]);
    word |= (static_cast<u32>(integer) & 0xffu) << 8 * i;
    sum += integer;
  }
  for (int mask = 4; mask > 0; mask /= 2) sum += shuffle_xor(sum, mask);
  if (!there) return;
  *reinterpret_cast<u32*>(formed.to + first) = word;
  if (lane_index() % 8 == 0) {
    formed.scales[first / kBlock] = scaled.scale();
    formed.sums[first / kBlock] = sum;
  }
}

// A warp keeps outputs of one row of a product, that of the lane being `output`, in the group of 32 that they are. Float32
// are added to `residual` first, where it is not null; other forms want whole groups.
OUTRIDER_DEVICE void keep_output(const Formed& formed, const float* residual, i64 row, i64 group, i64 output, i64 outputs,
                                 float value) {
  if (formed.form != kFloat32) {
    keep_block(formed, row * (outputs / kBlock) + group, value);
  } else if (output < outputs) {
    const i64 at = row * outputs + output;
    reinterpret_cast<float*>(formed.to)[at] = residual == nullptr ? value : residual[at] + value;
  }
}

// Rows of float32 in another form: a warp has a block of 32 at a time.
OUTRIDER_KERNEL outrider_form(const float* x, char* to, float* scales, i32* sums, i64 blocks, i64 form) {
  follow();
  const Formed formed = {to, scales, sums, form};
  const i64 warps = thread_count() / 32;
  for (i64 b = block_index() * warps + thread_index() / 32; b < blocks; b += block_count() * warps) {
    keep_block(formed, b, x[b * kBlock + lane_index()]);
  }
}

}  // namespace outrider
