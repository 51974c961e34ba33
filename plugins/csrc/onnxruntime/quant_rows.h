// A row of numbers, quantised; compiled for each instruction set, with the same bits from all.
#pragma once

#include "onnxruntime/quant_kernel.h"
#include "onnxruntime/quantize.h"

namespace outrider::engine {
namespace {  // each instruction set has its own copy

// Each block has a scale of its own. A block with an infinity or a NaN gives NaN for the whole row.
inline void quantize_row(const QuantLayout& layout, const float* x, QuantBlock* to, std::int64_t stride) {
  for (std::int64_t block = 0; block < layout.blocks; ++block, x += kBlock, to += stride) {
    const auto [scale, sum] = quantize(x, kBlock, to->integers);
    to->scale = scale;
    to->sum = sum;
    to->correction = -layout.offset * sum;
    to->scaled_sum = scale * static_cast<float>(sum);
  }
}

}  // namespace
}  // namespace outrider::engine
