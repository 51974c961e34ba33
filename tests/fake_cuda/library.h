// Libraries of kernels: their handles know a stream, and their calls are kernels that do nothing.
#pragma once

#include "device.h"

namespace fake {

struct Handle {
  void* stream = nullptr;
};

inline int create(void** handle) { return give(handle, new Handle); }
inline int set_stream(void* handle, void* stream) { return give(&static_cast<Handle*>(handle)->stream, stream); }
inline int enqueue_nothing(void* handle, const char* function) {
  Stream* stream = stream_of(static_cast<Handle*>(handle)->stream);
  record(stream->capturing ? "captured kernel" : "kernel", function);
  enqueue(stream, function, [] {});
  return 0;
}

}  // namespace fake

#define KERNEL(function) \
  int function(void* handle) { return fake::enqueue_nothing(handle, #function); }
#define CREATES(function) \
  int function(void** made) { return fake::create(made); }
#define SUCCEEDS(function) \
  int function() { return 0; }
#define NOT_EMULATED(function) \
  int function() { return fake::not_emulated(#function); }
