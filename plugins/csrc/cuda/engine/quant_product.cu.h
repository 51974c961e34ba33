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
  OUTRIDER_DEVICE i32 half() const { return 1 << (bits - 1); }            // of the range
  OUTRIDER_DEVICE i32 offset() const { return minimums ? 0 : half(); }  // what was added to the integers
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
constexpr int kQuantRows = 32;  // of a block, at most: four matrices of eight
constexpr int kQuantFew = 8;    // rows for which there is code of its own

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

// The blocks of weights of a warp that are on their way through shared memory, one after another, kDeep of them a turn. Lanes
// copy integers as they lie: a GPU asks for each 16 bytes by themselves if neighbours are not neighbours in both memories. Then
// lane 4 g + t reads the inputs 4 t .. 4 t + 3 and 16 + 4 t .. 19 + 4 t of outputs 4 g .. 4 g + 3, in lines of 128 bytes that
// are apart so that banks differ. Scales and minimums follow, for all warps, until the next turn but one; scales of 16 bits once
// more as float32, by the warp that multiplies. kInputs bytes of a turn are for the inputs.
template <int kBits, int kDeep, int kInputs>
struct QuantAhead {
  static constexpr int kTurns = kBits == 4 && kDeep == 1 ? 5 : 4;
  static constexpr int kEarly = kTurns - 2;
  static constexpr int kParts = kBits / 4;  // of 16 bytes of a lane
  static constexpr int kLine = 128 + 32, kPart = 4 * kLine, kIntegers = kParts * kPart;
  static constexpr int kBytes = kIntegers + 2 * 4 * kColumns;  // of a block
  static constexpr int kWeights = kDeep * kBytes, kOfTurn = kWeights + kInputs, kOfWarp = kTurns * kOfTurn;

  const char* from;  // the lane's integers of the first block of the turn that is started next
  SharedAddress to;
  SharedAddress to_factors;
  int apart;      // bytes from block to block of a warp
  bool has_part;  // of scales and minimums
  int start_place = 0, read_place = 0;

  OUTRIDER_DEVICE QuantAhead(const QuantForm& form, const char* block, char* shared) {
    const int lane = static_cast<int>(lane_index());
    from = block + 16 * lane;
    apart = kQuantWarps * static_cast<int>(form.block_bytes());
    to = shared_address(shared) + (lane / 8 * kLine + lane % 8 * 16);
    to_factors = shared_address(shared) + (kIntegers + 16 * lane);
    has_part = lane < (form.wide ? 8 : 4) * (form.minimums ? 2 : 1);
  }
  OUTRIDER_DEVICE static void advance(int& place) { place = place == kOfWarp - kOfTurn ? 0 : place + kOfTurn; }
  OUTRIDER_DEVICE void start(int left) {  // of `left` blocks that the warp and those after it have
    for (int d = 0; d < kDeep; ++d) {
      const bool there = d * kQuantWarps < left;
      for (int part = 0; part < kParts; ++part) {
        start_copy16(to + (start_place + d * kBytes + kPart * part), from + 512 * part, there);
      }
      start_copy16(to_factors + (start_place + d * kBytes), from + 512 * kParts, there && has_part);
      from += apart;
    }
    advance(start_place);
  }
  OUTRIDER_DEVICE void wait() const {
    wait_for_copies<kEarly>();
    warp_barrier();
  }
  // The scales of a block as float32: those that are there, or those that `widen` makes.
  OUTRIDER_DEVICE static const float* scales(const QuantForm& form, const char* block) {
    return reinterpret_cast<const float*>(block + kIntegers + (form.wide ? 0 : 4 * kColumns));
  }
  OUTRIDER_DEVICE static u32 half(const char* block) {
    return reinterpret_cast<const unsigned short*>(block + kIntegers)[lane_index()];
  }
  OUTRIDER_DEVICE static void widen(const QuantForm& form, char* block, u32 half) {
    if (!form.wide) reinterpret_cast<float*>(block + kIntegers + 4 * kColumns)[lane_index()] = number_of_half(half);
  }
};

