// Gated units: what a product does with pairs of its outputs, a gate and what goes through it.
#pragma once

#include "lane_math.h"

namespace outrider {

enum Unit : int { kNoUnit = 0, kSilu = 1, kGelu = 2 };  // UNITS in plugins/cuda/engine_kernels.py

OUTRIDER_DEVICE float gated(i64 unit, float gate, float up) {
  return unit == kSilu ? silu_gated(gate, up) : gelu_gated(gate, up);
}

}  // namespace outrider
