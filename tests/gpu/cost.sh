# Sourced by run.sh: what a share costs.

row_14_overhead() {
    local free full ratio=skipped paired='$C cost launch --rounds 1000 --calls 100 --bare /usr/lib/gpushare/driver/cuda'
    container 30 launch-free GPUSHARE_MEMORY=4GiB -- "$paired" >"$work/free.out"
    container 30 launch-full GPUSHARE_MEMORY=4GiB GPUSHARE_CORES=100 -- "$paired" >"$work/full.out"
    free=$(median "$work/free.out")
    full=$(median "$work/full.out")
    # On a simulated GPU a product takes no time.
    [ -n "$simulator" ] || ratio=$(product_ratio)
    verdict '[ "$free" != none ] && within "$free" -500000 500000 && within "$full" -500000 500000 && { [ "$ratio" = skipped ] || within "$ratio" 0.99 1.1; }' \
        "launch_ps=$free launch_limit_100_ps=$full product_ratio=$ratio $(why launch-free)"
}

# product_ratio: products a second in a share of all compute, in parts of those without gpushare; the median of five pairs.
product_ratio() {
    local turn bare ours
    for turn in 1 2 3 4 5; do
        bare=$(host 20 product --size 1024 --seconds 1.5 | value rate)
        ours=$(container 30 "product-$turn" GPUSHARE_MEMORY=4GiB GPUSHARE_CORES=100 -- '$C product --size 1024 --seconds 1.5' | value rate)
        awk -v ours="${ours:-0}" -v bare="${bare:-1}" 'BEGIN { print ours / bare }'
    done >"$work/ratios"
    median "$work/ratios"
}

row_23_start_cost() {
    local turn kind share begin with without
    for turn in $(seq 20); do
        for kind in with without; do
            share=()
            [ "$kind" = without ] || share=(GPUSHARE_MEMORY=1GiB)
            bundle "$kind-$turn" "${share[@]}" -- true || continue
            begin=$(date +%s%N)
            runtime run --bundle "$folder" "$(id_of "$folder")" </dev/null >/dev/null 2>"$folder/stderr" || echo failed >>"$work/failed"
            echo $((($(date +%s%N) - begin) / 1000)) >>"$work/$kind"
            remove "$folder"
        done
    done
    with=$(median "$work/with")
    without=$(median "$work/without")
    verdict '[ ! -e "$work/failed" ]' "with_us=$with without_us=$without added_us=$((with - without))"
}

# For the rules of what is charged; nothing is asserted. KiB of a context alone, and with an allocation of so many MiB.
row_21_granularity() {
    local base size asked holder figures=''
    base=$(used_before)
    for size in none 1 2 3 33; do
        # The first cannot be granted.
        [ "$size" = none ] && asked=99999999 || asked=$size
        env "${host_environment[@]}" "$client" allocate "$asked" --hold 20 >"$work/granularity" &
        holder=$!
        until_line "$work/granularity" "$asked" 10
        figures="$figures with_${size}_mib_kib=$((($(host_used) - base) / 1024))"
        kill "$holder"
        wait "$holder" 2>/dev/null
        : >"$work/granularity"
    done
    pass "${figures# }"
}