struct alignas(8) InputFactors {
  float scale;
  i32 sum;
};

// Dynamic shared memory (quant_bytes in plugins/cuda/engine_kernels.py): the products of the warps with kDeep blocks of inputs
// each, and the scales and sums of these, of few rows twice, so that warps fill one half while the other is added up; then
// what is on its way.
template <int kDeep>
struct QuantShared {
  static constexpr int kBlocks = kDeep * kQuantWarps;       // of a turn
  static constexpr int kStride = kBlocks * kColumns + 4;    // words from row to row, so that banks differ
  static constexpr int kInputStride = kBlocks + 2;
  static constexpr int kOfRow = kStride * 4 + kInputStride * static_cast<int>(sizeof(InputFactors));
  char* memory;
  int rows;
  OUTRIDER_DEVICE bool twice() const { return rows <= kQuantFew / (kDeep == 1 ? 1 : 2); }
  OUTRIDER_DEVICE QuantShared other(bool second) const { return {memory + (second ? rows * kOfRow : 0), rows}; }
  OUTRIDER_DEVICE float* products(int row, int block) const {
    return reinterpret_cast<float*>(memory) + row * kStride + block * kColumns;
  }
  OUTRIDER_DEVICE InputFactors* inputs(int row, int block) const {
    return reinterpret_cast<InputFactors*>(products(rows, 0)) + row * kInputStride + block;
  }
  OUTRIDER_DEVICE char* ahead() const { return memory + (twice() ? 2 : 1) * rows * kOfRow; }
};

// A product's inputs, beside its rows, and its output: see HalfProduct in half_product.cu.h.
struct QuantProduct {
  QuantForm form;
  const char* packed;
  const float* residual;
  Formed to;
  i64 group, outputs, unit;
};

// What a warp multiplies by: the words of its block of inputs, of rows g, 8 + g ... of lane 4 g + t; and what it adds up by: the
// scales and sums of its own rows' blocks. Both are loaded a turn ahead. A row that there is not repeats the last.
struct LoadedInputs {
  static constexpr int kMost = kQuantRows, kDeep = 1, kTiles = kMost / 8, kOwn = kMost / kQuantWarps, kBytes = 0;
  using Shared = QuantShared<kDeep>;
  const QuantRows& x;
  const u32* block;
  u32 words[kTiles][2] = {};
  int places[kTiles];
  InputFactors factors[kOwn] = {};
  Shared shared = {};  // of the turn

  OUTRIDER_DEVICE LoadedInputs(const QuantRows& of, char*) : x(of) {
    block = x.integers + x.place(0, thread_index() / 32) * kQuads;
    for (int tile = 0; tile < kTiles; ++tile) {
      const int row = 8 * tile + static_cast<int>(lane_index()) / 4;
      places[tile] = static_cast<int>((row < x.count ? row : x.count - 1) * x.blocks * kQuads + lane_index() % 4);
    }
  }
  OUTRIDER_DEVICE void start(int, int) {}
  OUTRIDER_DEVICE void again(int) {}
  OUTRIDER_DEVICE void fetch(int first) {  // of the turn whose first block is `first`
    const int warp = static_cast<int>(thread_index() / 32), lane = static_cast<int>(lane_index());
    if (lane < Shared::kBlocks && first + lane < x.blocks) {
      for (int i = 0; i < kOwn; ++i) {
        const int row = warp + i * kQuantWarps;
        if (row >= x.count) break;
        factors[i] = {x.scales[x.place(row, first + lane)], x.sums[x.place(row, first + lane)]};
      }
    }
    if (first + warp >= x.blocks) return;
    for (int tile = 0; tile < kTiles; ++tile) {
      if (8 * tile >= x.count) break;
      words[tile][0] = block[first * kQuads + places[tile]];
      words[tile][1] = block[first * kQuads + places[tile] + 4];
    }
  }
  OUTRIDER_DEVICE void arrive(const Shared& own, int) {
    shared = own;
    const int warp = static_cast<int>(thread_index() / 32), lane = static_cast<int>(lane_index());
    for (int i = 0; i < kOwn; ++i) {
      const int row = warp + i * kQuantWarps;
      if (row >= x.count) break;
      if (lane < Shared::kBlocks) *own.inputs(row, lane) = factors[i];
    }
  }
  OUTRIDER_DEVICE u32 word(int, int tile, int half) const { return words[tile][half]; }
  OUTRIDER_DEVICE InputFactors factor(int row, int b) const { return *shared.inputs(row, b); }
};

