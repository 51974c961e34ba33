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

  EXPECT_FAILURE(outrider_session_create(NULL, &other), OUTRIDER_INVALID_HANDLE, "NULL");
  EXPECT_FAILURE(outrider_session_create((outrider_runtime *)session, &other), OUTRIDER_INVALID_HANDLE, "one of a session");
  EXPECT_FAILURE(outrider_session_reset((outrider_session *)(uintptr_t)12345678), OUTRIDER_INVALID_HANDLE, "is none");
  EXPECT_FAILURE(outrider_session_reset((outrider_session *)&data), OUTRIDER_INVALID_HANDLE, "is none");
  EXPECT_FAILURE(outrider_session_cancel(NULL), OUTRIDER_INVALID_HANDLE, "NULL");
  EXPECT_FAILURE(outrider_generate(NULL, "a", 1, NULL, NULL, NULL, &result), OUTRIDER_INVALID_HANDLE, "session");
  EXPECT_FAILURE(outrider_generate(session, "a", 1, (outrider_params *)runtime, NULL, NULL, &result),
                 OUTRIDER_INVALID_HANDLE, "params");
  EXPECT_FAILURE(outrider_result_text(NULL, &data, &length), OUTRIDER_INVALID_HANDLE, "result");
  EXPECT_FAILURE(outrider_result_finish_reason((outrider_result *)session, &reason), OUTRIDER_INVALID_HANDLE, "result");
  EXPECT_FAILURE(outrider_text_get(NULL, &data, &length), OUTRIDER_INVALID_HANDLE, "text");
  EXPECT(other == session && result == NULL && length == 7 && reason == 7 && strcmp(data, "untouched") == 0);

  EXPECT_FAILURE(outrider_session_destroy((outrider_session *)runtime), OUTRIDER_INVALID_HANDLE, "one of a runtime");
  EXPECT_OK(outrider_session_destroy(session));
  EXPECT_FAILURE(outrider_session_destroy(session), OUTRIDER_INVALID_HANDLE, "destroyed");
  EXPECT_FAILURE(outrider_session_reset(session), OUTRIDER_INVALID_HANDLE, "destroyed");
  session = create_session(runtime);
  EXPECT_OK(outrider_runtime_close(runtime));
  EXPECT_FAILURE(outrider_runtime_close(runtime), OUTRIDER_INVALID_HANDLE, "destroyed");
  EXPECT_FAILURE(outrider_session_create(runtime, &other), OUTRIDER_INVALID_HANDLE, "destroyed");
  EXPECT_OK(outrider_generate(session, "import", 6, NULL, NULL, NULL, &result)); /* sessions go on */
  EXPECT_OK(outrider_result_destroy(result));
  EXPECT_FAILURE(outrider_result_text(result, &data, &length), OUTRIDER_INVALID_HANDLE, "destroyed");
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

  EXPECT_FAILURE(outrider_submit(NULL, "a", 1, NULL, NULL, NULL, &request), OUTRIDER_INVALID_HANDLE, "runtime");
  EXPECT_FAILURE(outrider_submit((outrider_runtime *)session, "a", 1, NULL, NULL, NULL, &request),
                 OUTRIDER_INVALID_HANDLE, "one of a session");
  EXPECT_FAILURE(outrider_submit(runtime, "a", 1, (outrider_params *)session, NULL, NULL, &request),
                 OUTRIDER_INVALID_HANDLE, "params");
  EXPECT_FAILURE(outrider_submit(runtime, "a", 1, NULL, NULL, NULL, NULL), OUTRIDER_INVALID_ARGUMENT,
                 "outrider_submit: out is NULL");
  EXPECT_FAILURE(outrider_submit(runtime, NULL, 1, NULL, NULL, NULL, &request), OUTRIDER_INVALID_ARGUMENT, "prompt");
  EXPECT_FAILURE(outrider_submit(runtime, "\xff", 1, NULL, NULL, NULL, &request), OUTRIDER_INVALID_ARGUMENT, "UTF-8");
  EXPECT_FAILURE(outrider_submit(runtime, NULL, 0, NULL, NULL, NULL, &request), OUTRIDER_REQUEST, "prompt is empty");
  EXPECT_FAILURE(outrider_submit_tokens(runtime, tokens, 2, NULL, NULL, NULL, &request), OUTRIDER_REQUEST, "300");
  EXPECT_FAILURE(outrider_submit_tokens(runtime, NULL, 2, NULL, NULL, NULL, &request), OUTRIDER_INVALID_ARGUMENT,
                 "prompt");
  EXPECT_FAILURE(outrider_submit_messages(runtime, NULL, 2, NULL, NULL, NULL, &request), OUTRIDER_INVALID_ARGUMENT,
                 "messages is NULL");
  EXPECT_FAILURE(outrider_submit_messages(runtime, "x", 1, NULL, NULL, NULL, &request), OUTRIDER_INVALID_ARGUMENT,
                 "a JSON list of messages");
  EXPECT_FAILURE(outrider_generate_messages(session, "x", 1, NULL, NULL, NULL, &result), OUTRIDER_INVALID_ARGUMENT,
                 "a JSON list of messages");
  EXPECT_FAILURE(outrider_request_next(NULL, 0, &span), OUTRIDER_INVALID_HANDLE, "request");
  EXPECT_FAILURE(outrider_request_next((outrider_request *)session, -1, &span), OUTRIDER_INVALID_HANDLE, "session");
  EXPECT_FAILURE(outrider_request_next(NULL, 0, NULL), OUTRIDER_INVALID_ARGUMENT, "span is NULL");
  EXPECT_FAILURE(outrider_request_result(NULL, 0, &result), OUTRIDER_INVALID_HANDLE, "request");
  EXPECT_FAILURE(outrider_request_cancel((outrider_request *)runtime), OUTRIDER_INVALID_HANDLE, "request");
  EXPECT_FAILURE(outrider_request_destroy((outrider_request *)runtime), OUTRIDER_INVALID_HANDLE, "one of a runtime");
  EXPECT_FAILURE(outrider_result_logprobs(NULL, &logprobs), OUTRIDER_INVALID_HANDLE, "result");
  EXPECT_FAILURE(outrider_runtime_drain(NULL, 0), OUTRIDER_INVALID_HANDLE, "runtime");
  EXPECT_FAILURE(outrider_runtime_stats((outrider_runtime *)session, &text), OUTRIDER_INVALID_HANDLE, "runtime");
  EXPECT_FAILURE(outrider_count_tokens(NULL, "a", 1, &count), OUTRIDER_INVALID_HANDLE, "runtime");
  EXPECT_FAILURE(outrider_count_message_tokens(runtime, "x", 1, NULL, &count), OUTRIDER_INVALID_ARGUMENT, "a JSON list");
  EXPECT_FAILURE(outrider_result_seed(NULL, NULL), OUTRIDER_INVALID_ARGUMENT, "seed is NULL");
  EXPECT_FAILURE(outrider_runtime_save_prefix_cache(runtime, "/tmp/x", 6, NULL), OUTRIDER_REQUEST, "no prefix cache");
  EXPECT_FAILURE(outrider_runtime_load_prefix_cache(runtime, "a\0b", 3, NULL), OUTRIDER_INVALID_ARGUMENT, "no path");
  EXPECT(request == NULL && result == NULL && span == NULL && logprobs == NULL && text == NULL);

  EXPECT_OK(outrider_params_create(&params));
  EXPECT_FAILURE(outrider_params_add_logits_processor(params, NULL, NULL), OUTRIDER_INVALID_ARGUMENT, "on_logits");
  EXPECT_FAILURE(outrider_params_add_logits_processor(NULL, unchanged, NULL), OUTRIDER_INVALID_HANDLE, "params");
  EXPECT_FAILURE(outrider_params_add_ints(params, "generated", 9, NULL, 1), OUTRIDER_INVALID_ARGUMENT, "values");
  EXPECT_FAILURE(outrider_params_add_ints(params, "stop", 4, tokens, 2), OUTRIDER_INVALID_ARGUMENT, "generated");
  EXPECT_FAILURE(outrider_params_set_text(params, "chat_template_kwargs", 20, "3", 1), OUTRIDER_INVALID_ARGUMENT, "JSON");
  EXPECT_OK(outrider_params_set_int(params, "logprobs", 8, 21));
  EXPECT_FAILURE(outrider_submit(runtime, "a", 1, params, NULL, NULL, &request), OUTRIDER_REQUEST, "from 0 to 20");
  EXPECT_OK(outrider_params_set_int(params, "logprobs", 8, 20));
  EXPECT_OK(outrider_params_set_double(params, "deadline", 8, 0));
  EXPECT_FAILURE(outrider_submit(runtime, "a", 1, params, NULL, NULL, &request), OUTRIDER_REQUEST, "deadline is 0");
  EXPECT_OK(outrider_params_set_double(params, "deadline", 8, 1e300));
  EXPECT_OK(outrider_submit(runtime, "a", 1, params, NULL, NULL, &request));
  EXPECT_OK(outrider_request_result(request, INT64_MAX, &result));
  EXPECT_OK(outrider_result_logprobs(result, &logprobs));
  EXPECT(logprobs->top == 20 && logprobs->count > 0);
  EXPECT_OK(outrider_request_next(request, INT64_MIN, &span));
  EXPECT_OK(outrider_result_destroy(result));
  EXPECT_OK(outrider_request_destroy(request));
  EXPECT_FAILURE(outrider_request_destroy(request), OUTRIDER_INVALID_HANDLE, "destroyed");
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

  EXPECT_FAILURE(outrider_params_create(NULL), OUTRIDER_INVALID_ARGUMENT, "out is NULL");
  EXPECT_FAILURE(outrider_generate(session, "a", 1, NULL, NULL, NULL, NULL), OUTRIDER_INVALID_ARGUMENT, "out is NULL");
  EXPECT_FAILURE(outrider_generate(session, NULL, 1, NULL, NULL, NULL, &result), OUTRIDER_INVALID_ARGUMENT, "prompt");
  EXPECT_FAILURE(outrider_generate_tokens(session, NULL, 1, NULL, NULL, NULL, &result), OUTRIDER_INVALID_ARGUMENT, "prompt");
  EXPECT_FAILURE(outrider_text_get(NULL, &data, NULL), OUTRIDER_INVALID_ARGUMENT, "length is NULL");
  EXPECT_FAILURE(outrider_generate(session, "\xff\xfe", 2, NULL, NULL, NULL, &result), OUTRIDER_INVALID_ARGUMENT, "UTF-8");
  EXPECT_FAILURE(outrider_generate(session, "\xc3", 1, NULL, NULL, NULL, &result), OUTRIDER_INVALID_ARGUMENT, "byte 0");
  EXPECT_FAILURE(outrider_generate(session, NULL, 0, NULL, NULL, NULL, &result), OUTRIDER_REQUEST, "prompt");
  EXPECT_FAILURE(outrider_generate_tokens(session, tokens, 3, NULL, NULL, NULL, &result), OUTRIDER_REQUEST, "-3");
  EXPECT_FAILURE(outrider_generate_tokens(session, tokens, 0, NULL, NULL, NULL, &result), OUTRIDER_REQUEST, "prompt");

  EXPECT_OK(outrider_params_create(&params));
  EXPECT_FAILURE(outrider_params_set_int(params, "temperature", 11, 1), OUTRIDER_INVALID_ARGUMENT, "max_new_tokens");
  EXPECT_FAILURE(outrider_params_set_double(params, "warmth", 6, 1.0), OUTRIDER_INVALID_ARGUMENT, "warmth");
  EXPECT_FAILURE(outrider_params_set_double(params, "t\0p", 3, 1.0), OUTRIDER_INVALID_ARGUMENT, "no key");
  EXPECT_FAILURE(outrider_params_set_text(params, "drafter", 7, "\x80", 1), OUTRIDER_INVALID_ARGUMENT, "UTF-8");
  EXPECT_FAILURE(outrider_params_set_text(params, NULL, 4, "a", 1), OUTRIDER_INVALID_ARGUMENT, "key is NULL");
  EXPECT_FAILURE(outrider_params_set_bool(params, "ignore_eos", 10, 2), OUTRIDER_INVALID_ARGUMENT, "0 or 1");
  EXPECT_FAILURE(outrider_params_add_int(params, "stop", 4, 2), OUTRIDER_INVALID_ARGUMENT, "eos_token_ids");
  EXPECT_OK(outrider_params_set_double(params, "temperature", 11, -1.0)); /* values are checked later */
  EXPECT_FAILURE(outrider_generate(session, "a", 1, params, NULL, NULL, &result), OUTRIDER_REQUEST, "temperature");
  EXPECT_OK(outrider_params_set_double(params, "temperature", 11, 0.0));
  EXPECT_OK(outrider_params_set_text(params, "drafter", 7, "nobody", 6));
  EXPECT_FAILURE(outrider_generate(session, "a", 1, params, NULL, NULL, &result), OUTRIDER_REQUEST, "nobody");
  EXPECT_OK(outrider_params_set_text(params, "drafter", 7, "none", 4));
  EXPECT_FAILURE(outrider_params_set_text(params, "structured_outputs", 18, "{", 1), OUTRIDER_INVALID_ARGUMENT, "JSON");
  EXPECT_FAILURE(outrider_params_set_text(params, "structured_outputs", 18, "{\"a\": 1}", 8), OUTRIDER_INVALID_ARGUMENT,
                 "regex");
  EXPECT_OK(outrider_params_set_text(params, "structured_outputs", 18, "{\"regex\": \"([\"}", 15));
  EXPECT_FAILURE(outrider_generate(session, "a", 1, params, NULL, NULL, &result), OUTRIDER_REQUEST, "unclosed");
  EXPECT_OK(outrider_params_set_text(params, "structured_outputs", 18, "{\"regex\": \"[ab]\"}", 17));
  EXPECT_OK(outrider_params_add_int(params, "eos_token_ids", 13, 1000000000));
  EXPECT_FAILURE(outrider_generate(session, "a", 1, params, NULL, NULL, &result), OUTRIDER_REQUEST, "1000000000");
  for (int i = 0; i < 17; ++i) {
    EXPECT_OK(outrider_params_add_text(params, "stop", 4, "a", 1));
  }
  EXPECT_FAILURE(outrider_generate(session, "a", 1, params, NULL, NULL, &result), OUTRIDER_REQUEST, "more than 16");
  EXPECT(result == NULL);
  EXPECT_OK(outrider_params_destroy(params));
  EXPECT_FAILURE(outrider_params_set_double(params, "top_p", 5, 1.0), OUTRIDER_INVALID_HANDLE, "destroyed");

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
  EXPECT_FAILURE(outrider_runtime_open(plan, strlen(plan), "{\"threads\": -1}", 15, &another), OUTRIDER_REQUEST, "-1");
  EXPECT_FAILURE(outrider_runtime_open(plan, strlen(plan), "{\"scheduler\": {\"max_waiting\": 0}}", 33, &another),
                 OUTRIDER_REQUEST, "max_waiting is 0");
  EXPECT_FAILURE(outrider_runtime_open(plan, strlen(plan), "{\"exactness\": \"no\"}", 19, &another), OUTRIDER_REQUEST,
                 "probed, unchecked");
  EXPECT_FAILURE(outrider_runtime_open(plan, strlen(plan), "{\"backend\": \"gpu\"}", 18, &another), OUTRIDER_PLAN, "gpu");
  EXPECT_FAILURE(outrider_runtime_open(plan, 0, NULL, 0, &another), OUTRIDER_INVALID_ARGUMENT, "path");
  EXPECT_FAILURE(outrider_runtime_open("a\0b", 3, NULL, 0, &another), OUTRIDER_INVALID_ARGUMENT, "path");
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
