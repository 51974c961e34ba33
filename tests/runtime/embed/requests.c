/* requests PLAN FOLDER: requests served beside others, read in every way, and ended in every way.
 *
 * Prints tokens, log-probabilities and text of requests that ran together, a zero after each; FOLDER is for a file. */
#include <math.h>
#include <poll.h>
#include <pthread.h>
#include <time.h>
#include <unistd.h>

#include "check.h"

enum { MANY = 6 };

static const char chat[] = "[{\"role\": \"user\", \"content\": \"import\"}]";
static const char both[] = "{\"threads\": 1, \"prefix_cache_tokens\": 4096, \"scheduler\": {\"max_running\": 4}}";

static void pause_for(long milliseconds) {
  const struct timespec time = {milliseconds / 1000, milliseconds % 1000 * 1000000};
  nanosleep(&time, NULL);
}

static outrider_runtime *open_with(const char *plan, const char *options) {
  outrider_runtime *runtime = NULL;
  EXPECT_OK(outrider_runtime_open(plan, strlen(plan), options, strlen(options), &runtime));
  return runtime;
}

static int32_t reason_of(outrider_request *request) {
  outrider_result *result = NULL;
  int32_t reason = -1;
  EXPECT_OK(outrider_request_result(request, -1, &result));
  EXPECT_OK(outrider_result_finish_reason(result, &reason));
  EXPECT_OK(outrider_result_destroy(result));
  return reason;
}

/* A function of logits that makes a token take its time. */
static int32_t slow(void *user, const int64_t *tokens, size_t count, float *logits, size_t vocabulary) {
  (void)tokens, (void)logits;
  EXPECT(vocabulary == 300);
  __atomic_store_n((size_t *)user, count + 1, __ATOMIC_RELEASE);
  pause_for(5);
  __atomic_store_n((size_t *)user, count + 1, __ATOMIC_RELEASE);
  return OUTRIDER_CONTINUE;
}

static size_t begun;

static void wait_until_begun(void) {
  while (__atomic_load_n(&begun, __ATOMIC_ACQUIRE) == 0) pause_for(1);
}

static outrider_params *slow_params(int64_t max_new_tokens) {
  outrider_params *params = params_of(max_new_tokens);
  __atomic_store_n(&begun, 0, __ATOMIC_RELEASE);
  EXPECT_OK(outrider_params_set_text(params, "drafter", 7, "none", 4));
  EXPECT_OK(outrider_params_add_logits_processor(params, slow, &begun));
  return params;
}

static outrider_request *submit(outrider_runtime *runtime, const outrider_params *params, outrider_on_ready on_ready,
                                void *user) {
  outrider_request *request = NULL;
  EXPECT_OK(outrider_submit(runtime, "import", 6, params, on_ready, user, &request));
  EXPECT(request != NULL);
  return request;
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
  outrider_params *params = params_of(24);
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
  if (request == NULL) request = submit(runtime, params, NULL, NULL);
  EXPECT_OK(outrider_params_destroy(params)); /* what was submitted has it */
  return request;
}

/* The log-probabilities of a part are those of the whole, from token `from` on. */
static void same_logprobs(const outrider_logprobs *part, const outrider_logprobs *whole, size_t from) {
  EXPECT(from + part->count <= whole->count && (part->count == 0 || part->top == whole->top));
  for (size_t i = 0; i < part->count; ++i) {
    EXPECT(part->logprobs[i] == whole->logprobs[from + i] && part->logprobs[i] <= 0);
    for (size_t j = 0; j < part->top; ++j) {
      const size_t here = i * part->top + j, there = (from + i) * part->top + j;
      EXPECT(part->top_tokens[here] == whole->top_tokens[there]);
      EXPECT(part->top_logprobs[here] == whole->top_logprobs[there]);
      EXPECT(j == 0 || part->top_logprobs[here] <= part->top_logprobs[here - 1]);
    }
  }
}

