// Walks over groups and rows, written once for all instruction sets.
#pragma once

#include "onnxruntime/quant_rows.h"

namespace outrider::engine {
namespace {  // each instruction set has its own copy

// Where a tile finds its rows: of row r + i, at `integers + i * inputs` and at `scales + i * blocks`.
struct TileRows {
  const std::int8_t* integers;
  const float* scales;
  const std::int32_t* sums;
  const float* scaled_sums;
  std::int64_t inputs, blocks;
};

// `Isa` has kRows, the rows of its largest tile, and
//   template <int Rows, int Bits, bool Wide, bool Minimums>
//   static void tile(const std::uint8_t* packed, const TileRows& x, float* to, std::int64_t stride),
// which writes Rows * kGroup outputs for the group that starts at `packed`.
template <class Isa, int Rows, int Bits, bool Wide, bool Minimums>
void tile_of_at_most(int rows, const std::uint8_t* packed, const TileRows& x, float* to, std::int64_t stride) {
  if constexpr (Rows > 0) {
    if (rows == Rows) return Isa::template tile<Rows, Bits, Wide, Minimums>(packed, x, to, stride);
    tile_of_at_most<Isa, Rows - 1, Bits, Wide, Minimums>(rows, packed, x, to, stride);
  }
}

template <class Isa, int Bits, bool Wide, bool Minimums>
void multiply_groups(const QuantProduct& product, std::int64_t first, std::int64_t last) {
  const QuantLayout& layout = product.layout;
  const std::int64_t blocks = layout.blocks;
  for (std::int64_t group = first; group < last; ++group) {
    const std::uint8_t* packed = product.packed + group * layout.group_bytes;
    const std::int64_t left = layout.outputs - group * kGroup;
    for (std::int64_t row = 0; row < product.rows;) {
      // Rows are dealt out evenly: 9 rows are tiles of 5 and 4, as a tile of one row costs more than a row of many.
      const std::int64_t rest = product.rows - row, tiles = (rest + Isa::kRows - 1) / Isa::kRows;
      const int rows = static_cast<int>((rest + tiles - 1) / tiles);
      const TileRows x{product.x.integers + row * layout.inputs, product.x.scales + row * blocks,
                       product.x.sums + row * blocks, product.x.scaled_sums + row * blocks, layout.inputs, blocks};
      float* to = product.to + row * layout.outputs + group * kGroup;
      if (left >= kGroup) {
        tile_of_at_most<Isa, Isa::kRows, Bits, Wide, Minimums>(rows, packed, x, to, layout.outputs);
      } else {
        float padded[Isa::kRows * kGroup];
        tile_of_at_most<Isa, Isa::kRows, Bits, Wide, Minimums>(rows, packed, x, padded, kGroup);
        for (int r = 0; r < rows; ++r)
          for (std::int64_t i = 0; i < left; ++i) to[r * layout.outputs + i] = padded[r * kGroup + i];
      }
      row += rows;
    }
  }
}

template <class Isa, int Bits, bool Wide>
void multiply_bits(const QuantProduct& product, std::int64_t first, std::int64_t last) {
  return product.layout.minimums ? multiply_groups<Isa, Bits, Wide, true>(product, first, last)
                                 : multiply_groups<Isa, Bits, Wide, false>(product, first, last);
}

template <class Isa>
void multiply(const QuantProduct& product, std::int64_t first, std::int64_t last) {
  if (product.layout.bits == 4)
    return product.layout.wide ? multiply_bits<Isa, 4, true>(product, first, last)
                               : multiply_bits<Isa, 4, false>(product, first, last);
  return product.layout.wide ? multiply_bits<Isa, 8, true>(product, first, last)
                             : multiply_bits<Isa, 8, false>(product, first, last);
}

template <class Isa>
QuantKernels quant_of() {
  return {&quantize_row, &multiply<Isa>};
}

}  // namespace
}  // namespace outrider::engine
