// The choice of a token by a block of threads: the rule of ../choice.h, on one row of logits.
//
// Weights are integers, so that blocks of any size choose as the CPU does. They stand in scratch memory, one for each
// token, zero where the filters drop it.
#pragma once

#include "../race.h"
#include "fold.h"

namespace outrider {

constexpr i64 kNoFault = 0;
constexpr i64 kNanFault = 1;
constexpr i64 kMaskedFault = 2;
constexpr i64 kIndexFault = 3;

constexpr i32 kInfinityKey = 0x7f800000;

// What the filters leave of a row. `weights` may be null where the row is greedy: all weight is on `best` then.
struct FilteredRow {
  u64* weights;
  i64 size;
  u64 total;
  i64 best;
  i64 fault;
};

// The k-th largest order key of a row, by its bytes from the highest down.
OUTRIDER_DEVICE i32 top_k_key(const float* logits, i64 size, i64 k) {
  OUTRIDER_SHARED u32 counts[256];
  OUTRIDER_SHARED u32 found;      // the leading bytes of the key
  OUTRIDER_SHARED i64 remaining;  // its rank among those that share them
  if (thread_index() == 0) {
    found = 0;
    remaining = k;
  }
  for (int shift = 24; shift >= 0; shift -= 8) {
    for (i64 i = thread_index(); i < 256; i += thread_count()) counts[i] = 0;
    barrier();
    const u32 prefix = found;
    for (i64 i = thread_index(); i < size; i += thread_count()) {
      const u32 key = static_cast<u32>(order_key(logits[i])) ^ 0x80000000u;
      const bool shares = shift == 24 || (key >> (shift + 8)) == (prefix >> (shift + 8));
      if (shares) add(&counts[(key >> shift) & 255u], 1u);
    }
    barrier();
    if (thread_index() == 0) {
      u32 digit = 255;
      while (static_cast<i64>(counts[digit]) < remaining) remaining -= counts[digit--];
      found |= digit << shift;
    }
    barrier();
  }
  const i32 key = static_cast<i32>(found ^ 0x80000000u);
  barrier();
  return key;
}

// The largest weight c such that the weights of at least c add up to `need` (1 or more) or more, by its digits.
OUTRIDER_DEVICE u64 nucleus_cut(const u64* weights, i64 size, u64 need) {
  constexpr int kDigit = 7;
  constexpr int kDigits = 1 << kDigit;
  OUTRIDER_SHARED u64 sums[kDigits];
  OUTRIDER_SHARED u64 found;
  OUTRIDER_SHARED u64 above;
  if (thread_index() == 0) found = above = 0;
  for (int shift = 5 * kDigit; shift >= 0; shift -= kDigit) {  // weights have 41 bits
    for (i64 i = thread_index(); i < kDigits; i += thread_count()) sums[i] = 0;
    barrier();
    const u64 prefix = found;
    for (i64 i = thread_index(); i < size; i += thread_count()) {
      const u64 w = weights[i];
      if (w != 0 && (w >> (shift + kDigit)) == (prefix >> (shift + kDigit))) add(&sums[(w >> shift) & (kDigits - 1)], w);
    }
    barrier();
    if (thread_index() == 0) {
      u64 digit = kDigits - 1;
      while (digit > 0 && above + sums[digit] < need) above += sums[digit--];
      found |= digit << shift;
    }
    barrier();
  }
  const u64 cut = found;
  barrier();
  return cut;
}

// Filters a row; `weights` `[size]` is scratch. Every thread gets the same answer.
OUTRIDER_DEVICE FilteredRow filter_row(const float* logits, i64 size, const Sampling& sampling, u64* weights) {
  i32 own_top = -0x7fffffff - 1;
  i32 own_abs = 0;
  for (i64 i = thread_index(); i < size; i += thread_count()) {
    const i32 key = order_key(logits[i]);
    const i32 abs = bits_of(logits[i]) & 0x7fffffff;
    own_top = key > own_top ? key : own_top;
    own_abs = abs > own_abs ? abs : own_abs;
  }
  const i32 top_key = fold(own_top, Largest());
  const i32 largest_abs = fold(own_abs, Largest());
  if (largest_abs > kInfinityKey) return {nullptr, size, 0, 0, kNanFault};
  if (top_key == ~kInfinityKey) return {nullptr, size, 0, 0, kMaskedFault};
  if (sampling.temperature == 0.0) {
    i64 own_first = size;
    for (i64 i = thread_index(); i < size; i += thread_count()) {
      if (order_key(logits[i]) == top_key && i < own_first) own_first = i;
    }
    return {nullptr, size, u64{1} << 40, fold(own_first, Least()), kNoFault};
  }
  const float top = logit_of(top_key);
  const bool limited = sampling.top_k > 0 && sampling.top_k < size;
  const i32 least_key = limited ? top_k_key(logits, size, sampling.top_k) : -0x7fffffff - 1;
  const bool nucleus = sampling.top_p < 1.0;
  const bool cuts = nucleus || sampling.min_p > 0.0;
  const bool again = cuts && sampling.filter_order == kTemperatureLast;
  const double heat = again ? 1.0 : sampling.temperature;
  u64 own_total = 0;
  for (i64 i = thread_index(); i < size; i += thread_count()) {
    weights[i] = order_key(logits[i]) >= least_key ? weight(logits[i], top, heat) : 0;
    own_total += weights[i];
  }
  u64 total = fold(own_total, Sum());  // and a barrier: every weight stands
  if (cuts) {
    u64 cut = least_share(sampling.min_p);
    if (nucleus) {
      const u64 need = nucleus_need(sampling.top_p, total);
      const u64 of_nucleus = nucleus_cut(weights, size, need > 0 ? need : 1);
      cut = of_nucleus > cut ? of_nucleus : cut;
    }
    own_total = 0;
    for (i64 i = thread_index(); i < size; i += thread_count()) {
      const bool kept = weights[i] != 0 && weights[i] >= cut;
      weights[i] = !kept ? 0 : again ? weight(logits[i], top, sampling.temperature) : weights[i];
      own_total += weights[i];
    }
    total = fold(own_total, Sum());
  }
  return {weights, size, total, 0, kNoFault};
}

// The token of a row of weights, some more than 0, that wins the race. Every thread gets it.
OUTRIDER_DEVICE i64 winner(const u64* weights, i64 size, const RaceKey& key) {
  u64 own = ~u64{0};  // a time and its token: bits of positive floats order as the floats do
  for (i64 quad = thread_index(); quad * kRacers < size; quad += thread_count()) {
    const i64 first = quad * kRacers;
    const int count = static_cast<int>(size - first < kRacers ? size - first : kRacers);
    bool some = false;
    for (int i = 0; i < count; ++i) some = some || weights[first + i] != 0;
    if (!some) continue;
    const PhiloxBlock block = race_block(key, static_cast<u32>(quad));
    for (int i = 0; i < count; ++i) {
      if (weights[first + i] == 0) continue;
      const u64 time = static_cast<u32>(bits_of(race_time(block.word[i], weights[first + i])));
      const u64 entry = (time << 32) | static_cast<u64>(first + i);
      own = entry < own ? entry : own;
    }
  }
  return static_cast<i64>(fold(own, Least()) & 0xffffffffu);
}

// The token that a race chooses from a row without a fault.
OUTRIDER_DEVICE i64 draw_token(const FilteredRow& row, const RaceKey& key) {
  return row.weights ? winner(row.weights, row.size, key) : row.best;
}

}  // namespace outrider
