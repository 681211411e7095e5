#!/usr/bin/env bash
# Tests gpushare on a machine with a GPU, as root, without a network. Prints `PASS|FAIL|SKIP NAME KEY=VALUE...` lines and
# a table; the same lines, all that containers said, and an inventory of the host are left in the results folder. Changes no setting of the card.
#
#     run.sh [--part 1|2] [--simulator] [--only NAME] [--results FOLDER]
#
# Each part ends within ten minutes: 1 = what a container sees and holds, 2 = compute shares, programs, cost. --simulator
# makes a node with simulated GPUs and tests this script there.
set -u

top=$(cd "$(dirname "$0")" && pwd)
parts="1 2"
simulator=
only=
results=$PWD/gpushare-gpu-results
while [ $# -gt 0 ]; do
    case $1 in
    --part) parts=$2 && shift ;;
    --simulator) simulator=yes ;;
    --only) only=$2 && shift ;;
    --results) results=$(realpath -m "$2") && shift ;;
    *)
        sed -n '2,9s/^# \{0,1\}//p' "$0"
        exit 2
        ;;
    esac
    shift
done
[ "$(id -u)" -eq 0 ] || {
    echo "run.sh: needs root: it makes containers" >&2
    exit 1
}
[ -x "$top/bin/gpushare-runtime" ] || {
    echo "run.sh: run it from an unpacked bundle: \`make gpu-bundle\` makes one" >&2
    exit 1
}
# Mounts made here are nobody else's, and go with us.
if [ -z "${GPUSHARE_GPU_INSIDE-}" ]; then
    arguments=(--results "$results")
    [ "$parts" = "1 2" ] || arguments+=(--part "$parts")
    [ -z "$simulator" ] || arguments+=(--simulator)
    [ -z "$only" ] || arguments+=(--only "$only")
    GPUSHARE_GPU_INSIDE=yes exec unshare --mount --propagation private "$0" "${arguments[@]}"
fi

# Seconds in all, so that each part fits into ten minutes.
budget=560
client=$top/bin/gpushare-tests-client
work=$(mktemp -d "${TMPDIR:-/tmp}/gpushare-gpu.XXXXXX")
mkdir -p "$results"
lines=$results/results.txt
: >"$lines"
: >"$results/said.txt"
added_library=
meter_pid=
container_environment=()

tidy() {
    for folder in "$work"/*/config.json; do
        [ ! -e "$folder" ] || remove "${folder%/config.json}"
    done
    [ -z "$meter_pid" ] || kill "$meter_pid" 2>/dev/null
    [ -z "$added_library" ] || rm -f "$added_library"
    # What gpushare keeps of the node lies in file systems of its own.
    awk -v work="$work/" 'index($2, work) == 1 { print $2 }' /proc/self/mounts | tac | xargs -r -n 1 umount -l
    rm -rf "$work"
}
trap tidy EXIT
trap 'exit 130' INT TERM

. "$top/container.sh"
. "$top/part1.sh"
. "$top/part2.sh"

# The node: this machine's, or a simulated one.
host_environment=(GPUSHARE_TEST=1)
config=$work/gpushare.toml
if [ -n "$simulator" ]; then
    smi=()
    [ -z "${GPUSHARE_NVIDIA_SMI-}" ] || smi=(--nvidia-smi "$GPUSHARE_NVIDIA_SMI")
    made=$("$top/bin/gpushare-simulator" create "$work/node" --driver 615.71.09 --context 320MiB "${smi[@]}") || exit 1
    cp "$(echo "$made" | tail -n 1)" "$config"
    host_environment=("LD_LIBRARY_PATH=$work/node/driver/usr/lib/x86_64-linux-gnu" "GPUSHARE_SIMULATOR=$work/node/shared")
    proc=$work/node/proc
else
    cp "$top/gpushare.toml" "$config"
    sed -i "s|^state = .*|state = \"$work/state\"|" "$config"
    proc=/proc
fi
# The bundle's runc, whatever the machine has.
sed -i '/^\[runtime\]/,/^\]/d' "$config"
printf '[runtime]\ncandidates = ["%s"]\n' "$top/bin/runc" >>"$config"
sed -i 's/^host_memory = ""$/host_memory = "8GiB"/' "$config"
grep -q '^host_memory' "$config" || printf '[quota]\nhost_memory = "8GiB"\n' >>"$config"
# runc runs itself again without its environment, so a library path would not reach it.
if ! ldconfig -p | grep -q libseccomp.so.2; then
    added_library=/usr/lib/libseccomp.so.2
    cp "$top/lib/libseccomp.so.2" "$added_library" && ldconfig
fi

# host SECONDS WORDS...: the client on the host, without gpushare.
host() {
    limit=$1
    shift
    env "${host_environment[@]}" timeout "$limit" "$client" "$@"
}

# The value behind NAME in what was said.
value() {
    awk -v name="$1" '$1 == name { print $2; exit }'
}

mib() {
    echo $(($1 / 1048576))
}

# within VALUE LEAST MOST: compares numbers with fractions.
within() {
    awk -v value="$1" -v least="$2" -v most="$3" 'BEGIN { exit !(value >= least && value <= most) }'
}

say() {
    echo "$*" | tee -a "$lines"
}
pass() { say "PASS $row $*"; }
fail() { say "FAIL $row $*"; }
skip() { say "SKIP $row $*"; }

# verdict CONDITION KEY=VALUE...: PASS when the condition (a command) holds.
verdict() {
    if eval "$1"; then shift && pass "$@"; else shift && fail "$@"; fi
}

# The last words of a container that failed.
why() {
    tail -n 1 "$work/$1/stderr" 2>/dev/null | tr ' ' '_' | cut -c1-160
}

# run_row NAME SECONDS: runs the function row_NAME, if that much time is left.
run_row() {
    row=$1
    [ -z "$only" ] || [ "$only" = "$row" ] || return 0
    if [ $((part_end - SECONDS)) -lt "$2" ]; then
        skip "reason=no_time_left"
        return
    fi
    "row_$row"
}

for part in $parts; do
    part_end=$((SECONDS + budget))
    "part_$part"
done

echo
awk '{ printf "%-5s %-28s", $1, $2; for (i = 3; i <= NF; i++) printf " %s", $i; print "" }' "$lines"
awk '{ count[$1]++ } END { printf "%d passed, %d failed, %d skipped\n", count["PASS"], count["FAIL"], count["SKIP"] }' "$lines"
! grep -q '^FAIL' "$lines"
