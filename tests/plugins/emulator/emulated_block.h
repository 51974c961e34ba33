// Blocks of threads on a machine without a GPU: fibers, run one after another from barrier to barrier.
//
// The order of the threads between two barriers is shuffled, so that a kernel whose result depends on it is noticed.
#pragma once

#include <cstdint>

#define OUTRIDER_KERNEL extern "C" void
#define OUTRIDER_DEVICE inline
#define OUTRIDER_SHARED static

namespace outrider {

struct Place {
  i64 thread;
  i64 threads;
  i64 block;
  i64 blocks;
};
extern Place place_now;
void wait_for_the_others();

inline i64 thread_index() { return place_now.thread; }
inline i64 thread_count() { return place_now.threads; }
inline i64 block_index() { return place_now.block; }
inline i64 block_count() { return place_now.blocks; }
inline void barrier() { wait_for_the_others(); }
inline void publish() {}
inline void add(u64* to, u64 value) { *to += value; }
inline void add(u32* to, u32 value) { *to += value; }
inline u32 count_up(u32* counter) { return (*counter)++; }

}  // namespace outrider
