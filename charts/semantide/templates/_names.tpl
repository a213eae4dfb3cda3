{{/* The release's name, with the chart's name where the release does not carry it. */}}
{{- define "semantide.name" -}}
{{- if contains .Chart.Name .Release.Name -}}
{{- .Release.Name | trunc 40 | trimSuffix "-" -}}
{{- else -}}
{{- printf "%s-%s" .Release.Name .Chart.Name | trunc 40 | trimSuffix "-" -}}
{{- end -}}
{{- end -}}

{{/* Name of one API: arguments root, key. */}}
{{- define "semantide.apiName" -}}
{{- if eq .key "all" -}}{{ include "semantide.name" .root }}-api{{- else -}}{{ include "semantide.name" .root }}-api-{{ .key }}{{- end -}}
{{- end -}}

{{/* What a Service selects by: arguments root, component. */}}
{{- define "semantide.selector" -}}
app.kubernetes.io/name: {{ .root.Chart.Name }}
app.kubernetes.io/instance: {{ .root.Release.Name }}
app.kubernetes.io/component: {{ .component }}
{{- end -}}

{{/* All labels: arguments root, component. */}}
{{- define "semantide.labels" -}}
{{ include "semantide.selector" . }}
app.kubernetes.io/version: {{ .root.Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .root.Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .root.Chart.Name .root.Chart.Version | replace "+" "_" }}
{{- end -}}

{{- define "semantide.image" -}}
{{ .Values.imageRepository }}:{{ .Values.imageTag | default .Chart.AppVersion }}
{{- end -}}

{{- define "semantide.secretName" -}}
{{ include "semantide.name" . }}-keys
{{- end -}}

{{- define "semantide.serviceAccountName" -}}
{{- if .Values.serviceAccountName -}}
{{ .Values.serviceAccountName }}
{{- else -}}
{{ ternary (include "semantide.name" .) "default" .Values.serviceAccountCreate }}
{{- end -}}
{{- end -}}

{{- define "semantide.dataClaim" -}}
{{ .Values.dataExistingClaim | default (printf "%s-data" (include "semantide.name" .)) }}
{{- end -}}

{{/* Name of one worker: arguments root, room. */}}
{{- define "semantide.workerName" -}}
{{ include "semantide.name" .root }}-worker-{{ .room }}
{{- end -}}

{{/* All processes that are on, as JSON: {"processes": [{name, component, values, http}]}. */}}
{{- define "semantide.processes" -}}
{{- $root := . -}}
{{- $found := list -}}
{{- range $key, $process := .Values.apis -}}
{{- if kindIs "map" $process -}}
{{- $found = append $found (dict "name" (include "semantide.apiName" (dict "root" $root "key" $key)) "component" (printf "api-%s" $key) "room" $key "values" $process "http" true) -}}
{{- end -}}
{{- end -}}
{{- range $room, $process := .Values.workers -}}
{{- if kindIs "map" $process -}}
{{- $found = append $found (dict "name" (include "semantide.workerName" (dict "root" $root "room" $room)) "component" (printf "worker-%s" $room) "room" $room "values" $process "http" false) -}}
{{- end -}}
{{- end -}}
{{- dict "processes" $found | toJson -}}
{{- end -}}

{{/* The rule by which a collector reaches the metrics. */}}
{{- define "semantide.metricsIngress" -}}
{{- if .Values.metricsEnabled }}
- ports:
    - port: metrics
  {{- with .Values.metricsNamespaces }}
  from:
    - podSelector: {}
    {{- range $namespace, $on := . }}
    {{- if $on }}
    - namespaceSelector:
        matchLabels:
          kubernetes.io/metadata.name: {{ $namespace }}
    {{- end }}
    {{- end }}
  {{- end }}
{{- end }}
{{- end -}}
