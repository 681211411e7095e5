#!/bin/sh
# Makes .cache/python: a virtual environment with the Python clients of requirements.txt. Prints its folder.
# Quick when it is there and requirements.txt has not changed. Exit 3: it cannot be made on this machine.
set -eu

top=$(cd "$(dirname "$0")/../.." && pwd)
# shellcheck source=tests/setup/cache.sh
. "$top/tests/setup/cache.sh"
requirements=$top/tests/setup/requirements.txt
# By its own path, since a program of the environment names its interpreter so: other checkouts use it too.
venv=$(cd "$top/.cache" && pwd -P)/python

# The distribution's own interpreter: its files are found in a container whose root is this machine's.
python=/usr/bin/python3
[ -x "$python" ] || {
    echo "python.sh: $python is missing: run tests/setup/packages.sh first" >&2
    exit 3
}

wanted=$(cat "$requirements" "$0" | cksum)-$("$python" --version)-$venv
if [ "$(cat "$venv/made-from" 2>/dev/null)" = "$wanted" ]; then
    echo "$venv"
    exit 0
fi

rm -rf "$venv"
"$python" -m venv "$venv" || {
    echo "python.sh: no virtual environment could be made: is python3-venv installed?" >&2
    exit 3
}
"$venv/bin/pip" install --quiet --disable-pip-version-check --no-deps --requirement "$requirements" || {
    echo "python.sh: the packages of requirements.txt could not be installed from this machine's package index" >&2
    exit 3
}
echo "$wanted" >"$venv/made-from"
echo "$venv"
