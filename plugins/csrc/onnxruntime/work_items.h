// Work that a session's threads share, item after item.
#pragma once

#include <atomic>
#include <new>

#include "onnxruntime/ort.h"

namespace outrider::engine {

// Calls body(i) for all i < count, once each and in no order, on the session's threads: each takes the next item when it
// is done with one, so that items may differ in size. On this thread alone where `small`, because waking others would
// cost more than they bring.
template <class Body>
void for_each_item(const Run& run, std::int64_t count, bool small, const Body& body) {
  struct Job {
    const Body& body;
    std::int64_t count;
    std::atomic<std::int64_t> next;
    std::atomic<bool> failed;  // nothing may be thrown past other threads' items
  };
  Job job{body, count, {0}, {false}};
  const auto work = [](void* state, std::size_t) {
    auto& job = *static_cast<Job*>(state);
    try {
      for (std::int64_t item; (item = job.next.fetch_add(1)) < job.count;) job.body(item);
    } catch (const std::bad_alloc&) {
      job.failed = true;
    }
  };
  const std::int64_t parts = small ? 1 : std::min<std::int64_t>(count, run.threads());
  run.parallel_for(work, static_cast<std::size_t>(parts), &job, parts <= 1);
  if (job.failed) throw std::bad_alloc();
}

}  // namespace outrider::engine
