// Products of rows with packed float32 weights, written once for all instruction sets.
//
// A product is a function of its row alone, and has the same bits from every instruction set: each output is summed over
// inputs in ascending order by fused multiply-adds.
#pragma once

#include "onnxruntime/kernels.h"

namespace outrider::engine {
namespace {  // each instruction set has its own copy

template <class Lanes, int Rows>
void product_tile(const float* packed, std::int64_t inputs, const float* const* rows, float* to, std::int64_t stride) {
  typename Lanes::Vector sums[Rows];
  for (int r = 0; r < Rows; ++r) sums[r] = Lanes::zero();
  for (std::int64_t k = 0; k < inputs; ++k) {
    const auto weights = Lanes::load(packed + k * kLanes);
    for (int r = 0; r < Rows; ++r) sums[r] = Lanes::fma(Lanes::broadcast(rows[r][k]), weights, sums[r]);
  }
  for (int r = 0; r < Rows; ++r) Lanes::store(to + r * stride, sums[r]);
}

template <class Lanes, int Rows>
void product_tile_of_at_most(int count, const float* packed, std::int64_t inputs, const float* const* rows, float* to,
                             std::int64_t stride) {
  if constexpr (Rows > 0) {
    if (count == Rows) return product_tile<Lanes, Rows>(packed, inputs, rows, to, stride);
    product_tile_of_at_most<Lanes, Rows - 1>(count, packed, inputs, rows, to, stride);
  }
}

template <class Lanes>
void multiply_panels(const FloatProduct& product, std::int64_t first, std::int64_t last) {
  constexpr int kMost = Lanes::kMultiplied;
  for (std::int64_t panel = first; panel < last; ++panel) {
    const float* packed = product.packed + panel * product.inputs * kLanes;
    for (std::int64_t row = 0; row < product.rows;) {
      // Dealt out evenly: a tile of one row costs more than a row of many.
      const std::int64_t rest = product.rows - row, tiles = (rest + kMost - 1) / kMost;
      const int rows = static_cast<int>((rest + tiles - 1) / tiles);
      product_tile_of_at_most<Lanes, kMost>(rows, packed, product.inputs, product.x + row,
                                            product.to + row * product.stride + panel * kLanes, product.stride);
      row += rows;
    }
  }
}

}  // namespace
}  // namespace outrider::engine
