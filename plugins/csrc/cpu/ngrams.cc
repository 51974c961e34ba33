// NgramCounts for Python.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <limits>
#include <string>
#include <vector>

#include "ngram_counts.h"
#include "ops.h"
#include "refuse.h"

namespace outrider {

namespace nb = nanobind;

namespace {

constexpr const char* kName = "Ngrams";

u32 token_of(nb::handle value) {
  const i64 token = nb::cast<i64>(value);
  check_value(kName, "token_ids", 0, token, 0, std::numeric_limits<u32>::max());
  return static_cast<u32>(token);
}

class Ngrams {
 public:
  Ngrams(i64 shortest, i64 longest, double least_chance)
      : counts_((check_value(kName, "shortest", 0, shortest, 1, longest), shortest), longest, least_chance) {}

  void extend(nb::list token_ids) {
    for (nb::handle token : token_ids) counts_.extend(token_of(token), nullptr, 0);
  }

  void extend_one(i64 token, nb::list likely) {
    likely_.clear();
    for (nb::handle other : likely) likely_.push_back(token_of(other));
    check_value(kName, "token_ids", 0, token, 0, std::numeric_limits<u32>::max());
    counts_.extend(static_cast<u32>(token), likely_.data(), static_cast<i64>(likely_.size()));
  }

  void go_ahead(nb::list token_ids) {
    for (nb::handle token : token_ids) counts_.go_ahead(token_of(token));
  }

  void go_back() { counts_.go_back(); }

  i64 foresee(i64 limit, u64 seed, i64 stream, i64 position, double temperature) {
    return static_cast<i64>(counts_.foresee(limit, {seed, stream, position, temperature}).size());
  }

  using Array = nb::ndarray<i64, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

  i64 draft(i64 limit, Array token_ids, Array parent, i64 root, u64 seed, i64 stream, i64 position,
            double temperature) {
    const std::vector<u32>& foreseen = counts_.foresee(limit, {seed, stream, position, temperature});
    const i64 count = static_cast<i64>(foreseen.size());
    const i64 room = static_cast<i64>(std::min(token_ids.size(), parent.size())) - 1 - root;
    if (root < 0 || count > room) refuse(kName, "there is no room for the draft behind node " + std::to_string(root) + ".");
    for (i64 i = 0; i < count; ++i) {
      token_ids.data()[root + 1 + i] = foreseen[i];
      parent.data()[root + 1 + i] = root + i;
    }
    return count;
  }

 private:
  NgramCounts counts_;
  std::vector<u32> likely_;
};

}  // namespace

void register_ngrams(nb::module_& module) {
  nb::class_<Ngrams>(module, kName)
      .def(nb::init<i64, i64, double>(), nb::arg("shortest"), nb::arg("longest"), nb::arg("least_chance"))
      .def("extend", &Ngrams::extend, nb::arg("token_ids"))
      .def("extend_one", &Ngrams::extend_one, nb::arg("token"), nb::arg("likely"))
      .def("go_ahead", &Ngrams::go_ahead, nb::arg("token_ids"))
      .def("go_back", &Ngrams::go_back)
      .def("foresee", &Ngrams::foresee, nb::arg("limit"), nb::arg("seed") = 0, nb::arg("stream") = 0,
           nb::arg("position") = 0, nb::arg("temperature") = 0.0)
      .def("draft", &Ngrams::draft, nb::arg("limit"), nb::arg("token_ids").noconvert(),
           nb::arg("parent").noconvert(), nb::arg("root"), nb::arg("seed") = 0, nb::arg("stream") = 0,
           nb::arg("position") = 0, nb::arg("temperature") = 0.0);
}

}  // namespace outrider
