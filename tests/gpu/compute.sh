# Sourced by run.sh: shares of compute, alone and beside others. Kernels do fixed work: one that waited for a clock would count
# the time in which others had the GPU.

# The kernel of these rows, and how many microseconds it takes on a GPU of its own.
kernel=900us
kernel_us=900

# unlimited: kernels a second of one container alone and without a limit; what shares are shares of. Measured once.
unlimited() {
    if [ ! -s "$work/unlimited" ]; then
        container 25 unlimited GPUSHARE_MEMORY=4GiB -- "\$C work $kernel --seconds 4" | value rate >"$work/unlimited"
    fi
    cat "$work/unlimited"
}

# share_of RATE: in percent of that.
share_of() {
    percent "$1" "$(unlimited)"
}

# soon SECONDS: a second of the clock at which containers that start now can begin together.
soon() {
    echo $(($(date +%s) + $1))
}

row_11_share() {
    local said share
    unlimited >/dev/null
    said=$(container 30 thirty GPUSHARE_MEMORY=4GiB GPUSHARE_CORES=30 -- "\$C work $kernel --seconds 10")
    share=$(share_of "$(value rate <<<"$said")")
    verdict 'within "$share" 25 35' \
        "percent=$share unlimited=$(unlimited) per_second=$(value per_second <<<"$said") $(why thirty)"
}

# Libraries see in their events the turns of others, so that a large share beside a busy neighbour falls short.
row_12_two_shares() {
    local at low high low_share high_share sum least=49 least_sum=75
    [ "$compute" != supervisor ] || { least=63 least_sum=85; }
    unlimited >/dev/null
    at=$(soon 5)
    for cores in 30 70; do
        start "cores-$cores" GPUSHARE_MEMORY=4GiB "GPUSHARE_CORES=$cores" -- "\$C work $kernel --seconds 10 --at $at" || return
    done
    low=$(finish 30 cores-30)
    high=$(finish 30 cores-70)
    low_share=$(share_of "$(value rate <<<"$low")")
    high_share=$(share_of "$(value rate <<<"$high")")
    sum=$(awk -v low="$low_share" -v high="$high_share" 'BEGIN { print low + high }')
    verdict 'within "$low_share" 23 37 && within "$high_share" "$least" 77 && within "$sum" "$least_sum" 110' \
        "percent=$low_share,$high_share sum=$sum late_ms=$(value ready_late_ms <<<"$low"),$(value ready_late_ms <<<"$high")" \
        "per_second=$(value per_second <<<"$low")/$(value per_second <<<"$high") unlimited=$(unlimited) $(why cores-30)"
}

row_13_burst() {
    local share
    unlimited >/dev/null
    share=$(share_of "$(container 25 burst GPUSHARE_MEMORY=4GiB GPUSHARE_CORES=30 GPUSHARE_COMPUTE_POLICY=burst -- \
        "\$C work $kernel --seconds 8" | value rate)")
    verdict 'within "$share" 90 110' "percent=$share $(why burst)"
}

row_15_long_kernels() {
    local said duty
    said=$(container 35 long GPUSHARE_MEMORY=4GiB GPUSHARE_CORES=30 -- '$C work 200ms --seconds 14')
    duty=$(awk -v rate="$(value rate <<<"$said")" 'BEGIN { printf "%.1f", rate * 20 }')
    verdict 'within "$duty" 25 40' "duty=$duty per_second=$(value per_second <<<"$said") $(why long)"
}

row_20_graphs() {
    local share
    unlimited >/dev/null
    share=$(share_of "$(container 35 graphs GPUSHARE_MEMORY=4GiB GPUSHARE_CORES=30 -- \
        "\$C launch $kernel --way graph --grid 0 --seconds 10" | value rate)")
    verdict 'within "$share" 20 40' "percent=$share $(why graphs)"
}

# A small service (4 ms of kernels, 5 ms of pause) alone, and beside a program that never stops. How long its requests
# take is printed; asserted is that neither gets less than half of its share. In a window of 15 ms that a supervisor keeps,
# two requests fit, 16 %, since pauses use it up: there the service gets three quarters of them, and a request waits no
# longer than the others' 35 ms of a frame, and 5 ms.
row_29_inference() {
    local alone figures
    unlimited >/dev/null
    alone=$(container 20 alone GPUSHARE_MEMORY=4GiB -- '$C serve --seconds 4')
    figures="ms_p50/p99/max alone=$(latency "$alone")"
    wrong=
    beside_hog fixed
    beside_hog burst
    verdict '[ -z "$wrong" ] && [ -n "$(value p50_us <<<"$alone")" ]' "$figures wrong=$wrong $(why alone)"
}

# beside_hog POLICY: both with that policy, the service at 30 and the hog at 70; into `figures` and `wrong`.
beside_hog() {
    local at said hog busy hogs late
    at=$(soon 5)
    start "hog-$1" GPUSHARE_MEMORY=4GiB GPUSHARE_CORES=70 "GPUSHARE_COMPUTE_POLICY=$1" -- "\$C work $kernel --seconds 8 --at $at" || return
    start "service-$1" GPUSHARE_MEMORY=4GiB GPUSHARE_CORES=30 "GPUSHARE_COMPUTE_POLICY=$1" -- "\$C serve --seconds 8 --at $at" || return
    said=$(finish 30 "service-$1")
    hog=$(finish 30 "hog-$1")
    # 4 ms of kernels a request: requests a second times 0.4 are percent.
    busy=$(awk -v rate="$(value rate <<<"$said")" 'BEGIN { printf "%.1f", rate * 0.4 }')
    hogs=$(share_of "$(value rate <<<"$hog")")
    figures="$figures $1=$(latency "$said") percent=$busy,$hogs"
    if [ "$1" = fixed ] && [ "$compute" = supervisor ]; then
        late=$(awk -v beside="$(value p99_us <<<"$said")" -v alone="$(value p99_us <<<"$alone")" 'BEGIN { print beside - alone }')
        within "$late" 1 40000 && within "$busy" 12 60 && within "$hogs" 35 100 || wrong="$wrong,$1"
        return
    fi
    within "$busy" 15 60 && within "$hogs" 35 100 || wrong="$wrong,$1"
}

# latency OUTPUT: p50, p99 and the longest request, in milliseconds.
latency() {
    local name all=''
    for name in p50_us p99_us max_us; do
        all="$all/$(awk -v us="$(value $name <<<"$1")" 'BEGIN { printf "%.1f", us / 1000 }')"
    done
    echo "${all#/}"
}
