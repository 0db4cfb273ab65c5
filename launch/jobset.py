"""The manifest of a run on Kubernetes: a JobSet with one worker on every host of a TPU slice."""

import argparse
from typing import Any

from slices import CHIPS_PER_HOST, slice_of

GRACE_S = 120  # seconds between SIGTERM, at which a run saves, and SIGKILL
SAVED = 143  # compass's exit status after that
# The volume's mount options are gcsfuse's. Nothing of the metadata is kept: on many TPU machines
# gcsfuse would keep it for ever, and a worker would not see what others write.
MOUNT_OPTIONS = "implicit-dirs,metadata-cache:ttl-secs:0"
# With the first, GKE adds a container that runs gcsfuse. The others lift that container's limits,
# which Standard clusters allow and Autopilot does not: if it runs out of memory, the mount is
# gone.
FUSE_ANNOTATIONS = {"gke-gcsfuse/volumes": "true"} | {
    f"gke-gcsfuse/{name}-limit": "0" for name in ("cpu", "memory", "ephemeral-storage")
}


def pod(args: argparse.Namespace) -> dict[str, Any]:
    """Returns one worker: a pod on a host of the slice, with all of the host's chips."""
    generation, topology, _ = slice_of(args.topology)
    selector = {
        "cloud.google.com/gke-tpu-accelerator": generation.accelerator,
        "cloud.google.com/gke-tpu-topology": topology,
    }
    tolerations = [{"key": "google.com/tpu", "operator": "Exists", "effect": "NoSchedule"}]
    if args.spot:
        selector["cloud.google.com/gke-spot"] = "true"
        tolerations.append(
            {
                "key": "cloud.google.com/gke-spot",
                "operator": "Equal",
                "value": "true",
                "effect": "NoSchedule",
            }
        )
    secrets = {"envFrom": [{"secretRef": {"name": each}} for each in args.secret]}
    container = {
        "name": "compass",
        "image": args.image,
        "command": args.command,
        "env": [{"name": name, "value": value} for name, value in environment(args).items()],
        **(secrets if args.secret else {}),
        # libtpu between workers, its metrics, JAX's coordinator
        "ports": [{"containerPort": port, "protocol": "TCP"} for port in (8471, 8431, 8482)],
        "resources": {"limits": {"google.com/tpu": CHIPS_PER_HOST}},
    }
    account = {"serviceAccountName": args.service_account} if args.service_account else {}
    volumes = {}
    if args.bucket:
        container["volumeMounts"] = [{"name": "bucket", "mountPath": "/gcs"}]
        attributes = {"bucketName": args.bucket, "mountOptions": MOUNT_OPTIONS}
        volumes = {
            "volumes": [
                {
                    "name": "bucket",
                    "csi": {"driver": "gcsfuse.csi.storage.gke.io", "volumeAttributes": attributes},
                }
            ]
        }
    return {
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": GRACE_S,
        **account,
        "nodeSelector": selector,
        "tolerations": tolerations,
        "containers": [container],
        **volumes,
    }


def environment(args: argparse.Namespace) -> dict[str, str]:
    """Returns the variables of every worker; GKE adds TPU_WORKER_ID and TPU_WORKER_HOSTNAMES, from
    which JAX finds the others. On a bucket, restarted workers find the programs that were compiled
    before.
    """
    variables = {"COMPASS_DISTRIBUTED": "auto"}
    if args.bucket or args.storage:
        variables["JAX_COMPILATION_CACHE_DIR"] = "/gcs/compass-programs"
    return variables | dict(each.split("=", 1) for each in args.env)


def manifest(args: argparse.Namespace) -> dict[str, Any]:
    """Returns the JobSet: one indexed job with a worker on every host of the slice, and a headless
    service for their names.
    """
    hosts = slice_of(args.topology)[2]
    # A pod that lost its node, or that saved because it had to go, fails the job with the reason
    # PodFailurePolicy, which the rule below does not count as a restart. No other
    # status may be here: after the loss of another worker (75, 134) or an unusable setting (2) the
    # workers would restart for ever. Those restarts are counted.
    disrupted = {
        "action": "FailJob",
        "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}],
    }
    saved = {
        "action": "FailJob",
        "onExitCodes": {"containerName": "compass", "operator": "In", "values": [SAVED]},
    }
    annotations = {"metadata": {"annotations": FUSE_ANNOTATIONS}} if args.bucket else {}
    job = {
        "parallelism": hosts,
        "completions": hosts,
        "completionMode": "Indexed",
        "backoffLimit": 0,
        "podFailurePolicy": {"rules": [disrupted, saved]},
        "template": {**annotations, "spec": pod(args)},
    }
    uncounted = {
        "name": "preempted",
        "action": "RestartJobSetAndIgnoreMaxRestarts",
        "onJobFailureReasons": ["PodFailurePolicy"],
    }
    return {
        "apiVersion": "jobset.x-k8s.io/v1alpha2",
        "kind": "JobSet",
        "metadata": {
            "name": args.name,
            "annotations": {
                "alpha.jobset.sigs.k8s.io/exclusive-topology": "cloud.google.com/gke-nodepool"
            },
        },
        "spec": {
            "network": {
                "enableDNSHostnames": True,
                "subdomain": args.name,
                "publishNotReadyAddresses": True,
            },
            "failurePolicy": {"maxRestarts": args.max_restarts, "rules": [uncounted]},
            "replicatedJobs": [{"name": "slice", "replicas": 1, "template": {"spec": job}}],
        },
    }
