/* The machine under a redis-server, as far as a test bends it: a wall clock that is off, a disk that is slow.
 *
 * Loaded with LD_PRELOAD. CHAOS_HOST names a file of two 64-bit integers, read at every call: by how many milliseconds
 * the wall clock is off, and how many milliseconds a flush to disk takes. The monotonic clock stays as it is.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

struct host { volatile int64_t clock_ms, flush_ms; };
static struct host right, *host = &right;

__attribute__((constructor)) static void begin(void) {
    const char *path = getenv("CHAOS_HOST");
    int file = path ? open(path, O_RDONLY) : -1;
    void *seen = file < 0 ? MAP_FAILED : mmap(NULL, sizeof *host, PROT_READ, MAP_SHARED, file, 0);
    if (seen != MAP_FAILED) host = seen;
}

#define REAL(name) static __typeof__(&name) real; if (!real) real = dlsym(RTLD_NEXT, #name)

int gettimeofday(struct timeval *restrict tv, void *restrict zone) {
    REAL(gettimeofday);
    int result = real(tv, zone);
    if (tv) tv->tv_sec += host->clock_ms / 1000;
    return result;
}

time_t time(time_t *into) {
    REAL(time);
    time_t now = real(NULL) + host->clock_ms / 1000;
    if (into) *into = now;
    return now;
}

int clock_gettime(clockid_t clock, struct timespec *ts) {
    REAL(clock_gettime);
    int result = real(clock, ts);
    if (ts && (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE)) ts->tv_sec += host->clock_ms / 1000;
    return result;
}

static void slow(void) {
    for (int64_t slept = 0; slept < host->flush_ms; slept += 5) usleep(5000);
}

int fdatasync(int file) {
    REAL(fdatasync);
    slow();
    return real(file);
}

int fsync(int file) {
    REAL(fsync);
    slow();
    return real(file);
}
