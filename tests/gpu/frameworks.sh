# Sourced by run.sh: frameworks that the machine has, in shares. frameworks.py is what they run.

# MiB of the share that each gets.
framework_share=6144

# has MODULE...: whether the machine's Python has all of them.
has() {
    [ -n "$python" ] && "$python" - "$@" 2>/dev/null <<'PYTHON'
import importlib.util, sys
sys.exit(not all(importlib.util.find_spec(name) for name in sys.argv[1:]))
PYTHON
}

# framework SECONDS NAME...: runs the row's case, which needs these modules. The case prints figures as KEY VALUE, `held MIB` when
# the host should look, and last `right` or `wrong: REASON`.
framework() {
    local seconds=$1 case=${row#*_} missing base said last used=0
    shift
    missing=$(missing_of "$@")
    if [ -n "$missing" ]; then
        skip "reason=no_$missing"
        return
    fi
    base=$(used_before)
    start program "GPUSHARE_MEMORY=${framework_share}MiB" "SHARE_MIB=$framework_share" NCCL_SOCKET_IFNAME=lo TRITON_CACHE_DIR=/tmp/triton \
        TORCHINDUCTOR_CACHE_DIR=/tmp/inductor NUMBA_CACHE_DIR=/tmp/numba ${PYTHONPATH:+"PYTHONPATH=$PYTHONPATH"} -- \
        "exec \$PYTHON $top/frameworks.py $case" || return
    if await program '^held' "$seconds"; then used=$(used_since "$base"); fi
    said=$(finish "$seconds" program)
    last=$(tail -n 1 <<<"$said")
    if [ "$last" != right ] && ! all_work_on_host "$@"; then
        skip "reason=it_fails_on_the_host_too"
        return
    fi
    verdict '[ "$last" = right ] && [ "$used" -le "$framework_share" ]' \
        "share_mib=$framework_share host_mib=$used $(awk 'NF == 2 { printf "%s=%s ", $1, $2 }' <<<"$said")" \
        "$(tr ' ' '_' <<<"${last:-no_answer}" | cut -c1-160) $([ "$last" = right ] || why program)"
}

# all_work_on_host NAME...: whether these frameworks work without gpushare.
all_work_on_host() {
    local name
    for name; do
        env "${host_environment[@]}" timeout 40 "$python" "$top/frameworks.py" on_host "$name" 2>&1 | tee >(note "on_host_$name") | grep -q '^right' || return 1
    done
}

# missing_of NAME...: the first of these modules that cannot be used here.
missing_of() {
    local name
    if [ -z "$python" ]; then
        echo python3
        return
    fi
    for name; do
        # These use CUDA's runtime library, which does not run on the simulated driver.
        case $simulator$name in yestorch | yescupy | yesjax) echo "${name}_on_a_simulated_GPU" && return ;; esac
        has "$name" || { echo "$name" && return; }
    done
}

row_07_framework() { framework 45 torch; }
row_31_torch_compile() { framework 80 torch triton; }
row_32_expandable_segments() { framework 40 torch; }
row_33_jax_preallocation() { framework 50 jax; }
row_34_cupy_pools() { framework 40 cupy; }
row_35_managed_memory() { framework 35 cupy; }
row_36_spawn() { framework 50 torch; }
row_37_ipc() { framework 50 torch; }
row_38_nccl() { framework 50 torch; }

# Small programs of what else there is, all in one container.
row_18_frameworks() {
    local name present='' said wrong=''
    for name in numba pynvml cuda.core transformers; do
        [ -n "$(missing_of "$name")" ] || { [ "$name$simulator" != transformersyes ] && present="$present $name"; }
    done
    if [ -z "$present" ]; then
        skip "reason=no_numba_pynvml_cuda.core_transformers"
        return
    fi
    said=$(container 50 small "GPUSHARE_MEMORY=${framework_share}MiB" "SHARE_MIB=$framework_share" NUMBA_CACHE_DIR=/tmp/numba ${PYTHONPATH:+"PYTHONPATH=$PYTHONPATH"} -- \
        "for name in$present; do echo \"\$name \$(\$PYTHON $top/frameworks.py \$name | tail -n 1 | tr ' ' '_')\"; done")
    for name in $(awk '$2 != "right" { print $1 }' <<<"$said"); do
        ! all_work_on_host "$name" || wrong="$wrong $name"
    done
    verdict '[ -n "$said" ] && [ -z "$wrong" ]' "$(awk '{ printf "%s=%s ", $1, $2 }' <<<"$said")"
}
