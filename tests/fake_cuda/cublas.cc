// libcublas.so.13
#include "library.h"

extern "C" {

CREATES(cublasCreate_v2)
SUCCEEDS(cublasDestroy_v2)
SUCCEEDS(cublasSetMathMode)
int cublasGetMathMode(void*, int* mode) { return fake::give(mode, 0); }
int cublasSetStream_v2(void* handle, void* stream) { return fake::set_stream(handle, stream); }
const char* cublasGetStatusName(int) { return "a status of the fake cuBLAS"; }
const char* cublasGetStatusString(int) { return "a status of the fake cuBLAS"; }

KERNEL(cublasDgeam)
KERNEL(cublasDgemmBatched)
KERNEL(cublasDgemmStridedBatched)
KERNEL(cublasDgemm_v2)
KERNEL(cublasGemmBatchedEx)
KERNEL(cublasGemmEx)
KERNEL(cublasGemmStridedBatchedEx)
KERNEL(cublasScopy_v2)
KERNEL(cublasSgeam)
KERNEL(cublasSgemmBatched)
KERNEL(cublasSgemmStridedBatched)
KERNEL(cublasSgemm_v2)
KERNEL(cublasSscal_v2)

NOT_EMULATED(cublasDgetrfBatched)
NOT_EMULATED(cublasDgetriBatched)
NOT_EMULATED(cublasSgetrfBatched)
NOT_EMULATED(cublasSgetriBatched)

}  // extern "C"
