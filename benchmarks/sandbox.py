"""The cost of a check of an answer, through the whole path (submit -> collect), and its share of
the demo's time.

    python -m benchmarks.sandbox [--checks 400] [--demo-checks 30000] [--demo-s 780]

Each kind of check three times: in place (the verifier alone, called in a loop), in a worker without
guards ("off"), and behind all guards that this machine has ("auto"). Seconds of processor are those
of all processes, without imports; checks a second and core are their inverse. Checks that need no
child are repeated CHEAP times as often. Prints a table and ends with one line of JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from compass_jax.base.records import Prompt
from compass_jax.config import DataConfig, FileSource, ProceduralSource, RewardConfig
from compass_jax.data.procedural import distinct_entries
from compass_jax.rewards.checks import build, checks_of
from compass_jax.rewards.detect import notice
from compass_jax.rewards.score import Scorer
from compass_jax.rewards.tasks.rows import decode_row, encode_row

USERS = "benchmarks.slow_verifier:at_once"
Rows = list[tuple[Prompt, str]]


def processor_s(worker: int) -> float:
    """Returns the processor seconds of this process, and of a worker's processes with all their
    children that have ended.
    """
    children = Path(f"/proc/{worker}/task/{worker}/children").read_text().split()
    fields = [
        Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
        for pid in (str(worker), *children)
    ]
    ticks = sum(int(one[n]) for one in fields for n in (11, 12, 13, 14))
    return time.process_time() + ticks / os.sysconf("SC_CLK_TCK")


def _prompt(number: int, row: dict[str, Any]) -> Prompt:
    return Prompt(number, 0, "x", "q", np.zeros(1, np.int32), row["answer"], encode_row(row))


def procedural(source: ProceduralSource) -> Callable[[int], Rows]:
    """Returns a function that makes rows of a reasoning-gym source with its answers, every second
    one spoilt.
    """

    def rows(count: int) -> Rows:
        entries = distinct_entries(source, 0)
        picked = [entries[n % len(entries)] for n in range(count)]
        wrong = ["", " + 1"]
        answers = [
            f"<answer>{entry['answer']}{wrong[n % 2]}</answer>" for n, entry in enumerate(picked)
        ]
        prompts = [_prompt(n, entry) for n, entry in enumerate(picked)]
        return list(zip(prompts, answers, strict=True))

    return rows


def numbers(count: int) -> Rows:
    """Returns rows with whole numbers, half of them wrong, like most answers to mathematical
    questions.
    """
    return [(_prompt(n, {"answer": str(n)}), f"<answer>{n + n % 2}</answer>") for n in range(count)]


def algebra(count: int) -> Rows:
    """Returns rows with expressions that need math-verify, half of them wrong."""
    answer = "<answer>\\frac{{{}}}{{3}} + \\sqrt{{2}}</answer>"
    return [
        (
            _prompt(n, {"answer": f"\\frac{{{n}}}{{3}} + \\sqrt{{2}}"}),
            answer.format(2 * n + 2 * (n % 2)).replace("{3}", "{6}", 1),
        )
        for n in range(count)
    ]


SUMS = ProceduralSource("chain_sum", (("min_terms", 3), ("max_terms", 3)), size=400)
COUNTDOWN = ProceduralSource("countdown", size=200)
MATH = FileSource("unused.jsonl")
KINDS: dict[str, tuple[DataConfig, Callable[[int], Rows]]] = {
    "sums (the demo's)": (DataConfig(sources=(SUMS,)), procedural(SUMS)),
    "countdown": (DataConfig(sources=(COUNTDOWN,)), procedural(COUNTDOWN)),
    "math, numbers": (DataConfig(sources=(MATH,)), numbers),
    "math, algebra": (DataConfig(sources=(MATH,)), algebra),
    "a user's verifier": (DataConfig(sources=(replace(MATH, verifier=USERS),)), numbers),
}
IN_PLACE = ("sums (the demo's)", "countdown", "math, numbers")
CHEAP = 20


def through_scorer(data: DataConfig, rows: Rows, mode: str) -> tuple[float, float]:
    """Returns the seconds of wall clock and of processor that one check takes."""
    with Scorer(RewardConfig(workers=1, sandbox=mode), data) as scorer:
        scorer.wait_ready()
        worker = scorer._workers[0].process.pid
        before = processor_s(worker)
        start = time.perf_counter()
        for number, (prompt, response) in enumerate(rows):
            scorer.submit(number, prompt, response)
        while scorer.outstanding:
            assert all(score.known for _, score in scorer.collect(block=True))
        wall = time.perf_counter() - start
        return wall / len(rows), (processor_s(worker) - before) / len(rows)


def in_place(data: DataConfig, rows: Rows) -> float:
    """Returns the processor seconds of the verifier alone, called in this process."""
    check = build(checks_of(data)[0], "answer")
    start = time.process_time()
    for prompt, response in rows:
        check(decode_row(prompt.row), response)
    return (time.process_time() - start) / len(rows)


def main() -> None:
    """Runs the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--checks", type=int, default=400)
    parser.add_argument(
        "--demo-checks",
        type=int,
        default=30_000,
        help="answers that the demo scores: 48 steps of 512, two evaluations of 2,600",
    )
    parser.add_argument("--demo-s", type=float, default=780.0, help="seconds that the demo takes")
    options = parser.parse_args()
    print(notice("auto"))
    print(
        "| check | in place, ms of processor | off, ms | auto, ms | auto, wall ms | auto, checks a"
        " second and core |"
    )
    print("| --- | --- | --- | --- | --- | --- |")
    costs = {}
    for name, (data, make) in KINDS.items():
        rows = make(options.checks * (CHEAP if name in IN_PLACE else 1))
        alone = in_place(data, rows)
        _, off = through_scorer(data, rows, "off")
        wall, auto = through_scorer(data, rows, "auto")
        costs[name] = {
            "in_place_s": alone,
            "off_s": off,
            "auto_s": auto,
            "auto_wall_s": wall,
            "checks_per_s_per_core": 1 / auto,
        }
        print(
            f"| {name} | {1e3 * alone:.2f} | {1e3 * off:.2f} | {1e3 * auto:.2f} | {1e3 * wall:.2f}"
            f" | {1 / auto:.0f} |",
            flush=True,
        )
    demo = costs["sums (the demo's)"]["auto_s"] * options.demo_checks
    share = demo / options.demo_s
    print(
        f"the demo: {options.demo_checks:,} checks cost {demo:.1f} s of processor, {share:.2%} of"
        f" {options.demo_s:.0f} s"
    )
    print(
        json.dumps(
            {
                "checks": costs,
                "demo_checks": options.demo_checks,
                "demo_scoring_s": demo,
                "demo_share": share,
            }
        )
    )


if __name__ == "__main__":
    main()
