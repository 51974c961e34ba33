/* branches PLAN ONE: what runs of branches give, callbacks that end one, and what is refused; ONE serves one branch.
 * Prints the text of every branch of two runs, a zero after each. */
#include "check.h"

struct seen {
  char text[4][4096];
  size_t length[4];
  size_t tokens[4];
  size_t stop; /* the branch to end when it first speaks; 4: none */
};

static size_t with_logprobs; /* branches that had some */

static int32_t collect(void *user, size_t branch, const int64_t *tokens, size_t count, const char *text, size_t length) {
  struct seen *seen = user;
  EXPECT(branch < 4 && text[length] == '\0' && (count == 0 || tokens != NULL));
  memcpy(seen->text[branch] + seen->length[branch], text, length);
  seen->length[branch] += length;
  seen->tokens[branch] += count;
  return branch == seen->stop ? OUTRIDER_STOP : OUTRIDER_CONTINUE;
}

static void show(outrider_runtime *runtime, const char *request, const outrider_params *params, size_t stop) {
  struct seen seen = {.stop = stop};
  outrider_branches *branches = NULL;
  size_t count = 0, length = 0;
  EXPECT_OK(outrider_generate_branches(runtime, request, strlen(request), params, collect, &seen, &branches));
  EXPECT_OK(outrider_branches_count(branches, &count));
  EXPECT(count > 1 && count <= 4);
  for (size_t branch = 0; branch < count; ++branch) {
    OWN(result) result = NULL;
    const char *text = NULL;
    const int64_t *tokens = NULL;
    size_t many = 0;
    EXPECT_OK(outrider_branches_result(branches, branch, &result));
    EXPECT_OK(outrider_result_text(result, &text, &length));
    EXPECT_OK(outrider_result_tokens(result, &tokens, &many));
    EXPECT(length == seen.length[branch] && memcmp(text, seen.text[branch], length) == 0 && many == seen.tokens[branch]);
    const outrider_logprobs *logprobs = NULL;
    EXPECT_OK(outrider_result_logprobs(result, &logprobs));
    EXPECT(logprobs->count == 0 || (logprobs->count == many && logprobs->top == 2));
    with_logprobs += logprobs->count > 0;
    EXPECT(reason_of(result) == (branch == stop ? OUTRIDER_CANCELLED : OUTRIDER_LENGTH));
    if (stop == 4) fwrite(text, 1, length + 1, stdout);
  }
  const char *stats = NULL;
  EXPECT_OK(outrider_branches_stats(branches, &stats, &length));
  EXPECT(strstr(stats, "\"bytes_copied\"") != NULL && strlen(stats) == length);
  outrider_result *none = NULL;
  BAD_ARGUMENT(outrider_branches_result(branches, count, &none), "there is no branch");
  EXPECT_OK(outrider_branches_destroy(branches));
  BAD_HANDLE(outrider_branches_count(branches, &count), "destroyed");
}

static void refuse(outrider_runtime *runtime, const char *request, outrider_status status, const char *said) {
  outrider_branches *branches = NULL;
  EXPECT_FAILURE(outrider_generate_branches(runtime, request, strlen(request), NULL, NULL, NULL, &branches), status, said);
  EXPECT(branches == NULL);
}

int main(int count, char **words) {
  EXPECT(count == 3);
  OWN(runtime) runtime = open_plan(words[1]);
  OWN(runtime) one = open_plan(words[2]);
  OWN(params) params = params_of(9);
  const char *three =
      "{\"prompt\": \"import\", \"branches\": [\" os\", {\"prompt\": \" sys\", \"temperature\": 1.0, \"seed\": 4}, "
      "{\"prompt\": [9, 8], \"logit_bias\": {\"40\": 9}, \"bad_words\": [\"H\"], \"presence_penalty\": 1, "
      "\"logprobs\": 2}]}";
  show(runtime, three, params, 4);
  EXPECT(with_logprobs == 1);
  show(runtime, "{\"prompt\": [5, 6, 7], \"n\": 4, \"mode\": \"batching\"}", params, 4);
  show(runtime, three, params, 1);
  refuse(one, three, OUTRIDER_REQUEST, "capacity.branches");
  refuse(runtime, "{\"prompt\": \"a\"}", OUTRIDER_REQUEST, "Pass either");
  refuse(runtime, "{\"prompt\": \"a\", \"branches\": [{\"heat\": 1}]}", OUTRIDER_INVALID_ARGUMENT, "no option 'heat'");
  refuse(runtime, "{\"prompt\": \"a\", \"branches\": [{\"prompt\": \"b\", \"client\": \"a\"}]}",
         OUTRIDER_INVALID_ARGUMENT, "no option 'client'");
  refuse(runtime, "{\"prompt\": \"a\", \"m\": 2}", OUTRIDER_INVALID_ARGUMENT, "no option 'm'");
  refuse(runtime, "[1]", OUTRIDER_INVALID_ARGUMENT, "request must be a JSON object");
  outrider_branches *none = NULL;
  EXPECT_OK(outrider_params_set_double(params, "deadline", 8, 1));
  BAD_REQUEST(outrider_generate_branches(runtime, three, strlen(three), params, NULL, NULL, &none), "deadline");
  refuse((outrider_runtime *)params, three, OUTRIDER_INVALID_HANDLE, "one of a params");
  return EXIT_SUCCESS;
}
