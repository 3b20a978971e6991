{{/* Labels of a role's objects. Called with (list . "role"). */}}
{{- define "penstock.labels" -}}
app.kubernetes.io/name: penstock
app.kubernetes.io/instance: {{ (index . 0).Release.Name }}
app.kubernetes.io/component: {{ index . 1 }}
{{- end }}

{{- define "penstock.image" -}}
{{- $root := index . 0 -}}
image: {{ printf "%spenstock-%s:%s" $root.Values.image.registry (index . 1) $root.Values.image.tag | quote }}
imagePullPolicy: {{ $root.Values.image.pullPolicy }}
{{- end }}

{{/* Where a pod may run, and as whom: never as root, with no token of the cluster. Called with (list . values-of-the-role). */}}
{{- define "penstock.pod" -}}
{{- $root := index . 0 -}}
automountServiceAccountToken: false
enableServiceLinks: false
{{- with $root.Values.image.pullSecrets }}
imagePullSecrets:
  {{- range . }}
  - name: {{ . }}
  {{- end }}
{{- end }}
{{- with (index . 1).nodeSelector }}
nodeSelector:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with (index . 1).tolerations }}
tolerations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end }}

{{- define "penstock.podSecurity" -}}
runAsNonRoot: true
runAsUser: 10001
runAsGroup: 10001
fsGroup: 10001
fsGroupChangePolicy: OnRootMismatch
{{- end }}

{{- define "penstock.containerSecurity" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities:
  drop: [ALL]
{{- end }}

{{/* How a role finds its run. Its secrets come from a Secret of its own. Called with (list . "role"). */}}
{{- define "penstock.env" -}}
{{- $root := index . 0 -}}
envFrom:
  - secretRef:
      name: {{ $root.Release.Name }}-login-{{ index . 1 }}
env:
  - name: PENSTOCK_QUEUE
    value: redis://{{ $root.Release.Name }}-redis:6379
  - name: PENSTOCK_RUN
    value: {{ $root.Values.run | quote }}
  - name: POD_IP
    valueFrom:
      fieldRef:
        fieldPath: status.podIP
  - name: HOME
    value: /tmp
{{- end }}

{{/* Resources with GPUs, which are limits. Called with (list resources gpus). */}}
{{- define "penstock.resources" -}}
{{- $resources := deepCopy (index . 0) -}}
{{- if index . 1 -}}
{{- $limits := merge (dict "nvidia.com/gpu" (index . 1 | int)) ($resources.limits | default dict) -}}
{{- $_ := set $resources "limits" $limits -}}
{{- end -}}
resources:
  {{- toYaml $resources | nindent 2 }}
{{- end }}

{{/* Recipe, models, and what may be written. */}}
{{- define "penstock.mounts" -}}
- name: recipe
  mountPath: /work/recipes
  readOnly: true
{{- if .Values.models.claim }}
- name: models
  mountPath: /work/models
  readOnly: true
{{- end }}
- name: tmp
  mountPath: /tmp
{{- end }}

{{- define "penstock.volumes" -}}
- name: recipe
  configMap:
    name: {{ .Values.recipe.configMap }}
{{- if .Values.models.claim }}
- name: models
  persistentVolumeClaim:
    claimName: {{ .Values.models.claim }}
    readOnly: true
{{- end }}
- name: tmp
  emptyDir: {}
{{- end }}

{{/* Asks a role's own /health with its token, which no probe of the kubelet's could present. Called with a port. */}}
{{- define "penstock.health" -}}
exec:
  command:
    - python3
    - -c
    - |
      import os, urllib.request as web
      url = f"http://{os.environ['POD_IP']}:{{ . }}/health"
      asked = web.Request(url, headers={"Authorization": "Bearer " + os.environ["PENSTOCK_TOKEN"]})
      web.build_opener(web.ProxyHandler({})).open(asked, timeout=5)
timeoutSeconds: 10
{{- end }}
