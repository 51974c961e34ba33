/* check MODULE...: starts the bundle that it is linked with, and imports these modules of it. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <outrider.h>
#include <stdio.h>
#include <stdlib.h>

/* Of the bundle's interpreter, whose symbols are global once it runs. */
static void *interpreter(const char *name) {
  void *found = dlsym(RTLD_DEFAULT, name);
  if (found != NULL) return found;
  fprintf(stderr, "the interpreter has no %s\n", name);
  exit(EXIT_FAILURE);
}

int main(int count, char **words) {
  outrider_params *params = NULL;
  if (outrider_params_create(&params) != OUTRIDER_OK) {
    fprintf(stderr, "%s\n", outrider_last_error());
    return EXIT_FAILURE;
  }
  int (*ensure)(void), (*run)(const char *, void *);
  *(void **)&ensure = interpreter("PyGILState_Ensure");
  *(void **)&run = interpreter("PyRun_SimpleStringFlags");
  ensure();
  for (int i = 1; i < count; ++i) {
    char line[512];
    snprintf(line, sizeof line, "import %s", words[i]);
    if (run(line, NULL) != 0) return EXIT_FAILURE; /* it has said why */
  }
  return EXIT_SUCCESS;
}
