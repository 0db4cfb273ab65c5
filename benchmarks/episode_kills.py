"""Kills in a run on episodes: its driver, a client of the door, or the trainer, at random moments.

    python -m benchmarks.episode_kills [--runs 50] [--minutes M] [--out runs/episode_kills]
        [--results benchmarks/results/episode_kills.jsonl]

Three steps of four episodes, on a tiny mixture of experts and an environment that depends on the
sampled tokens alone (relay.py). One run is undisturbed. In run n the seed n draws the step and the
moment in it, and n mod 3 says who is killed by SIGKILL. The plan, written before its runs:

driver: another one is started, and the run ends with the samples and the metrics of the undisturbed
    run, bit for bit.
client: its sample has no reward, and a reason; the run ends.
trainer: the same command continues, and the run ends as with a killed driver.

`became_reward` counts the samples whose reward is none that the environment gives, or another one
than that of the same sample of the undisturbed run (after a killed client: in the steps up to the
kill). It must be 0. `same` compares metrics.jsonl without clocks. A row a run; rows that exist are
not run again.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import random
import shutil
import signal
import sys
import time
from collections.abc import Sequence
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from benchmarks.experiments import append, commit, finished
from benchmarks.relay import LEAST, OPENING, REPLY, TURN, TURNS
from compass_jax.config import (
    ComputeConfig,
    DataConfig,
    EpisodeSource,
    ModelConfig,
    MoEConfig,
    OptimConfig,
    RLConfig,
    RolloutConfig,
    RunConfig,
    ZeroVarianceConfig,
)
from compass_jax.data.episodes import DRIVER

RESULTS = Path(__file__).resolve().parent / "results" / "episode_kills.jsonl"
TOKENIZER = Path(__file__).resolve().parents[1] / "configs" / "tiny_tokenizer"
KINDS = ("driver", "client", "trainer")
STEPS, PROMPTS, GROUP = 3, 2, 2
LENGTH = 64
TIMEOUT_S = 600.0  # of a run
ATTEMPTS = 4  # to kill before the run ends, each after half the time of the one before
CLOCKS = ("time/", "memory/", "rollout/")
assert OPENING + TURNS * (TURN + REPLY) < LENGTH


def config(directory: Path) -> RunConfig:
    """Returns the run."""
    return RunConfig(
        name="episode_kills",
        run_dir=str(directory),
        model=ModelConfig(
            family="qwen3_moe",
            vocab_size=384,
            hidden=16,
            layers=2,
            heads=2,
            kv_heads=1,
            head_dim=8,
            ffn=16,
            moe=MoEConfig(experts=4, top_k=2, ffn=8),
            max_positions=128,
            init_std=0.1,
        ),
        compute=ComputeConfig(scan_layers=False),
        rollout=RolloutConfig(
            slots=PROMPTS * GROUP,
            prompt_buckets=(16,),
            max_new_tokens=LENGTH - 16,
            tokens_per_call=4,
            cache_bucket=LENGTH,
        ),
        data=DataConfig(
            sources=(EpisodeSource(f"{Path(__file__).with_name('relay.py')}:Relay"),),
            heldout_frac=0.0,
            eval_prompts=0,
            tokenizer=str(TOKENIZER),
        ),
        rl=RLConfig(
            steps=STEPS,
            prompts_per_step=PROMPTS,
            group_size=GROUP,
            step_policy=None,
            buckets=(LENGTH,),
            micro_batch_tokens=LENGTH * 2,
            optim=OptimConfig(learning_rate=1e-2, warmup_steps=0),
            zero_variance=ZeroVarianceConfig(),
            save_every=1,
            eval_every=0,
        ),
    )


def train(directory: str, log: str, programs: str) -> None:
    """Runs the run in this process, whose output goes to `log`; compiled programs are shared."""
    with open(log, "ab") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    from compass_jax.runs.compiled import keep_programs
    from compass_jax.training.rl import run_rl

    keep_programs(programs)
    run_rl(config(Path(directory)))


class Trainer:
    """The process of a run."""

    def __init__(self, directory: Path):
        # A server with the imports forks each process; it has no device of JAX yet.
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["compass_jax.training.rl"])
        directory.mkdir(parents=True, exist_ok=True)
        folders = directory / "run", directory / "log.txt", directory.parent / "programs"
        self.directory = directory / "run"
        self.process: BaseProcess = context.Process(target=train, args=tuple(map(str, folders)))
        self.process.start()

    def wait(self) -> int | None:
        """Returns the exit status; None after TIMEOUT_S, when the process is killed."""
        self.process.join(TIMEOUT_S)
        status = self.process.exitcode
        self.process.kill()
        self.process.join()
        return status

    def victim(self, kind: str) -> int | None:
        """Returns the id of the process that is to be killed; None while there is none."""
        if kind == "trainer":
            return self.process.pid
        drivers = [x for x in _children(self.process.pid or 0) if DRIVER in _command(x)]
        processes = drivers if kind == "driver" else [y for x in drivers for y in _children(x)]
        return next(iter(processes), None)

    @property
    def steps(self) -> int:
        """The number of steps that the run has logged; -1 before its driver's start."""
        started = any(self.directory.glob("drivers/*.log"))
        return len(finished(self.directory / "metrics.jsonl")) if started else -1

    def kill(self, kind: str, steps: int, after_s: float) -> int | None:
        """Kills a process so many seconds after a number of steps; returns the number of steps that
        the run has logged then, or None if it ended before.
        """
        while self.steps < steps and self.process.is_alive():
            time.sleep(0.01)
        deadline = time.monotonic() + after_s
        while self.process.is_alive():
            logged = self.steps
            victim = self.victim(kind) if time.monotonic() >= deadline else None
            if victim is not None:
                os.kill(victim, signal.SIGKILL)
                return logged
            time.sleep(0.002)
        return None


