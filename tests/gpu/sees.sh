# Sourced by run.sh: what a container sees of the node and of a GPU.

# What is on this machine: the file becomes a fixture.
row_00_inventory() {
    local version
    {
        uname -a
        cat /etc/os-release
        for file in "$proc"/driver/nvidia/version "$proc"/driver/nvidia/params "$proc"/driver/nvidia/gpus/*/information \
            "$proc"/driver/nvidia-caps/mig-minors "$proc"/devices; do
            echo "== $file"
            cat "$file" 2>&1
        done
        echo "== nodes"
        ls -la /dev/nvidia* /dev/nvidia-caps /dev/dri /dev/char 2>&1
        echo "== libraries"
        ldconfig -p | grep -E 'libcuda|libnvidia' 2>&1
        ls -la /usr/lib/x86_64-linux-gnu/*nvidia* /usr/lib64/*nvidia* /usr/local/nvidia/lib64 /usr/local/nvidia/bin 2>/dev/null
        echo "== python: ${python:-none}"
        echo "== cgroups"
        grep cgroup /proc/self/mountinfo
        cat /sys/fs/cgroup/dmem.capacity 2>&1
        echo "== nvidia-smi"
        nvidia-smi -q 2>&1
        nvidia-smi topo -m 2>&1
        nvidia-smi memory-limits --help 2>&1
        echo "== gpushare"
        gpushare devices 2>&1
        gpushare devices --topology 2>&1
        gpushare doctor 2>&1
    } >"$results/inventory.txt"
    version=$(driver_version)
    if [ -z "$version" ]; then
        fail "reason=no_driver"
        return
    fi
    pass "driver=$version gpus=$(ls "$proc/driver/nvidia/gpus" | wc -l) cgroup=$(stat -fc %T /sys/fs/cgroup) context_mib=$(context_mib)"
}

row_01_injection() {
    local want got
    want=$(host 30 product | value right)
    got=$(container 30 product GPUSHARE_COUNT=1 -- '$C product' | value right)
    verdict '[ -n "$want" ] && [ "$got" = "$want" ]' "root=$(cat "$work/root-mode") host=$want container=$got $(why product)"
}

row_02_no_request() {
    local said
    said=$(container 15 plain -- '$C sizes --nvml; ls /dev/nvidia* /run/gpushare-simulator 2>/dev/null')
    verdict '[ -z "$said" ]' "said=$(printf %s "$said" | head -c 80 | tr ' \n' '__')"
}

row_04_sizes() {
    local said name told smi wrong=''
    said=$(container 25 sizes GPUSHARE_MEMORY=8GiB -- \
        '$C sizes; nvidia-smi --query-gpu=memory.total --format=csv,noheader,nounits 2>/dev/null | sed "s/^/smi /"')
    for name in cuda_total cuda_device nvml_total nvml_total_v2; do
        told=$(value "$name" <<<"$said")
        # Older drivers have no second version.
        [ "${told:-0}" = 8589934592 ] || [ "$name$told" = nvml_total_v2 ] || wrong="$wrong $name=$told"
    done
    smi=$(value smi <<<"$said")
    [ -z "$smi" ] || [ "$smi" = 8192 ] || wrong="$wrong nvidia_smi=$smi"
    # A machine with nvidia-smi has it in the container, too.
    [ -n "$smi" ] || ! command -v nvidia-smi >/dev/null || wrong="$wrong nvidia_smi=missing"
    verdict '[ -z "$wrong" ]' "nvidia_smi=${smi:-absent}$wrong $(why sizes)"
}

# Two containers take turns on a GPU: each sees all of it, and a share is not put beside them.
row_11_time_slices() {
    local want got first refused granted
    want=$(host 20 sizes | value cuda_total)
    start turns GPUSHARE_MODE=time-slice GPUSHARE_DEVICES=0 -- '$C sizes; $C allocate 512 --hold 30' || return
    await turns '^granted' 15
    got=$(container 20 turn GPUSHARE_MODE=time-slice GPUSHARE_DEVICES=0 -- '$C sizes; $C allocate 512')
    container 20 share GPUSHARE_MEMORY=1GiB GPUSHARE_DEVICES=0 -- '$C sizes' >/dev/null
    first=$(stop turns)
    grep -q 'held in mode time-slice' "$(folder_of share)/stderr" && refused=yes || refused=no
    granted=$(printf '%s\n%s\n' "$got" "$first" | grep -c '^granted 512')
    verdict '[ -n "$want" ] && [ "$(value cuda_total <<<"$got")" = "$want" ] && [ "$granted" = 2 ] && [ "$refused" = yes ]' \
        "host=$want container=$(value cuda_total <<<"$got") granted=$granted share_refused=$refused $(why turn)"
}

# A container's NVML lists its own processes and no other container's.
row_19_processes() {
    local said pids self
    start neighbour GPUSHARE_MEMORY=2GiB -- '$C allocate 512 --hold 30' || return
    await neighbour '^granted' 15
    said=$(container 20 own GPUSHARE_MEMORY=2GiB -- '$C allocate 256 --hold 4 & sleep 2; $C sizes --nvml; echo self $!; wait')
    stop neighbour >/dev/null
    pids=$(awk '$1 == "process" { printf "%s,", $2 }' <<<"$said")
    self=$(value self <<<"$said")
    verdict '[ -n "$self" ] && { [ -z "$pids" ] || [ "$pids" = "$self," ]; }' \
        "listed=${pids%,} own=$self utilisation=$(value utilisation <<<"$said") $(why own)"
}
