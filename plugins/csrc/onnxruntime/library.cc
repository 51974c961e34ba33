// Our ops inside of ONNX Runtime's engines on the CPU: a library that it loads by path, for sessions that ask for it.
#include <algorithm>
#include <cstdlib>
#include <map>
#include <mutex>
#include <thread>

#include "onnxruntime/attention_op.h"
#include "onnxruntime/drafting_ops.h"
#include "onnxruntime/expert_op.h"
#include "onnxruntime/gated_unit_op.h"
#include "onnxruntime/isa.h"
#include "onnxruntime/norm_op.h"
#include "onnxruntime/path_conv_op.h"
#include "onnxruntime/quant_op.h"
#include "onnxruntime/route_op.h"
#include "onnxruntime/softcap_op.h"

#if defined(_WIN32)
#define OUTRIDER_EXPORT __declspec(dllexport)
#else
#define OUTRIDER_EXPORT __attribute__((visibility("default")))
#endif

namespace outrider::engine {
namespace {

constexpr const char* kThreads = "outrider.threads";

// The ops of sessions with so many threads. They live as long as this library: nobody says when the last session ends.
struct Domain {
  Domain(const OrtApi& api, int threads)
      : attention32(threads), attention16(threads), attention8(threads), expand(threads), rerank(threads),
        gated(threads), norm(threads), convolution(threads), product(threads), lookup(threads), softcap(threads), route(threads),
        experts(threads), quant_experts(threads) {
    check(api.CreateCustomOpDomain("outrider.cpu", &domain));
    const OrtCustomOp* const ops[] = {&attention32, &attention16, &attention8, &expand, &rerank,  &gated,   &norm,
                                      &convolution, &product,     &lookup,     &softcap, &route,   &experts,
                                      &quant_experts};
    for (const OrtCustomOp* op : ops) check(api.CustomOpDomain_Add(domain, op));
  }

  const Op<BranchAttentionOp<float, ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT>> attention32;
  const Op<BranchAttentionOp<Half, ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT16>> attention16;
  const Op<BranchAttentionOp<Int8, ONNX_TENSOR_ELEMENT_DATA_TYPE_INT8>> attention8;
  const Op<TreeExpandOp> expand;
  const Op<TreeRerankOp> rerank;
  const Op<GatedUnitOp> gated;
  const Op<RmsNormOp> norm;
  const Op<PathConvOp> convolution;
  const Op<QuantMatMulOp> product;
  const Op<QuantGatherOp> lookup;
  const Op<SoftcapOp> softcap;
  const Op<RouteOp> route;
  const Op<MixtureOfExpertsOp<FloatExperts>> experts;
  const Op<MixtureOfExpertsOp<QuantExperts>> quant_experts;
  OrtCustomOpDomain* domain = nullptr;
};

// What the session says, or as many as the machine has processors, which may be more than it will have.
int threads_of(const OrtApi& api, const OrtSessionOptions* options) {
  int known = 0;
  check(api.HasSessionConfigEntry(options, kThreads, &known));
  char text[16] = {};
  std::size_t size = sizeof(text);
  if (known != 0) check(api.GetSessionConfigEntry(options, kThreads, text, &size));
  const int threads = std::atoi(text);
  return threads > 0 ? threads : std::max(1, static_cast<int>(std::thread::hardware_concurrency()));
}

}  // namespace
}  // namespace outrider::engine

// Counts changes of what the ops are; plugins/onnxruntime_ops.py wants the same.
extern "C" OUTRIDER_EXPORT int outrider_cpu_ops_version() { return 12; }

// Called by ONNX Runtime with the options of a session that loads this library.
extern "C" OUTRIDER_EXPORT OrtStatus* ORT_API_CALL RegisterCustomOps(OrtSessionOptions* options,
                                                                     const OrtApiBase* base) {
  using namespace outrider::engine;
  const OrtApi* api = base->GetApi(ORT_API_VERSION);
  if (api == nullptr) return nullptr;  // an ONNX Runtime older than the header: it then knows no such op, and says so
  return guarded(*api, [&] {
    static std::mutex mutex;
    static auto& domains = *new std::map<int, Domain>;  // sessions may outlive what is destroyed at exit
    if (isa_refused() != nullptr) check(api->CreateStatus(ORT_INVALID_ARGUMENT, isa_refused()));
    const int threads = threads_of(*api, options);
    const std::lock_guard<std::mutex> alone(mutex);
    check(api->AddCustomOpDomain(options, domains.try_emplace(threads, *api, threads).first->second.domain));
  });
}
