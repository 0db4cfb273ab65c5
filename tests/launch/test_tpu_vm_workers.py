"""launch/tpu_vm.sh with two workers: the remote commands run for real, each in a home directory."""

import os
import signal
import subprocess
from pathlib import Path

import pytest
from process_state import alive, wait_for
from test_tpu_vm import FIXED, NODE, ROOT, SCRIPT, SLICE


@pytest.fixture
def workers(fakes):
    """Yields two workers that have a copy of the tree. Their `compass` prints its arguments and
    waits for `let_go` or SIGTERM.
    """
    fakes.add("python3")
    for number in (0, 1):
        home = fakes.worker(number)
        (home / "compass-venv" / "bin").mkdir(parents=True)
        compass = home / "compass-venv" / "bin" / "compass"
        compass.write_text(
            "#!/usr/bin/env bash\ntrap 'echo saved; exit 143' TERM\necho \"$COMPASS_DISTRIBUTED,"
            ' $#: $*"\nuntil [ -e ~/go ]; do sleep 0.02; done\nexit "$2"\n'
        )
        compass.chmod(0o755)
    assert fakes.vm("copy", *SLICE).returncode == 0
    yield fakes
    for file in fakes.folder.glob("worker*/compass-run/pid"):
        if Path(f"/proc/{file.read_text().strip()}").exists():
            os.killpg(int(file.read_text()), signal.SIGKILL)


def test_copy_brings_the_tree_and_installs_it(workers):
    workers.calls()
    assert workers.run(SCRIPT, "copy", *SLICE).returncode == 0
    installs = [words for words in workers.calls() if words[0] == "python3"]
    assert [words[2:4] for words in installs] == [["pip", "install"], ["uv", "pip"]] * 2
    for number in (0, 1):
        tree = workers.worker(number) / "compass"
        assert (tree / "compass_jax" / "commands" / "cli.py").read_text() == (
            ROOT / "compass_jax" / "commands" / "cli.py"
        ).read_text()
        assert (
            not (tree / ".git").exists()
            and not (tree / ".venv").exists()
            and os.access(tree / "launch" / "worker.sh", os.X_OK)
        )


def test_copy_leaves_out_what_is_large_and_keeps_no_archive(workers):
    for name in ("weights", "data", "runs", "compass_jax/data"):
        (workers.script.parents[1] / name).mkdir(parents=True)
        (workers.script.parents[1] / name / "file").touch()
    assert workers.vm("copy", *SLICE).returncode == 0
    for number in (0, 1):
        files = {
            str(file.relative_to(workers.worker(number)))
            for file in workers.worker(number).rglob("*.tar.gz")
        }
        files |= {
            str(file.relative_to(workers.worker(number)))
            for file in workers.worker(number).rglob("file")
        }
        assert files == {"compass/compass_jax/data/file"}


SECRETS = (
    *(".env", ".env.local", "prod.env", "configs/.env", "keys/id_rsa", "keys/id_ed25519", "a.pem"),
    *("gcp/service-account.json", "credentials.json", "client_secret.json", ".netrc", "Token"),
    *(".aws/config", "HF_TOKEN.txt", "my-passwords.txt", "tls.KEY"),
)
SENT = (
    "my_run.py",
    "data with space.jsonl",
    "tokenizer.json",
    "-x",
    "configs/a.yaml",
    "environ.py",
)


def fill(tree, *names):
    for name in names:
        (tree / name).parent.mkdir(parents=True, exist_ok=True)
        (tree / name).write_text(name)


def files_of(worker):
    tree = worker / "compass"
    return {str(x.relative_to(tree)) for x in tree.rglob("*") if x.is_file() or x.is_symlink()}


def git(tree, *words):
    subprocess.run(["git", "-C", str(tree), *words], check=True, capture_output=True)


