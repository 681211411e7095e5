# What must hold before gpushare comes to a machine or goes from it, and what goes with it. uninstall.sh reads this
# file, and package.sh puts it into the scripts of the deb and the rpm. For any /bin/sh. $who is who speaks: a script,
# or gpushare for a package.

refuse() {
    echo "$who: $*" >&2
    exit 1
}

# at DESTDIR PREFIX: sets $destdir and $prefix to where an installation lies, by one name: scripts change their folder,
# and compare prefixes as text.
at() {
    destdir=$1
    prefix=$2
    case $destdir in '' | /*) ;; *) destdir=$(pwd)/$destdir ;; esac
    while [ "${prefix%/}" != "$prefix" ]; do prefix=${prefix%/}; done
    case $prefix in
    *[!A-Za-z0-9/._+@-]* | [!/]* | '')
        refuse "PREFIX must begin with / and have letters, digits and /._+@- alone, as /usr/local: $2"
        ;;
    esac
    [ -n "$destdir" ] || [ ! -d "$prefix" ] || prefix=$(CDPATH= cd -P -- "$prefix" && pwd -P)
}

# The oldest leases that these programs read (READABLE in quota/src/ledger/text.rs).
oldest_ledger=4

# may_come LEDGER [ROOT]: refuses programs that cannot read the leases of this machine. LEDGER is the version of leases
# that they write (VERSION in quota/src/ledger/text.rs). They would refuse every container, and containers that run could
# not give their shares back. Checks the usual state folder alone, below ROOT where the machine's root is mounted there.
may_come() {
    for ledger in "${2-}"/run/gpushare/leases-*; do
        found=$(sed -n '1s/^gpushare leases, version \([0-9][0-9]*\):.*/\1/p' "$ledger" 2>/dev/null) || continue
        [ "${found:-0}" -le "$1" ] ||
            refuse "$ledger has version $found, this gpushare reads $1:" \
                "end the containers with shares, remove the newer gpushare, then install this one"
        [ "${found:-$1}" -ge "$oldest_ledger" ] ||
            refuse "$ledger has version $found, this gpushare reads versions from $oldest_ledger on:" \
                "end the containers with shares, remove the older gpushare, then install this one"
    done
    # The version of a database whose leases stand in a ledger is 200.
    database="${2-}/run/gpushare/quota.db"
    [ ! -e "$database" ] || [ "$(od -An -tu1 -j60 -N4 "$database" 2>/dev/null | tr -d ' ')" = 000200 ] ||
        refuse "$database is of an early version, which this gpushare cannot read:" \
            "end the containers with shares, remove the older gpushare, then install this one"
}

# How one goes on nevertheless; with sudo the variable stands behind it.
forced="set FORCE=1 in the environment"

# may_go PREFIX: refuses while anybody needs the programs below PREFIX.
may_go() {
    [ "${FORCE:-0}" != 1 ] || return 0
    unheld "$1"
    # What goes is the usual state, whatever settings the caller's environment names.
    [ -z "${GPUSHARE_CONFIG-}" ] || (unset GPUSHARE_CONFIG && unheld "$1") || exit 1
    # MPS gives GPUs back a moment after the last share, if it is served.
    ! ls /run/gpushare/mps/*/compute-mode >/dev/null 2>&1 ||
        refuse "MPS still has GPUs: keep \`gpushare mps serve\` running for a moment, or $forced"
    [ ! -x "$1/bin/gpushare" ] || unnamed "$1/bin/gpushare" "$1/bin" '' ", or $forced"
    # One without a share needs the runtime to be stopped, too.
    user=$(container_of "$1/bin/gpushare-" '')
    [ -z "$user" ] || refuse "$user still runs by the runtime: end it first, or $forced"
}

# unheld PREFIX: refuses while a container holds a share: a living one needs the runtime to be stopped.
unheld() {
    [ -x "$1/bin/gpushare" ] || return 0
    held=$("$1/bin/gpushare" ps --quiet) ||
        refuse "cannot tell whether containers hold shares (see above): if none does, $forced"
    [ -z "$held" ] || refuse "containers still hold shares (gpushare ps): end them first, or $forced"
}

# is_of_root PROCESS: whether a folder of /proc is of a process of root, who alone decides what stays: anybody may run
# our programs, and keep them.
is_of_root() {
    grep -qs '^Uid:	0	0	0	0$' "$1/status"
}

# keepers COMMAND ROOT: the machine's own processes of root whose command begins so, as folders of /proc. Any user and
# any container can give a process any name, and put what never ends where its files are looked for. A program that
# becomes root whoever calls it can be called by another name, too; a container's processes have a number of their own
# in it, or another root.
keepers() {
    grep -ls "^$1" "$2"/proc/[0-9]*/comm | while read -r comm; do
        process=${comm%/comm}
        # shellcheck disable=SC3013
        ! is_of_root "$process" || [ -u "$process/exe" ] || grep -qs '^NSpid:	[0-9]*	' "$process/status" ||
            { [ -e "$2/proc/1/root/." ] && [ ! "$process/root/." -ef "$2/proc/1/root/." ]; } || echo "$process"
    done
}

