#!/bin/sh
# Fetches what the root file systems of the image tests are made of: packages of the machine's own distribution, unpacked
# below .cache/images (its glibc and a shell, the 32-bit glibc, musl). Nothing is installed. Prints that folder.
# Quick when all of it is there. Exit 3: they cannot be had on this machine; what needs them is then skipped.
set -eu

top=$(cd "$(dirname "$0")/../.." && pwd)
# shellcheck source=tests/setup/cache.sh
. "$top/tests/setup/cache.sh"
base=$top/.cache/images

# FOLDER ARCHITECTURE PACKAGE...
sets='
glibc    amd64  base-files libc6 libc-bin libgcc-s1 bash libtinfo6
glibc32  i386   libc6 libc-bin
musl     amd64  musl
'

# shellcheck source=tests/setup/private-apt.sh
. "$top/tests/setup/private-apt.sh"
printf '%s' "$sets" | while read -r folder architecture packages; do
    [ -n "$folder" ] || continue
    [ "$(cat "$base/$folder.made-from" 2>/dev/null)" != "$packages" ] || continue
    rm -rf "${base:?}/$folder"
    mkdir -p "$base/$folder"
    private_apt "$base/apt" "$architecture" main || exit 3
    for package in $packages; do
        unpack "$package" "$base/$folder" || exit 3
    done
    rm -rf "$base/$folder/usr/share/doc" "$base/$folder/usr/share/locale" "$base/$folder/usr/share/man" "$base/apt"
    echo "$packages" >"$base/$folder.made-from"
done
echo "$base"
