/* sessions PLAN: what generations give, callbacks that stop, cancelling, and sessions in threads. */
#include <pthread.h>
#include <time.h>

#include "check.h"

static void pause_for(long milliseconds) {
  const struct timespec time = {milliseconds / 1000, milliseconds % 1000 * 1000000};
  nanosleep(&time, NULL);
}

struct seen {
  int64_t tokens[4096];
  size_t count;
  char text[65536];
  size_t length;
  int spans;
  int stop_at;
  outrider_session *cancel;
};

static int32_t collect(void *user, const int64_t *tokens, size_t count, const char *text, size_t length) {
  struct seen *seen = user;
  EXPECT(text[length] == '\0');
  memcpy(seen->tokens + seen->count, tokens, count * sizeof *tokens);
  memcpy(seen->text + seen->length, text, length);
  seen->count += count;
  seen->length += length;
  ++seen->spans;
  if (seen->cancel != NULL) EXPECT_OK(outrider_session_cancel(seen->cancel));
  return seen->spans == seen->stop_at ? OUTRIDER_STOP : OUTRIDER_CONTINUE;
}

static void same(outrider_result *result, const struct seen *seen) {
  const int64_t *tokens;
  const char *text;
  size_t count, length;
  EXPECT_OK(outrider_result_tokens(result, &tokens, &count));
  EXPECT_OK(outrider_result_text(result, &text, &length));
  EXPECT(count == seen->count && memcmp(tokens, seen->tokens, count * sizeof *tokens) == 0);
  EXPECT(length == seen->length && memcmp(text, seen->text, length) == 0 && text[length] == '\0');
}

static int32_t reason_of(outrider_result *result) {
  int32_t reason = -1;
  EXPECT_OK(outrider_result_finish_reason(result, &reason));
  return reason;
}

static void results(outrider_runtime *runtime) {
  outrider_session *session = create_session(runtime);
  outrider_params *params = params_of(20);
  outrider_result *result = NULL;
  static struct seen seen;
  EXPECT_OK(outrider_generate(session, "import", 6, params, collect, &seen, &result));
  same(result, &seen);
  EXPECT(reason_of(result) == OUTRIDER_LENGTH && seen.count == 20);
  const char *stats;
  size_t length, prompt;
  EXPECT_OK(outrider_result_stats(result, &stats, &length));
  EXPECT(strlen(stats) == length && strstr(stats, "\"new_tokens\": 20") != NULL);
  char told[40];
  EXPECT_OK(outrider_count_tokens(runtime, "import", 6, &prompt));
  snprintf(told, sizeof told, "\"prompt_tokens\": %zu,", prompt);
  EXPECT(prompt > 0 && strstr(stats, told) != NULL);
  EXPECT_OK(outrider_result_destroy(result));

  static struct seen drawn[2];
  outrider_params *sampled = params_of(20);
  EXPECT_OK(outrider_params_set_double(sampled, "temperature", 11, 0.9));
  for (int turn = 0; turn < 2; ++turn) { /* the second with the seed of the first */
    uint64_t seed;
    EXPECT_OK(outrider_session_reset(session));
    EXPECT_OK(outrider_generate(session, "import", 6, sampled, collect, &drawn[turn], &result));
    EXPECT_OK(outrider_result_seed(result, &seed));
    EXPECT_OK(outrider_params_set_uint(sampled, "seed", 4, seed));
    EXPECT_OK(outrider_result_destroy(result));
  }
  EXPECT(memcmp(drawn[0].tokens, drawn[1].tokens, drawn[0].count * sizeof *drawn[0].tokens) == 0);
  EXPECT_OK(outrider_params_destroy(sampled));

  static struct seen stopped, cancelled;
  stopped.stop_at = 2;
  EXPECT_OK(outrider_generate(session, "import", 6, params, collect, &stopped, &result));
  EXPECT(reason_of(result) == OUTRIDER_CANCELLED && stopped.count < 20);
  same(result, &stopped);
  EXPECT_OK(outrider_result_destroy(result));
  cancelled.cancel = session;
  EXPECT_OK(outrider_generate(session, "import", 6, params, collect, &cancelled, &result));
  EXPECT(reason_of(result) == OUTRIDER_CANCELLED && cancelled.count < 20);
  EXPECT_OK(outrider_result_destroy(result));

  EXPECT_OK(outrider_session_reset(session));
  EXPECT_OK(outrider_params_add_text(params, "stop", 4, "\n", 1));
  EXPECT_OK(outrider_params_add_text(params, "stop", 4, "e", 1));
  EXPECT_OK(outrider_params_set_int(params, "max_new_tokens", 14, 100));
  EXPECT_OK(outrider_generate(session, "import", 6, params, NULL, NULL, &result));
  EXPECT_OK(outrider_result_text(result, &stats, &length));
  EXPECT(strchr(stats, '\n') == NULL && strchr(stats, 'e') == NULL);
  EXPECT_OK(outrider_result_destroy(result));
  EXPECT_OK(outrider_params_destroy(params));

  EXPECT_OK(outrider_session_destroy(session));
}

