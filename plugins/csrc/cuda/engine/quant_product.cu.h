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
// are apart so that banks differ. Scales and minimums follow, for all warps, until the next turn but one.
template <int kBits, int kDeep>
struct QuantAhead {
  static constexpr int kTurns = kBits == 4 && kDeep == 1 ? 5 : 4;
  static constexpr int kEarly = kTurns - 2;
  static constexpr int kParts = kBits / 4;  // of 16 bytes of a lane
  static constexpr int kLine = 128 + 32, kPart = 4 * kLine, kIntegers = kParts * kPart;
  static constexpr int kBytes = kIntegers + 2 * 4 * kColumns;  // of a block
  static constexpr int kOfTurn = kDeep * kBytes, kOfWarp = kTurns * kOfTurn;

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
    close_copies();
    advance(start_place);
  }
  OUTRIDER_DEVICE void wait() const {
    wait_for_copies<kEarly>();
    warp_barrier();
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
  OUTRIDER_DEVICE i32* products(int row, int block) const {
    return reinterpret_cast<i32*>(memory) + row * kStride + block * kColumns;
  }
  OUTRIDER_DEVICE InputFactors* inputs(int row, int block) const {
    return reinterpret_cast<InputFactors*>(products(rows, 0)) + row * kInputStride + block;
  }
  OUTRIDER_DEVICE char* ahead() const { return memory + (twice() ? 2 : 1) * rows * kOfRow; }
};

// What a product is of, beside its rows, and where it goes: see HalfProduct in half_product.cu.h.
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
  static constexpr int kMost = kQuantRows, kDeep = 1, kTiles = kMost / 8, kOwn = kMost / kQuantWarps;
  using Shared = QuantShared<kDeep>;
  const QuantRows& x;
  const u32* block;
  u32 words[kTiles][2] = {};
  int places[kTiles];
  InputFactors factors[kOwn] = {};
  Shared shared = {};  // of the turn

  OUTRIDER_DEVICE LoadedInputs(const QuantRows& of, char*, int) : x(of) {
    block = x.integers + x.place(0, thread_index() / 32) * kQuads;
    for (int tile = 0; tile < kTiles; ++tile) {
      const int row = 8 * tile + static_cast<int>(lane_index()) / 4;
      places[tile] = static_cast<int>((row < x.count ? row : x.count - 1) * x.blocks * kQuads + lane_index() % 4);
    }
  }
  OUTRIDER_DEVICE void start(int, int) {}
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
  OUTRIDER_DEVICE void arrive(const Shared& own) {
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
  OUTRIDER_DEVICE void leave() {}
};

// The same of up to eight rows, which come through shared memory beside the weights, as far ahead: a load would be waited for
// in every turn.
template <int kBlocksOfWarp>
struct CopiedInputs {
  static constexpr int kMost = kQuantFew, kDeep = kBlocksOfWarp;
  using Shared = QuantShared<kDeep>;
  static constexpr int kWords = kQuantFew * kBlock;  // bytes of a block
  static constexpr int kFactors = kDeep * kWords, kBytes = kFactors + 2 * 4 * Shared::kBlocks;  // of a turn
  const QuantRows& x;
  const char *words, *factors;  // the lane's parts of the first turn
  SharedAddress to;
  const char* own;
  bool copies_words, copies_factors;
  int end, start_place = 0, read_place = 0;

