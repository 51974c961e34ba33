/* sessions PLAN: what generations give, callbacks that stop, cancelling, and sessions in threads. */
#include <pthread.h>

#include "check.h"

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

/* Generates after "import" and returns what the result has, which has to be what `collect` has seen. */
static outrider_result *generate(outrider_session *session, const outrider_params *params, struct seen *seen) {
  outrider_result *result = NULL;
  const int64_t *tokens;
  const char *text;
  size_t count, length;
  EXPECT_OK(outrider_generate(session, "import", 6, params, collect, seen, &result));
  EXPECT_OK(outrider_result_tokens(result, &tokens, &count));
  EXPECT_OK(outrider_result_text(result, &text, &length));
  EXPECT(count == seen->count && memcmp(tokens, seen->tokens, count * sizeof *tokens) == 0);
  EXPECT(length == seen->length && memcmp(text, seen->text, length) == 0 && text[length] == '\0');
  return result;
}

static void results(outrider_runtime *runtime) {
  static struct seen seen, stopped, cancelled, same;
  OWN(session) session = create_session(runtime);
  OWN(params) params = params_of(20);
  OWN(result) whole = generate(session, params, &seen);
  EXPECT(reason_of(whole) == OUTRIDER_LENGTH && seen.count == 20);
  const char *stats, *text;
  char said[40];
  size_t length, prompt;
  EXPECT_OK(outrider_result_stats(whole, &stats, &length));
  EXPECT(strlen(stats) == length && strstr(stats, "\"new_tokens\": 20") != NULL);
  EXPECT_OK(outrider_count_tokens(runtime, "import", 6, &prompt));
  snprintf(said, sizeof said, "\"prompt_tokens\": %zu,", prompt);
  EXPECT(prompt > 0 && strstr(stats, said) != NULL);

  stopped.stop_at = 2;
  OWN(result) first = generate(session, params, &stopped);
  EXPECT(reason_of(first) == OUTRIDER_CANCELLED && stopped.count < 20);
  cancelled.cancel = session;
  OWN(result) second = generate(session, params, &cancelled);
  EXPECT(reason_of(second) == OUTRIDER_CANCELLED && cancelled.count < 20);

  EXPECT_OK(outrider_session_reset(session));
  EXPECT_OK(outrider_params_add_text(params, "stop", 4, "\n", 1));
  EXPECT_OK(outrider_params_add_text(params, "stop", 4, "e", 1));
  EXPECT_OK(outrider_params_set_int(params, "max_new_tokens", 14, 100));
  OWN(result) last = NULL;
  EXPECT_OK(outrider_generate(session, "import", 6, params, NULL, NULL, &last));
  EXPECT_OK(outrider_result_text(last, &text, &length));
  EXPECT(strchr(text, '\n') == NULL && strchr(text, 'e') == NULL);

  OWN(params) allowed = params_of(5);
  EXPECT_OK(outrider_params_add_int(allowed, "allowed_token_ids", 17, 40));
  EXPECT_OK(outrider_params_add_int(allowed, "allowed_token_ids", 17, 41));
  EXPECT_OK(outrider_params_set_text(allowed, "logit_bias", 10, "{\"40\": 100}", 11));
  OWN(result) biased = generate(session, allowed, &same);
  EXPECT(reason_of(biased) == OUTRIDER_LENGTH && same.count == 5);
  for (int i = 0; i < 5; ++i) EXPECT(same.tokens[i] == 40);
}

static void inspected(const char *plan) {
  OWN(text) text = NULL;
  const char *data;
  size_t length;
  EXPECT_OK(outrider_plan_inspect(plan, strlen(plan), &text));
  EXPECT_OK(outrider_text_get(text, &data, &length));
  EXPECT(length > 100 && data[0] == '{' && strstr(data, "\"onnxruntime-cpu\"") != NULL);
}

struct worker {
  outrider_session *session;
  uint64_t seed; /* 0: a new one, which the result has */
  struct seen seen;
};

