// TreeAccept on the CPU. Choices are made only at visited nodes; rows are swept once, ascending.
#include "../tree_accept.h"

#include "gil.h"
#include "op.h"
#include "row_choices.h"
#include "tree_walk.h"

namespace outrider {

namespace {

class TreeAccept {
 public:
  static constexpr const char* kOp = "TreeAccept";

  explicit TreeAccept(const Binding& bound) : choices_(bound, bound.size("purpose")), walk_(bound) {}

  void call(i64 new_tokens, i64 count) {
    choices_.check(new_tokens, count);
    const Trees trees = walk_.trees(choices_.logit_indices(), count, new_tokens);
    const GilReleasedIfLong released(choices_.bytes(count));
    // The acceptance rule: plugins/ops/tree_accept.py.
    walk_.run(trees, new_tokens, [&](i64 node, i64 end) -> Visit {
      const i64 token = choices_.at(node);
      return {token, child_holding(trees, node, end, token)};
    });
  }

 private:
  RowChoices choices_;
  TreeWalk walk_;
};

const Registration registered(define_op<TreeAccept>);

}  // namespace

}  // namespace outrider
