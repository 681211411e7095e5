#!/bin/sh
# Brings the programs of a container image onto a node of a cluster, and takes them away again: node.sh
# install|keep|remove|wait. The DaemonSets of the Helm chart run it, in the image that package.sh makes.
#
# On the node lies FOLDER/BUILD for each build that is there, and the link FOLDER/current to the one that new
# containers get. The engine names the runtime through the link, which is replaced by a rename: another build changes
# nothing in the engine's file, and the engine need not be restarted. The programs see their own place without the
# link, so config.json of a container names the hook of the build that made it. A build stays while a container or a
# process needs it.
#
# Every step can be repeated, and none needs the one before to have been finished in the same run: after a kill or a
# reboot the next run goes on. Nobody else may run beside it; a DaemonSet has one pod on a node at a time.
#
# In the environment (the chart sets them):
#   FOLDER          the folder on the node
#   ENGINE          containerd, crio, or none: somebody else tells the engine
#   ENGINE_CONFIG   the engine's file, where it is not the usual one
#   ENGINE_UNIT     the unit of systemd to restart after a change, or none: somebody else restarts it
#   DEFAULT_SHARE   as `gpushare configure --default-share`
#   SETTINGS        a file of settings for the node, which becomes a drop-in; none or an empty one is no drop-in
#   HOST            where the node's root is mounted
set -eu
umask 022

who=gpushare-node
here=$(CDPATH= cd -- "$(dirname "$0")" && pwd)
# shellcheck source=packaging/lifecycle.sh
. "$here/lifecycle.sh"

FOLDER=${FOLDER-/opt/gpushare}
HOST=${HOST-/host}
ENGINE=${ENGINE-none}
ENGINE_CONFIG=${ENGINE_CONFIG-}
ENGINE_UNIT=${ENGINE_UNIT-$ENGINE}
DEFAULT_SHARE=${DEFAULT_SHARE-}
SETTINGS=${SETTINGS-}
# What the image brings: bin, lib, SHA256SUMS and BUILD.
tree=${TREE-/opt/gpushare}
build=$(cat "$tree/BUILD")
top=$HOST$FOLDER
drop_in=/etc/gpushare/gpushare.toml.d/20-cluster.toml
mark="# Made by gpushare's installer for clusters, which replaces this file."

# Where nodes have systemctl and modprobe; the image has only its own folders.
PATH=$PATH:/usr/bin:/usr/sbin:/sbin:/usr/local/bin:/run/current-system/sw/bin
export PATH

say() {
    echo "$who: $*"
}

# The node's own root, so that links there lead where they lead for the engine.
on_host() {
    chroot "$HOST" "$@"
}

gpushare() {
    on_host "$FOLDER/current/bin/gpushare" "$@"
}

# solid PATH: refuses a path on the node on whose way another user could put something else, or with a link: an
# absolute one leads out of $HOST.
solid() {
    way=''
    rest=${1#/}
    while [ -n "$rest" ]; do
        way=$way/${rest%%/*}
        case $rest in
        */*) rest=${rest#*/} ;;
        *) rest= ;;
        esac
        [ ! -L "$HOST$way" ] ||
            refuse "$way on the node is a link to $(readlink "$HOST$way"): name the folder behind it in place of $1"
        [ -e "$HOST$way" ] || return 0
        [ -d "$HOST$way" ] || refuse "$way on the node is no folder: name another one in place of $1"
        case $(stat -c '%u %a' "$HOST$way") in
        0\ *[2367][0-7] | 0\ *[2367]) refuse "$way on the node can be written by others than root: chmod go-w $way" ;;
        0\ *) ;;
        *) refuse "$way on the node does not belong to root: chown 0 $way" ;;
        esac
    done
}

