// Blocks of threads on a machine without a GPU: a thread is a fiber, which runs to its next barrier.
//
// Threads run in shuffled order between two barriers, and so do blocks, one after another: a kernel whose result depends on
// the order is noticed. Fibers are entered once a launch, and from then on switched by jumps, which take no system call.
#pragma once

#include <setjmp.h>
#include <ucontext.h>

#include <algorithm>
#include <functional>
#include <memory>
#include <numeric>
#include <random>
#include <vector>

namespace emulator {

using Index = long long;

struct Place {
  Index thread;
  Index threads;
  Index block;
  Index blocks;
};

enum Order { kShuffled = 0, kFirstToLast = 1, kLastToFirst = 2 };

struct Fiber {
  ucontext_t context;
  jmp_buf here;
  std::unique_ptr<char[]> stack;
  Place place;
  bool entered;
  bool done;
};

class Grid {
 public:
  // Runs `body` in every thread of a launch. False where threads of a block do not all come to the same barriers.
  // `block_starts` is called before a block, `interval_starts` when all of its threads have come to a barrier.
  bool run(Index blocks, Index threads, unsigned seed, Order order, const std::function<void()>& body,
           const std::function<void()>& block_starts = [] {}, const std::function<void()>& interval_starts = [] {}) {
    std::mt19937 random(seed);
    std::vector<Fiber> fibers(static_cast<size_t>(threads));
    for (Fiber& fiber : fibers) prepare(fiber);
    body_ = &body;
    std::vector<Index> places(static_cast<size_t>(blocks));
    std::iota(places.begin(), places.end(), 0);
    if (order == kShuffled) std::shuffle(places.begin(), places.end(), random);
    if (order == kLastToFirst) std::reverse(places.begin(), places.end());
    std::vector<Index> turns(static_cast<size_t>(threads));
    std::iota(turns.begin(), turns.end(), 0);
    for (Index block : places) {
      for (Index t = 0; t < threads; ++t) {
        fibers[t].place = {t, threads, block, blocks};
        fibers[t].done = false;
      }
      block_starts();
      for (Index done = 0; done < threads;) {
        if (done != 0) return false;
        std::shuffle(turns.begin(), turns.end(), random);
        interval_starts();
        for (Index t : turns) resume(fibers[t]);
        done = std::count_if(fibers.begin(), fibers.end(), [](const Fiber& fiber) { return fiber.done; });
      }
    }
    return true;
  }

  // Of the thread that runs.
  const Place& place() const { return running_->place; }

  // The thread that runs waits for the others of its block.
  void wait() {
    if (_setjmp(running_->here) == 0) _longjmp(scheduler_, 1);
  }

 private:
  static constexpr size_t kStack = 128 << 10;

  void prepare(Fiber& fiber) {
    fiber.stack = std::make_unique<char[]>(kStack);
    getcontext(&fiber.context);
    fiber.context.uc_stack.ss_sp = fiber.stack.get();
    fiber.context.uc_stack.ss_size = kStack;
    fiber.context.uc_link = nullptr;
    fiber.entered = false;
    entering() = this;
    makecontext(&fiber.context, &Grid::enter, 0);
  }

  void resume(Fiber& fiber) {
    running_ = &fiber;
    if (_setjmp(scheduler_) != 0) return;
    if (fiber.entered) _longjmp(fiber.here, 1);
    fiber.entered = true;
    setcontext(&fiber.context);
  }

  static void enter() {
    Grid& self = *entering();
    for (;;) {  // block after block
      (*self.body_)();
      self.running_->done = true;
      self.wait();
    }
  }

  static Grid*& entering() {
    static Grid* grid;
    return grid;
  }

  jmp_buf scheduler_;
  Fiber* running_ = nullptr;
  const std::function<void()>* body_ = nullptr;
};

}  // namespace emulator
