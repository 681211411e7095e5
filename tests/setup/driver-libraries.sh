#!/bin/sh
# Fetches NVIDIA's 535 driver programs and libraries from Debian's non-free component and unpacks them below
# .cache/driver-libraries/root. Nothing is installed, the system's apt state is untouched, and the result is never
# committed or shipped (NVIDIA's licence). Prints the folder it unpacked to.
# Exit 3: they cannot be had on this machine; what needs them is then skipped.
#
#     driver-libraries.sh [PACKAGE...]     default: what the tests and the demo use
#     driver-libraries.sh --nvidia-smi     fetches nothing; prints `--nvidia-smi PATH` if it is there, else nothing
set -eu

top=$(cd "$(dirname "$0")/../.." && pwd)
base=$top/.cache/driver-libraries
root=$base/root
if [ "${1-}" = --nvidia-smi ]; then
    program=$root/usr/lib/nvidia/current/nvidia-smi
    [ ! -x "$program" ] || echo "--nvidia-smi $program"
    exit 0
fi
# shellcheck source=tests/setup/cache.sh
. "$top/tests/setup/cache.sh"
[ $# -gt 0 ] || set -- nvidia-smi nvidia-cuda-mps libnvidia-ml1 libcuda1 libnvidia-ptxjitcompiler1 libnvidia-nvvm4 libnvidia-cfg1

# Idempotent: each unpacked package leaves a mark.
wanted=
for package; do
    [ -e "$base/unpacked/$package" ] || wanted="$wanted $package"
done
[ -n "$wanted" ] || {
    echo "$root"
    exit 0
}

# shellcheck source=tests/setup/private-apt.sh
. "$top/tests/setup/private-apt.sh"
mkdir -p "$base/unpacked" "$root"
private_apt "$base" amd64 main contrib non-free non-free-firmware || exit 3
for package in $wanted; do
    unpack "$package" "$root" || exit 3
    : >"$base/unpacked/$package"
done
rm -rf "$base/lists" "$base"/*.bin
echo "$root"
