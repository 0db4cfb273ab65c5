"""launch/tpu_vm.sh: the gcloud calls of each command, their order, and how the script acts on the
answers.
"""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "launch" / "tpu_vm.sh"
SLICE = ("--name", "r1", "--zone", "us-east5-a", "--project", "p")
WHERE = ["--zone=us-east5-a", "--project=p"]
SPOT = (*SLICE, "--type", "v5p-128", "--spot")
FIXED = (*SLICE, "--type", "v5p-128")
TRAIN = ("--bucket", "bkt", "--", "compass", "train", "configs/x.py", "--run-dir", "/gcs/it's r1")
QUOTED = r"compass train configs/x.py --run-dir '/gcs/it'\''s r1'"
GONE = (
    "ERROR: (gcloud.compute.tpus.tpu-vm.describe) NOT_FOUND: Resource"
    " 'projects/p/locations/us-east5-a/nodes/r1' was not found"
)
NO_LOGIN = (
    "ERROR: (gcloud.compute.tpus.tpu-vm.describe) You do not currently have an active account"
    " selected."
)
NODE, QUEUE = "tpu-vm describe", "queued-resources describe"


def tpu_vm(*words: str) -> list[str]:
    return ["gcloud", "compute", "tpus", "tpu-vm", *words, *WHERE]


def queued(*words: str) -> list[str]:
    return ["gcloud", "compute", "tpus", "queued-resources", *words, *WHERE]


ASK_NODE = tpu_vm("describe", "r1", "--format=value(state)")
ASK_QUEUE = queued("describe", "r1", "--format=value(state.state)")
CREATE = tpu_vm("create", "r1", "--accelerator-type=v5p-128", "--version=v2-alpha-tpuv5")
ENQUEUE = queued(
    *("create", "r1", "--node-id=r1", "--accelerator-type=v5p-128"),
    *("--runtime-version=v2-alpha-tpuv5", "--spot"),
)
DEQUEUE = queued("delete", "r1", "--force", "--quiet")
UNPACK = (
    "rm -rf compass && mkdir compass && tar -xzf compass.tar.gz -C compass && rm compass.tar.gz &&"
    " compass/launch/worker.sh install"
)
ASK = (
    'test -x compass/launch/worker.sh || { echo "$(hostname): no command yet"; exit 0; };'
    " compass/launch/worker.sh status"
)


def copied(fakes) -> list[list[str]]:
    return [
        tpu_vm("scp", "compass.tar.gz", "r1:compass.tar.gz", "--worker=all"),
        ssh(UNPACK),
    ]


def ssh(command: str, worker: str = "all") -> list[str]:
    """Returns an ssh call that ends within two minutes when the host is gone."""
    return tpu_vm(
        "ssh",
        "r1",
        f"--worker={worker}",
        "--ssh-flag=-oServerAliveInterval=30 -oServerAliveCountMax=4",
        f"--command={command}",
    )


MOUNT = ssh("compass/launch/worker.sh mount_bucket bkt")
RESTART = ssh(f"compass/launch/worker.sh restart {QUOTED}")
FOLLOW = ssh("compass/launch/worker.sh follow", "0")


def test_create(fakes):
    assert fakes.vm("create", *FIXED).returncode == 0 and fakes.calls() == [CREATE]
    assert fakes.vm("create", *FIXED, "--version", "other").returncode == 0
    assert fakes.calls() == [
        tpu_vm("create", "r1", "--accelerator-type=v5p-128", "--version=other")
    ]
    fakes.answer("tpu-vm create", status=7)
    assert fakes.vm("create", *FIXED).returncode == 7


def test_create_of_spot_capacity_waits_in_the_queue(fakes):
    fakes.answer(QUEUE, "ACCEPTED\n", "WAITING_FOR_RESOURCES\n", "PROVISIONING\n", "ACTIVE\n")
    done = fakes.vm("create", *SPOT)
    assert done.returncode == 0 and fakes.calls() == [ENQUEUE, *[ASK_QUEUE] * 4]
    assert "r1: WAITING_FOR_RESOURCES" in done.stderr
    fakes.answer(QUEUE, "FAILED\n")
    done = fakes.vm("create", *SPOT)
    assert done.returncode == 1 and "the queue gave no slice: FAILED" in done.stderr


