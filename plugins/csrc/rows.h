// The flat ragged layout: new tokens of all rows lie one after another, and row r owns
// row_splits[r] .. row_splits[r + 1] - 1. Splits ascend from 0; a row may own nothing.
#pragma once

#include "portable.h"

namespace outrider {

// The row that owns `token`, where 0 <= token < row_splits[rows].
OUTRIDER_HD inline i64 row_of(const i64* row_splits, i64 rows, i64 token) {
  i64 least = 0;
  i64 most = rows - 1;
  while (least < most) {
    const i64 middle = least + (most - least) / 2;
    if (token < row_splits[middle + 1]) {
      most = middle;
    } else {
      least = middle + 1;
    }
  }
  return least;
}

}  // namespace outrider