@pytest.mark.parametrize("with_git", [True, False])
def test_copy_sends_no_secret_and_says_so(workers, with_git):
    tree = workers.script.parents[1]
    if with_git:
        git(tree, "init")
        git(tree, "add", "-A")
    fill(tree, *SECRETS, *SENT)
    done = workers.vm("copy", *SLICE)
    assert done.returncode == 0, done.stderr
    for number in (0, 1):
        assert files_of(workers.worker(number)) == {*SENT, "launch/tpu_vm.sh", "launch/worker.sh"}
    for name in SECRETS:
        assert name in done.stderr


def test_copy_packs_what_git_tracks_and_what_it_does_not_ignore(workers):
    tree = workers.script.parents[1]
    fill(tree, "kept.py", "gone.py", "tracked.log", "data/tracked.jsonl", ".env")
    git(tree, "init")
    git(tree, "add", "-f", "-A")
    (tree / "gone.py").unlink()
    fill(tree, "new.py", "out.log", "runs/a", "data/rows.jsonl", "weights/w", "sub/data/rows.jsonl")
    (tree / ".gitignore").write_text("*.log\n")
    (tree / "link").symlink_to("kept.py")
    assert workers.vm("copy", *SLICE).returncode == 0
    assert files_of(workers.worker(0)) == {
        *("kept.py", "tracked.log", "data/tracked.jsonl", "new.py", "sub/data/rows.jsonl", "link"),
        *(".gitignore", "launch/tpu_vm.sh", "launch/worker.sh"),
    }
    assert not (workers.worker(0) / "compass" / ".git").exists()


def test_the_archive_is_in_a_folder_that_cannot_be_foreseen(workers):
    """Another user's link of the former name is not followed."""
    target = workers.folder / "target"
    target.write_text("mine")
    (workers.folder / "compass-r1.tar.gz").symlink_to(target)
    assert workers.vm("copy", *SLICE).returncode == 0 and target.read_text() == "mine"


def test_files_lists_what_copy_packs(workers):
    tree = workers.script.parents[1]
    fill(tree, ".env", "a b.py")
    done = workers.vm("files")
    assert {*done.stdout.split("\0")} == {
        "",
        "./a b.py",
        "./launch/tpu_vm.sh",
        "./launch/worker.sh",
    }
    assert "not copied, by names that secrets have: .env" in done.stderr
    git(tree, "init")
    (tree / ".gitignore").write_text("*\n")
    done = workers.vm("copy", *SLICE)
    assert done.returncode == 2 and "nothing to copy" in done.stderr


def let_go(fakes) -> None:
    for number in (0, 1):
        (fakes.worker(number) / "go").touch()


def test_a_run_survives_its_connection_and_its_status_comes_back(workers):
    assert (
        workers.vm("run", *SLICE, "--", "compass", "run", "5", "two words, it's $HOME").returncode
        == 0
    )
    second = workers.vm("run", *SLICE, "--", "compass", "run", "0")
    assert second.returncode == 3 and second.stderr.count("a command is running already") == 2
    workers.answer(NODE, "READY\n", times=9)
    assert workers.vm("status", *SLICE).stdout.count(": running") == 2
    let_go(workers)
    logs = workers.vm("logs", *SLICE, "--worker", "1")
    assert logs.returncode == 5 and "auto, 3: run 5 two words, it's $HOME" in logs.stdout
    assert workers.vm("status", *SLICE).stdout.count(": ended with status 5") == 2


@pytest.mark.parametrize(
    "mounted,cache_dir,folder",
    [(True, "", "/gcs/compass-programs"), (True, "/mine", "/mine"), (False, "", "none")],
)
def test_compiled_programs_are_kept_on_a_mounted_bucket(
    workers, monkeypatch, mounted, cache_dir, folder
):
    monkeypatch.delenv("JAX_COMPILATION_CACHE_DIR", raising=False)
    workers.add("mountpoint")
    workers.answer("mountpoint", status=0 if mounted else 1, times=9)
    for number in (0, 1):
        compass = workers.worker(number) / "compass-venv" / "bin" / "compass"
        compass.write_text('#!/bin/sh\necho "kept in ${JAX_COMPILATION_CACHE_DIR-none}"\n')
    command = (
        ["env", f"JAX_COMPILATION_CACHE_DIR={cache_dir}", "compass"] if cache_dir else ["compass"]
    )
    assert workers.vm("run", *SLICE, "--", *command).returncode == 0
    for number in (0, 1):
        log = workers.worker(number) / "compass-run" / "log"
        wait_for(lambda log=log: "kept in" in log.read_text())
        assert f"kept in {folder}\n" in log.read_text()


