// The k-th largest of a block's keys, and the weight at which the largest weights reach a sum: both by their digits,
// from the highest down. `each` calls what it is given with every key, or weight, of its thread; it is called once a
// digit.
#pragma once

#include "../choice.h"
#include "block.h"

namespace outrider {

struct Digit {
  u64 digit;
  u64 above;  // the sum of the larger digits
};

// The largest of `digits` at which the sums, added up from the last one down, reach `need` (1 or more); 0 where they do
// not. Every thread calls, and gets it.
template <typename Count>
OUTRIDER_DEVICE Digit digit_reaching(const Count* sums, i64 digits, u64 need) {
  OUTRIDER_SHARED Digit found;
  for (i64 d = thread_index(); d < digits; d += thread_count()) {
    u64 above = 0;
    for (i64 larger = d + 1; larger < digits; ++larger) above += sums[larger];
    if (above < need && (above + sums[d] >= need || d == 0)) found = {static_cast<u64>(d), above};
  }
  barrier();
  const Digit digit = found;
  barrier();  // before anyone writes again
  return digit;
}

// The k-th largest order key; the smallest one there may be where there are fewer.
template <typename Each>
OUTRIDER_DEVICE i32 kth_largest_key(const Each& each, i64 k) {
  constexpr i64 kDigits = 256;
  OUTRIDER_SHARED u32 counts[kDigits];
  u32 found = 0;  // the leading digits of the key
  u64 rank = static_cast<u64>(k);  // of the key among those that share them
  for (int shift = 24; shift >= 0; shift -= 8) {
    for (i64 i = thread_index(); i < kDigits; i += thread_count()) counts[i] = 0;
    barrier();
    each([&](i32 order_key) {
      const u32 key = static_cast<u32>(order_key) ^ 0x80000000u;
      const bool shares = shift == 24 || (key >> (shift + 8)) == (found >> (shift + 8));
      if (shares) add(&counts[(key >> shift) & (kDigits - 1)], 1u);
    });
    barrier();
    const Digit digit = digit_reaching(counts, kDigits, rank);
    found |= static_cast<u32>(digit.digit) << shift;
    rank -= digit.above;
  }
  return static_cast<i32>(found ^ 0x80000000u);
}

struct Cut {
  u64 weight;
  u64 above;  // the sum of the larger weights
};

// The largest weight c such that the weights of at least c add up to `need` (1 or more) or more; 0 where all do not.
template <typename Each>
OUTRIDER_DEVICE Cut cut_reaching(const Each& each, u64 need) {
  constexpr int kDigit = 7;
  constexpr i64 kDigits = 1 << kDigit;
  OUTRIDER_SHARED u64 sums[kDigits];
  Cut cut = {0, 0};
  for (int shift = 5 * kDigit; shift >= 0; shift -= kDigit) {  // weights have 41 bits
    for (i64 i = thread_index(); i < kDigits; i += thread_count()) sums[i] = 0;
    barrier();
    each([&](u64 weight) {
      const bool shares = (weight >> (shift + kDigit)) == (cut.weight >> (shift + kDigit));
      if (weight != 0 && shares) add(&sums[(weight >> shift) & (kDigits - 1)], weight);
    });
    barrier();
    const Digit digit = digit_reaching(sums, kDigits, need - cut.above);
    cut.weight |= digit.digit << shift;
    cut.above += digit.above;
  }
  return cut;
}

}  // namespace outrider
