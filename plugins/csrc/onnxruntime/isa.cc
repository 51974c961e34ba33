#include "onnxruntime/isa.h"

#include <cstdlib>
#include <cstring>

#if defined(OUTRIDER_X86)
#include <cpuid.h>
#if defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif
#elif defined(OUTRIDER_ARM64) && defined(__linux__)
#include <sys/auxv.h>
#endif

namespace outrider::engine {
namespace {

constexpr const char* kNames[] = {"plain", "avx2", "avxvnni", "avx512", "amx", "neon", "i8mm"};  // by Isa
constexpr int kCount = sizeof kNames / sizeof *kNames;

#if defined(OUTRIDER_X86)
// Whether the processor has tiles of int8 and the system lets this process use them, which Linux wants to be asked for.
bool has_tiles() {
#if defined(__linux__)
  constexpr unsigned kTilesOfInt8 = 1u << 24 | 1u << 25;
  constexpr long kRequest = 0x1023, kTileData = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
  unsigned a = 0, b = 0, c = 0, d = 0;
  if (__get_cpuid_count(7, 0, &a, &b, &c, &d) == 0 || (d & kTilesOfInt8) != kTilesOfInt8) return false;
  return syscall(SYS_arch_prctl, kRequest, kTileData) == 0;
#else
  return false;
#endif
}

bool has(Isa isa) {
  const bool avx2 =
      __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
  switch (isa) {
    case Isa::kPlain: return true;
    case Isa::kAvx2: return avx2;
    case Isa::kAvxVnni: return avx2 && __builtin_cpu_supports("avxvnni");
    case Isa::kAvx512: return avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512dq");
    case Isa::kAmx: return has_avx512_vnni() && has_tiles();
    case Isa::kNeon:
    case Isa::kI8mm: return false;
  }
  return false;
}
#elif defined(OUTRIDER_ARM64) && defined(__linux__)
bool has(Isa isa) {
  constexpr unsigned long kDotProducts = 1ul << 20, kInt8Matrices = 1ul << 13;  // HWCAP_ASIMDDP, HWCAP2_I8MM
  const bool neon = (getauxval(AT_HWCAP) & kDotProducts) != 0;
  switch (isa) {
    case Isa::kPlain: return true;
    case Isa::kNeon: return neon;
    case Isa::kI8mm: return neon && (getauxval(AT_HWCAP2) & kInt8Matrices) != 0;
    default: return false;
  }
}
#else
bool has(Isa isa) { return isa == Isa::kPlain; }
#endif

Isa best() {
  // Without AMX, which must be asked for: its kernel has run with emulated tiles alone, and prototypes gained nothing.
  constexpr Isa kBestFirst[] = {Isa::kI8mm, Isa::kNeon, Isa::kAvx512, Isa::kAvxVnni, Isa::kAvx2};
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
  for (int i = 0; i < kCount; ++i) {
    if (std::strcmp(wanted, kNames[i]) != 0) continue;
    const Isa isa = static_cast<Isa>(i);
    if (has(isa)) return {isa, nullptr};
    return {best(), "OUTRIDER_ISA names instructions that this processor lacks; unset it, or set it to plain"};
  }
  return {best(), "OUTRIDER_ISA must be plain, avx2, avxvnni, avx512 or amx, or on arm64 plain, neon or i8mm"};
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
