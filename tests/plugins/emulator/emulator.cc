// The kernels as a library: `emulate` has the parameters of cuLaunchKernel, and runs blocks in shuffled order, or in the
// order that `set_order` has asked for.
#include <map>
#include <string>
#include <utility>

#include "kernels.cu"

namespace outrider {

emulator::Grid grid;

namespace {

emulator::Order order_of_blocks = emulator::kShuffled;

template <typename... A, size_t... I>
void call(void (*kernel)(A...), void** params, std::index_sequence<I...>) {
  kernel(*static_cast<A*>(params[I])...);
}

struct Kernel {
  std::function<void(void**)> run;
  int parameters;
};

template <typename... A>
Kernel unpacked(void (*kernel)(A...)) {
  return {[kernel](void** params) { call(kernel, params, std::index_sequence_for<A...>()); }, sizeof...(A)};
}

const std::map<std::string, Kernel>& kernels() {
  static const std::map<std::string, Kernel> all = {
      {"outrider_bim_mask", unpacked(outrider_bim_mask)},
      {"outrider_sample", unpacked(outrider_sample)},
      {"outrider_tree_accept", unpacked(outrider_tree_accept)},
      {"outrider_chain_accept", unpacked(outrider_chain_accept)},
      {"outrider_race_noise", unpacked(outrider_race_noise)},
      {"outrider_kv_gather", unpacked(outrider_kv_gather)},
      {"outrider_block_summary", unpacked(outrider_block_summary)},
      {"outrider_block_select", unpacked(outrider_block_select)},
      {"outrider_partial_kv_gather", unpacked(outrider_partial_kv_gather)},
      {"outrider_draft_sample", unpacked(outrider_draft_sample)},
      {"outrider_tree_expand", unpacked(outrider_tree_expand)},
      {"outrider_tree_rerank", unpacked(outrider_tree_rerank)},
      {"outrider_set_numbers", unpacked(outrider_set_numbers)},
      {"outrider_take_tokens", unpacked(outrider_take_tokens)},
      {"outrider_keep_tokens", unpacked(outrider_keep_tokens)},
  };
  return all;
}

}  // namespace

}  // namespace outrider

// The number of a kernel's parameters, of eight bytes each; -1 for an unknown kernel.
extern "C" int parameters(const char* kernel) {
  const auto found = outrider::kernels().find(kernel);
  return found == outrider::kernels().end() ? -1 : found->second.parameters;
}

// Of the blocks of all launches from now on: 0 shuffled, 1 from the first to the last, 2 from the last to the first.
extern "C" void set_order(int order) { outrider::order_of_blocks = static_cast<emulator::Order>(order); }

// 0, or 1 for an unknown kernel, 2 for a barrier that not every thread of a block comes to.
extern "C" int emulate(const char* kernel, long long blocks, long long threads, void** params, unsigned seed) {
  using namespace outrider;
  const auto found = kernels().find(kernel);
  if (found == kernels().end()) return 1;
  return grid.run(blocks, threads, seed, order_of_blocks, [&] { found->second.run(params); }) ? 0 : 2;
}