def _children(pid: int) -> list[int]:
    try:
        tasks = list(Path(f"/proc/{pid}/task").glob("*/children"))
        return [int(child) for task in tasks for child in task.read_text().split()]
    except OSError:  # a thread or the process has ended
        return []


def _command(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
    except OSError:
        return ""


def undisturbed(out: Path) -> tuple[Path, list[float]]:
    """Returns the directory of a run that nothing disturbs, and the seconds of its steps."""
    folder = out / "undisturbed"
    while len(rows := finished(folder / "run" / "metrics.jsonl")) < STEPS:
        # programs of other runs are there already: their steps are not those of a first run
        for _ in range(1 if (out / "programs").exists() else 2):
            shutil.rmtree(folder, ignore_errors=True)
            if status := Trainer(folder).wait():
                sys.exit(f"the undisturbed run ended with status {status}: {folder}/log.txt")
    return folder / "run", [row["metrics"]["time/step_s"] for row in rows]


def killed(seed: int, out: Path, expected: Path, steps_s: Sequence[float]) -> dict[str, Any]:
    """Runs the run of a seed, and returns its row."""
    kind, folder = KINDS[seed % len(KINDS)], out / f"{seed:03d}"
    draw, began = random.Random(seed), time.monotonic()
    chosen = draw.randrange(STEPS)
    after_s = draw.uniform(0.0, steps_s[chosen])
    for _ in range(ATTEMPTS):
        shutil.rmtree(folder, ignore_errors=True)
        trainer = Trainer(folder)
        steps = trainer.kill(kind, chosen, after_s)
        status = trainer.wait()
        if steps is not None:
            break
        after_s /= 2
    if kind == "trainer" and steps is not None:
        status = Trainer(folder).wait()
    lost, became_reward = judged(kind, steps or 0, folder / "run", expected)
    return {
        "seed": seed,
        "killed": kind,
        "after_s": round(after_s, 2),
        "step": None if steps is None else steps + 1,
        "ended": status == 0,
        "status": status,
        "samples": len(samples(folder / "run")),
        "lost": lost,
        "became_reward": became_reward,
        "same": metrics(folder / "run") == metrics(expected),
        "wall_s": round(time.monotonic() - began, 1),
        "commit": commit(),
    }


def metrics(run: Path) -> list[dict[str, Any]]:
    """Returns the metrics of each step without those of clocks."""
    return [
        {
            name: value
            for name, value in line["metrics"].items()
            if not name.startswith(CLOCKS) and not name.endswith(("tokens_per_s", "/mfu"))
        }
        for line in finished(run / "metrics.jsonl")
    ]


def samples(run: Path) -> dict[tuple[int, str, int], dict[str, Any]]:
    """Returns (step, prompt, number) -> sample."""
    return {
        (row["step"], row["prompt"], number): sample
        for row in finished(run / "rollouts.jsonl")
        for number, sample in enumerate(row["samples"])
    }


def judged(kind: str, steps: int, run: Path, expected: Path) -> tuple[int, int]:
    """Returns the number of samples without a reward, and of those with a wrong one."""
    sampled, undisturbed_samples = samples(run), samples(expected)
    known = {key: x for key, x in sampled.items() if x["outcome"] == "ok"}
    compared = steps + 1 if kind == "client" else STEPS
    wrong = sum(
        sample["reward"] < LEAST
        or (key[0] <= compared and sample["reward"] != undisturbed_samples[key]["reward"])
        for key, sample in known.items()
    )
    return len(sampled) - len(known), wrong


def main(words: Sequence[str] | None = None) -> None:
    """Runs the seeds that have no row, and prints a summary."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--runs", type=int, default=50)
    parser.add_argument(
        "--minutes", type=float, default=0.0, help="begin no run after them; 0: all"
    )
    parser.add_argument("--out", type=Path, default=Path("runs/episode_kills"))
    parser.add_argument("--results", type=Path, default=RESULTS)
    arguments = parser.parse_args(words)
    began, out = time.monotonic(), arguments.out.absolute()
    done = {row["seed"] for row in finished(arguments.results)}
    expected, steps_s = undisturbed(out)
    for seed in range(arguments.runs):
        if arguments.minutes and time.monotonic() - began > 60 * arguments.minutes:
            break
        if seed not in done:
            row = killed(seed, out, expected, steps_s)
            append(arguments.results, row)
            print(json.dumps(row), flush=True)
    rows = finished(arguments.results)
    for kind in KINDS:
        of_kind = [row for row in rows if row["killed"] == kind]
        counts = {name: sum(map(int, (row[name] for row in of_kind))) for name in ("ended", "same")}
        wrong = sum(row["became_reward"] for row in of_kind)
        print(f"{kind}: {len(of_kind)} runs, {counts}, {wrong} errors became rewards")


if __name__ == "__main__":
    main()
