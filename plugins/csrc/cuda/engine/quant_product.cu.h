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
constexpr int kQuantRows = 32;  // of a block, at most: two matrices of sixteen
constexpr int kQuantStride = kQuantWarps * kColumns + 4;  // words from row to row in shared memory, so that banks differ

// Rows that were quantised (form.h), as words of four integers.
struct QuantRows {
  const u32* integers;
  const float* scales;
  const i32* sums;
  int blocks;  // of a row
  i64 first;   // row of the thread block
  int count;   // rows of the thread block
  OUTRIDER_DEVICE i64 place(i64 row, i64 block) const { return (first + row) * blocks + block; }
};

// The blocks of weights of a warp that are on their way through shared memory, one after another. A lane copies what it
// alone reads, so that no barrier is needed. Lane 4 g + t has the inputs 4 t .. 4 t + 3 and 16 + 4 t .. 19 + 4 t of outputs
// 4 g .. 4 g + 3, and the scale and minimum of output `lane`.
template <int kBits>
struct QuantAhead {
  static constexpr int kBlocks = kBits == 4 ? 6 : 4;
  static constexpr int kParts = kBits / 4;  // of 16 bytes
  static constexpr int kFactors = 32 * 16 * kParts;
  static constexpr int kBytes = kFactors + 2 * 32 * 4;  // of a block

  bool wide, minimums;
  const char* from;        // the lane's integers of the next block that is started
  int factors;             // bytes from there to its scale, or to the pair of float16 that has it
  SharedAddress integers;  // where the lane's integers and scale of a block go
  SharedAddress scale;
  const char* memory;  // the same for its own loads
  int starts = 0, ends = 0;  // bytes: places of the blocks that are started and read next

  OUTRIDER_DEVICE QuantAhead(const QuantForm& form, const char* block, char* shared)
      : wide(form.wide), minimums(form.minimums) {
    const int lane = static_cast<int>(lane_index()), own = 4 * ((lane % 4) * kColumns + lane / 4 * 4);
    from = block + own;
    factors = kBlock * kColumns * kBits / 8 - own + (wide ? 4 * lane : lane / 2 * 4);
    integers = shared_address(shared) + 16 * lane;
    scale = shared_address(shared) + kFactors + 4 * lane;
    memory = shared;
  }
  OUTRIDER_DEVICE static void advance(int& place) { place = place == (kBlocks - 1) * kBytes ? 0 : place + kBytes; }
  OUTRIDER_DEVICE void start(bool there) {  // nothing where the warp has no more blocks
    if (there) {
      for (int part = 0; part < kParts; ++part) {
        start_copy16(integers + starts + 512 * part, from + 16 * kColumns * part);
      }
      start_copy4(scale + starts, from + factors);
      if (minimums) start_copy4(scale + starts + 4 * 32, from + factors + (wide ? 4 : 2) * kColumns);
    }
    close_copies();
    advance(starts);
  }
  OUTRIDER_DEVICE void wait() const { wait_for_copies<kBlocks - 1>(); }
  OUTRIDER_DEVICE Bytes16 words(int part) const { return load_bytes16(memory + ends + 512 * part + 16 * lane_index()); }
  OUTRIDER_DEVICE float factor(int which) const {  // 0 the scale, 1 the minimum
    const u32 bits = reinterpret_cast<const u32*>(memory + ends + kFactors + 4 * 32 * which)[lane_index()];
    const float half = number_of_half(bits >> lane_index() % 2 * 16 & 0xffffu);
    return wide ? float_of(static_cast<i32>(bits)) : half;
  }
};

// A lane's part of a block of the first sixteen rows, and the scale and sum of row `lane`.
struct OwnInputs {
  u32 words[4];
  float scale;
  i32 sum;
};

// Where a lane finds its parts of the blocks of inputs.
struct InputPlaces {
  const u32 *low, *high;
  const float* scales;
  const i32* sums;
  int count;

