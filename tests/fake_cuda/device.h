// A device without a GPU: memory of the process, one order of work for all streams, captures, and a record of calls.
//
// Nothing that is enqueued has happened before somebody waits: it happens then. What real CUDA forbids, or what no
// program of ours should do, is recorded as a fault.
#pragma once

#include <cstddef>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <vector>

namespace fake {

enum class Kind { kPageable, kDevice, kPinned };
enum CaptureMode { kGlobal = 0, kThreadLocal = 1, kRelaxed = 2 };  // CUDA's numbers
enum Verdict { kAllowed, kForbidden };

using Work = std::function<void()>;

// Results of the libraries' functions: 0 is a success of all of them.
template <typename T, typename V>
int give(T* to, V value) {
  *to = value;
  return 0;
}
template <typename T>
int drop(T* what) {
  delete what;
  return 0;
}

struct Graph {
  std::vector<Work> nodes;
};

struct Stream {
  explicit Stream(int number) : number(number) {}

  int number;
  bool capturing = false;
  CaptureMode mode = kGlobal;
  std::thread::id captured_by;
  std::shared_ptr<Graph> graph;
};

struct Event {
  size_t mark = 0;
};

// The record: one line a call, `thread<TAB>event<TAB>text`, in the file that OUTRIDER_CUDA_RECORD names.
void record(const char* event, const std::string& text);
void fault(const std::string& text);
int not_emulated(const char* function);  // records a fault; not a success of any library

// Memory. A block starts as garbage.
void* allocate(size_t bytes, Kind kind, const char* function);
void release(void* address, const char* function);
Kind kind_of(const void* address);
void check_range(const void* address, size_t bytes, const char* function);

// Streams, and the order of work. Null and CUDA's special handles are the legacy stream.
Stream* make_stream();
Stream* stream_of(void* handle);
void enqueue(Stream* stream, const std::string& name, Work work);
void mark(Event* event, Stream* stream);
Verdict wait_for(const Event& event);
Verdict wait_for(Stream* stream, const char* function);
Verdict wait_for_all(const char* function);
void copy(Stream* stream, void* to, const void* source, size_t bytes, const char* function);
Verdict copy_now(void* to, const void* source, size_t bytes, const char* function);

// Captures.
Verdict begin_capture(Stream* stream, CaptureMode mode, const char* function);
std::shared_ptr<Graph>* end_capture(Stream* stream, const char* function);
void launch_graph(const std::shared_ptr<Graph>& graph, Stream* stream, const char* function);
CaptureMode exchange_mode(CaptureMode mode);
// Whether this thread may do what a capture forbids, such as allocate memory.
Verdict unsafe_call(const char* function);

// Our ops' kernels are those of the emulator's library, which OUTRIDER_EMULATOR names. Enqueue `kernel`: as a driver
// does, it copies the parameters, of eight bytes each.
void launch_kernel(const char* kernel, unsigned blocks, unsigned threads, unsigned shared, void** parameters,
                   Stream* stream);
bool has_kernel(const char* kernel);

}  // namespace fake
