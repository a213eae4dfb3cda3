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
