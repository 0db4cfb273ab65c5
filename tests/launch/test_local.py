"""The local launcher, on small commands: variables, output, signals, and what happens when a
process fails.
"""

import importlib.util
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from process_state import alive

ROOT = Path(__file__).parents[2]
LOCAL = ROOT / "launch" / "local.py"

spec = importlib.util.spec_from_file_location("launch_local", LOCAL)
local = importlib.util.module_from_spec(spec)
spec.loader.exec_module(local)


def launch(*words: str, env: dict[str, str] | None = None) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, LOCAL, *words],
        capture_output=True,
        text=True,
        timeout=60,
        env=os.environ | (env or {}),
    )


def python(code: str) -> list[str]:
    """Returns a command that runs `code`. Its function `say` writes a line in one call, so that the
    lines of two processes do not mix.
    """
    head = "import os, sys, time, signal; me = int(os.environ['COMPASS_PROCESS_ID'])"
    # os.write, since a signal handler may interrupt a buffered write
    say = "say = lambda word, file=sys.stdout: os.write(file.fileno(), f'{word} {me}\\n'.encode())"
    return ["--", sys.executable, "-c", f"{head}; {say}; {code}"]


def test_every_process_gets_its_variables():
    names = (
        "COMPASS_COORDINATOR",
        "COMPASS_PROCESSES",
        "COMPASS_PROCESS_ID",
        "JAX_PLATFORMS",
        "XLA_FLAGS",
    )
    show = f"sys.stdout.write(' '.join(os.environ[name] for name in {names}) + chr(10))"
    variables = {
        "XLA_FLAGS": "--xla_dump_to=x --xla_force_host_platform_device_count=8 --xla_a=1",
        "JAX_PLATFORMS": "tpu",
        "COMPASS_DISTRIBUTED": "auto",
    }
    done = launch(
        "--processes",
        "3",
        "--devices-per-process",
        "5",
        *python(show + "; assert 'COMPASS_DISTRIBUTED' not in os.environ"),
        env=variables,
    )
    assert done.returncode == 0, done.stderr
    rows = sorted(
        line.removeprefix(f"[{i}] ")
        for i in range(3)
        for line in done.stdout.splitlines()
        if f" 3 {i} cpu" in line
    )
    port = re.match(r"127\.0\.0\.1:(\d+) ", rows[0]).group(1)
    flags = "--xla_dump_to=x --xla_a=1 --xla_force_host_platform_device_count=5"
    assert (
        rows == [f"127.0.0.1:{port} 3 {i} cpu {flags}" for i in range(3)] and 0 < int(port) < 65536
    )


def test_lines_of_the_others_carry_their_number():
    done = launch(
        "--processes",
        "3",
        *python("say('out'); say('err', sys.stderr); me and sys.stdout.write('no end')"),
    )
    assert sorted(done.stdout.splitlines()) == [
        "[1] no end",
        "[1] out 1",
        "[2] no end",
        "[2] out 2",
        "out 0",
    ]
    assert sorted(done.stderr.splitlines()) == ["[1] err 1", "[2] err 2", "err 0"]


@pytest.mark.parametrize(
    "code,status",
    [
        ("sys.exit(0)", 0),
        ("sys.exit(7 if me == 1 else 0)", 7),
        # the first that failed, not the highest number
        ("time.sleep(0.5 * (me == 1)); sys.exit(3 + me)", 3),
        (
            (
                "time.sleep(0.5 * (me == 0)); os.kill(os.getpid(), signal.SIGKILL if me else"
                " signal.SIGTERM)"
            ),
            128 + signal.SIGKILL,
        ),
    ],
)
def test_exit_status_is_that_of_the_first_that_failed(code, status):
    assert launch(*python(code)).returncode == status


