"""The limits of programs: the files that they may read, the memory of all their processes, and the
receivers of their signals."""

import os
import signal
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest
from test_hostile import guarded
from test_hostile import prompt as prompt_of
from test_program_verdicts import fenced, judged
from test_score import drain

from compass_jax.base.errors import UserError
from compass_jax.base.records import Score
from compass_jax.config import ConfigError, DataConfig, FileSource, RewardConfig, TaskSource
from compass_jax.data import human_eval
from compass_jax.devices.processes import guards, seccomp
from compass_jax.rewards import detect
from compass_jax.rewards.faults import VerifierError
from compass_jax.rewards.score import Scorer
from compass_jax.rewards.verifiers import program_files

pytestmark = pytest.mark.filterwarnings(r"ignore:os.fork\(\) was called:RuntimeWarning")
DATA = DataConfig(sources=(FileSource("rows.jsonl", verifier="code", answer_field=""),))
PROBLEMS = DataConfig(sources=(TaskSource("compass_jax.data.human_eval:problems"),))
ROW = {"tests": ["assert f(20) == 22"], "seconds": 8.0, "memory_mb": 400}
SITE = sysconfig.get_paths()["purelib"]


@pytest.fixture(scope="module")
def scorer():
    with Scorer(RewardConfig(workers=1, timeout_s=10.0), DATA) as scorer:
        scorer.wait_ready()
        yield scorer


def score(scorer, text, **row):
    scorer.submit("row", prompt_of(entry={**ROW, **row}), fenced(text))
    return drain(scorer)["row"]


# ---- files ---------------------------------------------------------------------------------------

READS = {
    "a package's data": f"open({SITE!r} + '/human_eval/data/HumanEval.jsonl.gz', 'rb').read(9)",
    "a package's code": f"open({human_eval.__file__!r}).read()",
    "a package that is not named": "import human_eval",
    "a package's metadata": "import importlib.metadata as m; m.version('human-eval')",
    "what the judge imports": "import math_verify",
    "names in the packages' folder": f"import os; os.listdir({SITE!r})[0]",
    "through a link": f"import os; os.symlink({SITE!r}, 's'); open('s/human_eval/data.py').read()",
    "/opt": "import os; os.listdir('/opt')",
    "/usr/src": "import os; os.listdir('/usr/src')",
    "/usr/share": "import os; os.listdir('/usr/share')",
    "/etc": "open('/etc/passwd').read()",
    "/proc": "open('/proc/self/cmdline').read()",
}


@guarded
@pytest.mark.parametrize("name", READS)
def test_a_program_does_not_read(name, scorer):
    indented = READS[name].replace("; ", "\n ")
    text = f"def f(x):\n {indented}\n return 22\n"
    assert score(scorer, text) == Score(0.0, True)