/* Reads the request to its end, and checks that the parts are the whole. */
static void read_all(outrider_request *request, int which) {
  const outrider_span *span = NULL, *again = NULL;
  const outrider_logprobs *whole;
  outrider_result *result = NULL;
  const int64_t *tokens;
  const char *text;
  size_t count, length, seen = which == 4 ? 3 : 0, shown = 0, parts = 0;
  EXPECT(reason_of(request) == (which == 1 ? OUTRIDER_STOPPED : OUTRIDER_LENGTH));
  EXPECT_OK(outrider_request_result(request, -1, &result)); /* nothing was read yet: all of it is still to come */
  EXPECT_OK(outrider_result_tokens(result, &tokens, &count));
  EXPECT_OK(outrider_result_text(result, &text, &length));
  EXPECT_OK(outrider_result_logprobs(result, &whole));
  EXPECT(whole->count == (which == 0 ? count : which == 4 ? count - 3 : 0) && (which != 0 || whole->top == 3));
  const char *behind = text + length;
  do {
    EXPECT_OK(outrider_request_next(request, -1, &span));
    EXPECT(seen + span->count <= count && memcmp(span->tokens, tokens + seen, span->count * sizeof *tokens) == 0);
    EXPECT(span->text[span->length] == '\0');
    if (which == 0) EXPECT(span->logprobs->count == span->count && span->logprobs->top == 3);
    same_logprobs(span->logprobs, whole, which == 4 ? seen - 3 : seen);
    seen += span->count;
    shown += span->length;
    EXPECT(which == 4 || memcmp(span->text, behind - length + shown - span->length, span->length) == 0);
    ++parts;
  } while (!span->over);
  EXPECT(seen == count && (which == 4 || shown == length) && parts == 1);
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
  EXPECT_OK(outrider_result_destroy(result));
}

static void together(outrider_runtime *runtime) {
  outrider_request *requests[MANY];
  for (int i = 0; i < MANY; ++i) requests[i] = submit_one(runtime, i);
  for (int i = 0; i < MANY; ++i) {
    read_all(requests[i], i);
    EXPECT_OK(outrider_request_destroy(requests[i]));
  }
}

/* -- Reading: with a timeout, and when told ------------------------------------------------------------------------ */

static void timeouts(outrider_runtime *runtime) {
  outrider_params *params = slow_params(20);
  outrider_request *request = submit(runtime, params, NULL, NULL);
  const outrider_span *span = NULL;
  outrider_result *result = NULL;
  EXPECT_FAILURE(outrider_request_result(request, 0, &result), OUTRIDER_TIMEOUT, "call again");
  EXPECT(result == NULL);
  size_t seen = 0, empty = 0;
  for (int over = 0; !over;) {
    const outrider_status status = outrider_request_next(request, seen % 2, &span);
    if (status == OUTRIDER_TIMEOUT) {
      EXPECT(strstr(outrider_last_error(), "call again") != NULL);
      ++empty;
      continue;
    }
    EXPECT_OK(status);
    seen += span->count;
    over = span->over;
  }
  EXPECT(seen == 20 && empty > 0);
  EXPECT(reason_of(request) == OUTRIDER_LENGTH);
  EXPECT_OK(outrider_request_destroy(request));
  EXPECT_OK(outrider_params_destroy(params));
}

static void write_down(void *user, outrider_request *request) {
  EXPECT(write(*(int *)user, &request, sizeof request) == (ssize_t)sizeof request);
}

/* An event loop: it waits for a pipe alone. */
static void event_loop(outrider_runtime *runtime) {
  int ends[2];
  EXPECT(pipe(ends) == 0);
  outrider_params *params = params_of(30);
  size_t seen = 0, over = 0;
  outrider_request *requests[3];
  for (int i = 0; i < 3; ++i) requests[i] = submit(runtime, params, write_down, &ends[1]);
  while (over < 3) {
    struct pollfd waiting = {.fd = ends[0], .events = POLLIN};
    outrider_request *request = NULL;
    EXPECT(poll(&waiting, 1, 60000) == 1);
    EXPECT(read(ends[0], &request, sizeof request) == (ssize_t)sizeof request);
    const outrider_span *span = NULL;
    const outrider_status status = outrider_request_next(request, 0, &span);
    if (status == OUTRIDER_TIMEOUT || status == OUTRIDER_INVALID_HANDLE) continue; /* an earlier call has had it */
    EXPECT_OK(status);
    EXPECT(request == requests[0] || request == requests[1] || request == requests[2]);
    seen += span->count;
    if (!span->over) continue;
    ++over;
    EXPECT_OK(outrider_request_destroy(request)); /* of which nothing is told any more */
  }
  EXPECT(seen == 90);
  EXPECT_OK(outrider_params_destroy(params));
  close(ends[0]);
  close(ends[1]);
}

