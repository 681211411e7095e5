/* Opens libcuda twice, the second time in a namespace of its own: two copies of the driver and of us in one process. Prints what
 * allocations give in the first and then in the second, and how many microseconds the quickest of five refusals took. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdio.h>
#include <time.h>

typedef int (*any)(size_t, size_t, size_t);

static int call(void *library, const char *name, size_t a, size_t b) {
    return ((any)dlsym(library, name))(a, b, 0);
}

static int allocate(void *library, size_t mib) {
    size_t pointer = 0;
    return call(library, "cuMemAlloc_v2", (size_t)&pointer, mib << 20);
}

static void start(void *library) {
    size_t context = 0;
    call(library, "cuInit", 0, 0);
    call(library, "cuDevicePrimaryCtxRetain", (size_t)&context, 0);
    call(library, "cuCtxSetCurrent", context, 0);
}

static long microseconds(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec * 1000000 + now.tv_nsec / 1000;
}

int main(void) {
    void *first = dlopen("libcuda.so.1", RTLD_NOW);
    void *second = dlmopen(LM_ID_NEWLM, "libcuda.so.1", RTLD_NOW);
    start(first);
    printf("first %d\n", allocate(first, 512));
    start(second);
    int within = allocate(second, 128);
    printf("second %d %d\n", within, allocate(second, 256));
    long quickest = 1000000;
    for (int i = 0; i < 5; i++) {
        long before = microseconds();
        allocate(second, 256);
        long took = microseconds() - before;
        if (took < quickest) quickest = took;
    }
    printf("refused in %ld\n", quickest);
    return 0;
}