check() {
    case $FOLDER in
    *//* | */ | */. | */.. | */./* | */../*)
        refuse "FOLDER has no empty parts and no dots, as /opt/gpushare: $FOLDER"
        ;;
    *[!A-Za-z0-9._/-]*) refuse "FOLDER has letters, digits and ._- alone, as /opt/gpushare: $FOLDER" ;;
    # It goes as a whole in the end, so it is no folder of the system.
    /*/*) ;;
    *) refuse "FOLDER is an absolute path below another folder, as /opt/gpushare: $FOLDER" ;;
    esac
    case $ENGINE in
    containerd | crio | none) ;;
    *) refuse "ENGINE is containerd, crio or none: $ENGINE" ;;
    esac
    case $ENGINE_CONFIG in
    '' | /*) ;;
    *) refuse "ENGINE_CONFIG is an absolute path on the node, as /etc/containerd/config.toml: $ENGINE_CONFIG" ;;
    esac
    [ -z "$SETTINGS" ] || [ ! -e "$SETTINGS" ] || [ -f "$SETTINGS" ] || refuse "SETTINGS is no file: $SETTINGS"
    [ -d "$HOST/proc/1" ] || refuse "$HOST does not show the node's root: mount the node's / there, with all below it"
    solid "$FOLDER"
    solid "${drop_in%/*}"
}

# What a run that was killed left half done. Nobody else gives such names.
tidy() {
    rm -rf "$top"/.gpushare-new.* "$top"/.gpushare-old.*
}

# fill TO: makes the files in TO those of the image. Each comes by a rename, so it can be one that runs.
fill() {
    while read -r sum file; do
        [ "$(sha256sum 2>/dev/null <"$1/$file")" != "$sum  -" ] || continue
        mkdir -p "$1/${file%/*}"
        cp -p "$tree/$file" "$1/$file.new"
        mv -f "$1/$file.new" "$1/$file"
    done <"$tree/SHA256SUMS"
    for file in SHA256SUMS BUILD; do
        cp -p "$tree/$file" "$1/$file.new"
        mv -f "$1/$file.new" "$1/$file"
    done
    (cd "$1" && sha256sum -c SHA256SUMS >/dev/null) || refuse "$1 cannot be filled: look for a full or a failing disk"
    sync -f "$top"
}

# A build is there as a whole or not at all. One whose power went is mended.
place() {
    if [ -d "$top/$build" ]; then
        fill "$top/$build"
        return
    fi
    mkdir -p "$top/.gpushare-new.$build"
    fill "$top/.gpushare-new.$build"
    mv -T "$top/.gpushare-new.$build" "$top/$build"
}

# Whether the programs run here, before anybody is given them.
try() {
    for program in gpushare gpushare-kube; do
        on_host "$FOLDER/$build/bin/$program" --version >/dev/null ||
            refuse "$FOLDER/$build/bin/$program does not run on this node (see above):" \
                "it needs glibc @GLIBC@ or newer, and a file system that is not mounted noexec"
    done
}

# link_to BUILD
link_to() {
    [ "$(readlink "$top/current" 2>/dev/null)" != "$1" ] || return 0
    rm -f "$top/.gpushare-new.current"
    ln -s "$1" "$top/.gpushare-new.current"
    mv -T "$top/.gpushare-new.current" "$top/current"
    sync -f "$top"
    say "$FOLDER/current is $1"
}

# The chart's settings. They are checked by themselves before they count.
settings() {
    file=$HOST$drop_in
    if [ -z "$SETTINGS" ] || [ ! -s "$SETTINGS" ]; then
        ! grep -qsxF "$mark" "$file" || rm -f "$file"
        return 0
    fi
    [ ! -e "$file" ] || grep -qsxF "$mark" "$file" ||
        refuse "$drop_in on the node is somebody's own: give it another name, or take the settings out of the chart"
    mkdir -p "${file%/*}"
    # No drop-in: its name ends in another way.
    { echo "$mark" && cat "$SETTINGS"; } >"$file.new"
    if ! GPUSHARE_CONFIG=$drop_in.new chroot "$HOST" "$FOLDER/$build/bin/gpushare" config check >/dev/null; then
        rm -f "$file.new"
        refuse "the settings are not taken (see above): the first line is the installer's own"
    fi
    mv -f "$file.new" "$file"
}

# tell_engine [--remove]: the engine's file, and a restart after a change. `restart` is the note that one is due: it is
# written before the change, so that a kill between the two loses nothing. A boot is a restart.
tell_engine() {
    [ "$ENGINE" != none ] || return 0
    boot=$(cat "$HOST"/proc/sys/kernel/random/boot_id)
    [ -z "$ENGINE_CONFIG" ] || set -- --config "$ENGINE_CONFIG" "$@"
    case " $* " in
    *" --remove "*) ;;
    *)
        set -- --runtime-path "$FOLDER/current/bin/gpushare-runtime" "$@"
        [ -z "$DEFAULT_SHARE" ] || set -- --default-share "$DEFAULT_SHARE" "$@"
        ;;
    esac
    planned=$(gpushare configure "$ENGINE" --dry-run --json "$@") || refuse "$ENGINE is not configured (see above)"
    case $planned in
    *'"changed": true'*)
        echo "$boot" >"$top/.gpushare-new.restart"
        mv -f "$top/.gpushare-new.restart" "$top/restart"
        sync -f "$top"
        gpushare configure "$ENGINE" "$@" || refuse "$ENGINE is not configured (see above)"
        ;;
    esac
    [ -e "$top/restart" ] || return 0
    if [ "$(cat "$top/restart")" = "$boot" ]; then
        case $ENGINE_UNIT in
        none) say "restart the engine now: ENGINE_UNIT=none leaves that to you" ;;
        *)
            on_host systemctl restart "$ENGINE_UNIT" ||
                refuse "$ENGINE_UNIT was not restarted (see above): set ENGINE_UNIT to the unit of the engine," \
                    "or to none and restart it by hand"
            ;;
        esac
    fi
    rm -f "$top/restart"
}

# What gpushare-system.service does at boot on nodes that have the package, once the driver is there. As with the unit,
# a step that fails keeps none of the others from being done: `gpushare doctor` tells what is wrong.
prepare() {
    [ -e "$HOST/proc/driver/nvidia/version" ] || return 0
    on_host modprobe nvidia-uvm 2>/dev/null || true
    sed -n 's|^ExecStart=-.*/bin/gpushare ||p' "$tree/lib/systemd/system/gpushare-system.service" |
        while read -r step; do
            # shellcheck disable=SC2086
            gpushare $step </dev/null || true
        done
}

