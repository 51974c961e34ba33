/* requests PLAN FOLDER: requests served beside others, read in every way, and ended in every way.
 *
 * Prints tokens, log-probabilities and text of requests that ran together, a zero after each; FOLDER is for a file. */
#include <math.h>
#include <pthread.h>

#include "check.h"

enum { MANY = 6 };

static const char chat[] = "[{\"role\": \"user\", \"content\": \"import\"}]";
static const char both[] = "{\"threads\": 1, \"prefix_cache_tokens\": 4096, \"scheduler\": {\"max_running\": 4}}";

static int32_t reason_at_the_end(outrider_request *request) {
  OWN(result) result = NULL;
  EXPECT_OK(outrider_request_result(request, -1, &result));
  return reason_of(result);
}

static void wait_for(int *flag, int value) {
  while (__atomic_load_n(flag, __ATOMIC_ACQUIRE) != value) pause_for(1);
}

static void set(int *flag, int value) { __atomic_store_n(flag, value, __ATOMIC_RELEASE); }

/* A function of logits that delays its token, and sets its flag. */
static int32_t slow(void *begun, const int64_t *tokens, size_t count, float *logits, size_t vocabulary) {
  (void)tokens, (void)count, (void)logits;
  EXPECT(vocabulary == 300);
  pause_for(5);
  set(begun, 1);
  return OUTRIDER_CONTINUE;
}

static int begun;

static outrider_params *slow_params(int64_t max_new_tokens) {
  outrider_params *params = params_of(max_new_tokens);
  set(&begun, 0);
  EXPECT_OK(outrider_params_set_text(params, "drafter", 7, "none", 4));
  EXPECT_OK(outrider_params_add_logits_processor(params, slow, &begun));
  return params;
}

/* -- Tokens, text and log-probabilities -------------------------------------------------------------------------- */

static int32_t only_letters(void *user, const int64_t *tokens, size_t count, float *logits, size_t vocabulary) {
  (void)user, (void)tokens;
  for (size_t token = 0; token < vocabulary; ++token) {
    if (token < 66 + count % 3 || token > 90) logits[token] = -INFINITY;
  }
  return OUTRIDER_CONTINUE;
}

static outrider_request *submit_one(outrider_runtime *runtime, int which) {
  static const int64_t tokens[] = {5, 6, 7, 8}, given[] = {41, 42, 43};
  static const char form[] = "{\"regex\": \"[a-z]{3,9}=[0-9]{2};\"}";
  OWN(params) params = params_of(24); /* the request keeps what it needs */
  outrider_request *request = NULL;
  EXPECT_OK(outrider_params_set_int(params, "seed", 4, 5 + which));
  EXPECT_OK(outrider_params_set_double(params, "temperature", 11, which == 0 ? 0 : 0.9));
  EXPECT_OK(outrider_params_set_int(params, "priority", 8, which % 2));
  EXPECT_OK(outrider_params_set_text(params, "client", 6, "a test", 6));
  switch (which) {
    case 0:
      EXPECT_OK(outrider_params_set_text(params, "drafter", 7, "chain", 5));
      EXPECT_OK(outrider_params_set_int(params, "logprobs", 8, 3));
      break;
    case 1:
      EXPECT_OK(outrider_params_set_bool(params, "ignore_eos", 10, 0));
      EXPECT_OK(outrider_params_set_text(params, "structured_outputs", 18, form, sizeof form - 1));
      break;
    case 2:
      EXPECT_OK(outrider_params_set_text(params, "drafter", 7, "head", 4));
      EXPECT_OK(outrider_submit_tokens(runtime, tokens, 4, params, NULL, NULL, &request));
      break;
    case 3:
      EXPECT_OK(outrider_submit_messages(runtime, chat, sizeof chat - 1, params, NULL, NULL, &request));
      break;
    case 4:
      EXPECT_OK(outrider_params_add_ints(params, "generated", 9, given, 3));
      EXPECT_OK(outrider_params_set_int(params, "logprobs", 8, 0));
      break;
    default:
      EXPECT_OK(outrider_params_add_logits_processor(params, only_letters, NULL));
  }
  return request != NULL ? request : submit(runtime, params, NULL, NULL);
}

