// The kernels as a library: `emulate` has the parameters of cuLaunchKernel, and runs blocks in shuffled order.
#include <ucontext.h>

#include <algorithm>
#include <cstring>
#include <functional>
#include <map>
#include <memory>
#include <numeric>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "kernels.cu"

namespace outrider {

Place place_now;

namespace {

constexpr size_t kStack = 64 << 10;

struct Fiber {
  ucontext_t context;
  std::unique_ptr<char[]> stack;
  Place place;
  bool done;
};

ucontext_t scheduler;
Fiber* running;
const std::function<void()>* body;

void enter() {
  (*body)();
  running->done = true;
  swapcontext(&running->context, &scheduler);
}

// False where threads of a block do not all come to the same barriers.
bool run_block(i64 block, i64 blocks, std::vector<Fiber>& fibers, std::mt19937& random) {
  const i64 threads = static_cast<i64>(fibers.size());
  for (i64 t = 0; t < threads; ++t) {
    Fiber& fiber = fibers[t];
    getcontext(&fiber.context);
    fiber.context.uc_stack.ss_sp = fiber.stack.get();
    fiber.context.uc_stack.ss_size = kStack;
    fiber.context.uc_link = nullptr;
    fiber.place = {t, threads, block, blocks};
    fiber.done = false;
    makecontext(&fiber.context, enter, 0);
  }
  std::vector<i64> order(threads);
  std::iota(order.begin(), order.end(), 0);
  for (;;) {
    std::shuffle(order.begin(), order.end(), random);
    for (i64 t : order) {
      running = &fibers[t];
      place_now = running->place;
      swapcontext(&scheduler, &running->context);
    }
    const i64 done = std::count_if(fibers.begin(), fibers.end(), [](const Fiber& fiber) { return fiber.done; });
    if (done == threads) return true;
    if (done != 0) return false;
  }
}

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
  };
  return all;
}

}  // namespace

void wait_for_the_others() {
  Fiber* self = running;
  swapcontext(&self->context, &scheduler);
  place_now = self->place;
}

}  // namespace outrider

// The number of a kernel's parameters, of eight bytes each; -1 for an unknown kernel.
extern "C" int parameters(const char* kernel) {
  const auto found = outrider::kernels().find(kernel);
  return found == outrider::kernels().end() ? -1 : found->second.parameters;
}

// 0, or 1 for an unknown kernel, 2 for a barrier that not every thread of a block comes to.
extern "C" int emulate(const char* kernel, long long blocks, long long threads, void** params, unsigned seed) {
  using namespace outrider;
  const auto found = kernels().find(kernel);
  if (found == kernels().end()) return 1;
  std::mt19937 random(seed);
  std::vector<Fiber> fibers(static_cast<size_t>(threads));
  for (Fiber& fiber : fibers) fiber.stack = std::make_unique<char[]>(kStack);
  const std::function<void()> run = [&] { found->second.run(params); };
  body = &run;
  std::vector<i64> order(blocks);
  std::iota(order.begin(), order.end(), 0);
  std::shuffle(order.begin(), order.end(), random);
  for (i64 block : order) {
    if (!run_block(block, blocks, fibers, random)) return 2;
  }
  return 0;
}