// The same of up to eight rows, which come through shared memory beside the weights, as far ahead: a load would be waited for
// in every turn. A warp has the scales and sums of one row.
template <int kBlocksOfWarp>
struct CopiedInputs {
  static constexpr int kMost = kQuantFew, kDeep = kBlocksOfWarp;
  using Shared = QuantShared<kDeep>;
  static constexpr int kWords = kQuantFew * kBlock;  // bytes of a block
  static constexpr int kFactors = kDeep * kWords, kBytes = kFactors + 2 * 4 * Shared::kBlocks;  // of a turn
  const char *words, *factors;  // the lane's parts of the turn that is started next
  SharedAddress to;
  const char *own, *turn = nullptr;  // the warp's inputs of the first turn, and of this one
  bool copies_words, copies_factors;

  OUTRIDER_DEVICE CopiedInputs(const QuantRows& x, char* memory) : to(shared_address(memory)), own(memory) {
    const int warp = static_cast<int>(thread_index() / 32), lane = static_cast<int>(lane_index());
    copies_words = lane < 2 * x.count;
    copies_factors = warp < x.count && lane < 2 * Shared::kBlocks;  // a lane for each scale and sum
    words = reinterpret_cast<const char*>(x.integers + x.place(copies_words ? lane / 2 : 0, warp) * kQuads) + lane % 2 * 16;
    const i64 place = x.place(copies_factors ? warp : 0, lane % Shared::kBlocks);
    factors = lane < Shared::kBlocks ? reinterpret_cast<const char*>(x.scales + place)
                                     : reinterpret_cast<const char*>(x.sums + place);
  }
  OUTRIDER_DEVICE void start(int start_place, int left) {
    const int lane = static_cast<int>(lane_index());
    for (int d = 0; d < kDeep; ++d) {
      start_copy16(to + (start_place + d * kWords + 16 * lane), words + d * kQuantWarps * kBlock,
                   copies_words && d * kQuantWarps < left);
    }
    start_copy4(to + (start_place + kFactors + 4 * lane), factors, copies_factors && lane % Shared::kBlocks < left + static_cast<int>(thread_index() / 32));
    words += Shared::kBlocks * kBlock;
    factors += Shared::kBlocks * 4;
  }
  OUTRIDER_DEVICE void again(int turns) {
    words -= turns * Shared::kBlocks * kBlock;
    factors -= turns * Shared::kBlocks * 4;
  }
  OUTRIDER_DEVICE void fetch(int) {}
  OUTRIDER_DEVICE void arrive(const Shared&, int read_place) { turn = own + read_place; }
  OUTRIDER_DEVICE u32 word(int d, int, int half) const {
    const int lane = static_cast<int>(lane_index());
    return reinterpret_cast<const u32*>(turn + d * kWords)[lane / 4 * kQuads + lane % 4 + 4 * half];
  }
  OUTRIDER_DEVICE InputFactors factor(int, int b) const {
    const char* const of = turn + kFactors;
    return {reinterpret_cast<const float*>(of)[b], reinterpret_cast<const i32*>(of)[Shared::kBlocks + b]};
  }
};

// The bits of a float32, 1.5 * 2^23: an integer added to them is added to the number, as long as it is less than 2^22.
constexpr i32 kFloor = 0x4b400000;

