// Instruction sets, of which a machine's best is taken.
#pragma once

namespace outrider::engine {

// Of x86-64, and after them of arm64. All but kPlain have AVX2, FMA and F16C, or NEON with dot products. AVX512: with
// foundation and DQ, not always with VNNI, nor with that of AVX. AMX: with tiles of int8, and AVX-512's VNNI.
enum class Isa { kPlain, kAvx2, kAvxVnni, kAvx512, kAmx, kNeon, kI8mm };

// The best of this machine, or the one that OUTRIDER_ISA names in the environment.
Isa isa_here();

// Null, or why OUTRIDER_ISA cannot be obeyed.
const char* isa_refused();

// Whether this machine's AVX-512 multiplies integers of 8 bits.
bool has_avx512_vnni();

}  // namespace outrider::engine
