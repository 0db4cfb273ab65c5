"""Kills at random moments of a run's life: `python -m tests.campaign.kills --n 100 --seed 3
[--variant NAME ...] [--keep DIR]`.

A tiny run of `STEPS` steps with a checkpoint at every second one is killed (SIGKILL, SIGTERM,
SIGINT, or SIGKILL to one reward worker) and started again until it ends. In the end every line of
metrics.jsonl must be that of a run that was never killed, `logs.clocked` aside, bit for bit, and
so must every array of the last checkpoint; no step may be there twice or not at all. Where a
worker alone was killed the run goes on by itself.

A moment is drawn as a phase and a delay in it: the start (before the first line of this life),
rollout, scoring, update, a save. The child itself writes which phase it is in (`phases`), so that
a kill meets it; what is reported is the phase that it was in when it got the signal.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

from . import fork
from .lives import STEPS, VARIANTS, finish, kill_once, prepare

if TYPE_CHECKING:
    from .world import World


def compare(found: dict[str, Any], wanted: dict[str, Any]) -> tuple[list[str], bool]:
    """(differences, whether a step is missing or doubled)."""
    told: list[str] = []
    numbers = [row["step"] for row in found["rows"]] if isinstance(found["rows"], list) else []
    lost = numbers != [row["step"] for row in wanted["rows"]]
    if lost:
        told.append(f"steps {numbers}")
    else:
        for row, other in zip(found["rows"], wanted["rows"], strict=True):
            names = {
                n
                for n in {*row["metrics"], *other["metrics"]}
                if row["metrics"].get(n, "absent") != other["metrics"].get(n, "absent")
            }
            told += [
                f"step {row['step']}: {n} is {row['metrics'].get(n, 'absent')}, undisturbed"
                f" {other['metrics'].get(n, 'absent')}"
                for n in sorted(names)
            ]
    if found["checkpoint"] != wanted["checkpoint"]:
        told.append(f"the last checkpoint differs: {str(found['checkpoint'])[:200]}")
    return told, lost


def one_life(world: World, folder: Path, variant: str, kills: int, seed: str) -> dict[str, Any]:
    """A run killed so many times, or as often as it lets itself; its report."""
    rng, began = random.Random(seed), time.monotonic()
    life = prepare(world, folder, variant)
    tries = 0
    while len(life.kills) < kills and tries < 3 * kills and life.lines() < STEPS:
        kill_once(life, rng)
        tries += 1
    found = finish(life)
    return {
        "variant": variant,
        "seed": seed,
        "kills": life.kills,
        "trouble": life.trouble,
        "found": found,
        "seconds": time.monotonic() - began,
    }


def main() -> int:
    """All variants in turn until there were n kills; 1 where a number differs, a step is lost, or
    a life ended badly.
    """
    parser = argparse.ArgumentParser(
        prog="python -m tests.campaign.kills", description=__doc__.splitlines()[0]
    )
    parser.add_argument(
        "--n", type=int, default=100, help="kills, at the least (default: %(default)s)"
    )
    parser.add_argument("--seed", type=int, default=3)
    parser.add_argument(
        "--each", type=int, default=6, help="kills in one run's life (default: %(default)s)"
    )
    parser.add_argument("--variant", nargs="+", default=list(VARIANTS), choices=list(VARIANTS))
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--keep", metavar="DIR")
    asked = parser.parse_args()
    fork.prepare_environment(
        Path(os.environ.get("COMPASS_CAMPAIGN_CACHE", tempfile.gettempdir()))
        / "compass_campaign_programs"
    )
    fork.warm()
    from .world import World  # numpy reads the environment when it is imported

    folder = Path(asked.keep or tempfile.mkdtemp(prefix="kills_")).absolute()
    world = World(folder / "world")
    world.build()
    began = time.monotonic()
    undisturbed = {}
    for variant in asked.variant:
        life = prepare(world, folder / f"undisturbed_{variant}", variant)
        undisturbed[variant] = finish(life)
        assert not life.trouble and len(undisturbed[variant]["rows"]) == STEPS, (
            variant,
            life.trouble,
            undisturbed[variant],
        )
    reports = run_all(world, folder, asked)
    status = report(reports, undisturbed, asked.seed, time.monotonic() - began)
    if not asked.keep and status == 0:
        shutil.rmtree(folder, ignore_errors=True)
    else:
        print(f"what was written: {folder}", file=sys.stderr)
    return status


def run_all(world: World, folder: Path, asked: argparse.Namespace) -> list[dict[str, Any]]:
    """Lives, `workers` at one time, until there were enough kills."""
    running: dict[int, Path] = {}
    reports: list[dict[str, Any]] = []
    number, done = 0, 0
    while done < asked.n or running:
        while done + len(running) * asked.each < asked.n and len(running) < asked.workers:
            variant, name = asked.variant[number % len(asked.variant)], folder / f"life_{number}"
            sys.stdout.flush()
            pid = os.fork()
            if pid == 0:
                try:
                    made = one_life(
                        world, name, variant, asked.each, f"kills {asked.seed} {number}"
                    )
                    (folder / f"report_{number}.json").write_text(json.dumps(made))
                finally:
                    os._exit(0)
            running[pid] = folder / f"report_{number}.json"
            number += 1
        pid = os.wait()[0]
        file = running.pop(pid)
        made = json.loads(file.read_text())
        done += max(1, len(made["kills"]))
        reports.append(made)
        print(
            f"{made['variant']:13} {len(made['kills'])} kills, {made['seconds']:.0f} s,"
            f" {made['trouble'] or 'no trouble'}",
            flush=True,
        )
    return reports


def report(
    reports: list[dict[str, Any]], undisturbed: dict[str, Any], seed: int, seconds: float
) -> int:
    """Prints what differs, and one line of JSON."""
    kills = [kill for made in reports for kill in made["kills"]]
    differing = lost = troubled = 0
    for made in reports:
        wanted = undisturbed[made["variant"]]
        told, missing = compare(made["found"], wanted)
        differing, lost, troubled = (
            differing + bool(told),
            lost + missing,
            troubled + bool(made["trouble"]),
        )
        if told or made["trouble"]:
            print(f"{made['variant']} ({made['seed']}): {made['kills']}")
            print("\n".join(f"    {text[:300]}" for text in [*made["trouble"], *told[:6]]))
    line = {
        "kills": len(kills),
        "seed": seed,
        "lives": len(reports),
        "by_signal": Counter(kill["signal"] for kill in kills),
        "by_phase": Counter(kill["phase"] for kill in kills),
        "by_variant": Counter(made["variant"] for made in reports for _ in made["kills"]),
        "equal": len(reports) - differing,
        "differing": differing,
        "lost": lost,
        "ended_badly": troubled,
        "seconds": round(seconds),
    }
    print(json.dumps(line))
    return 1 if differing or lost or troubled else 0


if __name__ == "__main__":
    sys.exit(main())
