// RaceNoise on the CPU: the noise of the positions after each branch's tip, and the settings in float32.
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
  RaceNoise(nb::object tip_position, nb::object sampling, nb::object seed, nb::object stream, nb::object noise,
            nb::object draft_sampling, i64 purpose)
      : binder_(kOp),
        tip_position_(binder_.input<i64>("tip_position", tip_position, {"B"})),
        sampling_(binder_.input<double>("sampling", sampling, {"B", kSettings})),
        seed_(binder_.input<u64>("seed", seed, {"B"})),
        stream_(binder_.input<i64>("stream", stream, {"B"})),
        noise_(binder_.output<float>("noise", noise, {"B", "depths", "V"})),
        draft_sampling_(binder_.output<float>("draft_sampling", draft_sampling, {"B", kSettings})),
        branches_(binder_.size_of("B")),
        depths_(binder_.size_of("depths")),
        vocabulary_(binder_.size_of("V")),
        purpose_(static_cast<u32>(purpose)) {
    check_value(kOp, "purpose", 0, purpose, kForTarget, kForRejection);
  }

  void call() const {
    i64 sampled = 0;
    for (i64 b = 0; b < branches_; ++b) sampled += samples(b) ? 1 : 0;
    const GilReleasedIfLong released(sampled * depths_ * vocabulary_ * static_cast<i64>(sizeof(float)));
    for (i64 i = 0; i < branches_ * kSettings; ++i) draft_sampling_[i] = static_cast<float>(sampling_[i]);
    for (i64 b = 0; b < branches_; ++b) {
      if (!samples(b)) continue;
      for (i64 d = 0; d < depths_; ++d) {
        const RaceKey key = race_key(seed_[b], stream_[b], tip_position_[b] + 1 + d, purpose_);
        all_noise(key, vocabulary_, noise_ + (b * depths_ + d) * vocabulary_);
      }
    }
  }

 private:
  bool samples(i64 branch) const { return sampling_of(sampling_, branch).temperature > 0.0; }

  Binder binder_;  // keeps the arrays alive
  const i64* tip_position_;
  const double* sampling_;
  const u64* seed_;
  const i64* stream_;
  float* noise_;
  float* draft_sampling_;
  i64 branches_;
  i64 depths_;
  i64 vocabulary_;
  u32 purpose_;
};

}  // namespace

void register_race_noise(nb::module_& module) {
  nb::class_<RaceNoise>(module, "RaceNoise")
      .def(nb::init<nb::object, nb::object, nb::object, nb::object, nb::object, nb::object, i64>(),
           nb::arg("tip_position"), nb::arg("sampling"), nb::arg("seed"), nb::arg("stream"), nb::arg("noise"),
           nb::arg("draft_sampling"), nb::arg("purpose") = 0)
      .def("__call__", &RaceNoise::call);
}

}  // namespace outrider
