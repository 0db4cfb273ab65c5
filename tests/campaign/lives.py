"""One run's life: started, killed at drawn moments, started again until it ends."""

from __future__ import annotations

import os
import random
import shutil
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from . import fork
from .logs import steps
from .words import last

if TYPE_CHECKING:
    from .world import World


STEPS = 12


CONFIG = str(Path(__file__).parent / "tiny.py")


BASE = [
    "train",
    CONFIG,
    "--rl.steps",
    str(STEPS),
    "--rl.save-every",
    "2",
    "--rl.prompts-per-step",
    "2",
    "--rl.group-size",
    "2",
]


CORRECTED = ["--rl.correction.name", "tis"]


VARIANTS = {
    "plain": [],
    "partial": [*CORRECTED, "--rl.partial-prompts", "1"],
    "dynamic": [
        "--rl.zero-variance.dynamic-sampling",
        "True",
        "--rl.zero-variance.rl-zvp",
        "False",
        "--rl.zero-variance.dynamic-rounds",
        "2",
    ],
    "growth": ["--rl.zero-variance.grow-to", "4"],
    "one_step_off": [*CORRECTED, "--rl.one-step-off", "True"],
}


SIGNALS = {
    "SIGKILL": signal.SIGKILL,
    "SIGTERM": signal.SIGTERM,
    "SIGINT": signal.SIGINT,
    "worker": signal.SIGKILL,
}


PHASES = ("start", "rollout", "scoring", "update", "save", "end")


LIFE_S = 240.0


def phases(said: Path) -> Callable[[Any], None]:
    """A spy that writes the phase a run is in into said/phase, whenever it changes."""

    def spy(take: Any) -> None:
        from compass_jax.rewards import score
        from compass_jax.training import learner, loop
        from compass_jax.weights import checkpoint

        descriptor = os.open(said / "phase", os.O_WRONLY | os.O_CREAT, 0o644)

        def enter(name: str) -> None:
            os.pwrite(descriptor, f"{name:10}".encode(), 0)

        def around(owner: Any, name: str, during: str, after: str | None) -> None:
            real = getattr(owner, name)

            def call(*args: Any, **options: Any) -> Any:
                enter(during)
                try:
                    return real(*args, **options)
                finally:
                    if after:
                        enter(after)

            setattr(owner, name, call)

        enter("start")
        around(loop.RLTrainer, "_sync_weights", "rollout", "rollout")
        around(score.Scorer, "collect", "scoring", "rollout")
        around(learner.Learner, "train", "update", "end")
        around(checkpoint, "save", "save", "rollout")

    return spy


@dataclass
class Life:
    """One run directory, and what was done to it."""

    variant: str
    folder: Path
    world: World
    number: int = 0
    kills: list[dict[str, Any]] = field(default_factory=list)
    trouble: list[str] = field(default_factory=list)

    def start(self) -> fork.Child:
        """Starts the command, once more."""
        self.number += 1
        said = self.folder / f"said_{self.number}"
        said.mkdir(parents=True)
        limits = fork.Limits(seconds=LIFE_S, cpu_s=int(LIFE_S))
        return fork.start([*BASE, *VARIANTS[self.variant]], self.folder, said, limits, phases(said))

    def phase(self) -> str:
        """Which phase the present child is in."""
        file = self.folder / f"said_{self.number}" / "phase"
        return file.read_text().strip() if file.exists() else "start"

    def lines(self) -> int:
        """Lines of metrics.jsonl."""
        file = self.folder / "run" / "metrics.jsonl"
        return file.read_bytes().count(b"\n") if file.exists() else 0


def prepare(world: World, folder: Path, variant: str) -> Life:
    """A folder for a run that has not begun."""
    shutil.copytree(world.files, folder)
    return Life(variant, folder, world)


def workers_of(pid: int) -> list[int]:
    """Reward workers below a process: what runs rewards.worker, or was forked from it."""
    found, below = [], {pid}
    for entry in sorted(int(x) for x in os.listdir("/proc") if x.isdigit()):
        try:
            parent = int(Path(f"/proc/{entry}/stat").read_text().rsplit(")", 1)[1].split()[1])
            line = Path(f"/proc/{entry}/cmdline").read_bytes()
        except (OSError, ValueError):
            continue
        if parent in below and entry != pid:
            below.add(entry)
            if b"rewards" in line:
                found.append(entry)
    return found


