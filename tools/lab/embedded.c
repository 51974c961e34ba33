/* embedded PLAN PROMPT NEW: a generation for each line that comes in, by a callback that is given every span. A line
   goes out when it is ready, and one for each with its milliseconds a token. */
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
  if (count != 4) return EXIT_FAILURE;
  outrider_runtime *runtime = NULL;
  outrider_session *session = NULL;
  outrider_params *params = NULL;
  check(outrider_runtime_open(words[1], strlen(words[1]), NULL, 0, &runtime));
  check(outrider_session_create(runtime, &session));
  check(outrider_params_create(&params));
  check(outrider_params_set_int(params, "max_new_tokens", 14, strtol(words[3], NULL, 10)));
  check(outrider_params_set_bool(params, "ignore_eos", 10, 1));
  check(outrider_params_set_text(params, "drafter", 7, "none", 4));
  char line[16];
  for (puts("ready"), fflush(stdout); fgets(line, sizeof line, stdin) != NULL; fflush(stdout)) {
    outrider_result *result = NULL;
    size_t tokens = 0;
    check(outrider_session_reset(session));
    const double started = milliseconds();
    check(outrider_generate(session, words[2], strlen(words[2]), params, count_tokens, &tokens, &result));
    printf("%.6f\n", (milliseconds() - started) / (double)tokens);
    check(outrider_result_destroy(result));
  }
  check(outrider_params_destroy(params));
  check(outrider_session_destroy(session));
  check(outrider_runtime_close(runtime));
  return EXIT_SUCCESS;
}
