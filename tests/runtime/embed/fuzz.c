/* fuzz PLAN SEED OPTIONS MANIFESTS: mutated options and manifests, and calls of requests in any order with any handles;
 * every call is a status with a sentence.
 *
 * PLAN is a copy whose plan.json is overwritten. Mutations are bytes flipped, cut out, repeated and swapped for
 * numbers.
 */

#include "check.h"

static uint64_t state;

static uint64_t draw(uint64_t below) { /* splitmix64 */
  uint64_t z = (state += 0x9e3779b97f4a7c15u);
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
  z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
  return (z ^ (z >> 31)) % below;
}

static size_t mutate(char *data, size_t length, size_t capacity) {
  static const char *const put[] = {"-1", "0", "1e999", "null", "true", "\"\"", "[]", "{}", "9223372036854775808", "\\u0000",
                                    "[[[[[[[[", "NaN", "\xff", "../..", "\"a\": 1,"};
  for (uint64_t left = 1 + draw(4); left > 0 && length > 0; --left) {
    const size_t at = draw(length);
    const size_t run = 1 + draw(length - at < 20 ? length - at : 20);
    switch (draw(4)) {
      case 0:
        data[at] ^= (char)(1 << draw(8));
        break;
      case 1:
        memmove(data + at, data + at + run, length - at - run);
        length -= run;
        break;
      case 2:
        if (length + run > capacity) break;
        memmove(data + at + run, data + at, length - at);
        length += run;
        break;
      default: {
        const char *text = put[draw(sizeof put / sizeof put[0])];
        const size_t size = strlen(text);
        if (length + size > capacity) break;
        memmove(data + at + size, data + at, length - at);
        memcpy(data + at, text, size);
        length += size;
      }
    }
  }
  return length;
}

static void told(outrider_status status) {
  EXPECT(status >= OUTRIDER_OK && status <= OUTRIDER_FULL && status != OUTRIDER_INTERNAL);
  EXPECT(status == OUTRIDER_OK || strlen(outrider_last_error()) > 10);
}

static void options(const char *plan, long times) {
  static const char *const given[] = {"{\"threads\": 1}", "{\"backend\": \"onnxruntime-cpu\", \"verify\": false}",
                                      "{\"cuda_graphs\": true, \"threads\": 2}",
                                      "{\"scheduler\": {\"max_running\": 2, \"mode\": \"batching\"}}",
                                      "{\"prefix_cache\": {\"memory_bytes\": 65536, \"eviction_target\": 0.5}}"};
  static const char *const keys[] = {"max_new_tokens", "temperature", "stop", "drafter", "seed", "eos_token_ids"};
  outrider_params *params = NULL;
  EXPECT_OK(outrider_params_create(&params));
  for (long i = 0; i < times; ++i) {
    char text[512];
    const char *from = draw(2) ? given[draw(5)] : keys[draw(6)];
    size_t length = strlen(from);
    memcpy(text, from, length);
    length = mutate(text, length, sizeof text);
    outrider_runtime *runtime = NULL;
    switch (draw(7)) {
      case 0: told(outrider_params_set_int(params, text, length, (int64_t)draw(UINT64_MAX))); break;
      case 1: told(outrider_params_set_uint(params, text, length, draw(UINT64_MAX))); break;
      case 2: told(outrider_params_set_double(params, text, length, (double)draw(1000) / 100)); break;
      case 3: told(outrider_params_set_text(params, "drafter", 7, text, length)); break;
      case 4: told(outrider_params_add_text(params, text, length, text, length)); break;
      case 5: told(outrider_params_set_bool(params, text, length, (int32_t)draw(3))); break;
      default: /* nothing there: options are looked at first */
        told(outrider_runtime_open(plan, 1, text, length, &runtime));
        EXPECT(runtime == NULL);
    }
  }
  EXPECT_OK(outrider_params_destroy(params));
}

enum { HANDLES = 8 };

static long taken, full; /* requests, and refusals for a full queue: a slow machine has more of these */

static int32_t any_number(void *user, const int64_t *tokens, size_t count, float *logits, size_t vocabulary) {
  (void)user, (void)tokens;
  for (int i = 0; i < 4; ++i) {
    logits[(count * 31 + (size_t)i * 7) % vocabulary] = (float)i * 1e30f * (count % 5 ? -1 : 1);
  }
  return count == 9 ? OUTRIDER_STOP : OUTRIDER_CONTINUE;
}

static void heard(void *user, outrider_request *request) {
  const outrider_span *span = NULL;
  const outrider_status status = outrider_request_next(request, 0, &span);
  EXPECT(user == NULL && status >= OUTRIDER_OK && status != OUTRIDER_INTERNAL);
}

/* A handle of any kind and state, among them ones that nobody was given. */
static void *any(void *const *handles) {
  void *const handle = handles[draw(HANDLES)];
  return draw(8) ? handle : (void *)((uintptr_t)handle + draw(3) - 1);
}

