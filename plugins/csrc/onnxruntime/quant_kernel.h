// Products of quantised rows with quantised weights: the interface of the op and the kernels of all instruction sets.
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
constexpr int kGroup = 32;   // outputs whose weights lie together
constexpr int kQuad = 4;     // inputs whose products an instruction adds up

// Packed weights [outputs, inputs], as plugins/quant_layout.py writes them. Groups follow one another, and in a group
// its blocks: integers, then kGroup scales, then kGroup minimums where `minimums`. A scale is a float32 where `wide`,
// else a float16. Integers are unsigned; those of weights without minimums have 2^(bits - 1) added. They lie quad by
// quad, column by column: [8 quads][32 columns][4 inputs]; of 4 bits, quads 4 to 7 in the upper halves of bytes.
struct QuantLayout {
  std::int64_t outputs, inputs;
  int bits;
  bool wide, minimums;
  int offset;  // what was added to the integers
  // Derived from these; nothing here is an inline function, of which a linker would keep one copy for all
  // instruction sets.
  std::int64_t blocks, groups;             // of all inputs; of all outputs
  std::int64_t integer_bytes, scale_bytes;  // of a block
  std::int64_t group_bytes;
};

QuantLayout quant_layout(std::int64_t outputs, std::int64_t inputs, int bits, bool wide, bool minimums);

// A block of a quantised row. Those of all rows lie side by side, [blocks, rows], so that what a tile of a few rows reads
// next lies together.
struct QuantBlock {
  std::int8_t integers[kBlock];
  float scale;
  std::int32_t sum;         // of the integers
  std::int32_t correction;  // -(what was added to the weights) * sum
  float scaled_sum;         // scale * sum
};

struct QuantProduct {
  QuantLayout layout;
  const std::uint8_t* packed;
  const QuantBlock* x;  // [blocks, rows]
  std::int64_t rows;
  float* to;  // [rows, outputs]
};

struct QuantKernels {
  // Quantises a row for products with weights of that layout; block i goes to to[i * stride].
  void (*quantize)(const QuantLayout& layout, const float* x, QuantBlock* to, std::int64_t stride);
  // The outputs of groups [first, last) for all rows.
  void (*multiply)(const QuantProduct& product, std::int64_t first, std::int64_t last);
};

const QuantKernels& quant_i8mm();
const QuantKernels& quant_neon();
const QuantKernels& quant_amx();
const QuantKernels& quant_avx512();
const QuantKernels& quant_avxvnni();
const QuantKernels& quant_avx2();
const QuantKernels& quant_plain();

// Of isa_here(): isa.h.
const QuantKernels& quant_kernels();

}  // namespace outrider::engine