@pytest.mark.parametrize("command", ["create", "resume"])
def test_a_gcloud_that_fails_ends_no_wait_in_the_queue(fakes, command):
    """The script prints each complaint once."""
    if command == "resume":
        fakes.answer(QUEUE, "ACCEPTED\n")
    fakes.answer(QUEUE, status=1, err=NO_LOGIN, times=9)
    fakes.answer(QUEUE, status=1, err="ERROR: no network", times=9)
    fakes.answer(QUEUE, "ACTIVE\n")
    fakes.answer(NODE, "READY\n")
    done = fakes.vm(command, *SPOT, *TRAIN)
    assert (
        done.returncode == 0
        and done.stderr.count("active account") == done.stderr.count("no network") == 1
    )
    assert fakes.calls().count(ASK_QUEUE) == (20 if command == "resume" else 19)


def test_flags_of_gcloud_create(fakes):
    flags = ("--create-flag=--network=n", "--create-flag=--service-account=a@b c")
    added = ["--network=n", "--service-account=a@b c"]
    fakes.vm("create", *FIXED, "--reserved", *flags)
    assert fakes.calls() == [[*CREATE[: -len(WHERE)], "--reserved", *added, *WHERE]]
    fakes.answer(QUEUE, "ACTIVE\n")
    fakes.vm("create", *SPOT, *flags)
    assert fakes.calls() == [[*ENQUEUE[: -len(WHERE)], *added, *WHERE], ASK_QUEUE]


@pytest.mark.parametrize(
    "kind,version",
    [
        ("v4-8", "tpu-ubuntu2204-base"),
        ("v5litepod-16", "v2-alpha-tpuv5-lite"),
        ("v6e-256", "v2-alpha-tpuv6e"),
    ],
)
def test_the_version_goes_with_the_type(fakes, kind, version):
    fakes.vm("create", *SLICE, "--type", kind)
    assert fakes.calls() == [
        tpu_vm("create", "r1", f"--accelerator-type={kind}", f"--version={version}")
    ]


@pytest.mark.parametrize(
    ("command", "words", "calls"),
    [
        ("run", (*SLICE, *TRAIN), [MOUNT, ssh(f"compass/launch/worker.sh start {QUOTED}")]),
        (
            "run",
            (*SLICE, "--", "compass", "eval", "c.py", "--checkpoint", "/nfs/r1"),
            [ssh("compass/launch/worker.sh start compass eval c.py --checkpoint /nfs/r1")],
        ),
        ("stop", SLICE, [ssh("compass/launch/worker.sh stop")]),
        ("logs", (*SLICE, "--worker", "3"), [ssh("compass/launch/worker.sh follow", "3")]),
        ("delete", SLICE, [tpu_vm("delete", "r1", "--quiet")]),
        ("delete", SPOT, [DEQUEUE]),
    ],
)
def test_each_command_makes_its_calls(fakes, command, words, calls):
    assert fakes.vm(command, *words).returncode == 0
    assert fakes.calls() == calls


def test_copy_leaves_no_archive(fakes):
    assert fakes.vm("copy", *SLICE).returncode == 0
    assert fakes.calls() == copied(fakes) and not [*fakes.folder.rglob("compass.tar.gz")]
    fakes.answer("tpu-vm scp", status=1)
    assert fakes.vm("copy", *SLICE).returncode == 1
    assert not [*fakes.folder.rglob("compass.tar.gz"), *fakes.folder.glob("tmp.*")]


@pytest.mark.parametrize(
    "command,call",
    [("copy", "scp"), ("run", "ssh"), ("logs", "ssh"), ("stop", "ssh"), ("delete", "delete")],
)
def test_the_status_is_that_of_gcloud(fakes, command, call):
    fakes.answer(f"tpu-vm {call}", status=9)
    assert fakes.vm(command, *SLICE, *TRAIN).returncode == 9 and len(fakes.calls()) == 1


