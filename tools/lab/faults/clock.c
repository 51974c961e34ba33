// A wall clock that jumps: preloaded (LD_PRELOAD), it adds to CLOCK_REALTIME the seconds that stand in the file named
// by FAULTS_CLOCK, eight bytes, whenever it is asked. Other clocks stay. Compile: cc -shared -fPIC -O1 clock.c -ldl
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

static int64_t ahead(void) {
    static volatile int64_t *seconds;
    static const int64_t none = 0;
    if (!seconds) {
        const char *path = getenv("FAULTS_CLOCK");
        int file = path ? open(path, O_RDONLY | O_CLOEXEC) : -1;
        void *mapped = file < 0 ? MAP_FAILED : mmap(NULL, sizeof none, PROT_READ, MAP_SHARED, file, 0);
        if (file >= 0) close(file);
        seconds = mapped == MAP_FAILED ? (volatile int64_t *)&none : mapped;
    }
    return *seconds;
}

int clock_gettime(clockid_t clock, struct timespec *now) {
    static int (*real)(clockid_t, struct timespec *);
    if (!real) real = (int (*)(clockid_t, struct timespec *))dlsym(RTLD_NEXT, "clock_gettime");
    int failed = real(clock, now);
    if (!failed && (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE)) now->tv_sec += ahead();
    return failed;
}

int gettimeofday(struct timeval *restrict now, void *restrict zone) {
    static int (*real)(struct timeval *, void *);
    if (!real) real = (int (*)(struct timeval *, void *))dlsym(RTLD_NEXT, "gettimeofday");
    int failed = real(now, zone);
    if (!failed && now) now->tv_sec += ahead();
    return failed;
}

time_t time(time_t *out) {
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    if (out) *out = now.tv_sec;
    return now.tv_sec;
}
