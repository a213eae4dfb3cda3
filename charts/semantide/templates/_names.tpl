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

{{/* Which addresses a Service has. */}}
{{- define "semantide.ipFamilies" -}}
{{- with .Values.serviceIpFamilyPolicy }}ipFamilyPolicy: {{ . }}{{ end -}}
{{- end -}}

{{- define "semantide.secretName" -}}
{{ include "semantide.name" . }}-keys
{{- end -}}

{{- define "semantide.serviceAccountName" -}}
{{- if not (or .Values.serviceAccountName .Values.serviceAccountCreate) -}}
{{- fail "serviceAccountCreate is false and serviceAccountName is empty: name an account of yours, or set serviceAccountCreate=true; the namespace's default account, which any pod there has, must not get the rooms' rights" -}}
{{- end -}}
{{ .Values.serviceAccountName | default (include "semantide.name" .) }}
{{- end -}}

{{- define "semantide.dataClaim" -}}
{{ .Values.dataExistingClaim | default (printf "%s-data" (include "semantide.name" .)) }}
{{- end -}}

{{/* Name of one worker: arguments root, room. */}}
{{- define "semantide.workerName" -}}
{{ include "semantide.name" .root }}-worker-{{ .room }}
{{- end -}}

{{/* Name of the Service behind an entry of ingressPaths: arguments root, path, key. */}}
{{- define "semantide.backend" -}}
{{- if and (eq .key "router") .root.Values.servingReplicas -}}
{{- $apis := list }}{{ range list "all" "serving" }}{{ if kindIs "map" (get $.root.Values.apis .) }}{{ $apis = append $apis . }}{{ end }}{{ end -}}
{{- /* Until there are routers an API answers, where one may. */}}
{{- if or (include "semantide.knowsReplicas" .root) (not $apis) -}}
{{ include "semantide.name" .root }}-router
{{- else -}}
{{ include "semantide.apiName" (dict "root" .root "key" (first $apis)) }}
{{- end -}}
{{- else if kindIs "map" (get .root.Values.apis .key) -}}
{{ include "semantide.apiName" . }}
{{- else -}}
{{- fail (printf "ingressPaths: %s leads to the API %q, which is not in apis (%s): add it there, name one of those, or take the path out with null" .path .key (keys .root.Values.apis | sortAlpha | join ", ")) -}}
{{- end -}}
{{- end -}}

{{/* Name of one NPUService: arguments root, key. */}}
{{- define "semantide.replicasName" -}}
{{ include "semantide.name" .root }}-replicas-{{ .key }}
{{- end -}}

{{/* Whether the cluster knows NPUServices: not before this chart has brought them there. */}}
{{- define "semantide.knowsReplicas" -}}
{{- if .Capabilities.APIVersions.Has "semantide.io/v1alpha1/NPUService" }}true{{ end -}}
{{- end -}}

{{/* The console's values, with where the APIs are that it shows, as JSON: arguments root, process. */}}
{{- define "semantide.consoleProcess" -}}
{{- range list "replicas" "maxReplicas" -}}
{{- if gt (int (get $.process .)) 1 -}}
{{- fail (printf "apis.console.%s is %v: a page lives in the process that made it, and its websocket would reach another one; leave the console at 1 replica" . (get $.process .)) -}}
{{- end -}}
{{- end -}}
{{- $environment := .process.environment | default dict -}}
{{- if not (or .root.Values.settings.consoleStack $environment.SEMANTIDE_CONSOLE_STACK) -}}
{{- if not (kindIs "map" .root.Values.apis.all) -}}
{{- fail "apis.console has no API `all` to show: settings.consoleStack names the address at which the routes of all rooms are reached, or apis.console=null leaves the console out" -}}
{{- end -}}
{{- $address := printf "http://%s:%v" (include "semantide.apiName" (dict "root" .root "key" "all")) .root.Values.servicePort -}}
{{- $environment = merge (dict "SEMANTIDE_CONSOLE_STACK" $address) $environment -}}
{{- end -}}
{{- merge (dict "environment" $environment) .process | toJson -}}
{{- end -}}

