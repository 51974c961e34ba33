#include "ngram_memory.h"

#include <algorithm>
#include <thread>

namespace outrider {

namespace {

constexpr i64 kPortion = 64;  // tokens that are added while readers wait

}  // namespace

NgramMemory::NgramMemory(i64 tokens, i64 longest)
    : longest_(longest),
      half_(tokens / 2),
      automata_{Suffixes(longest, half_), Suffixes(longest, half_)},
      parts_{&automata_[0], &automata_[1]} {}

void NgramMemory::add(const std::vector<u32>& text, i64 lead) {
  const i64 end = static_cast<i64>(text.size());
  const i64 begin = std::max<i64>(0, end - half_);
  if (std::max(begin, lead) >= end) return;  // nothing that counts
  std::lock_guard<std::mutex> alone(adding_);
  if (held_[kNewer] + (end - begin) > half_) turn();
  Suffixes& newer = *parts_[kNewer];
  for (i64 at = begin; at < end;) {
    while (readers_.load() > 0) std::this_thread::yield();
    std::lock_guard<std::mutex> changing(changing_);
    if (at == begin) newer.begin_text();
    const i64 next = std::min(at + kPortion, end);
    held_[kNewer] += next - at;
    ++version_;
    for (; at < next; ++at) {
      const u32 token = text[static_cast<std::size_t>(at)];
      if (at < lead) {
        newer.lead(token);
      } else {
        newer.extend(token, nullptr, 0);
      }
    }
  }
}

// Forgets the older automaton, and makes it the newer one; it is not read while it is cleared.
void NgramMemory::turn() {
  Suffixes* oldest;
  {
    std::lock_guard<std::mutex> changing(changing_);
    oldest = parts_[kOlder];
    parts_ = {parts_[kNewer], nullptr};
    held_ = {held_[kNewer], 0};
    ++version_;
  }
  oldest->clear();
  std::lock_guard<std::mutex> changing(changing_);
  parts_[kNewer] = oldest;
  ++version_;
}

std::unique_lock<std::mutex> NgramMemory::hold() {
  ++readers_;
  std::unique_lock<std::mutex> held(changing_);
  --readers_;
  return held;
}

i64 NgramMemory::bytes() {
  const std::unique_lock<std::mutex> held = hold();
  return automata_[0].bytes() + automata_[1].bytes();
}

i64 NgramMemory::tokens() {
  const std::unique_lock<std::mutex> held = hold();
  return held_[kOlder] + held_[kNewer];
}

}  // namespace outrider
