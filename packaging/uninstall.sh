#!/bin/sh
# Removes what install.sh put there: uninstall.sh [DESTDIR [PREFIX]], below /usr/local when nothing
# is said. Settings that were changed stay.
set -eu

who=uninstall.sh
# shellcheck source=packaging/lifecycle.sh
. "$(CDPATH= cd -- "$(dirname "$0")" && pwd)/lifecycle.sh"
at "${1-}" "${2-/usr/local}"
root=$destdir$prefix
settings=$destdir/etc/gpushare/gpushare.toml

[ -d "$root/share/gpushare" ] || [ -e "$root/bin/gpushare" ] || [ -d "$root/lib/gpushare" ] || {
    echo "nothing of gpushare is in $root"
    exit 0
}
# Shares are held and units run on this machine only, not in a staged tree.
[ ! -d "$root" ] || alone "$destdir" "$prefix"
if [ -z "$destdir" ]; then
    may_go "$prefix"
    stop_units "$prefix"
fi

# gone FILE...: with what an installer left that was killed while it wrote.
gone() {
    for file; do
        rm -f "$file" "${file%/*}/.${file##*/}.new"
    done
}
if ! { [ -z "$destdir" ] && another "$prefix"; } && [ -e "$settings" ] && cmp -s "$settings" "$root/share/gpushare/gpushare.toml"; then
    rm -f "$settings"
fi
for program in gpushare gpushare-runtime gpushare-hook gpushare-supervisor gpushare-simulator; do
    gone "$root/bin/$program"
done
# Manual pages, completions and the like.
if [ -e "$root/share/gpushare/pages" ]; then
    while read -r page; do
        case /$page/ in */../*) continue ;; esac
        gone "$root/share/$page"
    done <"$root/share/gpushare/pages"
fi
rm -rf "$root/lib/gpushare" "$root/lib/gpushare-simulator" "$root/share/doc/gpushare"
units=$root/lib/systemd/system
gone "$root/lib/tmpfiles.d/gpushare.conf" "$root/lib/tmpfiles.d/tmpfiles.conf" "$root/lib/udev/rules.d/71-gpushare.rules" \
    "$units/gpushare-meter.service" "$units/gpushare-mps.service" "$units/gpushare-sweep.service" \
    "$units/gpushare-sweep.timer" "$units/gpushare-system.service"
rm -f "$destdir/etc/gpushare/.gpushare.toml.new"
rmdir "$destdir/etc/gpushare/gpushare.toml.d" "$destdir/etc/gpushare" "$root/lib/systemd/system" "$root/lib/systemd" \
    "$root/lib/udev/rules.d" "$root/lib/udev" "$root/lib/tmpfiles.d" "$root/share/doc" \
    "$root/share/man/man1" "$root/share/man" "$root/share/bash-completion/completions" "$root/share/bash-completion" \
    "$root/share/zsh/site-functions" "$root/share/zsh" "$root/share/fish/vendor_completions.d" "$root/share/fish" \
    2>/dev/null || true
if [ -z "$destdir" ] && another "$prefix"; then
    echo "kept settings, shares and history: another gpushare works on this machine"
elif [ -e "$settings" ]; then
    echo "kept $settings: it was changed"
fi
if [ -z "$destdir" ]; then
    reload_units
    forget_shares "$prefix"
    [ ! -e /var/lib/gpushare ] || echo "kept /var/lib/gpushare: what \`gpushare history\` tells"
    echo "engines whose settings are elsewhere may still name the runtime \"gpushare\": take it out there"
fi
# By this folder a run that was ended before is gone on with.
rm -rf "$root/share/gpushare"
