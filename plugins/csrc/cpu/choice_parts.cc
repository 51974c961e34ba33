// The parts of a choice by themselves, for tests and for reports on near ties.
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

}  // namespace

void register_choice_parts(nb::module_& module) {
  module.def("weights", &weights, nb::arg("logits"), nb::arg("temperature"), nb::arg("out"));
  module.def("race", &winner, nb::arg("weights"), nb::arg("seed"), nb::arg("stream"), nb::arg("position"),
             nb::arg("purpose"));
  module.def("noise", &noise, nb::arg("seed"), nb::arg("stream"), nb::arg("position"), nb::arg("purpose"),
             nb::arg("id"));
  module.def("exponential", &exponential, nb::arg("word"));
  module.def("uniform", &uniform53, nb::arg("seed"), nb::arg("stream"), nb::arg("position"), nb::arg("purpose"));
}

}  // namespace outrider
