#include "tree_walk.h"

namespace outrider {

TreeWalk::TreeWalk(const Binding& bound)
    : op_(bound.op()),
      token_ids_(bound.input<i64>("token_ids")),
      parent_(bound.input<i64>("parent")),
      branch_(bound.input<i64>("branch")),
      committed_(bound.output<i64>("committed")),
      accepted_count_(bound.output<i64>("accepted_count")),
      kept_indices_(bound.output<i64>("kept_indices")),
      kept_count_(bound.output<i64>("kept_count")),
      most_trees_(bound.size("trees")) {}

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
      tree_count += fills_up(trees, place) ? 0 : 1;
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
