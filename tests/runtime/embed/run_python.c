/* run_python FILE ARGUMENT: starts the library, and runs a file of Python in its interpreter, as `argument`'s. */
#define _GNU_SOURCE
#include "check.h"

#include <dlfcn.h>

int main(int count, char **words) {
  EXPECT(count == 3);
  outrider_params *params = NULL;
  EXPECT_OK(outrider_params_create(&params));
  int (*ensure)(void), (*run)(const char *, void *);
  *(void **)&ensure = dlsym(RTLD_DEFAULT, "PyGILState_Ensure");
  *(void **)&run = dlsym(RTLD_DEFAULT, "PyRun_SimpleStringFlags");
  EXPECT(ensure != NULL && run != NULL);
  ensure();
  char line[1024];
  snprintf(line, sizeof line, "argument = '%.400s'; exec(compile(open('%.400s').read(), 'given', 'exec'))", words[2],
           words[1]);
  EXPECT(run(line, NULL) == 0);
  puts("ok");
  return EXIT_SUCCESS;
}
