// A block's summary of its share of a row of logits, before the row's largest logit is known.
//
// A row is divided among many blocks, however few rows there are. The last block that finishes, or the next kernel,
// chooses from all summaries (row_choice.h), and reads few logits again. Shares have one size for any number of blocks
// and threads, and a share's summary depends on nothing else.
#pragma once

#include "../chain_accept.h"
#include "../race.h"
#include "../rank_key.h"
#include "fold.h"

namespace outrider {

constexpr i64 kShare = 1024;  // logits; SHARE in ops/row_choices.py
constexpr i64 kGroup = 32;    // logits that have one largest in the summary
constexpr i64 kGroups = kShare / kGroup;

constexpr i32 kInfinityKey = 0x7f800000;
constexpr i32 kNanKey = 0x7fffffff;  // above infinity's

struct Share {
  i32 group_top[kGroups];  // order key of each group's largest logit; kNanKey where one is NaN
  i32 top;                 // of the whole share
  float least_time;        // no token comes in before, of a race in which the share's largest logit weighs 1
  u64 mass;                // the sum of weights, where the share's largest logit weighs 2^40
  i64 astray;              // whether the drafter's probabilities hold an invalid one
};
static_assert(sizeof(Share) == 152, "SHARE_BYTES in ops/row_choices.py");

OUTRIDER_DEVICE i64 shares_of(i64 size) { return (size + kShare - 1) / kShare; }

OUTRIDER_DEVICE i32 key_of(float logit) { return logit == logit ? order_key(logit) : kNanKey; }

// ../choice.h's weight.
OUTRIDER_OUTLINED u64 weighed(float logit, float top, double temperature) { return weight(logit, top, temperature); }

// Four values of a row from a multiple of four on, in one load of 16 bytes where the row's address and its end allow
// it. After the end there is `otherwise`.
OUTRIDER_DEVICE Quad quad_of(const float* row, i64 size, i64 first, float otherwise) {
  const float* from = row + first;
  if (first + kRacers <= size && reinterpret_cast<u64>(from) % sizeof(Quad) == 0) return load_quad(from);
  Quad quad;
  for (int i = 0; i < kRacers; ++i) quad.value[i] = first + i < size ? from[i] : otherwise;
  return quad;
}

constexpr float kFarthest = -87.0f;  // exp of less is nothing in float32

// The parts of a share's summary that will be read. Times and masses differ in temperature where it comes last.
struct Wanted {
  bool times;
  bool masses;
  double temperature;
  double heat;  // the temperature of masses
};

// Summarises share `share` of a row; `drafted` is the drafter's distribution there, or null. Every thread calls.
OUTRIDER_OUTLINED void tell_share(const float* logits, i64 size, i64 share, const float* drafted, const Wanted& wanted,
                                const RaceKey& race, Share* told) {
  constexpr i64 kQuads = kShare / kRacers;
  constexpr i64 kQuadsOfGroup = kGroup / kRacers;
  OUTRIDER_SHARED i32 quad_top[kQuads];
  const i64 begin = share * kShare;
  i32 own_top = -kNanKey - 1;
  i64 own_astray = 0;
  for (i64 q = thread_index(); q < kQuads; q += thread_count()) {
    const i64 first = begin + q * kRacers;
    const Quad quad = quad_of(logits, size, first, minus_infinity());
    i32 top = key_of(quad.value[0]);
    for (int i = 1; i < kRacers; ++i) top = key_of(quad.value[i]) > top ? key_of(quad.value[i]) : top;
    quad_top[q] = top;
    own_top = top > own_top ? top : own_top;
    if (drafted == nullptr) continue;
    const Quad probability = quad_of(drafted, size, first, 0.0f);
    for (int i = 0; i < kRacers; ++i) own_astray |= can_be_probability(probability.value[i]) ? 0 : 1;
  }
  const i32 top_key = fold(own_top, Largest());  // and a barrier: every quad's top stands
  const i64 astray = fold(own_astray, Largest());
  for (i64 g = thread_index(); g < kGroups; g += thread_count()) {
    i32 top = quad_top[g * kQuadsOfGroup];
    for (i64 q = 1; q < kQuadsOfGroup; ++q) {
      const i32 other = quad_top[g * kQuadsOfGroup + q];
      top = other > top ? other : top;
    }
    told->group_top[g] = top;
  }
  const float top = logit_of(top_key);
  float least_time = float_of(kInfinityKey);
  u64 mass = 0;
  if (wanted.times) {
    for (i64 q = thread_index(); q < kQuads; q += thread_count()) {
      const i64 first = begin + q * kRacers;
      const Quad quad = quad_of(logits, size, first, minus_infinity());
      const PhiloxBlock block = race_block(race, static_cast<u32>(first / kRacers));
      for (int i = 0; i < kRacers; ++i) {
        const float x = static_cast<float>(scaled_gap(quad.value[i], top, wanted.temperature));
        if (!(x >= kFarthest)) continue;
        const float time = exponential(block.word[i]) / shared_exp(x);
        least_time = time < least_time ? time : least_time;
      }
    }
    least_time = float_of(fold(bits_of(least_time), Least()));  // those of positive floats order as the floats do
  }
  if (wanted.masses) {
    for (i64 q = thread_index(); q < kQuads; q += thread_count()) {
      const Quad quad = quad_of(logits, size, begin + q * kRacers, minus_infinity());
      for (int i = 0; i < kRacers; ++i) {
        if (quad.value[i] > minus_infinity()) mass += weighed(quad.value[i], top, wanted.heat);
      }
    }
    mass = fold(mass, Sum());
  }
  if (thread_index() == 0) {
    told->top = top_key;
    told->least_time = least_time;
    told->mass = mass;
    told->astray = astray;
  }
}

}  // namespace outrider
