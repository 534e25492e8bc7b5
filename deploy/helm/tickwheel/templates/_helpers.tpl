{{- define "tickwheel.name" -}}
{{- if contains "tickwheel" .Release.Name }}{{ .Release.Name | trunc 40 | trimSuffix "-" }}{{ else }}{{ printf "tickwheel-%s" .Release.Name | trunc 40 | trimSuffix "-" }}{{ end -}}
{{- end }}

{{- define "tickwheel.selector" -}}
app.kubernetes.io/name: tickwheel
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{- define "tickwheel.labels" -}}
{{ include "tickwheel.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version }}
{{- end }}

{{/* The name by which a pod is dialled: context is a list of the root and the ordinal. */}}
{{- define "tickwheel.host" -}}
{{- $root := index . 0 -}}
{{- $name := include "tickwheel.name" $root -}}
{{ $name }}-{{ index . 1 }}.{{ $name }}-nodes.{{ $root.Release.Namespace }}.svc.{{ $root.Values.clusterDomain }}
{{- end }}

{{- define "tickwheel.secret" -}}
{{- $root := index . 0 -}}
{{ $root.Values.tls.secretPrefix | default (printf "%s-tls" (include "tickwheel.name" $root)) }}-{{ index . 1 }}
{{- end }}

{{/* A value as TOML has it; JSON's texts, numbers, booleans and lists of them are TOML, too. */}}
{{- define "tickwheel.toml" -}}
{{- range $section, $values := . }}
[{{ $section }}]
{{- range $key, $value := $values }}
{{ $key }} = {{ $value | toJson }}
{{- end }}
{{ end -}}
{{- end }}

{{- define "tickwheel.check" -}}
{{- if gt (int .Values.foundingReplicas) (int .Values.replicas) -}}
{{- fail "foundingReplicas: at most replicas: a cluster is founded once all of them are up" -}}
{{- end -}}
{{- if lt (int .Values.terminationGracePeriodSeconds) (int (add .Values.preStopSeconds 15)) -}}
{{- fail "terminationGracePeriodSeconds: at least preStopSeconds + 15: it counts from the beginning of preStop, and a node needs up to 10 s to hand over and end" -}}
{{- end -}}
{{- if .Values.tls.enabled -}}
{{- if and (not .Values.tls.certManager.enabled) (not .Values.tls.secretPrefix) -}}
{{- fail "tls: set tls.certManager.enabled with an issuer, or tls.secretPrefix; or tls.enabled=false with tls.allowPlaintext=true" -}}
{{- end -}}
{{- if and .Values.tls.certManager.enabled (not .Values.tls.certManager.issuerRef.name) -}}
{{- fail "tls.certManager.issuerRef.name: name an issuer" -}}
{{- end -}}
{{- else if not .Values.tls.allowPlaintext -}}
{{- fail "tls.enabled=false: anybody who reaches the ports may do anything; tls.allowPlaintext=true says that you want it" -}}
{{- end -}}
{{- end }}

{{/* The scrape job: deploy/prometheus/alerts.yml and the dashboard take jobs that begin with tickwheel. */}}
{{- define "tickwheel.job" -}}
tickwheel-{{ .Release.Namespace }}-{{ .Release.Name }}
{{- end }}
