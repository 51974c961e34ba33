#include "device.h"

#include <sys/syscall.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <map>
#include <mutex>
#include <utility>

namespace fake {

namespace {

constexpr size_t kAlignment = 512;
constexpr int kGarbage = 0xA5;

struct Block {
  size_t bytes;
  Kind kind;
};

std::recursive_mutex mutex;
std::map<const char*, Block> blocks;
std::vector<std::unique_ptr<Stream>> streams;
Stream legacy{0};
std::deque<Work> queue;
size_t enqueued = 0, done = 0;
thread_local CaptureMode thread_mode = kGlobal;

using Lock = std::lock_guard<std::recursive_mutex>;

const char* name_of(Kind kind) {
  switch (kind) {
    case Kind::kDevice: return "device";
    case Kind::kPinned: return "pinned";
    default: return "pageable";
  }
}

std::map<const char*, Block>::iterator find(const void* address) {
  auto above = blocks.upper_bound(static_cast<const char*>(address));
  if (above == blocks.begin()) return blocks.end();
  const auto found = std::prev(above);
  return address < found->first + found->second.bytes ? found : blocks.end();
}

Stream* any_capturing() {
  for (const auto& stream : streams) {
    if (stream->capturing) return stream.get();
  }
  return nullptr;
}

std::string in(const Stream* stream) { return " in stream " + std::to_string(stream->number); }

void run_until(size_t mark) {
  while (done < mark) {
    const Work work = std::move(queue.front());
    queue.pop_front();
    ++done;
    work();
  }
}

}  // namespace

void record(const char* event, const std::string& text) {
  Lock lock(mutex);
  static FILE* file = [] {
    const char* path = std::getenv("OUTRIDER_CUDA_RECORD");
    return path ? std::fopen(path, "w") : stderr;
  }();
  std::fprintf(file, "%ld\t%s\t%s\n", static_cast<long>(syscall(SYS_gettid)), event, text.c_str());
  std::fflush(file);
}

void fault(const std::string& text) { record("fault", text); }

int not_emulated(const char* function) {
  fault(std::string(function) + " is not emulated");
  return 3;
}

void* allocate(size_t bytes, Kind kind, const char* function) {
  Lock lock(mutex);
  void* address = nullptr;
  if (posix_memalign(&address, kAlignment, bytes ? bytes : 1)) return nullptr;
  std::memset(address, kGarbage, bytes);
  blocks[static_cast<char*>(address)] = {bytes ? bytes : 1, kind};
  record("allocate", std::string(function) + " " + std::to_string(bytes));
  return address;
}

void release(void* address, const char* function) {
  if (address == nullptr) return;
  Lock lock(mutex);
  if (blocks.erase(static_cast<char*>(address)) == 0) return fault(std::string(function) + " of an unknown address");
  std::free(address);
}

Kind kind_of(const void* address) {
  Lock lock(mutex);
  const auto found = find(address);
  return found == blocks.end() ? Kind::kPageable : found->second.kind;
}

void check_range(const void* address, size_t bytes, const char* function) {
  Lock lock(mutex);
  const auto found = find(address);
  if (found != blocks.end() && static_cast<const char*>(address) + bytes > found->first + found->second.bytes) {
    fault(std::string(function) + " goes past the end of an allocation");
  }
}

Stream* make_stream() {
  Lock lock(mutex);
  streams.push_back(std::make_unique<Stream>(static_cast<int>(streams.size()) + 1));
  return streams.back().get();
}

Stream* stream_of(void* handle) {
  const auto number = reinterpret_cast<size_t>(handle);
  return number <= 2 ? &legacy : static_cast<Stream*>(handle);
}

void enqueue(Stream* stream, const std::string& name, Work work) {
  Lock lock(mutex);
  if (stream->capturing) {
    stream->graph->nodes.push_back(std::move(work));
    return;
  }
  if (stream == &legacy && any_capturing()) fault(name + " in the legacy stream while a stream captures");
  ++enqueued;
  queue.push_back(std::move(work));
}

void mark(Event* event, Stream* stream) {
  Lock lock(mutex);
  if (!stream->capturing) event->mark = enqueued;
}

Verdict wait_for(const Event& event) {
  Lock lock(mutex);
  run_until(event.mark);
  return kAllowed;
}

Verdict wait_for(Stream* stream, const char* function) {
  Lock lock(mutex);
  if (stream->capturing) {
    fault(std::string(function) + " of a stream that captures");
    return kForbidden;
  }
  record("wait", function + in(stream));
  run_until(enqueued);
  return kAllowed;
}

Verdict wait_for_all(const char* function) {
  Lock lock(mutex);
  if (unsafe_call(function) == kForbidden) return kForbidden;
  record("wait", function);
  run_until(enqueued);
  return kAllowed;
}

void copy(Stream* stream, void* to, const void* source, size_t bytes, const char* function) {
  Lock lock(mutex);
  const Kind kind_to = kind_of(to), kind_source = kind_of(source);
  check_range(to, bytes, function);
  check_range(source, bytes, function);
  const bool pageable = kind_to == Kind::kPageable || kind_source == Kind::kPageable;
  record(stream->capturing ? "captured copy" : "copy", std::string(name_of(kind_source)) + " to " + name_of(kind_to) +
                                                           " " + std::to_string(bytes) + in(stream));
  if (pageable && stream->capturing) {
    fault(std::string(function) + " of pageable memory is captured: a replay goes to the same address");
  }
  if (kind_source == Kind::kPageable && kind_to == Kind::kDevice && !stream->capturing) {  // staged by the driver
    const auto staged = std::make_shared<std::string>(static_cast<const char*>(source), bytes);
    enqueue(stream, function, [=] { std::memcpy(to, staged->data(), bytes); });
    return;
  }
  enqueue(stream, function, [=] { std::memmove(to, source, bytes); });
  if (kind_to == Kind::kPageable && !stream->capturing) run_until(enqueued);
}

Verdict copy_now(void* to, const void* source, size_t bytes, const char* function) {
  Lock lock(mutex);
  if (any_capturing() != nullptr) {
    fault(std::string(function) + " while a stream captures");
    return kForbidden;
  }
  copy(&legacy, to, source, bytes, function);
  run_until(enqueued);
  return kAllowed;
}

Verdict begin_capture(Stream* stream, CaptureMode mode, const char* function) {
  Lock lock(mutex);
  if (stream == &legacy || stream->capturing) {
    fault(std::string(function) + (stream->capturing ? " of a stream that captures" : " of the legacy stream"));
    return kForbidden;
  }
  stream->capturing = true;
  stream->mode = mode;
  stream->captured_by = std::this_thread::get_id();
  stream->graph = std::make_shared<Graph>();
  record("capture", function + in(stream));
  return kAllowed;
}

std::shared_ptr<Graph>* end_capture(Stream* stream, const char* function) {
  Lock lock(mutex);
  if (!stream->capturing) {
    fault(std::string(function) + " of a stream that does not capture");
    return nullptr;
  }
  stream->capturing = false;
  record("captured", function + in(stream) + ": " + std::to_string(stream->graph->nodes.size()) + " nodes");
  return new std::shared_ptr<Graph>(std::move(stream->graph));
}

void launch_graph(const std::shared_ptr<Graph>& graph, Stream* stream, const char* function) {
  Lock lock(mutex);
  record("replay", function + in(stream) + ": " + std::to_string(graph->nodes.size()) + " nodes");
  enqueue(stream, function, [graph] {
    for (const Work& node : graph->nodes) node();
  });
}

CaptureMode exchange_mode(CaptureMode mode) { return std::exchange(thread_mode, mode); }

Verdict unsafe_call(const char* function) {
  Lock lock(mutex);
  if (thread_mode == kRelaxed) return kAllowed;
  for (const auto& stream : streams) {
    if (!stream->capturing) continue;
    const bool own = stream->captured_by == std::this_thread::get_id();
    if (own ? stream->mode != kRelaxed : thread_mode == kGlobal && stream->mode == kGlobal) {
      fault(std::string(function) + " is unsafe while stream " + std::to_string(stream->number) + " captures");
      return kForbidden;
    }
  }
  return kAllowed;
}

}  // namespace fake
