// The nodes of a draft tree, as candidates that were chosen: ascending, so that ancestors come first.
#pragma once

#include "portable.h"

namespace outrider {

// The node of the chosen `candidate`, where 0 is the root and -1 the root as a candidate: as many chosen ones are at or
// below it. Of a candidate that was not chosen, the last node before it.
OUTRIDER_HD inline i64 node_of(const i64* chosen, i64 count, i64 candidate) {
  i64 low = 0;
  i64 high = count;
  while (low < high) {
    const i64 middle = low + (high - low) / 2;
    if (chosen[middle] <= candidate) {
      low = middle + 1;
    } else {
      high = middle;
    }
  }
  return low;
}

}  // namespace outrider
