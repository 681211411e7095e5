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
[ $# -gt 0 ] || set -- nvidia-smi libnvidia-ml1 libcuda1 libnvidia-ptxjitcompiler1 libnvidia-nvvm4 libnvidia-cfg1

cannot() {
    echo "driver-libraries.sh: $*" >&2
    exit 3
}

# Idempotent: each unpacked package leaves a mark.
wanted=
for package; do
    [ -e "$base/unpacked/$package" ] || wanted="$wanted $package"
done
[ -n "$wanted" ] || {
    echo "$root"
    exit 0
}

command -v apt-get >/dev/null || cannot "no apt on this machine"
mkdir -p "$base/lists/partial" "$base/archives/partial" "$base/unpacked" "$root"

# The mirror is the machine's own: its repositories and keys, with more components.
# apt prints a field that it does not know as its own literal name: that is no key.
sources=$base/private.list
apt-get indextargets --format '$(REPO_URI) $(RELEASE) $(SIGNED_BY)' 'Created-By: Packages' 'Component: main' | sort -u |
    while read -r uri release key; do
        case $key in
        '' | '$('*) options='[arch=amd64]' ;;
        *) options="[arch=amd64 signed-by=$key]" ;;
        esac
        echo "deb $options $uri $release main contrib non-free non-free-firmware"
    done >"$sources"
[ -s "$sources" ] || cannot "apt knows no repository with a component called main"

apt() {
    tool=$1
    shift
    "$tool" -qq \
        -o Dir::Etc::sourcelist="$sources" -o Dir::Etc::sourceparts=- -o Dir::State::lists="$base/lists" \
        -o Dir::Cache="$base" -o Dir::Cache::archives="$base/archives" \
        -o APT::Architecture=amd64 -o APT::Architectures=amd64 -o Acquire::Languages=none \
        -o APT::Sandbox::User=root -o Debug::NoLocking=1 "$@"
}

apt apt-get update >/dev/null || cannot "the machine's package mirror did not answer"
cd "$base/archives"
for package in $wanted; do
    apt apt-cache show "$package" >/dev/null 2>&1 || cannot "the machine's mirror has no package $package"
    rm -f "$package"_*.deb
    apt apt-get download "$package" || cannot "could not download $package"
    dpkg -x "$package"_*.deb "$root"
    rm -f "$package"_*.deb
    : >"$base/unpacked/$package"
done
rm -rf "$base/lists" "$base"/*.bin
echo "$root"