def test_fakes_called_at_the_same_time_each_use_an_answer_up(fakes):
    fakes.add("mountpoint")
    fakes.answer("mountpoint", *(f"answer {number}\n" for number in range(16)))
    calls = " & ".join(["mountpoint"] * 16)
    done = fakes.run("bash", "-c", f"{calls} & wait")
    assert done.stderr == "" and sorted(done.stdout.splitlines()) == sorted(
        f"answer {number}" for number in range(16)
    )


def test_stop_lets_the_command_save(workers):
    workers.vm("run", *SLICE, "--", "compass", "run", "5")
    wait_for(lambda: "auto" in (workers.worker(1) / "compass-run" / "log").read_text())
    assert workers.vm("stop", *SLICE).returncode == 0
    logs = workers.vm("logs", *SLICE, "--worker", "1")
    assert logs.returncode == 143 and "saved" in logs.stdout
    workers.answer(NODE, "READY\n", times=9)
    assert workers.vm("status", *SLICE).stdout.count(": ended with status 143, stopped\n") == 2
    workers.vm("run", *SLICE, "--", "compass", "run", "5")
    assert workers.vm("status", *SLICE).stdout.count(": running\n") == 2


def test_resume_replaces_what_is_left_of_a_run(workers):
    """Worker 0's command is killed and worker 1's hangs: resume restarts both."""
    workers.vm("run", *SLICE, "--", "compass", "run", "5")
    pids = [workers.worker(number) / "compass-run" / "pid" for number in (0, 1)]
    before = [int(file.read_text()) for file in pids]
    os.killpg(before[0], signal.SIGKILL)
    wait_for(lambda: not alive(before[0]))
    workers.answer(NODE, "READY\n", times=9)
    assert workers.vm("logs", *SLICE).returncode == 137
    assert "killed" in workers.vm("status", *SLICE).stdout
    assert workers.vm("resume", *FIXED, "--", "compass", "run", "0").returncode == 0
    assert not set(before) & {int(file.read_text()) for file in pids} and not alive(before[1])
    let_go(workers)
    assert [workers.vm("logs", *SLICE, "--worker", str(n)).returncode for n in (0, 1)] == [0, 0]


ODD = [
    "/gcs/r1\n",
    "/gcs/r\n\n\n",
    "\n/gcs/r",
    "/gcs/a\\nb",
    "/gcs/ two  spaces ",
    "/gcs/$HOME`x`$(y)",
]
ODD += [
    "/gcs/it's \"r1\"'",
    "/gcs/*?[a]{b,c}~!#",
    "/gcs/;|&<>()",
    "/gcs/é\t\r",
    "",
    "''\n'",
    "&\\&",
]


@pytest.mark.parametrize("command", ["run", "resume"])
def test_a_word_of_the_command_arrives_whole_whatever_is_in_it(workers, command):
    for number in (0, 1):
        compass = workers.worker(number) / "compass-venv" / "bin" / "compass"
        compass.write_text('#!/usr/bin/env bash\nprintf "%s\\0" "$@" >~/words\n')
    workers.answer(NODE, "READY\n", times=9)
    options = SLICE if command == "run" else FIXED
    done = workers.vm(command, *options, "--", "compass", "words", *ODD)
    assert done.returncode == 0, done.stderr
    for number in (0, 1):
        file = workers.worker(number) / "words"
        wait_for(file.exists)
        wait_for(lambda file=file: file.read_bytes().count(b"\0") == 1 + len(ODD))
        assert file.read_bytes().decode().split("\0")[1:-1] == ODD
