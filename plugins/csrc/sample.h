// Sampling settings, one slot per branch, and the race and the uniform number that belong to the token behind a row.
#pragma once

#include "choice.h"
#include "philox.h"
#include "portable.h"
#include "race.h"

namespace outrider {

struct SamplingSlots {
  const double* temperature;
  const i64* top_k;
  const double* top_p;
  const double* min_p;
  const i64* filter_order;
  const u64* seed;
  const i64* stream;
};

OUTRIDER_HD inline Sampling sampling_of(const SamplingSlots& slots, i64 branch) {
  return {slots.temperature[branch], slots.top_k[branch], slots.top_p[branch], slots.min_p[branch],
          slots.filter_order[branch]};
}

// A row at `position` chooses the token of the next position, and a draw is numbered by the token that it draws.
OUTRIDER_HD inline RaceKey next_race(const SamplingSlots& slots, i64 branch, i64 position, u32 purpose) {
  return race_key(slots.seed[branch], slots.stream[branch], position + 1, purpose);
}

OUTRIDER_HD inline u64 next_uniform(const SamplingSlots& slots, i64 branch, i64 position, u32 purpose) {
  return uniform53(slots.seed[branch], slots.stream[branch], position + 1, purpose);
}

}  // namespace outrider