  // The words of row `row` of the thread block; a row that there is not repeats the last.
  OUTRIDER_DEVICE static const u32* words_of(const QuantRows& x, int row) {
    return x.integers + x.place(row < x.count ? row : x.count - 1, 0) * kQuads + lane_index() % 4;
  }
  OUTRIDER_DEVICE explicit InputPlaces(const QuantRows& x) : count(x.count) {
    const int lane = static_cast<int>(lane_index());
    low = words_of(x, lane / 4);
    high = words_of(x, lane / 4 + 8);
    scales = x.scales + x.place(lane < count ? lane : 0, 0);
    sums = x.sums + x.place(lane < count ? lane : 0, 0);
  }
  OUTRIDER_DEVICE void fetch(int block, OwnInputs& to) const {
    to.words[0] = low[block * kQuads];
    to.words[2] = low[block * kQuads + 4];
    if (count > 8) {
      to.words[1] = high[block * kQuads];
      to.words[3] = high[block * kQuads + 4];
    }
    to.scale = scales[block];
    to.sum = sums[block];
  }
};

struct alignas(8) InputFactors {
  float scale;
  i32 sum;
};
constexpr int kInputStride = kQuantWarps + 2;

// Dynamic shared memory (quant_bytes in plugins/cuda/engine_kernels.py): what the warps have of a block of inputs each, up to
// sixteen rows twice, so that warps fill one half while the other is added up; then weights on their way.
struct QuantShared {
  char* memory;
  int rows;
  OUTRIDER_DEVICE bool twice() const { return rows <= 16; }
  OUTRIDER_DEVICE int half_bytes() const {
    return kQuantWarps * 2 * kColumns * 4 + rows * (kQuantStride * 4 + kInputStride * static_cast<int>(sizeof(InputFactors)));
  }
  OUTRIDER_DEVICE QuantShared other(bool second) const { return {memory + (second ? half_bytes() : 0), rows}; }
  OUTRIDER_DEVICE float* factors(int warp) const {  // scales, then minimums, of the weights
    return reinterpret_cast<float*>(memory) + warp * 2 * kColumns;
  }
  OUTRIDER_DEVICE i32* products(int row, int warp) const {
    return reinterpret_cast<i32*>(factors(kQuantWarps)) + row * kQuantStride + warp * kColumns;
  }
  OUTRIDER_DEVICE InputFactors* inputs(int row, int warp) const {
    return reinterpret_cast<InputFactors*>(products(rows, 0)) + row * kInputStride + warp;
  }
  OUTRIDER_DEVICE char* ahead(int warp, int bytes) const {
    return memory + (twice() ? 2 : 1) * half_bytes() + warp * bytes;
  }
};

// What a product is of, beside its rows, and where it goes: see HalfProduct in half_product.cu.h.
struct QuantProduct {
  QuantForm form;
  const char* packed;
  const float* residual;
  Formed to;
  i64 group, outputs, unit;
};

// A warp's integers of one block of inputs, by all rows, and what they are multiplied by.
template <int kBits>
OUTRIDER_DEVICE void multiply_block(const QuantAhead<kBits>& weights, const QuantRows& x, int block,
                                    const OwnInputs& inputs, const QuantShared& shared) {
  const int warp = static_cast<int>(thread_index() / 32), lane = static_cast<int>(lane_index());
  shared.factors(warp)[lane] = weights.factor(0);
  if (weights.minimums) shared.factors(warp)[kColumns + lane] = weights.factor(1);
  if (lane < x.count) *shared.inputs(lane, warp) = {inputs.scale, inputs.sum};
  Bytes16 words[kBits / 4];
  for (int part = 0; part < kBits / 4; ++part) words[part] = weights.words(part);
  u32 left[4] = {inputs.words[0], inputs.words[1], inputs.words[2], inputs.words[3]};
  OUTRIDER_UNROLL(1)
  for (int first = 0;; first += 16) {
    i32 found[4][4] = {};
    for (int n = 0; n < 4; ++n) {
      const u32 low = words[0].word[n], high = words[kBits / 4 - 1].word[n];
      const u32 right[2] = {kBits == 8 ? low : low & 0x0f0f0f0fu, kBits == 8 ? high : low >> 4 & 0x0f0f0f0fu};
      multiply_bytes(found[n], left, right);
    }
    for (int second = 0; second < 2; ++second) {
      const int row = first + 8 * second + lane / 4;
      if (row >= x.count) continue;
      Bytes16* const to = reinterpret_cast<Bytes16*>(shared.products(row, warp) + 8 * (lane % 4));
      for (int i = 0; i < 2; ++i) {
        Bytes16 four;
        for (int n = 0; n < 4; ++n) four.word[n] = static_cast<u32>(found[n][2 * second + i]);
        to[i] = four;
      }
    }
    if (first + 16 >= x.count) return;
    for (int second = 0; second < 2; ++second) {
      const u32* next = InputPlaces::words_of(x, first + 16 + 8 * second + lane / 4) + block * kQuads;
      left[second] = next[0];
      left[second + 2] = next[4];
    }
  }
}

