// Runs kernels without ONNX Runtime, for processors that have none here. Standard input has cases one after another, each
// eight int64, of which the first is its kind, and then arrays; standard output gets the results, in order.
//
// OUTRIDER_KERNELS names the kernels of products; without it OUTRIDER_ISA in the environment chooses, as in the library.
#include <cstdio>
#include <cstdlib>
#include <vector>

#include "onnxruntime/isa.h"
#include "onnxruntime/kernels.h"
#include "onnxruntime/quant_kernel.h"

#if !defined(OUTRIDER_KERNELS)
#define OUTRIDER_KERNELS quant_kernels
#endif

namespace outrider::engine {

#if defined(OUTRIDER_EMULATED_AMX)
// What AMX's kernel calls for few rows. AVX-512's own is tested where a machine has it.
const QuantKernels& quant_avx512() { return quant_plain(); }
#endif

namespace {

using Numbers = const std::int64_t*;

template <class T>
std::vector<T> take(std::int64_t count) {
  std::vector<T> values(static_cast<std::size_t>(count));
  if (std::fread(values.data(), sizeof(T), values.size(), stdin) != values.size()) std::exit(1);
  return values;
}

template <class T>
void give(const std::vector<T>& values) {
  std::fwrite(values.data(), sizeof(T), values.size(), stdout);
}

// Outputs, inputs, bits, wide, minimums and rows; packed weights, and rows. Gives [rows, outputs].
void product(Numbers n) {
  const QuantKernels& kernels = OUTRIDER_KERNELS();
  const QuantLayout layout = quant_layout(n[0], n[1], static_cast<int>(n[2]), n[3] != 0, n[4] != 0);
  const std::int64_t rows = n[5];
  const auto packed = take<std::uint8_t>(layout.groups * layout.group_bytes);
  const auto x = take<float>(rows * layout.inputs);

  std::vector<QuantBlock> blocks(static_cast<std::size_t>(rows * layout.blocks));
  std::vector<float> to(static_cast<std::size_t>(rows * layout.outputs));
  for (std::int64_t row = 0; row < rows; ++row)
    kernels.quantize(layout, x.data() + row * layout.inputs, blocks.data() + row, rows);
  const QuantProduct product{layout, packed.data(), blocks.data(), rows, to.data()};
  const std::int64_t half = layout.groups / 2;  // as two threads would share them
  kernels.multiply(product, half, layout.groups);
  kernels.multiply(product, 0, half);
  give(to);
}

// Biases [tokens, view], queries [tokens * heads, head_dim], keys and values [view, head_dim].
template <class Cached>
void attention(Numbers n, void (*attend)(const Tile<Cached>&, Scratch&)) {
  const std::int64_t tokens = n[0], heads = n[1], view = n[2], size = n[3], rows = tokens * heads;
  const auto biases = take<float>(tokens * view), queries = take<float>(rows * size);
  const std::int64_t slots = view * slot_size<Cached>(size);
  const auto keys = take<Cached>(slots), values = take<Cached>(slots);
  std::vector<float> out(queries.size());
  Tile<Cached> tile{};
  tile.tokens = static_cast<int>(tokens);
  tile.rows = static_cast<int>(rows);
  for (std::int64_t t = 0; t < tokens; ++t) tile.bias[t] = biases.data() + t * view;
  for (std::int64_t r = 0; r < rows; ++r) {
    tile.query[r] = queries.data() + r * size;
    tile.out[r] = out.data() + r * size;
  }
  tile.keys = keys.data();
  tile.values = values.data();
  tile.view = view;
  tile.head_dim = static_cast<int>(size);
  tile.scale = 0.25f;
  Scratch scratch;
  attend(tile, scratch);
  give(out);
}

// Two rows of n[0] numbers.
void row(Numbers n) {
  const RowKernels& kernels = engine::kernels().rows;
  const std::int64_t count = n[0], best = count < 10 ? count : 10;
  const auto x = take<float>(count), y = take<float>(count);
  std::vector<float> to(x.size()), values(static_cast<std::size_t>(best));
  std::vector<std::int64_t> indices(values.size());
  const float top = kernels.highest(x.data(), count);
  const double total = kernels.weights(x.data(), count, top, 0.7f, to.data());
  give(std::vector<double>{top, total});
  give(to);
  kernels.best(x.data(), count, best, values.data(), indices.data());
  give(values);
  give(indices);
  kernels.gated(x.data(), y.data(), count, to.data());
  give(to);
  kernels.clamped(x.data(), y.data(), count, 1.7f, 7.0f, to.data());
  give(to);
  give(std::vector<float>{kernels.squares(x.data(), y.data(), count, to.data())});
  give(to);
  kernels.scaled(x.data(), 0.3f, y.data(), count, to.data());
  give(to);
}

// n[0] panels for n[1] inputs, and n[2] rows.
void panels(Numbers n) {
  const auto packed = take<float>(n[0] * n[1] * kLanes), x = take<float>(n[1] * n[2]);
  std::vector<const float*> rows;
  for (std::int64_t row = 0; row < n[2]; ++row) rows.push_back(x.data() + row * n[1]);
  std::vector<float> to(static_cast<std::size_t>(n[2] * n[0] * kLanes));
  engine::kernels().multiply({packed.data(), n[1], rows.data(), n[2], to.data(), n[0] * kLanes}, 0, n[0]);
  give(to);
}

void run(std::int64_t kind, Numbers n) {
  const AttentionKernels& attend = kernels().attention;
  switch (kind) {
    case 0: return product(n);
    case 1: return row(n);
    case 2: return attention<float>(n, attend.float32);
    case 3: return attention<Half>(n, attend.float16);
    case 4: return attention<Int8>(n, attend.int8);
    case 5: return panels(n);
  }
  std::exit(1);
}

}  // namespace
}  // namespace outrider::engine

int main() {
  using namespace outrider::engine;
  if (isa_refused() != nullptr) {
    std::fprintf(stderr, "%s\n", isa_refused());
    return 2;
  }
  std::int64_t header[8];
  while (std::fread(header, sizeof header, 1, stdin) == 1) run(header[0], header + 1);
}
