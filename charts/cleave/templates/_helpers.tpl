{{/* What all names begin with; 40 characters at most, since names of deployments follow. */}}
{{- define "cleave.name" -}}
{{- $name := default "cleave" .Values.nameOverride -}}
{{- if .Values.fullnameOverride -}}
{{- .Values.fullnameOverride | trunc 40 | trimSuffix "-" -}}
{{- else if contains $name .Release.Name -}}
{{- .Release.Name | trunc 40 | trimSuffix "-" -}}
{{- else -}}
{{- printf "%s-%s" (.Release.Name | trunc 33 | trimSuffix "-") $name | trunc 40 | trimSuffix "-" -}}
{{- end -}}
{{- end -}}

{{/* Where the objects of the chart are. */}}
{{- define "cleave.namespace" -}}
{{ .Values.namespaceOverride | default .Release.Namespace }}
{{- end -}}

{{- define "cleave.operator" -}}
{{ include "cleave.name" . }}-operator
{{- end -}}

{{/* The operator's service account. */}}
{{- define "cleave.account" -}}
{{ .Values.operator.serviceAccount.name | default (include "cleave.operator" .) }}
{{- end -}}

{{- define "cleave.webhook" -}}
{{ include "cleave.name" . }}-webhook
{{- end -}}

{{/* NetworkPolicies of deployments admit the operator's pods by name and component: neither changes. */}}
{{- define "cleave.selector" -}}
app.kubernetes.io/name: cleave
app.kubernetes.io/instance: {{ .Release.Name }}
app.kubernetes.io/component: operator
{{- end -}}

{{- define "cleave.labels" -}}
{{ include "cleave.selector" . }}
{{ include "cleave.info" . }}
{{- end -}}

{{/* Labels that select nothing. */}}
{{- define "cleave.info" -}}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/part-of: cleave
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name (.Chart.Version | replace "+" "_") }}
{{- with .Values.commonLabels }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{/* Of the operator's pods. */}}
{{- define "cleave.podAnnotations" -}}
kubectl.kubernetes.io/default-container: operator
{{- if include "cleave.plans" . }}
# The file is read at the start only.
cleave.dev/planning: {{ toJson .Values.planning | sha256sum | trunc 16 | quote }}
{{- end }}
{{- if .Values.metrics.annotations }}
prometheus.io/scrape: "true"
prometheus.io/port: "8081"
prometheus.io/path: /metrics
{{- end }}
{{- end -}}

{{/* One endpoint of a PodMonitor: (list root port). */}}
{{- define "cleave.endpoint" -}}
{{- $monitor := (index . 0).Values.metrics.podMonitor -}}
port: {{ index . 1 }}
path: /metrics
interval: {{ $monitor.interval }}
{{- with $monitor.scrapeTimeout }}
scrapeTimeout: {{ . }}
{{- end }}
{{- with $monitor.relabelings }}
relabelings: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with $monitor.metricRelabelings }}
metricRelabelings: {{- toYaml . | nindent 2 }}
{{- end }}
{{- end -}}

{{/* Where an alert is explained: (list root alert). */}}
{{- define "cleave.runbook" -}}
{{ (index . 0).Values.metrics.rules.runbooks }}#{{ index . 1 | lower }}
{{- end -}}

{{/* images.prefix; a parent chart's registry takes the place of its registry. */}}
{{- define "cleave.imagePrefix" -}}
{{- $prefix := .Values.images.prefix -}}
{{- with .Values.global.imageRegistry -}}
{{- $prefix = printf "%s/%s" (trimSuffix "/" .) (regexReplaceAll "^([^/]*[.:][^/]*|localhost)/" $prefix "") -}}
{{- end -}}
{{- $prefix -}}
{{- end -}}

{{/* Reference of one of Cleave's images: (list root kind). */}}
{{- define "cleave.image" -}}
{{- $root := index . 0 -}}
{{- $images := $root.Values.images -}}
{{- with get $images.references (index . 1) -}}
{{- . -}}
{{- else -}}
{{- include "cleave.imagePrefix" $root }}cleave-{{ index . 1 }}:{{ include "cleave.tag" $root -}}
{{- with get $images.digests (index . 1) }}@{{ . }}{{ end -}}
{{- end -}}
{{- end -}}

{{- define "cleave.pullSecrets" -}}
{{- range concat .Values.global.imagePullSecrets .Values.images.pullSecrets }}
- name: {{ if kindIs "map" . }}{{ .name }}{{ else }}{{ . }}{{ end }}
{{- end }}
{{- end -}}

{{- define "cleave.tag" -}}
{{ .Values.images.tag | default .Chart.AppVersion }}
{{- end -}}

{{/* Whether authors may have less than all in pods; empty: they may have all. */}}
{{- define "cleave.restrictsPods" -}}
{{- if eq .Values.policy.profile "Restricted" -}}
yes
{{- else -}}
{{- range $list, $entries := .Values.policy.allow }}
{{- if $entries }}
{{- fail (printf "policy.allow.%s has no effect with policy.profile Open: set it to Restricted, or remove the list" $list) }}
{{- end }}
{{- end }}
{{- end -}}
{{- end -}}

{{/* Whether anything is said of the machines; empty: nothing. */}}
{{- define "cleave.plans" -}}
{{- with .Values.planning }}{{ if or .network .gpus .profiles }}yes{{ end }}{{ end -}}
{{- end -}}

{{- define "cleave.cluster" -}}
nodes: [{gpu: A100-SXM-80GB}]
{{- with .Values.planning.network }}
network: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .Values.planning.gpus }}
gpus: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .Values.planning.profiles }}
profiles: {{- keys . | sortAlpha | toYaml | nindent 2 }}
{{- end }}
{{- end -}}
