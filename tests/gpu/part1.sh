# Sourced by run.sh: what a container sees of a GPU, and what it can hold.

part_1() {
    run_row 00_inventory 20
    run_row 01_injection 40
    run_row 02_no_request 20
    run_row 03_memory_limit 40
    run_row 04_sizes 40
    run_row 05_allocators 90
    run_row 06_allocate_and_free 60
    run_row 07_framework 80
    run_row 08_two_processes 40
    run_row 09_two_containers 60
    run_row 10_after_a_kill 40
    run_row 11_time_slices 50
    run_row 25_host_memory 60
    run_row 26_memory_limit 60
}

# Always written: it becomes a fixture.
row_00_inventory() {
    inventory=$results/inventory.txt
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
        ls -la /usr/lib/x86_64-linux-gnu/*nvidia* /usr/lib64/*nvidia* /usr/local/nvidia/lib64 2>/dev/null
        echo "== cgroups"
        grep cgroup /proc/self/mountinfo
        cat /sys/fs/cgroup/dmem.capacity 2>&1
        echo "== nvidia-smi"
        nvidia-smi -q 2>&1
        nvidia-smi topo -m 2>&1
        nvidia-smi memory-limits --help 2>&1
        echo "== gpushare"
        GPUSHARE_CONFIG=$config "$top/bin/gpushare" devices 2>&1
        GPUSHARE_CONFIG=$config "$top/bin/gpushare" devices --topology 2>&1
        GPUSHARE_CONFIG=$config "$top/bin/gpushare" doctor 2>&1
    } >"$inventory"
    version=$(grep -oE '[0-9]+\.[0-9]+(\.[0-9]+)?' "$proc/driver/nvidia/version" 2>/dev/null | head -n 1)
    if [ -z "$version" ]; then
        fail "reason=no_driver"
        return
    fi
    pass "driver=$version gpus=$(ls "$proc/driver/nvidia/gpus" | wc -l) cgroup=$(stat -fc %T /sys/fs/cgroup)"
}

row_01_injection() {
    want=$(host 30 product | value right)
    got=$(container 30 injection GPUSHARE_COUNT=1 -- '$C product' | value right)
    verdict '[ -n "$want" ] && [ "$got" = "$want" ]' "root=$(cat "$work/root-mode") host=$want container=$got $(why injection)"
}

row_02_no_request() {
    container 15 plain -- '$C sizes --nvml; ls /dev/nvidia* /run/gpushare-simulator 2>/dev/null' >"$work/plain.out"
    verdict '[ ! -s "$work/plain.out" ]' "said=$(head -c 80 "$work/plain.out" | tr ' \n' '__')"
}

row_03_memory_limit() {
    base=$(host 20 sizes --nvml | value nvml_used)
    start limit GPUSHARE_MEMORY=8GiB -- '$C allocate 512 512 512 512 512 512 512 512 512 512 512 512 512 512 512 512 512 --hold 6' || return
    sleep 4
    used=$(host 20 sizes --nvml | value nvml_used)
    granted=$(finish 20 "$work/limit" | grep -c '^granted')
    held=$(mib $((used - base)))
    verdict '[ "$granted" -ge 14 ] && [ "$granted" -le 16 ] && [ "$held" -le 8192 ]' \
        "granted_mib=$((granted * 512)) host_mib=$held excess_mib=$((held > 8192 ? held - 8192 : 0)) $(why limit)"
}

row_04_sizes() {
    container 30 sizes GPUSHARE_MEMORY=8GiB -- \
        '$C sizes; nvidia-smi --query-gpu=memory.total --format=csv,noheader,nounits 2>/dev/null | sed "s/^/smi /"' >"$work/sizes.out"
    wrong=
    for name in cuda_total cuda_device nvml_total nvml_total_v2; do
        told=$(value "$name" <"$work/sizes.out")
        # Older drivers have no second version.
        [ "${told:-0}" = 8589934592 ] || [ "$name$told" = nvml_total_v2 ] || wrong="$wrong $name=$told"
    done
    smi=$(value smi <"$work/sizes.out")
    [ -z "$smi" ] || [ "$smi" = 8192 ] || wrong="$wrong nvidia_smi=$smi"
    verdict '[ -z "$wrong" ]' "nvidia_smi=${smi:-absent}$wrong $(why sizes)"
}

# The host's figure while each family holds all it can get.
row_05_allocators() {
    over=
    told=
    for family in linear pitch managed async pool virtual array mipmap graph; do
        base=$(host 20 sizes --nvml | value nvml_used)
        start "family-$family" GPUSHARE_MEMORY=4GiB -- "\$C fill $family --hold 3000" || continue
        # It says what it holds, and goes on holding it.
        for _ in $(seq 80); do
            grep -q '^held' "$work/family-$family/stdout" && break
            sleep 0.1
        done
        used=$(mib $(($(host 20 sizes --nvml | value nvml_used) - base)))
        held=$(mib "$(finish 15 "$work/family-$family" | value held | grep . || echo 0)")
        told="$told $family=$held/$used"
        # Managed memory is the GPU's only once it was touched.
        { [ "$held" -ge 2048 ] && [ "$held" -le 4096 ] && [ "$used" -le 4096 ]; } || over="$over,$family"
    done
    verdict '[ -z "$over" ]' "wrong=${over#,}$told"
}

row_06_allocate_and_free() {
    drift=$(container 50 drift GPUSHARE_MEMORY=8GiB -- '$C allocate 6144 --repeat 200' | value drift)
    verdict '[ "$drift" = 0 ]' "drift=$drift $(why drift)"
}

row_07_framework() {
    right=$(container 30 graphs GPUSHARE_MEMORY=2GiB -- '$C product; $C fill graph --hold 10; $C launch 100us --way graph --seconds 1' |
        tee "$work/graphs.out" | value right)
    held=$(mib "$(value held <"$work/graphs.out" | grep . || echo 0)")
    rate=$(value rate <"$work/graphs.out")
    torch=absent
    if [ -z "$simulator" ] && python3 -c 'import torch' 2>/dev/null; then
        torch=$(container 60 torch GPUSHARE_MEMORY=2GiB -- "python3 $top/framework.py" | tail -n 1)
    fi
    verdict '[ -n "$right" ] && [ "$held" -ge 1024 ] && [ "$held" -le 2048 ] && [ -n "$rate" ] && [ "${torch%%:*}" != wrong ]' \
        "graph_mib=$held torch=$(echo "$torch" | tr ' ' '_') $(why graphs)"
}

row_08_two_processes() {
    said=$(container 30 pair GPUSHARE_MEMORY=8GiB -- '$C allocate 5120 --hold 4 & sleep 2; $C allocate 5120; wait' | tr ' \n' '_ ')
    verdict '[ "$said" = "granted_5120 refused_5120 " ]' "said=$(echo "$said" | tr ' ' ,) $(why pair)"
}

row_09_two_containers() {
    start left GPUSHARE_MEMORY=4GiB -- '$C fill linear --hold 6000' || return
    start right GPUSHARE_MEMORY=4GiB -- '$C fill linear --hold 6000' || return
    left=$(mib "$(finish 25 "$work/left" | value held | grep . || echo 0)")
    right=$(mib "$(finish 25 "$work/right" | value held | grep . || echo 0)")
    verdict '[ "$left" -ge 3072 ] && [ "$left" -le 4096 ] && [ "$right" -ge 3072 ] && [ "$right" -le 4096 ]' \
        "left_mib=$left right_mib=$right $(why left)"
}

# 6 GiB must be there again two seconds after their holder was killed; the driver's own work is part of it.
row_10_after_a_kill() {
    script='$C allocate 6144 --hold 60 & holder=$!; sleep 2; $C allocate 6144; kill -9 $holder
begin=$(date +%s%N)
while :; do
    $C allocate 6144 | grep -q granted && break
    [ $(($(date +%s%N) - begin)) -lt 8000000000 ] || break
    sleep 0.02
done
echo took $((($(date +%s%N) - begin) / 1000000))'
    container 30 kill GPUSHARE_MEMORY=8GiB -- "$script" >"$work/kill.out"
    took=$(value took <"$work/kill.out")
    verdict '[ "${took:-9999}" -le 2000 ] && grep -q "^refused 6144" "$work/kill.out"' "took_ms=$took $(why kill)"
}

# Two containers take turns on a GPU: each sees all of it, and a share is not put beside them.
row_11_time_slices() {
    want=$(host 20 sizes | value cuda_total)
    start turns GPUSHARE_MODE=time-slice GPUSHARE_DEVICES=0 -- '$C sizes; $C allocate 512 --hold 8' || return
    got=$(container 30 turn GPUSHARE_MODE=time-slice GPUSHARE_DEVICES=0 -- '$C sizes; $C allocate 512')
    container 20 beside GPUSHARE_MEMORY=1GiB GPUSHARE_DEVICES=0 -- '$C sizes' >/dev/null
    first=$(finish 30 "$work/turns")
    grep -q 'held in mode time-slice' "$work/beside/stderr" && refused=yes || refused=no
    granted=$(printf '%s\n%s\n' "$got" "$first" | grep -c '^granted 512')
    verdict '[ -n "$want" ] && [ "$(value cuda_total <<<"$got")" = "$want" ] && [ "$granted" = 2 ] && [ "$refused" = yes ]' \
        "host=$want container=$(value cuda_total <<<"$got") granted=$granted share_refused=$refused $(why turn)"
}

# 5 GiB in a share of 4: the rest is the host's, the product of what lies there is right, and the GPU holds no more than
# the share. Without host memory the same is refused.
row_25_host_memory() {
    want=$(host 30 product | value right)
    base=$(host 20 sizes --nvml | value nvml_used)
    program='$C product --beside 3072 --beside 1024 --beside 1024'
    start spill GPUSHARE_MEMORY=4GiB GPUSHARE_HOST_MEMORY=4GiB -- "$program --hold 8" || return
    sleep 5
    held=$(mib $(($(host 20 sizes --nvml | value nvml_used) - base)))
    shown=$(GPUSHARE_CONFIG=$config "$top/bin/gpushare" ps --json | grep -oE '"host_used_bytes": *[0-9]+' | grep -oE '[0-9]+$')
    got=$(finish 30 "$work/spill" | value right)
    container 30 full GPUSHARE_MEMORY=4GiB -- "$program" >/dev/null
    grep -q cuMemAlloc "$work/full/stderr" && refused=yes || refused=no
    verdict '[ -n "$want" ] && [ "$got" = "$want" ] && [ "$held" -le 4096 ] && [ "${shown:-0}" -gt 0 ] && [ "$refused" = yes ]' \
        "host=$want container=$got gpu_mib=$held host_mib=$(mib "${shown:-0}") refused_without=$refused $(why spill)"
}

# A share of 2 GiB that may grow to 5: 4 GiB fit while the meter runs, and not without it.
row_26_memory_limit() {
    program='$C product --beside 3072'
    container 30 alone GPUSHARE_MEMORY=2GiB GPUSHARE_MEMORY_LIMIT=5GiB -- "$program" >/dev/null
    grep -q cuMemAlloc "$work/alone/stderr" && refused=yes || refused=no
    GPUSHARE_CONFIG=$config env "${host_environment[@]}" "$top/bin/gpushare" meter >"$results/meter-growth.log" 2>&1 &
    meter_pid=$!
    sleep 2
    want=$(host 30 product | value right)
    start grows GPUSHARE_MEMORY=2GiB GPUSHARE_MEMORY_LIMIT=5GiB -- "$program --hold 6" || return
    sleep 4
    granted=$(GPUSHARE_CONFIG=$config "$top/bin/gpushare" ps --json | grep -oE '"memory_bytes": *[0-9]+' | head -n 1 | grep -oE '[0-9]+$')
    got=$(finish 30 "$work/grows" | value right)
    kill "$meter_pid"
    meter_pid=
    verdict '[ -n "$want" ] && [ "$got" = "$want" ] && [ "$(mib "${granted:-0}")" -gt 3072 ] && [ "$refused" = yes ]' \
        "host=$want container=$got granted_mib=$(mib "${granted:-0}") refused_without_meter=$refused $(why grows)"
}
