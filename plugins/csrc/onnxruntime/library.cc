// Our ops inside of ONNX Runtime's engines on the CPU: a library that it loads by path, for sessions that ask for it.
#include "onnxruntime/attention_op.h"
#include "onnxruntime/drafting_ops.h"
#include "onnxruntime/gated_unit_op.h"

#if defined(_WIN32)
#define OUTRIDER_EXPORT __declspec(dllexport)
#else
#define OUTRIDER_EXPORT __attribute__((visibility("default")))
#endif

// Counts changes of what the ops are; plugins/onnxruntime_ops.py wants the same.
extern "C" OUTRIDER_EXPORT int outrider_cpu_ops_version() { return 2; }

// Called by ONNX Runtime with the options of a session that loads this library.
extern "C" OUTRIDER_EXPORT OrtStatus* ORT_API_CALL RegisterCustomOps(OrtSessionOptions* options,
                                                                     const OrtApiBase* base) {
  using namespace outrider::engine;
  static const Op<BranchAttentionOp<float, ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT>> attention32;
  static const Op<BranchAttentionOp<Half, ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT16>> attention16;
  static const Op<BranchAttentionOp<BFloat16, ONNX_TENSOR_ELEMENT_DATA_TYPE_BFLOAT16>> attention_brain16;
  static const Op<TreeExpandOp> expand;
  static const Op<TreeRerankOp> rerank;
  static const Op<SwiGluOp> gated;
  static const OrtCustomOp* const ops[] = {&attention32, &attention16, &attention_brain16, &expand, &rerank,
                                            &gated};
  const OrtApi* api = base->GetApi(ORT_API_VERSION);
  if (api == nullptr) return nullptr;  // an ONNX Runtime older than the header: it then knows no such op, and says so
  return guarded(*api, [&] {
    static OrtCustomOpDomain* const domain = [&] {  // lives as long as this library, like the ops
      OrtCustomOpDomain* made = nullptr;
      check(api->CreateCustomOpDomain("outrider.cpu", &made));
      for (const OrtCustomOp* op : ops) check(api->CustomOpDomain_Add(made, op));
      return made;
    }();
    check(api->AddCustomOpDomain(options, domain));
  });
}
