// Functions that compute in vectors: a set for each instruction set, of which the machine's best is used.
#pragma once

#include <cstdint>

#include "onnxruntime/attention_tile.h"

namespace outrider::engine {

struct AttentionKernels {
  void (*float32)(const Tile<float>&, Scratch&);
  void (*float16)(const Tile<Half>&, Scratch&);
  void (*int8)(const Tile<Int8>&, Scratch&);
};

// to[i] = activation(gate[i]) * up[i].
using GatedUnit = void (*)(const float* gate, const float* up, std::int64_t count, float* to);

// Of a row of numbers. NaN counts as minus infinity.
struct RowKernels {
  // The largest.
  float (*highest)(const float* x, std::int64_t count);
  // to[i] = exp((x[i] - top) * cold), where x <= top; returns their sum. `to` may be null.
  double (*weights)(const float* x, std::int64_t count, float top, float cold, float* to);
  // Indices of the `best` <= count largest, largest first, of equal ones the lower index first.
  void (*best)(const float* x, std::int64_t count, std::int64_t best, float* values, std::int64_t* indices);
  // The unit of an activation; null if there is none.
  GatedUnit (*unit)(const char* activation);
  // to[i] = 1 / (1 + exp(-x[i])).
  void (*share)(const float* x, std::int64_t count, float* to);
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

constexpr int kStateColumns = 32;  // of a tile of a matrix state, which stays in the first cache for a whole pass

// How the gates of tokens are made, [heads] numbers each. decay = exp(-e^decay_log * step), where step is log(1 +
// e^(a + bias)) within [least, most]; rate = scale / (1 + e^-b), or without b, step.
struct StateGates {
  std::int64_t heads;
  const float *decay_log, *bias;
  float least, most, scale;
};

// What a token does to a state: S' = decay * S + k delta^T, and what it asks: out = q . S'. `qk` is q . k; a record of an
// earlier step asks nothing, its `out` is null. `parent` counts among the walk's nodes; -1: the chain's end.
struct StateStep {
  const float *k, *q, *v;
  float decay, rate, qk;
  float* out;
  std::int64_t parent;
};

// A tile of one head's state: `columns` of its values, of kStateColumns there is memory for. The steps are a chain, which
// goes into the state, and then `nodes` that leave it as it is. With `delta` a step's change is the delta rule's: rate *
// (v - decay * (k . S)), else rate * v. `skip` * v is added to what it gets. `firsts` has the first child of each node, or
// -1, and `copies` a tile for each that has one; `deltas` is memory of [2 + nodes, kStateColumns].
struct StateWalk {
  std::int64_t keys, columns, chain, nodes;
  bool delta;
  float skip;
  float* state;  // [keys, kStateColumns]
  const StateStep* steps;
  const std::int64_t* firsts;
  float* const* copies;
  float* deltas;
};

struct Yes {
  static constexpr bool value = true;
};
struct No {
  static constexpr bool value = false;
};

struct StateKernels {
  // x . y, in sixteen lanes.
  float (*dot)(const float* x, const float* y, std::int64_t count);
  // to = x * scale / sqrt(x . x + 1e-6).
  void (*unit)(const float* x, std::int64_t count, float scale, float* to);
  void (*gates)(const StateGates& gates, const float* a, const float* b, float* decay, float* rate);
  void (*walk)(const StateWalk& walk);
};

struct Kernels {
  AttentionKernels attention;
  RowKernels rows;
  // The outputs of panels [first, last) for all rows.
  void (*multiply)(const FloatProduct& product, std::int64_t first, std::int64_t last);
  StateKernels states;
};

const Kernels& neon_kernels();
const Kernels& avx512_kernels();
const Kernels& avx2_kernels();
const Kernels& plain_kernels();

// Of isa_here(): isa.h. All have the same bits.
const Kernels& kernels();

}  // namespace outrider::engine
