#!/bin/sh
# Installs the distribution's packages that the demo and the tests run: low-level runtimes, engines, a static busybox, Python,
# makers and checkers of packages.
# Quick and silent when nothing is missing. Exit 3: not root, or no apt on this machine.
set -eu

# One line per need: the package, then the programs any of which also satisfies it (a docker of another origin is as good).
needs='
runc            /usr/bin/runc /usr/sbin/runc
crun            /usr/bin/crun
containerd      /usr/bin/containerd
docker.io       /usr/sbin/dockerd /usr/bin/dockerd
docker-cli      /usr/bin/docker
docker-compose  /usr/bin/docker-compose
podman          /usr/bin/podman
conmon          /usr/bin/conmon
uidmap          /usr/bin/newuidmap
munge           /usr/sbin/munged
slurmctld       /usr/sbin/slurmctld
slurmd          /usr/sbin/slurmd
slurm-client    /usr/bin/srun
busybox-static
util-linux      /usr/bin/unshare
mount           /usr/bin/mount /bin/mount
python3-venv
curl            /usr/bin/curl
prometheus      /usr/bin/prometheus
dropbear-bin    /usr/sbin/dropbear
openssl         /usr/bin/openssl
strace          /usr/bin/strace
tmux            /usr/bin/tmux
chromium        /usr/bin/chromium /usr/bin/google-chrome
gcc             /usr/bin/cc
libc6-dev       /usr/include/stdio.h
binutils        /usr/bin/readelf
rpm             /usr/bin/rpmbuild
cpio            /usr/bin/cpio
debootstrap     /usr/sbin/debootstrap
lintian         /usr/bin/lintian
rpmlint         /usr/bin/rpmlint
'

installed() {
    [ "$(dpkg-query --show --showformat='${db:Status-Status}' "$1" 2>/dev/null)" = installed ]
}

# satisfied PACKAGE [PROGRAM...]
satisfied() {
    package=$1
    shift
    for program; do
        [ -e "$program" ] && return 0
    done
    installed "$package"
}

missing() {
    printf '%s' "$needs" | while read -r line; do
        # shellcheck disable=SC2086 # a line is a list of words
        [ -z "$line" ] || satisfied $line || echo "${line%% *}"
    done
}

wanted=$(missing)
[ -n "$wanted" ] || exit 0

command -v apt-get >/dev/null || {
    echo "packages.sh: these packages are missing and this machine has no apt: install them by hand:" $wanted >&2
    exit 3
}
[ "$(id -u)" = 0 ] || {
    echo "packages.sh: run as root to install:" $wanted >&2
    exit 3
}

# Debian's packages start their daemons; the tests run private ones. A policy of the machine's own is left as it is.
policy=/usr/sbin/policy-rc.d
if [ ! -e "$policy" ]; then
    trap 'rm -f "$policy"' EXIT
    trap 'exit 1' HUP INT TERM
    printf '#!/bin/sh\nexit 101\n' >"$policy"
    chmod 755 "$policy"
fi

export DEBIAN_FRONTEND=noninteractive
echo "packages.sh: installing" $wanted
apt-get -qq update

# docker.io contains the client up to Debian 12; later it is a package of its own.
available=
for package in $wanted; do
    if [ "$package" != docker-cli ] || apt-cache show docker-cli >/dev/null 2>&1; then
        available="$available $package"
    fi
done
# shellcheck disable=SC2086 # a list of words
apt-get -qq -y -o Dpkg::Use-Pty=0 install --no-install-recommends $available >/dev/null

wanted=$(missing)
[ -z "$wanted" ] || {
    echo "packages.sh: still missing after the installation:" $wanted >&2
    exit 1
}
