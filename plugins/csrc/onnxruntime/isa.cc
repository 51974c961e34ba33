#include "onnxruntime/isa.h"

#include <cstdlib>
#include <cstring>

namespace outrider::engine {
namespace {

constexpr const char* kNames[] = {"plain", "avx2", "avxvnni", "avx512"};  // by Isa

bool has(Isa isa) {
#if defined(OUTRIDER_X86)
  const bool avx2 =
      __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
  switch (isa) {
    case Isa::kPlain: return true;
    case Isa::kAvx2: return avx2;
    case Isa::kAvxVnni: return avx2 && __builtin_cpu_supports("avxvnni");
    case Isa::kAvx512: return avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512dq");
  }
#endif
  return isa == Isa::kPlain;
}

Isa best() {
  constexpr Isa kBestFirst[] = {Isa::kAvx512, Isa::kAvxVnni, Isa::kAvx2};
  for (const Isa isa : kBestFirst)
    if (has(isa)) return isa;
  return Isa::kPlain;
}

struct Chosen {
  Isa isa;
  const char* refused;
};

Chosen choose() {
  const char* wanted = std::getenv("OUTRIDER_ISA");
  if (wanted == nullptr || *wanted == '\0') return {best(), nullptr};
  for (int i = 0; i < 4; ++i) {
    if (std::strcmp(wanted, kNames[i]) != 0) continue;
    const Isa isa = static_cast<Isa>(i);
    if (has(isa)) return {isa, nullptr};
    return {best(), "OUTRIDER_ISA names instructions that this processor lacks; unset it, or set it to plain"};
  }
  return {best(), "OUTRIDER_ISA must be plain, avx2, avxvnni or avx512"};
}

const Chosen& chosen() {
  static const Chosen once = choose();
  return once;
}

}  // namespace

Isa isa_here() { return chosen().isa; }

const char* isa_refused() { return chosen().refused; }

bool has_avx512_vnni() {
#if defined(OUTRIDER_X86)
  return has(Isa::kAvx512) && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vnni");
#else
  return false;
#endif
}

}  // namespace outrider::engine
