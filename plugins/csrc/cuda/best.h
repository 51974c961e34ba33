// The best of a list, by a block of threads, however long the list and however its best are spread.
#pragma once

#include "../rank_key.h"
#include "block.h"

namespace outrider {

constexpr i64 kMostBest = 64;
constexpr i64 kMostFound = 1024;

// The `count` largest of `there` keys, largest first, 0 after the last one; no two are alike but for zeros.
OUTRIDER_DEVICE void rank_best(const u64* keys, i64 there, i64 count, u64* best) {
  for (i64 i = thread_index(); i < count; i += thread_count()) best[i] = 0;
  barrier();
  for (i64 i = thread_index(); i < there; i += thread_count()) {
    const u64 key = keys[i];
    i64 rank = 0;
    for (i64 j = 0; j < there; ++j) rank += keys[j] > key ? 1 : 0;
    if (key != 0 && rank < count) best[rank] = key;
  }
  barrier();
}

OUTRIDER_DEVICE u64* found_memory() {  // one for every list that a kernel ranks
  OUTRIDER_SHARED u64 found[kMostFound];
  return found;
}

// The `count` <= kMostBest largest keys, largest first, in `best`, which the block shares. `each` calls what it is
// given with every key of its thread; it is called at least twice.
//
// The best of each thread give a floor that at least `count` keys reach. Those that do are few, unless the best stand
// close together: then any kMostFound of them give a higher floor. What is found does not depend on which.
template <typename Each>
OUTRIDER_DEVICE void find_best(const Each& each, i64 count, u64* best) {
  OUTRIDER_SHARED u32 seen;
  u64* found = found_memory();
  u64 own = 0;
  each([&own](u64 key) { own = key > own ? key : own; });
  found[thread_index()] = own;
  i64 there = thread_count();
  for (bool all = false;;) {
    barrier();
    rank_best(found, there, count, best);
    if (all) return;
    const u64 floor = best[count - 1];
    if (thread_index() == 0) seen = 0;
    barrier();
    each([&](u64 key) {
      if (key < floor) return;
      const u32 place = count_up(&seen);
      if (place < kMostFound) found[place] = key;
    });
    barrier();
    all = seen <= kMostFound;
    there = all ? seen : kMostFound;
  }
}

// The same of an array of values.
template <typename Values>
OUTRIDER_DEVICE void find_best_values(const Values& values, i64 size, i64 count, u64* best) {
  find_best(
      [&](const auto& visit) {
        for (i64 i = thread_index(); i < size; i += thread_count()) visit(rank_key(legible(values[i]), i));
      },
      count, best);
}

}  // namespace outrider
