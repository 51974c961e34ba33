// NgramCounts and NgramMemory for Python.
#include <algorithm>
#include <cmath>
#include <limits>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "ngram_counts.h"
#include "ngram_memory.h"
#include "op.h"
#include "row_arrays.h"

namespace outrider {

namespace nb = nanobind;

namespace {

constexpr const char* kName = "Ngrams";
constexpr const char* kMemoryName = "NgramMemory";
constexpr i64 kMostContext = 1 << 16, kMostMemory = i64{1} << 28;  // whose states and edges 32 bits number

u32 token_of(nb::handle value, const char* name = kName) {
  const i64 token = nb::cast<i64>(value);
  check_value(name, "token_ids", 0, token, 0, std::numeric_limits<u32>::max());
  return static_cast<u32>(token);
}

class Memory {
 public:
  Memory(i64 tokens, i64 longest)
      : memory_((check_value(kMemoryName, "tokens", 0, tokens, 2, kMostMemory),
                 check_value(kMemoryName, "longest", 0, longest, 1, kMostContext),
                 std::make_shared<NgramMemory>(tokens, longest))) {}

  void add(nb::list lead, nb::list output) {
    std::vector<u32> text;
    text.reserve(lead.size() + output.size());
    for (nb::handle token : lead) text.push_back(token_of(token, kMemoryName));
    for (nb::handle token : output) text.push_back(token_of(token, kMemoryName));
    const i64 first = static_cast<i64>(lead.size());
    nb::gil_scoped_release released;  // to wait for another text's turn without it
    memory_->add(text, first);
  }

  i64 tokens() const { return memory_->tokens(); }
  i64 bytes() const { return memory_->bytes(); }
  const std::shared_ptr<NgramMemory>& shared() const { return memory_; }

 private:
  std::shared_ptr<NgramMemory> memory_;
};

class Ngrams {
 public:
  Ngrams(i64 shortest, i64 longest, double least_chance)
      : longest_(longest),
        counts_((check_value(kName, "shortest", 0, shortest, 1, longest), shortest), longest, least_chance) {}

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

  void recall_from(const Memory* memory) {
    if (memory != nullptr && memory->shared()->longest() != longest_) {
      refuse(kName, "the memory knows contexts of up to " + std::to_string(memory->shared()->longest()) +
                        " tokens, and they must be " + std::to_string(longest_) + " here too.");
    }
    counts_.recall_from(memory == nullptr ? nullptr : memory->shared());
  }

  i64 foresee(i64 limit, u64 seed, i64 stream, i64 position, double temperature) {
    return static_cast<i64>(counts_.foresee(limit, {seed, stream, position, temperature}).size());
  }

  i64 draft(i64 limit, OutputRow<i64> token_ids, OutputRow<i64> parent, OutputRow<float> score, i64 root,
            u64 seed, i64 stream, i64 position, double temperature) {
    const std::vector<Foreseen>& foreseen = counts_.foresee(limit, {seed, stream, position, temperature});
    const i64 count = static_cast<i64>(foreseen.size());
    const i64 room = static_cast<i64>(std::min({token_ids.size(), parent.size(), score.size()})) - 1 - root;
    if (root < 0 || count > room) refuse(kName, "there is no room for the draft after node " + std::to_string(root) + ".");
    for (i64 i = 0; i < count; ++i) {
      const Foreseen& node = foreseen[static_cast<std::size_t>(i)];
      token_ids.data()[root + 1 + i] = node.token;
      parent.data()[root + 1 + i] = root + 1 + node.parent;
      score.data()[root + 1 + i] = static_cast<float>(std::log(node.chance));
    }
    return count;
  }

 private:
  i64 longest_;
  NgramCounts counts_;
  std::vector<u32> likely_;
};

void define_ngrams(nb::module_& module) {
  nb::class_<Memory>(module, kMemoryName)
      .def(nb::init<i64, i64>(), nb::arg("tokens"), nb::arg("longest"))
      .def("add", &Memory::add, nb::arg("lead"), nb::arg("output"))
      .def_prop_ro("tokens", &Memory::tokens)
      .def_prop_ro("nbytes", &Memory::bytes);
  nb::class_<Ngrams>(module, kName)
      .def(nb::init<i64, i64, double>(), nb::arg("shortest"), nb::arg("longest"), nb::arg("least_chance"))
      .def("extend", &Ngrams::extend, nb::arg("token_ids"))
      .def("extend_one", &Ngrams::extend_one, nb::arg("token"), nb::arg("likely"))
      .def("go_ahead", &Ngrams::go_ahead, nb::arg("token_ids"))
      .def("go_back", &Ngrams::go_back)
      .def("recall_from", &Ngrams::recall_from, nb::arg("memory").none())
      .def("foresee", &Ngrams::foresee, nb::arg("limit"), nb::arg("seed") = 0, nb::arg("stream") = 0,
           nb::arg("position") = 0, nb::arg("temperature") = 0.0)
      .def("draft", &Ngrams::draft, nb::arg("limit"), nb::arg("token_ids").noconvert(),
           nb::arg("parent").noconvert(), nb::arg("score").noconvert(), nb::arg("root"), nb::arg("seed") = 0, nb::arg("stream") = 0,
           nb::arg("position") = 0, nb::arg("temperature") = 0.0);
}

const Registration registered(define_ngrams);

}  // namespace

}  // namespace outrider
