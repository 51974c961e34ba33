/* Functions of the program's, called so that no C++ exception of theirs gets past. */
#pragma once

#include "outrider.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct {
  outrider_on_span on_span; /* one of the two */
  outrider_on_branch on_branch;
  void *user;
  int threw;
  char what[512];
} outrider_callback;

/* `callback` is an outrider_callback; where it threw, `what` says what, and it is not called again. */
int32_t outrider_call_back(void *callback, const int64_t *tokens, size_t count, const char *text, size_t length);
int32_t outrider_call_branch_back(void *callback, size_t branch, const int64_t *tokens, size_t count, const char *text,
                                  size_t length);

/* A function of any type, as the other side of the bridge keeps it. */
typedef void (*outrider_function)(void);

/* `function` is an outrider_on_ready, or an outrider_on_logits, whose number is returned. Where it threw, `what` of
 * `size` bytes, which is empty otherwise, says what. */
int32_t outrider_call_ready(outrider_function function, void *user, uint64_t request, char *what, size_t size);
int32_t outrider_call_logits(outrider_function function, void *user, const int64_t *tokens, size_t count, float *logits,
                             size_t vocabulary, char *what, size_t size);

#ifdef __cplusplus
}
#endif
