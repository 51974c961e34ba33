// Slots are moved in lanes, a thread a lane at a time: as many bytes as are read and written at once.
#pragma once

#include "block.h"

namespace outrider {

// `unit` is 2, 4 or 16 bytes.
OUTRIDER_DEVICE void move_lane(char* to, const char* from, i64 unit) {
  if (unit == 16) {
    const u64 low = reinterpret_cast<const u64*>(from)[0];
    const u64 high = reinterpret_cast<const u64*>(from)[1];
    reinterpret_cast<u64*>(to)[0] = low;
    reinterpret_cast<u64*>(to)[1] = high;
  } else if (unit == 4) {
    *reinterpret_cast<u32*>(to) = *reinterpret_cast<const u32*>(from);
  } else {
    *reinterpret_cast<unsigned short*>(to) = *reinterpret_cast<const unsigned short*>(from);
  }
}

}  // namespace outrider