  OUTRIDER_DEVICE CopiedInputs(const QuantRows& of, char* memory, int turns) : x(of), end((turns - 1) * kBytes) {
    const int warp = static_cast<int>(thread_index() / 32), lane = static_cast<int>(lane_index());
    own = memory + warp * turns * kBytes;
    to = shared_address(memory + warp * turns * kBytes);
    copies_words = lane < 2 * x.count;
    copies_factors = warp < x.count && lane < 2 * Shared::kBlocks;  // a lane for each scale and sum
    words = reinterpret_cast<const char*>(x.integers + x.place(copies_words ? lane / 2 : 0, warp) * kQuads) + lane % 2 * 16;
    const i64 place = x.place(copies_factors ? warp : 0, lane % Shared::kBlocks);
    factors = lane < Shared::kBlocks ? reinterpret_cast<const char*>(x.scales + place)
                                     : reinterpret_cast<const char*>(x.sums + place);
  }
  OUTRIDER_DEVICE void start(int first, int left) {
    const int lane = static_cast<int>(lane_index());
    for (int d = 0; d < kDeep; ++d) {
      start_copy16(to + (start_place + d * kWords + 16 * lane), words + (first + d * kQuantWarps) * kBlock,
                   copies_words && d * kQuantWarps < left);
    }
    start_copy4(to + (start_place + kFactors + 4 * lane), factors + first * 4,
                copies_factors && lane % Shared::kBlocks < left + static_cast<int>(thread_index() / 32));
    start_place = start_place == end ? 0 : start_place + kBytes;
  }
  OUTRIDER_DEVICE void fetch(int) {}
  OUTRIDER_DEVICE void arrive(const Shared&) {}
  OUTRIDER_DEVICE u32 word(int d, int, int half) const {
    const int lane = static_cast<int>(lane_index());
    return reinterpret_cast<const u32*>(own + read_place + d * kWords)[lane / 4 * kQuads + lane % 4 + 4 * half];
  }
  OUTRIDER_DEVICE InputFactors factor(int, int b) const {
    const char* const of = own + read_place + kFactors;
    return {reinterpret_cast<const float*>(of)[b], reinterpret_cast<const i32*>(of)[Shared::kBlocks + b]};
  }
  OUTRIDER_DEVICE void leave() { read_place = read_place == end ? 0 : read_place + kBytes; }
};

// A warp's integers of one block of inputs, by all rows. Of the matrices the weights are A, so that eight rows are one. Of a
// block that there is not, what lies in the memory is multiplied, and not used.
template <int kBits, typename Inputs>
OUTRIDER_DEVICE void multiply_block(const char* weights, const Inputs& inputs, int d, int count, i32* products) {
  using Ahead = QuantAhead<kBits, Inputs::kDeep>;
  const int lane = static_cast<int>(lane_index());
  Bytes16 words[kBits / 4];
  for (int part = 0; part < kBits / 4; ++part) words[part] = load_bytes16(weights + Ahead::kPart * part);
  u32 low[4], high[4];
  for (int n = 0; n < 4; ++n) {
    low[n] = kBits == 8 ? words[0].word[n] : words[0].word[n] & 0x0f0f0f0fu;
    high[n] = kBits == 8 ? words[kBits / 4 - 1].word[n] : words[0].word[n] >> 4 & 0x0f0f0f0fu;
  }
  for (int tile = 0; tile < Inputs::kMost / 8; ++tile) {
    if (8 * tile >= count) break;
    const u32 right[2] = {inputs.word(d, tile, 0), inputs.word(d, tile, 1)};
    i32 found[2][4] = {};
    for (int m = 0; m < 2; ++m) {
      multiply_unsigned_bytes(found[m], {low[2 * m], low[2 * m + 1], high[2 * m], high[2 * m + 1]}, right);
    }
    for (int i = 0; i < 2; ++i) {  // outputs 4 g .. 4 g + 3 of rows 2 t and 2 t + 1
      const int row = 8 * tile + 2 * (lane % 4) + i;
      const i32 own[4] = {found[0][i], found[0][2 + i], found[1][i], found[1][2 + i]};
      Bytes16 four;
      for (int n = 0; n < 4; ++n) four.word[n] = static_cast<u32>(own[n]);
      if (row < count) *reinterpret_cast<Bytes16*>(products + row * Inputs::Shared::kStride + lane / 4 * 4) = four;
    }
  }
}

// The blocks of all warps are added to the outputs of a thread, in order: the first `count` of them. What there is of the
// others is read and not used, so that no load waits for a branch. `weights` has the blocks of the first warp.
template <typename Ahead, typename Inputs>
OUTRIDER_DEVICE void add_blocks(const QuantForm& form, const typename Inputs::Shared& shared, const Inputs& inputs, int count,
                                const char* weights, float (&totals)[Inputs::kMost / kQuantWarps]) {
  constexpr int kBlocks = Inputs::Shared::kBlocks;
  const int warp = static_cast<int>(thread_index() / 32), lane = static_cast<int>(lane_index());
  if (warp >= shared.rows) return;
  const i32 offset = form.offset();
  float scales[kBlocks], minimums[kBlocks];
  const auto factors_of = [&](int b) {
    return weights + (b % kQuantWarps * Ahead::kOfWarp + b / kQuantWarps * Ahead::kBytes + Ahead::kIntegers);
  };
  for (int b = 0; b < kBlocks; ++b) {
    scales[b] = form.wide ? reinterpret_cast<const float*>(factors_of(b))[lane]
                          : number_of_half(reinterpret_cast<const unsigned short*>(factors_of(b))[lane]);
  }
  if (form.minimums) {
    for (int b = 0; b < kBlocks; ++b) {
      minimums[b] = form.wide ? reinterpret_cast<const float*>(factors_of(b))[kColumns + lane]
                              : number_of_half(reinterpret_cast<const unsigned short*>(factors_of(b))[kColumns + lane]);
    }
  }
  OUTRIDER_UNROLL(4)
  for (int i = 0; i < Inputs::kMost / kQuantWarps; ++i) {
    const int row = warp + i * kQuantWarps;
    if (row >= shared.rows) break;
    float total = totals[i];
    for (int b = 0; b < kBlocks; ++b) {
      const InputFactors x = inputs.factor(row, b);
      const i32 sum = shared.products(row, b)[lane] - offset * x.sum;
      float with = fused(static_cast<float>(sum), scales[b] * x.scale, total);
      if (form.minimums) with = fused(minimums[b], x.scale * static_cast<float>(x.sum), with);
      total = b < count ? with : total;
    }
    totals[i] = total;
  }
}