def test_the_rest_is_killed_after_the_grace_time(tmp_path):
    """Process 1 fails; process 0 ignores SIGTERM and has a child: the launcher kills both after
    half a second.
    """
    child = (
        "import subprocess; c = subprocess.Popen(['sleep', '60']);"
        f" open({str(tmp_path / 'pids')!r}, 'w').write(f'{{os.getpid()}} {{c.pid}}')"
    )
    code = (
        f'exec("if me == 1:\\n time.sleep(0.5); sys.exit(5)"); {child};'
        " signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(60)"
    )
    started = time.monotonic()
    done = launch("--grace", "0.5", *python(code))
    assert done.returncode == 5 and time.monotonic() - started < 20
    assert (
        "process 1 ended with status 5; the others have 0.5 s" in done.stderr
        and "killing process 0" in done.stderr
    )
    assert [alive(int(pid)) for pid in (tmp_path / "pids").read_text().split()] == [False, False]


def test_the_others_may_end_by_themselves_within_the_grace_time():
    done = launch(
        "--grace", "30", *python("sys.exit(4) if me == 1 else time.sleep(1) or print('saved')")
    )
    assert done.returncode == 4 and "saved" in done.stdout and "killing" not in done.stderr


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize("status", [0, 9])
def test_signals_go_on_to_all(signum, status):
    """The processes save and exit, as a training does; the launcher exits with their status."""
    handler = f"signal.signal({int(signum)}, lambda *_: (say('saving'), sys.exit({status})))"
    # Short sleeps: Python handles a signal that comes just before a sleep only after the sleep.
    words = python(f"{handler}; say('ready'); [time.sleep(0.02) for _ in range(2000)]")
    process = subprocess.Popen(
        [sys.executable, LOCAL, *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    ready = {process.stdout.readline().strip() for _ in range(2)}
    assert ready == {"ready 0", "[1] ready 1"}
    process.send_signal(signum)
    out, _ = process.communicate(timeout=30)
    assert process.returncode == status and set(out.splitlines()) == {"saving 0", "[1] saving 1"}


def test_dry_run_prints_commands_that_do_the_same(tmp_path):
    write = (
        "open(sys.argv[1] + os.environ['COMPASS_PROCESS_ID'], 'w').write(os.environ['XLA_FLAGS'])"
    )
    done = launch(
        "--processes",
        "2",
        "--devices-per-process",
        "3",
        "--dry-run",
        *python(write),
        str(tmp_path / "it's "),
        env={"XLA_FLAGS": "--a=1"},
    )
    assert done.returncode == 0 and list(tmp_path.iterdir()) == []
    subprocess.run(["bash", "-c", done.stdout], check=True, timeout=30)
    flags = "--a=1 --xla_force_host_platform_device_count=3"
    assert {file.name: file.read_text() for file in tmp_path.iterdir()} == {
        "it's 0": flags,
        "it's 1": flags,
    }


def test_compass_is_the_entry_point_of_this_interpreter():
    assert local.resolve(["compass", "train", "x"]) == [
        sys.executable,
        "-P",
        "-m",
        "compass_jax",
        "train",
        "x",
    ]
    assert local.resolve(["/bin/compass", "report"]) == [
        sys.executable,
        "-P",
        "-m",
        "compass_jax",
        "report",
    ]
    assert local.resolve(["python", "compass"]) == ["python", "compass"]
    assert (
        f"{sys.executable} -P -m compass_jax train x --run-dir y &"
        in launch("--dry-run", "--", "compass", "train", "x", "--run-dir", "y").stdout
    )


@pytest.mark.parametrize(
    "words,status,message",
    [
        ([], 2, "the command is missing: write it behind --, for example"),
        (["--processes", "0", "--", "true"], 2, "at least 1"),
        (["--procs", "2", "--", "true"], 2, "--procs"),
        (["--", "/no/such/program"], 127, "/no/such/program: No such file or directory"),
    ],
)
def test_mistakes(words, status, message):
    done = launch(*words)
    assert done.returncode == status and message in done.stderr and "Traceback" not in done.stderr


@pytest.mark.slow
def test_a_training_over_two_processes(tmp_path):
    """Two processes of two devices each train one step together and write one run."""
    words = [
        "--processes",
        "2",
        "--devices-per-process",
        "2",
        "--",
        "compass",
        "train",
        str(ROOT / "tests" / "tiny_run.py"),
    ]
    words += ["--run-dir", str(tmp_path), "--rl.steps", "1", "--mesh.fsdp", "4"]
    done = subprocess.run(
        [sys.executable, LOCAL, *words], capture_output=True, text=True, timeout=900
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 1
