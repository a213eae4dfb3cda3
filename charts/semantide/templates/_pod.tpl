{{/* Who the process is: nobody in particular, with no way up. */}}
{{- define "semantide.podSecurity" -}}
runAsNonRoot: true
runAsUser: 10001
runAsGroup: 10001
fsGroup: 10001
fsGroupChangePolicy: OnRootMismatch
seccompProfile:
  type: RuntimeDefault
{{- end -}}

{{- define "semantide.containerSecurity" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities:
  drop: [ALL]
{{- end -}}

{{/* The image's pull secrets. */}}
{{- define "semantide.pullSecrets" -}}
{{- $names := list -}}
{{- range $name, $on := .Values.imagePullSecrets }}{{ if $on }}{{ $names = append $names (dict "name" $name) }}{{ end }}{{ end -}}
{{- with $names }}imagePullSecrets: {{ toJson . }}{{ end -}}
{{- end -}}

{{/* Where the API keys are, and where the broker's address is. */}}
{{- define "semantide.apiKeys" -}}
secretKeyRef:
  {{- if .Values.apiKeysSecret }}
  name: {{ .Values.apiKeysSecret }}
  key: {{ .Values.apiKeysSecretKey }}
  {{- else }}
  name: {{ include "semantide.secretName" . }}
  key: api-keys
  {{- end }}
{{- end -}}

{{- define "semantide.redisUrl" -}}
secretKeyRef:
  {{- if .Values.redisEnabled }}
  name: {{ include "semantide.secretName" . }}
  key: redis-url
  {{- else }}
  name: {{ .Values.redisUrlSecret }}
  key: {{ .Values.redisUrlSecretKey }}
  {{- end }}
{{- end -}}

{{/* A start may take 60 x 5 s: time to load a large model. */}}
{{- define "semantide.probes" -}}
{{- if .http }}
startupProbe:
  httpGet: {path: /healthz, port: http}
  periodSeconds: 5
  failureThreshold: 60
livenessProbe:
  httpGet: {path: /healthz, port: http}
  periodSeconds: 15
  timeoutSeconds: 5
  failureThreshold: 4
readinessProbe:
  httpGet: {path: /readyz, port: http}
  periodSeconds: 5
  timeoutSeconds: 5
{{- else }}
{{- /* A worker answers on its own loopback alone. */}}
{{- $check := list "python" "-c" "import os, urllib.request as web; web.urlopen(f'http://127.0.0.1:{os.environ[\"SEMANTIDE_METRICS_PORT\"]}/metrics', timeout=4)" }}
startupProbe:
  exec: {command: {{ toJson $check }}}
  periodSeconds: 5
  timeoutSeconds: 10
  failureThreshold: 60
livenessProbe:
  exec: {command: {{ toJson $check }}}
  periodSeconds: 30
  timeoutSeconds: 10
  failureThreshold: 4
{{- end }}
{{- end -}}

{{/* A volume of one node is mounted there alone: without this, pods elsewhere would wait for it without end. */}}
{{- define "semantide.dataAffinity" -}}
podAffinity:
  requiredDuringSchedulingIgnoredDuringExecution:
    - topologyKey: kubernetes.io/hostname
      labelSelector:
        matchLabels:
          semantide.io/data: {{ include "semantide.dataClaim" . }}
{{- end -}}

{{- define "semantide.settingsFrom" -}}
- configMapRef:
    name: {{ include "semantide.name" . }}-settings
{{- end -}}

{{- define "semantide.environmentFrom" -}}
{{ include "semantide.settingsFrom" . }}
{{- with .Values.environmentSecret }}
- secretRef:
    name: {{ . }}
{{- end }}
{{- end -}}

{{/* Arguments root, ranks, outside (whether it has no data): ranks of one pod and the workers of their loaders pass tensors through /dev/shm, of which a container has 64 MiB by itself. */}}
{{- define "semantide.volumes" -}}
{{- if not .outside }}
- name: data
  persistentVolumeClaim:
    claimName: {{ include "semantide.dataClaim" .root }}
{{- end }}
- name: tmp
  emptyDir: {}
{{- if .ranks }}
- name: shared-memory
  emptyDir: {medium: Memory, sizeLimit: {{ .root.Values.sharedMemorySize }}}
{{- end }}
{{- end -}}

{{- define "semantide.volumeMounts" -}}
{{- if not .outside }}
- name: data
  mountPath: /data
{{- end }}
- name: tmp
  mountPath: /tmp
{{- if .ranks }}
- name: shared-memory
  mountPath: /dev/shm
{{- end }}
{{- end -}}

{{/* The pod of one process: arguments root, process (its values), component, command (list), http (whether it serves HTTP). */}}
{{- define "semantide.pod" -}}
{{- /* The console asks the APIs for everything: it gets neither the broker nor the data, nor what opens an object store. */}}
{{- $inside := ne .component "api-console" -}}
metadata:
  labels:
    {{- include "semantide.selector" . | nindent 4 }}
    {{- if $inside }}
    semantide.io/data: {{ include "semantide.dataClaim" .root }}
    {{- end }}
    {{- if .root.Values.metricsEnabled }}
    semantide.io/metrics: shown
    {{- end }}
  annotations:
    checksum/settings: {{ include (print .root.Template.BasePath "/settings.yaml") .root | sha256sum }}
    {{- with .process.podAnnotations }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
spec:
  serviceAccountName: {{ include "semantide.serviceAccountName" .root }}
  {{- /* A worker whose jobs are NPUJobs asks the API server for them; nothing else has business there. */}}
  automountServiceAccountToken: {{ and (not .http) (eq (.root.Values.settings.jobRunner | default "process") "cluster") }}
  enableServiceLinks: false
  {{- /* A worker's jobs have their time for a last checkpoint within it. */}}
  terminationGracePeriodSeconds: {{ ternary 45 (add 55 (.root.Values.settings.jobStopSeconds | default 20 | ceil | int)) .http }}
  {{- with include "semantide.pullSecrets" .root }}
  {{- . | nindent 2 }}
  {{- end }}
  securityContext:
    {{- include "semantide.podSecurity" . | nindent 4 }}
    {{- with .process.supplementalGroups }}
    supplementalGroups: {{ values . | toJson }}
    {{- end }}
  {{- with .process.runtimeClassName }}
  runtimeClassName: {{ . }}
  {{- end }}
  {{- with .process.priorityClassName }}
  priorityClassName: {{ . }}
  {{- end }}
  {{- with .process.nodeSelector }}
  nodeSelector:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- with .process.tolerations }}
  tolerations:
    {{- range $key, $toleration := . }}
    - {{ toJson (merge (dict "key" $key) $toleration) }}
    {{- end }}
  {{- end }}
  {{- if and $inside (eq .root.Values.dataAccessMode "ReadWriteOnce") }}
  affinity:
    {{- include "semantide.dataAffinity" .root | nindent 4 }}
  {{- else }}
  {{- /* One node that is lost should not take all replicas of a process. */}}
  topologySpreadConstraints:
    - topologyKey: kubernetes.io/hostname
      maxSkew: 1
      whenUnsatisfiable: ScheduleAnyway
      labelSelector:
        matchLabels:
          {{- include "semantide.selector" . | nindent 10 }}
  {{- end }}
  containers:
    - name: {{ ternary "api" "worker" .http }}
      image: {{ .process.image | default (include "semantide.image" .root) | quote }}
      imagePullPolicy: {{ .root.Values.imagePullPolicy }}
      command: {{ toJson .command }}
      envFrom:
        {{- if $inside }}
        {{- include "semantide.environmentFrom" .root | nindent 8 }}
        {{- else }}
        {{- include "semantide.settingsFrom" .root | nindent 8 }}
        {{- end }}
      env:
        {{- if $inside }}
        - name: SEMANTIDE_REDIS_URL
          valueFrom:
            {{- include "semantide.redisUrl" .root | nindent 12 }}
        {{- end }}
        {{- if .http }}
        - name: SEMANTIDE_API_KEYS
          valueFrom:
            {{- include "semantide.apiKeys" .root | nindent 12 }}
        {{- end }}
        {{- if or (not .http) .root.Values.metricsEnabled }}
        - name: SEMANTIDE_METRICS_PORT
          value: "9100"
        {{- end }}
        {{- if .root.Values.metricsEnabled }}
        - name: SEMANTIDE_METRICS_HOST
          value: {{ .root.Values.listenAddress | quote }}
        {{- end }}
        - name: OMP_NUM_THREADS
          value: {{ .process.threads | default 1 | toJson | quote }}
        {{- range $name, $value := .process.environment }}
        - name: {{ $name }}
          value: {{ $value | quote }}
        {{- end }}
      {{- if or .http .root.Values.metricsEnabled }}
      ports:
        {{- if .http }}
        - name: http
          containerPort: 8000
          protocol: TCP
        {{- end }}
        {{- if .root.Values.metricsEnabled }}
        - name: metrics
          containerPort: 9100
          protocol: TCP
        {{- end }}
      {{- end }}
      {{- if .http }}
      lifecycle:
        # The Service learns of the end first; requests that still come in are answered.
        preStop:
          exec: {command: [sleep, "5"]}
      {{- end }}
      {{- include "semantide.probes" . | trim | nindent 6 }}
      securityContext:
        {{- include "semantide.containerSecurity" . | nindent 8 }}
      resources:
        {{- $resources := .process.resources | default .root.Values.defaultResources }}
        {{- $accelerators := dict }}
        {{- range $name, $count := .process.accelerators }}{{ if $count }}{{ $_ := set $accelerators $name $count }}{{ end }}{{ end }}
        requests: {{ merge (dict) $accelerators ($resources.requests | default dict) | toJson }}
        limits: {{ merge (dict) $accelerators ($resources.limits | default dict) | toJson }}
      volumeMounts:
        {{- include "semantide.volumeMounts" (dict "root" .root "ranks" (not .http) "outside" (not $inside)) | trim | nindent 8 }}
  volumes:
    {{- include "semantide.volumes" (dict "root" .root "ranks" (not .http) "outside" (not $inside)) | trim | nindent 4 }}
{{- end -}}
