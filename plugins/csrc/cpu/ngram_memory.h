// A bounded number of tokens of earlier outputs, which many sequences draft from.
#pragma once

#include <array>
#include <atomic>
#include <mutex>
#include <vector>

#include "../portable.h"
#include "suffixes.h"

namespace outrider {

// Two automata, as none can give up a text: the newer one takes texts in until the next would make it more than half of
// all; then the older one forgets everything, and becomes the newer. So the oldest texts go first, many at once, and
// after the first half there is always about half of what may be kept. Texts never run on into each other.
//
// Any thread may add or read. A reader holds the memory for microseconds, or for a look at every token that has
// followed the context (some 0.3 ms for 10,000 of them); a writer admits readers between portions of a text, so that a
// reader may find a text added in part.
class NgramMemory {
 public:
  // Room for `tokens`, of which contexts of up to `longest` are known; all memory is taken here.
  NgramMemory(i64 tokens, i64 longest);

  // Adds a text, whose first `lead` tokens are contexts alone: they never count as continuations. Of a text of more than
  // half of what may be kept, the end. O(longest) a token, on average.
  void add(const std::vector<u32>& text, i64 lead);

  i64 longest() const { return longest_; }
  i64 bytes();   // whatever it holds
  i64 tokens();  // that it holds

  // Keeps others from changing anything, for as long as the lock lives; needed for the calls below.
  std::unique_lock<std::mutex> hold();

  static constexpr std::size_t kOlder = 0, kNewer = 1;
  // One of the two automata; null while the newer one is being cleared.
  const Suffixes* part(std::size_t age) const { return parts_[age]; }
  // Changes with the contents: matches are those of one version.
  u64 version() const { return version_; }

 private:
  void turn();

  const i64 longest_, half_;
  std::array<Suffixes, 2> automata_;
  std::mutex adding_;               // one text at a time
  std::mutex changing_;             // guards all below, and the automata that are shown
  std::atomic<int> readers_{0};     // that wait
  std::array<Suffixes*, 2> parts_;  // by age
  std::array<i64, 2> held_{};       // tokens, by age
  u64 version_ = 0;
};

}  // namespace outrider
