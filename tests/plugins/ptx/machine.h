// What translated PTX runs on: the memory of a block, a watch on every access, barriers, the lanes of a warp.
//
// A kernel, or a function that kernels call, gets the address of its result and those of its parameters. Addresses of shared
// memory are offsets in the block's, as on a GPU; all others are addresses of this process.
#pragma once

#pragma GCC push_options
#pragma GCC optimize("O2")  // what every access runs through; what is translated compiles fast

#include <cstdlib>
#include <vector>

#include "arithmetic.h"
#include "copies.h"
#include "matrix.h"
#include "races.h"

namespace ptx {

struct Machine {
  emulator::Grid grid;
  Races races;
  std::vector<char> shared;
  std::vector<char> waited;  // of each thread: for the kernels before
  const char *early = nullptr, *early_end = nullptr;  // what threads read before that
  emulator::Order order = emulator::kShuffled;
  emulator::Copies copies;

  std::vector<char> reached;  // barriers, fences and waits for earlier kernels, by their sites
  int left_out = -1;          // which of them does nothing

  const emulator::Place& place() const { return grid.place(); }

  bool leaves_out(int site) {
    if (reached.size() <= static_cast<size_t>(site)) reached.resize(site + 1);
    reached[site] = true;
    return site == left_out;
  }

  void wait_for_block(int site) {
    if (!leaves_out(site)) grid.wait();
  }

  void fence(int site) {
    if (!leaves_out(site)) races.fences(place());
  }

  void wait_for_earlier(int site) {
    if (!leaves_out(site)) waited[place().thread] = true;
  }

  char* shared_at(uint64_t offset, size_t bytes) {
    if (offset > shared.size() || bytes > shared.size() - offset) std::abort();
    return shared.data() + offset;
  }

  void wait_for_warp(int site, uint32_t members) {
    if (members != kWholeWarp) std::abort();  // nobody has thought of parts of a warp
    if (leaves_out(site)) return;
    grid.wait_for_warp(site);
    races.warp_barrier(place());
  }

  uint32_t shuffled(int site, uint32_t value, uint32_t lane, uint32_t clamp, uint32_t members) {
    if (members != kWholeWarp || clamp != emulator::kLanes - 1) std::abort();
    return grid.exchange(site, {{value}})[lane % emulator::kLanes].word[0];
  }

  // What may change until the kernels before have ended, they alone may write, and nobody reads but what none of them writes.
  void reads_global(const char* from, size_t bytes) {
    if (waited[place().thread]) return;
    early = early == nullptr || from < early ? from : early;
    early_end = from + bytes > early_end ? from + bytes : early_end;
  }

  void writes_global() {
    if (!waited[place().thread]) races.too_early(place());
  }

  // A copy may be made at any time until its thread waits for it: it counts as a store then, and when it starts.
  void start_copy(uint64_t to, uint64_t from, size_t bytes) {
    char* const place_of_copy = shared_at(to, bytes);
    copies.start(place(), place_of_copy, reinterpret_cast<const char*>(from), bytes);
    reads_global(reinterpret_cast<const char*>(from), bytes);
    races.loads(place(), reinterpret_cast<const char*>(from), bytes, false);
    store_words(place_of_copy, reinterpret_cast<const char*>(from), bytes);
  }

  void wait_for_copies(size_t open) {
    copies.wait(place(), open, [this](char* to, const char* from, size_t bytes) {
      store_words(to, from, bytes);
      std::memcpy(to, from, bytes);
    });
  }

  void store_words(const char* to, const char* from, size_t bytes) {
    for (size_t at = 0; at < bytes; at += 4) {
      uint32_t word = 0;
      std::memcpy(&word, from + at, sizeof word);
      races.stores(place(), to + at, sizeof word, true, word);
    }
  }

  static constexpr uint32_t kWholeWarp = 0xffffffffu;
};

inline Machine machine;

enum class Space { kShared, kGlobal, kPrivate };  // the last: of a thread, or of a call

template <typename T, Space space>
char* place_of(uint64_t address) {
  return space == Space::kShared ? machine.shared_at(address, sizeof(T)) : reinterpret_cast<char*>(address);
}

// `bytes`: what the address must be a multiple of: of a vector's first element, the size of the vector.
template <typename T, Space space>
__attribute__((noinline)) T load(uint64_t address, size_t bytes) {
  char* from = place_of<T, space>(address);
  if (reinterpret_cast<uintptr_t>(from) % bytes != 0) std::abort();  // as a GPU would
  if (space == Space::kGlobal) machine.reads_global(from, sizeof(T));
  if (space != Space::kPrivate) machine.races.loads(machine.place(), from, sizeof(T), space == Space::kShared);
  T value;
  std::memcpy(&value, from, sizeof value);
  return value;
}

template <typename T, Space space>
__attribute__((noinline)) void store(uint64_t address, T value) {
  char* to = place_of<T, space>(address);
  if (space == Space::kGlobal) machine.writes_global();
  if (space != Space::kPrivate) {
    uint64_t bits = 0;
    std::memcpy(&bits, &value, sizeof value);
    machine.races.stores(machine.place(), to, sizeof(T), space == Space::kShared, bits);
  }
  std::memcpy(to, &value, sizeof value);
}

template <typename T, Space space>
__attribute__((noinline)) T add_atomically(uint64_t address, T value) {
  char* at = place_of<T, space>(address);
  if (space == Space::kGlobal) machine.writes_global();
  machine.races.counts(machine.place(), at, sizeof(T), space == Space::kShared);
  T before;
  std::memcpy(&before, at, sizeof before);
  const T after = static_cast<T>(before + value);
  std::memcpy(at, &after, sizeof after);
  return before;
}

inline uint64_t address_of(const void* memory) { return reinterpret_cast<uint64_t>(memory); }

using Code = void (*)(char* result, char** parameters);

}  // namespace ptx

#pragma GCC pop_options
