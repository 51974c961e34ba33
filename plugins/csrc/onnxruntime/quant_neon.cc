// Built with -march=armv8.2-a+dotprod, run where the processor has it.
#include "onnxruntime/quant_neon.h"

namespace outrider::engine {
namespace {

struct NeonQuant {
  static constexpr int kRows = 4, kColumns = 8;

  template <int Rows, int Bits, bool Wide, bool Minimums>
  static void columns(const std::uint8_t* packed, int first, std::int64_t blocks, const QuantBlock* x,
                      std::int64_t rows, float* to, std::int64_t stride, const Ahead& ahead) {
    constexpr int kScale = kGroup * (Wide ? 4 : 2);
    float32x4_t sums[Rows][2];
    for (int r = 0; r < Rows; ++r) sums[r][0] = sums[r][1] = vdupq_n_f32(0.0f);
    for (std::int64_t block = 0; block < blocks; ++block, x += rows) {
      ahead.fetch(block);
      Integers<Rows> integers;
      int8x16_t low[Rows], high[Rows];  // quads 0 to 3, and 4 to 7
      for (int r = 0; r < Rows; ++r) {
        integers[r][0] = integers[r][1] = vdupq_n_s32(start<Bits, Minimums>(x[r]));
        low[r] = vld1q_s8(x[r].integers);
        high[r] = vld1q_s8(x[r].integers + kBlock / 2);
      }
      add_four<Rows, Bits, 0>(packed + first * kQuad, low, high, integers);
      add_four<Rows, Bits, 1>(packed + first * kQuad, low, high, integers);
      packed += kBlock * kGroup * Bits / 8;
      for (int half = 0; half < 2; ++half) {
        const float32x4_t scales = load_scales<Wide>(packed, first + half * kColumns / 2);
        for (int r = 0; r < Rows; ++r) {
          const float32x4_t scale = vmulq_n_f32(scales, x[r].scale);
          sums[r][half] = vfmaq_f32(sums[r][half], vcvtq_f32_s32(integers[r][half]), scale);
        }
      }
      packed += kScale;
      if constexpr (Minimums) {
        for (int half = 0; half < 2; ++half) {
          const float32x4_t minimums = load_scales<Wide>(packed, first + half * kColumns / 2);
          for (int r = 0; r < Rows; ++r)
            sums[r][half] = vfmaq_n_f32(sums[r][half], minimums, x[r].scaled_sum);
        }
        packed += kScale;
      }
    }
    for (int r = 0; r < Rows; ++r)
      for (int half = 0; half < 2; ++half) vst1q_f32(to + r * stride + half * kColumns / 2, sums[r][half]);
  }

 private:
  template <int Rows>
  using Integers = int32x4_t[Rows][2];

  // The instruction takes signed weights: the highest of 8 bits is flipped, which subtracts 128. That is what was
  // added to weights without minimums.
  template <int Bits, bool Minimums>
  static std::int32_t start(const QuantBlock& x) {
    if constexpr (Bits == 8) return Minimums ? 128 * x.sum : 0;
    return Minimums ? 0 : x.correction;
  }

  // Adds the products of four columns.
  template <int Rows, int Bits, int Half>
  static void add_four(const std::uint8_t* packed, const int8x16_t (&low)[Rows], const int8x16_t (&high)[Rows],
                       Integers<Rows>& to) {
    packed += Half * (kColumns / 2) * kQuad;
    add_quads<Rows, Bits, Half, 0>(packed, low, high, to);
    add_quads<Rows, Bits, Half, 1>(packed, low, high, to);
    add_quads<Rows, Bits, Half, 2>(packed, low, high, to);
    add_quads<Rows, Bits, Half, 3>(packed, low, high, to);
  }

  // Those of quads `Quad` and `Quad + 4`.
  template <int Rows, int Bits, int Half, int Quad>
  static void add_quads(const std::uint8_t* packed, const int8x16_t (&low)[Rows], const int8x16_t (&high)[Rows],
                        Integers<Rows>& to) {
    const uint8x16_t stored = vld1q_u8(packed + Quad * kLine);
    int8x16_t first, second;
    if constexpr (Bits == 4) {
      first = vreinterpretq_s8_u8(vandq_u8(stored, vdupq_n_u8(15)));
      second = vreinterpretq_s8_u8(vshrq_n_u8(stored, 4));
    } else {
      const uint8x16_t top = vdupq_n_u8(128);
      first = vreinterpretq_s8_u8(veorq_u8(stored, top));
      second = vreinterpretq_s8_u8(veorq_u8(vld1q_u8(packed + (Quad + 4) * kLine), top));
    }
    for (int r = 0; r < Rows; ++r) {
      to[r][Half] = vdotq_laneq_s32(to[r][Half], first, low[r], Quad);
      to[r][Half] = vdotq_laneq_s32(to[r][Half], second, high[r], Quad);
    }
  }
};

}  // namespace

const QuantKernels& quant_neon() {
  static const QuantKernels kernels = quant_of<InParts<NeonQuant>>();
  return kernels;
}

}  // namespace outrider::engine
