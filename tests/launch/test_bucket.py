"""--bucket of launch/tpu_vm.sh: the calls with which worker.sh mounts the bucket, their order, and
what happens when one fails.
"""

import os
import shutil
from pathlib import Path

import pytest
from test_tpu_vm import ASK, FIXED, MOUNT, NODE, RESTART, SLICE, TRAIN, copied, ssh

ROOT = Path(__file__).parents[2]
KEY, URL = "/usr/share/keyrings/cloud.google.asc", "https://packages.cloud.google.com/apt"
MOUNT_CHECK = ["mountpoint", "-q", "/gcs"]
INSTALL = [
    ["sudo", "curl", "-fsSL", "-o", KEY, f"{URL}/doc/apt-key.gpg"],
    ["lsb_release", "-c", "-s"],
    ["sudo", "tee", "/etc/apt/sources.list.d/gcsfuse.list"],
    ["sudo", "apt-get", "-o", "DPkg::Lock::Timeout=300", "-q", "update"],
    ["sudo", "apt-get", "-o", "DPkg::Lock::Timeout=300", "-q", "-y", "install", "gcsfuse"],
]
OPTIONS = [
    "--implicit-dirs",
    "--metadata-cache-ttl-secs=0",
    f"--uid={os.getuid()}",
    f"--gid={os.getgid()}",
    "-o",
    "allow_other",
]
MOUNTS = [
    ["sudo", "umount", "-l", "/gcs"],
    ["sudo", "mkdir", "-p", "/gcs"],
    ["sudo", "gcsfuse", *OPTIONS, "bkt", "/gcs"],
]


@pytest.fixture
def worker(fakes):
    """Returns one worker with gcsfuse installed and no mount; sudo only records its calls."""
    launch = fakes.worker(0) / "compass" / "launch"
    launch.mkdir(parents=True)
    shutil.copy(ROOT / "launch" / "worker.sh", launch)
    for name in ("sudo", "mountpoint", "findmnt", "lsb_release", "gcsfuse", "hostname"):
        fakes.add(name)
    fakes.answer("worker.sh start", times=9)
    fakes.answer("mountpoint", status=1)
    fakes.answer("lsb_release", "jammy\n")
    fakes.answer("hostname", "t1v-w-3\n", times=9)
    return fakes


def mount(fakes):
    """Mounts on the worker as tpu_vm.sh does. Returns the completed command, the worker's calls,
    and whether the run started.
    """
    done = fakes.vm("run", *SLICE, *TRAIN)
    calls = fakes.calls()
    started = "worker.sh start" in str(calls[-1])
    assert calls[0] == MOUNT
    return done, calls[1 : len(calls) - 1 if started else None], started


def test_a_bucket_is_mounted(worker):
    done, calls, started = mount(worker)
    assert done.returncode == 0 and started and calls == [MOUNT_CHECK, *MOUNTS, MOUNT_CHECK]


def test_gcsfuse_is_installed_where_it_is_missing(worker):
    (worker.bin / "gcsfuse").unlink()
    _, calls, started = mount(worker)
    assert started and calls == [MOUNT_CHECK, *INSTALL, *MOUNTS, MOUNT_CHECK]


def test_the_repository_is_that_of_the_release(worker):
    """The line that `sudo tee` writes to apt's list names the release."""
    (worker.bin / "gcsfuse").unlink()
    apt_list = worker.folder / "list"
    (worker.bin / "sudo").write_text(f"#!/bin/bash\nif [[ $1 == tee ]]; then cat >{apt_list}; fi\n")
    assert (
        mount(worker)[2]
        and apt_list.read_text() == f"deb [signed-by={KEY}] {URL} gcsfuse-jammy main\n"
    )


def test_what_is_mounted_is_left_alone(worker):
    mount(worker)
    worker.answer("findmnt", "bkt\n")
    _, calls, started = mount(worker)
    assert started and calls == [
        MOUNT_CHECK,
        ["findmnt", "-n", "-o", "SOURCE", "--mountpoint", "/gcs"],
    ]