static void same_logprobs(const outrider_logprobs *one, const outrider_logprobs *other) {
  EXPECT(one->count == other->count && one->top == other->top);
  EXPECT(memcmp(one->logprobs, other->logprobs, one->count * sizeof(double)) == 0);
  EXPECT(memcmp(one->top_tokens, other->top_tokens, one->count * one->top * sizeof(int64_t)) == 0);
  EXPECT(memcmp(one->top_logprobs, other->top_logprobs, one->count * one->top * sizeof(double)) == 0);
}

/* Reads the request to its end, in one part, which has to be the whole. */
static void read_all(outrider_request *request, int which) {
  const outrider_span *span = NULL, *again = NULL;
  const outrider_logprobs *whole;
  OWN(result) result = NULL;
  const int64_t *tokens;
  const char *text;
  size_t count, length;
  const size_t known = which == 4 ? 3 : 0; /* tokens of an earlier part of the request */
  EXPECT_OK(outrider_request_result(request, -1, &result)); /* nothing was read yet: all of it is still to come */
  EXPECT(reason_of(result) == (which == 1 ? OUTRIDER_STOPPED : OUTRIDER_LENGTH));
  EXPECT_OK(outrider_result_tokens(result, &tokens, &count));
  EXPECT_OK(outrider_result_text(result, &text, &length));
  EXPECT_OK(outrider_result_logprobs(result, &whole));
  EXPECT(whole->count == (which == 0 || which == 4 ? count - known : 0) && (which != 0 || whole->top == 3));
  EXPECT_OK(outrider_request_next(request, -1, &span));
  EXPECT(span->over && span->count == count - known && span->length <= length && span->text[span->length] == '\0');
  EXPECT(memcmp(span->tokens, tokens + known, span->count * sizeof *tokens) == 0);
  EXPECT(which == 4 || (span->length == length && memcmp(span->text, text, length) == 0));
  same_logprobs(span->logprobs, whole);
  EXPECT_OK(outrider_request_next(request, 0, &span));
  EXPECT(span->over && span->count == 0 && span->length == 0);
  EXPECT_OK(outrider_request_next(request, 0, &again));
  EXPECT(span == again);
  for (size_t i = 0; i < count; ++i) printf("%lld ", (long long)tokens[i]);
  for (size_t i = 0; i < whole->count; ++i) printf("%.17g ", whole->logprobs[i]);
  for (size_t i = 0; i < whole->count * whole->top; ++i) {
    printf("%lld %.17g ", (long long)whole->top_tokens[i], whole->top_logprobs[i]);
  }
  printf("%.*s%c", (int)length, text, 0);
  EXPECT_OK(outrider_request_destroy(request));
}

static void together(outrider_runtime *runtime) {
  outrider_request *requests[MANY];
  for (int i = 0; i < MANY; ++i) requests[i] = submit_one(runtime, i);
  for (int i = 0; i < MANY; ++i) read_all(requests[i], i);
}

/* -- Reading: with a timeout, and when notified (tools/examples/c/serve_many.c has an event loop) ------------------ */

static void timeouts(outrider_runtime *runtime) {
  OWN(params) params = slow_params(20);
  OWN(request) request = submit(runtime, params, NULL, NULL);
  const outrider_span *span = NULL;
  OWN(result) result = NULL;
  EXPECT_FAILURE(outrider_request_result(request, 0, &result), OUTRIDER_TIMEOUT, "call again");
  size_t seen = 0, empty = 0;
  for (int over = 0; !over;) {
    const outrider_status status = outrider_request_next(request, seen % 2, &span);
    empty += status == OUTRIDER_TIMEOUT;
    if (status == OUTRIDER_TIMEOUT) continue;
    EXPECT_OK(status);
    seen += span->count;
    over = span->over;
  }
  EXPECT(seen == 20 && empty > 0 && reason_at_the_end(request) == OUTRIDER_LENGTH);
}

/* What a notification may do: read, submit, wait, and destroy its own request. */
struct notified {
  outrider_runtime *runtime;
  size_t tokens;
  int calls;
  int destroyed;
};

