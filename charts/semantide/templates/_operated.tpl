{{/* Pods that an operator makes for this release, be it the release's own operator or another one's: whatever they need stands in their resources. */}}

{{/* One template over another, as JSON: arguments base, over. The rules are those of shared/pod_template.py. */}}
{{- define "semantide.merged" -}}
{{- $result := deepCopy .base -}}
{{- $named := dict "env" "name" "volumes" "name" "volumeMounts" "mountPath" "imagePullSecrets" "name" "initContainers" "name" "ports" "containerPort" -}}
{{- range $key, $value := .over -}}
{{- $below := get $result $key -}}
{{- if and (kindIs "map" $below) (kindIs "map" $value) -}}
{{- $_ := set $result $key (include "semantide.merged" (dict "base" $below "over" $value) | fromJson) -}}
{{- else if and (kindIs "slice" $below) (kindIs "slice" $value) -}}
{{- $kept := list -}}
{{- range $entry := $below -}}
{{- $replaced := false -}}
{{- with get $named $key -}}
{{- $name := . -}}
{{- range $value -}}
{{- if eq (get . $name | toJson) (get $entry $name | toJson) -}}{{- $replaced = true -}}{{- end -}}
{{- end -}}
{{- end -}}
{{- if not $replaced -}}{{- $kept = append $kept $entry -}}{{- end -}}
{{- end -}}
{{- $_ := set $result $key (concat $kept $value) -}}
{{- else -}}
{{- $_ := set $result $key $value -}}
{{- end -}}
{{- end -}}
{{- toJson $result -}}
{{- end -}}

{{/* Which release a resource belongs to: an operator then adds nothing of its own. */}}
{{- define "semantide.release" -}}
semantide.io/release: {{ .Release.Name }}
{{- end -}}

{{/* The same surroundings as a process of the release has: arguments root, ranks (whether processes of one pod may work together). */}}
{{- define "semantide.surroundings" -}}
labels:
  semantide.io/data: {{ include "semantide.dataClaim" .root }}
annotations:
  checksum/settings: {{ include "semantide.settings" .root | sha256sum }}
serviceAccountName: {{ include "semantide.serviceAccountName" .root }}
automountServiceAccountToken: false
enableServiceLinks: false
imagePullPolicy: {{ .root.Values.imagePullPolicy }}
{{- with include "semantide.pullSecrets" .root }}
{{ . }}
{{- end }}
securityContext:
  {{- include "semantide.podSecurity" .root | nindent 2 }}
containerSecurityContext:
  {{- include "semantide.containerSecurity" .root | nindent 2 }}
{{- if eq .root.Values.dataAccessMode "ReadWriteOnce" }}
affinity:
  {{- include "semantide.dataAffinity" .root | nindent 2 }}
{{- end }}
envFrom:
  {{- include "semantide.environmentFrom" .root | nindent 2 }}
env:
  - name: SEMANTIDE_REDIS_URL
    valueFrom:
      {{- include "semantide.redisUrl" .root | nindent 6 }}
volumes:
  {{- include "semantide.volumes" . | trim | nindent 2 }}
volumeMounts:
  {{- include "semantide.volumeMounts" . | trim | nindent 2 }}
{{- end -}}

{{/* What answering requests needs besides: jobs answer nobody, and know no key. */}}
{{- define "semantide.answering" -}}
env:
  - name: SEMANTIDE_API_KEYS
    valueFrom:
      {{- include "semantide.apiKeys" . | nindent 6 }}
  # An operator of another release reads the load here: it has no key of this one's.
  - name: SEMANTIDE_METRICS_PORT
    value: "9100"
  - name: SEMANTIDE_METRICS_HOST
    value: {{ .Values.listenAddress | quote }}
ports:
  - name: metrics
    containerPort: 9100
    protocol: TCP
{{- end -}}

