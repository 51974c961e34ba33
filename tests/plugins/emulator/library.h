// The kernels as a library: `emulate` has the parameters of cuLaunchKernel, and runs blocks in shuffled order, or in
// the order that `set_order` has asked for. Included once, after the kernels, with EMULATED_KERNELS: names, code, and
// whether a kernel gives the same with any number of threads.
#pragma once

#include <map>
#include <string>
#include <utility>

#include "block.h"

namespace outrider {

emulator::Grid grid;
char* dynamic_memory;

namespace {

emulator::Order order_of_blocks = emulator::kShuffled;

template <typename... A, size_t... I>
void call(void (*kernel)(A...), void** params, std::index_sequence<I...>) {
  kernel(*static_cast<A*>(params[I])...);
}

struct Kernel {
  std::function<void(void**)> run;
  int parameters;
  bool any_threads;
};

template <typename... A>
Kernel unpacked(void (*kernel)(A...), bool any_threads) {
  const auto run = [kernel](void** params) { call(kernel, params, std::index_sequence_for<A...>()); };
  return {run, sizeof...(A), any_threads};
}

const std::map<std::string, Kernel>& kernels() {
  static const std::map<std::string, Kernel> all = {EMULATED_KERNELS};
  return all;
}

// A block's dynamic shared memory, which holds anything when the block starts, between margins that nobody may write.
class DynamicMemory {
 public:
  DynamicMemory(size_t bytes, unsigned seed)
      : bytes_(bytes),
        garbage_(static_cast<char>(seed * 0x9du + 0x35u)),
        memory_(kMargin + bytes + kMargin, kUntouched) {}

  char* start() {
    std::fill_n(memory_.begin() + kMargin, bytes_, garbage_);
    return memory_.data() + kMargin;
  }

  bool margins_are_untouched() const {
    const auto untouched = [](char byte) { return byte == kUntouched; };
    return std::all_of(memory_.begin(), memory_.begin() + kMargin, untouched) &&
           std::all_of(memory_.end() - kMargin, memory_.end(), untouched);
  }

 private:
  static constexpr size_t kMargin = 1 << 10;
  static constexpr char kUntouched = 0x5a;

  size_t bytes_;
  char garbage_;
  std::vector<char> memory_;
};

}  // namespace

}  // namespace outrider

// The number of a kernel's parameters, of eight bytes each; -1 for an unknown kernel.
extern "C" int parameters(const char* kernel) {
  const auto found = outrider::kernels().find(kernel);
  return found == outrider::kernels().end() ? -1 : found->second.parameters;
}

// Whether a kernel gives the same with any number of threads.
extern "C" int any_threads(const char* kernel) { return outrider::kernels().at(kernel).any_threads; }

// Of the blocks of all launches from now on: 0 shuffled, 1 from the first to the last, 2 from the last to the first.
extern "C" void set_order(int order) { outrider::order_of_blocks = static_cast<emulator::Order>(order); }

// 0, or 1 for an unknown kernel, 2 for a barrier that not every thread of a block reaches, or a collective that not
// every lane of a warp reaches, 4 for a block that has written beside its `shared` bytes of dynamic shared memory.
extern "C" int emulate(const char* kernel, long long blocks, long long threads, long long shared, void** params,
                       unsigned seed) {
  using namespace outrider;
  const auto found = kernels().find(kernel);
  if (found == kernels().end()) return 1;
  DynamicMemory memory(static_cast<size_t>(shared), seed);
  emulator::Watch watch;
  watch.block_starts = [&] {
    dynamic_memory = memory.start();
    copies().block_starts();
  };
  if (!grid.run(blocks, threads, seed, order_of_blocks, [&] { found->second.run(params); }, watch)) return 2;
  return memory.margins_are_untouched() ? 0 : 4;
}
