# Sourced by run.sh: containers on this machine's own user land, made by the bundle's gpushare-runtime and runc.

# Every container's id begins so.
ids=gpushare-gpu-$$

# root_for FOLDER: mounts a root file system at FOLDER/root: an overlay over the machine's own where that works, else the
# machine's folders, read-only. Which of them it was is in $work/root-mode.
root_for() {
    local folder
    mkdir -p "$1/layer" "$1/root"
    mount -t tmpfs -o mode=755 none "$1/layer" || return 1
    mkdir -p "$1/layer/upper" "$1/layer/work"
    if mount -t overlay -o "lowerdir=/,upperdir=$1/layer/upper,workdir=$1/layer/work" none "$1/root" 2>/dev/null; then
        echo overlay >"$work/root-mode"
        return
    fi
    echo binds >"$work/root-mode"
    mount -t tmpfs -o mode=755 none "$1/root" || return 1
    for folder in usr opt etc lib lib64 lib32 bin sbin; do
        if [ -L "/$folder" ]; then
            cp -d "/$folder" "$1/root/$folder"
        elif [ -d "/$folder" ]; then
            mkdir -p "$1/root/$folder"
            mount --rbind "/$folder" "$1/root/$folder"
            mount -o remount,bind,ro "$1/root/$folder"
        fi
    done
    mkdir -p "$1/root/proc" "$1/root/sys" "$1/root/dev" "$1/root/tmp" "$1/root/run"
}

# Words as a list for JSON.
json_list() {
    local first='' word
    for word; do
        printf '%s"%s"' "$first" "$word"
        first=,
    done
}

# folder_of NAME: where the row's container of this name has its bundle. Its last part is also in the container's id, so
# no two rows share a container.
folder_of() {
    echo "$work/$row-$1"
}

# python_mount: Python where the container's root has no folder with it.
python_mount() {
    local prefix
    [ -n "$python" ] && [ "$(cat "$work/root-mode")" = binds ] || return 0
    prefix=$("$python" -c 'import sys; print(sys.base_prefix)')
    case $prefix/ in
    /usr/* | /opt/* | /bin/* | /lib*/*) ;;
    *) printf ',\n    {"destination": "%s", "type": "bind", "source": "%s", "options": ["rbind", "ro"]}' "$prefix" "$prefix" ;;
    esac
}

# bundle NAME VARIABLE=VALUE... -- SHELL COMMAND: makes a bundle whose process runs the command. The container can open no
# device but what gpushare gives it. A name that the row has used before is an error: leftovers would pass for results.
bundle() {
    local name=$1 rights variables
    folder=$(folder_of "$1")
    if [ -e "$folder" ]; then
        fail "reason=the_name_${name}_was_used_twice"
        return 1
    fi
    shift
    variables=("PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin" "HOME=/root" "C=$client" "PYTHON=$python")
    while [ "$1" != -- ]; do
        variables+=("$1")
        shift
    done
    shift
    mkdir -p "$folder/in"
    root_for "$folder" || return 1
    printf '%s\n' "$*" >"$folder/in/script"
    rights='"CAP_CHOWN","CAP_DAC_OVERRIDE","CAP_FOWNER","CAP_KILL","CAP_MKNOD","CAP_SETGID","CAP_SETPCAP","CAP_SETUID"'
    cat >"$folder/config.json" <<JSON
{
  "ociVersion": "1.0.2",
  "process": {
    "terminal": false, "user": {"uid": 0, "gid": 0}, "cwd": "/",
    "args": ["/bin/sh", "/run/gpushare-gpu/script"],
    "env": [$(json_list "${variables[@]}" "${container_environment[@]}")],
    "capabilities": {"bounding": [$rights], "effective": [$rights], "permitted": [$rights]}
  },
  "root": {"path": "$folder/root", "readonly": false},
  "hostname": "gpushare-gpu",
  "mounts": [
    {"destination": "/proc", "type": "proc", "source": "proc", "options": ["nosuid", "noexec", "nodev"]},
    {"destination": "/dev", "type": "tmpfs", "source": "tmpfs", "options": ["nosuid", "strictatime", "mode=755"]},
    {"destination": "/dev/shm", "type": "tmpfs", "source": "shm", "options": ["nosuid", "noexec", "nodev", "mode=1777"]},
    {"destination": "/sys", "type": "sysfs", "source": "sysfs", "options": ["nosuid", "noexec", "nodev", "ro"]},
    {"destination": "/tmp", "type": "tmpfs", "source": "tmpfs", "options": ["nosuid", "nodev", "mode=1777"]},
    {"destination": "/run", "type": "tmpfs", "source": "tmpfs", "options": ["nosuid", "nodev", "mode=755"]},
    {"destination": "/run/gpushare-gpu", "type": "bind", "source": "$folder/in", "options": ["bind", "ro"]},
    {"destination": "$top", "type": "bind", "source": "$top", "options": ["rbind", "ro"]}$(python_mount)
  ],
  "annotations": {},
  "linux": {
    "cgroupsPath": "/$(id_of "$folder")",
    "resources": {"devices": [{"allow": false, "access": "rwm"}]},
    "namespaces": [{"type": "pid"}, {"type": "network"}, {"type": "ipc"}, {"type": "uts"}, {"type": "mount"}]
  }
}
JSON
}

