/* liboutrider: the calls of outrider.h. It knows no Python: it finds the environment, loads the bridge that starts an
 * interpreter there, and hands on numbers and addresses (calls.h). Handles are numbers that look like pointers, so that
 * a wrong one is looked up and never followed.
 */
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

static outrider_status null_argument(const char *call, const char *name) {
  return fail(OUTRIDER_INVALID_ARGUMENT, "%s: %s is NULL", call, name);
}

#define NEED(pointer) \
  if ((pointer) == NULL) return null_argument(__func__, #pointer)
#define NEED_BYTES(data, length) \
  if ((data) == NULL && (length) != 0) return null_argument(__func__, #data)
#define START                                \
  do {                                       \
    const outrider_status started = start(); \
    if (started != OUTRIDER_OK) return started; \
  } while (0)

/* The handle that a call made. */
#define MAKE(call)                              \
  do {                                          \
    uint64_t made = 0;                          \
    const outrider_status status = (call);      \
    if (status == OUTRIDER_OK) *(void **)out = (void *)(uintptr_t)made; \
    return status;                              \
  } while (0)

static outrider_status destroy(const void *handle, int32_t kind) {
  if (handle == NULL) return OUTRIDER_OK;
  START;
  return py.destroy(number(handle), kind);
}

/* -- The calls ------------------------------------------------------------------------------------------------------ */

outrider_status outrider_plan_inspect(const char *plan, size_t plan_length, outrider_text **out) {
  NEED(out);
  NEED_BYTES(plan, plan_length);
  START;
  MAKE(py.inspect(plan, plan_length, &made));
}

outrider_status outrider_text_get(const outrider_text *text, const char **data, size_t *length) {
  NEED(data);
  NEED(length);
  START;
  return py.text(number(text), data, length);
}

outrider_status outrider_text_destroy(outrider_text *text) { return destroy(text, OUTRIDER_KIND_TEXT); }

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
  START;
  return py.drain(number(runtime), timeout_ms);
}

outrider_status outrider_runtime_stats(const outrider_runtime *runtime, outrider_text **out) {
  NEED(out);
  START;
  MAKE(py.runtime_stats(number(runtime), &made));
}

outrider_status outrider_count_tokens(outrider_runtime *runtime, const char *prompt, size_t prompt_length,
                                      size_t *count) {
  NEED(count);
  NEED_BYTES(prompt, prompt_length);
  START;
  return py.count_tokens(number(runtime), prompt, prompt_length, OUTRIDER_PROMPT_TEXT, 0, count);
}

outrider_status outrider_count_message_tokens(outrider_runtime *runtime, const char *messages, size_t messages_length,
                                              const outrider_params *params, size_t *count) {
  NEED(count);
  NEED_BYTES(messages, messages_length);
  START;
  return py.count_tokens(number(runtime), messages, messages_length, OUTRIDER_PROMPT_MESSAGES, number(params), count);
}

outrider_status outrider_runtime_save_prefix_cache(outrider_runtime *runtime, const char *path, size_t path_length,
                                                   size_t *tokens) {
  NEED_BYTES(path, path_length);
  START;
  return py.save_cache(number(runtime), path, path_length, tokens);
}

outrider_status outrider_runtime_load_prefix_cache(outrider_runtime *runtime, const char *path, size_t path_length,
                                                   size_t *tokens) {
  NEED_BYTES(path, path_length);
  START;
  return py.load_cache(number(runtime), path, path_length, tokens);
}

outrider_status outrider_runtime_close(outrider_runtime *runtime) { return destroy(runtime, OUTRIDER_KIND_RUNTIME); }

outrider_status outrider_session_create(outrider_runtime *runtime, outrider_session **out) {
  NEED(out);
  START;
  MAKE(py.session(number(runtime), &made));
}

outrider_status outrider_session_reset(outrider_session *session) {
  START;
  return py.reset(number(session));
}

outrider_status outrider_session_cancel(outrider_session *session) {
  START;
  return py.cancel(number(session));
}

outrider_status outrider_session_destroy(outrider_session *session) { return destroy(session, OUTRIDER_KIND_SESSION); }

outrider_status outrider_params_create(outrider_params **out) {
  NEED(out);
  START;
  MAKE(py.params(&made));
}

outrider_status outrider_params_set_int(outrider_params *params, const char *key, size_t key_length, int64_t value) {
  NEED_BYTES(key, key_length);
  START;
  return py.set_int(number(params), key, key_length, value);
}

outrider_status outrider_params_set_uint(outrider_params *params, const char *key, size_t key_length, uint64_t value) {
  NEED_BYTES(key, key_length);
  START;
  return py.set_uint(number(params), key, key_length, value);
}

outrider_status outrider_params_set_double(outrider_params *params, const char *key, size_t key_length, double value) {
  NEED_BYTES(key, key_length);
  START;
  return py.set_double(number(params), key, key_length, value);
}

outrider_status outrider_params_set_bool(outrider_params *params, const char *key, size_t key_length, int32_t value) {
  NEED_BYTES(key, key_length);
  START;
  return py.set_bool(number(params), key, key_length, value);
}

outrider_status outrider_params_set_text(outrider_params *params, const char *key, size_t key_length, const char *value,
                                         size_t value_length) {
  NEED_BYTES(key, key_length);
  NEED_BYTES(value, value_length);
  START;
  return py.set_text(number(params), key, key_length, value, value_length);
}

outrider_status outrider_params_add_text(outrider_params *params, const char *key, size_t key_length, const char *value,
                                         size_t value_length) {
  NEED_BYTES(key, key_length);
  NEED_BYTES(value, value_length);
  START;
  return py.add_text(number(params), key, key_length, value, value_length);
}

outrider_status outrider_params_add_int(outrider_params *params, const char *key, size_t key_length, int64_t value) {
  NEED_BYTES(key, key_length);
  return outrider_params_add_ints(params, key, key_length, &value, 1);
}

outrider_status outrider_params_add_ints(outrider_params *params, const char *key, size_t key_length,
                                         const int64_t *values, size_t count) {
  NEED_BYTES(key, key_length);
  NEED_BYTES(values, count);
  START;
  return py.add_ints(number(params), key, key_length, values, count);
}

outrider_status outrider_params_add_logits_processor(outrider_params *params, outrider_on_logits on_logits,
                                                     void *user) {
  NEED(on_logits);
  START;
  return py.add_function(number(params), outrider_call_logits, (outrider_function)on_logits, user);
}

outrider_status outrider_params_destroy(outrider_params *params) { return destroy(params, OUTRIDER_KIND_PARAMS); }

/* What becomes of a call with a callback: of one that threw, what the call gave is dropped. */
static outrider_status settle(outrider_status status, const outrider_callback *callback, uint64_t made, int32_t kind) {
  if (status != OUTRIDER_OK || !callback->threw) return status;
  py.destroy(made, kind);
  return fail(OUTRIDER_CALLBACK, "the callback threw an exception, %s; it must return", callback->what);
}

static outrider_status generate(outrider_session *session, const void *prompt, size_t length, int32_t form,
                                const outrider_params *params, outrider_on_span on_span, void *user,
                                outrider_result **out) {
  outrider_callback callback = {.on_span = on_span, .user = user};
  uint64_t made = 0;
  const outrider_status status = py.generate(number(session), prompt, length, form, number(params),
                                             on_span == NULL ? NULL : outrider_call_back, &callback, &made);
  const outrider_status settled = settle(status, &callback, made, OUTRIDER_KIND_RESULT);
  if (settled == OUTRIDER_OK) *out = (outrider_result *)(uintptr_t)made;
  return settled;
}

outrider_status outrider_generate(outrider_session *session, const char *prompt, size_t prompt_length,
                                  const outrider_params *params, outrider_on_span on_span, void *user,
                                  outrider_result **out) {
  NEED(out);
  NEED_BYTES(prompt, prompt_length);
  START;
  return generate(session, prompt, prompt_length, OUTRIDER_PROMPT_TEXT, params, on_span, user, out);
}

outrider_status outrider_generate_tokens(outrider_session *session, const int64_t *prompt, size_t count,
                                         const outrider_params *params, outrider_on_span on_span, void *user,
                                         outrider_result **out) {
  NEED(out);
  NEED_BYTES(prompt, count);
  START;
  return generate(session, prompt, count, OUTRIDER_PROMPT_TOKENS, params, on_span, user, out);
}

outrider_status outrider_generate_messages(outrider_session *session, const char *messages, size_t messages_length,
                                           const outrider_params *params, outrider_on_span on_span, void *user,
                                           outrider_result **out) {
  NEED(out);
  NEED_BYTES(messages, messages_length);
  START;
  return generate(session, messages, messages_length, OUTRIDER_PROMPT_MESSAGES, params, on_span, user, out);
}

outrider_status outrider_result_tokens(const outrider_result *result, const int64_t **tokens, size_t *count) {
  NEED(tokens);
  NEED(count);
  START;
  return py.tokens(number(result), tokens, count);
}

outrider_status outrider_result_text(const outrider_result *result, const char **data, size_t *length) {
  NEED(data);
  NEED(length);
  START;
  return py.result_text(number(result), data, length);
}

outrider_status outrider_result_finish_reason(const outrider_result *result, int32_t *reason) {
  NEED(reason);
  START;
  return py.finish_reason(number(result), reason);
}

outrider_status outrider_result_seed(const outrider_result *result, uint64_t *seed) {
  NEED(seed);
  START;
  return py.seed(number(result), seed);
}

outrider_status outrider_result_logprobs(const outrider_result *result, const outrider_logprobs **out) {
  NEED(out);
  START;
  return py.logprobs(number(result), out);
}

outrider_status outrider_result_stats(const outrider_result *result, const char **data, size_t *length) {
  NEED(data);
  NEED(length);
  START;
  return py.stats(number(result), data, length);
}

outrider_status outrider_result_destroy(outrider_result *result) { return destroy(result, OUTRIDER_KIND_RESULT); }

static outrider_status submit(outrider_runtime *runtime, const void *prompt, size_t length, int32_t form,
                              const outrider_params *params, outrider_on_ready on_ready, void *user,
                              outrider_request **out) {
  MAKE(py.submit(number(runtime), prompt, length, form, number(params), outrider_call_ready,
                 (outrider_function)on_ready, user, &made));
}

outrider_status outrider_submit(outrider_runtime *runtime, const char *prompt, size_t prompt_length,
                                const outrider_params *params, outrider_on_ready on_ready, void *user,
                                outrider_request **out) {
  NEED(out);
  NEED_BYTES(prompt, prompt_length);
  START;
  return submit(runtime, prompt, prompt_length, OUTRIDER_PROMPT_TEXT, params, on_ready, user, out);
}

outrider_status outrider_submit_tokens(outrider_runtime *runtime, const int64_t *prompt, size_t count,
                                       const outrider_params *params, outrider_on_ready on_ready, void *user,
                                       outrider_request **out) {
  NEED(out);
  NEED_BYTES(prompt, count);
  START;
  return submit(runtime, prompt, count, OUTRIDER_PROMPT_TOKENS, params, on_ready, user, out);
}

outrider_status outrider_submit_messages(outrider_runtime *runtime, const char *messages, size_t messages_length,
                                         const outrider_params *params, outrider_on_ready on_ready, void *user,
                                         outrider_request **out) {
  NEED(out);
  NEED_BYTES(messages, messages_length);
  START;
  return submit(runtime, messages, messages_length, OUTRIDER_PROMPT_MESSAGES, params, on_ready, user, out);
}

outrider_status outrider_request_next(outrider_request *request, int64_t timeout_ms, const outrider_span **span) {
  NEED(span);
  START;
  return py.next(number(request), timeout_ms, span);
}

outrider_status outrider_request_result(outrider_request *request, int64_t timeout_ms, outrider_result **out) {
  NEED(out);
  START;
  MAKE(py.request_result(number(request), timeout_ms, &made));
}

outrider_status outrider_request_cancel(outrider_request *request) {
  START;
  return py.cancel_request(number(request));
}

outrider_status outrider_request_destroy(outrider_request *request) { return destroy(request, OUTRIDER_KIND_REQUEST); }

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
  const outrider_status settled = settle(status, &callback, made, OUTRIDER_KIND_BRANCHES);
  if (settled == OUTRIDER_OK) *out = (outrider_branches *)(uintptr_t)made;
  return settled;
}

outrider_status outrider_branches_count(const outrider_branches *branches, size_t *count) {
  NEED(count);
  START;
  return py.branch_count(number(branches), count);
}

outrider_status outrider_branches_result(const outrider_branches *branches, size_t branch, outrider_result **out) {
  NEED(out);
  START;
  MAKE(py.branch_result(number(branches), branch, &made));
}

outrider_status outrider_branches_stats(const outrider_branches *branches, const char **data, size_t *length) {
  NEED(data);
  NEED(length);
  START;
  return py.branches_stats(number(branches), data, length);
}

outrider_status outrider_branches_destroy(outrider_branches *branches) {
  return destroy(branches, OUTRIDER_KIND_BRANCHES);
}
