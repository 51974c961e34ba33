// Rows of a packed matrix, looked up and made numbers again: a tied embedding is stored once.
#pragma once

#include "onnxruntime/quant_kernel.h"

namespace outrider::engine {

// to[inputs] = scale * integer of output `row` of the packed weights, or scale * integer + minimum, each rounded.
void quant_row(const QuantLayout& layout, const std::uint8_t* packed, std::int64_t row, float* to);

}  // namespace outrider::engine
