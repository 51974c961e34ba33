// Numbers that the host has changed, few of many: a list of places and values goes up with a step's other data.
#pragma once

#include "block.h"

namespace outrider {

// changes: how many, then the place and the new value of each; no place comes twice.
OUTRIDER_KERNEL outrider_set_numbers(i64* numbers, const i64* changes) {
  follow();
  const i64 count = changes[0];
  for (i64 i = thread_index(); i < count; i += thread_count()) numbers[changes[1 + 2 * i]] = changes[2 + 2 * i];
}

}  // namespace outrider
