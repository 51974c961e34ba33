// The moves of a KV plane's slots. Moves happen one after another, i ascending: work is split over planes, rows,
// heads and lanes, never over the moves of a row, so that slots that are moved down over each other arrive whole.
#pragma once

#include "portable.h"

namespace outrider {

struct SlotMove {
  i64 from;
  i64 to;
};

// Of new token `token` of a row whose tokens start at `first`, after `earlier` tokens of the row that were moved.
OUTRIDER_HD inline SlotMove slot_move(i64 token, i64 first, i64 earlier, i64 source_base, i64 destination) {
  return {source_base + (token - first), destination + earlier};
}

}  // namespace outrider
