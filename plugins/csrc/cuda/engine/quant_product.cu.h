// Products with weights of 4 and 8 bits in blocks of 32, packed as plugins/quant_layout.py says: what the CPU's kernels
// give, to the bit (onnxruntime/quant_kernel.h). A block's sum is an integer, exact in any order; blocks are added in
// ascending order.
#pragma once

#include "form.h"
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
};

// The outputs of one group: thread t has column t % 32 of rows t / 32, t / 32 + 8 ... in `totals`. Each warp adds up the
// integers of one block of inputs, on tensor cores, and then each thread adds the blocks of its outputs, in order.
OUTRIDER_DEVICE void quant_tile(const QuantForm& form, const QuantRows& x, const char* packed, i64 group,
                                float (&totals)[kQuantOwn]) {
  OUTRIDER_SHARED i32 products[kQuantWarps][kQuantRows][kColumns];  // [block of inputs, row, output]
  OUTRIDER_SHARED float factors[2][kQuantWarps][kColumns];          // scales and minimums of the weights
  const int warp = static_cast<int>(thread_index() / 32), lane = static_cast<int>(lane_index());
  const int own = lane / 4, turn = lane % 4;
  const auto words_of = [&](i64 row, i64 block) {  // the row's integers in a block; a row that is none repeats the last
    return x.integers + ((x.first + (row < x.count ? row : x.count - 1)) * x.blocks + block) * kQuads;
  };
  for (i64 start = 0; start < x.blocks; start += kQuantWarps) {
    const i64 block = start + warp;
    if (block < x.blocks) {
      const char* at = packed + (group * x.blocks + block) * form.block_bytes();
      const u32* weights = reinterpret_cast<const u32*>(at);
      factors[0][warp][lane] = form.scale(at, lane);
      if (form.minimums) factors[1][warp][lane] = form.minimum(at, lane);
      for (int m = 0; m < x.count; m += 16) {
        const u32 *low = words_of(m + own, block), *high = words_of(m + own + 8, block);
        const u32 left[4] = {low[turn], high[turn], low[4 + turn], high[4 + turn]};
        for (int n = 0; n < kColumns; n += 8) {
          u32 right[2];
          if (form.bits == 8) {
            right[0] = weights[turn * kColumns + n + own];
            right[1] = weights[(4 + turn) * kColumns + n + own];
          } else {
            const u32 both = weights[turn * kColumns + n + own];
            right[0] = both & 0x0f0f0f0fu;
            right[1] = both >> 4 & 0x0f0f0f0fu;
          }
          i32 found[4] = {};
          multiply_bytes(found, left, right);
          for (int i = 0; i < 4; ++i) products[warp][m + own + 8 * (i / 2)][n + 2 * turn + i % 2] = found[i];
        }
      }
    }
    barrier();
    for (int b = 0; b < kQuantWarps && start + b < x.blocks; ++b) {
      for (int r = warp, i = 0; r < x.count; r += kQuantWarps, ++i) {
        const i64 at = (x.first + r) * x.blocks + start + b;
        const i32 sum = products[b][r][lane] - form.offset() * x.sums[at];
        totals[i] = fused(static_cast<float>(sum), factors[0][b][lane] * x.scales[at], totals[i]);
        if (form.minimums) {
          totals[i] = fused(factors[1][b][lane], x.scales[at] * static_cast<float>(x.sums[at]), totals[i]);
        }
      }
    }
    barrier();
  }
}

// Thread blocks of 256: one has the 32 outputs of a group, of 32 rows. With a `unit`, output i is made of outputs i and
// outputs + i of the weights. Other forms than float32 want multiples of 32 outputs.
OUTRIDER_KERNEL outrider_quant_product(const u32* integers, const float* scales, const i32* sums, const char* packed, char* to,
                                       float* to_scales, i32* to_sums, i64 rows, i64 inputs, i64 outputs, i64 bits, i64 wide,
                                       i64 minimums, i64 unit, i64 form) {
  const QuantForm weights = {bits, wide != 0, minimums != 0};
  const i64 groups = (outputs + kColumns - 1) / kColumns;
  const i64 tiles = (rows + kQuantRows - 1) / kQuantRows;  // neighbours share weights
  const i64 group = block_index() / tiles;
  const i64 first = block_index() % tiles * kQuantRows;
  const int count = rows - first < kQuantRows ? static_cast<int>(rows - first) : kQuantRows;
  const QuantRows x = {integers, scales, sums, inputs / kBlock, first, count};
  float totals[kQuantOwn] = {};
  quant_tile(weights, x, packed, group, totals);
  if (unit != kNoUnit) {
    float up[kQuantOwn] = {};
    quant_tile(weights, x, packed, group + groups, up);
    for (int i = 0; i < kQuantOwn; ++i) totals[i] = gated(unit, totals[i], up[i]);
  }
  const i64 output = group * kColumns + lane_index();
  for (i64 r = thread_index() / 32, i = 0; r < count; r += kQuantWarps, ++i) {
    if (form == kFloat32) {
      if (output < outputs) reinterpret_cast<float*>(to)[(first + r) * outputs + output] = totals[i];
    } else {
      keep_block({to, to_scales, to_sums, form}, (first + r) * groups + group, totals[i]);
    }
  }
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
