// A drafter's distribution, under a branch's filters and at the target's draw.
//
// Calculated in float32: it is a guess, and most GPUs are slow in float64. Sums are of integers all the same (units of
// 2^-40 of the likeliest token's weight), so that they do not depend on their order. DESIGN section 7;
// plugins/reference/tree_expand.py and draft_sample.py.
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
constexpr float kUnknownScore = -3.0e38f;  // of children of a node whose logits say nothing
constexpr u64 kWhole53 = u64{1} << 53;

// x of [0, 1] as an integer in units of 2^-53. What lies outside counts as its nearer end, NaN as 0.
OUTRIDER_HD inline u64 fraction53(double x) {
  return !(x > 0.0) ? 0 : x >= 1.0 ? kWhole53 : static_cast<u64>(x * 0x1p+53);
}

struct DraftFilters {
  bool sampled;  // else greedy
  float heat;    // what logits are divided by
  i64 top_k;     // 0 or less is off
  u64 top_p;     // in units of 2^-53; all of them are off

  OUTRIDER_HD bool cut() const { return sampled && (top_k > 0 || top_p < kWhole53); }
};

OUTRIDER_HD inline DraftFilters draft_filters(double temperature, i64 top_k, double top_p) {
  const float heat = static_cast<float>(temperature);
  const bool sampled = temperature > 0.0;
  return {sampled, !sampled ? 1.0f : heat > kCoolest ? heat : kCoolest, top_k, fraction53(top_p)};
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

// Where the target is likely to choose, in the units of the kept weights' cumulative sums, and what that counts.
struct DrawWindow {
  u64 first;
  u64 last;
  float near;  // probability of a kept weight inside
  float far;   // probability of any weight anywhere
};

OUTRIDER_HD inline u64 place_within(double fraction, u64 total) {
  return !(fraction > 0.0) ? 0 : fraction >= 1.0 ? total : static_cast<u64>(fraction * static_cast<double>(total));
}

OUTRIDER_HD inline DrawWindow draw_window(float draw, float spread, float doubt, u64 kept_total, u64 total) {
  const double middle = draw;
  const double trust = (1.0 - doubt) / (2.0 * spread);
  return {place_within(middle - spread, kept_total), place_within(middle + spread, kept_total),
          static_cast<float>(trust / sum_of(kept_total)), static_cast<float>(doubt / sum_of(total))};
}

// Probability that the target chooses a token of this weight: the share of the window that lies in its interval, whose
// `kept` units stand behind the `below` units of lower ids, and its own probability. A token that the filters drop has
// no interval. Inside the window it is the weight that counts, not its units, of which faint tokens have none.
OUTRIDER_HD inline float chosen_mass(const DrawWindow& window, float weight, bool is_kept, u64 below, u64 kept) {
  const u64 above = below + kept;
  const u64 lower = below > window.first ? below : window.first;
  const u64 upper = above < window.last ? above : window.last;
  const bool inside = lower == below && upper == above;
  const float part = inside ? weight : lower < upper ? static_cast<float>(upper - lower) * 0x1p-40f : 0.0f;
  const float mass = (is_kept ? window.near * part : 0.0f) + window.far * weight;
  return mass > kLeastMass ? mass : kLeastMass;
}

}  // namespace outrider
