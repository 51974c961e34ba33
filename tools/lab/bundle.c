/* bundle PLAN PROMPT: starts Outrider, opens a plan and generates two tokens, a stage each. For every stage a line goes
   out: its name, milliseconds by the clock, milliseconds of processors, modules imported by then, PSS and peak RSS in
   kB. With a third argument, the names of the modules go to that file. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <outrider.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

static void check(outrider_status status) {
  if (status == OUTRIDER_OK) return;
  fprintf(stderr, "%s\n", outrider_last_error());
  exit(EXIT_FAILURE);
}

static double milliseconds(clockid_t clock) {
  struct timespec now;
  clock_gettime(clock, &now);
  return 1e3 * (double)now.tv_sec + 1e-6 * (double)now.tv_nsec;
}

/* A number of kB after `key` in a file of /proc. */
static long kilobytes(const char *path, const char *key) {
  char line[256];
  long found = -1;
  FILE *file = fopen(path, "r");
  while (file != NULL && found < 0 && fgets(line, sizeof line, file) != NULL) {
    if (strncmp(line, key, strlen(key)) == 0) found = strtol(line + strlen(key), NULL, 10);
  }
  if (file != NULL) fclose(file);
  return found;
}

/* Runs a line of Python in the interpreter that the library has started, whose symbols are global. */
static void python(const char *line) {
  int (*ensure)(void), (*run)(const char *, void *);
  void (*release)(int);
  *(void **)&ensure = dlsym(RTLD_DEFAULT, "PyGILState_Ensure");
  *(void **)&run = dlsym(RTLD_DEFAULT, "PyRun_SimpleStringFlags");
  *(void **)&release = dlsym(RTLD_DEFAULT, "PyGILState_Release");
  const int state = ensure();
  if (run(line, NULL) != 0) exit(EXIT_FAILURE);
  release(state);
}

static double clock_then, processor_then;

static void begin(void) {
  clock_then = milliseconds(CLOCK_MONOTONIC);
  processor_then = milliseconds(CLOCK_PROCESS_CPUTIME_ID);
}

static void end(const char *stage) {
  const double clock = milliseconds(CLOCK_MONOTONIC) - clock_then;
  const double processor = milliseconds(CLOCK_PROCESS_CPUTIME_ID) - processor_then;
  char line[256];
  snprintf(line, sizeof line, "import sys; print('%s', %.3f, %.3f, len(sys.modules), %ld, %ld, flush=True)", stage, clock,
           processor, kilobytes("/proc/self/smaps_rollup", "Pss:"), kilobytes("/proc/self/status", "VmHWM:"));
  python(line);
  begin();
}

int main(int count, char **words) {
  if (count < 3) return EXIT_FAILURE;
  outrider_runtime *runtime = NULL;
  outrider_session *session = NULL;
  outrider_params *params = NULL;
  begin();
  check(outrider_params_create(&params));
  end("first_call");
  check(outrider_runtime_open(words[1], strlen(words[1]), NULL, 0, &runtime));
  end("open");
  check(outrider_params_set_int(params, "max_new_tokens", 14, 1));
  check(outrider_params_set_bool(params, "ignore_eos", 10, 1));
  check(outrider_session_create(runtime, &session));
  const char *const stages[] = {"first_token", "second_token"};
  for (size_t i = 0; i < 2; ++i) {
    outrider_result *result = NULL;
    check(outrider_generate(session, words[2], strlen(words[2]), params, NULL, NULL, &result));
    end(stages[i]);
    check(outrider_result_destroy(result));
  }
  if (count > 3) {
    char line[4300];
    snprintf(line, sizeof line, "open('%.4000s', 'w').write('\\n'.join(sorted(__import__('sys').modules)))", words[3]);
    python(line);
  }
  check(outrider_params_destroy(params));
  check(outrider_session_destroy(session));
  check(outrider_runtime_close(runtime));
  return EXIT_SUCCESS;
}
