// Sample on the CPU: one choice per row with logits.
#include "../sample.h"

#include "gil.h"
#include "op.h"
#include "row_choices.h"

namespace outrider {

namespace {

class Sample {
 public:
  static constexpr const char* kOp = "Sample";

  explicit Sample(const Binding& bound)
      : choices_(bound, bound.size("purpose")), committed_(bound.output<i64>("committed")) {}

  void call(i64 new_tokens, i64 count) {
    choices_.check(new_tokens, count);
    const GilReleasedIfLong released(choices_.bytes(count));
    for (i64 place = 0; place < count; ++place) {
      committed_[place] = choices_.fills_up(place) ? -1 : choices_.at(place);
    }
  }

 private:
  RowChoices choices_;
  i64* committed_;
};

const Registration registered(define_op<Sample>);

}  // namespace

}  // namespace outrider
