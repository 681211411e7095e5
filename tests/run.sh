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

run cargo test --no-fail-fast --doc --workspace --locked "${shims[@]}"

# Most programs wait for daemons, nodes and each other more than they compute: two at once, the longest first. As root
# each has mounts of its own, since some count the mounts that they see. Scenarios run one test at a time; tests beside
# the code run as cargo runs them. A program's output comes in one piece, when it has ended.
program() {
    local file=$1 folder name start=$SECONDS
    read -r folder name _ < <(grep -F " $file" "$PROGRAMS")
    local how=("$file" $EVERYTHING)
    if [ "$folder" = "$OWN" ]; then
        how+=(--test-threads=1 --nocapture)
    fi
    [ "$(id -u)" -ne 0 ] || how=(unshare --mount "${how[@]}")
    (cd "$folder" && echo "== $folder: $name" && "${how[@]}") >"$LOGS/${file##*/}" 2>&1 </dev/null
    local status=$?
    echo "$((SECONDS - start)) s  $name" >>"$TIMES"
    flock "$LOGS" cat "$LOGS/${file##*/}"
    return "$status"
}
export -f program
export LOGS=$logs EVERYTHING="${everything[*]}" OWN=$own PROGRAMS=$programs TIMES=$times
longest=(engines dialects attacks hook_only_attacks cluster_install node packages configure slurm admission meter images
    upgrade giving_back walkthrough)
ordered() {
    local name
    for name in "${longest[@]}"; do awk -v name="$name" '$2 == name { print $3 }' "$programs"; done
    awk -v names=" ${longest[*]} " '!index(names, " " $2 " ") { print $3 }' "$programs"
}
[ -s "$programs" ] || { echo "no test program was found" >&2; failed=1; }
run xargs -P 2 -I{} bash -c 'program "$1"' _ {} < <(ordered)

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
