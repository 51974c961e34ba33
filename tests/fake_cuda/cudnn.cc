// libcudnn.so.9: reductions and softmax, and of the rest nothing.
#include <cstddef>

#include "library.h"

extern "C" {

size_t cudnnGetVersion() { return 91200; }
const char* cudnnGetErrorString(int) { return "a status of the fake cuDNN"; }
void cudnnGetLastErrorString(char* text, size_t size) {
  if (size > 0) *text = '\0';
}
CREATES(cudnnCreate)
SUCCEEDS(cudnnDestroy)
int cudnnSetStream(void* handle, void* stream) { return fake::set_stream(handle, stream); }
int cudnnGetStream(void* handle, void** stream) {
  return fake::give(stream, static_cast<fake::Handle*>(handle)->stream);
}

CREATES(cudnnCreateTensorDescriptor)
SUCCEEDS(cudnnDestroyTensorDescriptor)
SUCCEEDS(cudnnSetTensorNdDescriptor)
CREATES(cudnnCreateReduceTensorDescriptor)
SUCCEEDS(cudnnDestroyReduceTensorDescriptor)
SUCCEEDS(cudnnSetReduceTensorDescriptor)
int cudnnGetReductionIndicesSize(void*, void*, void*, void*, size_t* bytes) { return fake::give(bytes, 1024); }
int cudnnGetReductionWorkspaceSize(void*, void*, void*, void*, size_t* bytes) { return fake::give(bytes, 1024); }
KERNEL(cudnnReduceTensor)
KERNEL(cudnnSoftmaxForward)

}  // extern "C"
