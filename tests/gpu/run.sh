#!/usr/bin/env bash
# Tests gpushare on a machine with a GPU, as root, without a network. Prints `PASS|FAIL|SKIP NAME KEY=VALUE...` lines and
# a table. The results folder gets the same lines, all that containers printed, the logs and an inventory of the host. No
# setting of the card is changed.
#
#     run.sh [--part 1|2] [--supervisor auto|required] [--compute supervisor] [--simulator] [--only NAME[,NAME...]] [--results FOLDER]
#
# Part 1 = what a container sees and holds, and frameworks; part 2 = compute shares, MPS, programs, cost. Both together
# end within ten minutes. --supervisor puts a supervisor around every container with a share. --simulator makes a node
# with a simulated GPU and tests these scripts there.
set -u

# The simulated node: physics and driver of the machine on which the rows were first run.
simulated_node=(--profile h200-580 --driver 580.159.04 --model "NVIDIA H200" --driver-mount --nvidia-smi-script)

# part NUMBER: the rows, the most telling ones first, each with the seconds after which it is ended.
part() {
    case $1 in
    1) cat <<'ROWS' ;;
00_inventory 40
41_last_mebibytes 70
42_attackers 90
05_allocators 90
28_growth 40
03_memory_limit 30
09_two_containers 40
01_injection 40
26_memory_limit 50
25_host_memory 50
10_after_a_kill 40
17_ways_in 60
04_sizes 30
02_no_request 20
08_two_processes 30
32_expandable_segments 50
31_torch_compile 90
07_framework 60
33_jax_preallocation 60
34_cupy_pools 50
35_managed_memory 40
37_ipc 60
36_spawn 60
38_nccl 60
18_frameworks 60
11_time_slices 40
06_allocate_and_free 40
ROWS
    2) cat <<'ROWS' ;;
12_two_shares 40
29_inference 80
11_share 40
40_mps 70
13_burst 30
20_graphs 40
15_long_kernels 40
14_overhead 60
19_processes 30
16_threads 60
22_checker 60
24_native_limit 60
27_driver_limit 40
23_start_cost 60
43_cost 90
21_granularity 40
ROWS
    esac
}

top=$(cd "$(dirname "$0")" && pwd)
parts="1 2"
simulator=
supervisor=off
compute=library
only=
results=$PWD/gpushare-gpu-results
while [ $# -gt 0 ]; do
    case $1 in
    --part) parts=$2 && shift ;;
    --simulator) simulator=yes ;;
    --supervisor) supervisor=$2 && shift ;;
    --compute) compute=$2 && shift ;;
    --only) only=$2 && shift ;;
    --results) results=$(realpath -m "$2") && shift ;;
    *)
        sed -n '2,10s/^# \{0,1\}//p' "$0"
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
# A mount namespace of our own: mounts made here go with us.
if [ -z "${GPUSHARE_GPU_INSIDE-}" ]; then
    arguments=(--results "$results" --supervisor "$supervisor" --compute "$compute")
    [ "$parts" = "1 2" ] || arguments+=(--part "$parts")
    [ -z "$simulator" ] || arguments+=(--simulator)
    [ -z "$only" ] || arguments+=(--only "$only")
    GPUSHARE_GPU_INSIDE=yes exec unshare --mount --propagation private "$0" "${arguments[@]}"
fi

# Seconds for all parts together. The simulated node shares two processors with everything else.
[ -n "$simulator" ] && budget=2400 || budget=570
client=$top/bin/gpushare-tests-client
work=$(mktemp -d "${TMPDIR:-/tmp}/gpushare-gpu.XXXXXX")
added_library=
meter_pid=
manager_pid=
container_environment=()
# The row that runs, and its process group.
row=none
row_pid=

for file in node.sh container.sh report.sh memory.sh sees.sh frameworks.sh compute.sh mps.sh programs.sh cost.sh driver-limit.sh \
    supervisor.sh; do
    # shellcheck source=/dev/null
    . "$top/$file"
done

tidy() {
    end_row
    end_containers "$work"/*/config.json
    end_mps_daemons
    stop_meter
    stop_manager
    [ -z "$added_library" ] || rm -f "$added_library"
    # What gpushare keeps of the node lies in file systems of its own.
    awk -v work="$work/" 'index($2, work) == 1 { print $2 }' /proc/self/mounts | tac | xargs -r -n 1 umount -l
    rm -rf "$work"
}
trap tidy EXIT
trap 'exit 130' INT TERM

make_results
make_node
part_end=$SECONDS
for part in $parts; do
    # Both parts get half of the time each; what part 1 leaves is part 2's.
    part_end=$((part_end + budget / $(wc -w <<<"$parts")))
    begin_part "$part"
    while read -r name seconds <&3; do
        run_row "$name" "$seconds"
    done 3< <(part "$part")
    stop_meter
done
summary
