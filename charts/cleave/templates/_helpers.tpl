{{- define "cleave.name" -}}
{{- if contains "cleave" .Release.Name -}}
{{- .Release.Name | trunc 40 | trimSuffix "-" -}}
{{- else -}}
{{- printf "%s-cleave" (.Release.Name | trunc 33 | trimSuffix "-") -}}
{{- end -}}
{{- end -}}

{{- define "cleave.operator" -}}
{{ include "cleave.name" . }}-operator
{{- end -}}

{{- define "cleave.webhook" -}}
{{ include "cleave.name" . }}-webhook
{{- end -}}

{{/* What gateways and workers may read; the operator binds it in each deployment's namespace. */}}
{{- define "cleave.discovery" -}}
{{ include "cleave.name" . }}-discovery
{{- end -}}

{{- define "cleave.selector" -}}
app.kubernetes.io/name: cleave
app.kubernetes.io/instance: {{ .Release.Name }}
app.kubernetes.io/component: operator
{{- end -}}

{{- define "cleave.labels" -}}
{{ include "cleave.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
{{- end -}}

{{- define "cleave.tag" -}}
{{ .Values.images.tag | default .Chart.AppVersion }}
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
