/* ends PLAN PROMPT...: prints the number of tokens and the text that follows each prompt up to an end token. */
#include "check.h"

int main(int count, char **arguments) {
  EXPECT(count > 2);
  outrider_runtime *runtime = open_plan(arguments[1]);
  outrider_params *params = params_of(30);
  EXPECT_OK(outrider_params_set_bool(params, "ignore_eos", 10, 0));
  for (int i = 2; i < count; ++i) {
    outrider_session *session = create_session(runtime);
    outrider_result *result = NULL;
    EXPECT_OK(outrider_generate(session, arguments[i], strlen(arguments[i]), params, NULL, NULL, &result));
    const int64_t *tokens;
    const char *text;
    size_t length, size;
    EXPECT_OK(outrider_result_tokens(result, &tokens, &length));
    EXPECT_OK(outrider_result_text(result, &text, &size));
    printf("%zu %s%c", length, text, 0);
    EXPECT_OK(outrider_result_destroy(result));
    EXPECT_OK(outrider_session_destroy(session));
  }
  EXPECT_OK(outrider_params_destroy(params));
  EXPECT_OK(outrider_runtime_close(runtime));
  return EXIT_SUCCESS;
}
