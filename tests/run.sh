#!/usr/bin/env bash
# Runs every test that this machine can run, and says at the end what was left out and why. The last line counts them.
#
# As root, tests that drive real runtimes and engines run as well (they are `#[ignore]`d with their needs as the reason,
# so that a plain `cargo test` works for everybody). With CI=true nothing may be left out but what needs a GPU.
set -uo pipefail
cd "$(dirname "$0")/.."

tables=${CARGO_TARGET_DIR:-target}/tmp
rm -f "$tables"/engines.md "$tables"/dialects.md
log=$(mktemp)
logs=$(mktemp -d)
trap 'rm -rf "$log" "$logs"' EXIT
failed=0

run() {
    echo "== $*"
    "$@" 2>&1 | tee -a "$log"
    [ "${PIPESTATUS[0]}" -eq 0 ] || failed=1
}

shims=(--exclude gpushare-intercept-cuda --exclude gpushare-intercept-nvml)
everything=()
[ "$(id -u)" -ne 0 ] || everything=(--include-ignored)

run cargo test --no-fail-fast --workspace --locked --exclude gpushare-tests "${shims[@]}" -- "${everything[@]}"

# Engines and nodes wait for each other's daemons more than they compute: two test programs at once, the longest first, and
# one test at a time in each. As root each has mounts of its own, since some tests count the mounts that they see. A
# program's output comes in one piece, when it has ended.
program() {
    local name=$1 target=(--test "$1") own_mounts=()
    [ "$name" != lib ] || target=(--lib --bins)
    [ "$(id -u)" -ne 0 ] || own_mounts=(unshare --mount)
    # shellcheck disable=SC2086
    "${own_mounts[@]}" cargo test --no-fail-fast --locked -p gpushare-tests "${target[@]}" -- $EVERYTHING \
        --test-threads=1 --nocapture >"$LOGS/$name" 2>&1
    local status=$?
    flock "$LOGS" cat "$LOGS/$name"
    return "$status"
}
export -f program
export LOGS=$logs EVERYTHING="${everything[*]}"
longest=(engines dialects attacks hook_only_attacks slurm admission meter images configure giving_back)
all=$(cd tests/tests && printf '%s\n' * | sed 's/\.rs$//')
others=$(grep -vxF "$(printf '%s\n' "${longest[@]}")" <<<"$all")
run cargo test --no-run --locked -p gpushare-tests
run xargs -P 2 -I{} bash -c 'program "$1"' _ {} < <(printf '%s\n' "${longest[@]}" $others lib)

echo
print() {
    [ -s "$tables/$2" ] || return 0
    echo "$1"
    cat "$tables/$2"
    echo
}
print "What was tried with each engine:" engines.md
print "Sets of other systems' requests, each with the outcome that docs/dialects.md tells:" dialects.md
if grep -q '^skipped: ' "$log"; then
    echo "Left out on this machine:"
    sort -u "$log" | sed -n 's/^skipped: /  /p'
fi
[ "$(id -u)" -eq 0 ] || echo "Left out: tests that need root (run \`sudo make test\`)."
awk -v failed="$failed" '
    /^test result: / { for (i = 1; i < NF; i++) { if ($(i + 1) ~ /^passed/) p += $i; if ($(i + 1) ~ /^failed/) f += $i; if ($(i + 1) ~ /^ignored/) s += $i } }
    END { if (failed && !f) f = 1; printf "%d passed, %d failed, %d skipped\n", p, f, s }' "$log"
exit "$failed"
