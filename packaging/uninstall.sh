#!/bin/sh
# Removes what install.sh put there: uninstall.sh DESTDIR PREFIX. Settings that were changed stay.
set -eu

destdir=$1
prefix=$2
root=$destdir$prefix
settings=$destdir/etc/gpushare/gpushare.toml

if [ -e "$settings" ] && cmp -s "$settings" "$root/share/gpushare/gpushare.toml"; then
    rm -f "$settings"
fi
for program in gpushare gpushare-runtime gpushare-hook gpushare-simulator; do
    rm -f "$root/bin/$program"
done
rm -rf "$root/lib/gpushare" "$root/lib/gpushare-simulator" "$root/share/gpushare" "$root/share/doc/gpushare"
rm -f "$root/lib/tmpfiles.d/gpushare.conf" "$root/lib/systemd/system/gpushare-sweep.service" \
    "$root/lib/systemd/system/gpushare-sweep.timer"
rmdir "$destdir/etc/gpushare/gpushare.toml.d" "$destdir/etc/gpushare" 2>/dev/null || true
