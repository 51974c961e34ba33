// What a kernel asks of its warp, on a machine without a GPU.
#pragma once

#include "emulated_block.h"
#include "matrix.h"

namespace outrider {

enum Collective { kWarpBarrier, kShuffle, kMultiplyBytes, kMultiplyHalves, kMultiplyBfloats };

inline i64 lane_index() { return grid.place().lane(); }
inline void warp_barrier() { grid.wait_for_warp(kWarpBarrier); }

template <typename T>
T shuffle(T value, int lane) {
  static_assert(sizeof(T) == 4);
  emulator::Shown own = {};
  std::memcpy(own.word, &value, sizeof value);
  const emulator::Shown* shown = grid.exchange(kShuffle, own);
  std::memcpy(&value, shown[lane % emulator::kLanes].word, sizeof value);
  return value;
}

template <typename T>
T shuffle_xor(T value, int mask) {
  return shuffle(value, static_cast<int>(lane_index()) ^ mask);
}

template <typename Kind, typename T>
void multiply(Collective collective, T (&sums)[4], const u32 (&a)[4], const u32 (&b)[2]) {
  const emulator::Shown* shown = grid.exchange(collective, {{a[0], a[1], a[2], a[3], b[0], b[1]}});
  emulator::add_products<Kind>(sums, shown, lane_index());
}

inline void multiply_bytes(i32 (&sums)[4], i32 from, const u32 (&a)[4], const u32 (&b)[2]) {
  for (i32& sum : sums) sum = from;
  multiply<emulator::Bytes>(kMultiplyBytes, sums, a, b);
}

inline void multiply_halves(float (&sums)[4], const u32 (&a)[4], const u32 (&b)[2]) {
  multiply<emulator::Halves>(kMultiplyHalves, sums, a, b);
}

inline void multiply_bfloats(float (&sums)[4], const u32 (&a)[4], const u32 (&b)[2]) {
  multiply<emulator::Bfloats>(kMultiplyBfloats, sums, a, b);
}

}  // namespace outrider
