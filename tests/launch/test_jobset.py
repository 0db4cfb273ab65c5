"""The manifest that launch/gke.py applies, checked against JobSet's API."""

import math

import pytest
from jobset_schema import assert_valid
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
    """The manifest fits the API and has a worker with four chips on every host of the slice."""
    manifest = rendered(fakes, *RUN, "--topology", topology, *TRAIN)
    assert_valid(manifest)
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
        {"name": "COMPASS_DISTRIBUTED", "value": "auto"},
        {"name": "JAX_COMPILATION_CACHE_DIR", "value": "/gcs/compass-programs"},
    ]
    assert manifest["spec"]["network"] == {
        "enableDNSHostnames": True,
        "subdomain": "r1",
        "publishNotReadyAddresses": True,
    }
    assert fakes.calls() == []


def test_restarts(fakes):
    """Failures count as restarts, except a pod that lost its node (KEP-262's example of host
    maintenance) and one that saved at SIGTERM.
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
    # No other exit status may be exempt from the count: such a failure would restart for ever.
    assert saved == {
        "action": "FailJob",
        "onExitCodes": {"containerName": "compass", "operator": "In", "values": [143]},
    }


def test_options_of_the_pod(fakes):
    options = ["--spot", "--service-account", "trainer", "--env", "A=b=c", "--env", "D="]
    manifest = rendered(fakes, *RUN, *options, *TRAIN)
    assert_valid(manifest)
    pod = manifest["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]
    assert (
        pod["nodeSelector"]["cloud.google.com/gke-spot"] == "true"
        and pod["serviceAccountName"] == "trainer"
    )
    assert {t["key"] for t in pod["tolerations"]} == {"google.com/tpu", "cloud.google.com/gke-spot"}
    assert pod["containers"][0]["env"][2:] == [
        {"name": "A", "value": "b=c"},
        {"name": "D", "value": ""},
    ]
    assert "envFrom" not in pod["containers"][0]


def test_a_secret_gives_the_variables_of_every_worker(fakes):
    """The manifest names the secrets and does not contain their values."""
    manifest = rendered(fakes, *RUN, "--secret", "samplers", "--secret", "wandb", *TRAIN)
    assert_valid(manifest)
    pod = manifest["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]
    assert pod["containers"][0]["envFrom"] == [
        {"secretRef": {"name": "samplers"}},
        {"secretRef": {"name": "wandb"}},
    ]


def test_the_bucket(fakes):
    """Cloud Storage FUSE's CSI driver mounts the bucket at /gcs; a manifest without a bucket does
    not mention the driver.
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
    assert_valid(without)
    assert not any(word in str(without) for word in ("gcsfuse", "olume", "/gcs'"))