static void inspected(const char *plan) {
  outrider_text *text = NULL;
  const char *data;
  size_t length;
  EXPECT_OK(outrider_plan_inspect(plan, strlen(plan), &text));
  EXPECT_OK(outrider_text_get(text, &data, &length));
  EXPECT(length > 100 && data[0] == '{' && strstr(data, "\"onnxruntime-cpu\"") != NULL);
  EXPECT_OK(outrider_text_destroy(text));
}

struct worker {
  outrider_session *session;
  int64_t seed;
  struct seen seen;
};

static void sample(outrider_session *session, int64_t seed, struct seen *seen) {
  outrider_params *params = params_of(60);
  outrider_result *result = NULL;
  EXPECT_OK(outrider_params_set_int(params, "seed", 4, seed));
  EXPECT_OK(outrider_params_set_double(params, "temperature", 11, 0.9));
  EXPECT_OK(outrider_generate(session, "def main", 8, params, collect, seen, &result));
  same(result, seen);
  EXPECT_OK(outrider_result_destroy(result));
  EXPECT_OK(outrider_params_destroy(params));
}

static void *work(void *given) {
  struct worker *worker = given;
  EXPECT(strcmp(outrider_last_error(), "") == 0); /* each thread has its own */
  sample(worker->session, worker->seed, &worker->seen);
  EXPECT(outrider_session_reset(NULL) == OUTRIDER_INVALID_HANDLE);
  return NULL;
}

static void threads(outrider_runtime *runtime) {
  static struct worker workers[2];
  static struct seen alone[2];
  pthread_t thread[2];
  for (int i = 0; i < 2; ++i) {
    outrider_session *session = create_session(runtime);
    sample(session, 10 + i, &alone[i]);
    EXPECT_OK(outrider_session_destroy(session));
    workers[i].session = create_session(runtime);
    workers[i].seed = 10 + i;
  }
  for (int i = 0; i < 2; ++i) EXPECT(pthread_create(&thread[i], NULL, work, &workers[i]) == 0);
  for (int i = 0; i < 2; ++i) {
    EXPECT(pthread_join(thread[i], NULL) == 0);
    EXPECT(workers[i].seen.count == alone[i].count);
    EXPECT(memcmp(workers[i].seen.tokens, alone[i].tokens, sizeof(int64_t) * alone[i].count) == 0);
    EXPECT_OK(outrider_session_destroy(workers[i].session));
  }
}

static int32_t slow(void *user, const int64_t *tokens, size_t count, const char *text, size_t length) {
  (void)tokens, (void)count, (void)text, (void)length;
  __atomic_add_fetch((int *)user, 1, __ATOMIC_RELEASE);
  pause_for(20);
  return OUTRIDER_CONTINUE;
}

static int slow_spans;

static void *generate_slowly(void *session) {
  outrider_params *params = params_of(100);
  outrider_result *result = NULL;
  EXPECT_OK(outrider_params_set_text(params, "drafter", 7, "none", 4));
  EXPECT_OK(outrider_generate(session, "import", 6, params, slow, &slow_spans, &result));
  EXPECT(reason_of(result) == OUTRIDER_CANCELLED);
  EXPECT_OK(outrider_result_destroy(result));
  EXPECT_OK(outrider_params_destroy(params));
  return NULL;
}

