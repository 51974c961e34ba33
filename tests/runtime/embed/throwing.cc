// throwing PLAN BRANCHES: a C++ program; its callback's exceptions end the generation and nothing else.
#include <chrono>
#include <stdexcept>
#include <string>
#include <thread>

#include "check.h"

static int32_t throws(void *user, const int64_t *, size_t, const char *, size_t) {
  if (++*static_cast<int *>(user) < 3) return OUTRIDER_CONTINUE;
  throw std::runtime_error("what the program says");
}

static int32_t throws_a_number(void *, const int64_t *, size_t, const char *, size_t) { throw 7; }

static int32_t branch_throws(void *, size_t branch, const int64_t *, size_t, const char *, size_t) {
  if (branch == 0) return OUTRIDER_CONTINUE;
  throw std::runtime_error("what a branch says");
}

static void told_and_throws(void *user, outrider_request *) {
  __atomic_add_fetch(static_cast<int *>(user), 1, __ATOMIC_ACQ_REL);
  throw std::runtime_error("what a notification says");
}

static int32_t take_time(void *, const int64_t *, size_t, float *, size_t) {
  std::this_thread::sleep_for(std::chrono::milliseconds(20));
  return OUTRIDER_CONTINUE;
}

static int32_t logits_throw(void *, const int64_t *, size_t count, float *, size_t) {
  if (count < 2) return OUTRIDER_CONTINUE;
  throw std::runtime_error("");
}

// A request whose notification throws is cancelled; one whose function of logits throws ends, and the others continue.
static void requests(outrider_runtime *runtime) {
  outrider_params *params = params_of(60), *throwing = params_of(20), *slow = params_of(100);
  outrider_request *request = nullptr, *told = nullptr, *failing = nullptr;
  outrider_result *result = nullptr;
  const outrider_span *span = nullptr;
  int calls = 0;
  EXPECT_OK(outrider_params_add_logits_processor(throwing, logits_throw, nullptr));
  EXPECT_OK(outrider_submit(runtime, "import", 6, params, nullptr, nullptr, &request));
  EXPECT_OK(outrider_params_add_logits_processor(slow, take_time, nullptr));
  EXPECT_OK(outrider_submit(runtime, "import", 6, slow, told_and_throws, &calls, &told));
  EXPECT_OK(outrider_submit(runtime, "import", 6, throwing, nullptr, nullptr, &failing));
  EXPECT_FAILURE(outrider_request_result(failing, -1, &result), OUTRIDER_CALLBACK, "a std::exception without a text");
  EXPECT_OK(outrider_request_result(request, -1, &result));
  const int64_t *tokens = nullptr;
  size_t length = 0;
  EXPECT_OK(outrider_result_tokens(result, &tokens, &length));
  EXPECT(length == 60);
  EXPECT_OK(outrider_result_destroy(result));
  while (outrider_request_next(told, -1, &span) == OUTRIDER_OK) EXPECT(!span->over);
  EXPECT_FAILURE(outrider_request_next(told, 0, &span), OUTRIDER_CALLBACK, "what a notification says");
  EXPECT_FAILURE(outrider_request_result(told, 0, &result), OUTRIDER_CALLBACK, "what a notification says");
  EXPECT(__atomic_load_n(&calls, __ATOMIC_ACQUIRE) == 1);
  for (outrider_request *each : {request, told, failing}) EXPECT_OK(outrider_request_destroy(each));
  EXPECT_OK(outrider_params_destroy(params));
  EXPECT_OK(outrider_params_destroy(throwing));
  EXPECT_OK(outrider_params_destroy(slow));
}

int main(int count, char **words) {
  EXPECT(count == 3);
  outrider_runtime *runtime = open_plan(words[1]);
  outrider_session *session = create_session(runtime);
  outrider_params *params = params_of(30);
  outrider_result *result = nullptr;
  int spans = 0;
  const std::string prompt = "import";
  for (int i = 0; i < 3; ++i) {
    spans = 0;
    EXPECT_FAILURE(outrider_generate(session, prompt.data(), prompt.size(), params, throws, &spans, &result),
                   OUTRIDER_CALLBACK, "what the program says");
    EXPECT(spans == 3 && result == nullptr);
    EXPECT_FAILURE(outrider_generate(session, prompt.data(), prompt.size(), params, throws_a_number, nullptr, &result),
                   OUTRIDER_CALLBACK, "no std::exception");
  }
  EXPECT_OK(outrider_session_reset(session));
  EXPECT_OK(outrider_generate(session, prompt.data(), prompt.size(), params, nullptr, nullptr, &result));
  EXPECT_OK(outrider_result_destroy(result));
  outrider_runtime *several = open_plan(words[2]);
  outrider_branches *branches = nullptr;
  const std::string request = R"({"prompt": "import", "branches": ["a", "b"]})";
  EXPECT_FAILURE(outrider_generate_branches(several, request.data(), request.size(), params, branch_throws, nullptr,
                                            &branches),
                 OUTRIDER_CALLBACK, "what a branch says");
  EXPECT(branches == nullptr);
  EXPECT_OK(outrider_generate_branches(several, request.data(), request.size(), params, nullptr, nullptr, &branches));
  EXPECT_OK(outrider_branches_destroy(branches));
  requests(several);
  EXPECT_OK(outrider_runtime_close(several));
  EXPECT_OK(outrider_params_destroy(params));
  EXPECT_OK(outrider_session_destroy(session));
  EXPECT_OK(outrider_runtime_close(runtime));
  std::puts("ok");
  return EXIT_SUCCESS;
}
