// The parts of a choice by themselves, for tests and for reports on near ties.
#include <nanobind/nanobind.h>

#include <cmath>

#include "../philox.h"
#include "binder.h"
#include "choose.h"
#include "ops.h"
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

}  // namespace

void register_choice_parts(nb::module_& module) {
  module.def("weights", &weights, nb::arg("logits"), nb::arg("temperature"), nb::arg("out"));
  module.def("uniform", &uniform53, nb::arg("seed"), nb::arg("stream"), nb::arg("position"), nb::arg("purpose"));
}

}  // namespace outrider
