/* wrong PLAN DAMAGED: every wrong handle and argument is a status and a sentence, and nothing else happens. */
#include "check.h"

static void handles(const char *plan) {
  outrider_runtime *runtime = open_plan(plan);
  outrider_session *session = create_session(runtime);
  outrider_session *other = session;
  outrider_result *result = NULL;
  const char *data = "untouched";
  size_t length = 7;
  int32_t reason = 7;

  BAD_HANDLE(outrider_session_create(NULL, &other), "NULL");
  BAD_HANDLE(outrider_session_create((outrider_runtime *)session, &other), "one of a session");
  BAD_HANDLE(outrider_session_reset((outrider_session *)(uintptr_t)12345678), "is none");
  BAD_HANDLE(outrider_session_reset((outrider_session *)&data), "is none");
  BAD_HANDLE(outrider_session_cancel(NULL), "NULL");
  BAD_HANDLE(outrider_generate(NULL, "a", 1, NULL, NULL, NULL, &result), "session");
  BAD_HANDLE(outrider_generate(session, "a", 1, (outrider_params *)runtime, NULL, NULL, &result), "params");
  BAD_HANDLE(outrider_result_text(NULL, &data, &length), "result");
  BAD_HANDLE(outrider_result_finish_reason((outrider_result *)session, &reason), "result");
  BAD_HANDLE(outrider_text_get(NULL, &data, &length), "text");
  EXPECT(other == session && result == NULL && length == 7 && reason == 7 && strcmp(data, "untouched") == 0);

  BAD_HANDLE(outrider_session_destroy((outrider_session *)runtime), "one of a runtime");
  EXPECT_OK(outrider_session_destroy(session));
  BAD_HANDLE(outrider_session_destroy(session), "destroyed");
  BAD_HANDLE(outrider_session_reset(session), "destroyed");
  session = create_session(runtime);
  EXPECT_OK(outrider_runtime_close(runtime));
  BAD_HANDLE(outrider_runtime_close(runtime), "destroyed");
  BAD_HANDLE(outrider_session_create(runtime, &other), "destroyed");
  EXPECT_OK(outrider_generate(session, "import", 6, NULL, NULL, NULL, &result)); /* sessions continue */
  EXPECT_OK(outrider_result_destroy(result));
  BAD_HANDLE(outrider_result_text(result, &data, &length), "destroyed");
  EXPECT_OK(outrider_session_destroy(session));

  EXPECT_OK(outrider_runtime_close(NULL));
  EXPECT_OK(outrider_session_destroy(NULL));
  EXPECT_OK(outrider_params_destroy(NULL));
  EXPECT_OK(outrider_result_destroy(NULL));
  EXPECT_OK(outrider_text_destroy(NULL));
}

static int32_t unchanged(void *user, const int64_t *tokens, size_t count, float *logits, size_t vocabulary) {
  (void)user, (void)tokens, (void)count, (void)logits, (void)vocabulary;
  return OUTRIDER_CONTINUE;
}

