// Draws and CoupledDraws: a thread for each number.
#pragma once

#include "../philox.h"
#include "block.h"

namespace outrider {

OUTRIDER_KERNEL outrider_draws(const i64* tip_position, const u64* seed, const i64* stream, double* draws, i64 branches,
                               i64 depths, i64 purpose) {
  const i64 step = block_count() * thread_count();
  for (i64 i = block_index() * thread_count() + thread_index(); i < branches * depths; i += step) {
    const i64 b = i / depths;
    const i64 position = tip_position[b] + 1 + i % depths;
    draws[i] = draw_f64(uniform53(seed[b], stream[b], position, static_cast<u32>(purpose)));
  }
}

OUTRIDER_KERNEL outrider_coupled_draws(const i64* tip_position, const u64* seed, const i64* stream,
                                       const double* temperature, const double* top_p, float* draws,
                                       float* draft_temperature, float* draft_top_p, i64 branches, i64 depths) {
  const i64 step = block_count() * thread_count();
  for (i64 i = block_index() * thread_count() + thread_index(); i < branches * depths; i += step) {
    const i64 b = i / depths;
    const i64 position = tip_position[b] + 1 + i % depths;
    draws[i] = static_cast<float>(draw_f64(uniform53(seed[b], stream[b], position, kForTarget)));
    if (i % depths == 0) {
      draft_temperature[b] = static_cast<float>(temperature[b]);
      draft_top_p[b] = static_cast<float>(top_p[b]);
    }
  }
}

}  // namespace outrider
