"""launch/gke.py: the manifest against JobSet's API, the calls of kubectl and xpk, and what is
refused.
"""

import copy
import math
import sys
from pathlib import Path

import jobset_schema as schema
import pytest
import yaml

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "launch" / "gke.py"
COMMAND = ("--", "compass", "train", "configs/x.py", "--run-dir", "/gcs/it's r1")
TRAIN = ("--bucket", "bkt", *COMMAND)
RUN = ("--name", "r1", "--topology", "v5p:4x4x4", "--image", "repo/compass:1")


def gke(fakes, *words: str):
    return fakes.run(sys.executable, SCRIPT, *words)


def rendered(fakes, *words: str) -> dict:
    done = gke(fakes, "render", *words)
    assert done.returncode == 0, done.stderr
    return yaml.safe_load(done.stdout)


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


def test_apply(fakes):
    assert gke(fakes, "apply", *RUN, *TRAIN).returncode == 0
    ((words, manifest),) = fakes.inputs()
    assert words == ["kubectl", "apply", "--filename", "-"] and yaml.safe_load(
        manifest
    ) == rendered(fakes, *RUN, *TRAIN)


def test_status_delete(fakes):
    where, there = (
        ("--name", "r1", "--context", "c", "--namespace", "n"),
        ["kubectl", "--context=c", "--namespace=n"],
    )
    mine = "jobset.sigs.k8s.io/jobset-name=r1"
    assert gke(fakes, "status", *where).returncode == 0
    assert fakes.calls() == [
        [*there, "get", "jobset", "r1"],
        [*there, "get", "pods", "--output=wide", f"--selector={mine}"],
    ]
    assert gke(fakes, "delete", *where).returncode == 0
    assert fakes.calls() == [[*there, "delete", "jobset", "r1"]]


POD = "--selector=jobset.sigs.k8s.io/jobset-name=r1,batch.kubernetes.io/job-completion-index=7"
GET = [
    "kubectl",
    "get",
    "jobset",
    "r1",
    '--output=jsonpath={.status.conditions[?(@.status=="True")].type}',
]
WAIT = ["kubectl", "wait", "pod", POD, "--for=condition=Ready", "--timeout=10s"]
READ = ["kubectl", "logs", "--follow", "--tail=-1", "--container=compass", POD]


def followed(fakes) -> tuple[int, str, list[list[str]]]:
    """`logs` of worker 7: its status, what it printed, its calls without the times that
    they name.
    """
    done = gke(fakes, "logs", "--name", "r1", "--worker", "7")
    return (
        done.returncode,
        done.stdout + done.stderr,
        [[word.split("-time=")[0] for word in call] for call in fakes.calls()],
    )


@pytest.mark.parametrize("end,expected", [("StartupPolicyCompleted Completed", 0), ("Failed", 1)])
def test_logs_follow_attempt_after_attempt(fakes, end, expected):
    """From right after apply, over a restart, to the JobSet's end; no attempt's output twice."""
    fakes.answer("get jobset", "", "", "StartupPolicyCompleted", end)
    fakes.answer("wait", status=1, err="error: no matching resources found\n")
    fakes.answer("logs", "first\n", "second\n")
    status, printed, calls = followed(fakes)
    assert calls == [
        GET,
        WAIT,
        GET,
        WAIT,
        READ,
        GET,
        WAIT,
        [*READ, "--since"],
        GET,
        [*READ, "--since"],
    ]
    assert (
        status == expected
        and printed
        == "first\nsecond\nlaunch/gke.py: waiting for the worker's pod: error: no matching"
        " resources found\n"
    )


def test_logs_where_the_run_has_ended(fakes):
    fakes.answer("get jobset", "Completed")
    assert followed(fakes) == (0, "", [GET, READ])


def test_logs_where_the_connection_broke(fakes):
    """Everything again; and a cluster that never answers again ends it."""
    fakes.answer("get jobset", "", "")
    fakes.answer("get jobset", status=9, times=9)
    fakes.answer("logs", status=1)
    assert followed(fakes) == (9, "", [GET, WAIT, READ, GET, WAIT, READ, *[GET] * 5])


