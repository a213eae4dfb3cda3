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

{{/* The pod of one process: arguments root, process (its values), component, command (list), http (whether it serves HTTP). */}}
{{- define "semantide.pod" -}}
metadata:
  labels:
    {{- include "semantide.selector" . | nindent 4 }}
    semantide.io/data: {{ include "semantide.dataClaim" .root }}
  annotations:
    checksum/settings: {{ include (print .root.Template.BasePath "/settings.yaml") .root | sha256sum }}
    {{- with .process.podAnnotations }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
spec:
  serviceAccountName: {{ include "semantide.serviceAccountName" .root }}
  automountServiceAccountToken: false
  enableServiceLinks: false
  terminationGracePeriodSeconds: {{ ternary 45 75 .http }}
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
  {{- if eq .root.Values.dataAccessMode "ReadWriteOnce" }}
  {{- /* Such a volume is mounted on one node: without this, pods elsewhere would wait for it without end. */}}
  affinity:
    podAffinity:
      requiredDuringSchedulingIgnoredDuringExecution:
        - topologyKey: kubernetes.io/hostname
          labelSelector:
            matchLabels:
              semantide.io/data: {{ include "semantide.dataClaim" .root }}
  {{- end }}
  containers:
    - name: {{ ternary "api" "worker" .http }}
      image: {{ .process.image | default (include "semantide.image" .root) | quote }}
      imagePullPolicy: {{ .root.Values.imagePullPolicy }}
      command: {{ toJson .command }}
      envFrom:
        - configMapRef:
            name: {{ include "semantide.name" .root }}-settings
        {{- with .root.Values.environmentSecret }}
        - secretRef:
            name: {{ . }}
        {{- end }}
      env:
        - name: SEMANTIDE_REDIS_URL
          valueFrom:
            secretKeyRef:
              {{- if .root.Values.redisEnabled }}
              name: {{ include "semantide.secretName" .root }}
              key: redis-url
              {{- else }}
              name: {{ .root.Values.redisUrlSecret }}
              key: {{ .root.Values.redisUrlSecretKey }}
              {{- end }}
        {{- if .http }}
        - name: SEMANTIDE_API_KEYS
          valueFrom:
            secretKeyRef:
              {{- if .root.Values.apiKeysSecret }}
              name: {{ .root.Values.apiKeysSecret }}
              key: {{ .root.Values.apiKeysSecretKey }}
              {{- else }}
              name: {{ include "semantide.secretName" .root }}
              key: api-keys
              {{- end }}
        {{- else }}
        - name: SEMANTIDE_METRICS_PORT
          value: "9100"
        {{- end }}
        - name: OMP_NUM_THREADS
          value: {{ .process.threads | default 1 | toJson | quote }}
      {{- if .http }}
      ports:
        - name: http
          containerPort: 8000
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
        - name: data
          mountPath: /data
        - name: tmp
          mountPath: /tmp
  volumes:
    - name: data
      persistentVolumeClaim:
        claimName: {{ include "semantide.dataClaim" .root }}
    - name: tmp
      emptyDir: {}
{{- end -}}
