// An exponential race: every token id has noise of its own, and the one with the least noise over weight is chosen.
//
// With noise E that is exponentially distributed, min E / w falls on an id as often as its share of the weights says.
// Noise is a function of (seed, stream, position, purpose, id), computed in plain IEEE float32 without contraction, so
// that every machine gives the same bits. Close weights give close races: who is ahead changes at a near tie alone,
// whatever happens to the other ids. plugins/reference/race.py.
#pragma once

#include "choice.h"
#include "philox.h"
#include "portable.h"

namespace outrider {

// The noise of a position: the key of its ids' blocks, and half of their counter.
struct RaceKey {
  PhiloxBlock words;
};

OUTRIDER_HD inline RaceKey race_key(u64 seed, i64 stream, i64 position, u32 purpose) {
  return {position_block(seed, stream, position, purpose)};
}

// Four ids share a block: those of `quad` are 4 * quad and the three after it. Seven rounds suffice ("Crush-resistant"
// in the paper), and the ten of the key stand before them.
constexpr i64 kRacers = 4;
constexpr int kRaceRounds = 7;

OUTRIDER_HD inline PhiloxBlock race_block(const RaceKey& key, u32 quad) {
  const PhiloxBlock counter = {{quad, key.words.word[2], key.words.word[3], 0}};
  return philox4x32<kRaceRounds>(counter, key.words.word[0], key.words.word[1]);
}

// -log of (word + 1/2) / 2^32, which is exponentially distributed, in (2^-34, 22.9). Words from 2^31 on take the
// logarithm of 1 - y, which keeps the digits of small results. Both are 2 atanh s = 2 s (1 + s^2 / 3 + ...) with
// |s| <= 1/3, and a multiple of ln 2.
OUTRIDER_HD inline float exponential(u32 word) {
  constexpr float kLn2 = 0x1.62e430p-1f, kSqrtHalf = 0x1.6a09e6p-1f;
  const bool small = static_cast<i32>(word) < 0;
  const i32 from_end = static_cast<i32>(small ? ~word : word);  // below 2^31
  const float y = (static_cast<float>(from_end) + 0.5f) * 0x1p-32f;
  // y = m 2^k with sqrt(1/2) <= m < sqrt(2), about.
  const i32 bits = bits_of(y);
  const i32 k = (bits - bits_of(kSqrtHalf)) >> 23;
  const float m = float_of(bits - (k << 23));
  const float top = small ? y : 1.0f - m;
  const float s = top / (small ? 2.0f - y : 1.0f + m);
  const float z = s * s;
  float p = 1.0f / 15.0f;
  p = p * z + 1.0f / 13.0f;
  p = p * z + 1.0f / 11.0f;
  p = p * z + 1.0f / 9.0f;
  p = p * z + 1.0f / 7.0f;
  p = p * z + 1.0f / 5.0f;
  p = p * z + 1.0f / 3.0f;
  p = p * z + 1.0f;
  return 2.0f * s * p - (small ? 0.0f : static_cast<float>(k) * kLn2);
}

// When an id of this weight comes in, of a race that the least time wins. `weight` is in [1, 2^50].
OUTRIDER_HD inline float race_time(u32 word, u64 weight) {
  return exponential(word) / static_cast<float>(double_from(weight));
}

}  // namespace outrider