// A thread has output t % 32 of rows t / 32, t / 32 + 8 ... Each warp adds up the integers of its blocks of inputs, on tensor
// cores, while its next blocks are on their way, and then each thread adds the blocks of its outputs, in order. The blocks
// of a gated unit's other half follow without a pause.
template <int kBits, typename Inputs>
OUTRIDER_DEVICE void multiply_integers_of(const QuantRows& x, const QuantProduct& product, char* dynamic) {
  using Ahead = QuantAhead<kBits, Inputs::kDeep>;
  using Shared = typename Inputs::Shared;
  constexpr int kOwn = Inputs::kMost / kQuantWarps, kBlocks = Shared::kBlocks;
  const QuantForm& form = product.form;
  const int warp = static_cast<int>(thread_index() / 32), lane = static_cast<int>(lane_index());
  const int bytes = static_cast<int>(form.block_bytes()), count = x.count;
  const Shared shared = {dynamic, count};
  const int turns = (x.blocks + kBlocks - 1) / kBlocks;  // of a group
  const int all = product.unit == kNoUnit ? turns : 2 * turns;
  const i64 group_bytes = static_cast<i64>(x.blocks) * bytes;
  char* const memory = shared.ahead();
  Ahead ahead(form, product.packed + product.group * group_bytes + warp * bytes, memory + warp * Ahead::kOfWarp);
  // From a group's last turn to the first one of the unit's other half.
  const i64 jump = product.outputs / kColumns * group_bytes - static_cast<i64>(turns) * kBlocks * bytes;
  Inputs inputs(x, memory + kQuantWarps * Ahead::kOfWarp, Ahead::kTurns);
  int starting = 0, starting_first = 0;  // of the turn that is started next
  const auto start = [&] {
    const int left = starting < all ? x.blocks - starting_first - warp : -warp;  // of blocks from the warp's on
    inputs.start(starting_first, left);
    ahead.start(left);
    starting_first += kBlocks;
    if (++starting == turns) ahead.from += jump, starting_first = 0;
  };

  OUTRIDER_UNROLL(1)
  for (int a = 0; a < Ahead::kEarly; ++a) start();
  inputs.fetch(0);
  float totals[kOwn] = {}, gate[kOwn] = {};
  int first = 0;  // block of this turn
  const char* const own_weights = memory + (warp * Ahead::kOfWarp + lane % 4 * Ahead::kLine + lane / 4 * 16);
  OUTRIDER_UNROLL(1)
  for (int turn = 0; turn < all; ++turn) {
    if (turn == turns) {
      for (int i = 0; i < kOwn; ++i) gate[i] = totals[i], totals[i] = 0.0f;
    }
    start();
    ahead.wait();
    const Shared own = shared.other(shared.twice() && turn % 2 != 0);
    inputs.arrive(own);
    for (int d = 0; d < Inputs::kDeep; ++d) {
      multiply_block<kBits>(own_weights + (d * Ahead::kBytes + ahead.read_place), inputs, d, count,
                            own.products(0, d * kQuantWarps + warp));
    }
    const int next = turn + 1 == turns ? 0 : first + kBlocks;
    if (turn + 1 < all) inputs.fetch(next);
    barrier();
    add_blocks<Ahead>(form, own, inputs, x.blocks - first, memory + ahead.read_place, totals);
    Ahead::advance(ahead.read_place);
    inputs.leave();
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
