# Sourced by run.sh: programs of every kind within a share.

row_16_threads() {
    local leak
    leak=$(container 50 threads GPUSHARE_MEMORY=4GiB -- '$C threads' | value leak)
    verdict '[ "$leak" = 0 ]' "leak=$leak $(why threads)"
}

# Each way to the driver must meet the limit: the second size does not fit beside the first.
row_17_ways_in() {
    local way wrong=''
    for way in plain empty-environment setuid entry path fork exec own-libcuda; do
        go_in "$way"
    done
    verdict '[ -z "$wrong" ]' "wrong=${wrong#,}"
}

# go_in WAY: one of them; into `wrong`.
go_in() {
    local script said settings=(GPUSHARE_MEMORY=8GiB)
    case $1 in
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
    bundle "$1" "${settings[@]}" -- "$script"
    [ "$1" != own-libcuda ] || bring_own_libcuda || return
    launch
    said=$(finish 15 "$1" | tr ' \n' '_,')
    [ "$said" = granted_6000,refused_5000, ] || wrong="$wrong,$1:$said$(why "$1")"
}

# A copy of the driver's library in the image of the bundle made last. Fails where the root is read-only.
bring_own_libcuda() {
    local own
    own=$(env "${host_environment[@]}" sh -c 'IFS=:; for d in $LD_LIBRARY_PATH /usr/lib/x86_64-linux-gnu /usr/lib64 /usr/local/nvidia/lib64; do
        [ ! -e "$d/libcuda.so.1" ] || { echo "$d/libcuda.so.1"; break; }; done')
    mkdir -p "$folder/root/opt/own" 2>/dev/null && cp "$own" "$folder/root/opt/own/libcuda.so.1" 2>/dev/null
}

row_22_checker() {
    local status
    if [ -n "$simulator" ]; then
        skip "reason=the_checker_needs_a_GPU"
        return
    fi
    if ! command -v compute-sanitizer >/dev/null; then
        skip "reason=no_compute-sanitizer"
        return
    fi
    container 50 checker GPUSHARE_MEMORY=4GiB -- "$(command -v compute-sanitizer) --error-exitcode 9 \$C threads --turns 20" >/dev/null
    status=$?
    verdict '[ "$status" -eq 0 ]' "checker=status_$status $(why checker)"
}
