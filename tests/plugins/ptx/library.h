// The kernels as a library with the entries of the emulator of sources (../emulator/library.h). Included once, after
// the translated functions, with PTX_KERNELS: names, code, and numbers of parameters.
#pragma once

#include <map>
#include <string>
#include <utility>

namespace ptx {

struct Kernel {
  Code code;
  int parameters;
};

inline const std::map<std::string, Kernel>& kernels() {
  static const std::map<std::string, Kernel> all = {PTX_KERNELS};
  return all;
}

}  // namespace ptx

extern "C" int parameters(const char* kernel) {
  const auto found = ptx::kernels().find(kernel);
  return found == ptx::kernels().end() ? -1 : found->second.parameters;
}

extern "C" void set_order(int order) { ptx::machine.order = static_cast<emulator::Order>(order); }

// The first race of the last launch, as a sentence.
extern "C" const char* race() { return ptx::machine.races.found().c_str(); }

// Leave a barrier or a fence out of all launches, by its site; -1: none.
extern "C" void leave_out(int site) { ptx::machine.left_out = site; }

// Whether launches have come to the barrier or fence of a site since the last call; -1 after the last site.
extern "C" int reached(int site) {
  auto& all = ptx::machine.reached;
  return static_cast<size_t>(site) < all.size() ? std::exchange(all[site], false) : -1;
}

// What the last launch read before it waited for the kernels before it: from where, and up to where; null for nothing.
extern "C" const char* early(int end) { return end ? ptx::machine.early_end : ptx::machine.early; }

// 0, or 1 for an unknown kernel, 2 for a barrier that not every thread of a block reaches, or a collective that not
// every lane of a warp reaches, 3 for a race.
extern "C" int emulate(const char* kernel, long long blocks, long long threads, long long shared, void** params,
                       unsigned seed) {
  using ptx::machine;
  const auto found = ptx::kernels().find(kernel);
  if (found == ptx::kernels().end()) return 1;
  machine.races.launch_starts(kernel, blocks, threads);
  machine.early = machine.early_end = nullptr;
  emulator::Watch watch;
  watch.block_starts = [=] {
    // Garbage; where a barrier is left out zeros, which are places of something.
    machine.shared.assign(ptx::kSharedBytes + shared, machine.left_out < 0 ? static_cast<char>(seed * 0x9du + 0x35u) : 0);
    machine.races.block_starts();
    machine.copies.block_starts();
    machine.waited.assign(threads, false);
  };
  watch.interval_starts = [] { machine.races.interval_starts(); };
  const auto body = [&] { found->second.code(nullptr, reinterpret_cast<char**>(params)); };
  if (!machine.grid.run(blocks, threads, seed, machine.order, body, watch)) return 2;
  return machine.races.found().empty() ? 0 : 3;
}
