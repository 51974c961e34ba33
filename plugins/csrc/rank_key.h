// A value and its index as one integer, the larger the better. Of equal values the lower index is
// better, so no two of a list are alike, and 0 is no one's.
#pragma once

#include "choice.h"
#include "portable.h"

namespace outrider {

OUTRIDER_HD inline float minus_infinity() { return float_of(-0x00800000); }

// NaN says nothing: it ranks last, with -inf.
OUTRIDER_HD inline float legible(float value) { return value == value ? value : minus_infinity(); }

// Of a legible value, at an index below 2^32.
OUTRIDER_HD inline u64 rank_key(float value, i64 index) {
  const u32 order = static_cast<u32>(order_key(value)) ^ 0x80000000u;
  return (static_cast<u64>(order) << 32) | (0xffffffffu - static_cast<u32>(index));
}

OUTRIDER_HD inline float value_of(u64 rank_key) {
  return logit_of(static_cast<i32>(static_cast<u32>(rank_key >> 32) ^ 0x80000000u));
}

OUTRIDER_HD inline i64 index_of(u64 rank_key) { return 0xffffffffu - static_cast<u32>(rank_key); }

}  // namespace outrider