def finish(life: Life) -> dict[str, Any]:
    """Runs it to its end; the numbers and arrays that it left."""
    ended = life.start().wait()
    for _ in range(3):  # a stop on request is no failure: the same command goes on
        if ended.status != 143:
            break
        ended = life.start().wait()
    if ended.status != 0 or ended.timed_out:
        life.trouble.append(
            f"life {life.number} ended with {ended.status}{' (hang)' if ended.timed_out else ''}:"
            f" {last(ended.err)}"
        )
    return left(life)


def left(life: Life) -> dict[str, Any]:
    """metrics.jsonl without clocks, and the digest of every array of the last checkpoint."""
    try:
        rows: Any = steps(life.folder / "run")
    except ValueError as error:
        rows = f"damaged: {error}"

    def read(take: Any) -> None:
        import jax
        import numpy as np
        import orbax.checkpoint as ocp

        from .spies import digest_of

        where = max((life.folder / "run" / "checkpoints").glob("step_*"))
        found = ocp.Checkpointer(ocp.PyTreeCheckpointHandler(use_ocdbt=True)).restore(
            where / "arrays"
        )
        leaves = {
            jax.tree_util.keystr(p): digest_of(np.asarray(x))
            for p, x in jax.tree_util.tree_leaves_with_path(found)
        }
        take({"step": where.name, "arrays": leaves})
        raise SystemExit(0)

    ended = fork.start(["arrays"], life.folder, life.folder / "arrays", fork.Limits(), read).wait()
    return {
        "rows": rows,
        "checkpoint": ended.outcome if isinstance(ended.outcome, dict) else last(ended.err),
    }


def kill_once(life: Life, rng: random.Random) -> None:
    """Starts the command, and kills it at a drawn moment; a run that ends before it is not a
    kill.
    """
    name = rng.choices(list(SIGNALS), [4, 2, 2, 2])[0]
    phase, delay = rng.choice(PHASES[:5]), rng.choice([0.0, 0.0, 0.01, 0.05, 0.2])
    after = 0 if phase == "start" else rng.randrange(1, 4)  # so many lines of this life before it
    child = life.start()
    began, was = time.monotonic(), life.lines()
    if phase == "start":
        time.sleep(rng.uniform(0.0, 2.5))
    while child.poll() is None and time.monotonic() - began < LIFE_S:
        now = life.lines()
        was = min(was, now)
        if phase == "start" or (now >= min(was + after, STEPS - 1) and life.phase() == phase):
            break
        time.sleep(0.001)
    time.sleep(delay)
    if child.poll() is not None:
        if child.status not in (0, 143):
            life.trouble.append(
                f"life {life.number} ended by itself with {child.status}: {last(child.wait().err)}"
            )
        return
    met, target = life.phase(), child.pid
    if name == "worker":
        workers = workers_of(child.pid)
        if not workers:
            child.end()
            life.kills.append({"signal": "SIGKILL", "phase": met, "lines": life.lines()})
            return
        target = rng.choice(workers)
    os.kill(target, SIGNALS[name])
    life.kills.append({"signal": name, "phase": met, "lines": life.lines()})
    if name == "worker":
        time.sleep(rng.uniform(0.0, 0.5))
        if child.poll() is None and rng.random() < 0.5:
            child.end()
        ended = child.wait()
        if ended.status not in (0, -9):
            life.trouble.append(
                f"life {life.number}, a worker killed: {ended.status}: {last(ended.err)}"
            )
        return
    ended = child.wait()
    expected = {"SIGKILL": (-9,), "SIGTERM": (143, -15, 0), "SIGINT": (130, -2, 0, 143)}[name]
    if ended.timed_out or ended.status not in expected or "Traceback" in ended.err:
        life.trouble.append(
            f"{name} in {met}: status {ended.status}{' (hang)' if ended.timed_out else ''}:"
            f" {last(ended.err)}"
        )
