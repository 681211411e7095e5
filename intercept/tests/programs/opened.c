/* Opens libcuda in the way that the first argument names. Prints for each further argument, a function's name, which file it
 * leads to, and at the end what an allocation within the limit and one beyond it give. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdio.h>
#include <string.h>

typedef int (*any)(size_t, size_t, size_t);

static const char *way;
static void *library;

static void *open_library(void) {
    if (!strcmp(way, "lazy")) return dlopen("libcuda.so.1", RTLD_LAZY);
    if (!strcmp(way, "global")) return dlopen("libcuda.so.1", RTLD_NOW | RTLD_GLOBAL);
    if (!strcmp(way, "deepbind")) return dlopen("libcuda.so.1", RTLD_NOW | RTLD_DEEPBIND);
    if (!strcmp(way, "development")) return dlopen("libcuda.so", RTLD_NOW);
    if (!strcmp(way, "namespace")) return dlmopen(LM_ID_NEWLM, "libcuda.so.1", RTLD_NOW);
    if (!strcmp(way, "again")) {
        dlclose(dlopen("libcuda.so.1", RTLD_NOW));
        return dlopen("libcuda.so.1", RTLD_NOW | RTLD_NOLOAD);
    }
    return dlopen("libcuda.so.1", RTLD_NOW);
}

static void *find(const char *name) {
    if (!strcmp(way, "version")) return dlvsym(library, name, "GLIBC_2.2.5");
    if (!strcmp(way, "global")) return dlsym(RTLD_DEFAULT, name);
    return dlsym(library, name);
}

static int call(const char *name, size_t a, size_t b, size_t c) {
    any function = (any)find(name);
    return function ? function(a, b, c) : -1;
}

int main(int count, char **arguments) {
    way = arguments[1];
    library = open_library();
    if (!library) {
        puts(dlerror());
        return 1;
    }
    for (int i = 2; i < count; i++) {
        void *address = find(arguments[i]);
        Dl_info file;
        printf("%s %s\n", arguments[i], address && dladdr(address, &file) ? file.dli_fname : "absent");
    }
    size_t context = 0, pointer = 0;
    call("cuInit", 0, 0, 0);
    call("cuDevicePrimaryCtxRetain", (size_t)&context, 0, 0);
    call("cuCtxSetCurrent", context, 0, 0);
    int within = call("cuMemAlloc_v2", (size_t)&pointer, (size_t)512 << 20, 0);
    int beyond = call("cuMemAlloc_v2", (size_t)&pointer, (size_t)768 << 20, 0);
    printf("allocations %d %d\n", within, beyond);
    return 0;
}