/* What a notification may do: read, submit, wait, and destroy its own request. */
struct told {
  outrider_runtime *runtime;
  outrider_params *params;
  size_t tokens;
  int calls;
  int destroyed;
};

static void destroy_itself(void *user, outrider_request *request) {
  struct told *told = user;
  const outrider_span *span = NULL;
  ++told->calls;
  EXPECT_OK(outrider_request_next(request, 0, &span));
  told->tokens += span->count;
  if (told->tokens < 5) return;
  outrider_request *other = submit(told->runtime, told->params, NULL, NULL);
  EXPECT(reason_of(other) == OUTRIDER_LENGTH);
  EXPECT_OK(outrider_request_destroy(other));
  EXPECT_OK(outrider_request_destroy(request));
  BAD_HANDLE(outrider_request_next(request, 0, &span), "destroyed");
  __atomic_store_n(&told->destroyed, 1, __ATOMIC_RELEASE);
}

static void destroyed_when_told(outrider_runtime *runtime) {
  static struct told told;
  outrider_params *params = slow_params(60);
  told.runtime = runtime;
  told.params = params_of(8);
  submit(runtime, params, destroy_itself, &told);
  while (!__atomic_load_n(&told.destroyed, __ATOMIC_ACQUIRE)) pause_for(1);
  const int calls = told.calls;
  pause_for(50);
  EXPECT(told.calls == calls && told.tokens < 60);
  EXPECT_OK(outrider_params_destroy(told.params));
  EXPECT_OK(outrider_params_destroy(params));
}

static int released;

static void take_time(void *user, outrider_request *request) {
  (void)request;
  __atomic_store_n((int *)user, 1, __ATOMIC_RELEASE);
  while (!__atomic_load_n(&released, __ATOMIC_ACQUIRE)) pause_for(1);
  pause_for(50);
  __atomic_store_n((int *)user, 2, __ATOMIC_RELEASE);
}

/* No token waits for a notification, however long it takes, and nothing is called after destroy. */
static void slow_notification(outrider_runtime *runtime) {
  static int state;
  outrider_params *params = params_of(40);
  outrider_request *noisy = submit(runtime, params, take_time, &state);
  while (__atomic_load_n(&state, __ATOMIC_ACQUIRE) != 1) pause_for(1);
  outrider_request *quiet = submit(runtime, params, NULL, NULL);
  EXPECT(reason_of(quiet) == OUTRIDER_LENGTH && reason_of(noisy) == OUTRIDER_LENGTH);
  EXPECT(__atomic_load_n(&state, __ATOMIC_ACQUIRE) == 1);
  __atomic_store_n(&released, 1, __ATOMIC_RELEASE);
  EXPECT_OK(outrider_request_destroy(noisy));
  EXPECT(__atomic_load_n(&state, __ATOMIC_ACQUIRE) == 2); /* it waited for the call */
  __atomic_store_n(&state, 0, __ATOMIC_RELEASE);
  pause_for(20);
  EXPECT(__atomic_load_n(&state, __ATOMIC_ACQUIRE) == 0);
  EXPECT_OK(outrider_request_destroy(quiet));
  EXPECT_OK(outrider_params_destroy(params));
}

/* -- Ends ---------------------------------------------------------------------------------------------------------- */

