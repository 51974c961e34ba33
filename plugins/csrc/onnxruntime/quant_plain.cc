// For any processor: the rule as it stands in quant_kernel.h.
#include <cmath>

#include "onnxruntime/convert.h"
#include "onnxruntime/quant_tiles.h"

namespace outrider::engine {
namespace {

template <bool Wide>
void load_scales(const std::uint8_t* from, float* to) {
  if constexpr (Wide) {
    std::memcpy(to, from, kGroup * sizeof(float));
  } else {
    Half halves[kGroup];
    std::memcpy(halves, from, sizeof halves);
    for (int i = 0; i < kGroup; ++i) to[i] = to_float(halves[i]);
  }
}

struct PlainQuant {
  static constexpr int kRows = 4;

  template <int Rows, int Bits, bool Wide, bool Minimums>
  static void tile(const std::uint8_t* packed, std::int64_t blocks, const QuantBlock* x, std::int64_t rows, float* to,
                   std::int64_t stride, const Ahead& ahead) {
    constexpr int kScale = kGroup * (Wide ? 4 : 2);
    float sums[Rows][kGroup] = {};
    for (std::int64_t block = 0; block < blocks; ++block, x += rows) {
      ahead.fetch(block);
      std::int32_t integers[Rows][kGroup];
      for (int r = 0; r < Rows; ++r)
        for (int i = 0; i < kGroup; ++i) integers[r][i] = x[r].correction;
      for (int at = 0; at < kBlock; ++at) {
        std::int32_t weights[kGroup];
        for (int i = 0; i < kGroup; ++i) {
          const int place = at / kQuad * kQuad * kGroup + i * kQuad + at % kQuad;  // quad, column, input
          constexpr int kHalf = kBlock * kGroup / 2;
          if constexpr (Bits == 4) {
            weights[i] = place < kHalf ? packed[place] & 15 : packed[place - kHalf] >> 4;
          } else {
            weights[i] = packed[place];
          }
        }
        for (int r = 0; r < Rows; ++r)
          for (int i = 0; i < kGroup; ++i) integers[r][i] += weights[i] * x[r].integers[at];
      }
      packed += kBlock * kGroup * Bits / 8;
      float scales[kGroup];
      load_scales<Wide>(packed, scales);
      packed += kScale;
      for (int r = 0; r < Rows; ++r)
        for (int i = 0; i < kGroup; ++i)
          sums[r][i] = std::fma(static_cast<float>(integers[r][i]), scales[i] * x[r].scale, sums[r][i]);
      if constexpr (Minimums) {
        load_scales<Wide>(packed, scales);
        packed += kScale;
        for (int r = 0; r < Rows; ++r)
          for (int i = 0; i < kGroup; ++i) sums[r][i] = std::fma(scales[i], x[r].scaled_sum, sums[r][i]);
      }
    }
    for (int r = 0; r < Rows; ++r)
      for (int i = 0; i < kGroup; ++i) to[r * stride + i] = sums[r][i];
  }
};

}  // namespace

const QuantKernels& quant_plain() {
  static const QuantKernels kernels = quant_of<PlainQuant>();
  return kernels;
}

}  // namespace outrider::engine
