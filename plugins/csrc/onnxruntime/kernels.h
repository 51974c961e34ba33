// What is computed by vectors: a set of functions for each instruction set, of which a machine's best is taken.
#pragma once

#include <cstdint>

#include "onnxruntime/attention_tile.h"

namespace outrider::engine {

struct AttentionKernels {
  void (*float32)(const Tile<float>&, Scratch&);
  void (*float16)(const Tile<Half>&, Scratch&);
  void (*int8)(const Tile<Int8>&, Scratch&);
};

// Of a row of numbers. NaN counts as minus infinity.
struct RowKernels {
  // The largest.
  float (*highest)(const float* x, std::int64_t count);
  // to[i] = exp((x[i] - top) * cold), where x <= top; returns their sum. `to` may be null.
  double (*weights)(const float* x, std::int64_t count, float top, float cold, float* to);
  // Indices of the `best` <= count largest, largest first, of equal ones the lower index first.
  void (*best)(const float* x, std::int64_t count, std::int64_t best, float* values, std::int64_t* indices);
  // to[i] = up[i] * gate[i] / (1 + exp(-gate[i])).
  void (*gated)(const float* gate, const float* up, std::int64_t count, float* to);
  // to[i] = up[i] * gate[i] / (1 + exp(-2u)), u = sqrt(2 / pi) * (gate[i] + 0.044715 gate[i]^3).
  void (*gelu_gated)(const float* gate, const float* up, std::int64_t count, float* to);
  // to[i] = cap * tanh(x[i] / cap).
  void (*capped)(const float* x, float cap, std::int64_t count, float* to);
  // to[i] = (u + 1) * g / (1 + exp(-alpha * g)), where g is gate[i] and u up[i], g at most `limit`, |u| at most `limit`.
  void (*clamped)(const float* gate, const float* up, std::int64_t count, float alpha, float limit, float* to);
  // to[i] = x[i] + added[i]; returns the sum of their squares. `added` may be null, and then `to` too.
  float (*squares)(const float* x, const float* added, std::int64_t count, float* to);
  // to[i] = x[i] * factor * weight[i].
  void (*scaled)(const float* x, float factor, const float* weight, std::int64_t count, float* to);
  // to[i] = bias[i] + the sum over taps t, ascending, of weight[t][i] * taps[t][i], fused; `opens`: times its sigmoid.
  // Without `bias`, which may be null, it starts at 0.
  void (*convolved)(const float* const* taps, const float* weight, const float* bias, std::int64_t kernel,
                    std::int64_t count, bool opens, float* to);
};

// Weights in panels of kLanes outputs, [panels, inputs, kLanes], as plugins/panel_layout.py packs them, and rows to
// multiply with them. Whole panels are written.
struct FloatProduct {
  const float* packed;
  std::int64_t inputs;
  const float* const* x;  // [rows], each [inputs]
  std::int64_t rows;
  float* to;  // [rows, stride]
  std::int64_t stride;
};

struct Kernels {
  AttentionKernels attention;
  RowKernels rows;
  // The outputs of panels [first, last) for all rows.
  void (*multiply)(const FloatProduct& product, std::int64_t first, std::int64_t last);
};

const Kernels& neon_kernels();
const Kernels& avx512_kernels();
const Kernels& avx2_kernels();
const Kernels& plain_kernels();

// Of isa_here(): isa.h. All have the same bits.
const Kernels& kernels();

}  // namespace outrider::engine
