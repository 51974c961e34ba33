/* fuzz PLAN SEED OPTIONS MANIFESTS: mutated options and manifests; every call is a status with a sentence.
 *
 * PLAN is a copy whose plan.json is overwritten. Mutations are bytes flipped, cut out, repeated and swapped for numbers.
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
  EXPECT(status >= OUTRIDER_OK && status < OUTRIDER_INTERNAL);
  EXPECT(status == OUTRIDER_OK || strlen(outrider_last_error()) > 10);
}

static void options(const char *plan, long times) {
  static const char *const given[] = {"{\"threads\": 1}", "{\"backend\": \"onnxruntime-cpu\", \"verify\": false}",
                                      "{\"cuda_graphs\": true, \"threads\": 2}"};
  static const char *const keys[] = {"max_new_tokens", "temperature", "stop", "drafter", "seed", "eos_token_ids"};
  outrider_params *params = NULL;
  EXPECT_OK(outrider_params_create(&params));
  for (long i = 0; i < times; ++i) {
    char text[512];
    const char *from = draw(2) ? given[draw(3)] : keys[draw(6)];
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
  manifests(words[1], strtol(words[4], NULL, 10));
  puts("ok");
  return EXIT_SUCCESS;
}
