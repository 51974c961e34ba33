// float32 as the kernels for ONNX Runtime on the CPU compute it, number by number and to the bit: onnxruntime/lanes_plain.h,
// tanh.h and row_kernel.h have the same operations for vectors.
#pragma once

#include "../block.h"

namespace outrider {

constexpr int kLanes = 16;

OUTRIDER_DEVICE float magnitude(float x) { return float_of(bits_of(x) & 0x7fffffff); }

// exp of numbers up to 0; 0 below -87, NaN of NaN.
OUTRIDER_DEVICE float lane_exp(float x) {
  if (!(x >= -87.0f)) return x < -87.0f ? 0.0f : x;
  const float n = nearest(x * 1.44269504f);
  const float r = fused(-n, -2.12194440e-4f, fused(-n, 0.693359375f, x));
  float p = 1.0f / 720;
  p = fused(p, r, 1.0f / 120);
  p = fused(p, r, 1.0f / 24);
  p = fused(p, r, 1.0f / 6);
  p = fused(p, r, 0.5f);
  p = fused(p, r, 1.0f);
  p = fused(p, r, 1.0f);
  return p * float_of((static_cast<i32>(n) + 127) << 23);
}

// 1 / (1 + exp(-x)).
OUTRIDER_DEVICE float lane_share(float x) {
  const float least = lane_exp(0.0f - magnitude(x));  // of x and -x: exp of the lesser
  return (x < 0.0f ? least : 1.0f) / (1.0f + least);
}

OUTRIDER_DEVICE float lane_tanh(float x) {
  const float size = magnitude(x);
  const float z = x * x;
  float p = -0.0057049884f;
  p = fused(p, z, 0.020639089f);
  p = fused(p, z, -0.053739716f);
  p = fused(p, z, 0.13331442f);
  p = fused(p, z, -0.33333282f);
  if (size - 0.625f < 0.0f) return x * fused(p, z, 1.0f);
  const float e = lane_exp(size * -2.0f);
  const float large = 1.0f - (e + e) / (1.0f + e);
  return x < 0.0f ? 0.0f - large : large;
}

// cap * tanh(x / cap).
OUTRIDER_DEVICE float lane_capped(float x, float cap) { return lane_tanh(x / cap) * cap; }

// The sum of sixteen lanes, in the order of onnxruntime/attention_tile.h.
OUTRIDER_DEVICE float sum_of_lanes(const float* lane) {
  float quarter[4];
  for (int q = 0; q < 4; ++q) quarter[q] = (lane[4 * q] + lane[4 * q + 2]) + (lane[4 * q + 1] + lane[4 * q + 3]);
  return (quarter[0] + quarter[2]) + (quarter[1] + quarter[3]);
}

}  // namespace outrider
