/* leave PLAN MILLISECONDS: returns from main with 3 while requests are served and a session generates. */
#include <pthread.h>
#include <time.h>

#include "check.h"

static void *generate(void *session) {
  outrider_params *params = params_of(150);
  outrider_result *result = NULL;
  EXPECT_OK(outrider_generate(session, "import", 6, params, NULL, NULL, &result));
  return NULL;
}

static void told(void *user, outrider_request *request) { (void)user, (void)request; }

int main(int count, char **words) {
  EXPECT(count == 3);
  const long milliseconds = strtol(words[2], NULL, 10);
  const struct timespec time = {milliseconds / 1000, milliseconds % 1000 * 1000000};
  outrider_runtime *runtime = open_plan(words[1]);
  outrider_params *params = params_of(150);
  outrider_request *request = NULL;
  pthread_t thread;
  for (int i = 0; i < 20; ++i) EXPECT_OK(outrider_submit(runtime, "import", 6, params, told, NULL, &request));
  EXPECT_OK(outrider_runtime_close(runtime));
  runtime = open_plan(words[1]);
  EXPECT_OK(outrider_submit(runtime, "import", 6, params, told, NULL, &request));
  EXPECT(pthread_create(&thread, NULL, generate, create_session(runtime)) == 0);
  nanosleep(&time, NULL);
  return 3;
}
