// TreeAccept on the CPU. Choices are made only at visited nodes; rows are swept once, ascending.
#include "../tree_accept.h"

#include <nanobind/nanobind.h>

#include "binder.h"
#include "gil.h"
#include "ops.h"
#include "row_choices.h"
#include "tree_walk.h"

namespace outrider {

namespace nb = nanobind;

namespace {

constexpr const char* kOp = "TreeAccept";

class TreeAccept {
 public:
  TreeAccept(nb::object logits, nb::object logit_indices, nb::object positions, nb::object branch, nb::object sampling,
             nb::object seed, nb::object stream, nb::object token_ids, nb::object parent, nb::object committed,
             nb::object accepted_count, nb::object kept_indices, nb::object kept_count, i64 purpose)
      : binder_(kOp),
        choices_(kOp, binder_, logits, logit_indices, positions, branch, sampling, seed, stream, purpose),
        walk_(kOp, binder_, token_ids, parent, committed, accepted_count, kept_indices, kept_count) {}

  void call(i64 new_tokens, i64 count) const {
    choices_.check(new_tokens, count);
    const Trees trees = walk_.trees(choices_.logit_indices(), count, new_tokens);
    const GilReleasedIfLong released(choices_.bytes(count));
    // The acceptance rule: plugins/reference/tree_accept.py.
    walk_.run(trees, new_tokens, [&](i64 node, i64 end) -> Visit {
      const i64 token = choices_.at(node);
      return {token, child_holding(trees, node, end, token)};
    });
  }

 private:
  Binder binder_;  // keeps the arrays alive
  RowChoices choices_;
  TreeWalk walk_;
};

}  // namespace

void register_tree_accept(nb::module_& module) {
  nb::class_<TreeAccept>(module, "TreeAccept")
      .def(nb::init<nb::object, nb::object, nb::object, nb::object, nb::object, nb::object, nb::object, nb::object,
                    nb::object, nb::object, nb::object, nb::object, nb::object, i64>(),
           nb::arg("logits"), nb::arg("logit_indices"), nb::arg("positions"), nb::arg("branch"), nb::arg("sampling"),
           nb::arg("seed"), nb::arg("stream"), nb::arg("token_ids"), nb::arg("parent"), nb::arg("committed"),
           nb::arg("accepted_count"), nb::arg("kept_indices"), nb::arg("kept_count"), nb::arg("purpose") = 0)
      .def("__call__", &TreeAccept::call);
}

}  // namespace outrider