{{/* Templates of pods of jobs and of replicas, as JSON. */}}
{{- define "semantide.jobTemplate" -}}
{{- include "semantide.merged" (dict "base" (include "semantide.surroundings" (dict "root" . "ranks" true) | fromYaml) "over" .Values.operatorPodTemplate) -}}
{{- end -}}

{{- define "semantide.replicaTemplate" -}}
{{- $template := include "semantide.merged" (dict "base" (include "semantide.surroundings" (dict "root" . "ranks" false) | fromYaml) "over" (include "semantide.answering" . | fromYaml)) | fromJson -}}
{{- include "semantide.merged" (dict "base" $template "over" .Values.operatorPodTemplate) -}}
{{- end -}}

{{/* A part of a spec with its pods' image and, where they ask for devices, what these are, as JSON: arguments root, spec, npus. */}}
{{- define "semantide.withDevices" -}}
{{- $own := dict "image" (include "semantide.image" .root) -}}
{{- if .npus -}}
{{- $own = dict "image" (printf "%s%s" $own.image .root.Values.deviceImageSuffix) "profile" .root.Values.operatorProfile -}}
{{- /* The resource's name is that profile's. */}}
{{- if and .root.Values.operatorResourceName (eq (.spec.profile | default $own.profile) $own.profile) -}}
{{- $_ := set $own "resourceName" .root.Values.operatorResourceName -}}
{{- end -}}
{{- end -}}
{{- include "semantide.merged" (dict "base" $own "over" .spec) -}}
{{- end -}}

{{/* What the NPUJobs of this release have in common, as JSON; settings.clusterJobs goes over it. */}}
{{- define "semantide.clusterJobs" -}}
{{- $labels := merge (dict "app.kubernetes.io/instance" .Release.Name) (include "semantide.release" . | fromYaml) -}}
{{- $default := include "semantide.withDevices" (dict "root" . "npus" 0 "spec" (dict "template" (include "semantide.jobTemplate" . | fromJson))) | fromJson -}}
{{- $kinds := dict -}}
{{- range $kind, $resources := .Values.jobResources -}}
{{- if and (kindIs "map" $resources) (not $.Values.operatorPodTemplate.resources) -}}
{{- $_ := set $kinds $kind (dict "template" (dict "resources" $resources)) -}}
{{- end -}}
{{- end -}}
{{- range $kind, $spec := .Values.jobKinds -}}
{{- if kindIs "map" $spec -}}
{{- if and (hasKey $kinds $kind) (not (dig "template" "resources" "" $spec)) -}}
{{- $spec = include "semantide.merged" (dict "base" (get $kinds $kind) "over" $spec) | fromJson -}}
{{- end -}}
{{- $_ := set $kinds $kind (ternary (include "semantide.withDevices" (dict "root" $ "npus" $spec.npusPerPod "spec" $spec) | fromJson) $spec (gt (int $spec.npusPerPod) 0)) -}}
{{- end -}}
{{- end -}}
{{- include "semantide.merged" (dict "base" (dict "labels" $labels "default" $default "kinds" $kinds) "over" (.Values.settings.clusterJobs | default dict)) -}}
{{- end -}}

{{/* What all processes are told, besides how jobs become NPUJobs. */}}
{{- define "semantide.settings" -}}
SEMANTIDE_DATA_DIR: /data
SEMANTIDE_HOST: {{ .Values.listenAddress | quote }}
SEMANTIDE_PORT: "8000"
{{- if not .Values.settings.importRoots }}
SEMANTIDE_IMPORT_ROOTS: /data/uploads
{{- end }}
{{- if and .Values.operatorEnabled (not .Values.settings.operatorUrl) }}
SEMANTIDE_OPERATOR_URL: http://{{ include "semantide.name" . }}-operator:8080
{{- end }}
{{- range $name, $value := omit .Values.settings "clusterJobs" }}
SEMANTIDE_{{ $name | snakecase | upper }}: {{ (kindIs "string" $value | ternary $value (toJson $value)) | quote }}
{{- end }}
{{- end -}}
