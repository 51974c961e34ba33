// A row of numbers, quantised; compiled for each instruction set, with the same bits from all.
#pragma once

#include <cstring>

#include "onnxruntime/quant_kernel.h"

namespace outrider::engine {
namespace {  // each instruction set has its own copy

// In a block whose largest magnitude is `most`: scale = most / 127, integer = round(x * (127 / most)), halves to even.
// A block of numbers below 2^-100 counts as zeros. A block with an infinity or a NaN gives NaN for the whole row.
inline void quantize_row(const QuantLayout& layout, const float* x, QuantBlock* to, std::int64_t stride) {
  constexpr float kRounds = 12582912.0f;  // 1.5 * 2^23: a sum with it has no places behind the point
  constexpr std::int32_t kTiny = 0x0d800000, kInfinity = 0x7f800000;  // bits of 2^-100, of infinity
  for (std::int64_t block = 0; block < layout.blocks; ++block, x += kBlock, to += stride) {
    std::int32_t bits[kBlock], most = 0;
    std::memcpy(bits, x, sizeof bits);
    for (int i = 0; i < kBlock; ++i) {
      const std::int32_t size = bits[i] & 0x7fffffff;
      most = size > most ? size : most;
    }
    float largest;
    std::memcpy(&largest, &most, sizeof largest);
    const bool usable = most >= kTiny && most < kInfinity;
    const float inverse = usable ? 127.0f / largest : 0.0f;
    float scale = usable ? largest / 127.0f : 0.0f;
    std::int32_t sum = 0;
    if (usable) {
      float rounded[kBlock];
      for (int i = 0; i < kBlock; ++i) rounded[i] = x[i] * inverse + kRounds;
      std::memcpy(bits, rounded, sizeof bits);
      for (int i = 0; i < kBlock; ++i) {
        const std::int32_t integer = bits[i] - 0x4b400000;  // the bits of kRounds
        to->integers[i] = static_cast<std::int8_t>(integer);
        sum += integer;
      }
    } else {
      std::memset(to->integers, 0, kBlock);
      const std::int32_t nan = 0x7fc00000;
      if (most >= kInfinity) std::memcpy(&scale, &nan, sizeof scale);
    }
    to->scale = scale;
    to->sum = sum;
    to->correction = -layout.offset * sum;
    to->scaled_sum = scale * static_cast<float>(sum);
  }
}

}  // namespace
}  // namespace outrider::engine
