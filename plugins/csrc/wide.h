// Products of two 64-bit integers divided by 2^53, exact: they turn a 53-bit fraction into a share of a sum of weights.
#pragma once

#include "portable.h"

namespace outrider {

struct Wide {
  u64 high;
  u64 low;
};

// Schoolbook multiplication in 32-bit halves: the same on every compiler.
OUTRIDER_HD inline Wide multiply(u64 a, u64 b) {
  const u64 mask = 0xffffffffu;
  const u64 low = (a & mask) * (b & mask);
  const u64 cross_a = (a >> 32) * (b & mask) + (low >> 32);
  const u64 cross_b = (a & mask) * (b >> 32) + (cross_a & mask);
  return {(a >> 32) * (b >> 32) + (cross_a >> 32) + (cross_b >> 32), (cross_b << 32) | (low & mask)};
}

// The least s with s * 2^53 >= fraction53 * total.
OUTRIDER_HD inline u64 ceil_share(u64 fraction53, u64 total) {
  const Wide product = multiply(fraction53, total);
  const u64 remainder = product.low & ((1ull << 53) - 1);
  return ((product.high << 11) | (product.low >> 53)) + (remainder != 0 ? 1 : 0);
}

}  // namespace outrider
