# Sourced by run.sh: rows, their verdicts, and what comes back.

# make_results: the results folder gets at most results.txt, said.txt, inventory.txt, meter.log and mps.log.
make_results() {
    mkdir -p "$results"
    lines=$results/results.txt
    rm -f "$results/inventory.txt" "$results/meter.log" "$results/mps.log"
    : >"$lines"
    : >"$results/said.txt"
}

# The value behind NAME in a container's output.
value() {
    awk -v name="$1" '$1 == name { print $2; exit }'
}

mib() {
    echo $(($1 / 1048576))
}

# within VALUE LEAST MOST: compares numbers with fractions.
within() {
    awk -v value="$1" -v least="$2" -v most="$3" 'BEGIN { exit !(value != "" && value >= least && value <= most) }'
}

# percent PART WHOLE
percent() {
    awk -v part="${1:-0}" -v whole="${2:-0}" 'BEGIN { printf "%.1f", (whole > 0 ? part * 100 / whole : 0) }'
}

# median FILE: of the first number of each line, or of the difference to the second.
median() {
    awk '{ print (NF > 1 ? $1 - $2 : $1) }' "$1" | sort -n | awk '{ all[NR] = $1 } END { print (NR ? all[int((NR + 1) / 2)] : "none") }'
}

say() {
    echo "$*" | tee -a "$lines"
}
pass() { say "PASS $row $*"; }
fail() { say "FAIL $row $*"; }
skip() { say "SKIP $row $*"; }

# verdict CONDITION KEY=VALUE...: PASS when the condition (a command) holds.
verdict() {
    if eval "$1"; then shift && pass "$@"; else shift && fail "$@"; fi
}

# note NAME: keeps standard input in said.txt.
note() {
    sed "s/^/$row $1: /" >>"$results/said.txt"
}

# until_line FILE PATTERN SECONDS: waits for a line of a file.
until_line() {
    local end=$((SECONDS + $3))
    until grep -q "$2" "$1" 2>/dev/null; do
        [ "$SECONDS" -lt "$end" ] || return 1
        sleep 0.05
    done
}

is_wanted() {
    [ -z "$only" ] || [[ ,$only, == *,$1,* ]]
}

# run_row NAME SECONDS: runs the function row_NAME in a process group of its own, and ends it after so many seconds.
run_row() {
    local seconds=$2 left=$((part_end - SECONDS)) begin=$SECONDS before
    row=$1
    is_wanted "$row" || return 0
    if [ "$left" -lt $((seconds / 2)) ]; then
        skip "reason=no_time_left"
        return
    fi
    [ "$left" -ge "$seconds" ] || seconds=$left
    before=$(wc -l <"$lines")
    set -m
    (
        set +m
        trap - EXIT
        "row_$row"
    ) </dev/null 3<&- &
    row_pid=$!
    set +m
    while kill -0 "$row_pid" 2>/dev/null && [ $((SECONDS - begin)) -lt "$seconds" ]; do
        sleep 0.1
    done
    if kill -0 "$row_pid" 2>/dev/null; then
        fail "reason=ran_over_${seconds}_seconds"
        end_row
    fi
    wait "$row_pid" 2>/dev/null
    row_pid=
    # Whatever the row left behind.
    end_containers "$work/$row"-*/config.json
    if [ "$(wc -l <"$lines")" -eq "$before" ]; then
        fail "reason=no_verdict"
    fi
}

# end_row: kills the row's processes.
end_row() {
    [ -z "$row_pid" ] || kill -KILL -- "-$row_pid" 2>/dev/null
}

begin_part() {
    container_environment=()
    [ "$1" = 1 ] && return
    row=part_$1
    start_meter
    # On a simulated GPU kernels take time and compute nothing.
    container_environment=(GPUSHARE_SIMULATOR_RUN=0)
    host_environment+=(GPUSHARE_SIMULATOR_RUN=0)
    calibrate
}

# summary: a table of all lines; fails if a row did.
summary() {
    echo
    awk '{ printf "%-5s %-28s", $1, $2; for (i = 3; i <= NF; i++) printf " %s", $i; print "" }' "$lines"
    awk -v seconds="$SECONDS" '{ count[$1]++ }
        END { printf "%d passed, %d failed, %d skipped in %d s\n", count["PASS"], count["FAIL"], count["SKIP"], seconds }' "$lines"
    ! grep -q '^FAIL' "$lines"
}
