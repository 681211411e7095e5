#!/bin/sh
# Runs vectors.py in a container with 4 GiB of a simulated GPU: simulated.sh NODE, a folder made by `gpushare-simulator
# create`. As root; after `make build` and `make clients`. The container's root is this machine's, below an overlay.
set -eu

node=$(cd "$1" && pwd)
here=$(cd "$(dirname "$0")" && pwd)
top=$(cd "$here/../.." && pwd)
python=$(cd "$top/.cache/python" && pwd -P)/bin/python
PATH=$top/target/release:$PATH

work=$(mktemp -d)
mount -t tmpfs none "$work"
trap 'cd /; umount "$work/bundle/rootfs" "$work"; rmdir "$work"' EXIT
mkdir -p "$work/bundle/rootfs" "$work/upper" "$work/work"
mount -t overlay -o "lowerdir=/,upperdir=$work/upper,workdir=$work/work" none "$work/bundle/rootfs"
cp "$here/vectors.py" "$work/bundle/rootfs/tmp/"

cd "$work/bundle"
runc spec
sed -i -e 's|"terminal": true|"terminal": false|' \
    -e 's|"TERM=xterm"|"GPUSHARE_MEMORY=4GiB", "NUMBA_CACHE_DIR=/tmp"|' \
    -e "s|^\t\t\t\"sh\"|\t\t\t\"$python\", \"/tmp/vectors.py\"|" config.json
GPUSHARE_CONFIG=$node/gpushare.toml gpushare-runtime run "numba-$$"
