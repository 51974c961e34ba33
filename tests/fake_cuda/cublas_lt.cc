// libcublasLt.so.13: no algorithm is ever found, so that callers take cuBLAS.
#include "library.h"

extern "C" {

CREATES(cublasLtCreate)
SUCCEEDS(cublasLtDestroy)

NOT_EMULATED(cublasLtMatmul)
NOT_EMULATED(cublasLtMatmulAlgoConfigSetAttribute)
NOT_EMULATED(cublasLtMatmulAlgoGetHeuristic)
NOT_EMULATED(cublasLtMatmulAlgoInit)
NOT_EMULATED(cublasLtMatmulDescCreate)
NOT_EMULATED(cublasLtMatmulDescDestroy)
NOT_EMULATED(cublasLtMatmulDescSetAttribute)
NOT_EMULATED(cublasLtMatmulPreferenceCreate)
NOT_EMULATED(cublasLtMatmulPreferenceDestroy)
NOT_EMULATED(cublasLtMatmulPreferenceSetAttribute)
NOT_EMULATED(cublasLtMatrixLayoutCreate)
NOT_EMULATED(cublasLtMatrixLayoutDestroy)
NOT_EMULATED(cublasLtMatrixLayoutSetAttribute)
NOT_EMULATED(cublasLtMatrixTransform)
NOT_EMULATED(cublasLtMatrixTransformDescCreate)
NOT_EMULATED(cublasLtMatrixTransformDescDestroy)

}  // extern "C"
