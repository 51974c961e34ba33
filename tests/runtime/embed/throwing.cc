// throwing PLAN BRANCHES: a C++ program; its callback's exceptions end the generation and nothing else.
#include <stdexcept>
#include <string>

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

static void notification_throws(void *user, outrider_request *) {
  __atomic_add_fetch(static_cast<int *>(user), 1, __ATOMIC_ACQ_REL);
  throw std::runtime_error("what a notification says");
}

static int32_t wait_a_little(void *, const int64_t *, size_t, float *, size_t) {
  pause_for(20);
  return OUTRIDER_CONTINUE;
}

static int32_t logits_throw(void *, const int64_t *, size_t count, float *, size_t) {
  if (count < 2) return OUTRIDER_CONTINUE;
  throw std::runtime_error("");
}

// A request whose notification throws is cancelled; one whose function of logits throws ends, and the others continue.
static void requests(outrider_runtime *runtime) {
  OWN(params) params = params_of(60);
  OWN(params) throwing = params_of(20);
  OWN(params) slow = params_of(100);
  OWN(result) result = nullptr;
  const outrider_span *span = nullptr;
  int calls = 0;
  EXPECT_OK(outrider_params_add_logits_processor(throwing, logits_throw, nullptr));
  EXPECT_OK(outrider_params_add_logits_processor(slow, wait_a_little, nullptr));
  OWN(request) request = submit(runtime, params, nullptr, nullptr);
  OWN(request) noisy = submit(runtime, slow, notification_throws, &calls);
  OWN(request) failing = submit(runtime, throwing, nullptr, nullptr);
  EXPECT_FAILURE(outrider_request_result(failing, -1, &result), OUTRIDER_CALLBACK, "a std::exception without a text");
  while (outrider_request_next(noisy, -1, &span) == OUTRIDER_OK) EXPECT(!span->over);
  EXPECT_FAILURE(outrider_request_next(noisy, 0, &span), OUTRIDER_CALLBACK, "what a notification says");
  EXPECT_FAILURE(outrider_request_result(noisy, 0, &result), OUTRIDER_CALLBACK, "what a notification says");
  EXPECT(__atomic_load_n(&calls, __ATOMIC_ACQUIRE) == 1);
  EXPECT_OK(outrider_request_result(request, -1, &result));
  EXPECT(reason_of(result) == OUTRIDER_LENGTH);
}

int main(int count, char **words) {
  EXPECT(count == 3);
  OWN(runtime) runtime = open_plan(words[1]);
  OWN(runtime) several = open_plan(words[2]);
  OWN(session) session = create_session(runtime);
  OWN(params) params = params_of(30);
  OWN(result) result = nullptr;
  OWN(branches) branches = nullptr;
  for (int i = 0; i < 3; ++i) {
    int spans = 0;
    EXPECT_FAILURE(outrider_generate(session, "import", 6, params, throws, &spans, &result), OUTRIDER_CALLBACK,
                   "what the program says");
    EXPECT(spans == 3);
    EXPECT_FAILURE(outrider_generate(session, "import", 6, params, throws_a_number, nullptr, &result),
                   OUTRIDER_CALLBACK, "no std::exception");
  }
  EXPECT(result == nullptr);
  EXPECT_OK(outrider_session_reset(session));
  EXPECT_OK(outrider_generate(session, "import", 6, params, nullptr, nullptr, &result));
  const std::string request = R"({"prompt": "import", "branches": ["a", "b"]})";
  EXPECT_FAILURE(outrider_generate_branches(several, request.data(), request.size(), params, branch_throws, nullptr,
                                            &branches),
                 OUTRIDER_CALLBACK, "what a branch says");
  EXPECT(branches == nullptr);
  EXPECT_OK(outrider_generate_branches(several, request.data(), request.size(), params, nullptr, nullptr, &branches));
  requests(several);
  std::puts("ok");
  return EXIT_SUCCESS;
}
