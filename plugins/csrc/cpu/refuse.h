// Errors of a call: sentences that name the op and the value. Python sees ValueError.
#pragma once

#include <stdexcept>
#include <string>

#include "../portable.h"

namespace outrider {

[[noreturn]] inline void refuse(const char* op, const std::string& sentence) {
  throw std::invalid_argument(std::string(op) + ": " + sentence);
}

// "branch[3] is 9; it must be in 0..7."
[[noreturn]] inline void refuse_value(const char* op, const char* tensor, i64 index, i64 value, i64 least, i64 most) {
  refuse(op, std::string(tensor) + "[" + std::to_string(index) + "] is " + std::to_string(value) + "; it must be in " +
                 std::to_string(least) + ".." + std::to_string(most) + ".");
}

inline void check_value(const char* op, const char* tensor, i64 index, i64 value, i64 least, i64 most) {
  if (value < least || value > most) refuse_value(op, tensor, index, value, least, most);
}

// parent[i] in -1..i-1: ancestors come before descendants.
inline void check_parents(const char* op, const i64* parent, i64 new_tokens) {
  for (i64 i = 0; i < new_tokens; ++i) check_value(op, "parent", i, parent[i], -1, i - 1);
}

// Which row owns which new tokens: 0 = row_splits[0] <= row_splits[1] <= ... <= row_splits[rows] <= most_new.
inline void check_row_splits(const char* op, const i64* row_splits, i64 rows, i64 most_new) {
  check_value(op, "row_splits", 0, row_splits[0], 0, 0);
  for (i64 r = 1; r <= rows; ++r) check_value(op, "row_splits", r, row_splits[r], row_splits[r - 1], most_new);
}

}  // namespace outrider