// A warp's products with its kDeep blocks of inputs, of all rows: integers, as float32. Of the matrices the weights are A, so that
// eight rows are one, and signed: less half of their range, and of 4 bits times 16. Of a block that there is not, what lies in
// the memory is multiplied, and not used.
template <typename Ahead, int kBits, typename Inputs>
OUTRIDER_DEVICE void multiply_blocks(const char* weights, const Inputs& inputs, int count, float* products) {
  constexpr int kDeep = Inputs::kDeep;
  constexpr float kTimes = kBits == 8 ? 1.0f : 1.0f / 16;
  const int lane = static_cast<int>(lane_index());
  u32 low[kDeep][4], high[kDeep][4];
  for (int d = 0; d < kDeep; ++d) {
    Bytes16 words[kBits / 4];
    for (int part = 0; part < kBits / 4; ++part) words[part] = load_bytes16(weights + d * Ahead::kBytes + Ahead::kPart * part);
    for (int n = 0; n < 4; ++n) {
      low[d][n] = (kBits == 8 ? words[0].word[n] : words[0].word[n] << 4 & 0xf0f0f0f0u) ^ 0x80808080u;
      high[d][n] = (kBits == 8 ? words[kBits / 4 - 1].word[n] : words[0].word[n] & 0xf0f0f0f0u) ^ 0x80808080u;
    }
  }
  for (int tile = 0; tile < Inputs::kMost / 8; ++tile) {
    if (tile > 0 && 8 * tile >= count) break;
    i32 found[kDeep][2][4];
    for (int d = 0; d < kDeep; ++d) {
      const u32 right[2] = {inputs.word(d, tile, 0), inputs.word(d, tile, 1)};
      for (int m = 0; m < 2; ++m) {
        multiply_bytes(found[d][m], kFloor, {low[d][2 * m], low[d][2 * m + 1], high[d][2 * m], high[d][2 * m + 1]}, right);
      }
    }
    for (int d = 0; d < kDeep; ++d) {
      for (int i = 0; i < 2; ++i) {  // outputs 4 g .. 4 g + 3 of rows 2 t and 2 t + 1
        const int row = 8 * tile + 2 * (lane % 4) + i;
        const i32 own[4] = {found[d][0][i], found[d][0][2 + i], found[d][1][i], found[d][1][2 + i]};
        Quad four;
        for (int n = 0; n < 4; ++n) four.value[n] = fused(float_of(own[n]), kTimes, -float_of(kFloor) * kTimes);
        float* const to = products + row * Inputs::Shared::kStride + d * kQuantWarps * kColumns + lane / 4 * 4;
        if (row < count) keep_quad(to, four);
      }
    }
  }
}

// The blocks of all warps are added to the outputs of a thread, in order: the first `count` of them, where they are not kWhole.
// What there is of the others is read and not used, so that no load waits for a branch. `weights` has the blocks of the first
// warp.
template <typename Ahead, bool kWhole, typename Inputs>
OUTRIDER_DEVICE void add_blocks(const QuantForm& form, const typename Inputs::Shared& shared, const Inputs& inputs, int count,
                                const char* weights, float (&totals)[Inputs::kMost / kQuantWarps]) {
  constexpr int kBlocks = Inputs::Shared::kBlocks;
  const int warp = static_cast<int>(thread_index() / 32), lane = static_cast<int>(lane_index());
  if (warp >= shared.rows) return;
  const float half = static_cast<float>(form.half());
  float scales[kBlocks], minimums[kBlocks];
  const auto block = [&](int b) { return weights + (b % kQuantWarps * Ahead::kOfWarp + b / kQuantWarps * Ahead::kBytes); };
  for (int b = 0; b < kBlocks; ++b) scales[b] = Ahead::scales(form, block(b))[lane];
  if (form.minimums) {
    for (int b = 0; b < kBlocks; ++b) {
      const char* const own = block(b) + Ahead::kIntegers;
      minimums[b] = form.wide ? reinterpret_cast<const float*>(own)[kColumns + lane]
                              : number_of_half(reinterpret_cast<const unsigned short*>(own)[kColumns + lane]);
    }
  }
  OUTRIDER_UNROLL(4)
  for (int i = 0; i < Inputs::kMost / kQuantWarps; ++i) {
    const int row = warp + i * kQuantWarps;
    if (row >= shared.rows) break;
    float total = totals[i];
    for (int b = 0; b < kBlocks; ++b) {
      const InputFactors x = inputs.factor(row, b);
      float product = shared.products(row, b)[lane], with;
      if (form.minimums) {  // of integers from 0 on
        const float sum = static_cast<float>(x.sum);
        product = fused(half, sum, product);
        with = fused(minimums[b], x.scale * sum, fused(product, scales[b] * x.scale, total));
      } else {
        with = fused(product, scales[b] * x.scale, total);
      }
      total = kWhole || b < count ? with : total;
    }
    totals[i] = total;
  }
}