static void destroy_itself(void *user, outrider_request *request) {
  struct notified *notified = user;
  const outrider_span *span = NULL;
  ++notified->calls;
  EXPECT_OK(outrider_request_next(request, 0, &span));
  notified->tokens += span->count;
  if (notified->tokens < 5) return;
  OWN(params) params = params_of(8);
  OWN(request) other = submit(notified->runtime, params, NULL, NULL);
  EXPECT(reason_at_the_end(other) == OUTRIDER_LENGTH);
  EXPECT_OK(outrider_request_destroy(request));
  BAD_HANDLE(outrider_request_next(request, 0, &span), "destroyed");
  set(&notified->destroyed, 1);
}

static void destroyed_when_notified(outrider_runtime *runtime) {
  static struct notified notified;
  OWN(params) params = slow_params(60);
  notified.runtime = runtime;
  submit(runtime, params, destroy_itself, &notified);
  wait_for(&notified.destroyed, 1);
  const int calls = notified.calls;
  pause_for(50);
  EXPECT(notified.calls == calls && notified.tokens < 60);
}

static int released;

static void notify_slowly(void *state, outrider_request *request) {
  (void)request;
  set(state, 1);
  wait_for(&released, 1);
  pause_for(50);
  set(state, 2);
}

/* No token waits for a notification, however long it takes, and nothing is called after destroy. */
static void slow_notification(outrider_runtime *runtime) {
  static int state;
  OWN(params) params = slow_params(40);
  outrider_request *noisy = submit(runtime, params, notify_slowly, &state);
  wait_for(&state, 1);
  OWN(request) quiet = submit(runtime, params, NULL, NULL);
  EXPECT(reason_at_the_end(quiet) == OUTRIDER_LENGTH && reason_at_the_end(noisy) == OUTRIDER_LENGTH);
  EXPECT(__atomic_load_n(&state, __ATOMIC_ACQUIRE) == 1);
  set(&released, 1);
  EXPECT_OK(outrider_request_destroy(noisy));
  EXPECT(__atomic_load_n(&state, __ATOMIC_ACQUIRE) == 2); /* it waited for the call */
  pause_for(20);
  EXPECT(__atomic_load_n(&state, __ATOMIC_ACQUIRE) == 2);
}

/* -- Ends ---------------------------------------------------------------------------------------------------------- */

static void ended(outrider_runtime *runtime) {
  OWN(params) params = slow_params(100);
  outrider_request *request = submit(runtime, params, NULL, NULL);
  wait_for(&begun, 1);
  EXPECT_OK(outrider_request_cancel(request));
  EXPECT(reason_at_the_end(request) == OUTRIDER_CANCELLED);
  EXPECT_OK(outrider_request_cancel(request)); /* it is over */
  EXPECT_OK(outrider_request_destroy(request));
  BAD_HANDLE(outrider_request_cancel(request), "destroyed");

  EXPECT_OK(outrider_params_set_double(params, "deadline", 8, 0.1));
  request = submit(runtime, params, NULL, NULL);
  EXPECT(reason_at_the_end(request) == OUTRIDER_DEADLINE);
  EXPECT_OK(outrider_request_destroy(request));

  set(&begun, 0);
  EXPECT_OK(outrider_params_set_double(params, "deadline", 8, 100));
  request = submit(runtime, params, NULL, NULL);
  wait_for(&begun, 1);
  EXPECT_OK(outrider_request_destroy(request));
  set(&begun, 0);
  pause_for(30);
  EXPECT(__atomic_load_n(&begun, __ATOMIC_ACQUIRE) == 0); /* neither is the function of logits called any more */
}

static void *wait_for_more(void *request) {
  const outrider_span *span = NULL;
  outrider_status status;
  while ((status = outrider_request_next(request, -1, &span)) == OUTRIDER_OK) EXPECT(!span->over);
  EXPECT(status == OUTRIDER_INVALID_HANDLE && strstr(outrider_last_error(), "destroyed") != NULL);
  return NULL;
}

static void destroyed_while_it_is_read(outrider_runtime *runtime) {
  OWN(params) params = slow_params(140);
  outrider_request *request = submit(runtime, params, NULL, NULL);
  pthread_t reading;
  EXPECT(pthread_create(&reading, NULL, wait_for_more, request) == 0);
  wait_for(&begun, 1);
  pause_for(20);
  EXPECT_OK(outrider_request_destroy(request));
  EXPECT(pthread_join(reading, NULL) == 0);
}