def test_dry_run_of_logs(fakes):
    done = gke(fakes, "logs", "--dry-run", "--name", "r1", "--worker", "7")
    fakes.run("bash", "-ec", done.stdout)
    assert fakes.calls() == [GET, WAIT, READ, GET]


XPK = ("--cluster", "c", "--zone", "z", "--project", "p")


def mounted(action: str) -> tuple[str, ...]:
    """The bucket and the training command: a pod mounts it by itself, xpk through a storage of the
    cluster.
    """
    return ("--storage", "bkt", *COMMAND) if action == "xpk" else TRAIN


def test_xpk(fakes):
    assert gke(fakes, "xpk", *RUN, *XPK, "--spot", "--env", "A=b", *mounted("xpk")).returncode == 0
    assert fakes.calls() == [
        [
            *(
                "xpk",
                "workload",
                "create",
                "--cluster=c",
                "--project=p",
                "--zone=z",
                "--workload=r1",
                "--tpu-type=v5p-4x4x4",
            ),
            *("--docker-image=repo/compass:1", "--max-restarts=10", "--restart-on-exit-codes=1,75"),
            *(
                "--termination-grace-period-seconds=120",
                "--spot",
                "--storage=bkt",
                "--env=COMPASS_DISTRIBUTED=auto",
                "--env=A=b",
            ),
            r"""--command=compass train configs/x.py --run-dir '/gcs/it'"'"'s r1'""",
        ]
    ]


@pytest.mark.parametrize(
    "action,program",
    [
        ("apply", "kubectl"),
        ("logs", "kubectl"),
        ("status", "kubectl"),
        ("delete", "kubectl"),
        ("xpk", "xpk"),
    ],
)
def test_the_status_is_that_of_the_program(fakes, action, program):
    fakes.answer(program, status=9, err="no such cluster\n")
    done = gke(fakes, action, *RUN, *XPK, *mounted(action))
    assert done.returncode == 9 and done.stderr == "no such cluster\n" and len(fakes.calls()) == 1


@pytest.mark.parametrize("action", ["apply", "status", "delete", "xpk"])
def test_dry_run_prints_what_a_shell_can_run(fakes, action):
    """Nothing is called; run by a shell, what was printed makes the very calls, manifest
    included.
    """
    words = (action, *RUN, *XPK, "--env", "A=it's", *mounted(action))
    done = gke(fakes, *words[:1], "--dry-run", *words[1:])
    assert done.returncode == 0 and fakes.calls() == []
    fakes.run("bash", "-ec", done.stdout)
    printed = fakes.inputs()
    gke(fakes, *words)
    assert printed and fakes.inputs() == printed


