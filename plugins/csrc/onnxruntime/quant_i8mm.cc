// Built with -march=armv8.2-a+dotprod+i8mm, run where the processor has them.
//
// An instruction multiplies eight inputs of two columns by the same inputs of two rows: its sums are [column, row]. A
// column's eight inputs are two quads, which do not lie together: quads are zipped.
#include "onnxruntime/quant_neon.h"

namespace outrider::engine {
namespace {

// The parts of one row and of the other, in the order of the sums.
inline float32x4_t of_rows(float one, float other) { return vzip1q_f32(vdupq_n_f32(one), vdupq_n_f32(other)); }
inline int32x4_t of_rows(std::int32_t one, std::int32_t other) {
  return vzip1q_s32(vdupq_n_s32(one), vdupq_n_s32(other));
}

// Columns 0 and 1 of four, then 2 and 3, each with eight inputs; `packed` is their first quad.
inline void load_octet(const std::uint8_t* packed, uint8x16_t* to) {
  const uint32x4_t first = vreinterpretq_u32_u8(vld1q_u8(packed));
  const uint32x4_t second = vreinterpretq_u32_u8(vld1q_u8(packed + kLine));
  to[0] = vreinterpretq_u8_u32(vzip1q_u32(first, second));
  to[1] = vreinterpretq_u8_u32(vzip2q_u32(first, second));
}

struct I8mmQuant {
  static constexpr int kRows = 4, kColumns = 8;
  static constexpr int kPairs = kColumns / 2;

  template <int Rows, int Bits, bool Wide, bool Minimums>
  static void columns(const std::uint8_t* packed, int first, std::int64_t blocks, const QuantBlock* x,
                      std::int64_t rows, float* to, std::int64_t stride, const Ahead& ahead) {
    constexpr int kScale = kGroup * (Wide ? 4 : 2);
    constexpr int kRowPairs = (Rows + 1) / 2;
    float32x4_t sums[kRowPairs][kPairs];
    for (int p = 0; p < kRowPairs; ++p)
      for (int c = 0; c < kPairs; ++c) sums[p][c] = vdupq_n_f32(0.0f);
    for (std::int64_t block = 0; block < blocks; ++block, x += rows) {
      ahead.fetch(block);
      int32x4_t integers[kRowPairs][kPairs];
      float32x4_t row_scales[kRowPairs];
      for (int p = 0; p < kRowPairs; ++p) {
        const QuantBlock &one = x[row<Rows>(p, 0)], &other = x[row<Rows>(p, 1)];
        row_scales[p] = of_rows(one.scale, other.scale);
        const int32x4_t start = Minimums ? vdupq_n_s32(0) : of_rows(one.correction, other.correction);
        for (int c = 0; c < kPairs; ++c) integers[p][c] = start;
      }
      add_octets<Rows, Bits, 0>(packed + first * kQuad, x, integers);
      add_octets<Rows, Bits, 1>(packed + first * kQuad, x, integers);
      packed += kBlock * kGroup * Bits / 8;
      for (int c = 0; c < kPairs; c += 2) {
        const float32x4_t scales = load_scales<Wide>(packed, first + 2 * c);
        const float32x4_t even = vzip1q_f32(scales, scales), odd = vzip2q_f32(scales, scales);
        for (int p = 0; p < kRowPairs; ++p) {
          sums[p][c] = vfmaq_f32(sums[p][c], vcvtq_f32_s32(integers[p][c]), vmulq_f32(even, row_scales[p]));
          sums[p][c + 1] =
              vfmaq_f32(sums[p][c + 1], vcvtq_f32_s32(integers[p][c + 1]), vmulq_f32(odd, row_scales[p]));
        }
      }
      packed += kScale;
      if constexpr (Minimums) {
        for (int c = 0; c < kPairs; c += 2) {
          const float32x4_t minimums = load_scales<Wide>(packed, first + 2 * c);
          const float32x4_t even = vzip1q_f32(minimums, minimums), odd = vzip2q_f32(minimums, minimums);
          for (int p = 0; p < kRowPairs; ++p) {
            const float32x4_t scaled_sums =
                of_rows(x[row<Rows>(p, 0)].scaled_sum, x[row<Rows>(p, 1)].scaled_sum);
            sums[p][c] = vfmaq_f32(sums[p][c], even, scaled_sums);
            sums[p][c + 1] = vfmaq_f32(sums[p][c + 1], odd, scaled_sums);
          }
        }
        packed += kScale;
      }
    }
    for (int p = 0; p < kRowPairs; ++p)
      for (int c = 0; c < kPairs; c += 2) {
        vst1q_f32(to + row<Rows>(p, 0) * stride + 2 * c, vuzp1q_f32(sums[p][c], sums[p][c + 1]));
        if (2 * p + 1 < Rows)
          vst1q_f32(to + (2 * p + 1) * stride + 2 * c, vuzp2q_f32(sums[p][c], sums[p][c + 1]));
      }
  }

 private:
  // Rows of a pair. The last of an odd number of rows is its own partner.
  template <int Rows>
  static constexpr int row(int pair, int which) {
    return 2 * pair + which < Rows ? 2 * pair + which : 2 * pair;
  }

  // Adds the products of inputs 8 * Octet and the seven after it, and of those 16 further on.
  template <int Rows, int Bits, int Octet>
  static void add_octets(const std::uint8_t* packed, const QuantBlock* x, int32x4_t (&to)[(Rows + 1) / 2][kPairs]) {
    uint8x16_t weights[kPairs], further[kPairs];
    for (int c = 0; c < kPairs; c += 2) {
      const std::uint8_t* at = packed + 2 * Octet * kLine + 2 * c * kQuad;
      load_octet(at, weights + c);
      if constexpr (Bits == 8) load_octet(at + 4 * kLine, further + c);
    }
    if constexpr (Bits == 4) {
      for (int c = 0; c < kPairs; ++c) {
        further[c] = vshrq_n_u8(weights[c], 4);
        weights[c] = vandq_u8(weights[c], vdupq_n_u8(15));
      }
    }
    for (int p = 0; p < (Rows + 1) / 2; ++p) {
      const std::int8_t* one = x[row<Rows>(p, 0)].integers + 8 * Octet;
      const std::int8_t* other = x[row<Rows>(p, 1)].integers + 8 * Octet;
      const int8x16_t rows = vcombine_s8(vld1_s8(one), vld1_s8(other));
      const int8x16_t rows_further = vcombine_s8(vld1_s8(one + 16), vld1_s8(other + 16));
      for (int c = 0; c < kPairs; ++c) {
        to[p][c] = vusmmlaq_s32(to[p][c], weights[c], rows);
        to[p][c] = vusmmlaq_s32(to[p][c], further[c], rows_further);
      }
    }
  }
};

// A row alone would be its own partner all the way.
void multiply_rows(const QuantProduct& product, std::int64_t first, std::int64_t last) {
  if (product.rows == 1) return quant_neon().multiply(product, first, last);
  multiply<InParts<I8mmQuant>>(product, first, last);
}

}  // namespace

const QuantKernels& quant_i8mm() {
  static const QuantKernels kernels = {quant_neon().quantize, &multiply_rows};
  return kernels;
}

}  // namespace outrider::engine
