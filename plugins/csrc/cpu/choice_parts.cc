// The parts of a choice by themselves, for tests and for reports on near ties; and the likeliest tokens of a row.
#include <cmath>
#include <vector>

#include "../exp.h"
#include "../log.h"
#include "../philox.h"
#include "choose.h"
#include "clones.h"
#include "op.h"
#include "race.h"
#include "row_arrays.h"

namespace outrider {

namespace nb = nanobind;

namespace {

void weights(InputRow<float> logits, double temperature, OutputRow<u64> out) {
  if (logits.size() != out.size()) refuse("weights", "logits and out differ in length.");
  if (!(temperature > 0.0 && std::isfinite(temperature))) {
    refuse("weights", "temperature must be finite and more than 0.");
  }
  if (out.size() < 1 || !row_weights(logits.data(), static_cast<i64>(out.size()), temperature, out.data())) {
    refuse("weights", "the logits are empty, hold NaN or are all -inf.");
  }
}

i64 winner(InputRow<u64> weights, u64 seed, i64 stream, i64 position, u32 purpose) {
  const i64 size = static_cast<i64>(weights.size());
  std::vector<u64> own(weights.data(), weights.data() + size), block_sum((size + kBlock - 1) / kBlock);
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
// there are few after the first ones.
void likeliest(InputRow<float> row, OutputRow<i64> out) {
  const float* values = row.data();
  i64* ids = out.data();
  const i64 size = static_cast<i64>(row.size()), most = static_cast<i64>(out.size());
  if (most > size) refuse("likeliest", "out is longer than the row.");
  i64 found = 0;
  for (i64 id = 0; id < size; ++id) {
    if (found == most && !(most > 0 && values[id] > values[ids[most - 1]])) continue;
    i64 place = found < most ? found++ : most - 1;
    for (; place > 0 && values[id] > values[ids[place - 1]]; --place) ids[place] = ids[place - 1];
    ids[place] = id;
  }
}

constexpr i64 kSums = 8;  // added up side by side, and in their order at the end: whatever the width of vectors

// The sum of exp(value - highest). What is below 2^-1009 of the largest counts as 0.
OUTRIDER_CLONES double sum_of_exps(const float* values, i64 size, double highest) {
  double sums[kSums] = {};
  const i64 whole = size - size % kSums;
  for (i64 i = 0; i < whole; i += kSums) {
    for (i64 lane = 0; lane < kSums; ++lane) {
      const double below = static_cast<double>(values[i + lane]) - highest;
      const double part = shared_exp(below < -700.0 ? -700.0 : below);
      sums[lane] += below < -700.0 ? 0.0 : part;
    }
  }
  for (i64 i = whole; i < size; ++i) {
    const double below = static_cast<double>(values[i]) - highest;
    if (below >= -700.0) sums[i - whole] += shared_exp(below);
  }
  double sum = 0.0;
  for (i64 lane = 0; lane < kSums; ++lane) sum += sums[lane];
  return sum;
}

double log_sum_exp(InputRow<float> row) {
  const float* values = row.data();
  const i64 size = static_cast<i64>(row.size());
  float highest = -INFINITY;
  bool whole = true;
  for (i64 i = 0; i < size; ++i) {
    whole = whole && !std::isnan(values[i]);
    highest = values[i] > highest ? values[i] : highest;
  }
  if (!whole || !std::isfinite(highest)) refuse("log_sum_exp", "the row is empty, holds NaN or inf, or is all -inf.");
  return shared_log(sum_of_exps(values, size, highest));
}

void define_parts(nb::module_& module) {
  nb::list columns;
  for (const char* column : kSamplingColumns) columns.append(column);
  module.attr("SAMPLING_COLUMNS") = nb::tuple(columns);
  module.def("weights", &weights, nb::arg("logits").noconvert(), nb::arg("temperature"),
             nb::arg("out").noconvert());
  module.def("log_sum_exp", &log_sum_exp, nb::arg("row").noconvert());
  module.def("likeliest", &likeliest, nb::arg("row").noconvert(), nb::arg("out").noconvert());
  module.def("race", &winner, nb::arg("weights").noconvert(), nb::arg("seed"), nb::arg("stream"), nb::arg("position"),
             nb::arg("purpose"));
  module.def("noise", &noise, nb::arg("seed"), nb::arg("stream"), nb::arg("position"), nb::arg("purpose"),
             nb::arg("id"));
  module.def("exponential", &exponential, nb::arg("word"));
  module.def("uniform", &uniform53, nb::arg("seed"), nb::arg("stream"), nb::arg("position"), nb::arg("purpose"));
}

const Registration registered(define_parts);

}  // namespace

}  // namespace outrider
