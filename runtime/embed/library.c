/* liboutrider: the calls of outrider.h. It knows no Python: it finds the environment, loads the bridge that starts an
 * interpreter there, and passes numbers and addresses (calls.h). Handles are numbers that look like pointers, so that
 * a wrong one is looked up and never followed. */
#define _GNU_SOURCE
#include "outrider.h"

#include <dlfcn.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "bridge.h"
#include "callback.h"
#include "calls.h"

#if !defined(OUTRIDER_BUNDLE) && !defined(OUTRIDER_BUILT_FOR)
#error "define OUTRIDER_BUNDLE, or OUTRIDER_BUILT_FOR, the environment that is started where OUTRIDER_HOME is not set"
#endif

_Static_assert(sizeof(void *) >= sizeof(uint64_t), "handles are 64-bit numbers");

#define CALLS(CALL)                                                                                                  \
  CALL(inspect) CALL(open) CALL(drain) CALL(runtime_stats) CALL(count_tokens) CALL(save_cache) CALL(load_cache)       \
  CALL(session) CALL(reset) CALL(cancel) CALL(params) CALL(set_int) CALL(set_uint) CALL(set_double) CALL(set_bool) CALL(set_text)  \
  CALL(add_text) CALL(add_ints) CALL(add_function) CALL(generate) CALL(text) CALL(tokens) CALL(result_text)          \
  CALL(finish_reason) CALL(seed) CALL(logprobs) CALL(stats) CALL(submit) CALL(next) CALL(request_result) CALL(cancel_request)   \
  CALL(branches) CALL(branch_count) CALL(branch_result) CALL(branches_stats) CALL(destroy)

#define SLOT(name) __typeof__(outrider_py_##name) *name;
static struct {
  CALLS(SLOT)
} py;

/* -- What went wrong ----------------------------------------------------------------------------------------------- */

static _Thread_local char last_error[4096];

static void set_error(const char *text, size_t length) {
  if (length >= sizeof last_error) {
    length = sizeof last_error - 1;
    while (length > 0 && ((unsigned char)text[length] & 0xc0) == 0x80) --length; /* no half characters */
  }
  memcpy(last_error, text, length);
  last_error[length] = '\0';
}

static outrider_status fail(outrider_status status, const char *format, ...) {
  va_list values;
  va_start(values, format);
  vsnprintf(last_error, sizeof last_error, format, values);
  va_end(values);
  return status;
}

int32_t outrider_abi_version(void) { return OUTRIDER_ABI_VERSION; }

const char *outrider_last_error(void) { return last_error; }

/* -- Starting ------------------------------------------------------------------------------------------------------ */

#ifdef OUTRIDER_BUNDLE
static const char how_to_repair[] =
    "the bundle is incomplete, or made for another C library or processor: copy its whole folder again, or make it "
    "anew there (outrider embed --bundle)";
#else
static const char how_to_repair[] =
    "set OUTRIDER_HOME to the virtual environment in which Outrider is installed, or build the library again there "
    "(outrider embed)";
#endif

/* The path of `name` in the folder of this library, wherever links to it lie. */
static int beside(char *path, size_t size, const char *name) {
  Dl_info own;
  if (!dladdr((void *)outrider_abi_version, &own) || own.dli_fname == NULL) return 0;
  char *real = realpath(own.dli_fname, NULL);
  if (real == NULL) return 0;
  const int length = snprintf(path, size, "%.*s/%s", (int)(strrchr(real, '/') - real), real, name);
  free(real);
  return length > 0 && (size_t)length < size;
}

static outrider_bridge_stop_function *stop;
static pid_t stopping; /* the process that stops at its exit: no child of it does */

static void stop_at_exit(void) {
  if (getpid() == stopping) stop();
}

/* Called with a plan that is open: handlers run in reverse order, so that this one runs before those of the libraries
 * that the plan has loaded, whose objects a pass under way still uses. */
static void expect_exit(void) {
  stopping = getpid();
  if (stop != NULL) atexit(stop_at_exit);
}

/* The folder of the environment that is started. */
static outrider_status find_home(char *home, size_t size) {
#ifdef OUTRIDER_BUNDLE
  if (!beside(home, size, "outrider")) {
    return fail(OUTRIDER_ENVIRONMENT, "the library cannot find its own folder, where its interpreter lies");
  }
#else
  const char *from = "OUTRIDER_HOME", *given = getenv("OUTRIDER_HOME");
  if (given == NULL || given[0] == '\0') {
    given = OUTRIDER_BUILT_FOR;
    from = "the library was built for";
  }
  char path[4096];
  const int length = snprintf(path, sizeof path, "%s/bin/python3", given);
  if (length < 0 || (size_t)length >= sizeof path || access(path, X_OK) != 0) {
    return fail(OUTRIDER_ENVIRONMENT, "there is no Python environment at %.2000s (%s): it has no bin/python3; %s",
                given, from, how_to_repair);
  }
  snprintf(home, size, "%s", given);
#endif
  return OUTRIDER_OK;
}