def test_status(fakes):
    fakes.answer(NODE, "READY\n", "PREEMPTED\n")
    done = fakes.vm("status", *SLICE)
    assert done.stdout == "r1: READY\n" and fakes.calls() == [ASK_NODE, ssh(ASK)]
    assert fakes.vm("status", *SLICE).stdout == "r1: PREEMPTED\n" and fakes.calls() == [ASK_NODE]
    fakes.answer(NODE, status=1, err=GONE)
    assert fakes.vm("status", *SLICE).stdout == "r1: ABSENT\n"


def resumed(fakes) -> list[list[str]]:
    return [ssh(ASK), *copied(fakes), MOUNT, RESTART]


@pytest.mark.parametrize(
    ("words", "queue", "node", "calls"),
    [
        pytest.param(FIXED, (), (GONE,), [ASK_NODE, CREATE], id="the slice is gone"),
        pytest.param(
            SPOT,
            (GONE, "ACTIVE\n"),
            (GONE,),
            [ASK_QUEUE, ASK_NODE, ENQUEUE, ASK_QUEUE],
            id="the slice and its queued request are gone",
        ),
        pytest.param(
            SPOT,
            ("SUSPENDING\n", "SUSPENDED\n", "PROVISIONING\n", "ACTIVE\n"),
            ("PREEMPTED\n",),
            [ASK_QUEUE, ASK_QUEUE, ASK_NODE, DEQUEUE, ENQUEUE, ASK_QUEUE, ASK_QUEUE],
            id="preempted: the request is deleted and made again",
        ),
        pytest.param(
            FIXED,
            (),
            ("PREEMPTED\n",),
            [ASK_NODE, tpu_vm("delete", "r1", "--quiet"), CREATE],
            id="preempted, and never queued",
        ),
        pytest.param(
            SPOT,
            ("WAITING_FOR_RESOURCES\n", "ACTIVE\n"),
            ("CREATING\n", "READY\n"),
            [ASK_QUEUE, ASK_QUEUE, ASK_NODE, ASK_NODE],
            id="a request that still waits",
        ),
    ],
)
def test_resume_gets_a_slice(fakes, words, queue, node, calls):
    for kind, answers in ((QUEUE, queue), (NODE, node)):
        for answer in answers:
            is_absent = answer == GONE
            fakes.answer(
                kind,
                "" if is_absent else answer,
                status=int(is_absent),
                err=GONE if is_absent else "",
            )
    assert fakes.vm("resume", *words, *TRAIN).returncode == 0
    assert fakes.calls() == [*calls, *resumed(fakes)]


@pytest.mark.parametrize(
    "answer,restarts",
    [("host: running\n", False), ("host: ended with status 1\n", True), ("host: killed\n", True)],
)
def test_resume_where_the_slice_is_there(fakes, answer, restarts):
    """A running command is left alone; one that ended is restarted."""
    fakes.answer(NODE, "READY\n")
    fakes.answer(" ssh ", answer)
    done = fakes.vm("resume", *FIXED, *TRAIN)
    assert done.returncode == 0 and ("running already" in done.stderr) is not restarts
    assert fakes.calls() == [ASK_NODE, *(resumed(fakes) if restarts else [ssh(ASK)])]


@pytest.mark.parametrize(
    "out,status,err,expected,message",
    [
        ("", 1, NO_LOGIN, 1, "active account"),
        ("STOPPED\n", 0, "", 2, "r1: STOPPED. Start or delete it, then try again"),
    ],
)
def test_resume_touches_nothing_that_it_does_not_understand(
    fakes, out, status, err, expected, message
):
    fakes.answer(NODE, out, status=status, err=err)
    done = fakes.vm("resume", *FIXED, *TRAIN)
    assert done.returncode == expected and message in done.stderr and fakes.calls() == [ASK_NODE]


@pytest.mark.parametrize("command", ["create", "copy", "run", "logs", "status", "stop", "delete"])
def test_dry_run_prints_what_a_shell_can_run(fakes, command):
    """A dry run calls no program; a shell that runs its output makes exactly these calls."""
    done = fakes.vm(command, *FIXED, "--dry-run", *TRAIN)
    assert done.returncode == 0 and fakes.calls() == [] and done.stderr == ""
    fakes.answer(NODE, "READY\n", times=2)
    fakes.run("bash", "-ec", done.stdout)
    printed = fakes.calls()
    fakes.vm(command, *FIXED, *TRAIN)
    assert printed and fakes.calls() == printed


