#include "tree_walk.h"

#include "refuse.h"

namespace outrider {

namespace nb = nanobind;

TreeWalk::TreeWalk(const char* op, Binder& binder, nb::handle token_ids, nb::handle parent, nb::handle committed,
                   nb::handle accepted_count, nb::handle kept_indices, nb::handle kept_count)
    : op_(op),
      token_ids_(binder.input<i64>("token_ids", token_ids, {"N"})),
      parent_(binder.input<i64>("parent", parent, {"N"})),
      committed_(binder.output<i64>("committed", committed, {"M"})),
      accepted_count_(binder.output<i64>("accepted_count", accepted_count, {"trees"})),
      kept_indices_(binder.output<i64>("kept_indices", kept_indices, {"N"})),
      kept_count_(binder.output<i64>("kept_count", kept_count, {1})),
      most_trees_(binder.size_of("trees")) {}

Trees TreeWalk::trees(const i64* logit_indices, i64 count, i64 new_tokens) const {
  check_parents(op_, parent_, new_tokens);
  for (i64 place = 1; place < count; ++place) {
    if (logit_indices[place] <= logit_indices[place - 1]) {
      refuse(op_, "logit_indices must ascend; logit_indices[" + std::to_string(place) + "] is " +
                      std::to_string(logit_indices[place]) + " after " + std::to_string(logit_indices[place - 1]) + ".");
    }
  }
  const Trees trees = {logit_indices, count, parent_, token_ids_};
  i64 root = 0;
  i64 tree_count = 0;
  for (i64 place = 0; place < count; ++place) {
    const i64 parent = parent_place(trees, place);
    if (parent < 0) {
      root = place;
      ++tree_count;
    } else if (parent < root) {
      refuse(op_, "the rows of a tree must be neighbours in logit_indices; the parent of new token " +
                      std::to_string(logit_indices[place]) + " stands before the root of another tree, new token " +
                      std::to_string(logit_indices[root]) + ".");
    }
  }
  if (tree_count > most_trees_) {
    refuse(op_, "the step holds " + std::to_string(tree_count) + " trees, but accepted_count has room for " +
                    std::to_string(most_trees_) + ".");
  }
  return trees;
}

i64 TreeWalk::tree_end(const Trees& trees, i64 root) {
  i64 place = root + 1;
  while (place < trees.count && parent_place(trees, place) >= 0) ++place;
  return place;
}

}  // namespace outrider