static outrider_status start_once(void) {
  char home[4096], path[4096];
  const outrider_status found = find_home(home, sizeof home);
  if (found != OUTRIDER_OK) return found;
  if (!beside(path, sizeof path, OUTRIDER_BRIDGE)) {
    return fail(OUTRIDER_ENVIRONMENT, "the library cannot find its own folder, where %s lies", OUTRIDER_BRIDGE);
  }
  /* Global, because modules of the interpreter look for its symbols without naming its library. */
  void *bridge = dlopen(path, RTLD_NOW | RTLD_GLOBAL);
  if (bridge == NULL) {
    return fail(OUTRIDER_ENVIRONMENT, "Python cannot be loaded: %.2000s; %s", dlerror(), how_to_repair);
  }
  outrider_bridge_start_function *begin;
  *(void **)&begin = dlsym(bridge, "outrider_bridge_start");
  char why[2048] = "";
  if (begin == NULL || !begin(home, set_error, why, sizeof why)) {
    return fail(OUTRIDER_ENVIRONMENT, "Outrider cannot be started in %.1000s: %s; %s", home,
                begin == NULL ? "the bridge is of another version" : why, how_to_repair);
  }
#define LOAD(name)                                           \
  *(void **)&py.name = dlsym(bridge, "outrider_py_" #name);  \
  if (py.name == NULL) return fail(OUTRIDER_ENVIRONMENT, "%s is of another version than the library", OUTRIDER_BRIDGE);
  CALLS(LOAD)
  *(void **)&stop = dlsym(bridge, "outrider_bridge_stop");
  return OUTRIDER_OK;
}

/* What fails may be repaired, and is tried again by the next call. */
static outrider_status start(void) {
  static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
  static int started;
  if (__atomic_load_n(&started, __ATOMIC_ACQUIRE)) return OUTRIDER_OK;
  pthread_mutex_lock(&lock);
  const outrider_status status = started ? OUTRIDER_OK : start_once();
  if (status == OUTRIDER_OK) __atomic_store_n(&started, 1, __ATOMIC_RELEASE);
  pthread_mutex_unlock(&lock);
  return status;
}

/* -- Arguments ------------------------------------------------------------------------------------------------------ */

static uint64_t number(const void *handle) { return (uint64_t)(uintptr_t)handle; }

#define NEED_IF(needed, pointer) \
  if ((needed) && (pointer) == NULL) return fail(OUTRIDER_INVALID_ARGUMENT, "%s: %s is NULL", __func__, #pointer)
#define NEED(pointer) NEED_IF(1, pointer)
#define NEED_BYTES(data, length) NEED_IF((length) != 0, data)
#define START                                \
  do {                                       \
    const outrider_status started = start(); \
    if (started != OUTRIDER_OK) return started; \
  } while (0)

/* Ends a function with what a call of the Python side returns. */
#define CALL(name, ...)            \
  do {                             \
    START;                         \
    return py.name(__VA_ARGS__);   \
  } while (0)

/* The same of a call that makes a handle: `*out` gets it. */
#define MAKE(name, ...)                                                 \
  do {                                                                  \
    uint64_t made = 0;                                                  \
    START;                                                              \
    const outrider_status status = py.name(__VA_ARGS__);                \
    if (status == OUTRIDER_OK) *(void **)out = (void *)(uintptr_t)made; \
    return status;                                                      \
  } while (0)

/* -- The calls: those that differ only by a name or a type are made by a macro ------------------------------------ */

#define DESTROY(function, type, kind)                    \
  outrider_status outrider_##function(type *handle) {    \
    if (handle == NULL) return OUTRIDER_OK;              \
    CALL(destroy, number(handle), kind);                 \
  }
DESTROY(runtime_close, outrider_runtime, OUTRIDER_KIND_RUNTIME)
DESTROY(session_destroy, outrider_session, OUTRIDER_KIND_SESSION)
DESTROY(params_destroy, outrider_params, OUTRIDER_KIND_PARAMS)
DESTROY(result_destroy, outrider_result, OUTRIDER_KIND_RESULT)
DESTROY(text_destroy, outrider_text, OUTRIDER_KIND_TEXT)
DESTROY(branches_destroy, outrider_branches, OUTRIDER_KIND_BRANCHES)
DESTROY(request_destroy, outrider_request, OUTRIDER_KIND_REQUEST)

#define ACT(function, call, type) \
  outrider_status outrider_##function(type *handle) { CALL(call, number(handle)); }
ACT(session_reset, reset, outrider_session)
ACT(session_cancel, cancel, outrider_session)
ACT(request_cancel, cancel_request, outrider_request)

#define GET(function, call, type, value, name)                          \
  outrider_status outrider_##function(const type *handle, value *name) { \
    NEED(name);                                                         \
    CALL(call, number(handle), name);                                   \
  }
