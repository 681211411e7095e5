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
programs=$(mktemp)
times=$(mktemp)
trap 'rm -rf "$log" "$logs" "$programs" "$times"' EXIT
failed=0

run() {
    echo "== $*"
    "$@" 2>&1 | tee -a "$log"
    [ "${PIPESTATUS[0]}" -eq 0 ] || failed=1
}

shims=(--exclude gpushare-intercept-cuda --exclude gpushare-intercept-nvml)
everything=()
[ "$(id -u)" -ne 0 ] || everything=(--include-ignored)

# One build for all: for one package alone cargo chooses other features of what packages have in common, and builds it
# again. Each line of the list is a test program: its package's folder, its name, its file.
run cargo test --no-run --workspace --locked "${shims[@]}"
cargo test --quiet --no-run --workspace --locked "${shims[@]}" --message-format=json 2>/dev/null |
    sed -n 's|.*"package_id":"path+file://\([^"#]*\)#.*"target":{[^}]*"name":"\([^"]*\)".*"profile":{[^}]*"test":true.*"executable":"\([^"]*\)".*|\1 \2 \3|p' \
        >"$programs"
# Cargo names each program in words, too: one that the list lacks would not be run, and nobody would notice.
if [ "$(grep -c '^  Executable ' "$log")" -ne "$(wc -l <"$programs")" ]; then
    echo "the list of test programs is not whole" >&2
    failed=1
fi
own=$(pwd)/tests

# Tests beside the code, as cargo runs them.
while read -r folder name file <&3; do
    [ "$folder" = "$own" ] || run env -C "$folder" "$file" "${everything[@]}" </dev/null
done 3<"$programs"
run cargo test --no-fail-fast --doc --workspace --locked "${shims[@]}"

# Engines and nodes wait for each other's daemons more than they compute: two test programs at once, the longest first, and
# one test at a time in each. As root each has mounts of its own, since some tests count the mounts that they see. A
# program's output comes in one piece, when it has ended.
program() {
    local name=$1 own_mounts=() start=$SECONDS
    [ "$(id -u)" -ne 0 ] || own_mounts=(unshare --mount)
    local file
    file=$(awk -v own="$OWN" -v name="$name" '$1 == own && $2 == name { print $3 }' "$PROGRAMS")
    # shellcheck disable=SC2086
    (cd "$OWN" && "${own_mounts[@]}" "$file" $EVERYTHING --test-threads=1 --nocapture) >"$LOGS/$name" 2>&1
    local status=$?
    echo "$((SECONDS - start)) s  $name" >>"$TIMES"
    flock "$LOGS" cat "$LOGS/$name"
    return "$status"
}
export -f program
export LOGS=$logs EVERYTHING="${everything[*]}" OWN=$own PROGRAMS=$programs TIMES=$times
longest=(engines dialects attacks hook_only_attacks slurm admission meter images upgrade configure giving_back)
all=$(awk -v own="$own" '$1 == own { print $2 }' "$programs")
others=$(grep -vxF "$(printf '%s\n' "${longest[@]}")" <<<"$all")
[ -n "$all" ] || { echo "no test program was found" >&2; failed=1; }
run xargs -P 2 -I{} bash -c 'program "$1"' _ {} < <(printf '%s\n' "${longest[@]}" $others)

echo
print() {
    [ -s "$tables/$2" ] || return 0
    echo "$1"
    cat "$tables/$2"
    echo
}
print "What was tried with each engine:" engines.md
print "Sets of other systems' requests, each with the outcome that docs/dialects.md tells:" dialects.md
echo "The longest test programs:"
sort -rn "$times" | head -n 12 | sed 's/^/  /'
echo
if grep -q '^skipped: ' "$log"; then
    echo "Left out on this machine:"
    sort -u "$log" | sed -n 's/^skipped: /  /p'
fi
[ "$(id -u)" -eq 0 ] || echo "Left out: tests that need root (run \`sudo make test\`)."
awk -v failed="$failed" '
    /^test result: / { for (i = 1; i < NF; i++) { if ($(i + 1) ~ /^passed/) p += $i; if ($(i + 1) ~ /^failed/) f += $i; if ($(i + 1) ~ /^ignored/) s += $i } }
    END { if (failed && !f) f = 1; printf "%d passed, %d failed, %d skipped\n", p, f, s }' "$log"
exit "$failed"
