// Copies that threads have started and not waited for: each is made as late as it may be, when its thread waits for it.
#pragma once

#include <cstdlib>
#include <vector>

#include "grid.h"

namespace emulator {

class Copies {
 public:
  void block_starts() {
    for (Thread& thread : threads_) thread.forget();
  }

  void start(const Place& place, void* to, const void* from, size_t bytes) {
    if (reinterpret_cast<uintptr_t>(to) % bytes != 0 || reinterpret_cast<uintptr_t>(from) % bytes != 0) std::abort();
    of(place).all.push_back({static_cast<char*>(to), static_cast<const char*>(from), bytes});
  }

  void close(const Place& place) {
    Thread& own = of(place);
    own.ends.push_back(own.all.size());
  }

  // Makes the copies of all groups of the thread but its newest `open`, by `copy(to, from, bytes)`.
  template <typename Copy>
  void wait(const Place& place, size_t open, const Copy& copy) {
    Thread& own = of(place);
    for (; own.ends.size() - own.ended > open; ++own.ended) {
      for (; own.made < own.ends[own.ended]; ++own.made) {
        const One& one = own.all[own.made];
        copy(one.to, one.from, one.bytes);
      }
    }
    if (own.made == own.all.size() && own.ended == own.ends.size()) own.forget();
  }

 private:
  struct One {
    char* to;
    const char* from;
    size_t bytes;
  };
  struct Thread {
    std::vector<One> all;
    std::vector<size_t> ends;  // of groups, in `all`
    size_t made = 0;           // of `all`
    size_t ended = 0;          // of groups

    void forget() {
      all.clear();
      ends.clear();
      made = ended = 0;
    }
  };

  Thread& of(const Place& place) {
    if (threads_.size() <= static_cast<size_t>(place.thread)) threads_.resize(place.threads);
    return threads_[place.thread];
  }

  std::vector<Thread> threads_;
};

}  // namespace emulator
