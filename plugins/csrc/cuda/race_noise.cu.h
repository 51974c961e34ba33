// RaceNoise: a thread computes the noise of four tokens, which share a block of random words.
#pragma once

#include "../race.h"
#include "block.h"

namespace outrider {

OUTRIDER_KERNEL outrider_race_noise(const i64* tip_position, const double* sampling, const u64* seed, const i64* stream,
                                    float* noise, float* draft_sampling, i64 branches, i64 depths, i64 vocabulary,
                                    i64 purpose) {
  follow();
  const i64 step = block_count() * thread_count();
  const i64 self = block_index() * thread_count() + thread_index();
  const i64 quads = (vocabulary + kRacers - 1) / kRacers;
  for (i64 i = self; i < branches * kSettings; i += step) draft_sampling[i] = static_cast<float>(sampling[i]);
  for (i64 i = self; i < branches * depths * quads; i += step) {
    const i64 row = i / quads;
    const i64 b = row / depths;
    if (!(sampling_of(sampling, b).temperature > 0.0)) continue;
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
