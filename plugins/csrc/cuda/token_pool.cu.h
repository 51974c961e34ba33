// The token pool: the next token of each branch goes from one round to the following one without the host, which may
// lay out a step before it has seen the tokens of the step before.
#pragma once

#include "block.h"

namespace outrider {

// The pool's row of a branch; tokens of no branch share the last row.
OUTRIDER_DEVICE i64 pool_row(i64 branch, i64 rows) { return branch >= 0 && branch < rows - 1 ? branch : rows - 1; }

// pool: i64 [rows, length]. Puts a token of the pool at each of count places where the host has none (-1).
OUTRIDER_KERNEL outrider_take_tokens(const i64* pool, const i64* positions, const i64* branch, i64* token_ids, i64 count,
                                     i64 rows, i64 length) {
  follow();
  for (i64 i = thread_index(); i < count; i += thread_count()) {
    const i64 position = positions[i];
    if (token_ids[i] >= 0 || position < 0 || position >= length) continue;
    token_ids[i] = pool[pool_row(branch[i], rows) * length + position];
  }
}

// Keeps the count tokens that were committed in the pool, each after the token that it was chosen by.
OUTRIDER_KERNEL outrider_keep_tokens(i64* pool, const i64* committed, const i64* logit_indices, const i64* positions,
                                     const i64* branch, i64 count, i64 rows, i64 length) {
  follow();
  for (i64 m = thread_index(); m < count; m += thread_count()) {
    const i64 token = logit_indices[m];
    const i64 position = positions[token] + 1;
    // After a fault nothing was committed there, and the pool's next reader must still find a token.
    if (position > 0 && position < length) {
      pool[pool_row(branch[token], rows) * length + position] = committed[m] < 0 ? 0 : committed[m];
    }
  }
}

}  // namespace outrider
