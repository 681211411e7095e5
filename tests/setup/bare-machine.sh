#!/bin/sh
# Makes the root of a machine with the distribution's smallest set of packages and docker, in
# .cache/bare-machine, from the mirror that this machine's apt names. Only its packages' own scripts run, in that
# root. Prints it. Quick when it is there. Exit 3: it cannot be had on this machine; what needs it is then skipped.
set -eu

top=$(cd "$(dirname "$0")/../.." && pwd)
# shellcheck source=tests/setup/cache.sh
. "$top/tests/setup/cache.sh"
base=$top/.cache/bare-machine

missing() {
    echo "bare-machine.sh: $*" >&2
    exit 3
}
[ "$(id -u)" = 0 ] || missing "not root"
[ -x /usr/sbin/debootstrap ] || missing "debootstrap is missing: run tests/setup/packages.sh"
codename=$(. /etc/os-release && echo "${VERSION_CODENAME-}")
made_from="$codename docker.io"

if [ "$(cat "$base.made-from" 2>/dev/null)" != "$made_from" ]; then
    mirror=$(apt-get indextargets --format '$(REPO_URI)' \
        'Created-By: Packages' 'Component: main' "Codename: $codename" | head -n 1)
    [ -n "$mirror" ] || missing "apt knows no mirror of $codename"
    rm -rf "$base" "$base.made-from"
    # What it mounts in there goes with it, however it ends: the next run removes the folder.
    unshare --mount --propagation private debootstrap --variant=minbase "$codename" "$base" "$mirror" \
        >"$base.log" 2>&1 ||
        missing "debootstrap did not work: see $base.log"
    # docker's daemon is the tests' to start.
    printf '#!/bin/sh\nexit 101\n' >"$base/usr/sbin/policy-rc.d"
    chmod 755 "$base/usr/sbin/policy-rc.d"
    in_it() {
        chroot "$base" env DEBIAN_FRONTEND=noninteractive "$@" >>"$base.log" 2>&1
    }
    in_it apt-get -q update && in_it apt-get -q -y install --no-install-recommends docker.io ||
        missing "docker.io could not be installed in it: see $base.log"
    # From Debian 13 on the client is a package of its own.
    [ -x "$base/usr/bin/docker" ] || in_it apt-get -q -y install --no-install-recommends docker-cli ||
        missing "it has no docker client: see $base.log"
    in_it apt-get clean
    rm -rf "$base"/var/lib/apt/lists/* "$base/usr/share/doc" "$base/usr/share/locale" "$base/usr/share/man"
    echo "$made_from" >"$base.made-from"
fi
echo "$base"
