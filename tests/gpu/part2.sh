# Sourced by run.sh: shares of compute, programs of every kind, and what a share costs.

part_2() {
    # Bursting shares go by the host's measurements.
    GPUSHARE_CONFIG=$config env "${host_environment[@]}" "$top/bin/gpushare" meter >"$results/meter.log" 2>&1 &
    meter_pid=$!
    sleep 1
    kill -0 "$meter_pid" 2>/dev/null || meter_pid=
    # On a simulated GPU kernels take time and compute nothing.
    container_environment=(GPUSHARE_SIMULATOR_RUN=0)
    host_environment+=(GPUSHARE_SIMULATOR_RUN=0)
    solo=
    run_row 11_share 60
    run_row 12_two_shares 40
    run_row 13_burst 40
    run_row 14_overhead 80
    run_row 15_long_kernels 40
    run_row 20_graphs 40
    run_row 16_threads 60
    run_row 17_ways_in 80
    run_row 18_frameworks 60
    run_row 19_processes 40
    run_row 21_granularity 40
    run_row 22_checker_and_mps 60
    run_row 23_start_cost 60
    run_row 24_native_limit 60
    run_row 27_driver_limit 40
    [ -z "$meter_pid" ] || kill "$meter_pid"
    meter_pid=
    container_environment=()
}

# rate NAME SECONDS VARIABLE=VALUE... -- WORDS: kernels a second in a container.
rate() {
    named=$1
    lasts=$2
    shift 2
    settings=()
    while [ "$1" != -- ]; do
        settings+=("$1")
        shift
    done
    shift
    container $((lasts + 25)) "$named" GPUSHARE_MEMORY=4GiB "${settings[@]}" -- "\$C launch $* --seconds $lasts" | value rate
}

# What one container reaches alone and without a limit: what shares are shares of.
unlimited() {
    [ -n "$solo" ] || solo=$(rate solo 6 -- 1ms --grid 132)
}

# percent RATE: of the unlimited rate.
percent() {
    awk -v rate="${1:-0}" -v solo="${solo:-0}" 'BEGIN { printf "%.1f", (solo > 0 ? rate * 100 / solo : 0) }'
}

row_11_share() {
    unlimited
    share=$(percent "$(rate thirty 15 GPUSHARE_CORES=30 -- 1ms --grid 132)")
    verdict 'within "$share" 25 35' "percent=$share unlimited=$solo $(why thirty)"
}

row_12_two_shares() {
    unlimited
    for cores in 30 70; do
        start "beside-$cores" GPUSHARE_MEMORY=4GiB "GPUSHARE_CORES=$cores" -- '$C launch 1ms --grid 132 --seconds 15' || return
    done
    low=$(percent "$(finish 40 "$work/beside-30" | value rate)")
    high=$(percent "$(finish 40 "$work/beside-70" | value rate)")
    sum=$(awk -v low="$low" -v high="$high" 'BEGIN { print low + high }')
    verdict 'within "$low" 23 37 && within "$high" 63 77 && within "$sum" 85 110' "percent=$low,$high sum=$sum $(why beside-30)"
}

row_13_burst() {
    if [ -z "$meter_pid" ]; then
        fail "reason=the_meter_does_not_run said=$(tail -n 1 "$results/meter.log" | tr ' ' _)"
        return
    fi
    unlimited
    share=$(percent "$(rate burst 12 GPUSHARE_CORES=30 GPUSHARE_COMPUTE_POLICY=burst -- 1ms --grid 132)")
    verdict 'within "$share" 90 110' "percent=$share $(why burst)"
}

# median FILE: of the first number of each line, or of the difference to the second.
median() {
    awk '{ print (NF > 1 ? $1 - $2 : $1) }' "$1" | sort -n | awk '{ all[NR] = $1 } END { print (NR ? all[int((NR + 1) / 2)] : "none") }'
}