static void *sample(void *given) {
  struct worker *worker = given;
  OWN(params) params = params_of(60);
  EXPECT_OK(outrider_params_set_double(params, "temperature", 11, 0.9));
  if (worker->seed) EXPECT_OK(outrider_params_set_uint(params, "seed", 4, worker->seed));
  OWN(result) result = generate(worker->session, params, &worker->seen);
  EXPECT_OK(outrider_result_seed(result, &worker->seed));
  EXPECT_OK(outrider_session_destroy(worker->session));
  return NULL;
}

/* Sessions in threads draw the tokens that their seeds have alone; each thread has its own last error. */
static void threads(outrider_runtime *runtime) {
  static struct worker workers[2], alone[2];
  pthread_t thread[2];
  EXPECT(outrider_session_reset(NULL) == OUTRIDER_INVALID_HANDLE);
  for (int i = 0; i < 2; ++i) {
    alone[i].session = create_session(runtime);
    sample(&alone[i]);
    workers[i].session = create_session(runtime);
    workers[i].seed = alone[i].seed;
  }
  for (int i = 0; i < 2; ++i) EXPECT(pthread_create(&thread[i], NULL, sample, &workers[i]) == 0);
  for (int i = 0; i < 2; ++i) {
    EXPECT(pthread_join(thread[i], NULL) == 0);
    EXPECT(workers[i].seen.count == alone[i].seen.count && alone[i].seen.count == 60);
    EXPECT(memcmp(workers[i].seen.tokens, alone[i].seen.tokens, sizeof(int64_t) * 60) == 0);
  }
}

static int slow_spans;

static int32_t slow(void *user, const int64_t *tokens, size_t count, const char *text, size_t length) {
  (void)user, (void)tokens, (void)count, (void)text, (void)length;
  __atomic_add_fetch(&slow_spans, 1, __ATOMIC_RELEASE);
  pause_for(20);
  return OUTRIDER_CONTINUE;
}

static void *generate_slowly(void *given) {
  outrider_session *session = given;
  EXPECT(strcmp(outrider_last_error(), "") == 0);
  OWN(params) params = params_of(40);
  OWN(result) result = NULL;
  EXPECT_OK(outrider_params_set_text(params, "drafter", 7, "none", 4));
  EXPECT_OK(outrider_generate(session, "import", 6, params, slow, NULL, &result));
  return (void *)(intptr_t)reason_of(result);
}

/* Cancels, or destroys, the session of a thread that generates; why its generation ended. */
static int32_t ended(outrider_runtime *runtime, int destroyed) {
  outrider_session *session = create_session(runtime);
  outrider_result *result = NULL;
  pthread_t generating;
  void *reason;
  slow_spans = 0;
  EXPECT(pthread_create(&generating, NULL, generate_slowly, session) == 0);
  while (__atomic_load_n(&slow_spans, __ATOMIC_ACQUIRE) < 3) pause_for(1);
  EXPECT_FAILURE(outrider_generate(session, "a", 1, NULL, NULL, NULL, &result), OUTRIDER_BUSY, "generating already");
  EXPECT_FAILURE(outrider_session_reset(session), OUTRIDER_BUSY, "generating already");
  EXPECT_OK(destroyed ? outrider_session_destroy(session) : outrider_session_cancel(session));
  EXPECT(pthread_join(generating, &reason) == 0);
  if (destroyed) {
    BAD_HANDLE(outrider_session_cancel(session), "destroyed");
  } else {
    EXPECT_OK(outrider_session_cancel(session)); /* nothing to cancel */
    EXPECT_OK(outrider_session_destroy(session));
  }
  return (int32_t)(intptr_t)reason;
}

int main(int count, char **words) {
  EXPECT(count == 2);
  inspected(words[1]);
  OWN(runtime) runtime = open_plan(words[1]);
  results(runtime);
  threads(runtime);
  EXPECT(ended(runtime, 0) == OUTRIDER_CANCELLED && slow_spans < 40);
  EXPECT(ended(runtime, 1) == OUTRIDER_LENGTH);
  puts("ok");
  return EXIT_SUCCESS;
}
