// Copies that threads have started and not waited for: each is made as late as it may be, when its thread waits for it.
#pragma once

#include <cstdlib>
#include <deque>
#include <map>
#include <utility>
#include <vector>

#include "grid.h"

namespace emulator {

class Copies {
 public:
  void block_starts() { threads_.clear(); }

  void start(const Place& place, void* to, const void* from, size_t bytes) {
    if (reinterpret_cast<uintptr_t>(to) % bytes != 0 || reinterpret_cast<uintptr_t>(from) % bytes != 0) std::abort();
    of(place).open.push_back({static_cast<char*>(to), static_cast<const char*>(from), bytes});
  }

  void close(const Place& place) {
    Thread& own = of(place);
    own.groups.push_back(std::exchange(own.open, {}));
  }

  // Makes the copies of all groups of the thread but its newest `open`, by `copy(to, from, bytes)`.
  template <typename Copy>
  void wait(const Place& place, size_t open, const Copy& copy) {
    for (Thread& own = of(place); own.groups.size() > open; own.groups.pop_front()) {
      for (const One& one : own.groups.front()) copy(one.to, one.from, one.bytes);
    }
  }

 private:
  struct One {
    char* to;
    const char* from;
    size_t bytes;
  };
  struct Thread {
    std::vector<One> open;
    std::deque<std::vector<One>> groups;
  };

  Thread& of(const Place& place) { return threads_[place.thread]; }

  std::map<Index, Thread> threads_;
};

}  // namespace emulator