def test_dry_run_of_what_depends_on_answers_takes_the_longest_way(fakes):
    calls = {"create": [ENQUEUE, ASK_QUEUE], "delete": [DEQUEUE]}
    calls["resume"] = [ASK_NODE, *calls["create"], *copied(fakes), MOUNT, RESTART]
    calls["watch"] = [*calls["resume"], FOLLOW]
    for command, expected in calls.items():
        done = fakes.vm(command, *SPOT, "--dry-run", *TRAIN)
        assert done.returncode == 0 and fakes.calls() == [] and done.stderr == ""
        fakes.run("bash", "-ec", done.stdout)
        assert fakes.calls() == expected


@pytest.mark.parametrize(
    "words,message",
    [
        (
            ("create", "--name", "r1"),
            (
                "create: missing --zone --project --type. For example\n  launch/tpu_vm.sh create"
                " --name run1 --zone"
            ),
        ),
        (("run", *SLICE), "run: missing -- TRAINING COMMAND. For example"),
        (("resume", *SLICE, *TRAIN), "resume: missing --type"),
        (("logs", "--zone", "z", "--project", "p"), "logs: missing --name"),
        (("create", *SLICE, "--type", "tpu7x-128"), "launch/gke.py runs on tpu7x"),
        (
            ("create", *SLICE, "--type", "v9-8"),
            "--type v9-8 is not known: v4-N, v5litepod-N, v5p-N or v6e-N",
        ),
        (("create", "--name", "--zone", "z"), "--name: its value is missing"),
        (
            ("create", *SPOT, "--reserved"),
            "--spot and --reserved: a slice is one or the other; leave one out",
        ),
        (
            ("create", *FIXED, "--create-flag", "--network=n"),
            "--create-flag: write it with =, as in --create-flag=--network=mine",
        ),
        (
            ("run", *SLICE, "--bucket", "bkt", "--", "compass", "train", "c.py"),
            "--run-dir is missing: the run would be on each worker's own disk",
        ),
        (
            ("watch", *FIXED, "--", "compass", "train-judge", "c.py"),
            "--run-dir is missing: the run would be on each worker's own disk",
        ),
        (
            ("watch", *FIXED, "--", "python", "-m", "compass_jax", "sft", "c.py"),
            "Say --bucket my-bucket (in front of --) and --run-dir /gcs/r1\n",
        ),
        (
            (
                "resume",
                *FIXED,
                *["--bucket", "bkt", "--", "compass", "eval", "c.py", "--run_dir=runs/x"],
            ),
            "--run-dir runs/x is relative: the run would",
        ),
        (
            ("run", *SLICE, "--", "compass", "train", "c.py", "--run-dir", ""),
            "--run-dir is missing",
        ),
        (("create", *SLICE, "--tpye", "v5p-8"), "--tpye is not known"),
        (("launch", *SLICE), "launch is not known: create, copy, files, run"),
    ],
)
def test_mistakes(fakes, words, message):
    done = fakes.vm(*words)
    assert done.returncode == 2 and message in done.stderr and fakes.calls() == []


def test_without_gcloud(fakes):
    for name in ("bash", "dirname"):
        (fakes.folder / "few").mkdir(exist_ok=True)
        (fakes.folder / "few" / name).symlink_to(shutil.which(name))
    done = fakes.vm("delete", *SLICE, path=str(fakes.folder / "few"))
    assert done.returncode == 2 and "gcloud is not on PATH" in done.stderr


def test_help(fakes):
    done = fakes.run(fakes.script)
    assert done.returncode == 0 and "resume" in done.stdout and fakes.calls() == []


@pytest.mark.parametrize(
    "script", sorted((ROOT / "launch").glob("*.sh")), ids=lambda path: path.name
)
def test_shellcheck(script):
    shellcheck = shutil.which("shellcheck") or shutil.which(
        "shellcheck", path=str(Path(os.sys.executable).parent)
    )
    assert shellcheck, "shellcheck is missing: pip install -e '.[dev]' brings it"
    done = subprocess.run([shellcheck, script], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
