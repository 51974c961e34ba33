// RaceNoise on the CPU: the noise of the positions behind each branch's tip, and the settings in float32.
#include <nanobind/nanobind.h>

#include "binder.h"
#include "gil.h"
#include "ops.h"
#include "race.h"
#include "refuse.h"

namespace outrider {

namespace nb = nanobind;

namespace {

constexpr const char* kOp = "RaceNoise";

class RaceNoise {
 public:
  RaceNoise(nb::object tip_position, nb::object seed, nb::object stream, nb::object temperature, nb::object top_p,
            nb::object min_p, nb::object noise, nb::object draft_temperature, nb::object draft_top_p,
            nb::object draft_min_p, i64 purpose)
      : binder_(kOp),
        tip_position_(binder_.input<i64>("tip_position", tip_position, {"B"})),
        seed_(binder_.input<u64>("seed", seed, {"B"})),
        stream_(binder_.input<i64>("stream", stream, {"B"})),
        temperature_(binder_.input<double>("temperature", temperature, {"B"})),
        top_p_(binder_.input<double>("top_p", top_p, {"B"})),
        min_p_(binder_.input<double>("min_p", min_p, {"B"})),
        noise_(binder_.output<float>("noise", noise, {"B", "depths", "V"})),
        draft_temperature_(binder_.output<float>("draft_temperature", draft_temperature, {"B"})),
        draft_top_p_(binder_.output<float>("draft_top_p", draft_top_p, {"B"})),
        draft_min_p_(binder_.output<float>("draft_min_p", draft_min_p, {"B"})),
        branches_(binder_.size_of("B")),
        depths_(binder_.size_of("depths")),
        vocabulary_(binder_.size_of("V")),
        purpose_(static_cast<u32>(purpose)) {
    check_value(kOp, "purpose", 0, purpose, kForTarget, kForRejection);
  }

  void call() const {
    i64 sampled = 0;
    for (i64 b = 0; b < branches_; ++b) sampled += temperature_[b] > 0.0 ? 1 : 0;
    const GilReleasedIfLong released(sampled * depths_ * vocabulary_ * static_cast<i64>(sizeof(float)));
    for (i64 b = 0; b < branches_; ++b) {
      draft_temperature_[b] = static_cast<float>(temperature_[b]);
      draft_top_p_[b] = static_cast<float>(top_p_[b]);
      draft_min_p_[b] = static_cast<float>(min_p_[b]);
      if (!(temperature_[b] > 0.0)) continue;
      for (i64 d = 0; d < depths_; ++d) {
        const RaceKey key = race_key(seed_[b], stream_[b], tip_position_[b] + 1 + d, purpose_);
        all_noise(key, vocabulary_, noise_ + (b * depths_ + d) * vocabulary_);
      }
    }
  }

 private:
  Binder binder_;  // keeps the arrays alive
  const i64* tip_position_;
  const u64* seed_;
  const i64* stream_;
  const double* temperature_;
  const double* top_p_;
  const double* min_p_;
  float* noise_;
  float* draft_temperature_;
  float* draft_top_p_;
  float* draft_min_p_;
  i64 branches_;
  i64 depths_;
  i64 vocabulary_;
  u32 purpose_;
};

}  // namespace

void register_race_noise(nb::module_& module) {
  nb::class_<RaceNoise>(module, "RaceNoise")
      .def(nb::init<nb::object, nb::object, nb::object, nb::object, nb::object, nb::object, nb::object, nb::object,
                    nb::object, nb::object, i64>(),
           nb::arg("tip_position"), nb::arg("seed"), nb::arg("stream"), nb::arg("temperature"), nb::arg("top_p"),
           nb::arg("min_p"), nb::arg("noise"), nb::arg("draft_temperature"), nb::arg("draft_top_p"),
           nb::arg("draft_min_p"), nb::arg("purpose") = 0)
      .def("__call__", &RaceNoise::call);
}

}  // namespace outrider
