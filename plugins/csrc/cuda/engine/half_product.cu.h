// HalfProduct: rows times weights of float16 or bfloat16, on tensor cores, summed in float32.
//
// An output is the sum of eight parts of its inputs, which a warp each adds up tile by tile; the parts are added in order.
// How many rows there are changes none of it: a row's product is a function of the row alone, on GPUs of one kind.
#pragma once

#include "form.h"
#include "units.h"

namespace outrider {

constexpr int kHalfWarps = 8;
constexpr int kHalfOutputs = 32;  // of a block: two matrices of sixteen
constexpr int kHalfRows = 32;     // of a block, at most: four matrices of eight
constexpr int kHalfFew = 8;       // rows for which there is code of its own
constexpr int kHalfInputs = 32;   // that a warp takes at once: two steps of sixteen
constexpr int kHalfTurn = kHalfWarps * kHalfInputs;
constexpr int kHalfAhead = 4;     // tiles of weights that a warp has room for

// Rows of halves, [.., inputs], of which a thread block has `count` from row `first` on.
struct HalfRows {
  const unsigned short* halves;
  i64 inputs, first;
  int count;
};

// A product's inputs, beside its rows, and its output. With a `unit`, output i is made of outputs i and outputs + i of
// the weights. Float32 are added to `residual` first, where it is not null; other forms want multiples of 32 outputs.
struct HalfProduct {
  const unsigned short* weight;
  const float* residual;
  Formed to;
  i64 group, outputs, element, unit;
};

// Tiles of weights of a warp on their way through shared memory, 32 inputs of 32 outputs each. A lane copies what it alone
// reads: lane 4 g + t the eight inputs from 8 t on of outputs g, 8 + g ... Outputs that there are not repeat the last.
struct HalfAhead {
  static constexpr int kBytes = 4 * 32 * 16;
  const unsigned short* from[4];  // of the tile that is started next
  SharedAddress to;
  const char* own;
  int start_place = 0, read_place = 0;

  OUTRIDER_DEVICE HalfAhead(char* shared) : to(shared_address(shared) + 16 * lane_index()), own(shared + 16 * lane_index()) {}
  OUTRIDER_DEVICE void aim(const HalfProduct& product, i64 inputs, i64 first_output, i64 last_output) {
    const i64 lane = lane_index(), input = thread_index() / 32 * kHalfInputs + lane % 4 * 8;
    for (int n = 0; n < 4; ++n) {
      const i64 output = first_output + 8 * n + lane / 4;
      from[n] = product.weight + (output < last_output ? output : last_output) * inputs + input;
    }
  }
  OUTRIDER_DEVICE static void advance(int& place) { place = place == (kHalfAhead - 1) * kBytes ? 0 : place + kBytes; }
  OUTRIDER_DEVICE void start(bool there) {
    for (int n = 0; n < 4; ++n) {
      start_copy16(to + start_place + 512 * n, from[n], there);
      from[n] += kHalfTurn;
    }
    close_copies();
    advance(start_place);
  }
  OUTRIDER_DEVICE void wait() const { wait_for_copies<kHalfAhead - 1>(); }
  OUTRIDER_DEVICE Bytes16 eight(int n) const { return load_bytes16(own + read_place + 512 * n); }
};

// A lane's eight inputs of rows g, 8 + g ... up to kRows, in the order of the weights': which input is which in a matrix
// product does not matter, as long as both agree.
template <int kRows>
struct HalfInputs {
  Bytes16 eight[kRows / 8];

