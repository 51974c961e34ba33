// A drafter's distribution, under a branch's filters and with the target's noise.
//
// Calculated in float32: it is a guess, and most GPUs are slow in float64. Sums are of integers all the same (units of
// 2^-40 of the likeliest token's weight), so that they do not depend on their order.
// plugins/ops/tree_expand.py and draft_sample.py.
#pragma once

#include "choice.h"
#include "log.h"
#include "portable.h"
#include "rank_key.h"
#include "wide.h"

namespace outrider {

constexpr i64 kLikely = 64;         // tokens among which the cuts of top-k and top-p are looked for
constexpr float kCoolest = 1e-30f;  // temperatures below it are it
constexpr float kFaintest = -87.0f;  // exp of less is 0
constexpr float kLeastMass = 1e-30f;
constexpr float kUnknownScore = -3.0e38f;  // of children of a node with illegible logits
constexpr u64 kWhole53 = u64{1} << 53;

// x of [0, 1] as an integer in units of 2^-53. Values outside are clamped, NaN counts as 0.
OUTRIDER_HD inline u64 fraction53(double x) {
  return !(x > 0.0) ? 0 : x >= 1.0 ? kWhole53 : static_cast<u64>(x * 0x1p+53);
}

struct DraftFilters {
  bool sampled;  // else greedy
  float heat;    // divides logits
  i64 top_k;     // 0 is off, as more than kLikely would be
  u64 top_p;     // in units of 2^-53; all of them are off
  float min_p;   // 0 is off

  // Whether cuts are looked for among the likeliest.
  OUTRIDER_HD bool cut() const { return sampled && (top_k > 0 || top_p < kWhole53); }
};

OUTRIDER_HD inline DraftFilters draft_filters(const SamplingRow<float>& row) {
  const bool sampled = row.temperature > 0.0f;
  const float heat = !sampled ? 1.0f : row.temperature > kCoolest ? row.temperature : kCoolest;
  const bool limited = row.top_k >= 1.0f && row.top_k <= static_cast<float>(kLikely);
  return {sampled, heat, limited ? static_cast<i64>(row.top_k) : 0, fraction53(row.top_p), row.min_p};
}

// Weight of a legible logit whose row's largest is `top`, in [0, 1]: exp of how far it lies below, at the temperature.
OUTRIDER_HD inline float draft_weight(float logit, float top, float heat) {
  const float x = logit == top ? 0.0f : (logit - top) / heat;
  return x >= kFaintest ? shared_exp(x) : 0.0f;
}

OUTRIDER_HD inline u64 units_of(float draft_weight) {
  return static_cast<u64>(draft_weight * static_cast<float>(kWeightOne));
}

OUTRIDER_HD inline double sum_of(u64 units) { return static_cast<double>(units) / kWeightOne; }

// Log-probability of the token of a row; `total` is of the whole row.
OUTRIDER_HD inline double draft_log_prob(float logit, float top, u64 total) {
  return (logit == top ? 0.0 : static_cast<double>(logit) - static_cast<double>(top)) - shared_log(sum_of(total));
}

// Of a token whose probability adds log_prob <= 0: no more than its parent's, whatever rounding does.
OUTRIDER_HD inline float child_score(float parent, double log_prob) {
  const float sum = static_cast<float>(static_cast<double>(parent) + log_prob);
  return sum < parent ? sum : parent;
}

// How fast a token runs in the target's race if the drafter is right: the largest wins.
OUTRIDER_HD inline float pace(float kept_weight, float noise) { return kept_weight / noise; }

// What a share of all paces, and one of all weights, count of the probability that the target chooses a token.
struct Likelihood {
  float near;
  float far;

  OUTRIDER_HD float of(float pace, float weight) const {
    const float mass = near * pace + far * weight;
    return mass > kLeastMass ? mass : kLeastMass;
  }
};

OUTRIDER_HD inline Likelihood likelihood(float doubt, double paces, double weights) {
  return {static_cast<float>((1.0 - doubt) / paces), static_cast<float>(doubt / weights)};
}

}  // namespace outrider