static outrider_params *mutated_params(void) {
  static const char *const objects[] = {"{\"40\": 9, \"41\": -3.5}", "{\"regex\": \"[a-z]{2,5}\"}",
                                        "{\"choice\": [\"a\", \"b\"]}", "{\"json\": {\"type\": \"object\"}}"};
  static const char *const integers[] = {"logprobs", "priority", "min_tokens", "top_k", "draft_tokens", "seed"};
  outrider_params *params = params_of(12);
  char text[256];
  const size_t which = draw(4);
  memcpy(text, objects[which], strlen(objects[which]));
  const size_t length = mutate(text, strlen(objects[which]), sizeof text);
  const char *key = which ? "structured_outputs" : "logit_bias";
  if (draw(2)) told(outrider_params_set_text(params, key, strlen(key), text, length));
  key = integers[draw(6)];
  told(outrider_params_set_int(params, key, strlen(key), (int64_t)draw(24) - 2));
  if (draw(4) == 0) told(outrider_params_set_double(params, "deadline", 8, (double)draw(20) / 1000));
  if (draw(4) == 0) EXPECT_OK(outrider_params_add_logits_processor(params, any_number, NULL));
  for (uint64_t left = draw(3); left > 0; --left) {
    const int64_t tokens[] = {(int64_t)draw(302), (int64_t)draw(302) - 1};
    key = draw(2) ? "generated" : "allowed_token_ids";
    told(outrider_params_add_ints(params, key, strlen(key), tokens, draw(3)));
  }
  return params;
}

static void submit_any(outrider_runtime *runtime, const outrider_params *params, void **request) {
  static const char messages[] =
      "[{\"role\": \"user\", \"content\": [{\"type\": \"text\", \"text\": \"a\"}]}, {\"role\": \"tool\"}]";
  char text[256];
  int64_t tokens[5];
  outrider_request *made = NULL;
  const outrider_on_ready on_ready = draw(2) ? heard : NULL;
  memcpy(text, messages, sizeof messages);
  const size_t length = draw(3) ? mutate(text, sizeof messages - 1, sizeof text) : sizeof messages - 1;
  for (size_t i = 0; i < 5; ++i) tokens[i] = (int64_t)draw(draw(4) ? 300 : UINT64_MAX);
  outrider_status status;
  switch (draw(3)) {
    case 0: status = outrider_submit(runtime, text, length, params, on_ready, NULL, &made); break;
    case 1: status = outrider_submit_tokens(runtime, tokens, draw(6), params, on_ready, NULL, &made); break;
    default: status = outrider_submit_messages(runtime, text, length, params, on_ready, NULL, &made);
  }
  told(status);
  full += status == OUTRIDER_FULL;
  if (made == NULL) return;
  *request = made;
  ++taken;
}

/* Calls in any order. Handles are forgotten, destroyed twice, and passed for one another. */
static void requests(const char *plan, long times) {
  static const char options[] = "{\"threads\": 1, \"scheduler\": {\"max_waiting\": 3}, \"prefix_cache_tokens\": 512}";
  outrider_runtime *runtime = NULL;
  EXPECT_OK(outrider_runtime_open(plan, strlen(plan), options, sizeof options - 1, &runtime));
  void *handles[HANDLES] = {runtime, NULL};
  for (long i = 0; i < times; ++i) {
    void *handle = any(handles), **place = &handles[1 + draw(HANDLES - 1)];
    const int64_t timeout = (int64_t)draw(4);
    const outrider_span *span = NULL;
    const outrider_logprobs *logprobs = NULL;
    outrider_result *result = NULL;
    outrider_text *text = NULL;
    outrider_params *params = NULL;
    switch (draw(9)) {
      case 0:
      case 1:
        params = mutated_params();
        submit_any(draw(8) ? runtime : handle, draw(8) ? params : handle, place);
        EXPECT_OK(outrider_params_destroy(params));
        break;
      case 2:
      case 3: told(outrider_request_next(handle, timeout, &span)); break;
      case 4:
        told(outrider_request_result(handle, timeout, &result));
        if (result != NULL) *place = result;
        break;
      case 5: told(outrider_request_cancel(handle)); break;
      case 6: told(outrider_result_logprobs(handle, &logprobs)); break;
      case 7:
        told(outrider_runtime_stats(handle, &text));
        EXPECT_OK(outrider_text_destroy(text));
        break;
      default: told(draw(2) ? outrider_request_destroy(handle) : outrider_result_destroy(handle));
    }
    EXPECT(span == NULL || (span->text[span->length] == '\0' && span->logprobs->count <= span->count));
  }
  const outrider_status status = outrider_runtime_drain(runtime, 0);
  EXPECT(status == OUTRIDER_OK || status == OUTRIDER_TIMEOUT);
  EXPECT_OK(outrider_runtime_close(runtime));
  EXPECT(taken > 0 && taken + full > times / 30);
}

static void manifests(const char *plan, long times) {
  char path[4096];
  EXPECT((size_t)snprintf(path, sizeof path, "%s/plan.json", plan) < sizeof path);
  FILE *file = fopen(path, "rb");
  static char whole[1 << 22], changed[1 << 22];
  EXPECT(file != NULL);
  const size_t length = fread(whole, 1, sizeof whole / 2, file);
  fclose(file);
  for (long i = 0; i < times; ++i) {
    memcpy(changed, whole, length);
    const size_t left = mutate(changed, length, sizeof changed);
    file = fopen(path, "wb");
    EXPECT(file != NULL && fwrite(changed, 1, left, file) == left && fclose(file) == 0);
    outrider_text *text = NULL;
    told(outrider_plan_inspect(plan, strlen(plan), &text));
    if (text != NULL) {
      outrider_runtime *runtime = NULL; /* it agrees with itself: does it run? */
      const outrider_status status = outrider_runtime_open(plan, strlen(plan), "{\"threads\": 1}", 14, &runtime);
      told(status);
      EXPECT_OK(outrider_runtime_close(runtime));
      EXPECT_OK(outrider_text_destroy(text));
    }
  }
}

int main(int count, char **words) {
  EXPECT(count == 5);
  state = strtoull(words[2], NULL, 10);
  options(words[1], strtol(words[3], NULL, 10));
  requests(words[1], strtol(words[3], NULL, 10) / 4);
  manifests(words[1], strtol(words[4], NULL, 10));
  puts("ok");
  return EXIT_SUCCESS;
}
