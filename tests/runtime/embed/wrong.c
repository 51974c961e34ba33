/* wrong PLAN DAMAGED: every wrong handle and argument is a status and a sentence, and nothing else happens. */
#include "check.h"

static const int64_t tokens[] = {1, 300, -3};

static void handles(outrider_runtime *runtime, outrider_session *session) {
  outrider_session *other = session;
  outrider_result *result = NULL;
  outrider_request *request = NULL;
  outrider_text *text = NULL;
  const outrider_span *span = NULL;
  const outrider_logprobs *logprobs = NULL;
  const char *data = "untouched";
  size_t length = 7;
  int32_t reason = 7;

  BAD_HANDLE(outrider_session_create(NULL, &other), "NULL");
  BAD_HANDLE(outrider_session_create((outrider_runtime *)session, &other), "one of a session");
  BAD_HANDLE(outrider_session_reset((outrider_session *)(uintptr_t)12345678), "is none");
  BAD_HANDLE(outrider_session_reset((outrider_session *)&data), "is none");
  BAD_HANDLE(outrider_session_cancel(NULL), "NULL");
  BAD_HANDLE(outrider_session_destroy((outrider_session *)runtime), "one of a runtime");
  BAD_HANDLE(outrider_generate(NULL, "a", 1, NULL, NULL, NULL, &result), "session");
  BAD_HANDLE(outrider_generate(session, "a", 1, (outrider_params *)runtime, NULL, NULL, &result), "params");
  BAD_HANDLE(outrider_submit(NULL, "a", 1, NULL, NULL, NULL, &request), "runtime");
  BAD_HANDLE(outrider_submit(runtime, "a", 1, (outrider_params *)session, NULL, NULL, &request), "params");
  BAD_HANDLE(outrider_request_next((outrider_request *)session, -1, &span), "session");
  BAD_HANDLE(outrider_request_result(NULL, 0, &result), "request");
  BAD_HANDLE(outrider_request_cancel((outrider_request *)runtime), "request");
  BAD_HANDLE(outrider_result_text(NULL, &data, &length), "result");
  BAD_HANDLE(outrider_result_finish_reason((outrider_result *)session, &reason), "result");
  BAD_HANDLE(outrider_result_logprobs(NULL, &logprobs), "result");
  BAD_HANDLE(outrider_runtime_drain(NULL, 0), "runtime");
  BAD_HANDLE(outrider_runtime_stats((outrider_runtime *)session, &text), "runtime");
  BAD_HANDLE(outrider_text_get(NULL, &data, &length), "text");
  EXPECT(other == session && result == NULL && request == NULL && span == NULL && logprobs == NULL && text == NULL);
  EXPECT(length == 7 && reason == 7 && strcmp(data, "untouched") == 0);
  EXPECT_OK(outrider_runtime_close(NULL));
  EXPECT_OK(outrider_request_destroy(NULL));
}

static void arguments(outrider_runtime *runtime, outrider_session *session, outrider_params *params) {
  outrider_result *result = NULL;
  outrider_request *request = NULL;
  const char *data = NULL;
  size_t count;

  BAD_ARGUMENT(outrider_submit(runtime, "a", 1, NULL, NULL, NULL, NULL), "outrider_submit: out is NULL");
  BAD_ARGUMENT(outrider_submit(runtime, NULL, 1, NULL, NULL, NULL, &request), "prompt");
  BAD_REQUEST(outrider_submit(runtime, NULL, 0, NULL, NULL, NULL, &request), "prompt is empty");
  BAD_REQUEST(outrider_submit_tokens(runtime, tokens, 2, NULL, NULL, NULL, &request), "300");
  BAD_ARGUMENT(outrider_submit_messages(runtime, "x", 1, NULL, NULL, NULL, &request), "a JSON list of messages");
  BAD_ARGUMENT(outrider_generate(session, "\xff\xfe", 2, NULL, NULL, NULL, &result), "UTF-8");
  BAD_ARGUMENT(outrider_generate(session, "\xc3", 1, NULL, NULL, NULL, &result), "byte 0");
  BAD_ARGUMENT(outrider_generate_tokens(session, NULL, 1, NULL, NULL, NULL, &result), "prompt");
  BAD_REQUEST(outrider_generate_tokens(session, tokens + 2, 1, NULL, NULL, NULL, &result), "-3");
  BAD_ARGUMENT(outrider_generate_messages(session, NULL, 2, NULL, NULL, NULL, &result), "messages is NULL");
  BAD_ARGUMENT(outrider_request_next(NULL, 0, NULL), "span is NULL");
  BAD_ARGUMENT(outrider_text_get(NULL, &data, NULL), "length is NULL");
  BAD_ARGUMENT(outrider_count_message_tokens(runtime, "x", 1, NULL, &count), "a JSON list");
  BAD_ARGUMENT(outrider_result_seed(NULL, NULL), "seed is NULL");
  BAD_REQUEST(outrider_runtime_save_prefix_cache(runtime, "/tmp/x", 6, NULL), "no prefix cache");
  BAD_ARGUMENT(outrider_runtime_load_prefix_cache(runtime, "a\0b", 3, NULL), "no path");
  BAD_ARGUMENT(outrider_params_add_logits_processor(params, NULL, NULL), "on_logits");
  BAD_ARGUMENT(outrider_params_add_ints(params, "generated", 9, NULL, 1), "values");
  BAD_ARGUMENT(outrider_params_add_ints(params, "stop", 4, tokens, 2), "generated");
  BAD_ARGUMENT(outrider_params_add_int(params, "stop", 4, 2), "eos_token_ids");
  BAD_ARGUMENT(outrider_params_set_int(params, "temperature", 11, 1), "max_new_tokens");
  BAD_ARGUMENT(outrider_params_set_double(params, "t\0p", 3, 1.0), "no key");
  BAD_ARGUMENT(outrider_params_set_bool(params, "ignore_eos", 10, 2), "0 or 1");
  BAD_ARGUMENT(outrider_params_set_text(params, "drafter", 7, "\x80", 1), "UTF-8");
  BAD_ARGUMENT(outrider_params_set_text(params, NULL, 4, "a", 1), "key is NULL");
  BAD_ARGUMENT(outrider_params_set_text(params, "structured_outputs", 18, "{", 1), "JSON");
  BAD_ARGUMENT(outrider_params_set_text(params, "structured_outputs", 18, "{\"a\": 1}", 8), "regex");
  BAD_ARGUMENT(outrider_params_set_text(params, "logit_bias", 10, "5", 1), "JSON object");
  EXPECT_OK(outrider_params_set_double(params, "temperature", 11, -1.0)); /* values are checked later */
  BAD_REQUEST(outrider_generate(session, "a", 1, params, NULL, NULL, &result), "temperature");
  EXPECT_OK(outrider_params_set_double(params, "temperature", 11, 0.0));
  EXPECT_OK(outrider_params_set_double(params, "deadline", 8, 0));
  BAD_REQUEST(outrider_submit(runtime, "a", 1, params, NULL, NULL, &request), "deadline is 0");
  EXPECT(result == NULL && request == NULL);
}

