// Blocks of threads on a machine without a GPU: a thread is a fiber, which runs to its next barrier.
//
// Threads run in shuffled order between two barriers, and so do blocks, one after another: a kernel whose result
// depends on the order is noticed. Fibers are entered once, and from then on switched by jumps, which take no
// system call. The lanes of a warp wait for each other too, and continue when all of them are at the same collective.
#pragma once

#include <setjmp.h>
#include <ucontext.h>

#include <algorithm>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <numeric>
#include <random>
#include <vector>

namespace emulator {

using Index = long long;

constexpr Index kLanes = 32;  // of a warp

struct Place {
  Index thread;
  Index threads;
  Index block;
  Index blocks;

  Index lane() const { return thread % kLanes; }
  Index warp() const { return thread / kLanes; }
};

enum Order { kShuffled = 0, kFirstToLast = 1, kLastToFirst = 2 };

// What a lane shows the others of its warp.
struct Shown {
  std::uint32_t word[6];
};

enum class State { kReady, kAtCollective, kAtBarrier, kDone };

struct Fiber {
  ucontext_t context;
  jmp_buf here;
  Place place;
  bool entered;
  State state;
  int collective;      // that it waits at
  unsigned exchanges;  // of this block
};

// Events of a launch, for those that watch.
struct Watch {
  std::function<void()> block_starts = [] {};
  std::function<void()> interval_starts = [] {};  // all threads of the block have come to a barrier
};

class Grid {
 public:
  // Runs `body` in every thread of a launch. False where threads of a block do not all come to the same barriers, or
  // the lanes of a warp not to the same collectives.
  bool run(Index blocks, Index threads, unsigned seed, Order order, const std::function<void()>& body,
           const Watch& watch) {
    random_.seed(seed);
    body_ = &body;
    threads_ = threads;
    warps_.resize(static_cast<size_t>((threads + kLanes - 1) / kLanes));
    while (static_cast<Index>(fibers_.size()) < threads) prepare();
    std::vector<Index> places(static_cast<size_t>(blocks));
    std::iota(places.begin(), places.end(), 0);
    if (order == kShuffled) std::shuffle(places.begin(), places.end(), random_);
    if (order == kLastToFirst) std::reverse(places.begin(), places.end());
    for (Index block : places) {
      for (Index t = 0; t < threads; ++t) {
        fibers_[t].place = {t, threads, block, blocks};
        fibers_[t].exchanges = 0;
      }
      watch.block_starts();
      for (bool done = false; !done;) {
        for (Index t = 0; t < threads; ++t) fibers_[t].state = State::kReady;
        watch.interval_starts();
        run_interval();
        done = all(State::kDone);
        if (!done && !all(State::kAtBarrier)) {
          fibers_.clear();  // which are in the middle of it
          return false;
        }
      }
    }
    return true;
  }

  // Of the thread that runs.
  const Place& place() const { return running_->place; }

  // The thread that runs waits for the others of its block.
  void wait() { pause(State::kAtBarrier); }

  // It waits for the lanes of its warp to come to `collective`.
  void wait_for_warp(int collective) {
    running_->collective = collective;
    pause(State::kAtCollective);
  }

  // It shows `own` to the lanes of its warp. What each of them shows is there until its next exchange.
  const Shown* exchange(int collective, const Shown& own) {
    const Place& place = running_->place;
    Shown* shown = warps_[place.warp()].shown[running_->exchanges++ % 2];  // others may still read the last ones
    shown[place.lane()] = own;
    wait_for_warp(collective);
    return shown;
  }

 private:
  static constexpr size_t kStack = 128 << 10;

  struct Warp {
    Shown shown[2][kLanes];
  };

  void prepare() {
    const size_t t = fibers_.size();
    if (t == stacks_.size()) stacks_.emplace_back(new char[kStack]);
    Fiber& fiber = fibers_.emplace_back();
    getcontext(&fiber.context);
    fiber.context.uc_stack.ss_sp = stacks_[t].get();
    fiber.context.uc_stack.ss_size = kStack;
    fiber.context.uc_link = nullptr;
    fiber.entered = false;
    entering() = this;
    makecontext(&fiber.context, &Grid::enter, 0);
  }

  bool all(State state) const {
    return std::all_of(fibers_.begin(), fibers_.begin() + threads_,
                       [&](const Fiber& fiber) { return fiber.state == state; });
  }

  // Runs all threads to their next barrier: warps in turn, or one ahead of the others.
  void run_interval() {
    waiting_.resize(warps_.size());
    std::iota(waiting_.begin(), waiting_.end(), 0);
    while (!waiting_.empty()) {
      std::shuffle(waiting_.begin(), waiting_.end(), random_);
      const auto end = random_() % 2 == 0 ? waiting_.begin() + 1 : waiting_.end();
      waiting_.erase(std::remove_if(waiting_.begin(), end, [&](size_t warp) { return !run_lanes(warp); }), end);
    }
  }

  // Runs the lanes of a warp, each once. False where they do not all wait at a collective then.
  bool run_lanes(size_t warp) {
    const Index first = static_cast<Index>(warp) * kLanes;
    const Index count = std::min(kLanes, threads_ - first);
    const auto random = static_cast<Index>(random_());
    const Index step = random >> 10 | 1, start = random >> 5, flip = random % kLanes;  // one of 4096 orders
    bool meet = count == kLanes;
    int collective = 0;  // that the lane before has come to
    for (Index i = 0; i < kLanes; ++i) {
      const Index lane = (i * step + start) % kLanes ^ flip;
      if (lane >= count) continue;
      Fiber& fiber = fibers_[first + lane];
      resume(fiber);
      meet &= fiber.state == State::kAtCollective && (i == 0 || fiber.collective == collective);
      collective = fiber.collective;
    }
    for (Index t = first; meet && t < first + kLanes; ++t) fibers_[t].state = State::kReady;
    return meet;
  }

  void pause(State state) {
    running_->state = state;
    if (_setjmp(running_->here) == 0) _longjmp(scheduler_, 1);
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
      self.pause(State::kDone);
    }
  }

  static Grid*& entering() {
    static Grid* grid;
    return grid;
  }

  jmp_buf scheduler_;
  Fiber* running_ = nullptr;
  const std::function<void()>* body_ = nullptr;
  std::mt19937 random_;
  Index threads_ = 0;
  std::vector<size_t> waiting_;  // warps that have not come to the barrier
  std::deque<Fiber> fibers_;  // kept from launch to launch, and never moved
  std::vector<std::unique_ptr<char[]>> stacks_;  // kept from launch to launch
  std::vector<Warp> warps_;
};

}  // namespace emulator