def test_another_bucket_there_is_refused(worker):
    mount(worker)
    worker.answer("findmnt", "other\n")
    done, calls, started = mount(worker)
    assert done.returncode == 1 and not started and not any(words[0] == "sudo" for words in calls)
    assert "t1v-w-3: cannot mount gs://bkt at /gcs: /gcs holds other already" in done.stderr


@pytest.mark.parametrize(
    "call,message",
    [
        ("sudo curl", "gcsfuse cannot be installed"),
        ("-y install gcsfuse", "gcsfuse cannot be installed"),
        ("sudo mkdir", "the folder cannot be made"),
        ("sudo gcsfuse", "gcsfuse failed; may the VM's service account use the bucket?"),
        ("mountpoint", "gcsfuse ended well, but nothing is mounted"),
    ],
)
def test_a_mount_that_fails_stops_the_run_and_names_the_worker(worker, call, message):
    if message == "gcsfuse cannot be installed":
        (worker.bin / "gcsfuse").unlink()
    worker.answer(call, status=100, err="E: as it says\n")
    done, calls, started = mount(worker)
    assert done.returncode == 1 and not started
    assert (
        f"t1v-w-3: cannot mount gs://bkt at /gcs: {message}\n" in done.stderr
        and "E: as it says" in done.stderr
    )
    assert call in " ".join(calls[-2]) + " ".join(calls[-1])


@pytest.mark.parametrize("failing", ["sudo umount", "-q update"])
def test_what_may_fail(worker, failing):
    """Usually no mount is there to unmount, and another apt repository may be out of order."""
    (worker.bin / "gcsfuse").unlink()
    worker.answer(failing, status=100)
    assert mount(worker)[2]


def test_resume_mounts_after_the_copy_and_before_the_run(fakes):
    fakes.answer(NODE, "READY\n", times=2)
    fakes.answer("mount_bucket", status=1)
    assert fakes.vm("resume", *FIXED, *TRAIN).returncode == 1
    assert fakes.calls()[1:] == [ssh(ASK), *copied(fakes), MOUNT]
    assert fakes.vm("resume", *FIXED, *TRAIN).returncode == 0
    assert fakes.calls()[1:] == [ssh(ASK), *copied(fakes), MOUNT, RESTART]


def test_copy_mounts_and_dry_runs_say_so(fakes):
    assert fakes.vm("copy", *SLICE, "--bucket", "bkt").returncode == 0 and fakes.calls() == [
        *copied(fakes),
        MOUNT,
    ]
    done = fakes.vm("run", *SLICE, "--dry-run", *TRAIN)
    first, second = done.stdout.splitlines()
    assert (
        "'--command=compass/launch/worker.sh mount_bucket bkt'" in first
        and "worker.sh start" in second
        and fakes.calls() == []
    )


def test_without_a_bucket_nothing_is_mounted(fakes):
    assert (
        fakes.vm(
            "run",
            *SLICE,
            "--",
            "compass",
            "train",
            "x.py",
            "--run-dir",
            "/nfs/gcs/r1",
        ).returncode
        == 0
    )
    assert fakes.calls() == [
        ssh("compass/launch/worker.sh start compass train x.py --run-dir /nfs/gcs/r1")
    ]


@pytest.mark.parametrize(
    "words,message",
    [
        (
            ("--bucket", "gs://bkt", "--", "compass"),
            "--bucket gs://bkt: the name alone, without gs:// and folders. Say --bucket my-bucket",
        ),
        (("--bucket", "bkt/runs", "--", "compass"), "--bucket bkt/runs: the name alone"),
        (("--bucket", "--", "compass"), "--bucket: its value is missing"),
        (
            ("--", "compass", "--run-dir", "gs://bkt/r/1", "-x"),
            "a run directory is a path: say --bucket bkt (in front of --) and --run-dir /gcs/r/1",
        ),
        (
            ("--", "compass", "--run_dir=gs://bkt/r1"),
            "say --bucket bkt (in front of --) and --run-dir /gcs/r1\n",
        ),
        (
            ("--", "compass", "--run-dir", "/gcs/r1"),
            "the run directory is on a bucket, and --bucket is missing",
        ),
    ],
)
def test_mistakes(fakes, words, message):
    done = fakes.vm("run", *SLICE, *words)
    assert done.returncode == 2 and message in done.stderr and fakes.calls() == []
