// The best of a list in the order of the list, by a block of threads, however many they are.
#pragma once

#include "fold.h"
#include "select.h"

namespace outrider {

// The places of the `count` largest of `size` values, ascending; of equals the first ones. Every thread calls, and what
// it has written is visible to the others after a barrier.
OUTRIDER_DEVICE void find_best_places(const float* values, i64 size, i64 count, i64* places) {
  const auto each = [&](const auto& visit) {
    for (i64 i = thread_index(); i < size; i += thread_count()) visit(order_key(values[i]));
  };
  const i32 cut = kth_largest_key(each, count);
  const Stretch stretch = own_stretch(size);
  i64 own_above = 0;
  i64 own_at_cut = 0;
  for (i64 i = stretch.begin; i < stretch.end; ++i) {
    const i32 key = order_key(values[i]);
    own_above += key > cut ? 1 : 0;
    own_at_cut += key == cut ? 1 : 0;
  }
  // Of keys at the cut the first `room` are chosen.
  const i64 room = count - fold(own_above, Sum());
  i64 at_cut = static_cast<i64>(sum_before(own_at_cut));
  const i64 left = room > at_cut ? room - at_cut : 0;
  i64 place = static_cast<i64>(sum_before(own_above + (own_at_cut < left ? own_at_cut : left)));
  for (i64 i = stretch.begin; i < stretch.end; ++i) {
    const i32 key = order_key(values[i]);
    if (key > cut || (key == cut && at_cut++ < room)) places[place++] = i;
  }
}

}  // namespace outrider
