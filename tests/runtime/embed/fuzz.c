/* fuzz PLAN SEED OPTIONS MANIFESTS: mutated options and manifests; every call is a status with a sentence.
 *
 * PLAN is a copy whose plan.json is overwritten. Mutations are bytes flipped, cut out, repeated and swapped for
 * numbers. */
#include "check.h"

static uint64_t state;

static uint64_t below(uint64_t limit) { return draw(&state, limit); }

static size_t mutate(char *data, size_t length, size_t capacity) {
  static const char *const put[] = {"-1", "0", "1e999", "null", "true", "\"\"", "[]", "{}", "9223372036854775808", "\\u0000",
                                    "[[[[[[[[", "NaN", "\xff", "../..", "\"a\": 1,"};
  for (uint64_t left = 1 + below(4); left > 0 && length > 0; --left) {
    const size_t at = below(length);
    const size_t run = 1 + below(length - at < 20 ? length - at : 20);
    switch (below(4)) {
      case 0: data[at] ^= (char)(1 << below(8)); break;
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
        const char *text = put[below(sizeof put / sizeof put[0])];
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

static void check(outrider_status status) {
  EXPECT(status >= OUTRIDER_OK && status <= OUTRIDER_FULL && status != OUTRIDER_INTERNAL);
  EXPECT(status == OUTRIDER_OK || strlen(outrider_last_error()) > 10);
}

static void options(const char *plan, long times) {
  static const char *const given[] = {"{\"cuda_graphs\": true, \"threads\": 2}",
                                      "{\"scheduler\": {\"max_running\": 2, \"mode\": \"batching\"}}",
                                      "{\"prefix_cache\": {\"memory_bytes\": 65536, \"eviction_target\": 0.5}}",
                                      "max_new_tokens", "stop"};
  OWN(params) params = params_of(4);
  for (long i = 0; i < times; ++i) {
    char text[512];
    const char *from = given[below(5)];
    size_t length = strlen(from);
    memcpy(text, from, length);
    length = mutate(text, length, sizeof text);
    outrider_runtime *runtime = NULL;
    check(outrider_params_set_int(params, text, length, (int64_t)below(UINT64_MAX)));
    check(outrider_params_add_text(params, text, length, text, length));
    check(outrider_runtime_open(plan, 1, text, length, &runtime)); /* no plan: options are checked first */
    EXPECT(runtime == NULL);
  }
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
    OWN(text) text = NULL;
    OWN(runtime) runtime = NULL;
    check(outrider_plan_inspect(plan, strlen(plan), &text));
    if (text != NULL) check(outrider_runtime_open(plan, strlen(plan), "{\"threads\": 1}", 14, &runtime));
  }
}

int main(int count, char **words) {
  EXPECT(count == 5);
  state = strtoull(words[2], NULL, 10);
  options(words[1], strtol(words[3], NULL, 10));
  manifests(words[1], strtol(words[4], NULL, 10));
  puts("ok");
  return EXIT_SUCCESS;
}