static void requests(const char *plan) {
  outrider_runtime *runtime = open_plan(plan);
  outrider_session *session = create_session(runtime);
  outrider_request *request = NULL;
  outrider_result *result = NULL;
  outrider_params *params = NULL;
  outrider_text *text = NULL;
  const outrider_span *span = NULL;
  const outrider_logprobs *logprobs = NULL;
  const int64_t tokens[] = {1, 300};
  size_t count;

  BAD_HANDLE(outrider_submit(NULL, "a", 1, NULL, NULL, NULL, &request), "runtime");
  BAD_HANDLE(outrider_submit((outrider_runtime *)session, "a", 1, NULL, NULL, NULL, &request), "one of a session");
  BAD_HANDLE(outrider_submit(runtime, "a", 1, (outrider_params *)session, NULL, NULL, &request), "params");
  BAD_ARGUMENT(outrider_submit(runtime, "a", 1, NULL, NULL, NULL, NULL), "outrider_submit: out is NULL");
  BAD_ARGUMENT(outrider_submit(runtime, NULL, 1, NULL, NULL, NULL, &request), "prompt");
  BAD_ARGUMENT(outrider_submit(runtime, "\xff", 1, NULL, NULL, NULL, &request), "UTF-8");
  BAD_REQUEST(outrider_submit(runtime, NULL, 0, NULL, NULL, NULL, &request), "prompt is empty");
  BAD_REQUEST(outrider_submit_tokens(runtime, tokens, 2, NULL, NULL, NULL, &request), "300");
  BAD_ARGUMENT(outrider_submit_tokens(runtime, NULL, 2, NULL, NULL, NULL, &request), "prompt");
  BAD_ARGUMENT(outrider_submit_messages(runtime, NULL, 2, NULL, NULL, NULL, &request), "messages is NULL");
  BAD_ARGUMENT(outrider_submit_messages(runtime, "x", 1, NULL, NULL, NULL, &request), "a JSON list of messages");
  BAD_ARGUMENT(outrider_generate_messages(session, "x", 1, NULL, NULL, NULL, &result), "a JSON list of messages");
  BAD_HANDLE(outrider_request_next(NULL, 0, &span), "request");
  BAD_HANDLE(outrider_request_next((outrider_request *)session, -1, &span), "session");
  BAD_ARGUMENT(outrider_request_next(NULL, 0, NULL), "span is NULL");
  BAD_HANDLE(outrider_request_result(NULL, 0, &result), "request");
  BAD_HANDLE(outrider_request_cancel((outrider_request *)runtime), "request");
  BAD_HANDLE(outrider_request_destroy((outrider_request *)runtime), "one of a runtime");
  BAD_HANDLE(outrider_result_logprobs(NULL, &logprobs), "result");
  BAD_HANDLE(outrider_runtime_drain(NULL, 0), "runtime");
  BAD_HANDLE(outrider_runtime_stats((outrider_runtime *)session, &text), "runtime");
  BAD_HANDLE(outrider_count_tokens(NULL, "a", 1, &count), "runtime");
  BAD_ARGUMENT(outrider_count_message_tokens(runtime, "x", 1, NULL, &count), "a JSON list");
  BAD_ARGUMENT(outrider_result_seed(NULL, NULL), "seed is NULL");
  BAD_REQUEST(outrider_runtime_save_prefix_cache(runtime, "/tmp/x", 6, NULL), "no prefix cache");
  BAD_ARGUMENT(outrider_runtime_load_prefix_cache(runtime, "a\0b", 3, NULL), "no path");
  EXPECT(request == NULL && result == NULL && span == NULL && logprobs == NULL && text == NULL);

  EXPECT_OK(outrider_params_create(&params));
  BAD_ARGUMENT(outrider_params_add_logits_processor(params, NULL, NULL), "on_logits");
  BAD_HANDLE(outrider_params_add_logits_processor(NULL, unchanged, NULL), "params");
  BAD_ARGUMENT(outrider_params_add_ints(params, "generated", 9, NULL, 1), "values");
  BAD_ARGUMENT(outrider_params_add_ints(params, "stop", 4, tokens, 2), "generated");
  BAD_ARGUMENT(outrider_params_set_text(params, "chat_template_kwargs", 20, "3", 1), "JSON");
  EXPECT_OK(outrider_params_set_int(params, "logprobs", 8, 20));
  EXPECT_OK(outrider_params_set_double(params, "deadline", 8, 0));
  BAD_REQUEST(outrider_submit(runtime, "a", 1, params, NULL, NULL, &request), "deadline is 0");
  EXPECT_OK(outrider_params_set_double(params, "deadline", 8, 1e300));
  EXPECT_OK(outrider_submit(runtime, "a", 1, params, NULL, NULL, &request));
  EXPECT_OK(outrider_request_result(request, INT64_MAX, &result));
  EXPECT_OK(outrider_result_logprobs(result, &logprobs));
  EXPECT(logprobs->top == 20 && logprobs->count > 0);
  EXPECT_OK(outrider_request_next(request, INT64_MIN, &span));
  EXPECT_OK(outrider_result_destroy(result));
  EXPECT_OK(outrider_request_destroy(request));
  BAD_HANDLE(outrider_request_destroy(request), "destroyed");
  EXPECT_OK(outrider_request_destroy(NULL));
  EXPECT_OK(outrider_params_destroy(params));
  EXPECT_OK(outrider_session_destroy(session));
  EXPECT_OK(outrider_runtime_close(runtime));
}

