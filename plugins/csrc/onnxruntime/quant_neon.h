// Shared by kernels in vectors of 128 bits.
#pragma once

#include <arm_neon.h>

#include "onnxruntime/quant_tiles.h"

namespace outrider::engine {
namespace {  // each instruction set has its own copy

constexpr int kLine = kGroup * kQuad;  // bytes: a quad of all columns

// Four scales, from column `column` of the group on.
template <bool Wide>
float32x4_t load_scales(const std::uint8_t* from, int column) {
  if constexpr (Wide) return vreinterpretq_f32_u8(vld1q_u8(from + column * 4));
  return vcvt_f32_f16(vreinterpret_f16_u8(vld1_u8(from + column * 2)));
}

}  // namespace
}  // namespace outrider::engine
