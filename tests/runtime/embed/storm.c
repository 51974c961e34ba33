/* storm PLAN TIMES: threads that submit, read, cancel and destroy each other's requests, all at once; then another that
 * drains. No call fails in another way than it may, and nothing is called for what was destroyed. */
#include <pthread.h>

#include "check.h"

enum { THREADS = 4, PLACES = 6 };

static outrider_runtime *runtime;
static outrider_params *plain, *ruled;
static outrider_request *places[PLACES];
static int owners[THREADS]; /* 1 while the thread owns a request: its callbacks may run then */
static long times, calls[2];

static void notified(void *user, outrider_request *request) {
  EXPECT(__atomic_load_n((int *)user, __ATOMIC_ACQUIRE) == 1);
  EXPECT(request != NULL);
  __atomic_add_fetch(&calls[0], 1, __ATOMIC_RELAXED);
}

static int32_t lifted(void *user, const int64_t *tokens, size_t count, float *logits, size_t vocabulary) {
  (void)user, (void)tokens, (void)count;
  logits[vocabulary / 2] += 1;
  __atomic_add_fetch(&calls[1], 1, __ATOMIC_RELAXED);
  return OUTRIDER_CONTINUE;
}

static void among(outrider_status status, outrider_status other) {
  EXPECT(status == OUTRIDER_OK || status == other || status == OUTRIDER_INVALID_HANDLE);
}

/* A request of the thread's own: after its destruction nothing of it is called. */
static void own(int which, uint64_t *state) {
  outrider_request *request = NULL;
  const outrider_span *span = NULL;
  __atomic_store_n(&owners[which], 1, __ATOMIC_RELEASE);
  const outrider_status status =
      outrider_submit(runtime, "import", 6, draw(state, 2) ? plain : ruled, notified, &owners[which], &request);
  EXPECT(status == OUTRIDER_OK || status == OUTRIDER_FULL);
  if (status == OUTRIDER_OK) {
    for (uint64_t reads = draw(state, 4); reads > 0; --reads) {
      among(outrider_request_next(request, 2, &span), OUTRIDER_TIMEOUT);
    }
    EXPECT_OK(outrider_request_destroy(request));
  }
  __atomic_store_n(&owners[which], 0, __ATOMIC_RELEASE);
}

/* Something with a request that any thread may destroy meanwhile. */
static void shared(uint64_t *state) {
  outrider_request **place = &places[draw(state, PLACES)], *request = __atomic_load_n(place, __ATOMIC_ACQUIRE), *made;
  OWN(result) result = NULL;
  const outrider_span *span = NULL;
  OWN(text) text = NULL;
  switch (draw(state, 6)) {
    case 0:
      if (outrider_submit(runtime, "def", 3, draw(state, 2) ? plain : ruled, NULL, NULL, &made) != OUTRIDER_OK) return;
      EXPECT_OK(outrider_request_destroy(__atomic_exchange_n(place, made, __ATOMIC_ACQ_REL)));
      return;
    case 1:
      EXPECT_OK(outrider_request_destroy(__atomic_exchange_n(place, NULL, __ATOMIC_ACQ_REL)));
      return;
    case 2: among(outrider_request_cancel(request), OUTRIDER_OK); return;
    case 3: among(outrider_request_next(request, (int64_t)draw(state, 3), &span), OUTRIDER_TIMEOUT); return;
    case 4: among(outrider_request_result(request, (int64_t)draw(state, 3), &result), OUTRIDER_TIMEOUT); return;
    default: EXPECT_OK(outrider_runtime_stats(runtime, &text));
  }
}

/* Whether callbacks of both kinds have run: a busy machine may let none run for long. */
static int called(void) {
  return __atomic_load_n(&calls[0], __ATOMIC_RELAXED) > 0 && __atomic_load_n(&calls[1], __ATOMIC_RELAXED) > 0;
}

static void *work(void *given) {
  const int which = (int)(intptr_t)given;
  uint64_t state = 77 + (uint64_t)which;
  for (long i = 0; i < times || (i < 1000 * times && !called()); ++i) {
    if (i % 4 == 0) own(which, &state);
    shared(&state);
  }
  return NULL;
}

int main(int count, char **words) {
  EXPECT(count == 3);
  runtime = open_with(words[1], "{\"threads\": 1, \"scheduler\": {\"max_running\": 3, \"max_waiting\": 4}}");
  times = strtol(words[2], NULL, 10);
  plain = params_of(10);
  ruled = params_of(10);
  EXPECT_OK(outrider_params_add_logits_processor(ruled, lifted, NULL));
  pthread_t threads[THREADS];
  for (int i = 0; i < THREADS; ++i) EXPECT(pthread_create(&threads[i], NULL, work, (void *)(intptr_t)i) == 0);
  for (int i = 0; i < THREADS; ++i) EXPECT(pthread_join(threads[i], NULL) == 0);
  EXPECT(outrider_runtime_drain(runtime, 0) == OUTRIDER_OK || strstr(outrider_last_error(), "were cancelled") != NULL);
  for (int i = 0; i < PLACES; ++i) EXPECT_OK(outrider_request_destroy(places[i]));
  const long heard = calls[0], made = calls[1];
  outrider_text *text = NULL;
  const char *stats;
  size_t length;
  EXPECT_OK(outrider_runtime_stats(runtime, &text));
  EXPECT_OK(outrider_text_get(text, &stats, &length));
  EXPECT(strstr(stats, "\"waiting\": 0, \"running\": 0,") != NULL && strstr(stats, "\"failed\": 0,") != NULL);
  EXPECT_OK(outrider_text_destroy(text));
  EXPECT_OK(outrider_params_destroy(plain));
  EXPECT_OK(outrider_params_destroy(ruled));
  EXPECT_OK(outrider_runtime_close(runtime));
  EXPECT(heard == calls[0] && made == calls[1] && heard > 0 && made > 0);
  puts("ok");
  return EXIT_SUCCESS;
}
