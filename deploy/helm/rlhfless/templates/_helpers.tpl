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
capabilities: {drop: [ALL]}
{{- end -}}

{{/* What all containers of ours have in their environment. */}}
{{- define "rlhfless.env" -}}
- {name: HOME, value: /tmp/home}
- {name: RAY_USAGE_STATS_ENABLED, value: "0"}
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

{{/* A pod of the Ray cluster. Takes root, resources, sharedMemory, nodeSelector, tolerations, runtimeClassName, gpu. */}}
{{- define "rlhfless.rayPod" -}}
{{- $root := .root -}}
# Nothing here changes with the chart's version: another template would replace the pods.
metadata:
  labels: {{- include "rlhfless.selector" $root | nindent 4 }}
    app.kubernetes.io/component: ray
spec:
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
      securityContext: {{- include "rlhfless.containerSecurity" $root | nindent 8 }}
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
