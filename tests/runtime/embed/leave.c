/* leave PLAN MILLISECONDS FROM: ends with 3 while requests are served and a session generates: by returning from main, or
 * by exit() from a callback or a function of logits. Prints when, in milliseconds. */
#include <pthread.h>
#include <unistd.h>

#include "check.h"

static void *generate(void *session) {
  outrider_params *params = params_of(150);
  outrider_result *result = NULL;
  EXPECT_OK(outrider_generate(session, "import", 6, params, NULL, NULL, &result));
  return NULL;
}

static void notified(void *user, outrider_request *request) { (void)user, (void)request; }

static void print_time(void) {
  struct timespec now;
  EXPECT(clock_gettime(CLOCK_REALTIME, &now) == 0);
  printf("%lld\n", (long long)now.tv_sec * 1000 + now.tv_nsec / 1000000);
}

static int32_t leave_span(void *user, const int64_t *tokens, size_t count, const char *text, size_t length) {
  (void)user, (void)tokens, (void)count, (void)text, (void)length;
  print_time();
  exit(3);
}

static int32_t leave_logits(void *user, const int64_t *tokens, size_t count, float *logits, size_t vocabulary) {
  (void)user, (void)tokens, (void)logits, (void)vocabulary;
  if (count < 3) return OUTRIDER_CONTINUE;
  print_time();
  exit(3);
}

int main(int count, char **words) {
  EXPECT(count == 4);
  outrider_runtime *runtime = open_plan(words[1]);
  outrider_params *params = params_of(150);
  pthread_t thread;
  for (int i = 0; i < 20; ++i) submit(runtime, params, notified, NULL);
  EXPECT_OK(outrider_runtime_close(runtime));
  runtime = open_plan(words[1]);
  submit(runtime, params, notified, NULL);
  EXPECT(pthread_create(&thread, NULL, generate, create_session(runtime)) == 0);
  pause_for(strtol(words[2], NULL, 10));
  outrider_result *result = NULL;
  if (strcmp(words[3], "callback") == 0) {
    outrider_session *session = create_session(runtime);
    EXPECT_OK(outrider_generate(session, "import", 6, params, leave_span, NULL, &result));
  }
  if (strcmp(words[3], "logits") == 0) {
    EXPECT_OK(outrider_params_add_logits_processor(params, leave_logits, NULL));
    EXPECT_OK(outrider_request_result(submit(runtime, params, notified, NULL), -1, &result));
    pause();
  }
  print_time();
  return 3;
}
