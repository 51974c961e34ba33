// The one C++ file of the library: an exception must not unwind the interpreter's frames.
#include "callback.h"

#include <cstdio>
#include <exception>

int32_t outrider_call_back(void *callback, const int64_t *tokens, size_t count, const char *text, size_t length) {
  auto &own = *static_cast<outrider_callback *>(callback);
  if (own.threw) return OUTRIDER_STOP;
  try {
    return own.on_span(own.user, tokens, count, text, length);
  } catch (const std::exception &error) {
    own.threw = 1;
    std::snprintf(own.what, sizeof own.what, "%s", error.what());
  } catch (...) {
    own.threw = 1;
    std::snprintf(own.what, sizeof own.what, "no std::exception");
  }
  return OUTRIDER_STOP;
}
