/* again PLAN TIMES: opens and closes over and over; resident kilobytes after a few rounds, and at the end. */
#include <unistd.h>

#include "check.h"

static long resident(void) {
  long pages = 0;
  FILE *file = fopen("/proc/self/statm", "r");
  EXPECT(file != NULL && fscanf(file, "%*s %ld", &pages) == 1);
  fclose(file);
  return pages * (sysconf(_SC_PAGESIZE) / 1024);
}

int main(int count, char **words) {
  EXPECT(count == 3);
  const int times = atoi(words[2]);
  for (int i = 0; i < times; ++i) {
    OWN(runtime) runtime = open_plan(words[1]);
    OWN(session) session = create_session(runtime);
    OWN(params) params = params_of(4);
    OWN(result) result = NULL;
    OWN(result) other = NULL;
    EXPECT_OK(outrider_generate(session, "import", 6, params, NULL, NULL, &result));
    OWN(request) request = submit(runtime, params, NULL, NULL);
    if (i % 2) EXPECT_OK(outrider_request_result(request, -1, &other));
    if (i == times / 5) printf("%ld ", resident());
  }
  printf("%ld\n", resident());
  return EXIT_SUCCESS;
}
