// RaceNoise: a thread computes the noise of four tokens, which share a block of random words.
#pragma once

#include "../race.h"
#include "block.h"

namespace outrider {

OUTRIDER_KERNEL outrider_race_noise(const i64* tip_position, const u64* seed, const i64* stream,
                                    const double* temperature, const double* top_p, const double* min_p, float* noise,
                                    float* draft_temperature, float* draft_top_p, float* draft_min_p, i64 branches,
                                    i64 depths, i64 vocabulary, i64 purpose) {
  follow();
  const i64 step = block_count() * thread_count();
  const i64 self = block_index() * thread_count() + thread_index();
  const i64 quads = (vocabulary + kRacers - 1) / kRacers;
  for (i64 b = self; b < branches; b += step) {
    draft_temperature[b] = static_cast<float>(temperature[b]);
    draft_top_p[b] = static_cast<float>(top_p[b]);
    draft_min_p[b] = static_cast<float>(min_p[b]);
  }
  for (i64 i = self; i < branches * depths * quads; i += step) {
    const i64 row = i / quads;
    const i64 b = row / depths;
    if (!(temperature[b] > 0.0)) continue;
    const i64 position = tip_position[b] + 1 + row % depths;
    const RaceKey key = race_key(seed[b], stream[b], position, static_cast<u32>(purpose));
    const i64 quad = i % quads;
    const PhiloxBlock block = race_block(key, static_cast<u32>(quad));
    const i64 first = quad * kRacers;
    for (i64 j = 0; j < kRacers && first + j < vocabulary; ++j) {
      noise[row * vocabulary + first + j] = exponential(block.word[j]);
    }
  }
}

}  // namespace outrider