static void *cancel(void *session) {
  while (__atomic_load_n(&slow_spans, __ATOMIC_ACQUIRE) < 3) pause_for(1);
  outrider_result *result = NULL;
  EXPECT_FAILURE(outrider_generate(session, "a", 1, NULL, NULL, NULL, &result), OUTRIDER_BUSY, "generating already");
  EXPECT_FAILURE(outrider_session_reset(session), OUTRIDER_BUSY, "generating already");
  EXPECT_OK(outrider_session_cancel(session));
  return NULL;
}

static void cancelled_from_another_thread(outrider_runtime *runtime) {
  outrider_session *session = create_session(runtime);
  pthread_t generating, cancelling;
  EXPECT(pthread_create(&generating, NULL, generate_slowly, session) == 0);
  EXPECT(pthread_create(&cancelling, NULL, cancel, session) == 0);
  EXPECT(pthread_join(cancelling, NULL) == 0);
  EXPECT(pthread_join(generating, NULL) == 0);
  EXPECT(slow_spans < 90);
  EXPECT_OK(outrider_session_cancel(session)); /* nothing to cancel */
  EXPECT_OK(outrider_session_destroy(session));
}

static void *generate_and_lose(void *given) {
  outrider_session *session = *(outrider_session **)given;
  outrider_params *params = params_of(30);
  outrider_result *result = NULL;
  EXPECT_OK(outrider_generate(session, "import", 6, params, slow, &slow_spans, &result));
  EXPECT(reason_of(result) == OUTRIDER_LENGTH);
  EXPECT_OK(outrider_result_destroy(result));
  EXPECT_OK(outrider_params_destroy(params));
  return NULL;
}

static void destroyed_while_it_generates(outrider_runtime *runtime) {
  outrider_session *session = create_session(runtime);
  pthread_t generating;
  slow_spans = 0;
  EXPECT(pthread_create(&generating, NULL, generate_and_lose, &session) == 0);
  while (__atomic_load_n(&slow_spans, __ATOMIC_ACQUIRE) < 1) pause_for(1);
  EXPECT_OK(outrider_session_destroy(session));
  BAD_HANDLE(outrider_session_cancel(session), "destroyed");
  EXPECT(pthread_join(generating, NULL) == 0);
}

static void logits_changed(outrider_runtime *runtime) {
  outrider_session *session = create_session(runtime);
  outrider_params *params = params_of(12);
  EXPECT_OK(outrider_params_add_int(params, "allowed_token_ids", 17, 40));
  EXPECT_OK(outrider_params_add_int(params, "allowed_token_ids", 17, 41));
  EXPECT_OK(outrider_params_set_text(params, "logit_bias", 10, "{\"40\": 100, \"41\": -0.5}", 23));
  BAD_ARGUMENT(outrider_params_set_text(params, "logit_bias", 10, "5", 1), "JSON object");
  outrider_result *result = NULL;
  const int64_t *tokens;
  size_t count;
  EXPECT_OK(outrider_generate(session, "import", 6, params, NULL, NULL, &result));
  EXPECT_OK(outrider_result_tokens(result, &tokens, &count));
  for (size_t i = 0; i < count; ++i) EXPECT(tokens[i] == 40);
  EXPECT_OK(outrider_result_destroy(result));
  EXPECT_OK(outrider_params_set_double(params, "presence_penalty", 16, 2.5));
  BAD_REQUEST(outrider_generate(session, "a", 1, params, NULL, NULL, &result), "from -2 to 2");
  EXPECT_OK(outrider_params_destroy(params));
  EXPECT_OK(outrider_session_destroy(session));
}

int main(int count, char **words) {
  EXPECT(count == 2);
  inspected(words[1]);
  outrider_runtime *runtime = open_plan(words[1]);
  results(runtime);
  logits_changed(runtime);
  threads(runtime);
  cancelled_from_another_thread(runtime);
  destroyed_while_it_generates(runtime);
  EXPECT_OK(outrider_runtime_close(runtime));
  puts("ok");
  return EXIT_SUCCESS;
}
