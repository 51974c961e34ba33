/* embedded PLAN PROMPT NEW RUNS: milliseconds of each generation, by a callback that is given every span; a line each. */
#include <outrider.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

static void check(outrider_status status) {
  if (status == OUTRIDER_OK) return;
  fprintf(stderr, "%s\n", outrider_last_error());
  exit(EXIT_FAILURE);
}

static int32_t count_tokens(void *user, const int64_t *tokens, size_t count, const char *text, size_t length) {
  (void)tokens, (void)text, (void)length;
  *(size_t *)user += count;
  return OUTRIDER_CONTINUE;
}

static double milliseconds(void) {
  struct timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return 1e3 * (double)now.tv_sec + 1e-6 * (double)now.tv_nsec;
}

int main(int count, char **words) {
  if (count != 5) return EXIT_FAILURE;
  const long runs = strtol(words[4], NULL, 10);
  outrider_runtime *runtime = NULL;
  outrider_session *session = NULL;
  outrider_params *params = NULL;
  check(outrider_runtime_open(words[1], strlen(words[1]), NULL, 0, &runtime));
  check(outrider_session_create(runtime, &session));
  check(outrider_params_create(&params));
  check(outrider_params_set_int(params, "max_new_tokens", 14, strtol(words[3], NULL, 10)));
  check(outrider_params_set_bool(params, "ignore_eos", 10, 1));
  check(outrider_params_set_text(params, "drafter", 7, "none", 4));
  for (long run = 0; run <= runs; ++run) { /* the first warms up */
    outrider_result *result = NULL;
    size_t tokens = 0;
    check(outrider_session_reset(session));
    const double started = milliseconds();
    check(outrider_generate(session, words[2], strlen(words[2]), params, count_tokens, &tokens, &result));
    if (run > 0) printf("%.6f\n", (milliseconds() - started) / (double)tokens);
    check(outrider_result_destroy(result));
  }
  check(outrider_params_destroy(params));
  check(outrider_session_destroy(session));
  check(outrider_runtime_close(runtime));
  return EXIT_SUCCESS;
}
