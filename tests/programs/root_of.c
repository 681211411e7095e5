// root_of PROCESS USER FILE: prints the first bytes of the host's FILE. It finds the host's root folder at
// PROCESS, which belongs to USER, with that user's rights and no others, and then opens FILE below it with
// its own.
#define _GNU_SOURCE
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

int main(int argc, char **argv)
{
    char root[64], bytes[256];

    if (argc != 4)
        return 2;
    snprintf(root, sizeof root, "/proc/%s/root", argv[1]);
    int user = atoi(argv[2]);
    if (setegid(user) != 0 || seteuid(user) != 0)
        return 2;
    int folder = open(root, O_PATH | O_DIRECTORY);
    if (seteuid(0) != 0 || setegid(0) != 0)
        return 2;
    int file = openat(folder, argv[3] + 1, O_RDWR);
    ssize_t count = file < 0 ? -1 : read(file, bytes, sizeof bytes);
    if (count < 0) {
        perror(argv[3]);
        return 1;
    }
    fwrite(bytes, 1, count, stdout);
    return 0;
}