static void ended(outrider_runtime *runtime) {
  outrider_params *params = slow_params(100);
  outrider_request *request = submit(runtime, params, NULL, NULL);
  wait_until_begun();
  EXPECT_OK(outrider_request_cancel(request));
  EXPECT(reason_of(request) == OUTRIDER_CANCELLED);
  EXPECT_OK(outrider_request_cancel(request)); /* it is over */
  EXPECT_OK(outrider_request_destroy(request));
  BAD_HANDLE(outrider_request_cancel(request), "destroyed");

  EXPECT_OK(outrider_params_set_double(params, "deadline", 8, 0.1));
  request = submit(runtime, params, NULL, NULL);
  EXPECT(reason_of(request) == OUTRIDER_DEADLINE);
  EXPECT_OK(outrider_request_destroy(request));

  __atomic_store_n(&begun, 0, __ATOMIC_RELEASE);
  EXPECT_OK(outrider_params_set_double(params, "deadline", 8, 100));
  request = submit(runtime, params, NULL, NULL);
  wait_until_begun();
  EXPECT_OK(outrider_request_destroy(request));
  __atomic_store_n(&begun, 0, __ATOMIC_RELEASE);
  pause_for(30);
  EXPECT(__atomic_load_n(&begun, __ATOMIC_ACQUIRE) == 0); /* neither is the function of logits called any more */
  EXPECT_OK(outrider_params_destroy(params));
}

static void *wait_for_more(void *request) {
  const outrider_span *span = NULL;
  outrider_status status;
  while ((status = outrider_request_next(request, -1, &span)) == OUTRIDER_OK) {
    EXPECT(!span->over);
    __atomic_store_n(&released, 1, __ATOMIC_RELEASE);
  }
  EXPECT(status == OUTRIDER_INVALID_HANDLE && strstr(outrider_last_error(), "destroyed") != NULL);
  return NULL;
}

static void destroyed_while_it_is_read(outrider_runtime *runtime) {
  outrider_params *params = slow_params(140);
  outrider_request *request = submit(runtime, params, NULL, NULL);
  pthread_t reading;
  released = 0;
  EXPECT(pthread_create(&reading, NULL, wait_for_more, request) == 0);
  while (!__atomic_load_n(&released, __ATOMIC_ACQUIRE)) pause_for(1);
  EXPECT_OK(outrider_request_destroy(request));
  EXPECT(pthread_join(reading, NULL) == 0);
  EXPECT_OK(outrider_params_destroy(params));
}

static int32_t give_up(void *user, const int64_t *tokens, size_t count, float *logits, size_t vocabulary) {
  (void)user, (void)tokens, (void)logits, (void)vocabulary;
  return count < 2 ? OUTRIDER_CONTINUE : 7;
}

static void failing(outrider_runtime *runtime) {
  outrider_params *params = params_of(20);
  const outrider_span *span = NULL;
  outrider_result *result = NULL;
  size_t seen = 0;
  EXPECT_OK(outrider_params_add_logits_processor(params, give_up, NULL));
  outrider_request *request = submit(runtime, params, NULL, NULL);
  outrider_status status;
  while ((status = outrider_request_next(request, -1, &span)) == OUTRIDER_OK) {
    EXPECT(!span->over);
    seen += span->count;
  }
  EXPECT(status == OUTRIDER_CALLBACK && seen == 2 && strstr(outrider_last_error(), "returned 7") != NULL);
  EXPECT_FAILURE(outrider_request_next(request, 0, &span), OUTRIDER_CALLBACK, "gave up");
  EXPECT_FAILURE(outrider_request_result(request, 0, &result), OUTRIDER_CALLBACK, "gave up");
  EXPECT_OK(outrider_request_destroy(request));
  outrider_session *session = create_session(runtime);
  EXPECT_FAILURE(outrider_generate(session, "a", 1, params, NULL, NULL, &result), OUTRIDER_CALLBACK, "gave up");
  EXPECT_OK(outrider_session_destroy(session));
  EXPECT_OK(outrider_params_destroy(params));
}

