# Sourced by run.sh: containers on this machine's own user land, made by the bundle's gpushare-runtime and runc.

# Every container's id begins so.
ids=gpushare-gpu-$$

# root_for FOLDER: mounts a root file system at FOLDER/root: an overlay over the machine's own where that works, else the
# machine's folders, read-only. Which of them it was is in $work/root-mode.
root_for() {
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

# Lines of a list for JSON.
json_list() {
    first=
    for word; do
        printf '%s"%s"' "$first" "$word"
        first=,
    done
}

# bundle NAME VARIABLE=VALUE... -- SHELL COMMAND: a bundle in $work/NAME whose process runs the command. The container can
# open no device but what gpushare gives it.
bundle() {
    folder=$work/$1
    name=$1
    shift
    variables=("PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin" "HOME=/root" "C=$client")
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
    {"destination": "$top", "type": "bind", "source": "$top", "options": ["rbind", "ro"]}
  ],
  "annotations": {},
  "linux": {
    "cgroupsPath": "/$ids-$name",
    "resources": {"devices": [{"allow": false, "access": "rwm"}]},
    "namespaces": [{"type": "pid"}, {"type": "network"}, {"type": "ipc"}, {"type": "uts"}, {"type": "mount"}]
  }
}
JSON
}

runtime() {
    GPUSHARE_CONFIG=$config "$top/bin/gpushare-runtime" --root "$work/runc" "$@"
}

# container SECONDS NAME VARIABLE=VALUE... -- SHELL COMMAND: runs a container to its end and prints what it said; what it
# complained of is in $work/NAME/stderr. Status 124: it ran too long, and was killed.
container() {
    seconds=$1
    shift
    start "$@" || return 1
    finish "$seconds" "$folder"
}

# start NAME ...: the same, without waiting.
start() {
    bundle "$@" || return 1
    launch
}

# launch: starts the bundle that was made last.
launch() {
    {
        runtime run --bundle "$folder" "$ids-$name" >"$folder/stdout" 2>"$folder/stderr" </dev/null
        echo $? >"$folder/status"
    } &
}

# finish SECONDS FOLDER: waits for a started container; prints what it said and removes it.
finish() {
    id=$ids-${2##*/}
    ended=$((SECONDS + $1))
    status=124
    while [ ! -s "$2/status" ] && [ "$SECONDS" -lt "$ended" ]; do
        sleep 0.1
    done
    if [ -s "$2/status" ]; then
        status=$(cat "$2/status")
    fi
    remove "$2"
    cat "$2/stdout"
    return "$status"
}

# remove FOLDER: ends a container, if it still runs, keeps what it said, and gives back what it stood on.
remove() {
    for said in stdout stderr; do
        [ ! -s "$1/$said" ] || sed "s/^/${1##*/} $said: /" "$1/$said" >>"$results/said.txt"
    done
    runtime delete --force "$ids-${1##*/}" 2>/dev/null
    umount -R -l "$1/root" "$1/layer" 2>/dev/null
}
