{{/* What the status of both custom resources has. */}}
{{- define "semantide.conditions" -}}
type: array
x-kubernetes-list-type: map
x-kubernetes-list-map-keys: [type]
items:
  type: object
  required: [type, status]
  properties:
    type: {type: string}
    status: {type: string, enum: ["True", "False", Unknown]}
    reason: {type: string}
    message: {type: string}
    lastTransitionTime: {type: string, format: date-time}
    observedGeneration: {type: integer, format: int64}
{{- end -}}

{{- define "semantide.placement" -}}
type: array
description: Where the pods are, and which NPUs they hold there.
items:
  type: object
  required: [pod]
  properties:
    pod: {type: string}
    node: {type: string}
    npus:
      type: array
      items: {type: integer}
{{- end -}}
