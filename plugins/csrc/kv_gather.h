// Which row of a KV plane goes where. Moves happen one after another, i ascending: whoever splits the work splits it
// over planes, heads and lanes, never over i, so that rows moved down over each other arrive whole.
#pragma once

#include "portable.h"

namespace outrider {

struct RowMove {
  i64 from;
  i64 to;
};

OUTRIDER_HD inline RowMove row_move(const i64* source, i64 source_base, i64 destination, i64 i) {
  return {source_base + source[i], destination + i};
}

}  // namespace outrider