// A thread has output t % 32 of rows t / 32, t / 32 + 8 ... Each warp adds up the integers of its blocks of inputs, on tensor
// cores, while its next blocks are on their way, and then each thread adds the blocks of its outputs, in order. The blocks
// of a gated unit's other half follow without a pause.
template <int kBits, typename Inputs>
OUTRIDER_DEVICE void multiply_integers_of(const QuantRows& x, const QuantProduct& product, char* dynamic) {
  using Ahead = QuantAhead<kBits, Inputs::kDeep, Inputs::kBytes>;
  using Shared = typename Inputs::Shared;
  constexpr int kOwn = Inputs::kMost / kQuantWarps, kBlocks = Shared::kBlocks;
  const QuantForm& form = product.form;
  const int warp = static_cast<int>(thread_index() / 32), lane = static_cast<int>(lane_index());
  const int bytes = static_cast<int>(form.block_bytes()), count = x.count;
  const Shared shared = {dynamic, count};
  const int turns = (x.blocks + kBlocks - 1) / kBlocks;  // of a group
  const int all = product.unit == kNoUnit ? turns : 2 * turns;
  const i64 group_bytes = static_cast<i64>(x.blocks) * bytes;
  char *const memory = shared.ahead(), *const ring = memory + warp * Ahead::kOfWarp;
  Ahead ahead(form, product.packed + product.group * group_bytes + warp * bytes, ring);
  Inputs inputs(x, ring + Ahead::kWeights);
  // From a group's last turn to the first one of the unit's other half.
  const i64 jump = product.outputs / kColumns * group_bytes - static_cast<i64>(turns) * kBlocks * bytes;
  int starting = 0, left = x.blocks - warp;  // turn that is started next, and the blocks that the warp and those after it have
  const auto advance = [&] {
    left -= kBlocks;
    if (++starting != turns || all == turns) return;
    ahead.from += jump;
    left = x.blocks - warp;
  };

  OUTRIDER_UNROLL(1)
  while (starting < Ahead::kEarly) {  // weights alone, which no kernel writes
    ahead.start(left);
    advance();
  }
  wait_for_earlier();
  OUTRIDER_UNROLL(1)
  for (int a = 0; a < Ahead::kEarly; ++a) {
    if (a == turns) inputs.again(turns);
    inputs.start(a * Ahead::kOfTurn, a < all ? x.blocks - (a < turns ? a : a - turns) * kBlocks - warp : -warp);
    close_copies();
  }
  inputs.fetch(0);
  float totals[kOwn] = {}, gate[kOwn] = {};
  int first = 0;  // block of this turn
  char* const own_weights = ring + (lane % 4 * Ahead::kLine + lane / 4 * 16);
  OUTRIDER_UNROLL(1)
  for (int turn = 0; turn < all; ++turn) {
    if (turn == turns) {
      for (int i = 0; i < kOwn; ++i) gate[i] = totals[i], totals[i] = 0.0f;
    }
    if (starting == turns && all != turns) inputs.again(turns);
    inputs.start(ahead.start_place, left);
    ahead.start(left);
    close_copies();
    advance();
    if (turn + Ahead::kEarly == all) let_next_begin();  // the warp asks for no more
    ahead.wait();
    const Shared own = shared.other(shared.twice() && turn % 2 != 0);
    inputs.arrive(own, ahead.read_place);
    u32 halves[Inputs::kDeep];
    for (int d = 0; d < Inputs::kDeep; ++d) halves[d] = Ahead::half(ring + (d * Ahead::kBytes + ahead.read_place));
    multiply_blocks<Ahead, kBits>(own_weights + ahead.read_place, inputs, count, own.products(0, warp));
    for (int d = 0; d < Inputs::kDeep; ++d) Ahead::widen(form, ring + (d * Ahead::kBytes + ahead.read_place), halves[d]);
    const int next = turn + 1 == turns ? 0 : first + kBlocks;
    if (turn + 1 < all) inputs.fetch(next);
    barrier();
    const int there = x.blocks - first;
    if (there >= kBlocks) {
      add_blocks<Ahead, true>(form, own, inputs, there, memory + ahead.read_place, totals);
    } else {
      add_blocks<Ahead, false>(form, own, inputs, there, memory + ahead.read_place, totals);
    }
    Ahead::advance(ahead.read_place);
    if (!shared.twice()) barrier();
    first = next;
  }
  const i64 output = product.group * kColumns + lane;
  for (int i = 0; i < kOwn; ++i) {
    const int row = warp + i * kQuantWarps;
    if (row >= count) break;
    const float value = product.unit == kNoUnit ? totals[i] : gated(product.unit, gate[i], totals[i]);
    keep_output(product.to, product.residual, x.first + row, product.group, output, product.outputs, value);
  }
}

