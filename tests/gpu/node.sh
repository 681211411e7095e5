# Sourced by run.sh: the node that is tested, this machine's or a simulated one, and its figures without gpushare.

config=$work/gpushare.toml
host_environment=(GPUSHARE_TEST=1)
# Where containers see the files of the driver's resource manager.
manager_files=/dev

make_node() {
    if [ -n "$simulator" ]; then
        simulated
    else
        cp "$top/gpushare.toml" "$config"
        sed -i "s|^state = .*|state = \"$work/state\"|" "$config"
        proc=/proc
    fi
    # The bundle's runc, whatever the machine has.
    sed -i '/^\[runtime\]/,/^\]/d' "$config"
    printf '[runtime]\ncandidates = ["%s"]\n' "$top/bin/runc" >>"$config"
    set_in "$config" quota 'host_memory = "8GiB"'
    sed -i '/^\[supervisor\]/,/^mode = /d' "$config"
    sed -i '/^compute = /d' "$config"
    printf '[supervisor]\nmode = "%s"\ncompute = "%s"\n' "$supervisor" "$compute" >>"$config"
    [ -z "$simulator" ] || start_manager
    # runc runs itself again without its environment, so a library path would not reach it.
    if ! ldconfig -p | grep -q libseccomp.so.2; then
        added_library=/usr/lib/libseccomp.so.2
        cp "$top/lib/libseccomp.so.2" "$added_library" && ldconfig
    fi
    python=$(python3 -c 'import sys; print(sys.executable)' 2>/dev/null)
}

simulated() {
    local made options=("${simulated_node[@]}")
    [ -z "${GPUSHARE_NVIDIA_SMI-}" ] || options+=(--nvidia-smi "$GPUSHARE_NVIDIA_SMI")
    made=$("$top/bin/gpushare-simulator" create "$work/node" "${options[@]}") || exit 1
    cp "$(tail -n 1 <<<"$made")" "$config"
    driver=$work/node/driver
    [ -z "${GPUSHARE_MPS_CONTROL-}" ] || install -m 755 "$GPUSHARE_MPS_CONTROL" "$driver/usr/bin/nvidia-cuda-mps-control"
    host_environment=("LD_LIBRARY_PATH=$driver/usr/local/nvidia/lib64" "GPUSHARE_SIMULATOR=$work/node/shared")
    proc=$work/node/proc
}

# start_manager: gives the simulated node a resource manager, whose files supervisors, attackers and the meter find in its
# place.
start_manager() {
    local said=$work/manager.said
    "$top/bin/gpushare-simulated-manager" "$work/node" >"$said" 2>&1 &
    manager_pid=$!
    until_line "$said" '^ready' 10 || {
        cat "$said" >&2
        exit 1
    }
    set_in "$config" paths "supervisor = \"$top/bin/gpushare-simulated-supervisor\""
    set_in "$config" meter "record = \"$work/node/shared/manager\""
    manager_files=/run/gpushare-simulator/manager
}

stop_manager() {
    [ -n "$manager_pid" ] || return 0
    kill "$manager_pid" 2>/dev/null && wait "$manager_pid"
    manager_pid=
}

# set_in FILE SECTION 'KEY = VALUE': a setting of a settings file.
set_in() {
    sed -i "/^${3%% *} = /d" "$1"
    grep -q "^\[$2\]" "$1" || echo "[$2]" >>"$1"
    sed -i "s|^\[$2\].*|&\n$3|" "$1"
}

gpushare() {
    GPUSHARE_CONFIG=$config env "${host_environment[@]}" "$top/bin/gpushare" "$@"
}

# start_meter: bursting shares and growing ones go by what it measures. Its log is appended to meter.log.
start_meter() {
    echo "== $row" >>"$results/meter.log"
    GPUSHARE_CONFIG=$config env "${host_environment[@]}" "$top/bin/gpushare" meter >>"$results/meter.log" 2>&1 &
    meter_pid=$!
    sleep 1.5
    kill -0 "$meter_pid" 2>/dev/null || meter_pid=
}

stop_meter() {
    [ -z "$meter_pid" ] || kill "$meter_pid" 2>/dev/null
    meter_pid=
}

# host SECONDS WORDS...: the client on the host, without gpushare.
host() {
    local limit=$1
    shift
    env "${host_environment[@]}" timeout "$limit" "$client" "$@"
}

# host_used: what NVML says on the host is in use on the GPU, in bytes.
host_used() {
    host 20 sizes --nvml | value nvml_used
}

# raw_used: the same where raw calls may have taken some, which a simulated NVML does not see: there its resource manager
# says it.
raw_used() {
    if [ -n "$manager_pid" ]; then
        sed -n 's/^gpu 0 used //p' "$work/node/shared/manager/figures"
    else
        host_used
    fi
}

# used_before [raw_used]: what is in use once it no longer changes: the driver takes a moment to free what the last row held.
used_before() {
    local earlier now turn figure=${1:-host_used}
    now=$($figure)
    for turn in 1 2 3 4 5 6 7 8; do
        sleep 0.3
        earlier=$now
        now=$($figure)
        [ "$now" != "$earlier" ] || break
    done
    echo "$now"
}

# used_since BYTES: MiB that are in use above this figure.
used_since() {
    mib $(($(host_used) - $1))
}

# context_mib: what the driver takes for a context with nothing in it, measured once on the host.
context_mib() {
    local base holder
    if [ ! -s "$work/context" ]; then
        base=$(used_before)
        env "${host_environment[@]}" "$client" sizes --hold 20 >"$work/context.out" &
        holder=$!
        until_line "$work/context.out" '^listed' 15
        used_since "$base" >"$work/context"
        kill "$holder"
        wait "$holder" 2>/dev/null
    fi
    cat "$work/context"
}

# calibrate: containers learn how much fixed work this GPU does in a millisecond. A simulated GPU takes a kernel's time
# from its name, so nothing is measured there.
calibrate() {
    local steps
    [ -z "$simulator" ] || return 0
    steps=$(host 20 calibrate | value steps_per_ms)
    if [ -z "$steps" ]; then
        say "INFO calibration steps_per_ms=none by=the_clock"
        return
    fi
    say "INFO calibration steps_per_ms=$steps"
    container_environment+=("GPUSHARE_TESTS_STEPS_PER_MS=$steps")
}

# driver_version: such as 580.159.04, or nothing without a driver.
driver_version() {
    grep -oE '[0-9]+\.[0-9]+(\.[0-9]+)?' "$proc/driver/nvidia/version" 2>/dev/null | head -n 1
}

# driver_major: 580, or nothing without a driver.
driver_major() {
    driver_version | cut -d. -f1
}
