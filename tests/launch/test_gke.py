"""launch/gke.py: its calls of kubectl and xpk, and the mistakes that it refuses."""

import sys
from pathlib import Path

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


def test_apply(fakes):
    assert gke(fakes, "apply", *RUN, *TRAIN).returncode == 0
    ((words, manifest),) = fakes.inputs()
    assert words == ["kubectl", "apply", "--filename", "-"] and yaml.safe_load(
        manifest
    ) == rendered(fakes, *RUN, *TRAIN)


def test_status_delete(fakes):
    options, kubectl = (
        ("--name", "r1", "--context", "c", "--namespace", "n"),
        ["kubectl", "--context=c", "--namespace=n"],
    )
    label = "jobset.sigs.k8s.io/jobset-name=r1"
    assert gke(fakes, "status", *options).returncode == 0
    assert fakes.calls() == [
        [*kubectl, "get", "jobset", "r1"],
        [*kubectl, "get", "pods", "--output=wide", f"--selector={label}"],
    ]
    assert gke(fakes, "delete", *options).returncode == 0
    assert fakes.calls() == [[*kubectl, "delete", "jobset", "r1"]]


XPK = ("--cluster", "c", "--zone", "z", "--project", "p")


def mounted(action: str) -> tuple[str, ...]:
    """Returns the bucket and the training command: a pod mounts the bucket directly, xpk through a
    storage of the cluster.
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
                "--env=JAX_COMPILATION_CACHE_DIR=/gcs/compass-programs",
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
    """A dry run calls no program; a shell that runs its output makes exactly these calls, with the
    same manifest.
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
            ("apply", *RUN, "--bucket", "bkt", "--", "compass", "train-judge", "c"),
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
        (("xpk", *RUN, *XPK, "--secret", "samplers", *TRAIN), "xpk: no --secret"),
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
    """The script does not import the package, so that it runs where the package is missing."""
    from compass_jax.commands.work import STOPPED
    from compass_jax.devices.distributed import LOST

    text, shell = (SCRIPT.with_name(name).read_text() for name in ("gke.py", "tpu_vm.sh"))
    text += SCRIPT.with_name("jobset.py").read_text()
    assert f"\nSAVED = {STOPPED} " in text and f"\nLOST = {LOST} " in text
    assert f"{LOST} | 134)" in shell and f"gone | running | {STOPPED})" in shell
