// The one C++ file of the library: an exception must not unwind the interpreter's frames.
#include "callback.h"

#include <cstdio>
#include <exception>

namespace {

template <class Call>
int32_t guarded(outrider_callback &own, const Call &call) {
  if (own.threw) return OUTRIDER_STOP;
  try {
    return call();
  } catch (const std::exception &error) {
    own.threw = 1;
    std::snprintf(own.what, sizeof own.what, "%s", error.what());
  } catch (...) {
    own.threw = 1;
    std::snprintf(own.what, sizeof own.what, "no std::exception");
  }
  return OUTRIDER_STOP;
}

}  // namespace

int32_t outrider_call_back(void *callback, const int64_t *tokens, size_t count, const char *text, size_t length) {
  auto &own = *static_cast<outrider_callback *>(callback);
  return guarded(own, [&] { return own.on_span(own.user, tokens, count, text, length); });
}

int32_t outrider_call_branch_back(void *callback, size_t branch, const int64_t *tokens, size_t count, const char *text,
                                  size_t length) {
  auto &own = *static_cast<outrider_callback *>(callback);
  return guarded(own, [&] { return own.on_branch(own.user, branch, tokens, count, text, length); });
}
