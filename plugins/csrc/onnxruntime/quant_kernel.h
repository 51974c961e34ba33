// Products of quantised rows with quantised weights: what the op and the kernels of all instruction sets agree on.
//
// A product is a function of its row alone, and has the same bits from every instruction set:
//   - a row is quantised block by block, each number to the nearest of 255 steps (quant_rows.h);
//   - the sum of a block's products is an integer, exact in any order;
//   - blocks are added in ascending order, each with fused multiply-adds that are written down here:
//       sum = fma(float(integer sum), weight's scale * row's scale, sum)
//       sum = fma(weight's minimum, row's scale * float(sum of the row's integers), sum)    where weights have minimums.
#pragma once

#include <cstdint>

#include "onnxruntime/attention_tile.h"

namespace outrider::engine {

constexpr int kBlock = 32;   // inputs that share a scale
constexpr int kGroup = 16;   // outputs whose weights lie together
constexpr int kQuad = 4;     // inputs whose products an instruction adds up

// Packed weights [outputs, inputs], as plugins/quant_layout.py writes them. Groups follow one another, and in a group
// its blocks: integers, then kGroup scales, then kGroup minimums where `minimums`. A scale is a float32 where `wide`,
// else a float16. Integers are unsigned; those of weights without minimums have 2^(bits - 1) added. They lie quad by
// quad, column by column: [8 quads][16 columns][4 inputs]; of 4 bits, quads 4 to 7 in the upper halves of bytes.
struct QuantLayout {
  std::int64_t outputs, inputs;
  int bits;
  bool wide, minimums;
  // What follows from these; nothing here is an inline function, of which a linker would keep one copy for all
  // instruction sets.
  std::int64_t blocks, groups;             // of all inputs; of all outputs
  std::int64_t integer_bytes, scale_bytes;  // of a block
  std::int64_t group_bytes;
};

QuantLayout quant_layout(std::int64_t outputs, std::int64_t inputs, int bits, bool wide, bool minimums);

// Quantised rows [rows, inputs], and what goes with each block of them: [rows, blocks].
struct QuantRows {
  std::int8_t* integers;
  float* scales;
  std::int32_t* sums;    // of a block's integers
  float* scaled_sums;    // scale * sum
};

struct QuantProduct {
  QuantLayout layout;
  const std::uint8_t* packed;
  QuantRows x;
  std::int64_t rows;
  float* to;  // [rows, outputs]
};

struct QuantKernels {
  // Quantises row `row`, `x`, of `blocks` blocks.
  void (*quantize)(const float* x, std::int64_t blocks, std::int64_t row, const QuantRows& to);
  // The outputs of groups [first, last) for all rows.
  void (*multiply)(const QuantProduct& product, std::int64_t first, std::int64_t last);
};

const QuantKernels& quant_avx512();
const QuantKernels& quant_avxvnni();
const QuantKernels& quant_avx2();
const QuantKernels& quant_plain();

// Of isa_here(): isa.h.
const QuantKernels& quant_kernels();

}  // namespace outrider::engine
