/* Between liboutrider and the bridge that it loads. */
#pragma once

#include <stddef.h>
#include <stdint.h>

#define OUTRIDER_BRIDGE "liboutrider-python.so"

enum {
  OUTRIDER_KIND_RUNTIME = 1,
  OUTRIDER_KIND_SESSION = 2,
  OUTRIDER_KIND_PARAMS = 3,
  OUTRIDER_KIND_RESULT = 4,
  OUTRIDER_KIND_TEXT = 5,
  OUTRIDER_KIND_BRANCHES = 6,
  OUTRIDER_KIND_REQUEST = 7
};

/* What a prompt is: UTF-8, int64_t, or JSON of messages. */
enum { OUTRIDER_PROMPT_TEXT = 0, OUTRIDER_PROMPT_TOKENS = 1, OUTRIDER_PROMPT_MESSAGES = 2 };

typedef struct {
  const void *data;
  size_t length;
  int32_t form;
} outrider_prompt;

typedef void outrider_set_error(const char *text, size_t length);

/* Starts Python in the environment `home`, unless the process runs one, and Outrider in it. 1, or 0 with the reason in
 * `why`. Errors of calls go to `set_error`, in the thread that called. */
typedef int outrider_bridge_start_function(const char *home, outrider_set_error *set_error, char *why, size_t size);

/* Cancels what generates, and waits for it, before the process ends; does nothing where Python has ended already. */
typedef void outrider_bridge_stop_function(void);
