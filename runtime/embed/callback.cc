// The one C++ file of the library: an exception must not unwind the interpreter's frames.
#include "callback.h"

#include <cstdio>
#include <exception>

namespace {

// What the call returns, or OUTRIDER_STOP where it throws, with a text in `what`.
template <class Call>
int32_t caught(char *what, size_t size, const Call &call) {
  try {
    return call();
  } catch (const std::exception &error) {
    const char *text = error.what();
    std::snprintf(what, size, "%s", text != nullptr && text[0] != '\0' ? text : "a std::exception without a text");
  } catch (...) {
    std::snprintf(what, size, "no std::exception");
  }
  return OUTRIDER_STOP;
}

template <class Call>
int32_t guarded(outrider_callback &own, const Call &call) {
  if (own.threw) return OUTRIDER_STOP;
  own.what[0] = '\0';
  const int32_t returned = caught(own.what, sizeof own.what, call);
  own.threw = own.what[0] != '\0';
  return returned;
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

int32_t outrider_call_ready(outrider_function function, void *user, uint64_t request, char *what, size_t size) {
  return caught(what, size, [&] {
    reinterpret_cast<outrider_on_ready>(function)(user, reinterpret_cast<outrider_request *>(request));
    return static_cast<int32_t>(OUTRIDER_CONTINUE);
  });
}

int32_t outrider_call_logits(outrider_function function, void *user, const int64_t *tokens, size_t count, float *logits,
                             size_t vocabulary, char *what, size_t size) {
  return caught(what, size, [&] {
    return reinterpret_cast<outrider_on_logits>(function)(user, tokens, count, logits, vocabulary);
  });
}