/* The largest numbers that are taken. */
static void limits(outrider_runtime *runtime, outrider_params *params) {
  const outrider_span *span = NULL;
  const outrider_logprobs *logprobs = NULL;
  OWN(result) result = NULL;
  EXPECT_OK(outrider_params_set_int(params, "logprobs", 8, 20));
  EXPECT_OK(outrider_params_set_double(params, "deadline", 8, 1e300));
  outrider_request *request = submit(runtime, params, NULL, NULL);
  EXPECT_OK(outrider_request_result(request, INT64_MAX, &result));
  EXPECT_OK(outrider_result_logprobs(result, &logprobs));
  EXPECT(logprobs->top == 20 && logprobs->count > 0);
  EXPECT_OK(outrider_request_next(request, INT64_MIN, &span));
  EXPECT_OK(outrider_request_destroy(request));
  BAD_HANDLE(outrider_request_destroy(request), "destroyed");
}

static void refused(const char *plan, const char *options, outrider_status status, const char *part) {
  outrider_runtime *runtime = NULL;
  EXPECT_FAILURE(outrider_runtime_open(plan, strlen(plan), options, strlen(options), &runtime), status, part);
  EXPECT(runtime == NULL);
}

int main(int count, char **words) {
  EXPECT(count == 3);
  EXPECT(strcmp(outrider_last_error(), "") == 0);
  EXPECT(outrider_abi_version() == OUTRIDER_ABI_VERSION);
  const char *plan = words[1], *data = NULL;
  size_t length;
  outrider_text *text = NULL;
  refused(words[2], "", OUTRIDER_PLAN, words[2]);
  refused("/nowhere", "", OUTRIDER_PLAN, "/nowhere");
  refused("", "", OUTRIDER_INVALID_ARGUMENT, "path");
  refused(plan, "{", OUTRIDER_INVALID_ARGUMENT, "not JSON");
  refused(plan, "{\"thread\": 1}", OUTRIDER_INVALID_ARGUMENT, "thread");
  refused(plan, "\xff", OUTRIDER_INVALID_ARGUMENT, "UTF-8");
  refused(plan, "{\"threads\": -1}", OUTRIDER_REQUEST, "-1");
  refused(plan, "{\"scheduler\": {\"max_waiting\": 0}}", OUTRIDER_REQUEST, "max_waiting is 0");
  refused(plan, "{\"backend\": \"gpu\"}", OUTRIDER_PLAN, "gpu");
  EXPECT_FAILURE(outrider_plan_inspect("/nowhere", 8, &text), OUTRIDER_PLAN, "/nowhere");
  outrider_runtime *runtime = open_plan(plan);
  outrider_session *session = create_session(runtime), *other = NULL;
  outrider_params *params = params_of(12);
  outrider_result *result = NULL;
  handles(runtime, session);
  arguments(runtime, session, params);
  limits(runtime, params);
  EXPECT_OK(outrider_params_destroy(params));
  BAD_HANDLE(outrider_params_set_double(params, "top_p", 5, 1.0), "destroyed");
  EXPECT_OK(outrider_runtime_close(runtime));
  BAD_HANDLE(outrider_runtime_close(runtime), "destroyed");
  BAD_HANDLE(outrider_session_create(runtime, &other), "destroyed");
  EXPECT_OK(outrider_generate(session, "import", 6, NULL, NULL, NULL, &result)); /* sessions continue */
  EXPECT_OK(outrider_result_destroy(result));
  BAD_HANDLE(outrider_result_text(result, &data, &length), "destroyed");
  EXPECT_OK(outrider_session_destroy(session));
  BAD_HANDLE(outrider_session_destroy(session), "destroyed");
  EXPECT(text == NULL && other == NULL);
  puts("ok");
  return EXIT_SUCCESS;
}
