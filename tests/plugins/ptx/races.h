// Finds accesses to memory of which one writes and nothing says which comes first.
//
// Within a block, a barrier orders what threads do before and after it, and within a warp a barrier of the warp does;
// other collectives order no memory. Between blocks of a launch, an atomic on the same counter does: of the block that
// counts first, what its threads have done up to a barrier before, and made visible with a fence; for the other block,
// what its threads do after a barrier and a fence, theirs or of the thread that counted: a fence of one thread orders what
// others did before an earlier barrier, and what they do after a later one (PTX ISA, "Causality order"). Stores of equal
// values are no race. Memory is known by words, and where an access was of less, by bytes too.
#pragma once

#include <cstdint>
#include <cstdio>
#include <map>
#include <string>
#include <vector>

#include "grid.h"

namespace ptx {

using emulator::Index;
using emulator::Place;

class Races {
 public:
  void launch_starts(const std::string& kernel, Index blocks, Index threads) {
    kernel_ = kernel;
    found_.clear();
    ++launch_;
    used_ = 0;
    fences_.assign(static_cast<size_t>(threads), {});
    released_.assign(static_cast<size_t>(blocks), {});
    acquired_.assign(static_cast<size_t>(blocks), {});
    counters_.clear();
    warp_barriers_.assign(static_cast<size_t>(threads), 0);
  }
  void block_starts() { fences_.assign(fences_.size(), {}); }
  void interval_starts() { ++interval_; }
  void warp_barrier(const Place& place) { ++warp_barriers_[place.thread]; }

  const std::string& found() const { return found_; }

  __attribute__((noinline)) void loads(const Place& place, const void* address, size_t bytes, bool shared) {
    each(address, bytes, [&](Accesses& known, const Overlap& overlap) {
      if (conflicts(known.write, place, shared)) report("loads what", place, known.write, "has stored", shared);
      if (!overlap.kept) return;
      const Access& last = known.read;
      const Moment now = moment(place);
      const bool since_barrier = last.block == place.block && last.when.interval == now.interval;
      const bool in_warp = last.when.warp() == now.warp();
      const bool at_once = since_barrier && in_warp && last.when.warp_barriers == now.warp_barriers;
      known.warps = since_barrier && (known.warps || !in_warp);
      known.lanes = at_once && (known.lanes || last.when.thread != now.thread);
      known.read = access(place, 0, false);
    });
  }

  __attribute__((noinline)) void stores(const Place& place, const void* address, size_t bytes, bool shared,
                                        uint64_t bits) {
    each(address, bytes, [&](Accesses& known, const Overlap& overlap) {
      const uint32_t own = static_cast<uint32_t>(bits >> overlap.value_bit) & overlap.mask;
      const bool same = !known.write.atomic && (known.write.bits >> overlap.known_bit & overlap.mask) == own;
      if (!same && conflicts(known.write, place, shared)) report("stores what", place, known.write, "has stored", shared);
      check_reads(known, place, shared);
      if (overlap.kept) known.write = access(place, own, false);
    });
  }

  __attribute__((noinline)) void counts(const Place& place, const void* address, size_t bytes, bool shared) {
    each(address, bytes, [&](Accesses& known, const Overlap& overlap) {
      if (!known.write.atomic && conflicts(known.write, place, shared)) {
        report("counts what", place, known.write, "has stored", shared);
      }
      check_reads(known, place, shared);
      if (overlap.kept) known.write = access(place, 0, true);
    });
    if (shared) return;
    std::map<Index, size_t>& counter = counters_[address];
    for (const auto& [block, releases] : counter) {
      Acquired& mine = acquired_[place.block][block];
      if (releases > mine.releases) mine = {releases, moment(place), fences_[place.thread].count};
    }
    released_[place.block].push_back({moment(place), fences_});
    counter[place.block] = released_[place.block].size();
  }

  // A store or a count before the kernels before have ended.
  void too_early(const Place& place) {
    if (found_.empty()) found_ = kernel_ + ": thread " + std::to_string(place.thread) + " writes before it has waited for the kernels before";
  }

  __attribute__((noinline)) void fences(const Place& place) {
    Fences& own = fences_[place.thread];
    ++own.count;
    own.last = moment(place);
  }

 private:
  // When a thread does something: between which barriers of its block, and of its warp.
  struct Moment {
    int32_t thread = -1;
    uint32_t interval = 0;
    uint32_t warp_barriers = 0;

    Index warp() const { return thread / emulator::kLanes; }

    // Whether what happened then comes before what happens at a later moment in the same block.
    bool precedes(const Moment& later) const {
      if (interval != later.interval) return interval < later.interval;
      return thread == later.thread || (warp() == later.warp() && warp_barriers < later.warp_barriers);
    }
  };
  struct Access {
    int32_t block = -1;
    Moment when;
    uint32_t fences = 0;  // of its thread before
    uint32_t bits = 0;
    bool atomic = false;
  };
  struct Accesses {
    uintptr_t key = 0;
    uint32_t launch = 0;
    Access write;
    Access read;
    bool lanes = false;   // others of the last reader's warp have read since its last barrier
    bool warps = false;   // other warps have read since the block's last barrier
    bool narrow = false;  // of a word: its bytes are known too
  };
  // What an access has in common with a word or a byte that is known.
  struct Overlap {
    uint32_t mask;
    int known_bit;  // where it begins there
    int value_bit;  // and in the value of the access
    bool kept;      // whether the access is to be known there
  };
  struct Fences {
    uint32_t count = 0;
    Moment last;
  };
  struct Release {
    Moment when;
    std::vector<Fences> fences;
  };
  struct Acquired {
    size_t releases = 0;
    Moment when;
    uint32_t fences = 0;  // of its thread before
  };

