// Walks over groups and rows, written once for all instruction sets.
#pragma once

#include "onnxruntime/quant_rows.h"

namespace outrider::engine {
namespace {  // each instruction set has its own copy

// Weights that are read next, prefetched while a tile computes: `bytes` of them with each of its blocks.
struct Ahead {
  const std::uint8_t* from;  // null: nothing
  std::int64_t bytes;
  void fetch(std::int64_t block) const {
    if (from == nullptr) return;
#if defined(__GNUC__)
    for (std::int64_t at = 0; at < bytes; at += 64) __builtin_prefetch(from + block * bytes + at, 0, 2);
#endif
  }
};

// `Isa` has kRows, the rows of its largest tile, and
//   template <int Rows, int Bits, bool Wide, bool Minimums>
//   static void tile(const std::uint8_t* packed, std::int64_t blocks, const QuantBlock* x, std::int64_t rows, float* to,
//                    std::int64_t stride, const Ahead& ahead),
// which writes [Rows, kGroup] outputs for the group that starts at `packed`. Block i of its rows is at x[i * rows].
template <class Isa, int Rows, int Bits, bool Wide, bool Minimums>
void tile_of_at_most(int count, const std::uint8_t* packed, std::int64_t blocks, const QuantBlock* x,
                     std::int64_t rows, float* to, std::int64_t stride, const Ahead& ahead) {
  if constexpr (Rows > 0) {
    if (count == Rows)
      return Isa::template tile<Rows, Bits, Wide, Minimums>(packed, blocks, x, rows, to, stride, ahead);
    tile_of_at_most<Isa, Rows - 1, Bits, Wide, Minimums>(count, packed, blocks, x, rows, to, stride, ahead);
  }
}

// The tile of an instruction set whose registers hold no whole group: `Part` has kRows, kColumns and columns(), a tile
// of kColumns outputs from column `first` of the group on.
template <class Part>
struct InParts {
  static constexpr int kRows = Part::kRows;

  template <int Rows, int Bits, bool Wide, bool Minimums>
  static void tile(const std::uint8_t* packed, std::int64_t blocks, const QuantBlock* x, std::int64_t rows, float* to,
                   std::int64_t stride, const Ahead& ahead) {
    for (int first = 0; first < kGroup; first += Part::kColumns)
      Part::template columns<Rows, Bits, Wide, Minimums>(packed, first, blocks, x, rows, to + first, stride,
                                                         first == 0 ? ahead : Ahead{nullptr, 0});
  }
};

template <class Isa, int Bits, bool Wide, bool Minimums>
void multiply_groups(const QuantProduct& product, std::int64_t first, std::int64_t last) {
  const QuantLayout& layout = product.layout;
  for (std::int64_t group = first; group < last; ++group) {
    const std::uint8_t* packed = product.packed + group * layout.group_bytes;
    const std::int64_t left = layout.outputs - group * kGroup;
    // Every tile of this group fetches its share of the next one's weights.
    const std::int64_t all = (product.rows + Isa::kRows - 1) / Isa::kRows;
    const std::int64_t share = layout.group_bytes / layout.blocks / all;
    Ahead ahead{group + 1 < last ? packed + layout.group_bytes : nullptr, share};
    for (std::int64_t row = 0; row < product.rows;) {
      // Rows are dealt out evenly: 5 rows are tiles of 3 and 2, as a tile of one row costs more than a row of many.
      const std::int64_t rest = product.rows - row, tiles = (rest + Isa::kRows - 1) / Isa::kRows;
      const int rows = static_cast<int>((rest + tiles - 1) / tiles);
      const auto tile = [&](float* to, std::int64_t stride) {
        tile_of_at_most<Isa, Isa::kRows, Bits, Wide, Minimums>(rows, packed, layout.blocks, product.x + row,
                                                               product.rows, to, stride, ahead);
      };
      float* to = product.to + row * layout.outputs + group * kGroup;
      if (left >= kGroup) {
        tile(to, layout.outputs);
      } else {
        float padded[Isa::kRows * kGroup];
        tile(padded, kGroup);
        for (int r = 0; r < rows; ++r)
          for (std::int64_t i = 0; i < left; ++i) to[r * layout.outputs + i] = padded[r * kGroup + i];
      }
      row += rows;
      if (ahead.from != nullptr) ahead.from += share * layout.blocks;
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
