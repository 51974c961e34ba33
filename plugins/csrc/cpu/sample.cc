// Sample on the CPU: one choice per row with logits.
#include "../sample.h"

#include <nanobind/nanobind.h>

#include "binder.h"
#include "gil.h"
#include "ops.h"
#include "row_choices.h"

namespace outrider {

namespace nb = nanobind;

namespace {

constexpr const char* kOp = "Sample";

class Sample {
 public:
  Sample(nb::object logits, nb::object logit_indices, nb::object positions, nb::object branch, nb::object sampling,
         nb::object seed, nb::object stream, nb::object committed, i64 purpose)
      : binder_(kOp),
        choices_(kOp, binder_, logits, logit_indices, positions, branch, sampling, seed, stream, purpose),
        committed_(binder_.output<i64>("committed", committed, {"M"})) {}

  void call(i64 new_tokens, i64 count) const {
    choices_.check(new_tokens, count);
    const GilReleasedIfLong released(choices_.bytes(count));
    for (i64 place = 0; place < count; ++place) committed_[place] = choices_.at(place);
  }

 private:
  Binder binder_;  // keeps the arrays alive
  RowChoices choices_;
  i64* committed_;
};

}  // namespace

void register_sample(nb::module_& module) {
  nb::class_<Sample>(module, "Sample")
      .def(nb::init<nb::object, nb::object, nb::object, nb::object, nb::object, nb::object, nb::object, nb::object,
                    i64>(),
           nb::arg("logits"), nb::arg("logit_indices"), nb::arg("positions"), nb::arg("branch"), nb::arg("sampling"),
           nb::arg("seed"), nb::arg("stream"), nb::arg("committed"), nb::arg("purpose") = 0)
      .def("__call__", &Sample::call);
}

}  // namespace outrider