GET(result_finish_reason, finish_reason, outrider_result, int32_t, reason)
GET(result_seed, seed, outrider_result, uint64_t, seed)
GET(result_logprobs, logprobs, outrider_result, const outrider_logprobs *, out)
GET(branches_count, branch_count, outrider_branches, size_t, count)

#define GET_ARRAY(function, call, type, element, data, count)                                     \
  outrider_status outrider_##function(const type *handle, const element **data, size_t *count) { \
    NEED(data);                                                                                   \
    NEED(count);                                                                                  \
    CALL(call, number(handle), data, count);                                                      \
  }
GET_ARRAY(text_get, text, outrider_text, char, data, length)
GET_ARRAY(result_tokens, tokens, outrider_result, int64_t, tokens, count)
GET_ARRAY(result_text, result_text, outrider_result, char, data, length)
GET_ARRAY(result_stats, stats, outrider_result, char, data, length)
GET_ARRAY(branches_stats, branches_stats, outrider_branches, char, data, length)

outrider_status outrider_plan_inspect(const char *plan, size_t plan_length, outrider_text **out) {
  NEED(out);
  NEED_BYTES(plan, plan_length);
  MAKE(inspect, plan, plan_length, &made);
}

outrider_status outrider_runtime_open(const char *plan, size_t plan_length, const char *options, size_t options_length,
                                      outrider_runtime **out) {
  NEED(out);
  NEED_BYTES(plan, plan_length);
  NEED_BYTES(options, options_length);
  START;
  uint64_t made = 0;
  const outrider_status status = py.open(plan, plan_length, options, options_length, &made);
  if (status != OUTRIDER_OK) return status;
  static pthread_once_t once = PTHREAD_ONCE_INIT;
  pthread_once(&once, expect_exit);
  *out = (outrider_runtime *)(uintptr_t)made;
  return OUTRIDER_OK;
}

outrider_status outrider_runtime_drain(outrider_runtime *runtime, int64_t timeout_ms) {
  CALL(drain, number(runtime), timeout_ms);
}

outrider_status outrider_runtime_stats(const outrider_runtime *runtime, outrider_text **out) {
  NEED(out);
  MAKE(runtime_stats, number(runtime), &made);
}

outrider_status outrider_count_tokens(outrider_runtime *runtime, const char *prompt, size_t prompt_length,
                                      size_t *count) {
  NEED(count);
  NEED_BYTES(prompt, prompt_length);
  const outrider_prompt given = {prompt, prompt_length, OUTRIDER_PROMPT_TEXT};
  CALL(count_tokens, number(runtime), &given, 0, count);
}

outrider_status outrider_count_message_tokens(outrider_runtime *runtime, const char *messages, size_t messages_length,
                                              const outrider_params *params, size_t *count) {
  NEED(count);
  NEED_BYTES(messages, messages_length);
  const outrider_prompt given = {messages, messages_length, OUTRIDER_PROMPT_MESSAGES};
  CALL(count_tokens, number(runtime), &given, number(params), count);
}

#define CACHE(function, call)                                                                                    \
  outrider_status outrider_runtime_##function(outrider_runtime *runtime, const char *path, size_t path_length, \
                                              size_t *tokens) {                                                 \
    NEED_BYTES(path, path_length);                                                                               \
    CALL(call, number(runtime), path, path_length, tokens);                                                      \
  }
CACHE(save_prefix_cache, save_cache)
CACHE(load_prefix_cache, load_cache)

outrider_status outrider_session_create(outrider_runtime *runtime, outrider_session **out) {
  NEED(out);
  MAKE(session, number(runtime), &made);
}

outrider_status outrider_params_create(outrider_params **out) {
  NEED(out);
  MAKE(params, &made);
}

#define SET(function, type)                                                                             \
  outrider_status outrider_params_##function(outrider_params *params, const char *key, size_t key_length, \
                                             type value) {                                              \
    NEED_BYTES(key, key_length);                                                                        \
    CALL(function, number(params), key, key_length, value);                                             \
  }
SET(set_int, int64_t)
SET(set_uint, uint64_t)
SET(set_double, double)
SET(set_bool, int32_t)

