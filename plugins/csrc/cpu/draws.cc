// Draws and CoupledDraws on the CPU: the uniform numbers of the positions behind each branch's tip.
#include <nanobind/nanobind.h>

#include "../philox.h"
#include "binder.h"
#include "ops.h"
#include "refuse.h"

namespace outrider {

namespace nb = nanobind;

namespace {

constexpr const char* kOp = "Draws";

class Draws {
 public:
  Draws(nb::object tip_position, nb::object seed, nb::object stream, nb::object draws, i64 purpose)
      : binder_(kOp),
        tip_position_(binder_.input<i64>("tip_position", tip_position, {"B"})),
        seed_(binder_.input<u64>("seed", seed, {"B"})),
        stream_(binder_.input<i64>("stream", stream, {"B"})),
        draws_(binder_.output<double>("draws", draws, {"B", "depths"})),
        branches_(binder_.size_of("B")),
        depths_(binder_.size_of("depths")),
        purpose_(static_cast<u32>(purpose)) {
    check_value(kOp, "purpose", 0, purpose, kForTarget, kForRejection);
  }

  void call() const {
    for (i64 b = 0; b < branches_; ++b) {
      for (i64 d = 0; d < depths_; ++d) {
        draws_[b * depths_ + d] = draw_f64(uniform53(seed_[b], stream_[b], tip_position_[b] + 1 + d, purpose_));
      }
    }
  }

 private:
  Binder binder_;  // keeps the arrays alive
  const i64* tip_position_;
  const u64* seed_;
  const i64* stream_;
  double* draws_;
  i64 branches_;
  i64 depths_;
  u32 purpose_;
};

constexpr const char* kCoupledOp = "CoupledDraws";

class CoupledDraws {
 public:
  CoupledDraws(nb::object tip_position, nb::object seed, nb::object stream, nb::object temperature, nb::object top_p,
               nb::object draws, nb::object draft_temperature, nb::object draft_top_p)
      : binder_(kCoupledOp),
        tip_position_(binder_.input<i64>("tip_position", tip_position, {"B"})),
        seed_(binder_.input<u64>("seed", seed, {"B"})),
        stream_(binder_.input<i64>("stream", stream, {"B"})),
        temperature_(binder_.input<double>("temperature", temperature, {"B"})),
        top_p_(binder_.input<double>("top_p", top_p, {"B"})),
        draws_(binder_.output<float>("draws", draws, {"B", "depths"})),
        draft_temperature_(binder_.output<float>("draft_temperature", draft_temperature, {"B"})),
        draft_top_p_(binder_.output<float>("draft_top_p", draft_top_p, {"B"})),
        branches_(binder_.size_of("B")),
        depths_(binder_.size_of("depths")) {}

  void call() const {
    for (i64 b = 0; b < branches_; ++b) {
      for (i64 d = 0; d < depths_; ++d) {
        const u64 draw = uniform53(seed_[b], stream_[b], tip_position_[b] + 1 + d, kForTarget);
        draws_[b * depths_ + d] = static_cast<float>(draw_f64(draw));
      }
      draft_temperature_[b] = static_cast<float>(temperature_[b]);
      draft_top_p_[b] = static_cast<float>(top_p_[b]);
    }
  }

 private:
  Binder binder_;  // keeps the arrays alive
  const i64* tip_position_;
  const u64* seed_;
  const i64* stream_;
  const double* temperature_;
  const double* top_p_;
  float* draws_;
  float* draft_temperature_;
  float* draft_top_p_;
  i64 branches_;
  i64 depths_;
};

}  // namespace

void register_draws(nb::module_& module) {
  nb::class_<Draws>(module, "Draws")
      .def(nb::init<nb::object, nb::object, nb::object, nb::object, i64>(), nb::arg("tip_position"), nb::arg("seed"),
           nb::arg("stream"), nb::arg("draws"), nb::arg("purpose") = 0)
      .def("__call__", &Draws::call);
  nb::class_<CoupledDraws>(module, "CoupledDraws")
      .def(nb::init<nb::object, nb::object, nb::object, nb::object, nb::object, nb::object, nb::object, nb::object>(),
           nb::arg("tip_position"), nb::arg("seed"), nb::arg("stream"), nb::arg("temperature"), nb::arg("top_p"),
           nb::arg("draws"), nb::arg("draft_temperature"), nb::arg("draft_top_p"))
      .def("__call__", &CoupledDraws::call);
}

}  // namespace outrider