/* Two places in the queue, one request at a time: order, refusals, drain. */
static void queued(const char *plan) {
  static const char options[] =
      "{\"threads\": 1, \"scheduler\": {\"max_running\": 1, \"max_waiting\": 2, \"max_waiting_per_client\": 1}}";
  outrider_runtime *runtime = open_with(plan, options);
  outrider_params *params = slow_params(40), *urgent = params_of(4);
  EXPECT_OK(outrider_params_set_text(params, "client", 6, "one", 3));
  outrider_request *running = submit(runtime, params, NULL, NULL), *other = NULL;
  wait_until_begun();
  outrider_request *waiting = submit(runtime, params, NULL, NULL);
  EXPECT_FAILURE(outrider_submit(runtime, "a", 1, params, NULL, NULL, &other), OUTRIDER_FULL, "this client");
  EXPECT_OK(outrider_params_set_int(urgent, "priority", 8, 1));
  outrider_request *before = submit(runtime, urgent, NULL, NULL);
  EXPECT_FAILURE(outrider_submit(runtime, "a", 1, urgent, NULL, NULL, &other), OUTRIDER_FULL, "queue is full");
  EXPECT(other == NULL);
  EXPECT(reason_of(before) == OUTRIDER_LENGTH);
  outrider_result *result = NULL;
  EXPECT_FAILURE(outrider_request_result(waiting, 0, &result), OUTRIDER_TIMEOUT, ""); /* came first, begins later */
  EXPECT_FAILURE(outrider_runtime_drain(runtime, 20), OUTRIDER_TIMEOUT, "cancelled: 1");
  EXPECT(reason_of(running) == OUTRIDER_LENGTH && reason_of(waiting) == OUTRIDER_CANCELLED);
  EXPECT_FAILURE(outrider_submit(runtime, "a", 1, urgent, NULL, NULL, &other), OUTRIDER_CLOSED, "no more requests");
  EXPECT_OK(outrider_runtime_drain(runtime, 0)); /* nothing is left */
  outrider_session *session = create_session(runtime); /* sessions are no requests */
  BAD_REQUEST(outrider_generate(session, "a", 1, urgent, NULL, NULL, &result), "priority");
  EXPECT_OK(outrider_generate(session, "a", 1, NULL, NULL, NULL, &result));
  EXPECT_OK(outrider_result_destroy(result));
  EXPECT_OK(outrider_session_destroy(session));
  outrider_request *all[] = {running, waiting, before};
  for (int i = 0; i < 3; ++i) EXPECT_OK(outrider_request_destroy(all[i]));
  EXPECT_OK(outrider_params_destroy(urgent));
  EXPECT_OK(outrider_params_destroy(params));
  EXPECT_OK(outrider_runtime_close(runtime));
}

/* A closed runtime's requests continue, those that wait as well. */
static void closed(const char *plan) {
  outrider_runtime *runtime = open_with(plan, "{\"threads\": 1, \"scheduler\": {\"max_running\": 1}}");
  outrider_params *params = slow_params(20);
  outrider_request *running = submit(runtime, params, NULL, NULL), *waiting = submit(runtime, params, NULL, NULL);
  wait_until_begun();
  EXPECT_OK(outrider_runtime_close(runtime));
  outrider_request *other = NULL;
  BAD_HANDLE(outrider_submit(runtime, "a", 1, NULL, NULL, NULL, &other), "destroyed");
  EXPECT(reason_of(running) == OUTRIDER_LENGTH && reason_of(waiting) == OUTRIDER_LENGTH);
  EXPECT_OK(outrider_request_destroy(running));
  EXPECT_OK(outrider_request_destroy(waiting));
  EXPECT_OK(outrider_params_destroy(params));
}

/* -- Conversations, caches, counts --------------------------------------------------------------------------------- */

