"""Faults of run directories: files in the way, read-only, parts deleted or cut, before a run and
under it.

A directory that cannot be used has to be refused by its path. A run whose files were taken away
under it has to end with an error that names them, or to end with its log whole. A run that is
continued over a log without its lines has to say so.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from pathlib import Path

from . import spies
from .checkpoints import STEPS
from .logs import steps
from .words import CLEAR, HARMLESS, LOST, Ended, Expected, Verdict, first, judge
from .world import CONFIG, Case

SHARE = 4
MORE = ["--rl.steps", "8", "--rl.save-every", "2"]


def run(case: Case) -> Verdict:
    """One odd directory."""
    kind = case.rng.choice(["before"] * 8 + ["log"] * 4 + ["under"] * 2)
    return {"before": _before, "log": _log, "under": _under}[kind](case)


def mounted(path: Path, options: str) -> bool:
    """Mounts a tmpfs of its own at `path`; False where this is not allowed."""
    path.mkdir(parents=True, exist_ok=True)
    return (
        subprocess.run(
            ["mount", "-t", "tmpfs", "-o", options, "campaign", str(path)], capture_output=True
        ).returncode
        == 0
    )


def unmount(path: Path) -> None:
    """Takes it away again."""
    subprocess.run(["umount", "-l", str(path)], capture_output=True)


def _before(case: Case) -> Verdict:
    case.bring("rows.jsonl", "chats.jsonl", "tokenizer")
    path, rng = case.folder / "run", case.rng
    kinds = [
        "a file",
        "below a file",
        "a link to nothing",
        "a link to itself",
        "a link to another folder",
        "read-only",
        "a pipe",
        "long name",
        "odd name",
    ]
    kinds += [
        f"{name} is a folder"
        for name in ("metrics.jsonl", "rollouts.jsonl", ".lock", "config.json")
    ]
    kinds += [f"{name} is a file" for name in ("checkpoints", "tokenizer", "tb")]
    kind = rng.choice(kinds)
    command, spy, argv = "train", spies.restored, ["train", CONFIG]
    if kind in ("tb is a file", "tokenizer is a file"):  # they are opened by the first step
        command, spy, argv = "sft", None, ["sft", CONFIG]
    case.tell(f"run directory: {kind}; {command}")
    expected = Expected([], ["run", "jsonl"])
    if kind == "a file":
        path.write_text("mine")
    elif kind == "below a file":
        path.write_text("mine")
        argv += ["--run-dir", "run/below"]
    elif kind == "a link to nothing":
        path.symlink_to("nothing")
        expected.outcomes = ["a fresh start"]
    elif kind == "a link to itself":
        path.symlink_to("run")
    elif kind == "a link to another folder":
        (case.folder / "other").mkdir()
        path.symlink_to("other")
        expected.outcomes = ["a fresh start"]
    elif kind == "a pipe":
        os.mkfifo(path)
    elif kind in ("long name", "odd name"):
        argv += ["--run-dir", {"long name": "x" * 300, "odd name": "a\x00b"}[kind]]
        expected.names = ["xxx", "run_dir", "a"]
    elif kind == "read-only":
        if not mounted(path, "ro"):
            return Verdict(HARMLESS, "cannot be tried without mounts")
    else:
        name, what = kind.split(" is a ")
        path.mkdir()
        (path / name).mkdir() if what == "folder" else (path / name).write_text("mine")
        expected.names = [name]
    try:
        return judge(case.compass(argv, spy, seconds=60), expected)
    finally:
        if kind == "read-only":
            unmount(path)


def _log(case: Case) -> Verdict:
    """The log of an old run has lost lines; then the run goes on."""
    world = case.world.made("trained", ["train", CONFIG, *STEPS])
    case.bring("rows.jsonl", "tokenizer", "run", source=world)
    rng, kind = (
        case.rng,
        case.rng.choice(
            [
                "gone",
                "empty",
                "a line less",
                "half a line less",
                "the first line less",
                "a damaged line",
                "more lines",
                "another stage's line",
            ]
        ),
    )
    name = rng.choice(["metrics.jsonl", "metrics.jsonl", "rollouts.jsonl"])
    file = case.folder / "run" / name
    lines = file.read_bytes().splitlines(keepends=True)
    case.tell(f"run/{name}: {kind}; train")
    whole = {
        "gone": None,
        "empty": [],
        "a line less": lines[:-1],
        "half a line less": [*lines[:-1], lines[-1][:20]],
        "the first line less": lines[1:],
        "a damaged line": [b"\xff" + lines[0], *lines[1:]],
        "more lines": [*lines, lines[-1]],
        "another stage's line": [*lines, b'{"stage": "sft", "step": 1, "metrics": {}}\n'],
    }[kind]
    file.unlink()
    if whole is not None:
        file.write_bytes(b"".join(whole))
    ended = case.compass(["train", CONFIG, *STEPS], spies.restored)
    if ended.status != 0 or ended.timed_out:
        return judge(ended, Expected([], [name]))
    if kind in (
        "more lines",
        "another stage's line",
    ):  # lines after the checkpoint are taken back; another stage's are left alone
        return Verdict(HARMLESS)
    if name in ended.out + ended.err:
        return Verdict(
            CLEAR, first("\n".join(x for x in (ended.out + ended.err).splitlines() if name in x))
        )
    return Verdict(
        LOST, f"{name} lacks lines of steps that the checkpoint holds, and nothing was said"
    )


def _under(case: Case) -> Verdict:
    """Something is taken away while the run goes on."""
    case.bring("rows.jsonl", "tokenizer")
    run_dir = case.folder / "run"
    kind = case.rng.choice(
        [
            "metrics.jsonl deleted",
            "metrics.jsonl cut",
            "the directory deleted",
            "the directory renamed",
            "checkpoints deleted",
            "the lock deleted",
            "config.json deleted",
            "tb deleted",
        ]
    )
    case.tell(f"after the second step: {kind}; train of 8 steps")
    child = case.start(["train", CONFIG, *MORE], seconds=120, cpu_s=120)
    while (
        child.poll() is None and len(_lines(run_dir)) < 2 and time.monotonic() - child.began < 100
    ):
        time.sleep(0.005)
    _take_away(kind, run_dir)
    ended = child.wait()
    return _after(ended, run_dir, kind)


def _lines(run_dir: Path) -> list[bytes]:
    file = run_dir / "metrics.jsonl"
    return file.read_bytes().splitlines() if file.is_file() else []


def _take_away(kind: str, run_dir: Path) -> None:
    if kind == "metrics.jsonl deleted":
        (run_dir / "metrics.jsonl").unlink()
    elif kind == "metrics.jsonl cut":
        os.truncate(run_dir / "metrics.jsonl", 10)
    elif kind == "the directory deleted":
        shutil.rmtree(run_dir, ignore_errors=True)
    elif kind == "the directory renamed":
        run_dir.rename(run_dir.with_name("run_old"))
    elif kind in ("checkpoints deleted", "tb deleted"):
        shutil.rmtree(run_dir / kind.split()[0], ignore_errors=True)
    else:
        (
            run_dir / {"the lock deleted": ".lock", "config.json deleted": "config.json"}[kind]
        ).unlink(missing_ok=True)


def _after(ended: Ended, run_dir: Path, kind: str) -> Verdict:
    if ended.status != 0 or ended.timed_out:
        return judge(ended, Expected([], ["run"]))
    trouble = judge(ended, Expected([0], [])) if "Traceback" in ended.err else None
    if trouble:
        return trouble
    try:
        found = [row["step"] for row in steps(run_dir)]
    except ValueError:
        found = ["damaged"]
    if found != list(range(1, 9)):
        return Verdict(LOST, f"the run ended well, its log has the steps {found}")
    if kind == "config.json deleted" and not (run_dir / "config.json").exists():
        return Verdict(LOST, "the run ended well without its config.json")
    return Verdict(HARMLESS)
