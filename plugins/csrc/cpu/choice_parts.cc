// The parts of a choice by themselves, for tests and for reports on near ties; and the likeliest tokens of a row.
#include <nanobind/nanobind.h>

#include <cmath>
#include <vector>

#include "../philox.h"
#include "binder.h"
#include "choose.h"
#include "ops.h"
#include "race.h"
#include "refuse.h"

namespace outrider {

namespace nb = nanobind;

namespace {

void weights(nb::object logits, double temperature, nb::object out) {
  Binder binder("weights");
  const float* from = binder.input<float>("logits", logits, {"V"});
  u64* to = binder.output<u64>("out", out, {"V"});
  if (!(temperature > 0.0 && std::isfinite(temperature))) {
    refuse("weights", "temperature must be finite and more than 0.");
  }
  if (binder.size_of("V") < 1 || !row_weights(from, binder.size_of("V"), temperature, to)) {
    refuse("weights", "the logits are empty, hold NaN or are all -inf.");
  }
}

i64 winner(nb::object weights, u64 seed, i64 stream, i64 position, u32 purpose) {
  Binder binder("race");
  const u64* from = binder.input<u64>("weights", weights, {"V"});
  const i64 size = binder.size_of("V");
  std::vector<u64> own(from, from + size), block_sum((size + kBlock - 1) / kBlock);
  u64 total = 0;
  for (i64 i = 0; i < size; ++i) {
    if (own[i] > u64{1} << 50) refuse("race", "a weight is more than 2^50.");
    block_sum[i / kBlock] += own[i];
    total += own[i];
  }
  if (total == 0) refuse("race", "no weight is more than 0.");
  return raced({nullptr, own.data(), block_sum.data(), size, total}, race_key(seed, stream, position, purpose));
}

float noise(u64 seed, i64 stream, i64 position, u32 purpose, i64 id) {
  if (id < 0 || id >= kMostVocabulary) refuse("noise", "the id is in no vocabulary.");
  const PhiloxBlock block = race_block(race_key(seed, stream, position, purpose), static_cast<u32>(id / kRacers));
  return exponential(block.word[id % kRacers]);
}

// The ids of the highest values in `out`, the lower one first among equals: an insertion for each that comes in, of which
// there are few behind the first ones.
void likeliest(nb::object row, nb::object out) {
  Binder binder("likeliest");
  const float* values = binder.input<float>("row", row, {"V"});
  i64* ids = binder.output<i64>("out", out, {"K"});
  const i64 size = binder.size_of("V"), most = binder.size_of("K");
  if (most > size) refuse("likeliest", "out is longer than the row.");
  i64 found = 0;
  for (i64 id = 0; id < size; ++id) {
    if (found == most && !(most > 0 && values[id] > values[ids[most - 1]])) continue;
    i64 place = found < most ? found++ : most - 1;
    for (; place > 0 && values[id] > values[ids[place - 1]]; --place) ids[place] = ids[place - 1];
    ids[place] = id;
  }
}

}  // namespace

void register_choice_parts(nb::module_& module) {
  module.def("weights", &weights, nb::arg("logits"), nb::arg("temperature"), nb::arg("out"));
  module.def("likeliest", &likeliest, nb::arg("row"), nb::arg("out"));
  module.def("race", &winner, nb::arg("weights"), nb::arg("seed"), nb::arg("stream"), nb::arg("position"),
             nb::arg("purpose"));
  module.def("noise", &noise, nb::arg("seed"), nb::arg("stream"), nb::arg("position"), nb::arg("purpose"),
             nb::arg("id"));
  module.def("exponential", &exponential, nb::arg("word"));
  module.def("uniform", &uniform53, nb::arg("seed"), nb::arg("stream"), nb::arg("position"), nb::arg("purpose"));
}

}  // namespace outrider
