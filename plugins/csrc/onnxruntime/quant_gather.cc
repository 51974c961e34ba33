#include "onnxruntime/quant_gather.h"

#include <cstring>

#include "onnxruntime/convert.h"

namespace outrider::engine {
namespace {

float scale_at(const QuantLayout& layout, const std::uint8_t* from, std::int64_t column) {
  if (layout.wide) {
    float scale;
    std::memcpy(&scale, from + column * 4, sizeof scale);
    return scale;
  }
  Half half;
  std::memcpy(&half, from + column * 2, sizeof half);
  return to_float(half);
}

}  // namespace

void quant_row(const QuantLayout& layout, const std::uint8_t* packed, std::int64_t row, float* to) {
  const std::int64_t column = row % kGroup, half = layout.integer_bytes;
  const std::uint8_t* block = packed + row / kGroup * layout.group_bytes;
  for (std::int64_t i = 0; i < layout.blocks; ++i, to += kBlock) {
    const float scale = scale_at(layout, block + layout.integer_bytes, column);
    const float minimum =
        layout.minimums ? scale_at(layout, block + layout.integer_bytes + layout.scale_bytes, column) : 0.0f;
    for (int at = 0; at < kBlock; ++at) {
      const std::int64_t place = at / kQuad * kQuad * kGroup + column * kQuad + at % kQuad;
      int integer;
      if (layout.bits == 8) {
        integer = block[place];
      } else {
        integer = place < half ? block[place] & 15 : block[place - half] >> 4;
      }
      const float scaled = scale * static_cast<float>(integer - layout.offset);
      to[at] = layout.minimums ? scaled + minimum : scaled;
    }
    block += layout.group_bytes / layout.blocks;
  }
}

}  // namespace outrider::engine
