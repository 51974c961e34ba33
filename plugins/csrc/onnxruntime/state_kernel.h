// Matrix states that recur, walked along paths; written once for all instruction sets.
#pragma once

#include "onnxruntime/kernels.h"
#include "onnxruntime/row_kernel.h"

namespace outrider::engine {
namespace {  // each instruction set has its own copy

// A vector of x[i, ...), zeros after the first `count`.
template <class Lanes>
typename Lanes::Vector load_part(const float* x, std::int64_t i, std::int64_t count) {
  if (i + Lanes::kWidth <= count) return Lanes::load(x + i);
  float part[Lanes::kWidth];
  for (std::int64_t lane = 0; lane < Lanes::kWidth; ++lane) part[lane] = i + lane < count ? x[i + lane] : 0.0f;
  return Lanes::load(part);
}

template <class Lanes>
void store_part(float* to, std::int64_t i, std::int64_t count, typename Lanes::Vector x) {
  if (i + Lanes::kWidth <= count) return Lanes::store(to + i, x);
  float part[Lanes::kWidth];
  Lanes::store(part, x);
  for (std::int64_t lane = 0; i + lane < count; ++lane) to[i + lane] = part[lane];
}

template <class Lanes>
float state_dot(const float* x, const float* y, std::int64_t count) {
  typename Lanes::Vector sums[4] = {Lanes::zero(), Lanes::zero(), Lanes::zero(), Lanes::zero()};
  for (std::int64_t i = 0; i < count; i += Lanes::kWidth)
    sums[0] = Lanes::fma(load_part<Lanes>(x, i, count), load_part<Lanes>(y, i, count), sums[0]);
  float total[4];
  Lanes::sum_each(sums, 1.0f, total);
  return total[0];
}

template <class Lanes>
void state_unit(const float* x, std::int64_t count, float scale, float* to) {
  const float factor = (1.0f / __builtin_sqrtf(state_dot<Lanes>(x, x, count) + 1e-6f)) * scale;
  const auto all = Lanes::broadcast(factor);
  for (std::int64_t i = 0; i < count; i += Lanes::kWidth)
    store_part<Lanes>(to, i, count, Lanes::mul(load_part<Lanes>(x, i, count), all));
}

// log(1 + e^x) = max(x, 0) + log(1 + y), y = e^-|x|; with z = y / (2 + y), log(1 + y) = 2 (z + z^3 / 3 + z^5 / 5 + ...).
template <class Lanes>
typename Lanes::Vector softplus(typename Lanes::Vector x) {
  const auto y = Lanes::exp(Lanes::sub(Lanes::zero(), Lanes::abs(x)));
  const auto z = Lanes::div(y, Lanes::add(Lanes::broadcast(2.0f), y)), squared = Lanes::mul(z, z);
  auto series = Lanes::broadcast(1.0f / 17);
  for (int odd = 15; odd >= 1; odd -= 2)
    series = Lanes::fma(series, squared, Lanes::broadcast(1.0f / static_cast<float>(odd)));
  return Lanes::fma(Lanes::add(z, z), series, Lanes::where_negative(x, Lanes::zero(), x));
}

template <class Lanes>
void state_gates(const StateGates& g, const float* a, const float* b, float* decay, float* rate) {
  const auto one = Lanes::broadcast(1.0f), least = Lanes::broadcast(g.least), most = Lanes::broadcast(g.most);
  for (std::int64_t i = 0; i < g.heads; i += Lanes::kWidth) {
    const auto log = load_part<Lanes>(g.decay_log, i, g.heads);
    const auto low = Lanes::exp(Lanes::sub(Lanes::zero(), Lanes::abs(log)));
    const auto speed = Lanes::where_negative(log, low, Lanes::div(one, low));
    const auto bias = load_part<Lanes>(g.bias, i, g.heads);
    auto step = softplus<Lanes>(Lanes::add(load_part<Lanes>(a, i, g.heads), bias));
    step = Lanes::max(least, step);
    step = Lanes::sub(Lanes::zero(), Lanes::max(Lanes::sub(Lanes::zero(), most), Lanes::sub(Lanes::zero(), step)));
    store_part<Lanes>(decay, i, g.heads, Lanes::exp(Lanes::sub(Lanes::zero(), Lanes::mul(speed, step))));
    const auto share = b == nullptr ? step : share_of<Lanes>(load_part<Lanes>(b, i, g.heads));
    store_part<Lanes>(rate, i, g.heads, b == nullptr ? step : Lanes::mul(share, Lanes::broadcast(g.scale)));
  }
}

constexpr int kParts = kStateColumns / kLanes;

// to = from with `change`; k . to and q . to, where they are asked for. Sums ascend, one a column, fused.
template <class Lanes, bool kChanges, bool kReads, bool kAsks>
void sweep(std::int64_t keys, const float* from, float* to, const StateStep& change, const float* delta, const float* k,
           const float* q, float* read, float* asked) {
  typename Lanes::Vector reads[kParts], asks[kParts], deltas[kParts];
  const auto decay = Lanes::broadcast(kChanges ? change.decay : 0.0f);
  for (int v = 0; v < kParts; ++v) {
    reads[v] = asks[v] = Lanes::zero();
    deltas[v] = kChanges ? Lanes::load(delta + v * kLanes) : Lanes::zero();
  }
  for (std::int64_t i = 0; i < keys; ++i) {
    for (int v = 0; v < kParts; ++v) {
      const std::int64_t at = i * kStateColumns + v * kLanes;
      auto x = Lanes::load(from + at);
      if (kChanges) {
        x = Lanes::fma(Lanes::broadcast(change.k[i]), deltas[v], Lanes::mul(decay, x));
        Lanes::store(to + at, x);
      }
      if (kReads) reads[v] = Lanes::fma(Lanes::broadcast(k[i]), x, reads[v]);
      if (kAsks) asks[v] = Lanes::fma(Lanes::broadcast(q[i]), x, asks[v]);
    }
  }
  for (int v = 0; v < kParts; ++v) {
    if (kReads) Lanes::store(read + v * kLanes, reads[v]);
    if (kAsks) Lanes::store(asked + v * kLanes, asks[v]);
  }
}

// One step: the state that it meets is `from`, with the change of `before`, if there is one, which then is in `to`.
template <class Lanes>
void state_step(const StateWalk& w, const StateStep& step, const StateStep* before, const float* delta_before,
                const float* from, float* to, float* delta) {
  float read[kStateColumns], asked[kStateColumns];
  const auto run = [&](auto changes, auto reads, auto asks) {
    sweep<Lanes, decltype(changes)::value, decltype(reads)::value, decltype(asks)::value>(
        w.keys, from, to, before == nullptr ? step : *before, delta_before, step.k, step.q, read, asked);
  };
  const auto ask = [&](auto changes, auto reads) {
    if (step.out != nullptr) run(changes, reads, Yes{});
    else run(changes, reads, No{});
  };
  const auto see = [&](auto changes) {
    if (w.delta) ask(changes, Yes{});
    else ask(changes, No{});
  };
  if (before != nullptr) see(Yes{});
  else see(No{});
  for (int j = 0; j < kStateColumns; ++j) {
    const float v = j < w.columns ? step.v[j] : 0.0f;
    delta[j] = step.rate * (w.delta ? v - step.decay * read[j] : v);
    if (step.out == nullptr || j >= w.columns) continue;
    const float sum = __builtin_fmaf(step.qk, delta[j], step.decay * asked[j]);
    step.out[j] = w.skip == 0.0f ? sum : __builtin_fmaf(w.skip, v, sum);
  }
}

template <class Lanes>
void walk_state(const StateWalk& w) {
  // The chain that goes into the state, each change with the next one's reading.
  const StateStep* before = nullptr;
  float* deltas = w.deltas;
  for (std::int64_t s = 0; s < w.chain; ++s) {
    float* delta = deltas + (s % 2) * kStateColumns;
    state_step<Lanes>(w, w.steps[s], before, deltas + ((s + 1) % 2) * kStateColumns, w.state, w.state, delta);
    before = &w.steps[s];
  }
  const float* last = deltas + ((w.chain + 1) % 2) * kStateColumns;
  if (w.nodes == 0) {
    if (before != nullptr)
      sweep<Lanes, true, false, false>(w.keys, w.state, w.state, *before, last, nullptr, nullptr, nullptr, nullptr);
    return;
  }
  // The other tokens, which leave it as it is: one with children has a copy with its own change, made by the first.
  const StateStep* nodes = w.steps + w.chain;
  float* own = deltas + 2 * kStateColumns;
  for (std::int64_t n = 0; n < w.nodes; ++n) {
    const std::int64_t parent = nodes[n].parent;
    float* delta = own + n * kStateColumns;
    if (parent < 0) {
      state_step<Lanes>(w, nodes[n], before, last, w.state, w.state, delta);
      before = nullptr;
      continue;
    }
    const bool first = w.firsts[parent] == n;
    const std::int64_t above = nodes[parent].parent;
    float* copy = w.copies[parent];
    const float* from = !first ? copy : above < 0 ? w.state : w.copies[above];
    state_step<Lanes>(w, nodes[n], first ? &nodes[parent] : nullptr, own + parent * kStateColumns, from, copy, delta);
  }
}

template <class Lanes>
StateKernels states_of() {
  return {&state_dot<Lanes>, &state_unit<Lanes>, &state_gates<Lanes>, &walk_state<Lanes>};
}

}  // namespace
}  // namespace outrider::engine
