// Sums and maxima over all threads of a block, or over those before a thread. Every thread calls, and gets its result.
#pragma once

#include "block.h"

namespace outrider {

OUTRIDER_DEVICE u64* fold_memory() {  // one for everything that a kernel folds
  OUTRIDER_SHARED u64 values[kMostThreads];
  return values;
}

// `combine` is associative and commutative: `T` is an integer, so that the order leaves no trace.
template <typename T, typename Combine>
OUTRIDER_DEVICE T fold(T own, Combine combine) {
  u64* values = fold_memory();
  const i64 self = thread_index();
  values[self] = static_cast<u64>(own);
  barrier();
  for (i64 width = thread_count(); width > 1;) {
    const i64 half = (width + 1) / 2;
    if (self + half < width) {
      values[self] = static_cast<u64>(combine(static_cast<T>(values[self]), static_cast<T>(values[self + half])));
    }
    width = half;
    barrier();
  }
  const T result = static_cast<T>(values[0]);
  barrier();  // before anyone writes again
  return result;
}

struct Sum {
  template <typename T>
  OUTRIDER_DEVICE T operator()(T a, T b) const {
    return a + b;
  }
};

struct Largest {
  template <typename T>
  OUTRIDER_DEVICE T operator()(T a, T b) const {
    return a > b ? a : b;
  }
};

struct Least {
  template <typename T>
  OUTRIDER_DEVICE T operator()(T a, T b) const {
    return a < b ? a : b;
  }
};

// The sum of `own` over the threads before this one.
OUTRIDER_DEVICE u64 sum_before(u64 own) {
  u64* values = fold_memory();
  values[thread_index()] = own;
  barrier();
  u64 before = 0;
  for (i64 t = 0; t < thread_index(); ++t) before += values[t];
  barrier();  // before anyone writes again
  return before;
}

// A thread's part of `size` places in their order: the first thread has the first ones.
struct Stretch {
  i64 begin;
  i64 end;
};

OUTRIDER_DEVICE Stretch own_stretch(i64 size) {
  const i64 most = (size + thread_count() - 1) / thread_count();
  const i64 begin = thread_index() * most;
  return {begin < size ? begin : size, begin + most < size ? begin + most : size};
}

}  // namespace outrider