// The blocks of all warps are added to the outputs of a thread, in order: the first `count` of them. What there is of the
// others is read and not used, so that no load waits for a branch.
template <int kRows>
OUTRIDER_DEVICE void add_blocks(const QuantForm& form, int rows, int count, const QuantShared& shared,
                                float (&totals)[kRows / kQuantWarps]) {
  const int warp = static_cast<int>(thread_index() / 32), lane = static_cast<int>(lane_index());
  const i32 offset = form.offset();
  OUTRIDER_UNROLL(4)
  for (int i = 0; i < kRows / kQuantWarps; ++i) {
    const int row = warp + i * kQuantWarps;
    if (row >= rows) break;
    float sums[kQuantWarps], factors[kQuantWarps], total = totals[i];
    InputFactors x[kQuantWarps];
    for (int b = 0; b < kQuantWarps; ++b) {
      x[b] = *shared.inputs(row, b);
      sums[b] = static_cast<float>(shared.products(row, b)[lane] - offset * x[b].sum);
      factors[b] = shared.factors(b)[lane] * x[b].scale;
    }
    if (form.minimums) {
      for (int b = 0; b < kQuantWarps; ++b) {
        const float with = fused(sums[b], factors[b], total);
        const float both = fused(shared.factors(b)[kColumns + lane], x[b].scale * static_cast<float>(x[b].sum), with);
        total = b < count ? both : total;
      }
    } else {
      for (int b = 0; b < kQuantWarps; ++b) total = b < count ? fused(sums[b], factors[b], total) : total;
    }
    totals[i] = total;
  }
}

// A thread has output t % 32 of rows t / 32, t / 32 + 8 ... up to kRows. Each warp adds up the integers of one block of inputs, on tensor
// cores, while its next blocks are on their way, and then each thread adds the blocks of its outputs, in order. The blocks
// of a gated unit's other half follow without a pause. `prepare` is called while the first blocks are on their way.
template <int kBits, int kRows, typename Prepare>
OUTRIDER_DEVICE void multiply_integers_of(const QuantRows& x, const QuantProduct& product, const QuantShared& shared,
                                          const Prepare& prepare) {
  constexpr int kAhead = QuantAhead<kBits>::kBlocks, kOwn = kRows / kQuantWarps;
  const QuantForm& form = product.form;
  const int warp = static_cast<int>(thread_index() / 32), bytes = static_cast<int>(form.block_bytes());
  const int turns = (x.blocks + kQuantWarps - 1) / kQuantWarps;  // of a group
  const int all = product.unit == kNoUnit ? turns : 2 * turns;
  const i64 group_bytes = static_cast<i64>(x.blocks) * bytes;
  QuantAhead<kBits> ahead(form, product.packed + product.group * group_bytes + warp * bytes,
                          shared.ahead(warp, kAhead * QuantAhead<kBits>::kBytes));
  // From a group's last turn to the first one of the unit's other half.
  const i64 jump = product.outputs / kColumns * group_bytes - static_cast<i64>(turns) * kQuantWarps * bytes;
  int starting = 0;  // the turn whose block is started next
  const auto start = [&] {
    const int block = (starting < turns ? starting : starting - turns) * kQuantWarps + warp;
    ahead.start(starting < all && block < x.blocks);
    ahead.from += kQuantWarps * bytes;
    if (++starting == turns) ahead.from += jump;
  };

  for (int a = 0; a < kAhead - 1; ++a) start();
  prepare();
  const InputPlaces places(x);
  OwnInputs inputs = {};
  if (warp < x.blocks) places.fetch(warp, inputs);
  float totals[kOwn] = {}, gate[kOwn] = {};
  int block = warp;  // of this turn
  OUTRIDER_UNROLL(1)
  for (int turn = 0; turn < all; ++turn) {
    if (turn == turns) {
      block = warp;
      for (int i = 0; i < kOwn; ++i) gate[i] = totals[i], totals[i] = 0.0f;
    }
    start();
    ahead.wait();
    const QuantShared own = shared.other(shared.twice() && turn % 2 != 0);
    if (block < x.blocks) multiply_block<kBits>(ahead, x, block, inputs, own);
    ahead.advance(ahead.ends);
    const int next = turn + 1 == turns ? warp : block + kQuantWarps;
    if (next < x.blocks) places.fetch(next, inputs);
    barrier();
    add_blocks<kRows>(form, x.count, x.blocks - (block - warp), own, totals);
    if (!shared.twice()) barrier();
    block += kQuantWarps;
  }
  const i64 output = product.group * kColumns + lane_index();
  for (int i = 0; i < kOwn; ++i) {
    const int row = warp + i * kQuantWarps;
    if (row >= x.count) break;
    const float value = product.unit == kNoUnit ? totals[i] : gated(product.unit, gate[i], totals[i]);
    keep_output(product.to, product.residual, x.first + row, product.group, output, product.outputs, value);
  }
}

