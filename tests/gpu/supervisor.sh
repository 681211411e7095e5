# Sourced by run.sh: what a supervisor holds, and what it costs. Without --supervisor these rows are skipped.

# supervised: whether containers of this run have supervisors; else the row is skipped.
supervised() {
    [ "$supervisor" != off ] && return
    skip "reason=no_supervisor"
    return 1
}

# held_by NAME: who holds a container's share.
held_by() {
    gpushare describe "$(id_of "$(folder_of "$1")")" | sed -n 's/^held by *//p'
}

# PyTorch to the last piece: the host counts at most the share, and at least all but 64 MiB of it. The difference to the
# limit is what the programs were told is free.
row_41_last_mebibytes() {
    local base used who said
    supervised || return 0
    has torch || { skip "reason=no_torch" && return; }
    base=$(used_before)
    start torch GPUSHARE_MEMORY=4GiB -- "exec \$PYTHON $top/frameworks.py last_mebibytes" || return
    await torch '^held' 40
    used=$(used_since "$base")
    who=$(held_by torch)
    said=$(finish 20 torch)
    verdict '[ "$used" -le 4096 ] && [ "$used" -ge 4032 ] && [ "$who" = supervisor ] && [ "$(tail -n 1 <<<"$said")" = right ]' \
        "host_mib=$used allocated_mib=$(value allocated_mib <<<"$said") free_mib=$(value free_mib <<<"$said") held_by=$who" \
        "$(tail -n 1 <<<"$said" | tr ' ' '_') $(why torch)"
}

# Raw calls without libcuda, by every way to ask for memory, each in a container of its own: none holds more than the share.
row_42_attackers() {
    local way base used result='' wrong='' attacker=$top/bin/gpushare-attacker
    supervised || return 0
    for way in long short heap pitch range other-type wrapped duplicate export flip rounds; do
        base=$(used_before raw_used)
        start "$way" GPUSHARE_MEMORY=1GiB -- "sleep 20 | $attacker $manager_files $way --driver $(driver_version)" || return
        await "$way" '^got' 15
        used=$(($(raw_used) - base))
        result="$result $way=$(stop "$way" | value got)/$(mib "$used")"
        [ "$used" -le $((1024 << 20)) ] || wrong="$wrong,$way:too_much"
        [ "$way" = rounds ] || [ "$used" -ge $((896 << 20)) ] || wrong="$wrong,$way:$(why "$way")"
    done
    verdict '[ -z "$wrong" ]' "wrong=${wrong#,} pieces/host:$result"
}

# Training on the host and in a share, in turns, and a second of allocations.
row_43_cost() {
    local turn bare ours rate_bare='' rate_ours='' ratio=''
    supervised || return 0
    for turn in 1 2 3 4 5; do
        [ -n "$simulator" ] || host 20 cost allocate --rounds 40 --calls 20 >>"$work/bare-allocations"
        container 20 "allocations-$turn" GPUSHARE_MEMORY=4GiB -- '$C cost allocate --rounds 40 --calls 20' >>"$work/our-allocations"
    done
    bare=$(median "$work/bare-allocations")
    ours=$(median "$work/our-allocations")
    [ "$ours" != none ] || { fail "reason=no_allocation $(why allocations-1)" && return; }
    [ "$bare" != none ] || bare=0
    if has torch; then
        for turn in 1 2 3; do
            rate_bare=$(env "${host_environment[@]}" timeout 40 "$python" "$top/frameworks.py" train 3 2>/dev/null | value rate)
            rate_ours=$(container 40 "train-$turn" GPUSHARE_MEMORY=16GiB -- "exec \$PYTHON $top/frameworks.py train 3" | value rate)
            awk -v ours="${rate_ours:-0}" -v bare="${rate_bare:-1}" 'BEGIN { print ours / bare }' >>"$work/training"
        done
        ratio=$(median "$work/training")
    fi
    verdict '[ -z "$ratio" ] || within "$ratio" 0.98 1.1' \
        "allocate_and_free_ns=$((ours / 1000)) bare_ns=$((bare / 1000)) training_ratio=${ratio:-none} rates=$rate_bare/$rate_ours"
}