{{/* All processes that are on, as JSON: {"processes": [{name, component, command, room, values, http}]}. */}}
{{- define "semantide.processes" -}}
{{- $root := . -}}
{{- $found := list -}}
{{- range $key, $process := .Values.apis -}}
{{- if kindIs "map" $process -}}
{{- if eq $key "console" -}}
{{- $process = include "semantide.consoleProcess" (dict "root" $root "process" $process) | fromJson -}}
{{- end -}}
{{- $found = append $found (dict "name" (include "semantide.apiName" (dict "root" $root "key" $key)) "component" (printf "api-%s" $key) "command" (list "semantide" "api" $key) "room" $key "values" $process "http" true) -}}
{{- end -}}
{{- end -}}
{{- $replicas := list -}}
{{- /* Routers without replicas would never be ready, and `helm install --wait` would wait for them. */}}
{{- range $key, $spec := .Values.servingReplicas -}}
{{- if and (kindIs "map" $spec) (include "semantide.knowsReplicas" $root) -}}
{{- $replicas = append $replicas (printf "http://%s:8000" (include "semantide.replicasName" (dict "root" $root "key" $key))) -}}
{{- end -}}
{{- end -}}
{{- with $replicas -}}
{{- $environment := merge (dict "SEMANTIDE_ROUTE_TO" (join "," .)) ($root.Values.router.environment | default dict) -}}
{{- $found = append $found (dict "name" (printf "%s-router" (include "semantide.name" $root)) "component" "router" "command" (list "semantide" "route") "room" "router" "values" (merge (dict "environment" $environment) $root.Values.router) "http" true) -}}
{{- end -}}
{{- range $room, $process := .Values.workers -}}
{{- if kindIs "map" $process -}}
{{- $found = append $found (dict "name" (include "semantide.workerName" (dict "root" $root "room" $room)) "component" (printf "worker-%s" $room) "command" (list "semantide" "worker" $room) "room" $room "values" $process "http" false) -}}
{{- end -}}
{{- end -}}
{{- dict "processes" $found | toJson -}}
{{- end -}}

{{/* The rule by which clients reach what serves HTTP. */}}
{{- define "semantide.httpIngress" -}}
- ports:
    - port: http
  {{- with .Values.networkPolicyApiNamespaces }}
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

{{/* A whole quantity (8Gi) as a number. */}}
{{- define "semantide.bytes" -}}
{{- $units := dict "" 1 "k" 1000 "M" 1000000 "G" 1000000000 "T" 1000000000000 "Ki" 1024 "Mi" 1048576 "Gi" 1073741824 "Ti" 1099511627776 -}}
{{- mul (regexFind "^[0-9]+" . | int64) (get $units (regexFind "[A-Za-z]*$" .) | int64) -}}
{{- end -}}

{{/* A StatefulSet's volumes are made once: what the API server would refuse half-way through an upgrade is said before anything is changed. */}}
{{- define "semantide.redisVolumeUnchanged" -}}
{{- $name := printf "%s-redis" (include "semantide.name" .) -}}
{{- with lookup "apps/v1" "StatefulSet" .Release.Namespace $name -}}
{{- $claim := (first .spec.volumeClaimTemplates).spec -}}
{{- $size := $claim.resources.requests.storage | toString -}}
{{- $remedy := printf "to have another one set spec.resources.requests.storage of the claim data-%s-0 where its class allows to grow, delete the StatefulSet with `kubectl delete statefulset %s --namespace %s --cascade=orphan`, and upgrade again" $name $name $.Release.Namespace -}}
{{- if ne (include "semantide.bytes" $size) (include "semantide.bytes" $.Values.redisStorageSize) -}}
{{- fail (printf "redisStorageSize is %s, and Redis' volume in the cluster was made with %s, which Kubernetes cannot change in place: set redisStorageSize=%s; %s" $.Values.redisStorageSize $size $size $remedy) -}}
{{- end -}}
{{- if ne ($claim.storageClassName | default "") $.Values.redisStorageClass -}}
{{- fail (printf "redisStorageClass is %q, and Redis' volume in the cluster was made with %q, which Kubernetes cannot change: set redisStorageClass=%s; for a volume of another class copy the data (docs/operations.md, Backup), delete the StatefulSet and its claim data-%s-0, and upgrade again" $.Values.redisStorageClass ($claim.storageClassName | default "") ($claim.storageClassName | default "") $name) -}}
{{- end -}}
{{- end -}}
{{- end -}}
