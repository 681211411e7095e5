#!/bin/sh
# Lays out all that the tests on a GPU machine need in FOLDER, and packs it into FOLDER.tar.gz: bundle.sh FOLDER
set -eu

here=$(cd "$(dirname "$0")" && pwd)
top=$(cd "$here/../.." && pwd)
folder=$1

rm -rf "$folder"
mkdir -p "$folder/bin" "$folder/lib/gpushare" "$folder/lib/gpushare-simulator"
for program in gpushare gpushare-runtime gpushare-hook gpushare-supervisor gpushare-simulator gpushare-tests-client; do
    install -m 755 "$top/target/release/$program" "$folder/bin/"
done
install -m 755 "$top/target/release/attacker" "$folder/bin/gpushare-attacker"
install -m 755 "$top/target/release/supervisor" "$folder/bin/gpushare-simulated-supervisor"
install -m 755 "$top/target/release/gpushare-simulated-manager" "$folder/bin/"
install -m 755 /usr/sbin/runc /bin/busybox "$folder/bin/"
install -m 644 "$top"/target/lib/gpushare/*.so.1 "$folder/lib/gpushare/"
install -m 644 "$top/target/release/libgpushare_simulator_cuda.so" "$top/target/release/libgpushare_simulator_nvml.so" \
    "$folder/lib/gpushare-simulator/"
install -m 644 "$(ldd /usr/sbin/runc | sed -n 's/.*libseccomp.so.2 => \([^ ]*\).*/\1/p')" "$folder/lib/libseccomp.so.2"
install -m 644 "$top/config/gpushare.toml" "$here/README.md" "$here/frameworks.py" "$folder/"
install -m 755 "$here/run.sh" "$folder/"
for script in "$here"/*.sh; do
    case ${script##*/} in run.sh | bundle.sh) ;; *) install -m 644 "$script" "$folder/" ;; esac
done
tar -C "$(dirname "$folder")" --owner=0 --group=0 -czf "$folder.tar.gz" "$(basename "$folder")"
size=$(stat -c %s "$folder.tar.gz")
[ "$size" -lt 67108864 ] || {
    echo "bundle.sh: $folder.tar.gz has $size bytes, more than a GPU machine takes" >&2
    exit 1
}
echo "$folder.tar.gz: $size bytes"
