"""A JSON schema of the part of JobSet (jobset.x-k8s.io/v1alpha2) that launch/gke.py writes, and a
validator of the words it uses.

Written from the JobSet API (jobset_types.go: ReplicatedJob, Network, FailurePolicy and its rules)
and the Kubernetes API of what is inside it (batch/v1 JobSpec with its podFailurePolicy; v1 PodSpec,
Container, Toleration, Volume with a CSIVolumeSource). No field beyond those listed is allowed.
`status` of a pod condition is required: JobSet's CRD has no default for it, unlike the Job API.
"""

import re
from typing import Any


def record(required: dict[str, Any], optional: dict[str, Any] | None = None) -> dict[str, Any]:
    """An object with these fields and no others."""
    properties = required | (optional or {})
    return {
        "type": "object",
        "properties": properties,
        "required": list(required),
        "additionalProperties": False,
    }


def many(items: dict[str, Any]) -> dict[str, Any]:
    """A list that is not empty."""
    return {"type": "array", "items": items, "minItems": 1}


TEXT = {"type": "string"}
BOOLEAN = {"type": "boolean"}
LABELS = {"type": "object", "additionalProperties": TEXT}
DNS_LABEL = {"type": "string", "pattern": "^[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?$"}
COUNT = {"type": "integer", "minimum": 1}
ACTIONS = [
    "FailJobSet",
    "RestartJobSet",
    "RestartJobSetAndIgnoreMaxRestarts",
    "RestartJob",
    "RestartJobAndIgnoreMaxRestarts",
]
REASONS = [
    "BackoffLimitExceeded",
    "DeadlineExceeded",
    "FailedIndexes",
    "MaxFailedIndexesExceeded",
    "PodFailurePolicy",
]