# notes ROOT: files that tell of the machine's containers: config.json, and what names the runtime that stops them. A
# shim of containerd works in the folder of its container, beside which lie those of all others; conmon is told folder
# and runtime. The folders are reached through the processes: an engine may keep them anywhere.
notes() {
    {
        keepers containerd-shim "$1" | while read -r process; do
            stat -L -c '%d:%i %n' "$process/cwd/.." 2>/dev/null || true
        done | sort -u -k 1,1 | while read -r _ folder; do
            for note in "$folder"/*/config.json "$folder"/*/runtime "$folder"/*/options.json; do
                echo "$note"
            done
        done
        keepers conmon "$1" | while read -r process; do
            echo "$process/cmdline"
            tr '\0' '\n' <"$process/cmdline" |
                sed -n "/^-b\$/ { n; s|^/var/run/|/run/|; s|.*|$process/root&/config.json|; p; }"
        done
    } | while read -r note; do
        [ ! -f "$note" ] || echo "$note"
    done
}

# container_of PATH ROOT: a container of the machine whose notes have the path, in words; nothing where there is none.
# In config.json a hook has it: environment and names are the container's own, and cannot hold an unescaped quote.
container_of() {
    notes "$2" | while read -r note; do
        case $note in
        */config.json) grep -qs "\"path\": *\"$1" "$note" || continue ;;
        *) grep -qsF "$1" "$note" || continue ;;
        esac
        case $note in
        */cwd/../*)
            note=${note#*/cwd/../}
            echo "container ${note%%/*}"
            ;;
        */cmdline)
            note=${note%/cmdline}
            echo "the container of process ${note##*/}"
            ;;
        *) echo "$note" ;;
        esac
        break
    done
}

# unnamed GPUSHARE FOLDER ROOT [ELSE]: refuses while an engine still names a program in the folder, or nobody can tell:
# it could start none of its containers, nor stop those that it has. GPUSHARE is the program that knows, ELSE what the
# refusal says at its end. An engine that names the programs of another installation is left alone, and noted in
# $elsewhere.
unnamed() {
    named=$("$1" registrations) ||
        refuse "cannot tell which engines have the runtime (see above): if an earlier version is there," \
            "install this one over it first${4-}"
    while IFS='	' read -r program engine remedy; do
        case $program in
        '') continue ;;
        -) refuse "$engine may still have the runtime: $remedy${4-}" ;;
        /*)
            own=$2/${program##*/}
            # A link may lead here.
            # shellcheck disable=SC3013
            [ "$program" = "$own" ] || [ "$3$program" -ef "$3$own" ] || {
                elsewhere=$engine
                [ ! -x "$3$program" ] || note_installed "${program%/bin/*}" "$3"
                continue
            }
            ;;
        esac
        refuse "$engine still has the runtime: $remedy first${4-}"
    done <<EOF
$named
EOF
}

# The prefixes of the machine's installations, a line each.
installed=/etc/gpushare/installations

# note_installed PREFIX [ROOT]: where nothing can be written, nothing can be taken from another installation either.
note_installed() {
    grep -qsxF "$1" "${2-}$installed" || {
        mkdir -p "${2-}${installed%/*}" && { cat "${2-}$installed" 2>/dev/null || true; echo "$1"; } \
            >"${2-}$installed.new" && mv -f "${2-}$installed.new" "${2-}$installed"
    } 2>/dev/null || true
}

# note_gone PREFIX [ROOT]
note_gone() {
    if grep -qsvxF "$1" "${2-}$installed"; then
        grep -vxF "$1" "${2-}$installed" >"${2-}$installed.new" && mv -f "${2-}$installed.new" "${2-}$installed"
    else
        rm -f "${2-}$installed" "${2-}$installed.new"
        rmdir "${2-}${installed%/*}" 2>/dev/null || true
    fi
}

# another PREFIX [ROOT]: whether the machine has a gpushare elsewhere, whose state, settings and history are the same.
another() {
    [ -z "${elsewhere-}" ] || return 0
    for other in /usr /usr/local /opt/gpushare/current $(cat "${2-}$installed" 2>/dev/null); do
        # shellcheck disable=SC3013
        [ "$other" = "$1" ] || [ "${2-}$other" -ef "${2-}$1" ] || [ ! -x "${2-}$other/bin/gpushare-runtime" ] ||
            return 0
    done
    return 1
}

# alone DESTDIR PREFIX: waits until no other installer works there, and keeps others waiting until this one ends. The
# file on the machine is one that root alone can open, and so lock.
alone() {
    command -v flock >/dev/null || return 0
    lock=/run/gpushare-installer.lock
    [ -z "$1" ] && (umask 077 && : >>"$lock") 2>/dev/null || {
        lock=$1$2
        mkdir -p "$lock"
    }
    exec 9<"$lock"
    flock -n 9 || {
        echo "$who: waits until another installer has ended" >&2
        timeout 600 flock 9 ||
            refuse "$lock is locked by a process that does not end: end it (see fuser), then run this again"
    }
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
    note_installed "$1"
    reload_units
    if [ "$2" = upgrade ]; then
        # Both take over what the process before them left: containers and MPS daemons run on meanwhile.
        [ ! -d /run/systemd/system ] || systemctl try-restart gpushare-meter.service gpushare-mps.service || true
    else
        echo "gpushare: next run \`gpushare doctor\`, then \`gpushare configure docker\` (or containerd, crio, podman),"
        echo "gpushare: and \`systemctl enable --now gpushare-meter.service gpushare-sweep.timer" \
            "gpushare-system.service\`"
    fi
}

# forget_shares PREFIX [ROOT]: what nobody needs without the programs. Engines would offer devices whose hook is gone.
forget_shares() {
    note_gone "$@"
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