static void arguments(const char *plan) {
  outrider_runtime *runtime = open_plan(plan);
  outrider_session *session = create_session(runtime);
  outrider_result *result = NULL;
  outrider_params *params = NULL;
  outrider_runtime *another = NULL;
  const int64_t tokens[] = {1, 2, -3};
  const char *data = NULL;

  BAD_ARGUMENT(outrider_params_create(NULL), "out is NULL");
  BAD_ARGUMENT(outrider_generate(session, "a", 1, NULL, NULL, NULL, NULL), "out is NULL");
  BAD_ARGUMENT(outrider_generate(session, NULL, 1, NULL, NULL, NULL, &result), "prompt");
  BAD_ARGUMENT(outrider_generate_tokens(session, NULL, 1, NULL, NULL, NULL, &result), "prompt");
  BAD_ARGUMENT(outrider_text_get(NULL, &data, NULL), "length is NULL");
  BAD_ARGUMENT(outrider_generate(session, "\xff\xfe", 2, NULL, NULL, NULL, &result), "UTF-8");
  BAD_ARGUMENT(outrider_generate(session, "\xc3", 1, NULL, NULL, NULL, &result), "byte 0");
  BAD_REQUEST(outrider_generate(session, NULL, 0, NULL, NULL, NULL, &result), "prompt");
  BAD_REQUEST(outrider_generate_tokens(session, tokens, 3, NULL, NULL, NULL, &result), "-3");
  BAD_REQUEST(outrider_generate_tokens(session, tokens, 0, NULL, NULL, NULL, &result), "prompt");

  EXPECT_OK(outrider_params_create(&params));
  BAD_ARGUMENT(outrider_params_set_int(params, "temperature", 11, 1), "max_new_tokens");
  BAD_ARGUMENT(outrider_params_set_double(params, "warmth", 6, 1.0), "warmth");
  BAD_ARGUMENT(outrider_params_set_double(params, "t\0p", 3, 1.0), "no key");
  BAD_ARGUMENT(outrider_params_set_text(params, "drafter", 7, "\x80", 1), "UTF-8");
  BAD_ARGUMENT(outrider_params_set_text(params, NULL, 4, "a", 1), "key is NULL");
  BAD_ARGUMENT(outrider_params_set_bool(params, "ignore_eos", 10, 2), "0 or 1");
  BAD_ARGUMENT(outrider_params_add_int(params, "stop", 4, 2), "eos_token_ids");
  EXPECT_OK(outrider_params_set_double(params, "temperature", 11, -1.0)); /* values are checked later */
  BAD_REQUEST(outrider_generate(session, "a", 1, params, NULL, NULL, &result), "temperature");
  EXPECT_OK(outrider_params_set_double(params, "temperature", 11, 0.0));
  BAD_ARGUMENT(outrider_params_set_text(params, "structured_outputs", 18, "{", 1), "JSON");
  BAD_ARGUMENT(outrider_params_set_text(params, "structured_outputs", 18, "{\"a\": 1}", 8), "regex");
  EXPECT(result == NULL);
  EXPECT_OK(outrider_params_destroy(params));
  BAD_HANDLE(outrider_params_set_double(params, "top_p", 5, 1.0), "destroyed");

  static const struct {
    const char *options;
    const char *part;
  } wrong[] = {
      {"{", "not JSON"}, {"[]", "object"}, {"{\"thread\": 1}", "thread"}, {"{\"threads\": \"1\"}", "whole number"},
      {"{\"threads\": true}", "whole number"}, {"{\"verify\": 1}", "truth"}, {"\xff", "UTF-8"},
      {"{\"scheduler\": {\"max_run\": 1}}", "max_running"}, {"{\"prefix_cache\": 1}", "JSON object"},
  };
  for (size_t i = 0; i < sizeof wrong / sizeof wrong[0]; ++i) {
    EXPECT_FAILURE(outrider_runtime_open(plan, strlen(plan), wrong[i].options, strlen(wrong[i].options), &another),
                   OUTRIDER_INVALID_ARGUMENT, wrong[i].part);
  }
  BAD_REQUEST(outrider_runtime_open(plan, strlen(plan), "{\"threads\": -1}", 15, &another), "-1");
  EXPECT_FAILURE(outrider_runtime_open(plan, strlen(plan), "{\"scheduler\": {\"max_waiting\": 0}}", 33, &another),
                 OUTRIDER_REQUEST, "max_waiting is 0");
  BAD_REQUEST(outrider_runtime_open(plan, strlen(plan), "{\"exactness\": \"no\"}", 19, &another), "probed, unchecked");
  EXPECT_FAILURE(outrider_runtime_open(plan, strlen(plan), "{\"backend\": \"gpu\"}", 18, &another), OUTRIDER_PLAN, "gpu");
  BAD_ARGUMENT(outrider_runtime_open(plan, 0, NULL, 0, &another), "path");
  BAD_ARGUMENT(outrider_runtime_open("a\0b", 3, NULL, 0, &another), "path");
  EXPECT_FAILURE(outrider_runtime_open("/nowhere", 8, NULL, 0, &another), OUTRIDER_PLAN, "/nowhere");
  EXPECT(another == NULL);

  EXPECT_OK(outrider_generate(session, "import", 6, NULL, NULL, NULL, &result)); /* still good */
  EXPECT_OK(outrider_result_destroy(result));
  EXPECT_OK(outrider_session_destroy(session));
  EXPECT_OK(outrider_runtime_close(runtime));
}

int main(int count, char **words) {
  EXPECT(count == 3);
  EXPECT(strcmp(outrider_last_error(), "") == 0);
  EXPECT(outrider_abi_version() == OUTRIDER_ABI_VERSION);
  outrider_runtime *runtime = NULL;
  outrider_text *text = NULL;
  EXPECT_FAILURE(outrider_runtime_open(words[2], strlen(words[2]), NULL, 0, &runtime), OUTRIDER_PLAN, words[2]);
  EXPECT_FAILURE(outrider_plan_inspect("/nowhere", 8, &text), OUTRIDER_PLAN, "/nowhere");
  EXPECT(runtime == NULL && text == NULL);
  handles(words[1]);
  requests(words[1]);
  arguments(words[1]);
  puts("ok");
  return EXIT_SUCCESS;
}