# user_of NAME: prints who needs FOLDER/NAME, and fails if nobody does. Processes come first: one that ends meanwhile
# has written its container's config.json before.
user_of() {
    for process in "$HOST"/proc/[0-9]*; do
        # By identity, which busybox and dash can compare: what the kernel says of its path is of its own root.
        # shellcheck disable=SC3013
        for program in "$top/$1/bin"/*; do
            [ ! "$process/exe" -ef "$program" ] || ! is_of_root "$process" || {
                echo "process ${process##*/}"
                return
            }
        done
    done
    needs=$FOLDER/$1/
    user=$(container_of "$needs" "$HOST")
    [ -n "$user" ] || user=$(grep -lsF "$needs" "$HOST"/etc/cdi/*.json "$HOST"/run/cdi/*.json | head -n 1)
    [ -n "$user" ] || return 1
    echo "${user#"$HOST"}"
}

# The names of all builds that are there. Each tells its own, which folders of others do not.
builds() {
    for folder in "$top"/*/; do
        folder=${folder%/}
        [ -L "$folder" ] || [ "$(cat "$folder/BUILD" 2>/dev/null)" != "${folder##*/}" ] || echo "${folder##*/}"
    done
}

# drop BUILD: it goes by a rename, so that a kill leaves no half of it under its name.
drop() {
    mv -T "$top/$1" "$top/.gpushare-old.$1"
    rm -rf "$top/.gpushare-old.$1"
    say "removed $FOLDER/$1, which nobody used any more"
}

