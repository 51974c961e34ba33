// Marks a hot loop to be compiled once per vector width and picked at load. With contraction off all clones give the
// same bits.
#pragma once

#include <cstdlib>  // defines __GLIBC__, whose loader resolves the clones

#if defined(__x86_64__) && defined(__ELF__) && defined(__GLIBC__) && defined(__GNUC__) && \
    (!defined(__clang__) || __clang_major__ >= 14)
#define OUTRIDER_CLONES __attribute__((target_clones("avx512f", "avx2", "default")))
#else
#define OUTRIDER_CLONES
#endif
