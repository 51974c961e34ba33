// What a kernel asks of its block, on a machine without a GPU.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>

#include "copies.h"
#include "grid.h"

#define OUTRIDER_KERNEL extern "C" void
#define OUTRIDER_DEVICE inline
#define OUTRIDER_OUTLINED inline
#define OUTRIDER_SHARED static
#define OUTRIDER_FIT(threads, blocks)
#define OUTRIDER_UNROLL(times)

namespace outrider {

extern emulator::Grid grid;
extern char* dynamic_memory;  // of the block that runs

inline i64 thread_index() { return grid.place().thread; }
inline i64 thread_count() { return grid.place().threads; }
inline i64 block_index() { return grid.place().block; }
inline i64 block_count() { return grid.place().blocks; }
inline void barrier() { grid.wait(); }
inline void let_next_begin() {}
inline void wait_for_earlier() {}
inline void publish() {}
inline void add(u64* to, u64 value) { *to += value; }
inline void add(u32* to, u32 value) { *to += value; }
inline u32 count_up(u32* counter) { return (*counter)++; }
inline float fused(float a, float b, float c) { return std::fma(a, b, c); }
inline float root(float x) { return std::sqrt(x); }
inline float nearest(float x) { return std::nearbyint(x); }
inline char* dynamic_shared() { return dynamic_memory; }

// A load of all of a T at once, which a GPU refuses elsewhere than at multiples of its size.
template <typename T>
inline T load_aligned(const void* from) {
  if (reinterpret_cast<std::uintptr_t>(from) % sizeof(T) != 0) std::abort();
  T loaded;
  std::memcpy(&loaded, from, sizeof loaded);
  return loaded;
}

struct alignas(16) Quad {
  float value[4];
};

struct alignas(16) Bytes16 {
  u32 word[4];
};

struct alignas(8) Bytes8 {
  u32 word[2];
};

inline Quad load_quad(const float* from) { return load_aligned<Quad>(from); }
inline void keep_quad(float* to, const Quad& quad) {
  if (reinterpret_cast<std::uintptr_t>(to) % sizeof quad != 0) std::abort();
  std::memcpy(to, &quad, sizeof quad);
}
inline Bytes16 load_bytes16(const void* from) { return load_aligned<Bytes16>(from); }
inline Bytes8 load_bytes8(const void* from) { return load_aligned<Bytes8>(from); }

inline emulator::Copies& copies() {
  static emulator::Copies copies;
  return copies;
}
using SharedAddress = char*;
inline SharedAddress shared_address(void* shared) { return static_cast<char*>(shared); }
inline void start_copy16(SharedAddress to, const void* from, bool there) {
  if (there) copies().start(grid.place(), to, from, 16);
}
inline void start_copy4(SharedAddress to, const void* from, bool there) {
  if (there) copies().start(grid.place(), to, from, 4);
}
inline void close_copies() { copies().close(grid.place()); }
template <int kOpen>
void wait_for_copies() {
  copies().wait(grid.place(), kOpen, [](char* to, const char* from, size_t bytes) { std::memcpy(to, from, bytes); });
}

}  // namespace outrider
