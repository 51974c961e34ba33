// Products with weights of 4 and 8 bits in blocks of 32, packed as plugins/quant_layout.py says: what the CPU's kernels
// give, to the bit (onnxruntime/quant_kernel.h). A block's sum is an integer, exact in any order; blocks are added in
// ascending order.
#pragma once

#include "form.h"
#include "rms_norm.cu.h"
#include "units.h"

namespace outrider {

constexpr int kColumns = 32;  // outputs whose weights lie together
constexpr int kQuad = 4;      // inputs in a word
constexpr int kQuads = kBlock / kQuad;

struct QuantForm {
  i64 bits;
  bool wide, minimums;
  OUTRIDER_DEVICE i32 offset() const { return minimums ? 0 : 1 << (bits - 1); }  // what was added to the integers
  OUTRIDER_DEVICE i64 integer_bytes() const { return kBlock * kColumns * bits / 8; }
  OUTRIDER_DEVICE i64 scale_bytes() const { return kColumns * (wide ? 4 : 2); }
  OUTRIDER_DEVICE i64 block_bytes() const { return integer_bytes() + scale_bytes() * (minimums ? 2 : 1); }
  OUTRIDER_DEVICE float scale(const char* block, i64 column) const {
    return element_at(block + integer_bytes(), column, wide ? kFloat32 : kFloat16);
  }
  OUTRIDER_DEVICE float minimum(const char* block, i64 column) const {
    return element_at(block + integer_bytes() + scale_bytes(), column, wide ? kFloat32 : kFloat16);
  }
};

constexpr int kQuantWarps = 8;  // of a block: each has one block of inputs at a time
constexpr int kQuantRows = 32;  // of a block: two matrices of sixteen
constexpr int kQuantOwn = kQuantRows / kQuantWarps;

// Rows that were quantised (form.h), as words of four integers.
struct QuantRows {
  const u32* integers;
  const float* scales;
  const i32* sums;
  i64 blocks;  // of a row
  i64 first;   // row of the thread block
  int count;   // rows of the thread block
  OUTRIDER_DEVICE void prepare(i64) const {}
  OUTRIDER_DEVICE i64 place(i64 row, i64 block) const { return (first + row) * blocks + block; }
};

// Rows of float32, up to kNormRows, of which a warp norms and quantises the block that it has: in shared memory.
struct NormedQuantRows {
  u32* integers;
  float* scales;
  i32* sums;
  i64 blocks;
  int count;
  const float *x, *norm, *factors;
  OUTRIDER_DEVICE void prepare(i64 block) const {
    const i64 own = block * kBlock + lane_index();
    for (int r = 0; r < count; ++r) {
      const float normed = x[r * blocks * kBlock + own] * factors[r] * norm[own];
      keep_block({reinterpret_cast<char*>(integers), scales, sums, kIntegers}, place(r, block), normed);
    }
    warp_barrier();
  }
  OUTRIDER_DEVICE i64 place(i64 row, i64 block) const { return row * kQuantWarps + block % kQuantWarps; }
};

// What a lane multiplies by of a block of inputs, on its way to registers: words of integers as they lie, and the scale and
// minimum of a column.
template <int kBits>
struct OwnWeights {
  static constexpr int kParts = kBits / 4;  // words that hold the integers of a lane for eight outputs
  u32 words[kColumns / 8][kParts];
  float scale, minimum;

  OUTRIDER_DEVICE void fetch(const QuantForm& form, const char* block) {
    const int lane = static_cast<int>(lane_index()), own = lane / 4, turn = lane % 4;
    const u32* from = reinterpret_cast<const u32*>(block);
    for (int n = 0; n < kColumns / 8; ++n) {
      for (int part = 0; part < kParts; ++part) words[n][part] = from[(4 * part + turn) * kColumns + 8 * n + own];
    }
    scale = form.scale(block, lane);
    if (form.minimums) minimum = form.minimum(block, lane);
  }

