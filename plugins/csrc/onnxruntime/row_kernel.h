// Rows of logits and of activations, written once for all instruction sets.
#pragma once

#include "onnxruntime/kernels.h"
#include "onnxruntime/tanh.h"

namespace outrider::engine {
namespace {  // each instruction set has its own copy

template <class Lanes>
float row_highest(const float* x, std::int64_t count) {
  auto top = Lanes::broadcast(kMinusInfinity);
  std::int64_t i = 0;
  for (; i + Lanes::kWidth <= count; i += Lanes::kWidth) top = Lanes::max(Lanes::load(x + i), top);  // top, where NaN
  float highest = Lanes::highest(top);
  for (; i < count; ++i)
    if (x[i] > highest) highest = x[i];
  return highest;
}

template <class Lanes>
double row_weights(const float* x, std::int64_t count, float top, float cold, float* to) {
  const auto highest = Lanes::broadcast(top), factor = Lanes::broadcast(cold);
  const auto lowest = Lanes::broadcast(kMinusInfinity);
  double total = 0.0;
  constexpr std::int64_t kBlock = 64 * Lanes::kWidth;  // sums of more would lose bits in float32
  for (std::int64_t first = 0; first < count; first += kBlock) {
    const std::int64_t end = count - first < kBlock ? count : first + kBlock;
    auto sum = Lanes::zero();
    for (std::int64_t i = first; i < end; i += Lanes::kWidth) {
      float padded[Lanes::kWidth];
      const float* from = x + i;
      if (end - i < Lanes::kWidth) {
        for (int lane = 0; lane < Lanes::kWidth; ++lane) padded[lane] = i + lane < end ? x[i + lane] : kMinusInfinity;
        from = padded;
      }
      const auto legible = Lanes::max(Lanes::load(from), lowest);
      const auto weight = Lanes::exp(Lanes::mul(Lanes::sub(legible, highest), factor));
      sum = Lanes::add(sum, weight);
      if (to == nullptr) continue;
      if (end - i < Lanes::kWidth) {
        Lanes::store(padded, weight);
        for (int lane = 0; i + lane < end; ++lane) to[i + lane] = padded[lane];
      } else {
        Lanes::store(to + i, weight);
      }
    }
    typename Lanes::Vector sums[4] = {sum, sum, sum, sum};
    float total_of_block[4];
    Lanes::sum_each(sums, 1.0f, total_of_block);
    total += total_of_block[0];
  }
  return total;
}

template <class Lanes>
void row_best(const float* x, std::int64_t count, std::int64_t best, float* values, std::int64_t* indices) {
  std::int64_t have = 0;
  const auto offer = [&](std::int64_t i) {
    const float value = x[i] == x[i] ? x[i] : kMinusInfinity;
    if (have == best && !(value > values[best - 1])) return;
    std::int64_t at = have < best ? have++ : best - 1;
    for (; at > 0 && value > values[at - 1]; --at) {
      values[at] = values[at - 1];
      indices[at] = indices[at - 1];
    }
    values[at] = value;
    indices[at] = i;
  };
  std::int64_t i = 0;
  for (; i < best; ++i) offer(i);
  for (; i + Lanes::kWidth <= count; i += Lanes::kWidth) {
    std::uint32_t better = Lanes::above(Lanes::load(x + i), Lanes::broadcast(values[best - 1]));
    for (std::int64_t lane = 0; better != 0; ++lane, better >>= 1)
      if (better & 1u) offer(i + lane);
  }
  for (; i < count; ++i) offer(i);
}

// 1 / (1 + exp(-x)).
template <class Lanes>
typename Lanes::Vector share_of(typename Lanes::Vector x) {
  const auto one = Lanes::broadcast(1.0f);
  const auto least = Lanes::exp(Lanes::sub(Lanes::zero(), Lanes::abs(x)));  // of x and -x: exp of the lesser
  return Lanes::div(Lanes::where_negative(x, least, one), Lanes::add(one, least));
}

template <class Lanes>
struct Silu {
  static typename Lanes::Vector share(typename Lanes::Vector gate) { return share_of<Lanes>(gate); }
};

// (1 + tanh u) / 2 is 1 / (1 + exp(-2u)), which keeps its digits where it is small.
template <class Lanes>
struct GeluTanh {
  static typename Lanes::Vector share(typename Lanes::Vector gate) {
    constexpr float kTwice = 1.5957691216f, kCubic = 0.044715f * kTwice;  // 2 * sqrt(2 / pi)
    const auto factor = Lanes::fma(Lanes::mul(gate, gate), Lanes::broadcast(kCubic), Lanes::broadcast(kTwice));
    return share_of<Lanes>(Lanes::mul(gate, factor));
  }
};

template <class Lanes, template <class> class Activation>
typename Lanes::Vector gated(typename Lanes::Vector gate, typename Lanes::Vector up) {
  return Lanes::mul(Lanes::mul(gate, Activation<Lanes>::share(gate)), up);
}

// to[i] = unit(gate[i], up[i]), vector by vector.
template <class Lanes, class Unit>
void row_of_units(const float* gate, const float* up, std::int64_t count, float* to, const Unit& unit) {
  std::int64_t i = 0;
  for (; i + Lanes::kWidth <= count; i += Lanes::kWidth)
    Lanes::store(to + i, unit(Lanes::load(gate + i), Lanes::load(up + i)));
  if (i == count) return;
  float last[2][Lanes::kWidth] = {};
  for (std::int64_t rest = i; rest < count; ++rest) {
    last[0][rest - i] = gate[rest];
    last[1][rest - i] = up[rest];
  }
  Lanes::store(last[0], unit(Lanes::load(last[0]), Lanes::load(last[1])));
  for (std::int64_t rest = i; rest < count; ++rest) to[rest] = last[0][rest - i];
}

template <class Lanes, template <class> class Activation>
void row_gated(const float* gate, const float* up, std::int64_t count, float* to) {
  using Vector = typename Lanes::Vector;
  row_of_units<Lanes>(gate, up, count, to, [](Vector g, Vector u) { return gated<Lanes, Activation>(g, u); });
}

template <class Lanes>
void row_clamped(const float* gate, const float* up, std::int64_t count, float alpha, float limit, float* to) {
  using Vector = typename Lanes::Vector;
  const auto least = Lanes::broadcast(-limit), slope = Lanes::broadcast(alpha), one = Lanes::broadcast(1.0f);
  const auto negative = [](Vector x) { return Lanes::sub(Lanes::zero(), x); };
  const auto bounded = [&](Vector x) { return negative(Lanes::max(least, negative(x))); };  // NaN stays NaN
  row_of_units<Lanes>(gate, up, count, to, [&](Vector g, Vector u) {
    const auto low = bounded(g), both = Lanes::max(least, bounded(u));
    return Lanes::mul(Lanes::add(both, one), Lanes::mul(low, share_of<Lanes>(Lanes::mul(slope, low))));
  });
}

template <class Lanes>
void row_capped(const float* x, float cap, std::int64_t count, float* to) {
  const auto caps = Lanes::broadcast(cap);
  std::int64_t i = 0;
  for (; i + Lanes::kWidth <= count; i += Lanes::kWidth) Lanes::store(to + i, capped<Lanes>(Lanes::load(x + i), caps));
  if (i == count) return;
  float last[Lanes::kWidth] = {};
  for (std::int64_t rest = i; rest < count; ++rest) last[rest - i] = x[rest];
  Lanes::store(last, capped<Lanes>(Lanes::load(last), caps));
  for (std::int64_t rest = i; rest < count; ++rest) to[rest] = last[rest - i];
}

// Vector v of a row is added to sum v % 4; the four totals are added as a quarter's lanes are.
template <class Lanes>
float row_squares(const float* x, const float* added, std::int64_t count, float* to) {
  typename Lanes::Vector sums[4] = {Lanes::zero(), Lanes::zero(), Lanes::zero(), Lanes::zero()};
  std::int64_t i = 0;
  const auto take = [&](int v, typename Lanes::Vector value) { sums[v] = Lanes::fma(value, value, sums[v]); };
  const auto next = [&](int v) {
    auto value = Lanes::load(x + i);
    if (added != nullptr) {
      value = Lanes::add(value, Lanes::load(added + i));
      Lanes::store(to + i, value);
    }
    take(v, value);
    i += Lanes::kWidth;
  };
  while (i + 4 * Lanes::kWidth <= count)
    for (int v = 0; v < 4; ++v) next(v);
  int v = 0;
  for (; i + Lanes::kWidth <= count; ++v) next(v);
  if (i < count) {
    float last[Lanes::kWidth] = {};
    for (std::int64_t rest = i; rest < count; ++rest) {
      last[rest - i] = added == nullptr ? x[rest] : x[rest] + added[rest];
      if (added != nullptr) to[rest] = last[rest - i];
    }
    take(v, Lanes::load(last));
  }
  float totals[4];
  Lanes::sum_each(sums, 1.0f, totals);
  return (totals[0] + totals[2]) + (totals[1] + totals[3]);
}

template <class Lanes>
void row_scaled(const float* x, float factor, const float* weight, std::int64_t count, float* to) {
  const auto all = Lanes::broadcast(factor);
  std::int64_t i = 0;
  for (; i + Lanes::kWidth <= count; i += Lanes::kWidth)
    Lanes::store(to + i, Lanes::mul(Lanes::mul(Lanes::load(x + i), all), Lanes::load(weight + i)));
  for (; i < count; ++i) to[i] = x[i] * factor * weight[i];
}

template <class Lanes>
void row_convolved(const float* const* taps, const float* weight, const float* bias, std::int64_t kernel,
                   std::int64_t count, bool opens, float* to) {
  float last[Lanes::kWidth];
  for (std::int64_t i = 0; i < count; i += Lanes::kWidth) {
    const std::int64_t here = count - i < Lanes::kWidth ? count - i : Lanes::kWidth;
    const auto load = [&](const float* from) {
      if (here == Lanes::kWidth) return Lanes::load(from + i);
      for (std::int64_t lane = 0; lane < Lanes::kWidth; ++lane) last[lane] = lane < here ? from[i + lane] : 0.0f;
      return Lanes::load(last);
    };
    auto sum = bias == nullptr ? Lanes::zero() : load(bias);
    for (std::int64_t t = 0; t < kernel; ++t) sum = Lanes::fma(load(weight + t * count), load(taps[t]), sum);
    if (opens) sum = Lanes::mul(sum, share_of<Lanes>(sum));
    if (here == Lanes::kWidth) {
      Lanes::store(to + i, sum);
      continue;
    }
    Lanes::store(last, sum);
    for (std::int64_t lane = 0; lane < here; ++lane) to[i + lane] = last[lane];
  }
}

template <class Lanes>
RowKernels rows_of() {
  return {&row_highest<Lanes>, &row_weights<Lanes>, &row_best<Lanes>, &row_gated<Lanes, Silu>,
          &row_gated<Lanes, GeluTanh>, &row_capped<Lanes>, &row_clamped<Lanes>, &row_squares<Lanes>,
          &row_scaled<Lanes>, &row_convolved<Lanes>};
}

}  // namespace
}  // namespace outrider::engine