static int32_t fail_after_two(void *user, const int64_t *tokens, size_t count, float *logits, size_t vocabulary) {
  (void)user, (void)tokens, (void)logits, (void)vocabulary;
  return count < 2 ? OUTRIDER_CONTINUE : 7;
}

static void failing(outrider_runtime *runtime) {
  OWN(params) params = params_of(20);
  const outrider_span *span = NULL;
  outrider_result *result = NULL;
  size_t seen = 0;
  EXPECT_OK(outrider_params_add_logits_processor(params, fail_after_two, NULL));
  OWN(request) request = submit(runtime, params, NULL, NULL);
  OWN(session) session = create_session(runtime);
  while (outrider_request_next(request, -1, &span) == OUTRIDER_OK) seen += span->over ? 100 : span->count;
  EXPECT(seen == 2);
  EXPECT_FAILURE(outrider_request_next(request, 0, &span), OUTRIDER_CALLBACK, "returned 7");
  EXPECT_FAILURE(outrider_request_result(request, 0, &result), OUTRIDER_CALLBACK, "returned 7");
  EXPECT_FAILURE(outrider_generate(session, "a", 1, params, NULL, NULL, &result), OUTRIDER_CALLBACK, "returned 7");
}

/* Two places in the queue, one request at a time: order, refusals, drain. */
static void queued(const char *plan) {
  OWN(runtime) runtime = open_with(
      plan, "{\"threads\": 1, \"scheduler\": {\"max_running\": 1, \"max_waiting\": 2, \"max_waiting_per_client\": 1}}");
  OWN(params) params = slow_params(40);
  OWN(params) urgent = params_of(4);
  OWN(session) session = create_session(runtime);
  OWN(result) result = NULL;
  outrider_request *other = NULL;
  EXPECT_OK(outrider_params_set_text(params, "client", 6, "one", 3));
  EXPECT_OK(outrider_params_set_int(urgent, "priority", 8, 1));
  OWN(request) running = submit(runtime, params, NULL, NULL);
  wait_for(&begun, 1);
  OWN(request) waiting = submit(runtime, params, NULL, NULL);
  EXPECT_FAILURE(outrider_submit(runtime, "a", 1, params, NULL, NULL, &other), OUTRIDER_FULL, "this client");
  OWN(request) before = submit(runtime, urgent, NULL, NULL);
  EXPECT_FAILURE(outrider_submit(runtime, "a", 1, urgent, NULL, NULL, &other), OUTRIDER_FULL, "queue is full");
  EXPECT(reason_at_the_end(before) == OUTRIDER_LENGTH);
  EXPECT_FAILURE(outrider_request_result(waiting, 0, &result), OUTRIDER_TIMEOUT, ""); /* came first, begins later */
  EXPECT_FAILURE(outrider_runtime_drain(runtime, 20), OUTRIDER_TIMEOUT, "cancelled: 1");
  EXPECT(reason_at_the_end(running) == OUTRIDER_LENGTH && reason_at_the_end(waiting) == OUTRIDER_CANCELLED);
  EXPECT_FAILURE(outrider_submit(runtime, "a", 1, urgent, NULL, NULL, &other), OUTRIDER_CLOSED, "no more requests");
  EXPECT(other == NULL);
  EXPECT_OK(outrider_runtime_drain(runtime, 0)); /* nothing is left; sessions are no requests */
  BAD_REQUEST(outrider_generate(session, "a", 1, urgent, NULL, NULL, &result), "priority");
  EXPECT_OK(outrider_generate(session, "a", 1, NULL, NULL, NULL, &result));
}

/* A closed runtime's requests continue, those that wait as well. */
static void closed(const char *plan) {
  outrider_runtime *runtime = open_with(plan, "{\"threads\": 1, \"scheduler\": {\"max_running\": 1}}");
  OWN(params) params = slow_params(20);
  OWN(request) running = submit(runtime, params, NULL, NULL);
  OWN(request) waiting = submit(runtime, params, NULL, NULL);
  outrider_request *other = NULL;
  wait_for(&begun, 1);
  EXPECT_OK(outrider_runtime_close(runtime));
  BAD_HANDLE(outrider_submit(runtime, "a", 1, NULL, NULL, NULL, &other), "destroyed");
  EXPECT(reason_at_the_end(running) == OUTRIDER_LENGTH && reason_at_the_end(waiting) == OUTRIDER_LENGTH);
}

