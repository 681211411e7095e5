#!/bin/sh
# Makes kubernetes/manifests and packaging/runtimeclass.yaml of the chart: manifests.sh HELM [TOP], in the checkout or
# below TOP. Whoever changes the chart runs it; a test compares. Kustomizations and what only they have stay.
#
# The folders are for nodes with a package, one for each part; `image` has what the chart makes by itself, with the
# installer.
set -eu

helm=$1
here=$(cd "$(dirname "$0")" && pwd)
top=${2-$(dirname "$here")}

# made VALUES FILE [TEMPLATE]: the objects of TEMPLATE, or all, without helm's own marks.
made() {
    mkdir -p "$(dirname "$top/$2")"
    printf '%s\n' "$1" | "$helm" template gpushare "$here/chart" --namespace gpushare --values - \
        ${3:+--show-only "templates/$3"} >"$top/$2.made"
    sed -i -e '/^# Source: /d' -e '/helm.sh\/resource-policy/d' -e '/^$/d' -e '1 { /^---$/d }' "$top/$2.made"
    mv -f "$top/$2.made" "$top/$2"
}

plain='
image: {repository: debian, tag: 12-slim}
namespace: {create: true}
installer: {enabled: false}
extender: {enabled: true}
webhook: {enabled: true}
'
for file in namespace rbac policy device-class node extender/rbac extender/configuration extender/scheduler \
    extender/disruption webhook/webhook webhook/configuration webhook/disruption; do
    made "$plain" "kubernetes/manifests/$file.yaml" "$file.yaml"
done
made "$plain" kubernetes/manifests/extender/roles/roles.yaml extender/roles.yaml
made "$plain" packaging/runtimeclass.yaml runtimeclass.yaml
made 'namespace: {create: true}' kubernetes/manifests/image/gpushare.yaml