# A container that holds a share; fails while nobody can tell.
held() {
    shares=$(gpushare ps --quiet) || refuse "cannot tell whether containers hold shares (see above)"
    echo "$shares" | head -n 1
}

# Removes builds that nobody uses. An engine that keeps containers where nobody looks may have them all in use.
prune() {
    shares=$(gpushare ps --quiet) || return 0
    [ -z "$shares" ] || [ -n "$(notes "$HOST")" ] || return 0
    for name in $(builds); do
        [ "$name" = "$(readlink "$top/current")" ] || user_of "$name" >/dev/null || drop "$name"
    done
}

install() {
    check
    may_come @LEDGER@ "$HOST"
    mkdir -p "$top"
    tidy
    place
    try
    settings
    note_installed "$FOLDER/current" "$HOST"
    link_to "$build"
    prepare
    tell_engine
    prune
    say "installed $build"
}

# Beside the node's containers: gives back what dead ones held, and removes builds when their last user is gone.
keep() {
    pause=
    trap '[ -z "$pause" ] || kill "$pause" 2>/dev/null || true; exit 0' TERM INT
    driver=$HOST/proc/driver/nvidia/version
    had_driver=yes
    [ -e "$driver" ] || had_driver=
    round=0
    while :; do
        gpushare sweep >/dev/null || say "the sweep did not work (see above); the next one is in a minute"
        # A driver that a container brings may come late.
        [ -n "$had_driver" ] || [ ! -e "$driver" ] || { prepare && had_driver=yes; }
        [ $((round % 60)) != 0 ] || prune
        round=$((round + 1))
        sleep 60 &
        pause=$!
        wait "$pause" || true
    done
}

# Takes everything away, once no container needs it. The engine forgets the runtime first and is restarted, so that
# nobody starts another one; those that run need the runtime to be stopped.
remove() {
    check
    [ -d "$top" ] || return 0
    tidy
    # Programs that do not run any more, or do not know enough, are needed to tell the engine.
    [ ! -L "$top/current" ] || gpushare registrations >/dev/null 2>&1 || {
        place
        link_to "$build"
    }
    if [ -e "$top/current" ]; then
        tell_engine --remove
        # One that others have told.
        unnamed gpushare "$FOLDER/current/bin" "$HOST"
    fi
    forget_devices "$HOST"
    waiting=
    while [ -e "$top/current" ]; do
        user=
        for name in current $(builds); do
            user=$(user_of "$name") && break
        done
        [ -n "$user" ] || user=$(held)
        # MPS gives GPUs back a moment after the last share.
        [ -n "$user" ] || user=$(ls -d "$HOST"/run/gpushare/mps/*/compute-mode 2>/dev/null | head -n 1)
        [ -n "$user" ] || break
        [ "$user" = "$waiting" ] || say "waits for the end of $user, which still uses $FOLDER"
        waiting=$user
        sleep 5
    done
    SETTINGS=
    settings
    forget_shares "$FOLDER/current" "$HOST"
    rm -f "$top/current"
    for name in $(builds); do
        drop "$name"
    done
    rmdir "$HOST${drop_in%/*}" "$HOST/etc/gpushare" 2>/dev/null || true
    rmdir "$top" 2>/dev/null || say "kept $FOLDER: files of others are there"
    say "removed; /var/lib/gpushare, what \`gpushare history\` tells, and settings that others wrote stay"
}

# Until this image's build is the node's current one, for who runs its programs.
await() {
    until [ "$(readlink "$top/current" 2>/dev/null)" = "$build" ]; do
        [ -n "${told-}" ] || say "waits until the installer has made $build this node's current one"
        told=yes
        sleep 1
    done
}

# The first process of a container ends at a signal only if it says so.
trap 'exit 143' TERM INT
case ${1-} in
install) install ;;
keep) keep ;;
remove) remove ;;
wait) await ;;
*) refuse "say install, keep, remove or wait" ;;
esac