  OUTRIDER_DEVICE void fetch(const HalfRows& x, i64 input) {
    const i64 row = lane_index() / 4, own = input + lane_index() % 4 * 8;
    for (int tile = 0; tile < kRows / 8; ++tile) {  // a row past the last: its products are dropped
      if (8 * tile + row < x.count) eight[tile] = load_bytes16(x.halves + (x.first + 8 * tile + row) * x.inputs + own);
    }
  }
};

// 32 outputs of up to kRows rows: thread t has output t % 32 of rows t / 32, t / 32 + 8 ... `memory` has room for the tiles on
// their way of all warps, and for the parts of the outputs.
template <int kRows>
OUTRIDER_DEVICE void multiply_halves_of(const HalfRows& x, const HalfProduct& product, char* memory) {
  constexpr int kOwn = kRows / kHalfWarps, kTiles = kRows / 8;
  const int warp = static_cast<int>(thread_index() / 32), lane = static_cast<int>(lane_index());
  const bool unit = product.unit != kNoUnit;
  const i64 first_output = product.group * kHalfOutputs, last_output = (unit ? 2 : 1) * product.outputs - 1;
  float(*const parts)[kHalfOutputs][kRows + 1] =  // one more, so that banks differ
      reinterpret_cast<float(*)[kHalfOutputs][kRows + 1]>(memory + kHalfWarps * kHalfAhead * HalfAhead::kBytes);
  const int turns = static_cast<int>((x.inputs + kHalfTurn - 1) / kHalfTurn), all = unit ? 2 * turns : turns;
  HalfAhead ahead(memory + warp * kHalfAhead * HalfAhead::kBytes);
  ahead.aim(product, x.inputs, first_output, last_output);
  i64 starting_input = warp * kHalfInputs;
  int starting = 0;
  const auto start = [&] {
    ahead.start(starting < all && starting_input < x.inputs);
    starting_input += kHalfTurn;
    if (++starting == turns && unit) {
      starting_input = warp * kHalfInputs;
      ahead.aim(product, x.inputs, product.outputs + first_output, last_output);
    }
  };

  for (int a = 0; a < kHalfAhead - 1; ++a) start();
  wait_for_earlier();
  HalfInputs<kRows> inputs = {};
  if (warp * kHalfInputs < x.inputs) inputs.fetch(x, warp * kHalfInputs);
  float totals[kOwn] = {}, gate[kOwn] = {}, sums[2][kTiles][4] = {};
  OUTRIDER_UNROLL(1)
  for (int turn = 0; turn < all; ++turn) {
    const int own_turn = turn < turns ? turn : turn - turns;
    const i64 input = own_turn * kHalfTurn + warp * kHalfInputs;
    start();
    if (turn + kHalfAhead == all) let_next_begin();  // the warp asks for no more
    ahead.wait();
    if (input < x.inputs) {
      Bytes16 w[4];
      for (int n = 0; n < 4; ++n) w[n] = ahead.eight(n);
      for (int tile = 0; tile < kTiles; ++tile) {
        if (8 * tile >= x.count) break;
        for (int step = 0; step < 2; ++step) {
          const u32 right[2] = {inputs.eight[tile].word[2 * step], inputs.eight[tile].word[2 * step + 1]};
          for (int m = 0; m < 2; ++m) {
            const Bytes16 &upper = w[2 * m], &lower = w[2 * m + 1];
            const u32 left[4] = {upper.word[2 * step], lower.word[2 * step], upper.word[2 * step + 1], lower.word[2 * step + 1]};
            if (product.element == kFloat16) {
              multiply_halves(sums[m][tile], left, right);
            } else {
              multiply_bfloats(sums[m][tile], left, right);
            }
          }
        }
      }
    }
    HalfAhead::advance(ahead.read_place);
    const i64 next = own_turn + 1 == turns ? warp * kHalfInputs : input + kHalfTurn;
    if (turn + 1 < all && next < x.inputs) inputs.fetch(x, next);
    if (own_turn + 1 < turns) continue;
    barrier();  // before anyone writes again
    for (int m = 0; m < 2; ++m) {
      for (int tile = 0; tile < kTiles; ++tile) {
        for (int i = 0; i < 4; ++i) {
          parts[warp][16 * m + lane / 4 + 8 * (i / 2)][8 * tile + 2 * (lane % 4) + i % 2] = sums[m][tile][i];
          sums[m][tile][i] = 0.0f;
        }
      }
    }
    barrier();
    for (int i = 0; i < kOwn; ++i) {
      const int row = warp + i * kHalfWarps;
      gate[i] = totals[i];
      totals[i] = parts[0][lane][row];
      for (int w = 1; w < kHalfWarps; ++w) totals[i] += parts[w][lane][row];
    }
  }
  for (int i = 0; i < kOwn; ++i) {
    const int row = warp + i * kHalfWarps;
    if (row >= x.count) break;
    const float value = unit ? gated(product.unit, gate[i], totals[i]) : totals[i];
    keep_output(product.to, product.residual, x.first + row, product.group, first_output + lane, product.outputs, value);
  }
}

// x and the weights are [rows, inputs] and [outputs, inputs]; inputs are a multiple of 32. Blocks of 256 threads: one has 32
// outputs of 32 rows.
OUTRIDER_KERNEL OUTRIDER_FIT(kHalfWarps * 32, 2)
outrider_half_product(const unsigned short* x, const unsigned short* weight, const float* residual, char* to,
                      float* to_scales, i32* to_sums, i64 rows, i64 inputs, i64 outputs, i64 element, i64 unit, i64 form) {
  const i64 tiles = (rows + kHalfRows - 1) / kHalfRows;  // neighbours share weights
  const i64 first = block_index() % tiles * kHalfRows;
  const int count = rows - first < kHalfRows ? static_cast<int>(rows - first) : kHalfRows;
  const HalfRows given = {x, inputs, first, count};
  const HalfProduct product = {weight, residual, {to, to_scales, to_sums, form}, block_index() / tiles, outputs, element, unit};
  if (rows <= kHalfFew) {
    multiply_halves_of<kHalfFew>(given, product, dynamic_shared());
  } else {
    multiply_halves_of<kHalfRows>(given, product, dynamic_shared());
  }
}

// Rows of such weights, looked up by number. A number out of range gives zeros.
OUTRIDER_KERNEL outrider_half_gather(const i64* ids, const char* weight, float* to, i64 count, i64 inputs, i64 outputs,
                                     i64 element) {
  follow();
  for (i64 i = block_index() * thread_count() + thread_index(); i < count * inputs; i += block_count() * thread_count()) {
    const i64 id = ids[i / inputs];
    to[i] = id < 0 || id >= outputs ? 0.0f : element_at(weight, id * inputs + i % inputs, element);
  }
}

}  // namespace outrider
