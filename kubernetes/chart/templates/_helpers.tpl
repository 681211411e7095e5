{{- define "gpushare.image" -}}
{{ printf "%s:%s" .Values.image.repository (.Values.image.tag | default .Chart.AppVersion) | toYaml }}
{{- end }}

{{/* The folder of the programs on a node. */}}
{{- define "gpushare.programs" -}}
{{ .Values.installer.enabled | ternary (printf "%s/current/bin" .Values.installer.folder) .Values.nodes.programs }}
{{- end }}

{{/* gpushare-kube in a container that does not enter the node: the image's, else the node's, mounted at its own path. */}}
{{- define "gpushare.kube" -}}
{{ .Values.installer.enabled | ternary "/opt/gpushare/bin" .Values.nodes.programs }}/gpushare-kube
{{- end }}

{{/* While nodes are emptied, nothing runs that needs the programs there. */}}
{{- define "gpushare.stays" -}}
{{ if or (not .Values.installer.enabled) (eq .Values.installer.mode "install") }}yes{{ end }}
{{- end }}

{{/* The first container of pods that run a node's programs: it ends when these are the image's. */}}
{{- define "gpushare.wait" -}}
initContainers:
  - name: wait
    image: {{ include "gpushare.image" . }}
    imagePullPolicy: {{ .Values.image.pullPolicy }}
    command: [/usr/lib/gpushare/node.sh, wait]
    env:
      - {name: HOST, value: ""}
      - {name: FOLDER, value: /node}
    resources:
      requests: {cpu: 1m, memory: 8Mi}
      limits: {memory: 64Mi}
    securityContext:
      allowPrivilegeEscalation: false
      readOnlyRootFilesystem: true
      capabilities: {drop: [ALL]}
      seccompProfile: {type: RuntimeDefault}
    volumeMounts:
      - {name: installed, mountPath: /node, readOnly: true}
{{- end }}

{{- define "gpushare.secrets" -}}
{{- with .Values.imagePullSecrets }}
imagePullSecrets:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end }}
