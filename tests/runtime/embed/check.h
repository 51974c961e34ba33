/* Expectations of the C tests: the first that fails is printed with its place, and ends the program. */
#pragma once

#include <outrider.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

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

/* `OWN(kind) name`: a handle that is destroyed where its scope ends; NULL, and one that a test has set to NULL, too. */
#define OWN(kind) __attribute__((cleanup(destroy_##kind))) outrider_##kind *
#define DESTROY(kind, call) \
  static inline void destroy_##kind(outrider_##kind **handle) { EXPECT_OK(call(*handle)); }
DESTROY(runtime, outrider_runtime_close)
DESTROY(session, outrider_session_destroy)
DESTROY(params, outrider_params_destroy)
DESTROY(result, outrider_result_destroy)
DESTROY(text, outrider_text_destroy)
DESTROY(branches, outrider_branches_destroy)
DESTROY(request, outrider_request_destroy)

static inline outrider_runtime *open_with(const char *plan, const char *options) {
  outrider_runtime *runtime = NULL;
  EXPECT_OK(outrider_runtime_open(plan, strlen(plan), options, strlen(options), &runtime));
  EXPECT(runtime != NULL);
  return runtime;
}

static inline outrider_runtime *open_plan(const char *plan) { return open_with(plan, "{\"threads\": 1}"); }

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

static inline outrider_request *submit(outrider_runtime *runtime, const outrider_params *params,
                                       outrider_on_ready on_ready, void *user) {
  outrider_request *request = NULL;
  EXPECT_OK(outrider_submit(runtime, "import", 6, params, on_ready, user, &request));
  EXPECT(request != NULL);
  return request;
}

static inline int32_t reason_of(const outrider_result *result) {
  int32_t reason = -1;
  EXPECT_OK(outrider_result_finish_reason(result, &reason));
  return reason;
}

static inline void pause_for(long milliseconds) {
  const struct timespec time = {milliseconds / 1000, milliseconds % 1000 * 1000000};
  nanosleep(&time, NULL);
}

static inline uint64_t draw(uint64_t *state, uint64_t below) { /* splitmix64 */
  uint64_t z = (*state += 0x9e3779b97f4a7c15u);
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
  z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
  return (z ^ (z >> 31)) % below;
}
