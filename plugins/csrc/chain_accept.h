// Classical speculative sampling: when a drafted token is accepted, and the distribution that replaces a rejected one.
//
// The target's p and the drafter's q stand on one scale, integers in units of 2^-50, rounded down. A residual is then
// exact, and its sum too, in any order. Rounding moves less than V * 2^-50 of p (V <= 2^22); q comes in as float32,
// whose own rounding is 2^-25 of it. plugins/ops/chain_accept.py.
#pragma once

#include "choice.h"
#include "portable.h"
#include "wide.h"

namespace outrider {

constexpr double kProbabilityOne = 0x1p+50;

// The factor that turns weights with the sum `total` into probabilities.
OUTRIDER_HD inline double probability_scale(u64 total) { return kProbabilityOne / static_cast<double>(total); }

OUTRIDER_HD inline u64 target_probability(u64 weight, double scale) {
  return floor_to_integer(double_from(weight) * scale);
}

// Values above 1, by rounding, count as 1.
OUTRIDER_HD inline u64 draft_probability(float q) {
  return floor_to_integer(static_cast<double>(q < 1.0f ? q : 1.0f) * kProbabilityOne);
}

// Whether q is finite and at least 0 (-0 is 0): of such floats the bits order as integers do, all others lie above.
constexpr u32 kLeastFault = 0x7f800000u;
OUTRIDER_HD inline u32 fault_key(float q) { return static_cast<u32>(bits_of(q + 0.0f)); }
OUTRIDER_HD inline bool can_be_probability(float q) { return fault_key(q) < kLeastFault; }

// Whether r q <= p, for the uniform number r / 2^53; never where p is 0.
OUTRIDER_HD inline bool accepts(u64 uniform53, u64 p, u64 q) { return p != 0 && ceil_share(uniform53, q) <= p; }

// max(0, p - q): the weight of a token in place of a rejected one.
OUTRIDER_HD inline u64 residual(u64 p, u64 q) { return p > q ? p - q : 0; }

}  // namespace outrider
