# Sourced by run.sh: what a container can hold of a GPU, by the host's figures.

# reserve: MiB of a share that programs may be unable to allocate. The meter reports what their contexts really take, and
# supervisors count it; without either the most that was ever seen is kept free.
reserve() {
    if [ -n "$meter_pid" ] || [ "$supervisor" != off ]; then echo 700; else echo 800; fi
}

# larger NUMBER NUMBER
larger() {
    echo $(($1 > $2 ? $1 : $2))
}

# mib_of TEXT NAME: the value behind a name, in MiB; 0 without one.
mib_of() {
    mib "$(value "$2" <<<"$1" | grep . || echo 0)"
}

row_03_memory_limit() {
    local base granted held
    base=$(used_before)
    start limit GPUSHARE_MEMORY=8GiB -- '$C allocate 512 512 512 512 512 512 512 512 512 512 512 512 512 512 512 512 512 --hold 20' || return
    await limit 'refused' 15
    held=$(used_since "$base")
    granted=$(stop limit | grep -c '^granted')
    verdict '[ "$granted" -ge 14 ] && [ "$granted" -le 16 ] && [ "$held" -le 8192 ]' \
        "granted_mib=$((granted * 512)) host_mib=$held excess_mib=$(larger $((held - 8192)) 0) $(why limit)"
}

# The host's figure while each family holds all it can get in 4 GiB: with the meter, and one family without it.
row_05_allocators() {
    local family result='' wrong=''
    fill_by unmetered linear
    start_meter
    for family in linear pitch managed async pool virtual array mipmap graph; do
        fill_by "$family" "$family"
    done
    stop_meter
    verdict '[ -z "$wrong" ]' "wrong=${wrong#,} held/host:$result"
}

# fill_by NAME FAMILY: one of them, into `result` and `wrong`.
fill_by() {
    local base used held least=$((4096 - $(reserve)))
    base=$(used_before)
    start "$1" GPUSHARE_MEMORY=4GiB -- "\$C fill $2 --resident --hold 30000" || return
    if ! await "$1" '^held' 20; then
        stop "$1" >/dev/null
        wrong="$wrong,$1:$(why "$1")"
        return
    fi
    used=$(used_since "$base")
    held=$(mib_of "$(stop "$1")" held)
    result="$result $1=$held/$used"
    [ "$held" -le 4096 ] && [ "$used" -le 4096 ] || wrong="$wrong,$1:too_much"
    [ "$held" -ge "$least" ] || wrong="$wrong,$1:too_little"
}

# A context grows when modules are loaded after the last allocation. That part may pass the limit as long as the limit is
# held in the container alone, so only the figure before it is asserted.
row_28_growth() {
    local base before after said
    base=$(used_before)
    start growth GPUSHARE_MEMORY=4GiB -- '$C grow --hold 12' || return
    await growth '^held' 15 || { fail "$(why growth)" && return; }
    before=$(used_since "$base")
    await growth '^refused' 20
    after=$(used_since "$base")
    said=$(stop growth)
    verdict '[ "$before" -le 4096 ] && [ "$before" -ge $((4096 - $(reserve))) ]' \
        "host_mib=$before after_modules_mib=$after passes_by_mib=$(larger $((after - 4096)) 0)" \
        "modules=$(value loaded <<<"$said") next=$(value refused <<<"$said") $(why growth)"
}

row_09_two_containers() {
    local base used left right least
    least=$((4096 - $(reserve)))
    base=$(used_before)
    start left GPUSHARE_MEMORY=4GiB -- '$C fill linear --hold 60000' || return
    start right GPUSHARE_MEMORY=4GiB -- '$C fill linear --hold 60000' || return
    await left '^held' 20
    await right '^held' 20
    used=$(used_since "$base")
    left=$(mib_of "$(stop left)" held)
    right=$(mib_of "$(stop right)" held)
    verdict '[ "$left" -ge "$least" ] && [ "$right" -ge "$least" ] && [ "$used" -le 8192 ]' \
        "left_mib=$left right_mib=$right least=$least host_mib=$used excess_mib=$(larger $((used - 8192)) 0) $(why left)"
}

