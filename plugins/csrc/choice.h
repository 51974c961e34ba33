// The choice of a token from its logits: argmax, or the winner of an exponential race (race.h) among the tokens that
// filters keep.
//
// Weights are integers (exp in units of 2^-40), so their sums do not depend on the order of summation, and neither does
// the chosen token: one thread, many lanes or a GPU block choose alike. plugins/reference/choice.py.
#pragma once

#include "exp.h"
#include "portable.h"
#include "wide.h"

namespace outrider {

// A branch's row of `sampling`, or with float of a drafter's `draft_sampling`. plans/sampling.py has the same columns.
template <typename Real>
struct SamplingRow {
  Real temperature;   // 0 is greedy
  Real top_k;         // a whole number; 0 is off
  Real top_p;         // 1 is off
  Real min_p;         // 0 is off
  Real filter_order;  // one of the two below
  Real top_n_sigma;   // 0 is off
};

using Sampling = SamplingRow<double>;

constexpr int kSettings = sizeof(Sampling) / sizeof(double);

#if !defined(__CUDACC_RTC__)  // which would write them into every module
constexpr const char* kSamplingColumns[] = {"temperature", "top_k", "top_p", "min_p", "filter_order", "top_n_sigma"};
static_assert(sizeof(kSamplingColumns) == kSettings * sizeof(kSamplingColumns[0]), "every column has a name");
#endif

template <typename Real>
OUTRIDER_HD inline SamplingRow<Real> sampling_of(const Real* rows, i64 branch) {
  return reinterpret_cast<const SamplingRow<Real>*>(rows)[branch];
}

constexpr double kTemperatureFirst = 0.0;
constexpr double kTemperatureLast = 1.0;

constexpr double kWeightOne = 0x1p+40;
// exp(-28) * 2^40 is 0.76: below this every weight is 0.
constexpr double kNoWeightBelow = -28.0;
// The sum of this many weights of at most 2^40 stays far below 2^64.
constexpr i64 kMostVocabulary = i64{1} << 22;

// Integers that order as the logits do (-0 equals +0): maxima of integers vectorise without fast-math.
OUTRIDER_HD inline i32 order_key(float logit) {
  const i32 bits = bits_of(logit + 0.0f);
  return bits ^ ((bits >> 31) & 0x7fffffff);
}

OUTRIDER_HD inline float logit_of(i32 order_key) { return float_of(order_key ^ ((order_key >> 31) & 0x7fffffff)); }

// floor(value) for 0 <= value < 2^51, without the conversion instruction that older vector units lack.
OUTRIDER_HD inline u64 floor_to_integer(double value) {
  const double shifted = value + 0x1p+52;
  const u64 nearest = bits_of(shifted) - bits_of(0x1p+52);
  return nearest - (shifted - 0x1p+52 > value ? 1 : 0);
}

// The same number as a double, for integers below 2^52: likewise without an instruction that older units lack.
OUTRIDER_HD inline double double_from(u64 integer) { return double_of(bits_of(0x1p+52) | integer) - 0x1p+52; }

// How far a logit lies below its row's largest, at the temperature: x <= 0, the weight is exp(x).
OUTRIDER_HD inline double scaled_gap(float logit, float top, double temperature) {
  const double gap = static_cast<double>(logit) - static_cast<double>(top);
  return (logit == top ? 0.0 : gap) / temperature;  // inf - inf is not 0
}

OUTRIDER_HD inline bool weighs_nothing(double scaled_gap) { return scaled_gap < kNoWeightBelow; }

// Weight of a logit whose row's largest is `top`, in [0, 2^40]; the largest weighs exactly 2^40, -inf weighs 0.
OUTRIDER_HD inline u64 weight(float logit, float top, double temperature) {
  const double x = scaled_gap(logit, top, temperature);
  const bool none = weighs_nothing(x);
  const u64 units = floor_to_integer(shared_exp(none ? kNoWeightBelow : x) * kWeightOne);
  return none ? 0 : units;
}

// The least sum of weights that reaches the share top_p < 1 of `total`.
OUTRIDER_HD inline u64 nucleus_need(double top_p, u64 total) {
  return ceil_share(static_cast<u64>(top_p * 0x1p+53), total);
}

// The least weight that is at least the share min_p <= 1 of the largest.
OUTRIDER_HD inline u64 least_share(double min_p) {
  return ceil_share(static_cast<u64>(min_p * 0x1p+53), static_cast<u64>(kWeightOne));
}

// How far the logits of a row lie below the largest, but for those of -inf: sums of integers, in any order the same.
struct Spread {
  u64 count;
  u64 sum;      // of distances in units of 2^-8, at most 2^20 each
  u64 squares;  // of these
};

constexpr double kDistances = 0x1p+8;       // in a logit
constexpr double kFarthestLogit = 0x1p+12;  // further ones count as this far

OUTRIDER_HD inline u64 distance_of(float logit, float top) {
  const double gap = logit == top ? 0.0 : static_cast<double>(top) - static_cast<double>(logit);
  return floor_to_integer((gap < kFarthestLogit ? gap : kFarthestLogit) * kDistances);
}

// Adds a logit that is not -inf.
OUTRIDER_HD inline void add_distance(Spread& spread, float logit, float top) {
  const u64 distance = distance_of(logit, top);
  spread.count += 1;
  spread.sum += distance;
  spread.squares += distance * distance;
}

// The least weight, at the temperature, of a logit that lies at most `top_n_sigma` standard deviations of its row below
// the largest (top-n-sigma, arXiv 2411.07641). 0 where all logits lie within a unit of the largest: nothing is cut.
OUTRIDER_HD inline u64 sigma_cut(double top_n_sigma, const Spread& spread, double temperature) {
  if (spread.sum == 0) return 0;
  const double count = static_cast<double>(spread.count);
  const double mean = static_cast<double>(spread.sum) / count;
  const double variance = static_cast<double>(spread.squares) / count - mean * mean;
  const double sigma = variance > 0.0 ? square_root(variance) / kDistances : 0.0;
  const double x = -(top_n_sigma * sigma) / temperature;
  return weighs_nothing(x) ? 0 : floor_to_integer(shared_exp(x) * kWeightOne);
}

}  // namespace outrider