row_14_overhead() {
    paired='$C cost launch --rounds 1000 --calls 100 --bare /usr/lib/gpushare/driver/cuda'
    container 40 launch-free GPUSHARE_MEMORY=4GiB -- "$paired" >"$work/free.out"
    container 40 launch-full GPUSHARE_MEMORY=4GiB GPUSHARE_CORES=100 -- "$paired" >"$work/full.out"
    free=$(median "$work/free.out")
    full=$(median "$work/full.out")
    ratio=skipped
    if [ -z "$simulator" ]; then
        : >"$work/ratios"
        for turn in 1 2 3 4 5; do
            bare=$(host 20 product --size 1024 --seconds 1.5 | value rate)
            ours=$(container 30 "product-$turn" GPUSHARE_MEMORY=4GiB GPUSHARE_CORES=100 -- '$C product --size 1024 --seconds 1.5' | value rate)
            awk -v ours="${ours:-0}" -v bare="${bare:-1}" 'BEGIN { print ours / bare }' >>"$work/ratios"
        done
        ratio=$(median "$work/ratios")
    fi
    verdict '[ "$free" != none ] && within "$free" -500000 500000 && within "$full" -500000 500000 && { [ "$ratio" = skipped ] || within "$ratio" 0.99 1.1; }' \
        "launch_ps=$free launch_limit_100_ps=$full product_ratio=$ratio $(why launch-free)"
}

row_15_long_kernels() {
    rate=$(rate long 14 GPUSHARE_CORES=30 -- 200ms)
    duty=$(awk -v rate="${rate:-0}" 'BEGIN { printf "%.1f", rate * 20 }')
    verdict 'within "$duty" 25 40' "duty=$duty $(why long)"
}

row_20_graphs() {
    unlimited
    share=$(percent "$(rate graph-share 12 GPUSHARE_CORES=30 -- 1ms --way graph --grid 132)")
    verdict 'within "$share" 20 40' "percent=$share $(why graph-share)"
}

row_16_threads() {
    leak=$(container 50 threads GPUSHARE_MEMORY=4GiB -- '$C threads' | value leak)
    verdict '[ "$leak" = 0 ]' "leak=$leak $(why threads)"
}

# Each way to the driver must meet the limit: the second size does not fit beside the first.
row_17_ways_in() {
    wrong=
    for way in plain empty-environment setuid entry path fork exec own-libcuda; do
        settings=(GPUSHARE_MEMORY=8GiB)
        case $way in
        plain) script='$C allocate 6000 5000' ;;
        empty-environment) script="env -i $client allocate 6000 5000" ;;
        setuid) script='setpriv --reuid=1000 --regid=1000 --clear-groups $C allocate 6000 5000' ;;
        entry) script='$C allocate --entry 6000 5000' ;;
        path) script='$C allocate --library "$(ldconfig -p | sed -n "s/.*libcuda.so.1 .*=> //p" | head -n 1 | grep . || echo libcuda.so.1)" 6000 5000' ;;
        fork) script='$C allocate --fork --hold 3 6000 | sed "s/refused 6000/refused 5000/"' ;;
        exec) script='exec $C allocate 6000 5000' ;;
        own-libcuda)
            settings+=(LD_LIBRARY_PATH=/opt/own)
            script='$C allocate 6000 5000'
            ;;
        esac
        bundle "way-$way" "${settings[@]}" -- "$script"
        if [ "$way" = own-libcuda ]; then
            own=$(env "${host_environment[@]}" sh -c 'IFS=:; for d in $LD_LIBRARY_PATH /usr/lib/x86_64-linux-gnu /usr/lib64; do
                [ ! -e "$d/libcuda.so.1" ] || { echo "$d/libcuda.so.1"; break; }; done')
            mkdir -p "$folder/root/opt/own" 2>/dev/null && cp "$own" "$folder/root/opt/own/libcuda.so.1" 2>/dev/null || continue
        fi
        launch
        said=$(finish 15 "$folder" | tr ' \n' '_,')
        [ "$said" = granted_6000,refused_5000, ] || wrong="$wrong,$way:$said$(why "way-$way")"
    done
    verdict '[ -z "$wrong" ]' "wrong=${wrong#,}"
}

row_18_frameworks() {
    if [ -n "$simulator" ]; then
        skip "reason=the_CUDA_runtime_needs_a_GPU"
        return
    fi
    told=
    wrong=
    for package in torch cupy numba jax; do
        python3 -c "import $package" 2>/dev/null || continue
        case $package in
        torch) words='import torch; print(int(torch.ones(8, device="cuda").sum()))' ;;
        cupy) words='import cupy; print(int(cupy.ones(8).sum()))' ;;
        numba) words='from numba import cuda; print(cuda.to_device(__import__("numpy").ones(8)).copy_to_host().sum().astype(int))' ;;
        jax) words='import jax.numpy as n; print(int(n.ones(8).sum()))' ;;
        esac
        said=$(container 40 "$package" GPUSHARE_MEMORY=4GiB -- "python3 -c '$words'" | tail -n 1)
        told="$told $package=$said"
        [ "$said" = 8 ] || wrong=yes
    done
    if [ -z "$told" ]; then
        skip "reason=none_present"
        return
    fi
    verdict '[ -z "$wrong" ]' "${told# }"
}

