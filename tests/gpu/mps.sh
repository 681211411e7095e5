# Sourced by run.sh: containers on one GPU at once by NVIDIA's MPS, the card's settings untouched.

# mps_control: NVIDIA's control daemon on this node; nothing where there is none.
mps_control() {
    if [ -n "$simulator" ]; then
        ls "$driver/usr/bin/nvidia-cuda-mps-control" 2>/dev/null
    else
        command -v nvidia-cuda-mps-control || ls /usr/local/nvidia/bin/nvidia-cuda-mps-control 2>/dev/null
    fi
}

row_40_mps() {
    local config=$work/mps.toml before serving
    [ "$supervisor" != required ] || { skip "reason=no_supervisor_holds_MPS_clients" && return; }
    cp "$work/gpushare.toml" "$config"
    set_in "$config" mps 'compute_mode = "unchanged"'
    if [ -z "$(mps_control)" ]; then
        skip "reason=no_nvidia-cuda-mps-control"
        return
    fi
    if ! gpushare config check >"$work/mps.check" 2>&1 && grep -q 'unknown' "$work/mps.check"; then
        skip "reason=this_build_has_no_setting_mps.compute_mode"
        return
    fi
    before=$(compute_mode)
    GPUSHARE_CONFIG=$config env "${host_environment[@]}" "$top/bin/gpushare" mps serve >"$results/mps.log" 2>&1 &
    serving=$!
    if until_line "$results/mps.log" 'MPS is served' 10; then
        two_by_mps
    else
        fail "reason=not_served said=$(tail -n 1 "$results/mps.log" | tr ' ' _)"
    fi
    # It ends the daemon after the last container.
    for _ in $(seq 50); do
        [ -n "$(mps_daemons)" ] || break
        sleep 0.1
    done
    kill "$serving"
    wait "$serving" 2>/dev/null
    end_mps_daemons
}

compute_mode() {
    host 20 sizes --nvml | value compute_mode
}

# A block for each multiprocessor would run at full speed on a third of them, so the GPU is filled: 16 blocks of four warps on
# each. A simulated GPU gives its clients turns, whatever their percentage is.
two_by_mps() {
    local grid solo at low high during least_sum=85
    grid=$(($(host 20 sizes | value multiprocessors) * 16))
    solo=$(by_mps solo 100 "\$C work 900us --grid $grid --seconds 4" && finish 30 solo | value rate)
    at=$(soon 5)
    by_mps low 30 "\$C sizes; \$C fill linear --largest 256; \$C work 900us --grid $grid --seconds 8 --at $at" || return
    by_mps high 70 "\$C work 900us --grid $grid --seconds 8 --at $at" || return
    await low '^held' 20
    during=$(compute_mode)
    low=$(finish 30 low)
    high=$(finish 30 high)
    judge_mps
}

# by_mps NAME CORES COMMAND: starts it in a share by MPS.
by_mps() {
    start "$1" GPUSHARE_MODE=mps GPUSHARE_MEMORY=4GiB "GPUSHARE_CORES=$2" -- "$3"
}

judge_mps() {
    local low_share high_share sum held
    low_share=$(percent "$(value rate <<<"$low")" "$solo")
    high_share=$(percent "$(value rate <<<"$high")" "$solo")
    sum=$(awk -v low="$low_share" -v high="$high_share" 'BEGIN { print low + high }')
    held=$(mib_of "$low" held)
    verdict '[ "$before" = "$during" ] && [ "$before" = "$(compute_mode)" ] && [ "$held" -ge 2048 ] && [ "$held" -le 4096 ] &&
        within "$sum" "$least_sum" 125 && { [ -n "$simulator" ] || { within "$low_share" 25 42 && within "$high_share" 60 85; }; }' \
        "percent=$low_share,$high_share sum=$sum multiprocessors_at_30=$(value multiprocessors <<<"$low") held_mib=$held" \
        "compute_mode=$before/$during/$(compute_mode) solo=$solo $(why low)"
}

# mps_daemons: those that this run started, with their servers, by the pipe folder in their environment.
mps_daemons() {
    local process
    for process in /proc/[0-9]*; do
        [ "$(cut -c1-15 "$process/comm" 2>/dev/null)" = nvidia-cuda-mps ] || continue
        tr '\0' '\n' 2>/dev/null <"$process/environ" | grep -q "^CUDA_MPS_PIPE_DIRECTORY=$work/" && echo "${process#/proc/}"
    done 2>/dev/null
}

end_mps_daemons() {
    local pid
    for pid in $(mps_daemons); do
        kill "$pid" 2>/dev/null
    done
}
