{{- define "rlhfless.name" -}}
{{- default .Chart.Name .Values.nameOverride | trunc 40 | trimSuffix "-" -}}
{{- end -}}

{{/* KubeRay adds up to 22 characters to a cluster's name, and refuses names of pods above 63. */}}
{{- define "rlhfless.fullname" -}}
{{- if .Values.fullnameOverride -}}
{{- .Values.fullnameOverride | trunc 36 | trimSuffix "-" -}}
{{- else if contains (include "rlhfless.name" .) .Release.Name -}}
{{- .Release.Name | trunc 36 | trimSuffix "-" -}}
{{- else -}}
{{- printf "%s-%s" .Release.Name (include "rlhfless.name" .) | trunc 36 | trimSuffix "-" -}}
{{- end -}}
{{- end -}}

{{- define "rlhfless.ray" -}}
{{- printf "%s-ray" (include "rlhfless.fullname" .) -}}
{{- end -}}

{{- define "rlhfless.selector" -}}
app.kubernetes.io/name: {{ include "rlhfless.name" . }}
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end -}}

{{- define "rlhfless.labels" -}}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version }}
{{ include "rlhfless.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
{{- end -}}

{{- define "rlhfless.image" -}}
{{- if .Values.image.digest -}}
{{- printf "%s@%s" .Values.image.repository .Values.image.digest -}}
{{- else -}}
{{- printf "%s:%s" .Values.image.repository (default .Chart.AppVersion .Values.image.tag) -}}
{{- end -}}
{{- end -}}

{{/* The image that the Ray cluster has, if it is not to take the new one. */}}
{{- define "rlhfless.rayImage" -}}
{{- $there := lookup "ray.io/v1" "RayCluster" .Release.Namespace (include "rlhfless.ray" .) -}}
{{- if and $there (not .Values.ray.takeNewImage) -}}
{{- (index $there.spec.headGroupSpec.template.spec.containers 0).image -}}
{{- else -}}
{{- include "rlhfless.image" . -}}
{{- end -}}
{{- end -}}

{{- define "rlhfless.url" -}}
{{- printf "http://%s.%s:%d" (include "rlhfless.fullname" .) .Release.Namespace (int .Values.service.port) -}}
{{- end -}}

{{- define "rlhfless.keySecret" -}}
{{- default (printf "%s-api-key" (include "rlhfless.fullname" .)) .Values.apiKey.existingSecret -}}
{{- end -}}

{{- define "rlhfless.dataClaim" -}}
{{- default (printf "%s-data" (include "rlhfless.fullname" .)) .Values.volumes.data.existingClaim -}}
{{- end -}}

{{- define "rlhfless.runsClaim" -}}
{{- default (printf "%s-runs" (include "rlhfless.fullname" .)) .Values.volumes.runs.existingClaim -}}
{{- end -}}

{{- define "rlhfless.cacheClaim" -}}
{{- default (printf "%s-cache" (include "rlhfless.fullname" .)) .Values.volumes.cache.existingClaim -}}
{{- end -}}

{{/* Bytes of a Kubernetes quantity. */}}
{{- define "rlhfless.bytes" -}}
{{- $units := dict "k" 1e3 "M" 1e6 "G" 1e9 "T" 1e12 "Ki" 1024 "Mi" 1048576 "Gi" 1073741824 "Ti" 1099511627776 -}}
{{- $unit := regexFind "[A-Za-z]+$" . -}}
{{- mulf (trimSuffix $unit . | float64) (get $units $unit | default 1 | float64) | int64 -}}
{{- end -}}

{{/* What Ray may keep of /dev/shm, in bytes, for what goes from one process to another: batches, of which long contexts
make hundreds of MB; what does not fit it writes to disk. The weights of runs take the rest of a worker's. */}}
{{- define "rlhfless.objectStore" -}}
{{- $all := include "rlhfless.bytes" .sharedMemory | int64 -}}
{{- div $all (ternary 2 8 (default false .head)) | min 8589934592 | max 200000000 -}}
{{- end -}}

{{- define "rlhfless.podSecurity" -}}
runAsNonRoot: true
runAsUser: {{ .Values.podSecurity.user }}
runAsGroup: {{ .Values.podSecurity.group }}
fsGroup: {{ .Values.podSecurity.group }}
fsGroupChangePolicy: OnRootMismatch
seccompProfile: {type: RuntimeDefault}
{{- end -}}

{{- define "rlhfless.containerSecurity" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities: {drop: [ALL]{{ with .capabilities }}, add: {{ toJson . }}{{ end }}}
{{- end -}}

{{/* What all containers of ours have in their environment. */}}
{{- define "rlhfless.env" -}}
- {name: HOME, value: /tmp/home}
- {name: RAY_USAGE_STATS_ENABLED, value: "0"}
{{- if .Values.volumes.cache.enabled }}
- {name: RLHFLESS_HOME, value: /cache/rlhfless}
- {name: HF_HOME, value: /cache/huggingface}
- {name: VLLM_CACHE_ROOT, value: /cache/vllm}
- {name: TORCHINDUCTOR_CACHE_DIR, value: /cache/inductor}
- {name: TRITON_CACHE_DIR, value: /cache/triton}
- {name: FLASHINFER_WORKSPACE_BASE, value: /cache/flashinfer}
- {name: DG_JIT_CACHE_DIR, value: /cache/deep-gemm}
- {name: CUDA_CACHE_PATH, value: /cache/cuda}
{{- end }}
{{- if .Values.hub.existingSecret }}
- name: HF_TOKEN
  valueFrom: {secretKeyRef: {name: {{ .Values.hub.existingSecret }}, key: token}}
{{- end }}
{{- with .Values.extraEnv }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{- define "rlhfless.mounts" -}}
- {name: tmp, mountPath: /tmp}
- {name: runs, mountPath: /data/runs}
{{- if .Values.volumes.cache.enabled }}
- {name: cache, mountPath: /cache}
{{- end }}
{{- if .Values.volumes.models.existingClaim }}
- {name: models, mountPath: /models, readOnly: true}
{{- end }}
{{- with .Values.extraVolumeMounts }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{- define "rlhfless.podVolumes" -}}
- {name: tmp, emptyDir: {}}
- name: runs
  persistentVolumeClaim: {claimName: {{ include "rlhfless.runsClaim" . }}}
{{- if .Values.volumes.cache.enabled }}
- name: cache
  persistentVolumeClaim: {claimName: {{ include "rlhfless.cacheClaim" . }}}
{{- end }}
{{- if .Values.volumes.models.existingClaim }}
- name: models
  persistentVolumeClaim: {claimName: {{ .Values.volumes.models.existingClaim }}, readOnly: true}
{{- end }}
{{- with .Values.extraVolumes }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{- define "rlhfless.controlEnv" -}}
{{ include "rlhfless.env" . }}
{{- if .Values.database.existingSecret }}
- name: RLHFLESS_DATABASE
  valueFrom: {secretKeyRef: {name: {{ .Values.database.existingSecret }}, key: url}}
{{- end }}
{{- end -}}

{{/* Devices that the groups may have together, by kind. */}}
{{- define "rlhfless.capacity" -}}
{{- $found := dict -}}
{{- range .Values.ray.gpuGroups -}}
{{- $_ := set $found .kind (add (get $found .kind | default 0) (mul .maxNodes .gpus)) -}}
{{- end -}}
{{- with .Values.ray.cpuGroup -}}
{{- if .devices -}}
{{- $_ := set $found "cpu-core" (mul .maxNodes .cores) -}}
{{- end -}}
{{- end -}}
{{- toJson $found -}}
{{- end -}}

{{/* A pod of the Ray cluster. Takes root, head, and the keys of a group (values.schema.json). */}}
{{- define "rlhfless.rayPod" -}}
{{- $root := .root -}}
# Nothing here changes with the chart's version: another template would replace the pods.
metadata:
  labels: {{- include "rlhfless.selector" $root | nindent 4 }}
    app.kubernetes.io/component: ray
  {{- with .annotations }}
  annotations: {{- toYaml . | nindent 4 }}
  {{- end }}
spec:
  {{- if .hostNetwork }}
  hostNetwork: true
  dnsPolicy: ClusterFirstWithHostNet
  {{- end }}
  {{- if not .head }}
  automountServiceAccountToken: false
  {{- end }}
  {{- with $root.Values.imagePullSecrets }}
  imagePullSecrets:
    {{- range . }}
    - name: {{ . }}
    {{- end }}
  {{- end }}
  {{- $grace := .graceSeconds | default (ternary 60 120 (default false .head)) | int }}
  terminationGracePeriodSeconds: {{ $grace }}
  securityContext: {{- include "rlhfless.podSecurity" $root | nindent 4 }}
  containers:
    - name: ray
      image: {{ include "rlhfless.rayImage" $root }}
      imagePullPolicy: {{ $root.Values.image.pullPolicy }}
      env:
        {{- include "rlhfless.env" $root | nindent 8 }}
        - {name: RAY_worker_niceness, value: "0"}
      {{- if .head }}
      # Ray itself does not hear the signal: the shell that started it does.
      lifecycle: {preStop: {exec: {command: [ray, stop, --grace-period, "20"]}}}
      {{- else }}
      # What runs have on the node moves before it ends; 15 s are left for Ray's own end.
      lifecycle:
        preStop: {exec: {command: [python, -m, rlhfless.fleet.leave_node, {{ max 1 (sub $grace 15) | quote }}]}}
      {{- end }}
      securityContext: {{- include "rlhfless.containerSecurity" . | nindent 8 }}
      resources: {{- toYaml .resources | nindent 8 }}
      volumeMounts:
        - {name: shared-memory, mountPath: /dev/shm}
        {{- include "rlhfless.mounts" $root | nindent 8 }}
  volumes:
    - name: shared-memory
      emptyDir: {medium: Memory, sizeLimit: {{ .sharedMemory }}}
    {{- include "rlhfless.podVolumes" $root | nindent 4 }}
  {{- with .nodeSelector }}
  nodeSelector: {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- with .tolerations }}
  tolerations: {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- with .affinity }}
  affinity: {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- with .runtimeClassName }}
  runtimeClassName: {{ . }}
  {{- end }}
  {{- with $root.Values.ray.priorityClassName }}
  priorityClassName: {{ . }}
  {{- end }}
{{- end -}}