@pytest.mark.parametrize("name", ["a package's data", "a package's code", "/etc", "/proc"])
def test_without_guards_it_reads(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert judged(fenced(f"def f(x):\n {READS[name]}\n return 22\n"), **ROW).reward == 1.0


IMPORTS = [
    "import numpy as np\ndef f(x): return np.int64(x) + 2",
    "import numpy as np\ndef f(x): return int(np.linalg.inv(np.eye(9) / (x + 2))[0, 0])",
    "import sympy\ndef f(x): return int(sympy.Symbol('x').subs('x', x) + 2)",
    "import scipy.special\ndef f(x): return round(float(scipy.special.exp10(0))) + x + 1",
    "import networkx as nx\ndef f(x): return len(nx.path_graph(x + 2))",
    "import zoneinfo, decimal, sqlite3, ssl, unittest\ndef f(x): return x + 2",
    "import importlib.metadata as m\nm.version\ndef f(x): return x + 2",
]


@guarded
@pytest.mark.parametrize("text", IMPORTS)
def test_a_program_imports_named_packages_and_the_standard_library(text, scorer):
    pytest.importorskip(text.split()[1].partition(".")[0].rstrip(","))
    assert score(scorer, text, memory_mb=1000) == Score(1.0, True)


@guarded
def test_a_script_has_the_same_packages(scorer):
    pytest.importorskip("numpy")
    row = {"tests": [], "inputs": ["1 2\n"], "outputs": ["3"]}
    main = "import sys\nif __name__ == '__main__':\n print(len(sys.argv) + 2)\n sys.exit(0)\n"
    numpy = "import numpy\nprint(numpy.array(input().split(), int).sum())\n"
    for text, right in ((numpy, 1.0), (main, 1.0), ("import human_eval\nprint(3)\n", 0.0)):
        assert score(scorer, text, **row) == Score(right, True)


UNNAMED = {
    "human_eval": "holds answers",
    "compass_jax": "holds answers",
    "a_package_not_here": "is not installed",
    "sys": "part of Python itself",
    "numpy.linalg": "is no name of a package",
    "../data": "is no name of a package",
}


def test_packages_are_named_with_what_they_require():
    pytest.importorskip("sympy")
    modules, files = program_files.package_files(["sympy"])
    assert {"sympy", "mpmath"} <= modules.keys() and "numpy" not in modules
    assert not any("human_eval" in path for path in files)
    assert program_files.package_files([]) == ({}, set())
    for name, message in UNNAMED.items():
        with pytest.raises(UserError, match=rf"program_packages: '{name}' .*{message}"):
            program_files.package_files([name])
    for name in ("", "numpy.linalg", "../data", "3"):
        with pytest.raises(ConfigError, match=r"rewards.program_packages: .* must be the name"):
            RewardConfig(program_packages=("numpy", name)).validate()


@guarded
def test_a_worker_refuses_packages_that_are_not_there():
    rewards = RewardConfig(timeout_s=9.0, program_packages=("a_package_not_here",))
    with pytest.raises((VerifierError, UserError), match="a_package_not_here"):
        Scorer(rewards, DATA).wait_ready()


STANDARD = sysconfig.get_path("stdlib")
READABLE = ["{}/json/rows.jsonl", "{}/json/*.jsonl", "{}/json", "/usr/bin/../bin/rows.jsonl"]
READABLE += [f"{SITE}/numpy/rows.jsonl", "LINK"]


@pytest.mark.parametrize("path", READABLE)
def test_a_source_that_programs_could_read_is_refused(path, tmp_path):
    (tmp_path / "train.jsonl").symlink_to(f"{STANDARD}/json/__init__.py")
    path = str(tmp_path) if path == "LINK" else path.format(STANDARD)
    data = DataConfig(sources=(FileSource(path, verifier="code", answer_field=""),))
    with pytest.raises(ConfigError, match=r"data.sources\[?.?0\]?.path = .* can read .* answers"):
        Scorer(RewardConfig(), data, guards=(guards.LANDLOCK, guards.SECCOMP))


def test_without_guards_the_notice_says_what_it_means():
    assert "can read the answers of its tests" in detect.notice("off")
    for path in ("/usr/src/app/rows.jsonl", "/opt/rows.jsonl"):
        assert program_files.readable_at(path, program_files.python_files()[0]) == ""


READER = """    pass

import glob, sysconfig, gzip, json
for line in gzip.open(
    sysconfig.get_paths()["purelib"] + "/human_eval/data/HumanEval.jsonl.gz", "rt"
):
    r = json.loads(line)
    if r["entry_point"] in globals(): exec(r["prompt"] + r["canonical_solution"], globals())
"""
NAMES = "abs all len sorted set tuple list round isinstance sum poly max min any str zip range"
CHEAT = "    return 0\n" + "".join(f"def {name}(*a, **k): return 0\n" for name in NAMES.split())


@guarded
@pytest.mark.parametrize(("text", "right"), [(READER, 0), (CHEAT, 0), ("", 164)])
def test_human_eval(text, right):
    rows = {row["id"]: row for row in human_eval.rows()}
    with Scorer(RewardConfig(workers=2, timeout_s=30.0), PROBLEMS) as scorer:
        for name, row in rows.items():
            scorer.submit(name, prompt_of(entry=row), fenced(text or row["answer"]))
        got = drain(scorer, limit_s=120)
    assert len(got) == 164 and all(one.known for one in got.values())
    assert sum(one.reward == 1.0 for one in got.values()) == right


# ---- memory --------------------------------------------------------------------------------------

CHILDREN = """import os, time
def f(x):
    got = 0
    for _ in range(8):
        read, write = os.pipe()
        try:
            pid = os.fork()
        except OSError:
            break
        if pid == 0:
            try:
                kept = bytearray({each} * 2**20)
                os.write(write, b'!')
                time.sleep(2)
            finally:
                os._exit(0)
        os.close(write)
        got += len(os.read(read, 1))
    return got * {each}
"""


@guarded
@pytest.mark.parametrize("each", [300, 100, 50, 40])
def test_memory_is_that_of_all_processes_together(each, scorer):
    test = "assert f(20) <= 400 and f is not None"
    assert score(scorer, CHILDREN.format(each=each), tests=[test]) == Score(1.0, True)


ONE_PROCESS = "def f(x): return len(bytearray(300 * 2**20)) // 2**20 - 278\n"
STARTS = "import ctypes, multiprocessing, os, subprocess, sys\ndef f(x):\n {}\n return 22\n"
THREADS = (
    "import threading\ndef f(x):\n"
    " ts = [threading.Thread(target=int) for _ in range(20)]\n"
    " [t.start() for t in ts]; [t.join() for t in ts]\n return 22\n"
)
LARGE = {"tests": ["assert len(bytes(f(20))) == 3 * 2**30"]}
USES = {
    "all memory of one process": (ONE_PROCESS, {}, 1.0),
    "more memory": (ONE_PROCESS, {"memory_mb": 200}, 0.0),
    "a shell": (STARTS.format("os.system('true')"), {}, 1.0),
    "multiprocessing": (
        STARTS.format("multiprocessing.get_context('fork').Process(target=int).start()"),
        {},
        1.0,
    ),
    "forks in C": (STARTS.format("ctypes.CDLL(None).fork() or os._exit(0)"), {}, 1.0),
    "threads": (THREADS, {}, 1.0),
    "makes its test large": ("def f(x): return 3 * 2**30\n", LARGE, 0.0),
}


@guarded
@pytest.mark.parametrize("name", USES)
def test_what_a_program_may_use(name, scorer):
    text, row, right = USES[name]
    assert score(scorer, text, **row) == Score(right, True)


def test_without_guards_a_program_starts_no_process(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    text = "import os\ndef f(x):\n try: os.fork()\n except PermissionError: return 22\n"
    assert judged(fenced(text), **ROW).reward == 1.0


# ---- signals -------------------------------------------------------------------------------------

OWNERS = {
    "F_SETOWN": "fcntl.fcntl(r, 8, {pid}); fcntl.fcntl(r, 10, 9)",
    "F_SETOWN without F_SETSIG": "fcntl.fcntl(r, fcntl.F_SETOWN, {pid})",
    "F_SETOWN of a group": "fcntl.fcntl(r, 8, -{pid}); fcntl.fcntl(r, 10, 9)",
    "F_SETOWN_EX": "fcntl.fcntl(r, 15, struct.pack('ii', 1, {pid})); fcntl.fcntl(r, 10, 9)",
    "FIOSETOWN": "fcntl.ioctl(r, 0x8901, struct.pack('i', {pid}))",
    "SIOCSPGRP": "fcntl.ioctl(r, 0x8902, struct.pack('i', {pid}))",
    "F_SETSIG": "fcntl.fcntl(r, 10, 9)",
    "a pidfd": "signal.pidfd_send_signal(os.pidfd_open({pid}), 9)",
    "a pidfd in the place of this process": (
        "libc.syscall(424, os.dup2(os.pidfd_open({pid}), os.getpid() % 200 + 9), 9, None, 0)"
        " and os._exit(1)"
    ),
    "a queued signal": "libc.sigqueue({pid}, 9, None) and os._exit(1)",
}


@pytest.mark.parametrize("name", OWNERS)
def test_a_program_cannot_choose_who_gets_a_signal(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with subprocess.Popen(["sleep", "60"], start_new_session=True) as victim:
        text = (
            "import ctypes, fcntl, os, signal, struct\nlibc = ctypes.CDLL(None)\n"
            "def f(x):\n r, w = os.pipe()\n "
            + OWNERS[name].format(pid=victim.pid)
            + "\n fcntl.fcntl(r, 4, 0o20000)\n os.write(w, b'x')\n return 22\n"
        )
        assert judged(fenced(text), **ROW).reward == 0.0
        assert victim.poll() is None
        victim.send_signal(signal.SIGKILL)


def test_other_commands_of_fcntl_and_ioctl_are_left(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    text = (
        "import fcntl, os, struct, termios\ndef f(x):\n r, w = os.pipe()\n"
        " fcntl.fcntl(r, fcntl.F_SETFL, fcntl.fcntl(r, fcntl.F_GETFL) | os.O_NONBLOCK)\n"
        " os.write(w, b'x' * 20)\n"
        " return struct.unpack('i', fcntl.ioctl(r, termios.FIONREAD, b'1234'))[0] + 2\n"
    )
    assert judged(fenced(text), **ROW).reward == 1.0


def test_filters_name_known_calls(monkeypatch):
    for machine in ("x86_64", "aarch64"):
        monkeypatch.setattr(seccomp.platform, "machine", lambda machine=machine: machine)
        for text in (seccomp.own_signals_program(1), seccomp.one_process_program(True)):
            assert len(text) % 8 == 0 and len(text) // 8 < 4096
    assert Path(sys.executable).exists() and os.name == "posix"
