// Entropy: of a row of logits, the sum of p ln p: its negative entropy. A block has one row, 256 threads.
#pragma once

#include "../../log.h"
#include "lane_math.h"

namespace outrider {

constexpr int kEntropyThreads = 256;

// Sums over all threads, in one order.
OUTRIDER_DEVICE double ordered_sum(double own) {
  OUTRIDER_SHARED double values[kEntropyThreads];
  barrier();  // before anyone writes again
  values[thread_index()] = own;
  barrier();
  double sum = 0.0;
  for (i64 t = 0; t < thread_count(); ++t) sum += values[t];
  return sum;
}

OUTRIDER_KERNEL outrider_entropy(const float* logits, float* to, i64 vocabulary) {
  follow();
  OUTRIDER_SHARED float tops[kEntropyThreads];
  const float* row = logits + block_index() * vocabulary;
  float own = float_of(static_cast<i32>(0xff800000u));
  for (i64 i = thread_index(); i < vocabulary; i += thread_count()) own = row[i] > own ? row[i] : own;
  tops[thread_index()] = own;
  barrier();
  float top = tops[0];
  for (i64 t = 1; t < thread_count(); ++t) top = tops[t] > top ? tops[t] : top;
  double weight = 0.0, weighted = 0.0;
  for (i64 i = thread_index(); i < vocabulary; i += thread_count()) {
    const float less = row[i] - top;
    const double e = static_cast<double>(lane_exp(less));
    weight += e;
    if (e > 0.0) weighted += e * static_cast<double>(less);
  }
  const double total = ordered_sum(weight), sum = ordered_sum(weighted);
  if (thread_index() == 0) {
    to[block_index()] = static_cast<float>(sum / total - shared_log(total));
  }
}

}  // namespace outrider