// Of few rows a warp has as many bytes a turn with integers of 4 bits as with 8.
template <int kBits>
OUTRIDER_DEVICE void multiply_quantized(const QuantRows& x, const QuantProduct& product, bool few, char* dynamic) {
  if (few) {
    multiply_integers_of<kBits, CopiedInputs<8 / kBits>>(x, product, dynamic);
  } else {
    multiply_integers_of<kBits, LoadedInputs>(x, product, dynamic);
  }
}

// Thread blocks of 256: one has the 32 outputs of a group, of 32 rows.
OUTRIDER_KERNEL OUTRIDER_FIT(kQuantWarps * 32, 2)
outrider_quant_product(const u32* integers, const float* scales, const i32* sums, const char* packed,
                       const float* residual, char* to, float* to_scales, i32* to_sums, i64 rows, i64 inputs, i64 outputs,
                       i64 bits, i64 wide, i64 minimums, i64 unit, i64 form) {
  const i64 tiles = (rows + kQuantRows - 1) / kQuantRows;  // neighbours share weights
  const i64 first = block_index() % tiles * kQuantRows;
  const int count = rows - first < kQuantRows ? static_cast<int>(rows - first) : kQuantRows;
  const QuantRows x = {integers, scales, sums, static_cast<int>(inputs / kBlock), first, count};
  const QuantProduct product = {{bits, wide != 0, minimums != 0}, packed, residual, {to, to_scales, to_sums, form},
                                block_index() / tiles, outputs, unit};
  if (bits == 8) {
    multiply_quantized<8>(x, product, rows <= kQuantFew, dynamic_shared());
  } else {
    multiply_quantized<4>(x, product, rows <= kQuantFew, dynamic_shared());
  }
}

// Rows of such weights, looked up by number: quant_row in onnxruntime/quant_gather.cc. A number out of range gives zeros.
OUTRIDER_KERNEL outrider_quant_gather(const i64* ids, const char* packed, float* to, i64 count, i64 inputs, i64 outputs,
                                      i64 bits, i64 wide, i64 minimums) {
  follow();
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
