"""A JSON schema of the part of JobSet (jobset.x-k8s.io/v1alpha2) that launch/gke.py writes.

Written from the JobSet API (jobset_types.go: ReplicatedJob, Network, FailurePolicy and its rules)
and the Kubernetes API of its parts (batch/v1 JobSpec with its podFailurePolicy; v1 PodSpec,
Container, Toleration, Volume with a CSIVolumeSource). No field beyond those listed is allowed.
`status` of a pod condition is required: JobSet's CRD has no default for it, unlike the Job API.
"""

from typing import Any

import jsonschema


def record(required: dict[str, Any], optional: dict[str, Any] | None = None) -> dict[str, Any]:
    """Returns the schema of an object with these fields and no others."""
    properties = required | (optional or {})
    return {
        "type": "object",
        "properties": properties,
        "required": list(required),
        "additionalProperties": False,
    }


def many(items: dict[str, Any]) -> dict[str, Any]:
    """Returns the schema of a list that is not empty."""
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
        "envFrom": many(record({"secretRef": record({"name": DNS_LABEL})})),
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
        "restartPolicy": {"enum": ["Never"]},  # required by a podFailurePolicy
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


def assert_valid(manifest: dict[str, Any]) -> None:
    """Requires that a manifest fits the API."""
    jsonschema.validate(manifest, JOBSET)