row_19_processes() {
    start neighbour GPUSHARE_MEMORY=2GiB -- '$C allocate 512 --hold 12' || return
    sleep 2
    container 20 own GPUSHARE_MEMORY=2GiB -- '$C allocate 256 --hold 4 & sleep 2; $C sizes --nvml; echo self $!; wait' >"$work/own.out"
    finish 20 "$work/neighbour" >/dev/null
    pids=$(awk '$1 == "process" { printf "%s,", $2 }' "$work/own.out")
    self=$(value self <"$work/own.out")
    verdict '[ -n "$self" ] && { [ -z "$pids" ] || [ "$pids" = "$self," ]; }' \
        "listed=${pids%,} own=$self utilisation=$(value utilisation <"$work/own.out") $(why own)"
}

# Recorded for the charging rules; nothing is asserted.
row_21_granularity() {
    told=
    base=$(host 20 sizes --nvml | value nvml_used)
    for size in none 1 2 3 33; do
        # One context, with an allocation that cannot be granted, or of so many MiB.
        [ "$size" = none ] && asked=99999999 || asked=$size
        env "${host_environment[@]}" "$client" allocate "$asked" --hold 4 >/dev/null &
        holder=$!
        sleep 2
        used=$(host 20 sizes --nvml | value nvml_used)
        wait "$holder"
        told="$told with_${size}_kib=$(((used - base) / 1024))"
    done
    pass "${told# }"
}

row_22_checker_and_mps() {
    said=
    if [ -z "$simulator" ] && command -v compute-sanitizer >/dev/null; then
        container 50 checker GPUSHARE_MEMORY=4GiB -- 'compute-sanitizer --error-exitcode 9 $C threads --turns 20' >/dev/null
        status=$?
        [ "$status" -eq 0 ] && said="checker=clean" || said="checker=status_$status"
    fi
    if [ -z "$said" ]; then
        skip "reason=no_compute-sanitizer mps=$(command -v nvidia-cuda-mps-control >/dev/null && echo present || echo absent)"
        return
    fi
    verdict '[ "$said" = checker=clean ]' "$said"
}

row_23_start_cost() {
    : >"$work/with" && : >"$work/without"
    for turn in $(seq 20); do
        for kind in with without; do
            share=()
            [ "$kind" = without ] || share=(GPUSHARE_MEMORY=1GiB)
            bundle "$kind-$turn" "${share[@]}" -- true || continue
            begin=$(date +%s%N)
            runtime run --bundle "$folder" "$ids-$name" </dev/null >/dev/null 2>"$folder/stderr" || echo failed >>"$work/$kind"
            echo $((($(date +%s%N) - begin) / 1000)) >>"$work/$kind"
            remove "$folder"
        done
    done
    with=$(median "$work/with")
    without=$(median "$work/without")
    verdict '! grep -q failed "$work/with" "$work/without"' "with_us=$with without_us=$without added_us=$((with - without))"
}

# What a program holds and sees in the cgroup $leaf, on the host and without gpushare: confined SECONDS WORDS...
confined() {
    limit=$1
    shift
    env "${host_environment[@]}" sh -c 'echo $$ >"$0/cgroup.procs" && exec timeout "$@"' "$leaf" "$limit" "$client" "$@"
}

# The driver's answer to NAME about the cgroup $leaf.
limits() {
    host 20 limits "$leaf" "${@:2}" | value "$1"
}

# Skips the row where the driver cannot limit a cgroup. A simulated node brings the cgroups of version 2 along.
native_or_skip() {
    major=$(grep -oE '[0-9]+\.[0-9]+' "$proc/driver/nvidia/version" 2>/dev/null | head -n 1 | cut -d. -f1)
    if [ "${major:-0}" -lt 615 ]; then
        skip "reason=driver_${major:-absent}_is_older_than_615"
        return 1
    fi
    if [ "$(stat -fc %T /sys/fs/cgroup)" != cgroup2fs ] && ! { [ -n "$simulator" ] && mount -t cgroup2 none /sys/fs/cgroup; }; then
        skip "reason=no_cgroup_v2_at_/sys/fs/cgroup"
        return 1
    fi
}

