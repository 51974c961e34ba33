// Arrays of one dimension that functions of the module take, C-contiguous and of exactly this type.
#pragma once

#include <nanobind/ndarray.h>

namespace outrider {

template <typename T>
using OutputRow = nanobind::ndarray<T, nanobind::ndim<1>, nanobind::c_contig, nanobind::device::cpu>;

template <typename T>
using InputRow = OutputRow<const T>;

}  // namespace outrider
