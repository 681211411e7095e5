# Sourced by run.sh: the driver's own limit of a cgroup's memory, driver 615 and newer.

# What a program holds and sees in the cgroup $leaf, on the host and without gpushare: confined SECONDS WORDS...
confined() {
    local limit=$1
    shift
    env "${host_environment[@]}" sh -c 'echo $$ >"$0/cgroup.procs" && exec timeout "$@"' "$leaf" "$limit" "$client" "$@"
}

# limits NAME [OPTION...]: the driver's answer about the cgroup $leaf.
limits() {
    host 20 limits "$leaf" "${@:2}" | value "$1"
}

# Skips the row where the driver cannot limit a cgroup. A simulated node brings the cgroups of version 2 along.
native_or_skip() {
    local major
    major=$(driver_major)
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
# below what is in use, and when the cgroup is made again. Only that it holds is asserted; the answers are what is wanted.
row_24_native_limit() {
    local leaf before set hard total held used below more ended again answers name
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
    } 2>&1 | note cgroup
    before=$(limits get)
    set=$(limits set --set 4096)
    hard=$(limits hard)
    total=$(host 20 sizes | value cuda_total)
    confined 20 sizes --nvml >"$work/native.out"
    confined 20 sizes >>"$work/native.out" 2>&1
    confined 30 fill linear >"$work/fill.out"
    held=$(mib_of "$(cat "$work/fill.out")" held)
    # Below what is in use.
    confined 20 allocate 2048 --hold 8 >"$work/below.out" 2>&1 &
    holder=$!
    until_line "$work/below.out" granted 10
    used=$(limits used)
    below=$(limits set --set 1024)
    more=$(confined 20 allocate 16 2>&1 | tr ' \n' '_,' | cut -c1-80)
    wait "$holder" && ended=well || ended=badly
    rmdir "$leaf" && mkdir "$leaf"
    again=$(limits hard)
    confined 20 allocate 6144 >"$work/again.out"
    rmdir "$leaf"
    answers="get_without=$before set=$set hard_mib=$(mib "${hard:-0}") held_mib=$held used_mib=$(mib "${used:-0}")"
    for name in nvml_total nvml_total_v2 cuda_total cuda_device; do
        answers="$answers $name=$(mib_of "$(cat "$work/native.out")" $name)"
    done
    verdict '[ "$set" = 0 ] && [ "$held" -ge 2048 ] && [ "$held" -le 4096 ]' \
        "$answers card=$(mib "${total:-0}") set_below_use=$below then=$more holder_ended=$ended" \
        "hard_of_new_cgroup=$again in_new_cgroup=$(tr ' \n' '_,' <"$work/again.out")"
}

# The limit as gpushare sets it: a program that calls the driver's own library meets it, and root in the container cannot
# lift it by any path of its cgroup.
row_27_driver_limit() {
    local said left config=$work/require.toml
    native_or_skip || return
    cp "$work/gpushare.toml" "$config"
    set_in "$config" inject 'driver_limit = "require"'
    bundle second-wall GPUSHARE_MEMORY=4GiB -- '
        past="env LD_PRELOAD=/usr/lib/gpushare/driver/cuda $C allocate"
        $past 3072 5120
        for own in /sys/fs/cgroup "/sys/fs/cgroup$(sed -n "s/^0:://p" /proc/self/cgroup)"; do
            $C limits "$own" --set 65536 | sed "s/^set 0$/lifted/"
        done
        $past 5120 | sed "s/^/then_/"' || return
    sed -i '/"destination": "\/sys"/a {"destination": "/sys/fs/cgroup", "type": "cgroup", "source": "cgroup", "options": ["ro"]},' "$folder/config.json"
    launch
    said=$(finish 35 second-wall)
    [ -d "/sys/fs/cgroup/$(id_of "$folder")" ] && left=yes || left=no
    verdict 'grep -q "^granted 3072" <<<"$said" && grep -q "^refused 5120" <<<"$said" &&
        grep -q "^then_refused 5120" <<<"$said" && ! grep -q lifted <<<"$said" && [ "$left" = no ]' \
        "said=$(printf %s "$said" | tr ' \n' '_,') cgroup_left=$left $(why second-wall)"
}
