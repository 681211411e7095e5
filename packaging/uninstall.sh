#!/bin/sh
# Removes what install.sh put there: uninstall.sh DESTDIR PREFIX. Settings that were changed stay.
set -eu

destdir=$1
prefix=$2
case $prefix in
/*) ;;
*)
    echo "uninstall.sh: PREFIX must begin with /, as PREFIX=/usr/local: $prefix" >&2
    exit 1
    ;;
esac
root=$destdir$prefix
settings=$destdir/etc/gpushare/gpushare.toml

# A living container needs the runtime to be stopped. Shares are held on this machine only, not in a staged tree.
if [ -z "$destdir" ] && [ "${FORCE:-0}" != 1 ] && [ -x "$root/bin/gpushare" ]; then
    held=$("$root/bin/gpushare" ps --quiet) || {
        echo "uninstall.sh: cannot tell whether containers hold shares (see above); say FORCE=1 if none does" >&2
        exit 1
    }
    [ -z "$held" ] || {
        echo "uninstall.sh: containers still hold shares (gpushare ps): end them first, or say FORCE=1" >&2
        exit 1
    }
fi

# MPS gives GPUs back a moment after the last share, if it is served.
if [ -z "$destdir" ] && [ "${FORCE:-0}" != 1 ] && ls /run/gpushare/mps/*/compute-mode >/dev/null 2>&1; then
    echo "uninstall.sh: GPUs are still in MPS' compute mode: keep \`gpushare mps serve\` running for a moment, or say FORCE=1" >&2
    exit 1
fi

# An engine that still names the runtime could start none of its containers, nor stop those that it has.
if [ -z "$destdir" ] && [ "${FORCE:-0}" != 1 ] && [ -x "$root/bin/gpushare" ]; then
    for engine in docker containerd crio podman; do
        if "$root/bin/gpushare" configure "$engine" --remove --dry-run --json 2>/dev/null | grep -q '"changed": true'; then
            echo "uninstall.sh: $engine still has the runtime: run \`gpushare configure $engine --remove\` first, or say FORCE=1" >&2
            exit 1
        fi
    done
fi

# Units that run or are enabled would run on without their files.
if [ -z "$destdir" ] && [ -d /run/systemd/system ]; then
    systemctl disable --now gpushare-meter.service gpushare-mps.service gpushare-sweep.timer gpushare-system.service 2>/dev/null || true
fi

if [ -e "$settings" ] && cmp -s "$settings" "$root/share/gpushare/gpushare.toml"; then
    rm -f "$settings"
fi
for program in gpushare gpushare-runtime gpushare-hook gpushare-simulator; do
    rm -f "$root/bin/$program"
done
rm -rf "$root/lib/gpushare" "$root/lib/gpushare-simulator" "$root/share/gpushare" "$root/share/doc/gpushare"
rm -f "$root"/share/man/man1/gpushare.1 "$root"/share/man/man1/gpushare-*.1 \
    "$root/share/bash-completion/completions/gpushare" "$root/share/zsh/site-functions/_gpushare" \
    "$root/share/fish/vendor_completions.d/gpushare.fish"
rm -f "$root/lib/tmpfiles.d/gpushare.conf" "$root/lib/systemd/system/gpushare-meter.service" \
    "$root/lib/systemd/system/gpushare-mps.service" "$root/lib/systemd/system/gpushare-sweep.service" "$root/lib/systemd/system/gpushare-sweep.timer" \
    "$root/lib/systemd/system/gpushare-system.service" "$root/lib/udev/rules.d/71-gpushare.rules"
rmdir "$destdir/etc/gpushare/gpushare.toml.d" "$destdir/etc/gpushare" "$root/lib/systemd/system" "$root/lib/systemd" \
    "$root/lib/udev/rules.d" "$root/lib/udev" "$root/lib/tmpfiles.d" "$root/share/doc" \
    "$root/share/man/man1" "$root/share/man" "$root/share/bash-completion/completions" "$root/share/bash-completion" \
    "$root/share/zsh/site-functions" "$root/share/zsh" "$root/share/fish/vendor_completions.d" "$root/share/fish" \
    2>/dev/null || true
[ -n "$destdir" ] || umount -R /run/gpushare/limits 2>/dev/null || true
[ -n "$destdir" ] || rm -rf /run/gpushare /var/cache/gpushare 2>/dev/null || true
# Engines would offer devices whose hook is gone.
for kind in share gpu; do
    [ -n "$destdir" ] || rm -f "/etc/cdi/gpushare-$kind.json" "/var/run/cdi/gpushare-$kind.json"
done
[ ! -e "$settings" ] || echo "kept $settings: it was changed"
[ -n "$destdir" ] || echo "engines whose settings are elsewhere may still name the runtime \"gpushare\": take it out there"
