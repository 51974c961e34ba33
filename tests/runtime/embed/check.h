/* Expectations of the C tests: the first that fails is told, with its place, and ends the program. */
#pragma once

#include <outrider.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define EXPECT(condition)                                                                               \
  do {                                                                                                  \
    if (!(condition)) {                                                                                 \
      fprintf(stderr, "%s:%d: not so: %s; last error: %s\n", __FILE__, __LINE__, #condition, outrider_last_error()); \
      exit(EXIT_FAILURE);                                                                               \
    }                                                                                                   \
  } while (0)

#define EXPECT_OK(call) EXPECT((call) == OUTRIDER_OK)

/* The call fails with `status`, and what it says contains `part`. */
#define EXPECT_FAILURE(call, status, part)                     \
  do {                                                         \
    EXPECT((call) == (status));                                \
    EXPECT(strstr(outrider_last_error(), (part)) != NULL);     \
  } while (0)

#define BAD_HANDLE(call, part) EXPECT_FAILURE(call, OUTRIDER_INVALID_HANDLE, part)
#define BAD_ARGUMENT(call, part) EXPECT_FAILURE(call, OUTRIDER_INVALID_ARGUMENT, part)
#define BAD_REQUEST(call, part) EXPECT_FAILURE(call, OUTRIDER_REQUEST, part)

static inline outrider_runtime *open_plan(const char *plan) {
  outrider_runtime *runtime = NULL;
  EXPECT_OK(outrider_runtime_open(plan, strlen(plan), "{\"threads\": 1}", 14, &runtime));
  EXPECT(runtime != NULL);
  return runtime;
}

static inline outrider_session *create_session(outrider_runtime *runtime) {
  outrider_session *session = NULL;
  EXPECT_OK(outrider_session_create(runtime, &session));
  EXPECT(session != NULL);
  return session;
}

static inline outrider_params *params_of(int64_t max_new_tokens) {
  outrider_params *params = NULL;
  EXPECT_OK(outrider_params_create(&params));
  EXPECT_OK(outrider_params_set_int(params, "max_new_tokens", 14, max_new_tokens));
  EXPECT_OK(outrider_params_set_bool(params, "ignore_eos", 10, 1));
  return params;
}
