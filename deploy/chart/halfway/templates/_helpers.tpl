{{- define "halfway.name" -}}
{{- if contains .Chart.Name .Release.Name }}{{ .Release.Name | trunc 50 | trimSuffix "-" }}{{ else }}{{ printf "%s-%s" .Release.Name .Chart.Name | trunc 50 | trimSuffix "-" }}{{ end }}
{{- end }}

{{- define "halfway.selector" -}}
app.kubernetes.io/name: {{ .Chart.Name }}
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{- define "halfway.labels" -}}
{{ include "halfway.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version }}
{{- end }}

{{- /* Helm reads every number as a float, and would write 2000000 as 2e+06. */}}
{{- define "halfway.text" -}}
{{- if and (kindIs "float64" .) (eq (floor .) .) }}{{ int64 . }}{{ else }}{{ . }}{{ end }}
{{- end }}

{{- define "halfway.prefix" -}}
{{ .Values.settings.kafka_prefix | default "_halfway." }}
{{- end }}

{{- /* The secrets that are mounted: folder, secret, and the file of each key. */}}
{{- define "halfway.files" -}}
{{- $values := .Values }}
{{- with $values.masterSecret }}{{ if .name }}
- {folder: master-secret, secret: {{ .name }}, items: [{key: {{ .key }}, path: master-secret}], env: {HALFWAY_MASTER_SECRET_FILE: master-secret}}
{{- end }}{{ end }}
{{- with $values.masterSecretPrevious }}{{ if .name }}
- folder: master-secret-previous
  secret: {{ .name }}
  items: [{key: {{ .key }}, path: master-secret}]
  env: {HALFWAY_MASTER_SECRET_PREVIOUS_FILE: master-secret}
{{- end }}{{ end }}
{{- with $values.operatorKey }}{{ if .name }}
- {folder: operator-key, secret: {{ .name }}, items: [{key: {{ .key }}, path: operator-key}], env: {HALFWAY_OPERATOR_KEY_FILE: operator-key}}
{{- end }}{{ end }}
{{- with $values.peerCredential }}{{ if .name }}
- {folder: peer-credential, secret: {{ .name }}, items: [{key: {{ .key }}, path: peer-credential}], env: {HALFWAY_PEER_CREDENTIAL_FILE: peer-credential}}
{{- end }}{{ end }}
{{- with $values.kafka.passwordSecret }}{{ if .name }}
- {folder: kafka-password, secret: {{ .name }}, items: [{key: {{ .key }}, path: password}], env: {HALFWAY_KAFKA__SASL_PASSWORD_FILE: password}}
{{- end }}{{ end }}
{{- with $values.kafka.caSecret }}{{ if .name }}
- {folder: kafka-ca, secret: {{ .name }}, items: [{key: {{ .key }}, path: ca.crt}], env: {HALFWAY_KAFKA__SSL_CA_LOCATION: ca.crt}}
{{- end }}{{ end }}
{{- with $values.kafka.clientCertificateSecret }}{{ if .name }}
- folder: kafka-certificate
  secret: {{ .name }}
  items: [{key: {{ .certificateKey }}, path: tls.crt}, {key: {{ .privateKeyKey }}, path: tls.key}]
  env: {HALFWAY_KAFKA__SSL_CERTIFICATE_LOCATION: tls.crt, HALFWAY_KAFKA__SSL_KEY_LOCATION: tls.key}
{{- end }}{{ end }}
{{- with $values.tls.secretName }}
- folder: tls
  secret: {{ . }}
  items: [{key: tls.crt, path: tls.crt}, {key: tls.key, path: tls.key}]
  env: {HALFWAY_TLS_CERTIFICATE_FILE: tls.crt, HALFWAY_TLS_KEY_FILE: tls.key}
{{- end }}
{{- with $values.tls.clientCaSecret }}{{ if .name }}
- {folder: client-ca, secret: {{ .name }}, items: [{key: {{ .key }}, path: ca.crt}], env: {HALFWAY_TLS_CLIENT_CA_FILE: ca.crt}}
{{- end }}{{ end }}
{{- with $values.tls.peerCaSecret }}{{ if .name }}
- {folder: peer-ca, secret: {{ .name }}, items: [{key: {{ .key }}, path: ca.crt}], env: {HALFWAY_PEER_CA_FILE: ca.crt}}
{{- end }}{{ end }}
{{- end }}
