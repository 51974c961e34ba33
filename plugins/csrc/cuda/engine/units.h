// Gated units: what a product does with pairs of its outputs, a gate and the value that it scales.
#pragma once

#include "lane_math.h"

namespace outrider {

enum Unit : int { kNoUnit = 0, kSilu = 1, kGelu = 2 };  // from 1 on in the order of UNITS, plugins/onnx_ops/layers.py

OUTRIDER_DEVICE float gated(i64 unit, float gate, float up) {
  if (unit == kSilu) return gate * lane_share(gate) * up;
  constexpr float kTwice = 1.5957691216f, kCubic = 0.044715f * kTwice;  // 2 * sqrt(2 / pi)
  return gate * lane_share(gate * fused(gate * gate, kCubic, kTwice)) * up;
}

}  // namespace outrider