/* -- Conversations, caches, counts --------------------------------------------------------------------------------- */

static void conversation(outrider_runtime *runtime) {
  static const char turns[] =
      "[{\"role\": \"user\", \"content\": \"import\"}, {\"role\": \"assistant\", \"content\": \"os\"}, "
      "{\"role\": \"user\", \"content\": \"and?\"}]";
  OWN(session) session = create_session(runtime);
  OWN(params) params = params_of(6);
  OWN(result) first = NULL;
  OWN(result) second = NULL;
  outrider_request *request = NULL;
  const char *stats;
  size_t length;
  EXPECT_OK(outrider_generate_messages(session, chat, sizeof chat - 1, params, NULL, NULL, &first));
  EXPECT_OK(outrider_generate_messages(session, turns, sizeof turns - 1, params, NULL, NULL, &second));
  EXPECT_OK(outrider_result_stats(second, &stats, &length));
  EXPECT(strstr(stats, "\"reused_tokens\": 0,") == NULL); /* what the two conversations begin with */
  BAD_ARGUMENT(outrider_submit_messages(runtime, "{}", 2, params, NULL, NULL, &request), "essage");
  BAD_REQUEST(outrider_submit_messages(runtime, "[{\"content\": 1}]", 16, params, NULL, NULL, &request), "essage");
  EXPECT_OK(outrider_params_set_text(params, "chat_template_kwargs", 20, "{\"enable_thinking\": false}", 26));
  BAD_REQUEST(outrider_submit_messages(runtime, chat, sizeof chat - 1, params, NULL, NULL, &request),
              "enable_thinking"); /* which the toy's template does not read */
  BAD_REQUEST(outrider_submit(runtime, "a", 1, params, NULL, NULL, &request), "no messages");
  EXPECT(request == NULL);
}

static void cached(outrider_runtime *runtime, const char *plan, const char *folder) {
  char path[4096];
  size_t saved = 0, loaded = 0, length;
  OWN(text) text = NULL;
  const char *stats;
  EXPECT((size_t)snprintf(path, sizeof path, "%s/prompts.cache", folder) < sizeof path);
  EXPECT_OK(outrider_runtime_save_prefix_cache(runtime, path, strlen(path), &saved));
  EXPECT(saved > 10);
  OWN(runtime) other = open_with(plan, both);
  EXPECT_OK(outrider_runtime_load_prefix_cache(other, path, strlen(path), &loaded));
  EXPECT(saved == loaded);
  EXPECT_OK(outrider_runtime_load_prefix_cache(other, path, strlen(path), NULL));
  EXPECT_FAILURE(outrider_runtime_load_prefix_cache(runtime, plan, strlen(plan), NULL), OUTRIDER_PLAN, "prefix cache");
  BAD_REQUEST(outrider_runtime_save_prefix_cache(runtime, folder, strlen(folder), NULL), folder);
  BAD_ARGUMENT(outrider_runtime_save_prefix_cache(runtime, "", 0, NULL), "name a file");
  EXPECT_OK(outrider_runtime_stats(runtime, &text));
  EXPECT_OK(outrider_text_get(text, &stats, &length));
  EXPECT(strlen(stats) == length && strstr(stats, "\"backend\": \"onnxruntime-cpu\"") != NULL);
  EXPECT(strstr(stats, "\"refused\": 0") != NULL && strstr(stats, "\"engine_bytes\"") != NULL);
  EXPECT(strstr(stats, "\"submitted\": 6,") != NULL && strstr(stats, "\"cache_hits\"") != NULL);
}

int main(int count, char **words) {
  EXPECT(count == 3);
  OWN(runtime) runtime = open_with(words[1], both);
  together(runtime);
  cached(runtime, words[1], words[2]);
  timeouts(runtime);
  destroyed_when_notified(runtime);
  slow_notification(runtime);
  ended(runtime);
  destroyed_while_it_is_read(runtime);
  failing(runtime);
  conversation(runtime);
  EXPECT_OK(outrider_runtime_drain(runtime, -1));
  queued(words[1]);
  closed(words[1]);
  return EXIT_SUCCESS;
}
