/* A callback of the caller's, called so that no C++ exception of its own gets past it. */
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

#ifdef __cplusplus
}
#endif
