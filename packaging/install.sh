#!/bin/sh
# Installs what `make build` made: install.sh DESTDIR PREFIX. Paths inside are found from the programs' own place, so
# the tree works wherever it is put; only the settings and the state folder have fixed places.
set -eu
umask 022

[ $# -eq 2 ] || {
    echo "usage: install.sh DESTDIR PREFIX, as: install.sh '' /usr/local" >&2
    exit 2
}
top=$(CDPATH= cd -- "$(dirname "$0")/.." && pwd)
# What `make build` made; package.sh names what was made for another architecture.
built=${BUILT:-$top/target}

[ -x "$built/release/gpushare-hook" ] && [ -d "$built/share" ] || {
    echo "install.sh: nothing is built yet: run \`make build\` first" >&2
    exit 1
}

who=install.sh
# shellcheck source=packaging/lifecycle.sh
. "$top/packaging/lifecycle.sh"
at "$1" "$2"
root=$destdir$prefix
[ -n "$destdir" ] ||
    may_come "$(sed -n 's/^const VERSION: u32 = \([0-9]*\);.*/\1/p' "$top/quota/src/ledger/text.rs")"
alone "$destdir" "$prefix"
# What is being written when this ends.
new=
trap '[ -z "$new" ] || rm -f "$new"' EXIT
trap 'exit 143' HUP INT TERM

install -d "$root/bin" "$root/lib/gpushare" "$root/lib/gpushare-simulator" "$root/lib/tmpfiles.d" "$root/lib/systemd/system" \
    "$root/lib/udev/rules.d" "$root/share/gpushare/hooks.d" "$root/share/doc/gpushare"
# put MODE FILE...  FOLDER/: each under another name first and then renamed, so that nobody ever meets half a file, none, or one
# that cannot be run. Containers that run keep what they have mounted.
put() {
    mode=$1
    shift
    for folder; do :; done
    while [ $# -gt 1 ]; do
        name=$(basename "$1")
        new=$folder/.$name.new
        install -m "$mode" "$1" "$new"
        mv -fT "$new" "$folder/$name"
        shift
    done
}
# placed FILE FOLDER: a file that names the programs by their path.
placed() {
    name=$(basename "$1")
    new=$root/$2/.$name.new
    # A link in its place would be followed.
    rm -f "$new"
    sed "s|@PREFIX@|$prefix|g" "$top/packaging/$1" >"$new"
    chmod 644 "$new"
    mv -fT "$new" "$root/$2/$name"
}

# What is called comes before who calls it, and the wrapper, which engines call, comes last.
put 644 "$built/lib/gpushare/libcuda.so.1" "$built/lib/gpushare/libnvidia-ml.so.1" "$root/lib/gpushare"
put 644 "$built/release/libgpushare_simulator_cuda.so" "$built/release/libgpushare_simulator_nvml.so" \
    "$root/lib/gpushare-simulator"
put 644 "$top/packaging/tmpfiles.conf" "$root/lib/tmpfiles.d"
mv -f "$root/lib/tmpfiles.d/tmpfiles.conf" "$root/lib/tmpfiles.d/gpushare.conf"
put 644 "$top/LICENSE" "$top/README.md" "$top/CHANGELOG.md" "$top/CONTRIBUTING.md" "$top/SECURITY.md" \
    "$root/share/doc/gpushare"
install -d "$root/share/doc/gpushare/docs"
put 644 "$top"/docs/*.md "$root/share/doc/gpushare/docs"
install -d "$root/share/doc/gpushare/examples"
put 644 "$top/examples/README.md" "$root/share/doc/gpushare/examples"
for example in compose jax kubernetes numba pytorch slurm vllm; do
    install -d "$root/share/doc/gpushare/examples/$example"
    put 644 "$top/examples/$example"/* "$root/share/doc/gpushare/examples/$example"
done
for snippet in docker-daemon.json containerd.toml oci.conf runtimeclass.yaml; do
    placed "$snippet" share/gpushare
done
install -d "$root/share/gpushare/prometheus"
put 644 "$top/packaging/prometheus/gpushare.rules.yml" "$top/packaging/prometheus/grafana-dashboard.json" \
    "$root/share/gpushare/prometheus"
for hook in 99-gpushare.json 99-gpushare-poststop.json; do
    placed "hooks.d/$hook" share/gpushare/hooks.d
done
for unit in gpushare-meter.service gpushare-mps.service gpushare-sweep.service gpushare-sweep.timer gpushare-system.service; do
    placed "$unit" lib/systemd/system
done
put 644 "$top/packaging/71-gpushare.rules" "$root/lib/udev/rules.d"

# Manual pages, completions and JSON Schemas.
(cd "$built/share" && find . -type d) | while read -r folder; do
    install -d "$root/share/$folder"
done
# The list of them, by which uninstall.sh knows ours, comes before the first.
new=$root/share/gpushare/.pages.new
rm -f "$new"
(cd "$built/share" && find . -type f | sed 's|^\./||' | sort) >"$new"
mv -f "$new" "$root/share/gpushare/pages"
while read -r file; do
    put 644 "$built/share/$file" "$root/share/$(dirname "$file")"
done <"$root/share/gpushare/pages"

# The administrator's file is never replaced; the shipped one lies beside it to compare.
install -d "$destdir/etc/gpushare/gpushare.toml.d"
put 644 "$top/config/gpushare.toml" "$root/share/gpushare"
[ -e "$destdir/etc/gpushare/gpushare.toml" ] || [ -L "$destdir/etc/gpushare/gpushare.toml" ] ||
    put 644 "$top/config/gpushare.toml" "$destdir/etc/gpushare"

[ -n "$destdir" ] || note_installed "$prefix"
for program in gpushare-simulator gpushare gpushare-supervisor gpushare-hook gpushare-runtime; do
    put 755 "$built/release/$program" "$root/bin"
done