#define SET_ARRAY(function, element, data, count)                                                        \
  outrider_status outrider_params_##function(outrider_params *params, const char *key, size_t key_length, \
                                             const element *data, size_t count) {                        \
    NEED_BYTES(key, key_length);                                                                         \
    NEED_BYTES(data, count);                                                                             \
    CALL(function, number(params), key, key_length, data, count);                                        \
  }
SET_ARRAY(set_text, char, value, value_length)
SET_ARRAY(add_text, char, value, value_length)
SET_ARRAY(add_ints, int64_t, values, count)

outrider_status outrider_params_add_int(outrider_params *params, const char *key, size_t key_length, int64_t value) {
  NEED_BYTES(key, key_length);
  return outrider_params_add_ints(params, key, key_length, &value, 1);
}

outrider_status outrider_params_add_logits_processor(outrider_params *params, outrider_on_logits on_logits,
                                                     void *user) {
  NEED(on_logits);
  CALL(add_function, number(params), outrider_call_logits, (outrider_function)on_logits, user);
}

/* What becomes of a call with a callback: of one that threw, what the call gave is dropped. */
static outrider_status settle(outrider_status status, const outrider_callback *callback, uint64_t made, int32_t kind,
                              void **out) {
  if (status != OUTRIDER_OK) return status;
  if (callback->threw) {
    py.destroy(made, kind);
    return fail(OUTRIDER_CALLBACK, "the callback threw an exception, %s; it must return", callback->what);
  }
  *out = (void *)(uintptr_t)made;
  return OUTRIDER_OK;
}

#define GENERATE(function, element, prompt, form)                                                                   \
  outrider_status outrider_##function(outrider_session *session, const element *prompt, size_t length,              \
                                      const outrider_params *params, outrider_on_span on_span, void *user,          \
                                      outrider_result **out) {                                                      \
    NEED(out);                                                                                                      \
    NEED_BYTES(prompt, length);                                                                                     \
    START;                                                                                                          \
    outrider_callback callback = {.on_span = on_span, .user = user};                                                \
    uint64_t made = 0;                                                                                              \
    const outrider_prompt given = {prompt, length, form};                                                           \
    const outrider_status status = py.generate(number(session), &given, number(params),                             \
                                               on_span == NULL ? NULL : outrider_call_back, &callback, &made);      \
    return settle(status, &callback, made, OUTRIDER_KIND_RESULT, (void **)out);                                     \
  }
GENERATE(generate, char, prompt, OUTRIDER_PROMPT_TEXT)
GENERATE(generate_tokens, int64_t, prompt, OUTRIDER_PROMPT_TOKENS)
GENERATE(generate_messages, char, messages, OUTRIDER_PROMPT_MESSAGES)

#define SUBMIT(function, element, prompt, form)                                                                     \
  outrider_status outrider_##function(outrider_runtime *runtime, const element *prompt, size_t length,              \
                                      const outrider_params *params, outrider_on_ready on_ready, void *user,        \
                                      outrider_request **out) {                                                     \
    NEED(out);                                                                                                      \
    NEED_BYTES(prompt, length);                                                                                     \
    const outrider_prompt given = {prompt, length, form};                                                           \
    MAKE(submit, number(runtime), &given, number(params), outrider_call_ready, (outrider_function)on_ready, user,   \
         &made);                                                                                                    \
  }
SUBMIT(submit, char, prompt, OUTRIDER_PROMPT_TEXT)
SUBMIT(submit_tokens, int64_t, prompt, OUTRIDER_PROMPT_TOKENS)
SUBMIT(submit_messages, char, messages, OUTRIDER_PROMPT_MESSAGES)

outrider_status outrider_request_next(outrider_request *request, int64_t timeout_ms, const outrider_span **span) {
  NEED(span);
  CALL(next, number(request), timeout_ms, span);
}

outrider_status outrider_request_result(outrider_request *request, int64_t timeout_ms, outrider_result **out) {
  NEED(out);
  MAKE(request_result, number(request), timeout_ms, &made);
}

outrider_status outrider_generate_branches(outrider_runtime *runtime, const char *request, size_t request_length,
                                           const outrider_params *params, outrider_on_branch on_branch, void *user,
                                           outrider_branches **out) {
  NEED(out);
  NEED_BYTES(request, request_length);
  START;
  outrider_callback callback = {.on_branch = on_branch, .user = user};
  uint64_t made = 0;
  const outrider_status status =
      py.branches(number(runtime), request_length ? request : "", request_length, number(params),
                  on_branch == NULL ? NULL : outrider_call_branch_back, &callback, &made);
  return settle(status, &callback, made, OUTRIDER_KIND_BRANCHES, (void **)out);
}

outrider_status outrider_branches_result(const outrider_branches *branches, size_t branch, outrider_result **out) {
  NEED(out);
  MAKE(branch_result, number(branches), branch, &made);
}
