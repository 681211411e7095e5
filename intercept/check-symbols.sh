#!/bin/sh
# Gates of an interception library: check-symbols.sh LIBRARY. Prints what is wrong and exits 1.
#   one NEEDED, the driver's private path; no versioned symbol; no thread-local storage; no reachable panic; no
#   exported name that is not the driver's; and no relocation against one, which a driver may lack and we with it.
set -eu
library=$1
fail=0
wrong() {
    echo "$library: $*" >&2
    fail=1
}

needed=$(readelf -dW "$library" | sed -n 's/.*(NEEDED).*\[\(.*\)\]/\1/p')
soname=$(readelf -dW "$library" | sed -n 's/.*(SONAME).*\[\(.*\)\]/\1/p')
case $soname in
libcuda.so.1) names='cu[A-Z][A-Za-z0-9_]*' private=cuda ;;
libnvidia-ml.so.1) names='nvml[A-Z][A-Za-z0-9_]*' private=nvidia-ml ;;
*) wrong "SONAME is '$soname'"; names='' private='' ;;
esac
[ "$needed" = "/usr/lib/gpushare/driver/$private" ] || wrong "NEEDED is '$needed'"

symbols=$(readelf --dyn-syms -W "$library" | awk 'NR > 3 && $8 != "" { print $7, $8 }')
# The C library is not NEEDED; these names are in every C library that a CUDA program can have.
for name in $(echo "$symbols" | awk '$1 == "UND" { print $2 }'); do
    case $name in
    dl_iterate_phdr | memcpy | memmove | memset | memcmp | bcmp | strlen | getenv | setenv) ;;
    gpushare_panic_is_reachable) wrong "a panic is reachable" ;;
    *) wrong "needs $name" ;;
    esac
done
for name in $(echo "$symbols" | awk '$1 != "UND" { print $2 }'); do
    echo "$name" | grep -qx "$names" || wrong "exports $name"
done
relocated=$(readelf -rW "$library" | awk '$1 ~ /^[0-9a-f]+$/ && NF > 5 { print $5 }')
for name in $(echo "$symbols" | awk '$1 != "UND" { print $2 }'); do
    echo "$relocated" | grep -qx "$name" && wrong "relocates against its own $name"
done
readelf -VW "$library" | grep -q 'No version information' || wrong "has versioned symbols"
if readelf -lW "$library" | grep -q ' TLS '; then wrong "has thread-local storage"; fi
readelf -lW "$library" | grep 'GNU_STACK' | grep -q 'RWE' && wrong "wants an executable stack"
readelf -dW "$library" | grep -q 'NODELETE' || wrong "can be unloaded"
exit "$fail"