@pytest.mark.parametrize(
    "words,message",
    [
        (
            ("apply", "--name", "r1"),
            (
                "apply: missing --topology, --image, -- COMMAND. For example\n  python"
                " launch/gke.py apply --name run1"
            ),
        ),
        (
            ("xpk", *RUN, *COMMAND),
            (
                "xpk: missing --cluster. For example\n  python launch/gke.py xpk --cluster CLUSTER"
                " --name run1"
            ),
        ),
        (
            ("xpk", *RUN, *XPK, *TRAIN),
            (
                "xpk: no --bucket. xpk mounts storages that its cluster knows. Once: xpk storage"
                " attach bkt --type=gcsfuse --bucket=bkt"
            ),
        ),
        (
            ("xpk", *RUN, *XPK, "--", "compass", "--run-dir", "gs://bkt/r/1"),
            "say --storage bkt (in front of --) and --run-dir /gcs/r/1",
        ),
        (
            ("apply", *RUN, "--", "compass", "--run-dir=gs://bkt/r1"),
            "is a path: say --bucket bkt (in front of --) and --run-dir /gcs/r1",
        ),
        (("apply", *RUN, *COMMAND), "the run directory is on a bucket, and --bucket is missing"),
        (
            ("apply", *RUN, "--bucket", "bkt", "--", "compass", "train", "c"),
            "--run-dir is missing: the run would be on each pod's own disk",
        ),
        (
            ("render", *RUN, "--", "python", "-m", "compass_jax", "sft", "c", "--run_dir=runs/x"),
            (
                "--run-dir runs/x is relative: the run would be on each pod's own disk, which the"
                " others do not see and which ends with the pod. Say --bucket my-bucket (in front"
                " of --) and --run-dir /gcs/r1\n"
            ),
        ),
        (
            ("xpk", *RUN, *XPK, "--", "compass", "eval", "c", "--run-dir", "x"),
            "Say --storage my-bucket (in front of --) and --run-dir /gcs/r1\n",
        ),
        (
            ("apply", *RUN, "--bucket", "gs://bkt", *COMMAND),
            "--bucket gs://bkt: the name alone, without gs:// and folders",
        ),
        (("logs",), "logs: missing --name. For example\n  python launch/gke.py logs --name run1"),
        (
            ("apply", *RUN, "--topology", "v7:4x4", *TRAIN),
            "v6e: 2x2, 2x4, 4x4, 4x8, 8x8, 8x16, 16x16",
        ),
        (
            ("apply", *RUN, "--topology", "v5p:4x4", *TRAIN),
            "--topology v5p:4x4 is not known; write GENERATION:TOPOLOGY",
        ),
        (("apply", *RUN, "--topology", "v5p:4x4x6", *TRAIN), "is not known"),
        (("apply", *RUN, "--topology", "v5p:8x4x4", *TRAIN), "is not known"),
        (("apply", *RUN, "--topology", "v5p:0x4x4", *TRAIN), "is not known"),
        (("apply", *RUN, "--topology", "v5p:16x16x28", *TRAIN), "at most 6,144 chips"),
        (("apply", *RUN, "--topology", "v6e:4x4x4", *TRAIN), "is not known"),
        (("apply", *RUN, "--topology", "v5p", *TRAIN), "is not known"),
        (("apply", *RUN, "--name", "Run_1", *TRAIN), "--name Run_1: at most 40 lower-case letters"),
        (("apply", *RUN, "--name", "r" * 41, *TRAIN), "at most 40"),
        (("apply", *RUN, "--env", "A", *TRAIN), "--env A: write NAME=VALUE"),
        (("apply", *RUN, "--max-restarts", "-1", *TRAIN), "--max-restarts -1: 0 or more"),
        (("applly", *RUN), "invalid choice: 'applly'"),
    ],
)
def test_mistakes(fakes, words, message):
    done = gke(fakes, *words)
    assert (
        done.returncode == 2
        and message in done.stderr
        and "Traceback" not in done.stderr
        and fakes.calls() == []
    )


def test_without_kubectl(fakes):
    done = fakes.run(sys.executable, SCRIPT, "delete", "--name", "r1", path="/nowhere")
    assert done.returncode == 127 and "kubectl is not on PATH" in done.stderr


def test_what_has_no_run_directory(fakes):
    assert (
        rendered(fakes, *RUN, "--", "compass", "eval", "configs/x.py", "--checkpoint", "/nfs/r1")[
            "kind"
        ]
        == "JobSet"
    )


def test_interval_that_is_no_number(fakes):
    done = fakes.run(sys.executable, SCRIPT, "logs", "--name", "r1", COMPASS_POLL_S="soon")
    assert (
        done.returncode == 2
        and done.stderr == "launch/gke.py: COMPASS_POLL_S=soon: must be a number of seconds\n"
    )


def test_its_exit_statuses_are_those_of_the_command():
    """The script imports nothing of the package, so that it runs where that is not installed."""
    from compass_jax.cli import STOPPED
    from compass_jax.distributed import LOST

    text, shell = SCRIPT.read_text(), SCRIPT.with_name("tpu_vm.sh").read_text()
    assert f"\nSAVED = {STOPPED} " in text and f"\nLOST = {LOST} " in text
    assert f"{LOST} | 134)" in shell and f"gone | running | {STOPPED})" in shell
