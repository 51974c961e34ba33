// Sums and maxima over all threads of a block. Every thread calls, and every thread gets the result.
#pragma once

#include "block.h"

namespace outrider {

// `combine` is associative and commutative: here, of integers, so that the order leaves no trace.
template <typename T, typename Combine>
OUTRIDER_DEVICE T fold(T own, Combine combine) {
  OUTRIDER_SHARED T values[kMostThreads];
  const i64 self = thread_index();
  values[self] = own;
  barrier();
  for (i64 width = thread_count(); width > 1;) {
    const i64 half = (width + 1) / 2;
    if (self + half < width) values[self] = combine(values[self], values[self + half]);
    width = half;
    barrier();
  }
  const T result = values[0];
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

}  // namespace outrider
