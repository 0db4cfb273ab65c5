"""The manifest that launch/gke.py applies, against JobSet's API."""

import copy
import math

import jobset_schema as schema
import pytest
from test_gke import COMMAND, RUN, TRAIN, rendered

TOPOLOGIES = [
    ("v5p:4x4x4", "tpu-v5p-slice", 16),
    ("v5p:2x2x1", "tpu-v5p-slice", 1),
    ("v5p:16x16x24", "tpu-v5p-slice", 1536),
    ("v5e:16x16", "tpu-v5-lite-podslice", 64),
    ("v6e:16x16", "tpu-v6e-slice", 64),
    ("v6e:4x8", "tpu-v6e-slice", 8),
    ("tpu7x:4x4x4", "tpu7x", 16),
    ("tpu7x:8x16x16", "tpu7x", 512),
]


@pytest.mark.parametrize("topology,accelerator,hosts", TOPOLOGIES)
def test_manifest(fakes, topology, accelerator, hosts):
    """It fits the API, and has a worker with four chips on every host of the slice."""
    manifest = rendered(fakes, *RUN, "--topology", topology, *TRAIN)
    assert schema.faults(schema.JOBSET, manifest) == []
    (job,) = manifest["spec"]["replicatedJobs"]
    job, pod = job["template"]["spec"], job["template"]["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    assert (
        job["parallelism"] == job["completions"] == hosts
        and job["backoffLimit"] == 0
        and job["completionMode"] == "Indexed"
    )
    shape = topology.split(":")[1]
    assert pod["nodeSelector"] == {
        "cloud.google.com/gke-tpu-accelerator": accelerator,
        "cloud.google.com/gke-tpu-topology": shape,
    }
    assert container["resources"]["limits"]["google.com/tpu"] * hosts == math.prod(
        map(int, shape.split("x"))
    )
    assert container["command"] == list(COMMAND[1:]) and container["env"] == [
        {"name": "COMPASS_DISTRIBUTED", "value": "auto"}
    ]
    assert manifest["spec"]["network"] == {
        "enableDNSHostnames": True,
        "subdomain": "r1",
        "publishNotReadyAddresses": True,
    }
    assert fakes.calls() == []


def test_restarts(fakes):
    """Failures are counted; a pod that lost its node is not (KEP-262's example of host
    maintenance), nor one that saved at SIGTERM.
    """
    spec = rendered(fakes, *RUN, "--max-restarts", "3", *TRAIN)["spec"]
    (rule,) = spec["failurePolicy"]["rules"]
    assert spec["failurePolicy"]["maxRestarts"] == 3
    assert (rule["action"], rule["onJobFailureReasons"]) == (
        "RestartJobSetAndIgnoreMaxRestarts",
        ["PodFailurePolicy"],
    )
    disrupted, saved = spec["replicatedJobs"][0]["template"]["spec"]["podFailurePolicy"]["rules"]
    assert disrupted == {
        "action": "FailJob",
        "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}],
    }
    # Nothing else may have the reason that is not counted: another status would start again for
    # ever.
    assert saved == {
        "action": "FailJob",
        "onExitCodes": {"containerName": "compass", "operator": "In", "values": [143]},
    }