row_08_two_processes() {
    local said
    said=$(container 25 pair GPUSHARE_MEMORY=8GiB -- '$C allocate 5120 --hold 4 & sleep 2; $C allocate 5120; wait' | tr ' \n' '_,')
    verdict '[ "$said" = granted_5120,refused_5120, ]' "said=$said $(why pair)"
}

row_06_allocate_and_free() {
    local drift
    drift=$(container 35 drift GPUSHARE_MEMORY=8GiB -- '$C allocate 6144 --repeat 200' | value drift)
    verdict '[ "$drift" = 0 ]' "drift=$drift $(why drift)"
}

# 6 GiB must be there again two seconds after their holder was killed; the driver's own work is part of it.
row_10_after_a_kill() {
    local script said took
    script='$C allocate 6144 --hold 60 & holder=$!; sleep 2; $C allocate 6144; kill -9 $holder
begin=$(date +%s%N)
while :; do
    $C allocate 6144 | grep -q granted && break
    [ $(($(date +%s%N) - begin)) -lt 8000000000 ] || break
    sleep 0.02
done
echo took $((($(date +%s%N) - begin) / 1000000))'
    said=$(container 30 kill GPUSHARE_MEMORY=8GiB -- "$script")
    took=$(value took <<<"$said")
    verdict '[ "${took:-9999}" -le 2000 ] && grep -q "^refused 6144" <<<"$said"' "took_ms=$took $(why kill)"
}

# 5 GiB in a share of 4: the rest is the host's, the product of what lies there is right, and the GPU holds no more than
# the share. Without host memory the same is refused.
row_25_host_memory() {
    local want base program held shown got refused
    want=$(host 30 product | value right)
    base=$(used_before)
    program='$C product --beside 3072 --beside 1024 --beside 1024'
    start spill GPUSHARE_MEMORY=4GiB GPUSHARE_HOST_MEMORY=4GiB -- "$program --hold 30" || return
    await spill '^right' 25
    held=$(used_since "$base")
    shown=$(gpushare ps --json | grep -oE '"host_used_bytes": *[0-9]+' | grep -oE '[0-9]+$')
    got=$(stop spill | value right)
    container 30 full GPUSHARE_MEMORY=4GiB -- "$program" >/dev/null
    grep -q cuMemAlloc "$(folder_of full)/stderr" && refused=yes || refused=no
    verdict '[ -n "$want" ] && [ "$got" = "$want" ] && [ "$held" -le 4096 ] && [ "${shown:-0}" -gt 0 ] && [ "$refused" = yes ]' \
        "host=$want container=$got gpu_mib=$held host_mib=$(mib "${shown:-0}") refused_without=$refused $(why spill)"
}

# A share of 2 GiB that may grow to 5: 4 GiB fit while the meter runs, and not without it.
row_26_memory_limit() {
    local program='$C product --beside 3072' refused want base held granted got
    container 30 without GPUSHARE_MEMORY=2GiB GPUSHARE_MEMORY_LIMIT=5GiB -- "$program" >/dev/null
    grep -q cuMemAlloc "$(folder_of without)/stderr" && refused=yes || refused=no
    start_meter
    want=$(host 30 product | value right)
    base=$(used_before)
    start grows GPUSHARE_MEMORY=2GiB GPUSHARE_MEMORY_LIMIT=5GiB -- "$program --hold 30" || return
    await grows '^right' 20
    held=$(used_since "$base")
    granted=$(gpushare ps --json | grep -oE '"memory_bytes": *[0-9]+' | head -n 1 | grep -oE '[0-9]+$')
    got=$(stop grows | value right)
    stop_meter
    verdict '[ -n "$want" ] && [ "$got" = "$want" ] && [ "$(mib "${granted:-0}")" -gt 3072 ] && [ "$held" -le 5120 ] && [ "$refused" = yes ]' \
        "host=$want container=$got granted_mib=$(mib "${granted:-0}") host_mib=$held refused_without_meter=$refused $(why grows)"
}
