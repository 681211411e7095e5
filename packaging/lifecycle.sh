# What must hold before gpushare comes to a machine or goes from it, and what goes with it. uninstall.sh reads this
# file, and package.sh puts it into the scripts of the deb and the rpm. For any /bin/sh. $who is who speaks: a script,
# or gpushare for a package.

refuse() {
    echo "$who: $*" >&2
    exit 1
}

# may_come LEDGER [ROOT]: refuses programs that cannot read the leases of this machine, because newer ones wrote them.
# LEDGER is the version of leases that the programs write (VERSION in quota/src/ledger/text.rs); they read all earlier
# ones. They would refuse every container, and those that run could not give their shares back. Only the usual state
# folder is looked at, below ROOT where the machine's root is mounted there.
may_come() {
    for ledger in "${2-}"/run/gpushare/leases-*; do
        found=$(sed -n '1s/^gpushare leases, version \([0-9][0-9]*\):.*/\1/p' "$ledger" 2>/dev/null) || continue
        [ "${found:-0}" -le "$1" ] ||
            refuse "$ledger has version $found, this gpushare reads $1:" \
                "end the containers with shares, remove the newer gpushare, then install this one"
    done
}

# may_go PREFIX: refuses while anybody needs the programs below PREFIX.
may_go() {
    [ "${FORCE:-0}" != 1 ] || return 0
    # A living container needs the runtime to be stopped.
    if [ -x "$1/bin/gpushare" ]; then
        held=$("$1/bin/gpushare" ps --quiet) ||
            refuse "cannot tell whether containers hold shares (see above); say FORCE=1 if none does"
        [ -z "$held" ] || refuse "containers still hold shares (gpushare ps): end them first, or say FORCE=1"
    fi
    # MPS gives GPUs back a moment after the last share, if it is served.
    ! ls /run/gpushare/mps/*/compute-mode >/dev/null 2>&1 ||
        refuse "GPUs are still in MPS' compute mode: keep \`gpushare mps serve\` running for a moment, or say FORCE=1"
    [ ! -x "$1/bin/gpushare" ] || unnamed "$1/bin/gpushare" "$1/bin/gpushare-runtime" ", or say FORCE=1"
}

# unnamed GPUSHARE RUNTIME [ELSE]: refuses while an engine still names the runtime, or nobody can tell: it could start
# none of its containers, nor stop those that it has. GPUSHARE is the program, ELSE what the refusal says at its end. An
# engine that names the runtime of another installation is left alone, and noted in $elsewhere.
unnamed() {
    for engine in docker containerd crio podman; do
        told=$("$1" configure "$engine" --remove --dry-run --json) ||
            refuse "cannot tell whether $engine still has the runtime (see above)${3-}"
        case $told in *'"changed": true'*) ;; *) continue ;; esac
        # Paths in the lines that would go, as JSON has them. A link may lead here.
        named=$(printf '%s\n' "$told" | grep -o '/[^"\\ ]*/gpushare-runtime') || named=$2
        for path in $named; do
            [ "$path" != "$2" ] && ! [ "${HOST-}$path" -ef "${HOST-}$2" ] ||
                refuse "$engine still has the runtime: run \`gpushare configure $engine --remove\` first${3-}"
        done
        elsewhere=$engine
    done
}

# another PREFIX [ROOT]: whether the machine has a gpushare elsewhere, whose state, settings and history are the same.
another() {
    [ -z "${elsewhere-}" ] || return 0
    for other in /usr /usr/local /opt/gpushare/current; do
        [ "$other" = "$1" ] || [ ! -x "${2-}$other/bin/gpushare-runtime" ] || return 0
    done
    return 1
}

# alone FOLDER: waits until no other installer works below the folder, and keeps others waiting until this one ends.
alone() {
    command -v flock >/dev/null || return 0
    mkdir -p "$1"
    exec 9<"$1"
    flock 9
}

# stop_units PREFIX: units that run or are enabled would run on without their files.
stop_units() {
    command -v systemctl >/dev/null || return 0
    now=
    [ ! -d /run/systemd/system ] || now=--now
    for unit in "$1"/lib/systemd/system/gpushare-*; do
        systemctl disable $now "${unit##*/}" >/dev/null 2>&1 || true
    done
}

# Tells systemd and udev of files that came or went. Where neither runs there is nobody to tell.
reload_units() {
    [ ! -d /run/systemd/system ] || systemctl daemon-reload || true
    [ ! -S /run/udev/control ] || udevadm control --reload || true
}

# after_install PREFIX new|upgrade: nothing is enabled, and nothing is started that was not running. Containers keep the
# files that they have mounted.
after_install() {
    reload_units
    if [ "$2" = upgrade ]; then
        # Both take over what the process before them left: containers and MPS daemons run on meanwhile.
        [ ! -d /run/systemd/system ] || systemctl try-restart gpushare-meter.service gpushare-mps.service || true
    else
        echo "gpushare: next run \`gpushare doctor\`, then \`gpushare configure docker\` (or containerd, crio, podman),"
        echo "gpushare: and \`systemctl enable --now gpushare-meter.service gpushare-sweep.timer" \
            "gpushare-system.service\`"
    fi
    # Versions that kept the leases in a database left them there. Whoever needs them next takes them over, but a hook.
    [ ! -e /run/gpushare/quota.db ] || "$1/bin/gpushare" sweep >/dev/null ||
        echo "gpushare: run \`gpushare sweep\`, which takes over the leases of the version before"
}

# forget_shares PREFIX [ROOT]: what nobody needs without the programs. Engines would offer devices whose hook is gone.
forget_shares() {
    ! another "$@" || return 0
    umount -R "${2-}/run/gpushare/limits" 2>/dev/null || true
    rm -rf "${2-}/run/gpushare" "${2-}/var/cache/gpushare" || true
    forget_devices "${2-}"
}

# forget_devices [ROOT]: the CDI devices, which name the hook.
forget_devices() {
    for kind in share gpu; do
        rm -f "${1-}/etc/cdi/gpushare-$kind.json" "${1-}/run/cdi/gpushare-$kind.json"
    done
}

# forget_all PREFIX: settings and history too. A ledger that is there again belongs to another installation, too.
forget_all() {
    if another "$1" || ls /run/gpushare/leases-* >/dev/null 2>&1; then
        echo "gpushare: kept /etc/gpushare and /var/lib/gpushare: another gpushare works on this machine"
    else
        rm -rf /etc/gpushare /var/lib/gpushare
    fi
}
