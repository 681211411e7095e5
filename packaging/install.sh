#!/bin/sh
# Installs what `make build` made: install.sh DESTDIR PREFIX. Paths inside are found from the programs' own place, so
# the tree works wherever it is put; only the settings and the state folder have fixed places.
set -eu

destdir=$1
prefix=$2
case $prefix in
/*) ;;
*)
    echo "install.sh: PREFIX must begin with /, as PREFIX=/usr/local: $prefix" >&2
    exit 1
    ;;
esac
top=$(cd "$(dirname "$0")/.." && pwd)
built=$top/target
root=$destdir$prefix

[ -x "$built/release/gpushare-hook" ] || {
    echo "install.sh: nothing is built yet: run \`make build\` first" >&2
    exit 1
}

install -d "$root/bin" "$root/lib/gpushare" "$root/lib/gpushare-simulator" "$root/lib/tmpfiles.d" "$root/lib/systemd/system" \
    "$root/lib/udev/rules.d" "$root/share/gpushare/hooks.d" "$root/share/doc/gpushare"
for program in gpushare gpushare-runtime gpushare-hook gpushare-simulator; do
    install -m 755 "$built/release/$program" "$root/bin/$program"
done
install -m 644 "$built/lib/gpushare/libcuda.so.1" "$built/lib/gpushare/libnvidia-ml.so.1" "$root/lib/gpushare/"
install -m 644 "$built/release/libgpushare_simulator_cuda.so" "$built/release/libgpushare_simulator_nvml.so" \
    "$root/lib/gpushare-simulator/"
install -m 644 "$top/packaging/tmpfiles.conf" "$root/lib/tmpfiles.d/gpushare.conf"
install -m 644 "$top/LICENSE" "$top/README.md" "$root/share/doc/gpushare/"
install -d "$root/share/doc/gpushare/docs"
install -m 644 "$top"/docs/*.md "$root/share/doc/gpushare/docs/"
# placed FILE FOLDER: a file that names the programs by their path.
placed() {
    sed "s|@PREFIX@|$prefix|g" "$top/packaging/$1" >"$root/$2/$1"
    chmod 644 "$root/$2/$1"
}
for snippet in docker-daemon.json containerd.toml oci.conf runtimeclass.yaml; do
    placed "$snippet" share/gpushare
done
for hook in hooks.d/99-gpushare.json hooks.d/99-gpushare-poststop.json; do
    placed "$hook" share/gpushare
done
placed gpushare-meter.service lib/systemd/system
placed gpushare-sweep.service lib/systemd/system
placed gpushare-sweep.timer lib/systemd/system
placed gpushare-system.service lib/systemd/system
install -m 644 "$top/packaging/71-gpushare.rules" "$root/lib/udev/rules.d/71-gpushare.rules"

# The administrator's file is never replaced; the shipped one lies beside it to compare.
install -d "$destdir/etc/gpushare/gpushare.toml.d"
install -m 644 "$top/config/gpushare.toml" "$root/share/gpushare/gpushare.toml"
[ -e "$destdir/etc/gpushare/gpushare.toml" ] ||
    install -m 644 "$top/config/gpushare.toml" "$destdir/etc/gpushare/gpushare.toml"
