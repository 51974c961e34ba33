// cuBLAS, cuBLASLt, cuDNN and cuRAND, each of which has the functions of all: their handles know a stream, and their
// calls are kernels that do nothing. cuBLASLt never finds an algorithm, so that callers take cuBLAS.
#include <cstddef>

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

extern "C" {

#include "functions.h"  // written from the table in __init__.py

int cublasGetMathMode(void*, int* mode) { return fake::give(mode, 0); }
int cublasSetStream_v2(void* handle, void* stream) { return fake::set_stream(handle, stream); }
const char* cublasGetStatusName(int) { return "a status of the fake cuBLAS"; }
const char* cublasGetStatusString(int) { return "a status of the fake cuBLAS"; }

size_t cudnnGetVersion() { return 91200; }
const char* cudnnGetErrorString(int) { return "a status of the fake cuDNN"; }
void cudnnGetLastErrorString(char* text, size_t size) {
  if (size > 0) *text = '\0';
}
int cudnnSetStream(void* handle, void* stream) { return fake::set_stream(handle, stream); }
int cudnnGetStream(void* handle, void** stream) {
  return fake::give(stream, static_cast<fake::Handle*>(handle)->stream);
}
int cudnnGetReductionIndicesSize(void*, void*, void*, void*, size_t* bytes) { return fake::give(bytes, 1024); }
int cudnnGetReductionWorkspaceSize(void*, void*, void*, void*, size_t* bytes) { return fake::give(bytes, 1024); }

}  // extern "C"