  Moment moment(const Place& place) const {
    return {static_cast<int32_t>(place.thread), interval_, warp_barriers_[place.thread]};
  }

  Access access(const Place& place, uint32_t bits, bool atomic) const {
    return {static_cast<int32_t>(place.block), moment(place), fences_[place.thread].count, bits, atomic};
  }

  void check_reads(const Accesses& known, const Place& place, bool shared) {
    const Access& last = known.read;
    const Moment now = moment(place);
    const bool since_barrier = last.block == place.block && last.when.interval == now.interval;
    const bool at_once = last.when.warp() == now.warp() && last.when.warp_barriers == now.warp_barriers;
    const bool others = since_barrier && (known.warps || (known.lanes && at_once));
    if (others || conflicts(last, place, shared)) report("stores what", place, last, "has loaded", shared);
  }

  bool conflicts(const Access& before, const Place& place, bool shared) const {
    if (before.block < 0) return false;
    if (before.block == place.block) return !before.when.precedes(moment(place));
    return !shared && !ordered(before, place);
  }

  // Of an access of another block.
  __attribute__((noinline)) bool ordered(const Access& before, const Place& place) const {
    const auto found = acquired_[place.block].find(before.block);
    if (found == acquired_[place.block].end()) return false;
    const Acquired& acquired = found->second;
    const Fences& mine = fences_[place.thread];
    const Moment now = moment(place);
    const bool itself = acquired.when.thread == now.thread && acquired.when.interval == now.interval;
    const Fences& acquiring = fences_[acquired.when.thread];
    const bool fenced = (mine.count > 0 && mine.last.interval >= acquired.when.interval) ||
                        (acquiring.count > acquired.fences && acquiring.last.precedes(now));
    const bool waited = itself || (acquired.when.precedes(now) && fenced);
    for (size_t r = 0; waited && r < acquired.releases; ++r) {
      const Release& release = released_[before.block][r];
      const Fences& releasing = release.fences[release.when.thread];
      const bool passed_on = release.when.thread != before.when.thread && releasing.count > 0 &&
                             before.when.precedes(releasing.last);
      const bool visible = before.atomic || passed_on || release.fences[before.when.thread].count > before.fences;
      if (before.when.precedes(release.when) && visible) return true;
    }
    return false;
  }

  void report(const char* does, const Place& place, const Access& before, const char* did, bool shared) {
    if (!found_.empty()) return;
    char text[300];
    std::snprintf(text, sizeof text, "thread %lld of block %lld %s thread %d of block %d %s, in %s memory",
                  place.thread, place.block, does, before.when.thread, before.block, did, shared ? "shared" : "global");
    found_ = kernel_ + ": " + text;
  }

  static uintptr_t key_of_word(uintptr_t address) { return address << 1; }
  static uintptr_t key_of_byte(uintptr_t address) { return address << 1 | 1; }

  // Calls `use` with all that is known of the memory of an access.
  template <typename Use>
  void each(const void* address, size_t bytes, const Use& use) {
    const uintptr_t first = reinterpret_cast<uintptr_t>(address);
    if (bytes < kWord) {
      const int begin = static_cast<int>(first % kWord);
      Accesses& word = at(key_of_word(first - begin));
      word.narrow = true;
      use(word, {(1u << 8 * bytes) - 1, 8 * begin, 0, false});
      for (int b = 0; b < static_cast<int>(bytes); ++b) use(at(key_of_byte(first + b)), {0xff, 0, 8 * b, true});
      return;
    }
    for (int w = 0; w < static_cast<int>(bytes); w += kWord) {
      Accesses& word = at(key_of_word(first + w));
      const bool narrow = word.narrow;
      use(word, {0xffffffff, 0, 8 * w, true});
      for (int b = w; narrow && b < w + kWord; ++b) use(at(key_of_byte(first + b)), {0xff, 0, 8 * b, false});
    }
  }

  // A table of keys, in which what an earlier launch has left counts as free.
  Accesses& at(uintptr_t key) {
    if (2 * (used_ + 1) > table_.size()) grow();
    // The 64 words of a stretch of memory follow each other.
    size_t place = (key >> 9) * 0x9e3779b97f4a7c15ull >> 20 << 6 | (key >> 3 & 63);
    for (;; ++place) {
      Accesses& entry = table_[place & (table_.size() - 1)];
      if (entry.launch != launch_) {
        entry = Accesses();
        entry.launch = launch_;
        entry.key = key;
        ++used_;
        return entry;
      }
      if (entry.key == key) return entry;
    }
  }

  __attribute__((noinline)) void grow() {
    std::vector<Accesses> old(table_.empty() ? 1 << 16 : 2 * table_.size());
    old.swap(table_);
    used_ = 0;
    for (const Accesses& entry : old) {
      if (entry.launch == launch_ && entry.key != 0) at(entry.key) = entry;
    }
  }

  static constexpr int kWord = 4;

  std::string kernel_;
  std::string found_;
  uint32_t launch_ = 0;
  uint32_t interval_ = 0;
  std::vector<uint32_t> warp_barriers_;  // of each thread so far
  std::vector<Fences> fences_;  // of the threads of the block that runs
  std::vector<std::vector<Release>> released_;
  std::vector<std::map<Index, Acquired>> acquired_;
  std::map<const void*, std::map<Index, size_t>> counters_;
  std::vector<Accesses> table_;
  size_t used_ = 0;
};

}  // namespace ptx