template <int kRows, typename Prepare>
OUTRIDER_DEVICE void multiply_quantized(const QuantRows& x, const QuantProduct& product, const QuantShared& shared,
                                        const Prepare& prepare) {
  if (product.form.bits == 8) {
    multiply_integers_of<8, kRows>(x, product, shared, prepare);
  } else {
    multiply_integers_of<4, kRows>(x, product, shared, prepare);
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
  const QuantRows x = {integers, scales, sums, static_cast<int>(inputs / kBlock), first, count};
  const QuantShared shared = {dynamic_shared(), count};
  multiply_quantized<kQuantRows>(x, {{bits, wide != 0, minimums != 0}, packed, residual, {to, to_scales, to_sums, form},
                         block_index() / tiles, outputs, unit}, shared, [] {});
}

// The same of rows that are not normed yet, up to kNormRows: a block norms and quantises them in shared memory first, while
// its first weights are on their way.
OUTRIDER_KERNEL OUTRIDER_FIT(kQuantWarps * 32, 3)
outrider_normed_quant_product(const float* x, const float* norm, const char* packed, char* to, float* to_scales,
                              i32* to_sums, i64 rows, i64 inputs, i64 outputs, i64 bits, i64 wide, i64 minimums, i64 unit,
                              i64 form, i64 epsilon) {
  const int blocks = static_cast<int>(inputs / kBlock);
  const QuantShared shared = {dynamic_shared(), static_cast<int>(rows)};
  const int bytes = bits == 8 ? QuantAhead<8>::kBlocks * QuantAhead<8>::kBytes : QuantAhead<4>::kBlocks * QuantAhead<4>::kBytes;
  float* const row = reinterpret_cast<float*>(shared.ahead(kQuantWarps, bytes));
  char* const integers = reinterpret_cast<char*>(row + inputs);
  float* const scales = reinterpret_cast<float*>(integers + rows * inputs);
  i32* const sums = reinterpret_cast<i32*>(scales + rows * blocks);
  OUTRIDER_SHARED float factor[1];
  const auto prepare = [&] {
    for (i64 r = 0; r < rows; ++r) {
      stage_row(x + r * inputs, nullptr, nullptr, inputs, row);
      barrier();
      norm_factors(row, 1, inputs, float_of(static_cast<i32>(epsilon)), factor);
      for (i64 i = thread_index(); i < inputs; i += thread_count()) {
        keep_block({integers, scales, sums, kIntegers}, (r * inputs + i) / kBlock, row[i] * factor[0] * norm[i]);
      }
      barrier();
    }
  };
  const QuantRows normed = {reinterpret_cast<const u32*>(integers), scales, sums, blocks, 0, static_cast<int>(rows)};
  multiply_quantized<kNormRows>(normed, {{bits, wide != 0, minimums != 0}, packed, nullptr, {to, to_scales, to_sums, form},
                              block_index(), outputs, unit}, shared, prepare);
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