# The driver's limit by itself, with no MPS: what it holds, what programs are told, and what becomes of it when it is set
# below what is in use, and when the cgroup is made anew. Only that it holds is asserted; the answers are what is wanted.
row_24_native_limit() {
    native_or_skip || return
    leaf=/sys/fs/cgroup/$ids-native
    mkdir "$leaf" || {
        skip "reason=no_cgroup_can_be_made"
        return
    }
    {
        nvidia-smi memory-limits --help
        cat /sys/module/nvidia/parameters/RmMemacctMode /sys/fs/cgroup/dmem.capacity
        head "$leaf"/dmem.* "$leaf"/misc.*
    } >"$results/native-limit.txt" 2>&1
    before=$(limits get)
    set=$(limits set --set 4096)
    told=$(limits hard)
    total=$(host 20 sizes | value cuda_total)
    confined 20 sizes --nvml >"$work/native.out"
    confined 20 sizes >>"$work/native.out" 2>&1
    confined 30 fill linear >"$work/fill.out"
    held=$(mib "$(value held <"$work/fill.out" | grep . || echo 0)")
    # Below what is in use.
    confined 20 allocate 2048 --hold 8 >"$work/below.out" 2>&1 &
    holder=$!
    sleep 3
    used=$(limits used)
    below=$(limits set --set 1024)
    more=$(confined 20 allocate 16 2>&1 | tr ' \n' '_,' | cut -c1-80)
    wait "$holder" && ended=well || ended=badly
    rmdir "$leaf" && mkdir "$leaf"
    anew=$(limits hard)
    confined 20 allocate 6144 >"$work/anew.out"
    rmdir "$leaf"
    answers="get_without=$before set=$set hard_mib=$(mib "${told:-0}") held_mib=$held used_mib=$(mib "${used:-0}")"
    for name in nvml_total nvml_total_v2 cuda_total cuda_device; do
        answers="$answers $name=$(mib "$(value $name <"$work/native.out" | grep . || echo 0)")"
    done
    verdict '[ "$set" = 0 ] && [ "$held" -ge 2048 ] && [ "$held" -le 4096 ]' \
        "$answers card=$(mib "${total:-0}") set_below_use=$below then=$more holder_ended=$ended" \
        "hard_of_new_cgroup=$anew in_new_cgroup=$(tr ' \n' '_,' <"$work/anew.out") see=native-limit.txt"
}

# The limit as gpushare sets it: a program that calls the driver's own library meets it, and root in the container cannot
# lift it by any path of its cgroup.
row_27_driver_limit() {
    native_or_skip || return
    shipped=$config
    config=$work/require.toml
    sed '/^driver_limit = /d' "$shipped" >"$config"
    grep -q '^\[inject\]' "$config" || echo '[inject]' >>"$config"
    sed -i 's/^\[inject\].*/&\ndriver_limit = "require"/' "$config"
    bundle second-wall GPUSHARE_MEMORY=4GiB -- '
        past="env LD_PRELOAD=/usr/lib/gpushare/driver/cuda $C allocate"
        $past 3072 5120
        for own in /sys/fs/cgroup "/sys/fs/cgroup$(sed -n "s/^0:://p" /proc/self/cgroup)"; do
            $C limits "$own" --set 65536 | sed "s/^set 0$/lifted/"
        done
        $past 5120 | sed "s/^/then_/"' && {
        sed -i '/"destination": "\/sys"/a {"destination": "/sys/fs/cgroup", "type": "cgroup", "source": "cgroup", "options": ["ro"]},' "$folder/config.json"
        launch
        finish 40 "$folder" >"$work/wall.out"
    }
    config=$shipped
    [ -d "/sys/fs/cgroup/$ids-second-wall" ] && left=yes || left=no
    verdict 'grep -q "^granted 3072" "$work/wall.out" && grep -q "^refused 5120" "$work/wall.out" &&
        grep -q "^then_refused 5120" "$work/wall.out" && ! grep -q lifted "$work/wall.out" && [ "$left" = no ]' \
        "said=$(tr ' \n' '_,' <"$work/wall.out") cgroup_left=$left $(why second-wall)"
}