def test_options_of_the_pod(fakes):
    manifest = rendered(
        fakes,
        *RUN,
        "--spot",
        "--service-account",
        "trainer",
        "--env",
        "A=b=c",
        "--env",
        "D=",
        *TRAIN,
    )
    assert schema.faults(schema.JOBSET, manifest) == []
    pod = manifest["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]
    assert (
        pod["nodeSelector"]["cloud.google.com/gke-spot"] == "true"
        and pod["serviceAccountName"] == "trainer"
    )
    assert {t["key"] for t in pod["tolerations"]} == {"google.com/tpu", "cloud.google.com/gke-spot"}
    assert pod["containers"][0]["env"][1:] == [
        {"name": "A", "value": "b=c"},
        {"name": "D", "value": ""},
    ]


def test_the_bucket(fakes):
    """Cloud Storage FUSE's CSI driver mounts it at /gcs; without one the manifest has nothing of
    it.
    """
    job = rendered(fakes, *RUN, "--bucket", "my-bucket", *COMMAND)["spec"]["replicatedJobs"][0][
        "template"
    ]["spec"]
    limits = {
        "gke-gcsfuse/cpu-limit": "0",
        "gke-gcsfuse/memory-limit": "0",
        "gke-gcsfuse/ephemeral-storage-limit": "0",
    }
    assert job["template"]["metadata"] == {"annotations": {"gke-gcsfuse/volumes": "true"} | limits}
    attributes = {
        "bucketName": "my-bucket",
        "mountOptions": "implicit-dirs,metadata-cache:ttl-secs:0",
    }
    csi = {"driver": "gcsfuse.csi.storage.gke.io", "volumeAttributes": attributes}
    assert job["template"]["spec"]["volumes"] == [{"name": "bucket", "csi": csi}]
    assert job["template"]["spec"]["containers"][0]["volumeMounts"] == [
        {"name": "bucket", "mountPath": "/gcs"}
    ]
    without = rendered(
        fakes, *RUN, "--", "compass", "train", "configs/x.py", "--run-dir", "/nfs/gcs/r1"
    )
    assert schema.faults(schema.JOBSET, without) == [] and not any(
        word in str(without) for word in ("gcsfuse", "olume", "/gcs'")
    )


def broken(change) -> dict:
    manifest = copy.deepcopy(VALID)
    job = manifest["spec"]["replicatedJobs"][0]["template"]["spec"]
    change(manifest, job, job["template"]["spec"]["containers"][0])
    return manifest


VALID: dict = {}


@pytest.mark.parametrize(
    "change,fault",
    [
        (lambda m, j, c: m.update(apiVersion="batch/v1"), "$.apiVersion: 'batch/v1' is none of"),
        (lambda m, j, c: m["spec"].update(maxRestarts=3), "$.spec: maxRestarts is not known"),
        (lambda m, j, c: m["metadata"].update(name="R1"), "$.metadata.name: 'R1' does not fit"),
        (lambda m, j, c: j.update(parallelism="16"), ".parallelism: '16' is no integer"),
        (lambda m, j, c: j.update(parallelism=True), ".parallelism: True is no integer"),
        (lambda m, j, c: j.update(completions=0), ".completions: 0 is less than 1"),
        (
            lambda m, j, c: j["podFailurePolicy"]["rules"][0]["onPodConditions"][0].pop("status"),
            "status is missing",
        ),
        (
            lambda m, j, c: j["podFailurePolicy"]["rules"][1]["onExitCodes"].update(values=[0]),
            ".values[0]: 0 is less than 1",
        ),
        (lambda m, j, c: c.update(command=[]), ".command: is empty"),
        (lambda m, j, c: c.update(command="compass train"), "is no array"),
        (lambda m, j, c: c["ports"][0].update(containerPort=70000), "70000 is more than 65535"),
        (lambda m, j, c: c["env"].append({"name": "A", "value": 1}), ".value: 1 is no string"),
        (
            lambda m, j, c: j["template"]["metadata"]["annotations"].update(a=True),
            ".annotations.a: True is no string",
        ),
        (
            lambda m, j, c: j["template"]["spec"]["volumes"][0]["csi"].pop("driver"),
            "driver is missing",
        ),
        (
            lambda m, j, c: c["volumeMounts"][0].update(mountPath="gcs"),
            ".mountPath: 'gcs' does not fit",
        ),
    ],
)
def test_the_schema_refuses(fakes, change, fault):
    VALID.update(VALID or rendered(fakes, *RUN, *TRAIN))
    (found,) = schema.faults(schema.JOBSET, broken(change))
    assert fault in found
