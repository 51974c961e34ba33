// What a kernel asks of its block, on a machine without a GPU.
#pragma once

#include <cstdint>
#include <cstdlib>
#include <cstring>

#include "grid.h"

#define OUTRIDER_KERNEL extern "C" void
#define OUTRIDER_DEVICE inline
#define OUTRIDER_OUTLINED inline
#define OUTRIDER_SHARED static

namespace outrider {

extern emulator::Grid grid;

inline i64 thread_index() { return grid.place().thread; }
inline i64 thread_count() { return grid.place().threads; }
inline i64 block_index() { return grid.place().block; }
inline i64 block_count() { return grid.place().blocks; }
inline void barrier() { grid.wait(); }
inline void publish() {}
inline void add(u64* to, u64 value) { *to += value; }
inline void add(u32* to, u32 value) { *to += value; }
inline u32 count_up(u32* counter) { return (*counter)++; }

struct alignas(16) Quad {
  float value[4];
};

inline Quad load_quad(const float* from) {
  if (reinterpret_cast<std::uintptr_t>(from) % sizeof(Quad) != 0) std::abort();  // as a GPU would
  Quad quad;
  std::memcpy(&quad, from, sizeof quad);
  return quad;
}

}  // namespace outrider
