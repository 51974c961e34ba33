// Numbers that share a scale, as integers of 8 bits; compiled for each instruction set, with the same bits from all.
#pragma once

#include <cstdint>
#include <cstring>

namespace outrider::engine {
namespace {  // each instruction set has its own copy

struct Quantized {
  float scale;
  std::int32_t sum;  // of the integers
};

// With `most` the largest magnitude: scale = most / 127, integer = round(x * (127 / most)), halves to even. Where all
// are below 2^-100 they count as zeros; an infinity or a NaN among them makes the scale NaN.
inline Quantized quantize(const float* __restrict x, std::int64_t count, std::int8_t* __restrict integers) {
  constexpr float kRounds = 12582912.0f;  // 1.5 * 2^23: a sum with it has no places after the point
  constexpr std::int32_t kTiny = 0x0d800000, kInfinity = 0x7f800000;  // bits of 2^-100, of infinity
  std::int32_t most = 0;
  for (std::int64_t i = 0; i < count; ++i) {
    std::int32_t bits;
    std::memcpy(&bits, x + i, sizeof bits);
    const std::int32_t size = bits & 0x7fffffff;
    most = size > most ? size : most;
  }
  if (most < kTiny || most >= kInfinity) {
    for (std::int64_t i = 0; i < count; ++i) integers[i] = 0;
    const std::int32_t bits = most < kTiny ? 0 : 0x7fc00000;  // of a NaN
    float scale;
    std::memcpy(&scale, &bits, sizeof scale);
    return {scale, 0};
  }
  float largest;
  std::memcpy(&largest, &most, sizeof largest);
  const float inverse = 127.0f / largest;
  std::int32_t sum = 0;
  for (std::int64_t i = 0; i < count; ++i) {
    const float rounded = x[i] * inverse + kRounds;
    std::int32_t bits;
    std::memcpy(&bits, &rounded, sizeof bits);
    const std::int32_t integer = bits - 0x4b400000;  // the bits of kRounds
    integers[i] = static_cast<std::int8_t>(integer);
    sum += integer;
  }
  return {largest / 127.0f, sum};
}

}  // namespace
}  // namespace outrider::engine
