// TreeAccept on the CPU. Choices are made only at visited nodes; rows are swept once, ascending.
#include "../tree_accept.h"

#include <nanobind/nanobind.h>

#include <algorithm>

#include "binder.h"
#include "gil.h"
#include "ops.h"
#include "refuse.h"
#include "row_choices.h"

namespace outrider {

namespace nb = nanobind;

namespace {

constexpr const char* kOp = "TreeAccept";
constexpr i64 kNothing = -1;  // stands in outputs behind what was committed or kept

// Collects the kept rows in ascending order: pending tokens (rows without logits) and visited nodes.
class KeptRows {
 public:
  KeptRows(const Trees& trees, i64* kept) : trees_(trees), kept_(kept) {}

  void visit(i64 place) {
    pending_before(trees_.logit_rows[place]);
    kept_[count_++] = row_++;
    ++place_;
  }

  i64 finish(i64 new_tokens) {
    pending_before(new_tokens);
    return count_;
  }

 private:
  void pending_before(i64 end) {
    for (; row_ < end; ++row_) {
      if (place_ < trees_.count && trees_.logit_rows[place_] == row_) {
        ++place_;  // a node that was not visited
      } else {
        kept_[count_++] = row_;
      }
    }
  }

  const Trees& trees_;
  i64* kept_;
  i64 row_ = 0;
  i64 place_ = 0;
  i64 count_ = 0;
};

class TreeAccept {
 public:
  TreeAccept(nb::object logits, nb::object logit_rows, nb::object positions, nb::object branch, nb::object temperature,
             nb::object top_k, nb::object top_p, nb::object filter_order, nb::object seed, nb::object stream,
             nb::object token_ids, nb::object parent, nb::object committed, nb::object accepted_count,
             nb::object kept_rows, nb::object kept_count, i64 purpose)
      : binder_(kOp),
        choices_(kOp, binder_, logits, logit_rows, positions, branch, temperature, top_k, top_p, filter_order, seed,
                 stream, purpose),
        token_ids_(binder_.input<i64>("token_ids", token_ids, {"N"})),
        parent_(binder_.input<i64>("parent", parent, {"N"})),
        committed_(binder_.output<i64>("committed", committed, {"M"})),
        accepted_count_(binder_.output<i64>("accepted_count", accepted_count, {"trees"})),
        kept_rows_(binder_.output<i64>("kept_rows", kept_rows, {"N"})),
        kept_count_(binder_.output<i64>("kept_count", kept_count, {1})),
        most_trees_(binder_.size_of("trees")) {}

  void call(i64 new_tokens, i64 count) const {
    choices_.check(new_tokens, count);
    check_parents(kOp, parent_, new_tokens);
    const Trees trees = {choices_.logit_rows(), count, parent_, token_ids_};
    check_trees(trees);

    const GilReleasedIfLong released(choices_.bytes(count));
    std::fill_n(committed_, count, kNothing);
    std::fill_n(kept_rows_, new_tokens, kNothing);
    std::fill_n(accepted_count_, most_trees_, 0);
    KeptRows kept(trees, kept_rows_);
    i64 tree = 0;
    for (i64 root = 0; root < count; ++tree) {
      const i64 end = tree_end(trees, root);
      accepted_count_[tree] = walk(trees, root, end, kept);
      root = end;
    }
    kept_count_[0] = kept.finish(new_tokens);
  }

 private:
  static i64 tree_end(const Trees& trees, i64 root) {
    i64 place = root + 1;
    while (place < trees.count && parent_place(trees, place) >= 0) ++place;
    return place;
  }

  void check_trees(const Trees& trees) const {
    i64 root = 0;
    i64 tree_count = 0;
    for (i64 place = 0; place < trees.count; ++place) {
      if (place > 0 && trees.logit_rows[place] <= trees.logit_rows[place - 1]) {
        refuse(kOp, "logit_rows must ascend; logit_rows[" + std::to_string(place) + "] is " +
                        std::to_string(trees.logit_rows[place]) + " behind " +
                        std::to_string(trees.logit_rows[place - 1]) + ".");
      }
    }
    for (i64 place = 0; place < trees.count; ++place) {
      const i64 parent = parent_place(trees, place);
      if (parent < 0) {
        root = place;
        ++tree_count;
      } else if (parent < root) {
        refuse(kOp, "the rows of a tree must be neighbours in logit_rows; the parent of new token " +
                        std::to_string(trees.logit_rows[place]) + " stands before the root of another tree, new token " +
                        std::to_string(trees.logit_rows[root]) + ".");
      }
    }
    if (tree_count > most_trees_) {
      refuse(kOp, "the step holds " + std::to_string(tree_count) + " trees, but accepted_count has room for " +
                      std::to_string(most_trees_) + ".");
    }
  }

  // The acceptance rule (DESIGN section 7). Returns how many tokens the tree commits.
  i64 walk(const Trees& trees, i64 root, i64 end, KeptRows& kept) const {
    i64 committed = 0;
    for (i64 node = root; node >= 0;) {
      const i64 token = choices_.at(node);
      kept.visit(node);
      committed_[root + committed++] = token;
      node = child_holding(trees, node, end, token);
    }
    return committed;
  }

  Binder binder_;  // keeps the arrays alive
  RowChoices choices_;
  const i64* token_ids_;
  const i64* parent_;
  i64* committed_;
  i64* accepted_count_;
  i64* kept_rows_;
  i64* kept_count_;
  i64 most_trees_;
};

}  // namespace

void register_tree_accept(nb::module_& module) {
  nb::class_<TreeAccept>(module, "TreeAccept")
      .def(nb::init<nb::object, nb::object, nb::object, nb::object, nb::object, nb::object, nb::object, nb::object,
                    nb::object, nb::object, nb::object, nb::object, nb::object, nb::object, nb::object, nb::object,
                    i64>(),
           nb::arg("logits"), nb::arg("logit_rows"), nb::arg("positions"), nb::arg("branch"), nb::arg("temperature"),
           nb::arg("top_k"), nb::arg("top_p"), nb::arg("filter_order"), nb::arg("seed"), nb::arg("stream"),
           nb::arg("token_ids"), nb::arg("parent"), nb::arg("committed"), nb::arg("accepted_count"),
           nb::arg("kept_rows"), nb::arg("kept_count"), nb::arg("purpose") = 0)
      .def("__call__", &TreeAccept::call);
}

}  // namespace outrider
