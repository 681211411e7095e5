/* Linked with -lcuda and -lnvidia-ml. Prints what an allocation within the limit and one beyond it give, what a function of the
 * driver that nobody intercepts gives, and which files the three linked functions lie in. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdio.h>

int cuInit(unsigned flags);
int cuDevicePrimaryCtxRetain(void **context, int device);
int cuCtxSetCurrent(void *context);
int cuMemAlloc_v2(size_t *pointer, size_t bytes);
int cuDriverGetVersion(int *version);
int nvmlInit_v2(void);

static void where(const char *name) {
    Dl_info file;
    dladdr(dlsym(RTLD_NEXT, name), &file);
    printf("%s %s\n", name, file.dli_fname);
}

int main(void) {
    void *context = 0;
    size_t pointer = 0;
    int version = 0;
    int begun = cuInit(0) | cuDevicePrimaryCtxRetain(&context, 0) | cuCtxSetCurrent(context) | nvmlInit_v2();
    int within = cuMemAlloc_v2(&pointer, (size_t)512 << 20);
    int beyond = cuMemAlloc_v2(&pointer, (size_t)768 << 20);
    printf("allocations %d %d %d\n", begun, within, beyond);
    int answer = cuDriverGetVersion(&version);
    printf("version %d %d\n", answer, version);
    where("cuMemAlloc_v2");
    where("cuDriverGetVersion");
    where("nvmlInit_v2");
    return 0;
}
