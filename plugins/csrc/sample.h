// Sampling settings, one slot per branch, and the race and the uniform number that belong to the token after a row.
#pragma once

#include "choice.h"
#include "philox.h"
#include "portable.h"
#include "race.h"

namespace outrider {

constexpr i64 kNoBranch = i64{1} << 32;  // of rows that fill up a step: they choose nothing (plans/sampling.py)

struct SamplingSlots {
  const double* sampling;
  const u64* seed;
  const i64* stream;
};

// A row at `position` chooses the token of the next position, and a draw is numbered by the token that it draws.
OUTRIDER_HD inline RaceKey next_race(const SamplingSlots& slots, i64 branch, i64 position, u32 purpose) {
  return race_key(slots.seed[branch], slots.stream[branch], position + 1, purpose);
}

OUTRIDER_HD inline u64 next_uniform(const SamplingSlots& slots, i64 branch, i64 position, u32 purpose) {
  return uniform53(slots.seed[branch], slots.stream[branch], position + 1, purpose);
}

}  // namespace outrider
