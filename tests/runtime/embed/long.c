/* long PLAN: behind a context that is long for the plan, lossless mode says what full KV says, with any budget. */
#include "check.h"

enum { PROMPT = 90, NEW = 40 };

static outrider_result *said(outrider_runtime *runtime, const char *mode, int64_t budget) {
  int64_t prompt[PROMPT];
  for (int i = 0; i < PROMPT; ++i) prompt[i] = 1 + i * i % 17;
  outrider_session *session = create_session(runtime);
  outrider_params *params = params_of(NEW);
  outrider_result *result = NULL;
  EXPECT_OK(outrider_params_set_text(params, "drafter", 7, "chain", 5));
  EXPECT_OK(outrider_params_set_text(params, "partial_kv", 10, mode, strlen(mode)));
  EXPECT_OK(outrider_params_set_bool(params, "auto_disable", 12, 0));
  if (budget != 0) EXPECT_OK(outrider_params_set_int(params, "partial_budget", 14, budget));
  EXPECT_OK(outrider_generate_tokens(session, prompt, PROMPT, params, NULL, NULL, &result));
  const char *stats;
  char entry[64];
  size_t length;
  EXPECT_OK(outrider_result_stats(result, &stats, &length));
  snprintf(entry, sizeof entry, "\"partial_mode\": \"%s\"", mode);
  EXPECT(strstr(stats, entry) != NULL);
  EXPECT((strstr(stats, "\"partial_rounds\": 0,") != NULL) == (strcmp(mode, "off") == 0));
  EXPECT_OK(outrider_params_destroy(params));
  EXPECT_OK(outrider_session_destroy(session));
  return result;
}

int main(int count, char **arguments) {
  EXPECT(count == 2);
  outrider_runtime *runtime = open_plan(arguments[1]);
  const int64_t *expected, *tokens, budgets[] = {0, 1, 2, -1};
  size_t length, found;
  outrider_result *plain = said(runtime, "off", 0), *result = NULL;
  EXPECT_OK(outrider_result_tokens(plain, &expected, &length));
  EXPECT(length == NEW);
  for (size_t i = 0; i < sizeof budgets / sizeof *budgets; ++i) {
    result = said(runtime, "lossless", budgets[i]);
    EXPECT_OK(outrider_result_tokens(result, &tokens, &found));
    EXPECT(found == length && memcmp(tokens, expected, length * sizeof *tokens) == 0);
    EXPECT_OK(outrider_result_destroy(result));
  }
  EXPECT_OK(outrider_result_destroy(said(runtime, "lossy", -1)));
  EXPECT_OK(outrider_result_destroy(plain));

  outrider_session *session = create_session(runtime);
  outrider_params *params = params_of(NEW);
  EXPECT_OK(outrider_params_set_int(params, "partial_budget", 14, -2));
  EXPECT_FAILURE(outrider_generate(session, "a", 1, params, NULL, NULL, &result), OUTRIDER_REQUEST, "or auto");
  EXPECT_OK(outrider_params_destroy(params));
  EXPECT_OK(outrider_session_destroy(session));
  EXPECT_OK(outrider_runtime_close(runtime));
  puts("ok");
  return EXIT_SUCCESS;
}