  OUTRIDER_DEVICE u32 four(int n, int part) const {
    return kBits == 8 ? words[n][part % kParts] : words[n][0] >> 4 * part & 0x0f0f0f0fu;
  }
};

// Shared memory, of the blocks of inputs that the warps have.
struct QuantShared {
  i32 products[kQuantWarps][kQuantRows][kColumns];  // [block of inputs, row, output]
  float factors[2][kQuantWarps][kColumns];          // scales and minimums of the weights
};

// The outputs of one group: thread t has column t % 32 of rows t / 32, t / 32 + 8 ... in `totals`. Each warp adds up the
// integers of one block of inputs, on tensor cores, while its next block is on its way, and then each thread adds the
// blocks of its outputs, in order.
template <int kBits, typename Rows>
OUTRIDER_DEVICE void quant_tile(const QuantForm& form, const Rows& x, const char* packed, i64 group,
                                QuantShared& shared, float (&totals)[kQuantOwn]) {
  const int warp = static_cast<int>(thread_index() / 32), lane = static_cast<int>(lane_index());
  const int own = lane / 4, turn = lane % 4;
  const auto words_of = [&](i64 row, i64 block) {  // the row's integers in a block; a row that is none repeats the last
    return x.integers + x.place(row < x.count ? row : x.count - 1, block) * kQuads;
  };
  const char* const weights = packed + group * x.blocks * form.block_bytes();
  OwnWeights<kBits> coming = {};
  if (warp < x.blocks) coming.fetch(form, weights + warp * form.block_bytes());
  for (i64 start = 0; start < x.blocks; start += kQuantWarps) {
    const i64 block = start + warp;
    if (block < x.blocks) {
      const OwnWeights<kBits> here = coming;
      if (block + kQuantWarps < x.blocks) coming.fetch(form, weights + (block + kQuantWarps) * form.block_bytes());
      shared.factors[0][warp][lane] = here.scale;
      if (form.minimums) shared.factors[1][warp][lane] = here.minimum;
      x.prepare(block);
      for (int m = 0; m < x.count; m += 16) {
        const u32 *low = words_of(m + own, block), *high = words_of(m + own + 8, block);
        const u32 left[4] = {low[turn], high[turn], low[4 + turn], high[4 + turn]};
        for (int n = 0; n < kColumns / 8; ++n) {
          const u32 right[2] = {here.four(n, 0), here.four(n, 1)};
          i32 found[4] = {};
          multiply_bytes(found, left, right);
          for (int i = 0; i < 4; ++i) shared.products[warp][m + own + 8 * (i / 2)][8 * n + 2 * turn + i % 2] = found[i];
        }
      }
    }
    barrier();
    for (int b = 0; b < kQuantWarps && start + b < x.blocks; ++b) {
      for (int i = 0; i < kQuantOwn; ++i) {
        const int r = warp + i * kQuantWarps;
        if (r >= x.count) break;
        const i64 at = x.place(r, start + b);
        const i32 sum = shared.products[b][r][lane] - form.offset() * x.sums[at];
        totals[i] = fused(static_cast<float>(sum), shared.factors[0][b][lane] * x.scales[at], totals[i]);
        if (form.minimums) {
          totals[i] = fused(shared.factors[1][b][lane], x.scales[at] * static_cast<float>(x.sums[at]), totals[i]);
        }
      }
    }
    barrier();
  }
}

// What a product is of, beside its rows, and where it goes: see HalfProduct in half_product.cu.h.
struct QuantProduct {
  QuantForm form;
  const char* packed;
  const float* residual;
  Formed to;
  i64 group, outputs, unit;
};

template <int kBits, typename Rows>
OUTRIDER_DEVICE void multiply_integers_of(const Rows& x, i64 first, const QuantProduct& product, QuantShared& shared) {
  const i64 outputs = product.outputs, unit = product.unit, group = product.group;
  float totals[kQuantOwn] = {};
  quant_tile<kBits>(product.form, x, product.packed, group, shared, totals);
  if (unit != kNoUnit) {
    float up[kQuantOwn] = {};
    quant_tile<kBits>(product.form, x, product.packed, group + outputs / kColumns, shared, up);
    for (int i = 0; i < kQuantOwn; ++i) totals[i] = gated(unit, totals[i], up[i]);
  }
  const i64 output = group * kColumns + lane_index();
  for (int i = 0; i < kQuantOwn; ++i) {
    const i64 row = thread_index() / 32 + i * kQuantWarps;
    if (row >= x.count) break;
    keep_output(product.to, product.residual, first + row, group, output, outputs, totals[i]);
  }
}

template <typename Rows>
OUTRIDER_DEVICE void multiply_quantized(const Rows& x, i64 first, const QuantProduct& product) {
  OUTRIDER_SHARED QuantShared shared;
  if (product.form.bits == 8) {
    multiply_integers_of<8>(x, first, product, shared);
  } else {
    multiply_integers_of<4>(x, first, product, shared);
  }
}

// Thread blocks of 256: one has the 32 outputs of a group, of 32 rows.
OUTRIDER_KERNEL OUTRIDER_FIT(kQuantWarps * 32, 3)
outrider_quant_product(const u32* integers, const float* scales, const i32* sums, const char* packed,
                       const float* residual, char* to, float* to_scales, i32* to_sums, i64 rows, i64 inputs, i64 outputs,
                       i64 bits, i64 wide, i64 minimums, i64 unit, i64 form) {
  const i64 tiles = (rows + kQuantRows - 1) / kQuantRows;  // neighbours share weights
  const i64 first = block_index() % tiles * kQuantRows;
  const int count = rows - first < kQuantRows ? static_cast<int>(rows - first) : kQuantRows;
  const QuantRows x = {integers, scales, sums, inputs / kBlock, first, count};
  multiply_quantized(x, first, {{bits, wide != 0, minimums != 0}, packed, residual, {to, to_scales, to_sums, form},
                                block_index() / tiles, outputs, unit});
}

// The same of rows that are not normed yet, up to kNormRows.
OUTRIDER_KERNEL OUTRIDER_FIT(kQuantWarps * 32, 3)
outrider_normed_quant_product(const float* x, const float* norm, const char* packed, char* to, float* to_scales,
                              i32* to_sums, i64 rows, i64 inputs, i64 outputs, i64 bits, i64 wide, i64 minimums, i64 unit,
                              i64 form, i64 epsilon) {
  OUTRIDER_SHARED float factors[kNormRows], scales[kNormRows * kQuantWarps];
  OUTRIDER_SHARED i32 sums[kNormRows * kQuantWarps];
  OUTRIDER_SHARED u32 integers[kNormRows * kQuantWarps * kQuads];
  const int count = static_cast<int>(rows);
  norm_factors(x, count, inputs, float_of(static_cast<i32>(epsilon)), factors);
  const NormedQuantRows given = {integers, scales, sums, inputs / kBlock, count, x, norm, factors};
  multiply_quantized(given, 0, {{bits, wide != 0, minimums != 0}, packed, nullptr, {to, to_scales, to_sums, form},
                                block_index(), outputs, unit});
}

// Rows of such weights, looked up by number: quant_row in onnxruntime/quant_gather.cc. A number out of range gives zeros.
OUTRIDER_KERNEL outrider_quant_gather(const i64* ids, const char* packed, float* to, i64 count, i64 inputs, i64 outputs,
                                      i64 bits, i64 wide, i64 minimums) {
  const QuantForm form = {bits, wide != 0, minimums != 0};
  const i64 blocks = inputs / kBlock;
  for (i64 i = block_index() * thread_count() + thread_index(); i < count * inputs; i += block_count() * thread_count()) {
    const i64 id = ids[i / inputs], input = i % inputs;
    if (id < 0 || id >= outputs) {
      to[i] = 0.0f;
      continue;
    }
    const i64 column = id % kColumns, inner = input % kBlock;
    const char* block = packed + (id / kColumns * blocks + input / kBlock) * form.block_bytes();
    const auto* bytes = reinterpret_cast<const unsigned char*>(block);
    const i64 place = inner / kQuad * kQuad * kColumns + column * kQuad + inner % kQuad, half = form.integer_bytes();
    const i32 integer = bits == 8 ? bytes[place] : place < half ? bytes[place] & 15 : bytes[place - half] >> 4;
    const float scaled = form.scale(block, column) * static_cast<float>(integer - form.offset());
    to[i] = form.minimums ? scaled + form.minimum(block, column) : scaled;
  }
}

}  // namespace outrider
