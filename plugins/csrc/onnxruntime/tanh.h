// tanh of vectors, made of operations that every instruction set rounds alike, so that all have the same bits.
//
// |x| < kTanhSmall: x * (1 + z p(z)) with z = x^2 and a minimax polynomial p, within 5e-9 of tanh. Above:
// 1 - 2e / (1 + e) with e = exp(-2|x|), and the sign of x. Measured error: under 2 units in the last place.
// tanh(-0) is -0, of infinities it is 1 and -1, NaN stays NaN.
#pragma once

#include "onnxruntime/attention_tile.h"

namespace outrider::engine {
namespace {  // each instruction set has its own copy

constexpr float kTanhSmall = 0.625f;
constexpr int kTanhTerms = 5;
constexpr float kTanhPolynomial[kTanhTerms] = {-0.0057049884f, 0.020639089f, -0.053739716f, 0.13331442f, -0.33333282f};

template <class Lanes>
typename Lanes::Vector tanh(typename Lanes::Vector x) {
  const auto one = Lanes::broadcast(1.0f);
  const auto size = Lanes::abs(x);
  const auto z = Lanes::mul(x, x);
  auto p = Lanes::broadcast(kTanhPolynomial[0]);
  for (int i = 1; i < kTanhTerms; ++i) p = Lanes::fma(p, z, Lanes::broadcast(kTanhPolynomial[i]));
  const auto small = Lanes::mul(x, Lanes::fma(p, z, one));
  const auto e = Lanes::exp(Lanes::mul(size, Lanes::broadcast(-2.0f)));
  const auto large = Lanes::sub(one, Lanes::div(Lanes::add(e, e), Lanes::add(one, e)));
  const auto with_sign = Lanes::where_negative(x, Lanes::sub(Lanes::zero(), large), large);
  return Lanes::where_negative(Lanes::sub(size, Lanes::broadcast(kTanhSmall)), small, with_sign);
}

// cap * tanh(x / cap).
template <class Lanes>
typename Lanes::Vector capped(typename Lanes::Vector x, typename Lanes::Vector cap) {
  return Lanes::mul(tanh<Lanes>(Lanes::div(x, cap)), cap);
}

}  // namespace
}  // namespace outrider::engine
