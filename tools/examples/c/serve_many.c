/* Continues every line of its input with a plan, all at once, in one thread that waits for a pipe:
 *
 *   ./serve_many PLAN [MAX_NEW_TOKENS] < PROMPTS
 *
 * A text is printed when it is complete, with its line's number and the sum of its tokens' log-probabilities. A plan of
 * several branches decodes several lines in each pass.
 */
#include <outrider.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { MOST = 256 };

static void check(outrider_status status) {
  if (status == OUTRIDER_OK) return;
  fprintf(stderr, "error %d: %s\n", (int)status, outrider_last_error());
  exit(EXIT_FAILURE);
}

/* Runs in a thread of the library's: it says which request has news, and leaves the rest to the loop below. */
static void write_down(void *user, outrider_request *request) {
  if (write(*(const int *)user, &request, sizeof request) != (ssize_t)sizeof request) abort();
}

static void print_result(size_t line, outrider_request *request) {
  outrider_result *result = NULL;
  const outrider_logprobs *logprobs;
  const char *text;
  size_t length;
  double sum = 0;
  check(outrider_request_result(request, 0, &result));
  check(outrider_result_text(result, &text, &length));
  check(outrider_result_logprobs(result, &logprobs));
  for (size_t i = 0; i < logprobs->count; ++i) sum += logprobs->logprobs[i];
  printf("%zu (%.3f): ", line, sum);
  fwrite(text, 1, length, stdout);
  putchar('\n');
  check(outrider_result_destroy(result));
}

int main(int count, char **words) {
  if (count < 2) {
    fprintf(stderr, "usage: %s PLAN [MAX_NEW_TOKENS] < PROMPTS\n", words[0]);
    return EXIT_FAILURE;
  }
  int ends[2];
  outrider_runtime *runtime = NULL;
  outrider_params *params = NULL;
  outrider_request *requests[MOST] = {NULL};
  if (pipe(ends) != 0) return EXIT_FAILURE;
  check(outrider_runtime_open(words[1], strlen(words[1]), NULL, 0, &runtime));
  check(outrider_params_create(&params));
  check(outrider_params_set_int(params, "logprobs", 8, 0));
  if (count > 2) check(outrider_params_set_int(params, "max_new_tokens", 14, strtoll(words[2], NULL, 10)));

  char line[4096];
  size_t lines = 0;
  for (; lines < MOST && fgets(line, sizeof line, stdin) != NULL; ++lines) {
    check(outrider_submit(runtime, line, strlen(line), params, write_down, &ends[1], &requests[lines]));
  }
  for (size_t left = lines; left > 0;) {
    struct pollfd news = {.fd = ends[0], .events = POLLIN}; /* where other descriptors would be waited for too */
    outrider_request *request;
    if (poll(&news, 1, -1) != 1 || read(ends[0], &request, sizeof request) != (ssize_t)sizeof request) abort();
    const outrider_span *span = NULL;
    const outrider_status status = outrider_request_next(request, 0, &span);
    if (status == OUTRIDER_TIMEOUT || status == OUTRIDER_INVALID_HANDLE) continue; /* old news */
    check(status);
    if (!span->over) continue; /* span->text could be shown meanwhile */
    for (size_t i = 0; i < lines; ++i) {
      if (requests[i] == request) print_result(i + 1, request);
    }
    check(outrider_request_destroy(request));
    --left;
  }
  check(outrider_params_destroy(params));
  check(outrider_runtime_close(runtime));
  return EXIT_SUCCESS;
}
