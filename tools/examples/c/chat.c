/* Reads a line, continues it with a plan, and prints the text as it is committed:
 *
 *   ./chat PLAN [MAX_NEW_TOKENS [TEMPERATURE [SEED]]]
 *
 * Every line continues after what was said before. An empty line starts over, the end of input leaves.
 */
#include <outrider.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static void check(outrider_status status) {
  if (status == OUTRIDER_OK) return;
  fprintf(stderr, "error %d: %s\n", (int)status, outrider_last_error());
  exit(EXIT_FAILURE);
}

static int32_t print_span(void *user, const int64_t *tokens, size_t count, const char *text, size_t length) {
  (void)user, (void)tokens, (void)count;
  fwrite(text, 1, length, stdout);
  fflush(stdout);
  return OUTRIDER_CONTINUE;
}

static size_t read_line(char *line, size_t size) {
  if (fgets(line, (int)size, stdin) == NULL) return 0;
  return strlen(line);
}

int main(int count, char **words) {
  if (count < 2) {
    fprintf(stderr, "usage: %s PLAN [MAX_NEW_TOKENS [TEMPERATURE [SEED]]]\n", words[0]);
    return EXIT_FAILURE;
  }
  outrider_runtime *runtime = NULL;
  outrider_session *session = NULL;
  outrider_params *params = NULL;
  check(outrider_runtime_open(words[1], strlen(words[1]), NULL, 0, &runtime));
  check(outrider_session_create(runtime, &session));
  check(outrider_params_create(&params));
  if (count > 2) check(outrider_params_set_int(params, "max_new_tokens", 14, strtoll(words[2], NULL, 10)));
  if (count > 3) check(outrider_params_set_double(params, "temperature", 11, strtod(words[3], NULL)));
  if (count > 4) check(outrider_params_set_uint(params, "seed", 4, strtoull(words[4], NULL, 10)));

  char line[4096];
  for (size_t length = read_line(line, sizeof line); length > 0; length = read_line(line, sizeof line)) {
    if (line[0] == '\n') {
      check(outrider_session_reset(session));
      continue;
    }
    outrider_result *result = NULL;
    check(outrider_generate(session, line, length, params, print_span, NULL, &result));
    putchar('\n');
    check(outrider_result_destroy(result));
  }
  check(outrider_params_destroy(params));
  check(outrider_session_destroy(session));
  check(outrider_runtime_close(runtime));
  return EXIT_SUCCESS;
}
