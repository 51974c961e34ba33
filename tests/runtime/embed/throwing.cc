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
  EXPECT_OK(outrider_runtime_close(several));
  EXPECT_OK(outrider_params_destroy(params));
  EXPECT_OK(outrider_session_destroy(session));
  EXPECT_OK(outrider_runtime_close(runtime));
  std::puts("ok");
  return EXIT_SUCCESS;
}
