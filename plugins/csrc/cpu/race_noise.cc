// RaceNoise on the CPU: the noise of the positions after each branch's tip, and the settings in float32.
#include "gil.h"
#include "op.h"
#include "race.h"
#include "refuse.h"

namespace outrider {

namespace {

class RaceNoise {
 public:
  static constexpr const char* kOp = "RaceNoise";

  explicit RaceNoise(const Binding& bound)
      : tip_position_(bound.input<i64>("tip_position")),
        sampling_(bound.input<double>("sampling")),
        seed_(bound.input<u64>("seed")),
        stream_(bound.input<i64>("stream")),
        noise_(bound.output<float>("noise")),
        draft_sampling_(bound.output<float>("draft_sampling")),
        branches_(bound.size("B")),
        depths_(bound.size("depths")),
        vocabulary_(bound.size("V")),
        purpose_(static_cast<u32>(bound.size("purpose"))) {
    check_value(kOp, "purpose", 0, bound.size("purpose"), kForTarget, kForRejection);
  }

  void call() {
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

const Registration registered(define_op<RaceNoise>);

}  // namespace

}  // namespace outrider
