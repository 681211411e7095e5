// by_handle MOUNT FILE: opens FILE for reading and writing by its handle, through the mount that MOUNT lies
// on, and writes 64 GiB where a limits file has the memory of its first GPU. Prints "wrote", or what the
// kernel answered.
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

int main(int argc, char **argv)
{
    union {
        struct file_handle handle;
        char room[sizeof(struct file_handle) + MAX_HANDLE_SZ];
    } file = {.handle.handle_bytes = MAX_HANDLE_SZ};
    const uint64_t memory = UINT64_C(64) << 30;
    int mount_id;

    if (argc != 3)
        return 2;
    int mount = open(argv[1], O_RDONLY);
    if (mount < 0 || name_to_handle_at(AT_FDCWD, argv[2], &file.handle, &mount_id, 0) != 0) {
        perror("no handle");
        return 2;
    }
    int opened = open_by_handle_at(mount, &file.handle, O_RDWR);
    if (opened < 0 || pwrite(opened, &memory, sizeof memory, 80) != sizeof memory)
        puts(strerror(errno));
    else
        puts("wrote");
    return 0;
}
