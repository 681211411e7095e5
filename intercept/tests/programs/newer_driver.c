/* A driver with a function that allocates and that no list of ours names. */
int cuMemAllocOnTheMoon(unsigned long *pointer) { *pointer = 1; return 0; }
int cuMemAllocHost_v9(unsigned long *pointer) { *pointer = 1; return 0; }
int cuInit(unsigned flags) { return flags; }

static int same(const char *a, const char *b) {
    while (*a && *a == *b) a++, b++;
    return *a == *b;
}

int cuGetProcAddress_v2(const char *name, void **function, int version, unsigned long flags, int *found) {
    *function = same(name, "cuMemAllocOnTheMoon") ? (void *)cuMemAllocOnTheMoon
        : same(name, "cuMemAllocHost") ? (void *)cuMemAllocHost_v9
        : 0;
    if (found) *found = !*function;
    return version < 0 || flags > 3;
}
