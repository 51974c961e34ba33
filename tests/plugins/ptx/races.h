// Finds accesses to memory of which one writes and nothing says which comes first.
//
// Within a block, a barrier orders what threads do before and behind it. Between blocks of a launch, an atomic on the same
// counter does: of the block that counts first, what its threads have done up to a barrier before, and made visible with a
// fence; for the other block, what its threads do behind a barrier and a fence of theirs. Stores of equal values are no race.
// An access is known by the address of its element.
#pragma once

#include <cstdint>
#include <cstdio>
#include <map>
#include <string>
#include <vector>

#include "grid.h"

namespace ptx {

using Index = emulator::Index;

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
  }
  void block_starts() { fences_.assign(fences_.size(), {}); }
  void interval_starts() { ++interval_; }

  const std::string& found() const { return found_; }

  __attribute__((noinline)) void loads(const emulator::Place& place, const void* address, bool shared) {
    Accesses& before = at(address);
    if (conflicts(before.write, place, shared)) tell("loads what", place, before.write, "has stored", shared);
    const bool other = before.read.interval == interval_ && before.read.thread != place.thread;
    before.several = before.read.interval == interval_ && (before.several || other);
    before.read = access(place, 0, false);
  }

  __attribute__((noinline)) void stores(const emulator::Place& place, const void* address, bool shared, uint64_t bits) {
    Accesses& before = at(address);
    const bool same = !before.write.atomic && before.write.bits == bits;
    if (!same && conflicts(before.write, place, shared)) tell("stores what", place, before.write, "has stored", shared);
    check_reads(before, place, shared);
    before.write = access(place, bits, false);
  }

  __attribute__((noinline)) void counts(const emulator::Place& place, const void* address, bool shared) {
    Accesses& before = at(address);
    if (!before.write.atomic && conflicts(before.write, place, shared)) {
      tell("counts what", place, before.write, "has stored", shared);
    }
    check_reads(before, place, shared);
    before.write = access(place, 0, true);
    if (shared) return;
    std::map<Index, size_t>& counter = counters_[address];
    for (const auto& [block, releases] : counter) {
      Acquired& mine = acquired_[place.block][block];
      if (releases > mine.releases) mine = {releases, interval_, place.thread};
    }
    released_[place.block].push_back({interval_, place.thread, fences_});
    counter[place.block] = released_[place.block].size();
  }

  __attribute__((noinline)) void fences(const emulator::Place& place) {
    Fences& own = fences_[place.thread];
    ++own.count;
    own.interval = interval_;
  }

 private:
  struct Access {
    Index block = -1;
    Index thread = -1;
    uint64_t interval = 0;
    uint64_t fences = 0;  // of its thread before
    uint64_t bits = 0;
    bool atomic = false;
  };
  struct Accesses {
    uint64_t launch = 0;
    const void* address = nullptr;
    Access write;
    Access read;
    bool several = false;  // threads have read in the interval of the last read
  };
  struct Fences {
    uint64_t count = 0;
    uint64_t interval = 0;  // of the last one
  };
  struct Release {
    uint64_t interval;
    Index thread;
    std::vector<Fences> fences;
  };
  struct Acquired {
    size_t releases = 0;
    uint64_t interval = 0;
    Index thread = -1;
  };

  Access access(const emulator::Place& place, uint64_t bits, bool atomic) const {
    return {place.block, place.thread, interval_, fences_[place.thread].count, bits, atomic};
  }

  void check_reads(const Accesses& before, const emulator::Place& place, bool shared) {
    const bool others = before.several && before.read.block == place.block && before.read.interval == interval_;
    if (others || conflicts(before.read, place, shared)) tell("stores what", place, before.read, "has loaded", shared);
  }

  bool conflicts(const Access& before, const emulator::Place& place, bool shared) const {
    if (before.block < 0) return false;
    if (before.block == place.block) return before.interval == interval_ && before.thread != place.thread;
    return !shared && !ordered(before, place);
  }

  // Of an access of another block.
  __attribute__((noinline)) bool ordered(const Access& before, const emulator::Place& place) const {
    const auto found = acquired_[place.block].find(before.block);
    if (found == acquired_[place.block].end()) return false;
    const Acquired& acquired = found->second;
    const Fences& mine = fences_[place.thread];
    const bool waited = acquired.interval < interval_ ? mine.interval >= acquired.interval && mine.count > 0
                                                      : acquired.thread == place.thread;
    for (size_t r = 0; waited && r < acquired.releases; ++r) {
      const Release& release = released_[before.block][r];
      const bool behind = release.interval > before.interval ||
                          (release.interval == before.interval && release.thread == before.thread);
      const bool visible = before.atomic || release.fences[before.thread].count > before.fences ||
                           (release.fences[release.thread].count > 0 &&
                            release.fences[release.thread].interval > before.interval);
      if (behind && visible) return true;
    }
    return false;
  }

  void tell(const char* does, const emulator::Place& place, const Access& before, const char* did, bool shared) {
    if (!found_.empty()) return;
    char text[300];
    std::snprintf(text, sizeof text, "thread %lld of block %lld %s thread %lld of block %lld %s, in %s memory",
                  place.thread, place.block, does, before.thread, before.block, did, shared ? "shared" : "global");
    found_ = kernel_ + ": " + text;
  }

  // A table of addresses, in which what an earlier launch has left counts as free.
  Accesses& at(const void* address) {
    if (2 * (used_ + 1) > table_.size()) grow();
    size_t place = reinterpret_cast<uintptr_t>(address) * 0x9e3779b97f4a7c15ull >> 20;
    for (;; ++place) {
      Accesses& entry = table_[place & (table_.size() - 1)];
      if (entry.launch != launch_) {
        entry = Accesses();
        entry.launch = launch_;
        entry.address = address;
        ++used_;
        return entry;
      }
      if (entry.address == address) return entry;
    }
  }

  __attribute__((noinline)) void grow() {
    std::vector<Accesses> old(table_.empty() ? 1 << 16 : 2 * table_.size());
    old.swap(table_);
    used_ = 0;
    for (const Accesses& entry : old) {
      if (entry.launch == launch_ && entry.address != nullptr) at(entry.address) = entry;
    }
  }

  std::string kernel_;
  std::string found_;
  uint64_t launch_ = 0;
  uint64_t interval_ = 0;
  std::vector<Fences> fences_;  // of the threads of the block that runs
  std::vector<std::vector<Release>> released_;
  std::vector<std::map<Index, Acquired>> acquired_;
  std::map<const void*, std::map<Index, size_t>> counters_;
  std::vector<Accesses> table_;
  size_t used_ = 0;
};

}  // namespace ptx