TOLERATION = record(
    {"key": TEXT, "operator": {"enum": ["Exists", "Equal"]}},
    {"value": TEXT, "effect": {"enum": ["NoSchedule", "PreferNoSchedule", "NoExecute"]}},
)
PORT = record(
    {"containerPort": {"type": "integer", "minimum": 1, "maximum": 65535}},
    {"protocol": {"enum": ["TCP"]}},
)
CONTAINER = record(
    {
        "name": DNS_LABEL,
        "image": TEXT,
        "command": many(TEXT),
        "resources": record({"limits": record({"google.com/tpu": COUNT})}),
    },
    {
        "env": {
            "type": "array",
            "items": record(
                {"name": {"type": "string", "pattern": "^[A-Za-z_][A-Za-z0-9_]*$"}, "value": TEXT}
            ),
        },
        "ports": {"type": "array", "items": PORT},
        "volumeMounts": many(
            record(
                {"name": DNS_LABEL, "mountPath": {"type": "string", "pattern": "^/[^:]+$"}},
                {"readOnly": BOOLEAN},
            )
        ),
    },
)
VOLUME = record(
    {
        "name": DNS_LABEL,
        "csi": record({"driver": TEXT}, {"volumeAttributes": LABELS, "readOnly": BOOLEAN}),
    }
)
POD = record(
    {
        "restartPolicy": {"enum": ["Never"]},  # a podFailurePolicy asks for it
        "nodeSelector": record(
            {
                "cloud.google.com/gke-tpu-accelerator": TEXT,
                "cloud.google.com/gke-tpu-topology": {
                    "type": "string",
                    "pattern": r"^\d+x\d+(x\d+)?$",
                },
            },
            {"cloud.google.com/gke-spot": {"enum": ["true"]}},
        ),
        "containers": many(CONTAINER),
    },
    {
        "terminationGracePeriodSeconds": {"type": "integer", "minimum": 0},
        "serviceAccountName": DNS_LABEL,
        "tolerations": many(TOLERATION),
        "volumes": many(VOLUME),
    },
)
CONDITION = record({"type": TEXT, "status": {"enum": ["True", "False", "Unknown"]}})
EXIT_CODES = record(
    {
        "operator": {"enum": ["In", "NotIn"]},
        "values": many({"type": "integer", "minimum": 1, "maximum": 255}),
    },
    {"containerName": DNS_LABEL},
)
POD_FAILURE = record(
    {"action": {"enum": ["FailJob", "FailIndex", "Ignore", "Count"]}},
    {"onPodConditions": many(CONDITION), "onExitCodes": EXIT_CODES},
)
JOB = record(
    {
        "parallelism": COUNT,
        "completions": COUNT,
        "completionMode": {"enum": ["Indexed", "NonIndexed"]},
        "backoffLimit": {"type": "integer", "minimum": 0},
        "template": record(
            {"spec": POD}, {"metadata": record({}, {"annotations": LABELS, "labels": LABELS})}
        ),
    },
    {"podFailurePolicy": record({"rules": many(POD_FAILURE)})},
)
RULE = record(
    {
        "name": {"type": "string", "pattern": "^[A-Za-z]([A-Za-z0-9_,:]*[A-Za-z0-9_])?$"},
        "action": {"enum": ACTIONS},
    },
    {"onJobFailureReasons": many({"enum": REASONS}), "targetReplicatedJobs": many(DNS_LABEL)},
)
JOBSET = record(
    {
        "apiVersion": {"enum": ["jobset.x-k8s.io/v1alpha2"]},
        "kind": {"enum": ["JobSet"]},
        "metadata": record(
            {"name": DNS_LABEL}, {"annotations": LABELS, "labels": LABELS, "namespace": DNS_LABEL}
        ),
        "spec": record(
            {
                "replicatedJobs": many(
                    record(
                        {"name": DNS_LABEL, "replicas": COUNT, "template": record({"spec": JOB})}
                    )
                )
            },
            {
                "network": record(
                    {},
                    {
                        "enableDNSHostnames": BOOLEAN,
                        "subdomain": DNS_LABEL,
                        "publishNotReadyAddresses": BOOLEAN,
                    },
                ),
                "failurePolicy": record(
                    {}, {"maxRestarts": {"type": "integer", "minimum": 0}, "rules": many(RULE)}
                ),
            },
        ),
    }
)

TYPES = {"object": dict, "array": list, "string": str, "integer": int, "boolean": bool}


def faults(schema: dict[str, Any], value: Any, where: str = "$") -> list[str]:
    """What `schema` does not allow in `value`; empty where it is valid."""
    if "enum" in schema and value not in schema["enum"]:
        return [f"{where}: {value!r} is none of {schema['enum']}"]
    kind = schema.get("type")
    if kind and (
        not isinstance(value, TYPES[kind]) or (kind == "integer" and isinstance(value, bool))
    ):
        return [f"{where}: {value!r} is no {kind}"]
    found = []
    if "pattern" in schema and not re.search(schema["pattern"], value):
        found.append(f"{where}: {value!r} does not fit {schema['pattern']}")
    if "minimum" in schema and value < schema["minimum"]:
        found.append(f"{where}: {value} is less than {schema['minimum']}")
    if "maximum" in schema and value > schema["maximum"]:
        found.append(f"{where}: {value} is more than {schema['maximum']}")
    if kind == "array":
        if len(value) < schema.get("minItems", 0):
            found.append(f"{where}: is empty")
        found += [
            fault
            for i, item in enumerate(value)
            for fault in faults(schema["items"], item, f"{where}[{i}]")
        ]
    if kind == "object":
        known, rest = schema.get("properties", {}), schema.get("additionalProperties", True)
        found += [
            f"{where}: {name} is missing"
            for name in schema.get("required", [])
            if name not in value
        ]
        for name, item in value.items():
            inner = known.get(name, rest)
            if inner is False:
                found.append(f"{where}: {name} is not known")
            elif isinstance(inner, dict):
                found += faults(inner, item, f"{where}.{name}")
    return found