static void conversation(outrider_runtime *runtime) {
  static const char turns[] =
      "[{\"role\": \"user\", \"content\": \"import\"}, {\"role\": \"assistant\", \"content\": \"os\"}, "
      "{\"role\": \"user\", \"content\": \"and?\"}]";
  static const char *const wrong[] = {"", "{}", "[", "[1]", "[{\"content\": 1}]", "[]"};
  outrider_session *session = create_session(runtime);
  outrider_params *params = params_of(6);
  outrider_result *result = NULL;
  outrider_request *request = NULL;
  EXPECT_OK(outrider_generate_messages(session, chat, sizeof chat - 1, params, NULL, NULL, &result));
  EXPECT_OK(outrider_result_destroy(result));
  EXPECT_OK(outrider_generate_messages(session, turns, sizeof turns - 1, params, NULL, NULL, &result));
  const char *stats;
  size_t length;
  EXPECT_OK(outrider_result_stats(result, &stats, &length));
  EXPECT(strstr(stats, "\"reused_tokens\": 0,") == NULL); /* what the two conversations begin with */
  EXPECT_OK(outrider_result_destroy(result));
  for (size_t i = 0; i < sizeof wrong / sizeof *wrong; ++i) {
    const outrider_status expected = i < 3 ? OUTRIDER_INVALID_ARGUMENT : OUTRIDER_REQUEST;
    const size_t bytes = strlen(wrong[i]);
    EXPECT_FAILURE(outrider_generate_messages(session, wrong[i], bytes, params, NULL, NULL, &result), expected,
                   "essage");
    EXPECT_FAILURE(outrider_submit_messages(runtime, wrong[i], bytes, params, NULL, NULL, &request), expected,
                   "essage");
  }
  EXPECT_OK(outrider_params_set_text(params, "chat_template_kwargs", 20, "{\"enable_thinking\": false}", 26));
  EXPECT_FAILURE(outrider_submit_messages(runtime, chat, sizeof chat - 1, params, NULL, NULL, &request),
                 OUTRIDER_REQUEST, "enable_thinking"); /* which the toy's template does not read */
  BAD_REQUEST(outrider_submit(runtime, "a", 1, params, NULL, NULL, &request), "no messages");
  EXPECT(request == NULL);
  EXPECT_OK(outrider_params_destroy(params));
  EXPECT_OK(outrider_session_destroy(session));
}

static void cached(outrider_runtime *runtime, const char *plan, const char *folder) {
  char path[4096];
  size_t saved = 0, loaded = 0, length;
  outrider_text *text = NULL;
  const char *stats;
  EXPECT((size_t)snprintf(path, sizeof path, "%s/prompts.cache", folder) < sizeof path);
  EXPECT_OK(outrider_runtime_save_prefix_cache(runtime, path, strlen(path), &saved));
  EXPECT(saved > 10);
  outrider_runtime *other = open_with(plan, both);
  EXPECT_OK(outrider_runtime_load_prefix_cache(other, path, strlen(path), &loaded));
  EXPECT(saved == loaded);
  EXPECT_OK(outrider_runtime_load_prefix_cache(other, path, strlen(path), NULL));
  EXPECT_OK(outrider_runtime_close(other));
  EXPECT_FAILURE(outrider_runtime_load_prefix_cache(runtime, plan, strlen(plan), NULL), OUTRIDER_PLAN, "prefix cache");
  BAD_REQUEST(outrider_runtime_save_prefix_cache(runtime, "/nowhere/x", 10, NULL), "/nowhere");
  BAD_REQUEST(outrider_runtime_save_prefix_cache(runtime, folder, strlen(folder), NULL), folder);
  BAD_ARGUMENT(outrider_runtime_save_prefix_cache(runtime, "", 0, NULL), "name a file");
  EXPECT_OK(outrider_runtime_stats(runtime, &text));
  EXPECT_OK(outrider_text_get(text, &stats, &length));
  EXPECT(strlen(stats) == length && strstr(stats, "\"backend\": \"onnxruntime-cpu\"") != NULL);
  EXPECT(strstr(stats, "\"refused\": 0") != NULL && strstr(stats, "\"engine_bytes\"") != NULL);
  EXPECT(strstr(stats, "\"submitted\": 6,") != NULL && strstr(stats, "\"cache_hits\"") != NULL);
  EXPECT_OK(outrider_text_destroy(text));
}

int main(int count, char **words) {
  EXPECT(count == 3);
  outrider_runtime *runtime = open_with(words[1], both);
  together(runtime);
  cached(runtime, words[1], words[2]);
  timeouts(runtime);
  event_loop(runtime);
  destroyed_when_told(runtime);
  slow_notification(runtime);
  ended(runtime);
  destroyed_while_it_is_read(runtime);
  failing(runtime);
  conversation(runtime);
  EXPECT_OK(outrider_runtime_drain(runtime, -1));
  EXPECT_OK(outrider_runtime_close(runtime));
  queued(words[1]);
  closed(words[1]);
  return EXIT_SUCCESS;
}