# id_of FOLDER: the container's id.
id_of() {
    echo "$ids-${1##*/}"
}

runtime() {
    GPUSHARE_CONFIG=$config "$top/bin/gpushare-runtime" --root "$work/runc" "$@"
}

# container SECONDS NAME VARIABLE=VALUE... -- SHELL COMMAND: runs a container to its end and prints what it printed; its
# errors are in stderr of its folder. Status 124: it ran too long, and was killed.
container() {
    local seconds=$1
    shift
    start "$@" || return 1
    finish "$seconds" "$1"
}

# start NAME ...: the same, without waiting.
start() {
    bundle "$@" || return 1
    launch
}

# launch: starts the bundle that was made last.
launch() {
    {
        runtime run --bundle "$folder" "$(id_of "$folder")" >"$folder/stdout" 2>"$folder/stderr" </dev/null
        echo $? >"$folder/status"
    } &
}

# await NAME PATTERN SECONDS: waits until a started container prints such a line. Fails when it ends without, or is late.
await() {
    local folder end=$((SECONDS + $3))
    folder=$(folder_of "$1")
    until grep -q "$2" "$folder/stdout" 2>/dev/null; do
        [ ! -s "$folder/status" ] && [ "$SECONDS" -lt "$end" ] || return 1
        sleep 0.05
    done
}

# finish SECONDS NAME: waits for a started container, removes it, and prints what it printed.
finish() {
    local folder end=$((SECONDS + $1)) status=124
    folder=$(folder_of "$2")
    while [ ! -s "$folder/status" ] && [ "$SECONDS" -lt "$end" ]; do
        sleep 0.05
    done
    [ ! -s "$folder/status" ] || status=$(cat "$folder/status")
    remove "$folder"
    cat "$folder/stdout"
    return "$status"
}

# stop NAME: ends a container that has shown what it should, and prints what it printed.
stop() {
    remove "$(folder_of "$1")"
    cat "$(folder_of "$1")/stdout"
}

# why NAME: the last words of a container that failed.
why() {
    tail -n 1 "$(folder_of "$1")/stderr" 2>/dev/null | tr ' ' '_' | cut -c1-160
}

# remove FOLDER: ends a container, if it still runs, keeps what it printed, and gives back its mounts.
remove() {
    local said
    [ ! -e "$1/removed" ] || return 0
    : >"$1/removed"
    runtime delete --force "$(id_of "$1")" 2>/dev/null
    for said in stdout stderr; do
        [ ! -s "$1/$said" ] || sed "s/^/${1##*/} $said: /" "$1/$said" >>"$results/said.txt"
    done
    umount -R -l "$1/root" "$1/layer" 2>/dev/null
}

# end_containers CONFIG.JSON...: removes the containers of these bundles.
end_containers() {
    local bundle
    for bundle; do
        [ ! -e "$bundle" ] || remove "${bundle%/config.json}"
    done
}
