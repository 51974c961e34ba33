// BimMask on the CPU. A row of the bias is its parent's row and one more visible key, so most rows are copies.
#include "../bim_mask.h"

#include <nanobind/nanobind.h>

#include <algorithm>

#include "binder.h"
#include "clones.h"
#include "gil.h"
#include "ops.h"
#include "refuse.h"

namespace outrider {

namespace nb = nanobind;

namespace {

constexpr const char* kOp = "BimMask";
constexpr i64 kLeastBranch = -1;  // rows of the shared prefix itself; -2 marks empty slots and is nobody's branch

OUTRIDER_CLONES void committed_part(const i64* bim, i64 past, i64 branch, float* row) {
  for (i64 j = 0; j < past; ++j) row[j] = sees_committed(bim[j], branch) ? kVisible : kMasked;
}

class BimMask {
 public:
  BimMask(nb::object bim, nb::object past_length, nb::object branch, nb::object parent, nb::object attn_bias) {
    Binder binder(kOp);
    bim_ = binder.input<i64>("bim", bim, {"capacity"});
    past_length_ = binder.input<i64>("past_length", past_length, {1});
    branch_ = binder.input<i64>("branch", branch, {"N"});
    parent_ = binder.input<i64>("parent", parent, {"N"});
    attn_bias_ = binder.output<float>("attn_bias", attn_bias, {1, 1, "N", "T"});
    capacity_ = binder.size_of("capacity");
    most_new_ = binder.size_of("N");
    most_view_ = binder.size_of("T");
    arrays_ = binder.take_arrays();
  }

  void call(i64 new_tokens, i64 view) const {
    check_extent(kOp, "N", new_tokens, most_new_);
    check_extent(kOp, "T", view, most_view_);
    const i64 past = past_length_[0];
    check_value(kOp, "past_length", 0, past, 0, capacity_);
    if (view < past + new_tokens) {
      refuse(kOp, "extent T is " + std::to_string(view) + ", but " + std::to_string(past) + " committed and " +
                      std::to_string(new_tokens) + " new keys must be in view.");
    }
    check_parents(kOp, parent_, new_tokens);
    for (i64 i = 0; i < new_tokens; ++i) {
      if (branch_[i] < kLeastBranch) check_value(kOp, "branch", i, branch_[i], kLeastBranch, i64{1} << 62);
    }
    const GilReleasedIfLong released(new_tokens * view * static_cast<i64>(sizeof(float)));
    for (i64 i = 0; i < new_tokens; ++i) write_row(i, past, view);
  }

 private:
  void write_row(i64 i, i64 past, i64 view) const {
    float* row = attn_bias_ + i * view;
    const i64 parent = parent_[i];
    const float* parent_row = attn_bias_ + parent * view;  // read only when there is a parent
    if (parent >= 0 && branch_[parent] == branch_[i]) {
      std::copy_n(parent_row, view, row);
    } else {
      if (i > 0 && branch_[i - 1] == branch_[i]) {
        std::copy_n(row - view, past, row);
      } else {
        committed_part(bim_, past, branch_[i], row);
      }
      if (parent >= 0) {
        std::copy_n(parent_row + past, view - past, row + past);
      } else {
        std::fill(row + past, row + view, kMasked);
      }
    }
    row[past + i] = kVisible;
  }

  const i64* bim_;
  const i64* past_length_;
  const i64* branch_;
  const i64* parent_;
  float* attn_bias_;
  i64 capacity_;
  i64 most_new_;
  i64 most_view_;
  std::vector<nb::object> arrays_;
};

}  // namespace

void register_bim_mask(nb::module_& module) {
  nb::class_<BimMask>(module, "BimMask")
      .def(nb::init<nb::object, nb::object, nb::object, nb::object, nb::object>(), nb::arg("bim"),
           nb::arg("past_length"), nb::arg("branch"), nb::arg("parent"), nb::arg("attn_bias"))
      .def("__call__", &BimMask::call);
}

}  // namespace outrider
