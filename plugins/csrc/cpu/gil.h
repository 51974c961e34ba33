// Lets other Python threads run during long work only: a thread that takes the GIL over may keep it for milliseconds,
// which a step of microseconds must not wait for.
#pragma once

#include <nanobind/nanobind.h>

#include <optional>

#include "../portable.h"

namespace outrider {

constexpr i64 kLongWorkBytes = 1 << 20;  // some 50 microseconds of streaming

class GilReleasedIfLong {
 public:
  explicit GilReleasedIfLong(i64 bytes_touched) {
    if (bytes_touched >= kLongWorkBytes) released_.emplace();
  }

 private:
  std::optional<nanobind::gil_scoped_release> released_;
};

}  // namespace outrider
